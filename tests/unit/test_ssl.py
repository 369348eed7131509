"""Plain self-training: Eq. (3) and its relations to FedCC and local training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedcc.core.requests import Recipe
from fedcc.core.roles import Client
from fedcc.losses import CrossEntropy
from fedcc.methods import SSL, FedCC
from fedcc.methods.ssl import hard_labels
from recording import record, same
from tiny import Tiny

LABELS = [[0, 1] * 10, [2] * 13]


@dataclass(frozen=True)
class Supervised(SSL):
    """Two phases of supervised training with SSL's phase names."""

    async def client(self, c: Client, down: None) -> None:
        await c.fit("fit", CrossEntropy("private"), private=c.private)
        await c.fit("refine", CrossEntropy("private"), private=c.private)


def states(tiny: Tiny) -> list[Any]:
    return [c.model.state for c in tiny.clients]


def test_without_the_public_loss_it_is_continued_supervised_training() -> None:
    """To the bit, running statistics included, if the public batch is not forwarded."""
    method = SSL(lam=0.0, refine_joint_batch=False)
    few = 8  # public samples, so that an epoch is that of the private ones
    a, b = (states(Tiny(m, labels=LABELS, publics=few).run(2)) for m in (method, Supervised()))
    assert all(same(x, y) for x, y in zip(a, b, strict=True))
    other = states(Tiny(SSL(lam=0.1, refine_joint_batch=False), labels=LABELS, publics=few).run(2))
    assert not any(same(x, y) for x, y in zip(a, other, strict=True))


def test_a_client_of_one_class_labels_everything_with_it() -> None:
    tiny = Tiny(SSL(), labels=[[1] * 16], recipe=Recipe(lr=5e-2, batch=8, epochs=30))
    asked = record(tiny)
    tiny.run(1)
    labels = asked.fits("refine")[0].streams["public"]["target"]
    assert torch.equal(labels, F.one_hot(torch.ones(24, dtype=torch.long), 3).double())


def test_labels_are_those_of_the_fit_and_constant_within_a_cycle() -> None:
    tiny = Tiny(SSL(), labels=LABELS)
    asked = record(tiny)
    tiny.run(2)
    for t in (1, 2):
        (fit,), (refine,) = asked.fitted("fit", 0, t), asked.fits("refine", 0, t)
        assert refine.model is fit[1].model
        logits = tiny.ask(_logits(tiny, fit[1].model))
        assert torch.equal(refine.streams["public"]["target"], hard_labels(logits))
    assert [f.key.phase for f in asked.fits(client=0)] == ["fit", "refine"] * 2


async def _logits(tiny: Tiny, model: Any) -> Tensor:
    client = tiny.clients[0]
    client.model = model
    return (await client.predict(tiny.public)).logits


@dataclass(frozen=True)
class Certain(FedCC):
    """FedCC with alpha = 1, every class a majority class, and no "unknown" output."""

    def outputs(self, classes: int) -> int:
        return classes

    def pseudo_labels(self, c: Client, bias: Tensor, logits: Tensor) -> Tensor:
        return F.one_hot(logits.argmax(-1), c.classes).to(logits.dtype)


@pytest.mark.parametrize("joint", [True, False])
def test_it_is_fedcc_without_unknown_and_without_doubt(joint: bool) -> None:
    """Phases two and three of FedCC, to the bit."""
    settings: dict[str, Any] = {"lam": 0.3, "refine_joint_batch": joint}
    a, b = (states(Tiny(m(**settings), labels=LABELS).run(1)) for m in (SSL, Certain))
    assert all(same(x, y) for x, y in zip(a, b, strict=True))


# -- threshold


def test_hard_labels() -> None:
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.1, 0.0]])  # probabilities 0.787 and 0.356 of the best class
    assert hard_labels(logits).tolist() == [[1, 0, 0], [0, 1, 0]]
    assert hard_labels(logits, 0.5).tolist() == [[1, 0, 0], [0, 0, 0]]
    assert hard_labels(logits, 0.9).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert hard_labels(torch.tensor([[2.0, 0.0], [0.1, 0.0]]), 0.6).tolist() == [[1, 0], [0, 0]]  # by sample
    assert hard_labels(torch.zeros(1, 2), 0.5).tolist() == [[1, 0]]  # exactly as probable


@pytest.mark.parametrize(("threshold", "share"), [(0.0, 1.0), (1.0, 0.0)])
def test_the_threshold_reaches_the_fit(threshold: float, share: float) -> None:
    tiny = Tiny(SSL(threshold=threshold), labels=[[0, 1, 2] * 4])
    asked = record(tiny)
    tiny.run(1)
    assert float(asked.fits("refine")[0].streams["public"]["target"].sum()) == 24 * share


# -- lengths, sharing, prediction


def test_an_epoch_is_that_of_the_longer_stream() -> None:
    tiny = Tiny(SSL(), labels=[[0, 1] * 6])
    asked = record(tiny)
    tiny.run(1)
    assert asked.fitted("refine")[0][1].steps == 6  # 24 public samples in batches of 8, twice


def test_nothing_is_shared_and_each_predicts_alone() -> None:
    tiny = Tiny(SSL(), labels=LABELS).run(2)
    assert all(
        (r.bytes_up, r.bytes_down, r.ups, r.downs) == (0, 0, {0: None, 1: None}, {0: None, 1: None})
        for r in tiny.rounds
    )
    assert tiny.scores().shape == (2, 24, 3)
    alone = Tiny(SSL(), labels=LABELS[:1]).run(2)
    assert same(alone.clients[0].model.state, tiny.clients[0].model.state)
