"""Readings: the same trained models, read in other ways. What they are, what they cost, that they change nothing."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedcc
from fedcc.core.method import AnyMethod, Reading, Trained
from fedcc.core.model import Arch, Factory, Model, Outputs
from fedcc.core.requests import Init, Predict
from fedcc.core.rng import Key
from fedcc.core.samples import Samples, View
from fedcc.engine import Plain, drive
from fedcc.evaluate import evaluate
from fedcc.evaluate.accuracy import ensembles, percent
from fedcc.evaluate.predictions import PredictionCache
from fedcc.experiments.record import readings
from fedcc.experiments.run import check_method
from fedcc.methods import METHODS, FedAvg, FedCC, FedDF, FedET, FedHKT, FedMD, Local
from fedcc.methods.abstention import aggregate
from recording import Recording, same
from tiny import Mlp, Tiny

CLIENTS = 3
NAMES = ["trust=2", "trust=4", "mirror", "mirror,trust=4"]


def lopsided(outputs: int) -> nn.Module:
    """Tells an image from its mirror image."""
    return nn.Sequential(nn.Flatten(), nn.Linear(2 * 4 * 4, 8), nn.ReLU(), nn.Linear(8, outputs))


def normed(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(2 * 4 * 4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs))


def group_normed(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(2 * 4 * 4, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, outputs))


def images(number: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (number, 2, 4, 4), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.fixture
def engine() -> Plain:
    return Plain("cpu", "fp64")


@pytest.fixture
def trained(engine: Plain) -> Trained:
    arch = Arch((lopsided,), 4, (2, 4, 4))
    return Trained(3, {k: engine.serve([Init(arch, Key(0, 0, k, "init"))])[0] for k in range(CLIENTS)})


@pytest.fixture
def shown() -> Samples:
    return Samples({"x": images(200), "y": torch.arange(200) % 3}, View(scale=1 / 16))


def scores(reading: Reading, trained: Trained, samples: Samples, engine: Any) -> Tensor:
    found: Tensor = drive([reading(trained, samples)], engine)[0]
    return found


# -- which there are


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, NAMES),
        ({"trust": 0.0}, NAMES),
        ({"trust": 2.0}, ["trust=4", "mirror", "mirror,trust=4"]),
        ({"trust": 4.0}, ["trust=2", "mirror"]),  # with its own exponent, which is 4
        ({"mirror": True}, ["trust=2", "trust=4"]),
        ({"mirror": True, "trust": 4.0}, ["trust=2"]),
    ],
)
def test_a_reading_is_another_one_than_the_methods_own(settings: dict[str, Any], names: list[str]) -> None:
    assert list(FedCC(**settings).readings(Samples({"x": images(2)}))) == names


@pytest.mark.parametrize("x", [torch.zeros(2, 6), torch.zeros(2, 3, 8), torch.zeros(2, 1, 8, 1)])
def test_what_is_no_image_has_no_mirror_reading(x: Tensor) -> None:
    assert list(FedCC().readings(Samples({"x": x}))) == NAMES[:2]


def test_most_methods_have_none() -> None:
    public = Samples({"x": images(2)})
    found = {name: list(method().readings(public)) for name, method in METHODS.items()}
    assert found.pop("fedcc") == NAMES
    averaged = {name for name, names in found.items() if names == ["re-estimated"]}
    averaging = {"fedavg", "fedprox", "fednova", "fedrs", "fedsam", "fedlc", "fedmr", "fedvls"}
    assert averaged == averaging | {"fedntd", "moon", "scaffold"}
    assert {found.pop(name)[0] for name in ("feddf", "fedet", "fedhkt", "dsfl", "scarlet", "fedaux")} == {
        "clients-mean"
    }
    assert found.pop("fedmd") == ["mean-logits"]
    assert found.pop("fedov") == ["voters=1", "voters=2"]
    assert found.pop("fedproto") == ["prototype"]
    assert not any(names for name, names in found.items() if name not in averaged)


def test_every_method_but_fedcc_is_read_with_mirror_images_after_the_last_round() -> None:
    shown, rows = Samples({"x": images(2)}), Samples({"x": torch.zeros(2, 6)})
    assert {name: list(method().last_readings(shown)) for name, method in METHODS.items()} == {
        name: [] if name == "fedcc" else ["mirror"] for name in METHODS
    }
    assert not any(method().last_readings(rows) for method in METHODS.values())


# -- what they are


@pytest.mark.parametrize("name", NAMES)
def test_a_reading_is_the_run_with_that_setting_at_inference(
    name: str, trained: Trained, shown: Samples, engine: Plain
) -> None:
    settings: dict[str, dict[str, Any]] = {
        "trust=2": {"trust": 2.0},
        "trust=4": {"trust": 4.0},
        "mirror": {"mirror": True},
        "mirror,trust=4": {"mirror": True, "trust": 4.0},
    }
    reading, other = FedCC().readings(shown)[name], FedCC(**settings[name])
    found = scores(reading, trained, shown, engine)
    assert torch.equal(found, scores(other.predict, trained, shown, engine))
    assert not torch.equal(found, scores(FedCC().predict, trained, shown, engine))
    whole = evaluate(FedCC(), trained, shown, engine, readings=FedCC().readings(shown))
    assert list(whole.readings) == NAMES
    assert whole.readings[name] == evaluate(other, trained, shown, engine).accuracy


def test_mirror_is_the_mean_of_each_clients_probabilities(trained: Trained, shown: Samples, engine: Plain) -> None:
    def votes(samples: Samples) -> Tensor:
        return torch.stack(
            [engine.serve([Predict(m, samples)])[0].logits.softmax(-1) for m in trained.clients.values()]
        )

    other = Samples({"x": shown.x[:, :, :, [3, 2, 1, 0]]}, shown.view)
    mean = (votes(shown) + votes(other)) / 2
    for trust in (1.0, 4.0):
        found = scores(FedCC(mirror=True, trust=trust).predict, trained, shown, engine)
        torch.testing.assert_close(found, aggregate(mean, trust)[:, :3])


def test_mirror_changes_nothing_where_images_are_symmetric(trained: Trained, engine: Plain) -> None:
    half = images(50)[..., :2]
    symmetric = Samples({"x": torch.cat([half, half.flip(-1)], -1)}, View(scale=1 / 16))
    assert torch.equal(*(scores(FedCC(mirror=m).predict, trained, symmetric, engine) for m in (False, True)))


class NoRound(fedcc.Observer):
    def round(self, done: fedcc.FinishedRound) -> None:
        pytest.fail("something was trained")


def test_mirror_refuses_what_is_no_image_before_anything_is_trained() -> None:
    x, y = torch.randn(60, 6), torch.arange(60) % 3
    rows = fedcc.Federation.of([(x[k::3], y[k::3]) for k in range(3)], x[:30], (x, y), Mlp())
    with pytest.raises(ValueError, match=r"mirror is for images .* of two or more columns, got inputs of shape \[6\]"):
        fedcc.run(FedCC(mirror=True), rows, 1, device="cpu", observers=[NoRound()])
    with pytest.raises(ValueError, match="mirror is for images"):
        check_method(FedCC(mirror=True), rows)
    check_method(FedCC(), rows)
    check_method(FedCC(mirror=True), federation())


# -- what they cost, and that nothing else changes


def test_exponents_cost_no_prediction_and_mirrors_one_each_client(
    trained: Trained, shown: Samples, engine: Plain
) -> None:
    def predictions(names: list[str]) -> int:
        asked, every = Recording(engine), FedCC().readings(shown)
        evaluate(FedCC(), trained, shown, asked, readings={name: every[name] for name in names})
        return sum(isinstance(r, Predict) for group in asked.groups for r in group)

    assert predictions([]) == CLIENTS
    assert predictions(["trust=2", "trust=4"]) == CLIENTS
    assert predictions(["mirror"]) == predictions(["mirror", "mirror,trust=4"]) == predictions(NAMES) == 2 * CLIENTS


def test_what_is_cached_is_not_mistaken_for_another_model(engine: Plain) -> None:
    """Answers are known by the models' addresses, which Python gives away again once a model is gone."""
    (model,) = engine.serve([Init(Arch((Mlp(),), 3, (6,)), Key(0))])
    cache, gone = PredictionCache(engine), weakref.ref(model)
    cache.serve([Predict(model, Samples({"x": torch.zeros(2, 6)}))])
    del model
    assert gone() is not None


