"""Batches of a size of their own for some streams."""

from __future__ import annotations

import pytest
import torch

from fedcc.core.requests import Fit, Recipe
from fedcc.core.samples import Samples
from fedcc.core.step import Loss, Step
from fedcc.engine.drive import signature
from fedcc.losses import CrossEntropy
from fedcc.methods import FedAvg
from steps import equal
from tiny import Tiny


class Look(Loss):
    """Notes the sizes that a loss sees."""

    def __init__(self) -> None:
        self.sizes: list[dict[str, tuple[int, int]]] = []

    def __call__(self, step: Step) -> torch.Tensor:
        self.sizes.append({name: (len(step[name].logits), len(step[name]["y"])) for name in ("private", "public")})
        return CrossEntropy("private")(step) + CrossEntropy("public")(step)


def request(loss: Loss, joint: bool = True, **recipe: object) -> tuple[Tiny, Fit]:
    tiny = Tiny(FedAvg())
    client = tiny.clients[0]
    public = tiny.public.with_(y=torch.zeros(24, dtype=torch.long))
    settings = Recipe(lr=1e-2, batch=8, epochs=2, **recipe)  # type: ignore[arg-type]
    return tiny, client.fit_request(
        "fit", client.model, loss, private=client.private, public=public, recipe=settings, joint=joint
    )


@pytest.mark.parametrize("joint", [True, False])
def test_each_stream_has_its_own_batch(joint: bool) -> None:
    look = Look()
    tiny, fit = request(look, joint, batches=(("public", 3),))
    assert fit.steps == 2 * 8
    tiny.executor.fit(fit)
    assert look.sizes == [{"private": (8, 8), "public": (3, 3)}] * 16


def test_the_pace_is_counted_in_the_streams_own_batches() -> None:
    assert request(Look(), batches=(("public", 3),), pace="private")[1].steps == 2 * 3
    assert request(Look(), batches=(("public", 24),), pace="public")[1].steps == 2 * 1
    assert request(Look())[1].steps == 2 * 3


def test_stating_the_common_size_changes_nothing_and_another_is_another_group() -> None:
    loss = CrossEntropy("private") + CrossEntropy("public")
    (tiny, plain), (_, stated), (_, other) = (
        request(loss, batches=b) for b in ((), (("public", 8),), (("public", 4),))
    )
    assert equal(tiny.executor.fit(plain).model.state, tiny.executor.fit(stated).model.state)
    assert signature(plain) == signature(stated) != signature(other)


def test_a_batch_holds_at_least_one_sample() -> None:
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        Recipe(batches=(("public", 0),))


def test_samples_by_index_and_by_mask() -> None:
    samples = Samples({"x": torch.arange(4.0), "y": torch.arange(4)})
    assert samples.at(torch.tensor([2, 0]))["y"].tolist() == [2, 0]
    assert samples.at(torch.tensor([True, False, False, True])).x.tolist() == [0.0, 3.0]
