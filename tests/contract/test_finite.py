"""A run whose numbers are not finite ends with an error that names client, phase and step, whatever the method."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import pytest
import torch
from test_engines import always, fits
from test_methods import QUICK
from torch import nn

import fedcc
from fedcc import Federation
from fedcc.core.method import AnyMethod, Trained
from fedcc.core.model import Arch, Model
from fedcc.core.requests import Fit, Init, Predict, Recalibrate, Recipe
from fedcc.core.rng import Key
from fedcc.core.samples import Samples
from fedcc.core.step import Loss, Step
from fedcc.engine import Plain
from fedcc.engine.fused import Fused
from fedcc.errors import error_line
from fedcc.evaluate.accuracy import evaluate
from fedcc.methods import METHODS, FedAvg, make
from steps import batches
from tiny import Mlp, Tiny

ENGINES: list[Any] = [partial(Plain, "cpu", "fp64"), partial(Fused, "cpu", "fp64")]
both = pytest.mark.parametrize("engine", ENGINES, ids=["plain", "fused"])


@cache
def digits() -> Federation:
    return Federation.named("digits", "classes:4", clients=3, models="resnet8", fraction=0.2)


class NoRound(fedcc.Observer):
    def round(self, done: fedcc.FinishedRound) -> None:
        pytest.fail("no round is finished")


@pytest.mark.parametrize("engine", ["plain", "fused"])
@pytest.mark.parametrize("name", METHODS)
def test_a_learning_rate_that_ruins_the_weights(name: str, engine: str) -> None:
    """After the one and only step of every client, whose loss is finite."""
    settings: dict[str, Any] = {"batch": 512, "lr": 1e38, "engine": engine, "precision": "fp32", "device": "cpu"}
    with pytest.raises(FloatingPointError) as caught:
        fedcc.run(make(name, QUICK.get(name)), digits(), 1, epochs=1, observers=[NoRound()], **settings)
    who = "server" if name == "centralized" else "client 0"
    assert f"({who}, round 1, 'fit')" in error_line(caught.value)
    assert "after step 1 of 1 with lr 1e+38" in error_line(caught.value)


class Poison(Loss):
    """The mean logit; without a number in the first batch that holds the sample that columns say."""

    def __call__(self, step: Step) -> torch.Tensor:
        batch = step["private"]
        return batch.logits.mean() + (batch["bad"] * math.inf).nan_to_num(0.0, posinf=math.inf).sum()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Poison)

    def __hash__(self) -> int:
        return 1


def poisoned(client: int, **recipe: Any) -> list[Fit]:
    """Four clients, of whose samples this client's last is bad; every epoch is four steps."""
    requests = fits(loss=always(Poison()), recipe=always(Recipe(**{"batch": 2, "epochs": 2} | recipe)))
    made = []
    for k, fit in enumerate(requests):
        private = fit.streams["private"].at(torch.arange(8) % len(fit.streams["private"]))
        bad = torch.zeros(8, dtype=torch.float64)
        bad[-1] = k == client
        made.append(Fit(**{**vars(fit), "streams": {"private": private.with_(bad=bad)}}))
    return made


@both
@pytest.mark.parametrize("client", [0, 2])
def test_the_step_is_the_first_whose_loss_is_not_finite(engine: Any, client: int) -> None:
    requests = poisoned(client)
    plan = batches(requests[client].key.of(stream="private"), 8, 2, 8)
    step = 1 + int((plan == 7).any(1).nonzero()[0])
    message = rf"the loss is not finite .* at step {step} of 8 with lr 0\.001"
    with pytest.raises(FloatingPointError, match=message) as caught:
        engine().serve(requests)
    assert caught.value.__notes__ == [f"client {client}, round 1, 'fit'"]


def test_a_client_in_the_seat_of_a_bad_one_is_not_blamed() -> None:
    fused = Fused("cpu", "fp64", lanes=2)
    with pytest.raises(FloatingPointError, match="not finite") as caught:
        fused.serve(poisoned(0))
    assert caught.value.__notes__ == ["client 0, round 1, 'fit'"]
    assert all(math.isfinite(fitted.loss) for fitted in fused.serve(poisoned(-1)))