def federation(network: Factory = lopsided) -> fedcc.Federation:
    x, y = images(60, 1), torch.arange(60) % 3
    clients = [(x[k::3], y[k::3]) for k in range(3)]  # one class each
    return fedcc.Federation.of(clients, images(30, 2), (images(99, 3), torch.arange(99) % 3), network)


@pytest.mark.parametrize("kind", [FedCC, FedAvg])
def test_training_and_accuracy_are_the_same_without_readings(kind: Any) -> None:
    class Bare(kind):  # type: ignore[misc]
        def readings(self, public: Samples) -> dict[str, Reading]:
            return {}

        last_readings = readings

    read, bare = (fedcc.run(m, federation(normed), 3, epochs=1, device="cpu") for m in (kind(), Bare()))
    for part in ("clients", "server"):
        models = getattr(read.trained, part), getattr(bare.trained, part)
        assert all(same(models[0][k].state, models[1][k].state) for k in models[1])
    for a, b in zip(read.rounds, bare.rounds, strict=True):
        assert a.keys() == b.keys()
        assert {**a, "seconds": {}, "readings": {}} == {**b, "seconds": {}}
        last = ["mirror"] if a["round"] == 3 else []
        assert list(a["readings"]) == (NAMES if kind is FedCC else ["re-estimated", *last])


