"""The examples do what they say."""

from __future__ import annotations

import pytest
import torch

import fedcc
from scripts import loaded


@pytest.mark.parametrize("method", [fedcc.FedCC(), fedcc.FedMD()], ids=lambda m: m.name)
def test_frozen_backbones_stay_what_they_were_and_heads_learn(method: fedcc.Method) -> None:
    """Three architectures, a head per client: what was frozen is the same at every client after training."""
    example = loaded("examples/frozen_backbone.py")
    split = {"skew": "classes:4", "clients": 3, "fraction": 0.1, "models": example.BACKBONES}
    result = fedcc.run(method, fedcc.Federation.named("digits", **split), rounds=2, epochs=1, device="cpu")
    for client, factory in enumerate(example.BACKBONES):
        fresh = {n: v for n, v in factory(10).state_dict().items() if n.startswith("0.")}
        state = result.trained.clients[client].state
        kept = {n.removeprefix("trunks.0."): v for n, v in state.items() if n.startswith("trunks.0.0.")}
        assert fresh.keys() == kept.keys()
        assert all(torch.equal(fresh[name], kept[name]) for name in fresh)
        first = fedcc.run(method, fedcc.Federation.named("digits", **split), rounds=1, epochs=0, device="cpu")
        assert not torch.equal(state["head.weight"], first.trained.clients[client].state["head.weight"])