@both
@pytest.mark.parametrize("lr", [1e200, 1e160])
def test_weights_that_overflow_after_the_last_step(engine: Any, lr: float) -> None:
    requests = fits(recipe=lambda k: Recipe(lr=lr if k == 2 else 1e-3, batch=6, steps=1))
    with pytest.raises(FloatingPointError, match=r"weights .* after step 1 of 1 with lr 1e\+\d+") as caught:
        engine().serve(requests)
    assert caught.value.__notes__ == ["client 2, round 1, 'fit'"]


class Masked(nn.Module):
    """A network that brings infinities of its own."""

    def __init__(self, outputs: int):
        super().__init__()
        self.head = nn.Linear(64, outputs)
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x.flatten(1))
        return out


@both
def test_a_mask_of_infinities_is_no_error(engine: Any) -> None:
    arch = Arch((Masked,), 5, (1, 8, 8))
    served = engine().serve(fits(model=lambda k: Plain("cpu", "fp64").init(Init(arch, Key(0, 0, k)))))
    assert all(fitted.model.state["trunks.0.mask"].isinf().any() for fitted in served)


# -- predictions


def broken(model: Model, name: str = "head.bias") -> Model:
    return model.with_({name: torch.full_like(model.state[name], math.nan)})


@both
def test_predictions_that_are_not_finite_name_who_asked(engine: Any) -> None:
    tiny = Tiny(FedAvg(), labels=((0, 1),) * 3)
    tiny.clients[1].model = broken(tiny.clients[1].model)
    requests = [client.predict(tiny.public) for client in tiny.clients]
    with pytest.raises(FloatingPointError, match="the predictions are not finite on 24 of 24 samples") as caught:
        engine().serve(requests)
    assert caught.value.__notes__ == ["client 1, round 0, 'predict'"]
    engine().serve([requests[0], requests[2]])


@both
def test_an_evaluation_names_the_model(engine: Any) -> None:
    tiny = Tiny(FedAvg()).run(1)
    fine, bad = tiny.server.models["global"], broken(tiny.clients[2].model)
    for trained, who in (
        (Trained(3, {0: fine, 2: bad}, {"global": fine}), "client 2, 'evaluate'"),
        (Trained(3, {0: fine}, {"global": broken(fine)}), "the server's model 'global', 'evaluate'"),
    ):
        counts = {k: torch.ones(3, dtype=torch.long) for k in trained.clients}
        with pytest.raises(FloatingPointError, match="predictions are not finite") as caught:
            evaluate(FedAvg(), trained, tiny.test, engine(), counts=counts)
        assert caught.value.__notes__ == [who]


@both
def test_statistics_that_are_not_finite(engine: Any) -> None:
    model = engine().serve([Init(Arch((Mlp(),), 3, (6,)), Key(0))])[0]
    huge = Samples({"x": torch.full((4, 6), 1e200, dtype=torch.float64) * torch.arange(4)[:, None]})
    with pytest.raises(FloatingPointError, match="BatchNorm's statistics are not finite") as caught:
        engine().serve([Recalibrate(model, huge, Key(0, 2, 1, "recalibrate"))])
    assert caught.value.__notes__ == ["client 1, round 2, 'recalibrate'"]


# -- the server


class Ruinous(FedAvg):
    """The server makes infinities out of what is finite."""

    async def server(self, s: Any, ups: Any) -> Any:
        downs = await super().server(s, ups)
        s.models["global"] = broken(s.models["global"])
        return downs


class Asking(FedAvg):
    """The server asks a model for predictions that are not finite."""

    async def server(self, s: Any, ups: Any) -> Any:
        await Predict(broken(s.models["global"]), s.public)
        return await super().server(s, ups)


@pytest.mark.parametrize(
    ("method", "message"),
    [(Ruinous(), r"the server's model 'global' .* \(head\.bias\)"), (Asking(), "the predictions are not finite")],
)
def test_the_server_is_named(method: AnyMethod, message: str) -> None:
    with pytest.raises(FloatingPointError, match=message) as caught:
        Tiny(method).run(1)
    assert caught.value.__notes__ == ["server, round 1"]