def test_the_mirror_reading_is_a_run_with_mirror() -> None:
    """Mirror images have no part in training and in what is shared, so a whole run has the reading's numbers."""
    plain, mirrored = (fedcc.run(FedCC(mirror=m), federation(), 3, epochs=1, device="cpu") for m in (False, True))
    assert [r["readings"]["mirror"] for r in plain.rounds] == [r["accuracy"] for r in mirrored.rounds]
    assert [r["accuracy"] for r in plain.rounds] != [r["accuracy"] for r in mirrored.rounds]
    for k, model in plain.trained.clients.items():
        assert same(model.state, mirrored.trained.clients[k].state)
    assert [r["bytes"] for r in plain.rounds] == [r["bytes"] for r in mirrored.rounds]


def test_a_summary_holds_a_curve_of_each() -> None:
    rounds: list[Any] = [
        {"round": 1},  # of an earlier version
        {"round": 2, "readings": {"mirror": 50.0}},
        {"round": 3, "readings": {}},  # not evaluated
        {"round": 4, "readings": {"mirror": 50.0, "trust=2": 40.0}},
    ]
    assert readings(rounds) == {
        "readings": {
            "mirror": {"final": 50.0, "best": 50.0, "best_round": 2, "rounds": [None, 50.0, None, 50.0]},
            "trust=2": {"final": 40.0, "best": 40.0, "best_round": 4, "rounds": [None, None, None, 40.0]},
        }
    }
    assert readings(rounds[:1]) == {}


# -- averaged models


@pytest.mark.parametrize("name", ["fedavg", "fednova"])
def test_an_averaged_model_is_read_with_statistics_of_the_public_samples(name: str) -> None:
    tiny = Tiny(METHODS[name]()).run(2)
    trained = tiny.cohort.trained_models(tiny.server)
    before = {n: dict(m.state) for n, m in tiny.server.models.items()}
    found = evaluate(tiny.method, trained, tiny.test, tiny.executor, readings=tiny.method.readings(tiny.public))
    assert found.accuracy == percent(tiny.scores().argmax(-1) == tiny.test["y"])
    assert replace(found, readings={}) == evaluate(tiny.method, trained, tiny.test, tiny.executor)
    assert all(same(before[n], m.state) for n, m in tiny.server.models.items())
    state = {n: v.float() for n, v in trained.server["global"].state.items() if n.startswith("trunks")}
    entering = tiny.public.x @ state["trunks.0.0.weight"].T
    x = (tiny.test.x @ state["trunks.0.0.weight"].T - entering.mean(0)) / (entering.var(0) + 1e-5).sqrt()
    features = (x * state["trunks.0.1.weight"] + state["trunks.0.1.bias"]).relu()
    head = (trained.server["global"].state[f"head.{n}"].float() for n in ("weight", "bias"))
    answers = nn.functional.linear(features, *head).argmax(-1)
    assert found.readings == {"re-estimated": percent(answers == tiny.test["y"])}


@pytest.mark.parametrize(("network", "names"), [(normed, ["re-estimated"]), (lopsided, []), (group_normed, [])])
def test_what_has_no_statistics_is_not_read_with_others(network: Factory, names: list[str]) -> None:
    """The number would be the method's own, under a name that says otherwise."""
    result = fedcc.run(FedAvg(), federation(network), 2, epochs=1, device="cpu")
    assert [list(r["readings"]) for r in result.rounds] == [names, [*names, "mirror"]]
    assert list(readings(result.rounds)["readings"]) == [*names, "mirror"]


# -- mirror images and ensembles, for every method


class Fixed:
    """An engine that knows the logits of each model on some samples and on their mirror images."""

    def __init__(self, shown: Samples, logits: list[tuple[Tensor, Tensor]]):
        self.shown, self.models = shown, [Model(Arch((lopsided,), 3, (2, 4, 4)), {}) for _ in logits]
        self.logits = {id(model): both for model, both in zip(self.models, logits, strict=True)}

    def serve(self, requests: Sequence[Any]) -> list[Any]:
        plain = [torch.equal(r.samples.x, self.shown.x) for r in requests]
        return [
            Outputs(found := self.logits[id(r.model)][0 if own else 1], found)
            for r, own in zip(requests, plain, strict=True)
        ]


