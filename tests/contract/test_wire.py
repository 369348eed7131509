"""What crosses the wire at the paper's sizes: docs/deviations.md, "Bytes", from shapes alone, without training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedcc.core.messages import Weights, nbytes
from fedcc.core.model import Arch, Model
from fedcc.core.requests import Recipe
from fedcc.core.rng import Key
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.federate import RoundMessages, Simulated, federate
from fedcc.flower.dry_run import ShapeEngine
from fedcc.methods import METHODS, make
from fedcc.nets import build, network

SETS = {"cifar10": (10, 5_000, 32), "cifar100": (100, 5_000, 32), "tiny": (200, 10_000, 64)}
"""Classes, public samples and side of an image."""

RESNET20 = {"cifar10": 1.08, "cifar100": 1.11, "tiny": 1.13}
RESNET14 = {"cifar10": 0.69, "cifar100": 0.72, "tiny": 0.74}
KNOWN = {"cifar10": 0.20, "cifar100": 2.00, "tiny": 8.00}
UNKNOWN_TOO = {"cifar10": 0.22, "cifar100": 2.02, "tiny": 8.04}
"""MB of weights and of soft labels, as the table has them (ResNet14: 172,506 to 184,856 weights, 960 statistics)."""

WEIGHTS = ["fedavg", "fedprox", "fednova", "fedrs", "fedsam", "fedlc", "fedmr", "fedvls", "fedntd", "moon"]
every_set = pytest.mark.parametrize("data", SETS)


def exchanged(name: str, data: str, **settings: Any) -> list[RoundMessages]:
    """Two rounds of two clients: ResNet20 for both where weights are averaged, else ResNet14 and ResNet20."""
    classes, publics, side = SETS[data]
    method, shape = make(name, settings), (3, side, side)
    public = Samples({"x": torch.zeros((), dtype=torch.uint8).expand(publics, *shape)})
    names = ["resnet20", "resnet20"] if method.family == "parameters" else ["resnet14", "resnet20"]
    archs = {k: Arch((network(n, shape),), method.outputs(classes), shape) for k, n in enumerate(names)}
    roles: dict[str, Any] = {"public": public, "classes": classes, "recipe": Recipe(), "archs": archs}
    private = Samples({"x": torch.zeros(4, *shape, dtype=torch.uint8), "y": torch.tensor([0, 1, 2, 3])})
    clients = [Client(**roles, key=Key(0, 0, k), id=k, arch=archs[k], private=private) for k in archs]
    server, engine = Server(**roles, key=Key(0)), ShapeEngine()
    return list(federate(method, server, Simulated(method, clients, engine), 2, engine))


def megabytes(message: Any) -> float:
    return round(nbytes(message) / 1e6, 2)


@every_set
def test_weights_of_the_two_networks(data: str) -> None:
    classes, _, side = SETS[data]
    for name, expected in (("resnet20", RESNET20), ("resnet14", RESNET14)):
        arch = Arch((network(name, (3, side, side)),), classes, (3, side, side))
        assert megabytes(Weights.of(Model(arch, build(arch, Key(0)).state_dict()))) == expected[data]


@every_set
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_go_up_and_down(name: str, data: str) -> None:
    first, second = exchanged(name, data)
    for done in (first, second):
        assert [megabytes(m) for m in (*done.ups.values(), *done.downs.values())] == [RESNET20[data]] * 4
        assert done.bytes_up == done.bytes_down == 2 * nbytes(done.ups[0])


@every_set
@pytest.mark.parametrize("name", ["feddf", "fedet", "fedhkt"])
def test_weights_of_the_own_network_go_up_and_down(name: str, data: str) -> None:
    _, done = exchanged(name, data)
    for messages in (done.ups, done.downs):
        assert [megabytes(m) for m in messages.values()] == [RESNET14[data], RESNET20[data]]


@every_set
@pytest.mark.parametrize("name", ["fedmd", "lsr", "fedcc", "dsfl", "comet"])
def test_predictions_go_up_and_down(name: str, data: str) -> None:
    first, second = exchanged(name, data)
    up = (UNKNOWN_TOO if name == "fedcc" else KNOWN)[data]
    for done in (first, second):
        assert [megabytes(m) for m in done.ups.values()] == [up] * 2
        assert [megabytes(m) for m in done.downs.values()] == [KNOWN[data]] * 2
    assert first.bytes_down == 0
    assert round(second.bytes_down / 2e6, 2) == KNOWN[data]


@every_set
def test_fedct_sends_a_byte_for_a_sample(data: str) -> None:
    publics = SETS[data][1]
    first, second = exchanged("fedct", data)
    assert (first.bytes_up, first.bytes_down) == (2 * publics, 0)
    assert (second.bytes_up, second.bytes_down) == (2 * publics, 2 * publics)


@every_set
def test_fedmr_in_the_papers_mode_adds_prototypes(data: str) -> None:
    classes = SETS[data][0]
    plain, more = exchanged("fedmr", data), exchanged("fedmr", data, mode="paper")
    extra = classes * 64 * 4 + classes * 4  # means and counts
    assert [b.bytes_up - a.bytes_up for a, b in zip(plain, more, strict=True)] == [2 * extra] * 2
    assert [b.bytes_down - a.bytes_down for a, b in zip(plain, more, strict=True)] == [0, 2 * extra]


@every_set
def test_fedconcat_sends_a_histogram_once_then_encoders_once_then_heads(data: str) -> None:
    classes = SETS[data][0]
    first, second, third, last = exchanged("fedconcat", data, clusters=2, classifier_rounds=2)
    trunks = len(second.downs[0].head["head.weight"][0]) // 64
    head = 4 * (64 * trunks * classes + classes)
    assert first.bytes_up - second.bytes_up == 2 * 4 * classes
    assert megabytes(second.ups[0]) == megabytes(first.downs[0]) == RESNET20[data]
    encoders = nbytes(second.ups[0]) - 4 * (64 * classes + classes)
    assert third.bytes_down == 2 * (trunks * encoders + head)
    assert third.bytes_up == last.bytes_up == last.bytes_down == 2 * head


@every_set
def test_scaffold_sends_a_variate_beside_the_weights(data: str) -> None:
    plain, more = exchanged("fedavg", data), exchanged("scaffold", data)
    trained = nbytes(plain[0].ups[0]) - 4 * 1_376  # running statistics have no variate
    assert [b.bytes_up - a.bytes_up for a, b in zip(plain, more, strict=True)] == [2 * trained] * 2
    assert [b.bytes_down - a.bytes_down for a, b in zip(plain, more, strict=True)] == [0, 2 * trained]


@every_set
def test_fedproto_sends_class_means_and_counts(data: str) -> None:
    size = SETS[data][0] * (64 * 4 + 4)
    first, second = exchanged("fedproto", data)
    assert (first.bytes_up, first.bytes_down) == (2 * size, 0)
    assert (second.bytes_up, second.bytes_down) == (2 * size, 2 * size)


@every_set
@pytest.mark.parametrize("aggregator", ["auto", "weights"])
def test_fens_sends_models_once_then_aggregators(data: str, aggregator: str) -> None:
    classes = SETS[data][0]
    alone, last, first, second = exchanged("fens", data, aggregator_rounds=2, aggregator=aggregator)
    assert (alone.bytes_up, alone.bytes_down, last.bytes_down) == (0, 0, 0)
    assert [megabytes(up) for up in last.ups.values()] == [RESNET14[data], RESNET20[data]]
    weights = 4 * 2 * classes  # of two clients
    mlp = 4 * (2 * classes * 4 + 4 + 4 * classes + classes)  # two hidden units for each
    size = weights if aggregator == "weights" or classes >= 100 else mlp
    assert first.bytes_down == 2 * (last.bytes_up + size)
    assert first.bytes_up == second.bytes_up == second.bytes_down == 2 * size


@every_set
@pytest.mark.parametrize("name", ["local", "ssl", "fedov"])
def test_nothing_goes_anywhere(name: str, data: str) -> None:
    assert [(r.bytes_up, r.bytes_down) for r in exchanged(name, data)] == [(0, 0)] * 2


@every_set
def test_scarlet_sends_what_is_asked_for_and_what_has_changed(data: str) -> None:
    """Half of the public samples in each round; of those of the second round, half were answered in the first."""
    classes, publics, _ = SETS[data]
    first, second = exchanged("scarlet", data)
    assert first.bytes_up == 2 * publics // 2 * 4 * classes
    asked = second.ups[0].values.shape[0]
    assert 0.22 * publics < asked < 0.28 * publics
    assert second.bytes_up == 2 * 4 * classes * asked
    new = len(first.downs[0].rows)
    assert new == publics // 2
    assert (first.bytes_down, second.bytes_down) == (2 * 4 * new, 2 * (4 * new * (classes + 1) + 4 * asked))


@every_set
def test_selectivefd_sends_chosen_rows_and_their_numbers(data: str) -> None:
    classes, publics, _ = SETS[data]  # where features do not differ, all are chosen
    first, second = exchanged("selectivefd", data)
    assert first.bytes_up == second.bytes_up == second.bytes_down == 2 * 4 * publics * (classes + 1)
    assert first.bytes_down == 0


@every_set
def test_fedaux_sends_scores_once(data: str) -> None:
    first, second = exchanged("fedaux", data)
    assert [megabytes(m) for m in second.ups.values()] == [RESNET14[data], RESNET20[data]]
    assert first.bytes_up - second.bytes_up == 2 * 4 * SETS[data][1]
    assert first.bytes_down == second.bytes_down


def test_no_method_is_left_out() -> None:
    others = ["feddf", "fedet", "fedhkt", "fedmd", "lsr", "fedcc", "fedct", "fedconcat", "local", "ssl"]
    others += ["dsfl", "scarlet", "selectivefd", "comet", "fedaux", "fedov", "scaffold", "fedproto", "fens"]
    assert {*WEIGHTS, *others, "centralized"} == set(METHODS)  # which sends its data: test_baselines