def test_mirror_is_the_mean_probability_of_both_images() -> None:
    shown = Samples({"x": images(4), "y": torch.arange(4) % 3})
    plain, turned = torch.randn(4, 3), 3 * torch.randn(4, 3)
    engine = Fixed(shown, [(plain, turned)])
    trained = Trained(3, {}, {"global": engine.models[0]})
    expected = (plain.softmax(-1) + turned.softmax(-1)) / 2
    torch.testing.assert_close(scores(FedAvg().last_readings(shown)["mirror"], trained, shown, engine), expected)
    ensemble = Trained(3, {0: engine.models[0]})  # FedMD gives probabilities, which pass no softmax again
    torch.testing.assert_close(scores(FedMD().last_readings(shown)["mirror"], ensemble, shown, engine), expected)


class Votes(FedAvg):
    """A user's method whose scores are whole numbers."""

    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        return (await super().predict(t, samples)).long()


class Shares(Votes):
    scores = "shares"


@pytest.mark.parametrize(
    ("method", "expected"),
    [(Votes, [0.7099558, 0.1630684, 0.1269758]), (Shares, [0.625, 0.25, 0.125])],
)
def test_mirror_reads_scores_that_are_whole_numbers(method: type[FedAvg], expected: list[float]) -> None:
    """Scores 2, 1, 1 and 3, 1, 0: softmax (e, 1, 1) / (e + 2) or shares 2/4, ...; by hand."""
    shown = Samples({"x": images(1), "y": torch.tensor([0])})
    engine = Fixed(shown, [(torch.tensor([[2.0, 1.0, 1.0]]), torch.tensor([[3.0, 1.0, 0.0]]))])
    trained = Trained(3, {}, {"global": engine.models[0]})
    found = scores(method().last_readings(shown)["mirror"], trained, shown, engine)
    assert found.tolist() == [pytest.approx(expected, abs=1e-6)]


@pytest.mark.parametrize("method", [FedDF, FedET, FedHKT])
def test_the_clients_are_read_by_their_mean_probability(method: type[AnyMethod]) -> None:
    shown = Samples({"x": images(4), "y": torch.arange(4) % 3})
    given = [torch.randn(4, 3) for _ in range(CLIENTS)]
    engine = Fixed(shown, [(one, one) for one in given])
    trained, reading = Trained(3, dict(enumerate(engine.models))), method().readings(shown)["clients-mean"]
    torch.testing.assert_close(scores(reading, trained, shown, engine), torch.stack(given).softmax(-1).mean(0))
    assert drive([reading(Trained(3), shown)], engine) == [None]  # a server that has no client's model


def test_models_that_were_trained_alone_are_read_as_ensembles() -> None:
    """Two clients: the first surely says 0, the second leans to 1; only the second has samples of class 1."""
    shown = Samples({"x": images(1), "y": torch.tensor([1])})
    given = torch.tensor([[[9.0, 5.0, 0.0]], [[0.0, 3.0, 0.0]]])
    engine = Fixed(shown, [(one, one) for one in given])
    trained = Trained(3, dict(enumerate(engine.models)))
    counts = {0: torch.tensor([9, 0, 1]), 1: torch.tensor([1, 10, 9])}
    found = evaluate(Local(), trained, shown, engine, counts=counts, readings={})
    assert found.accuracy == 50.0
    assert found.readings == {"mean-logits": 0.0, "mean-probs": 0.0, "by-entropy": 0.0, "by-counts": 100.0}
    assert list(evaluate(Local(), trained, shown, engine, readings={}).readings) == [
        "mean-logits", "mean-probs", "by-entropy",
    ]  # fmt: skip
    q = given.softmax(-1)
    shares = torch.tensor([[0.9, 0.0, 0.1], [0.1, 1.0, 0.9]])
    made = ensembles(given, torch.stack(list(counts.values())))
    torch.testing.assert_close(made["by-counts"], (q * shares[:, None]).sum(0))
    sure = 1 + (q * q.log()).sum(-1, keepdim=True) / math.log(3)
    torch.testing.assert_close(made["by-entropy"], (sure * q).sum(0) / sure.sum(0))


def test_a_reading_of_the_last_round_has_a_curve_with_gaps() -> None:
    rounds = [{"round": 1, "readings": {}}, {"round": 2, "readings": {"mirror": 40.0}}]
    assert readings(rounds) == {
        "readings": {"mirror": {"final": 40.0, "best": 40.0, "best_round": 2, "rounds": [None, 40.0]}}
    }
