"""What a method answers beside its scores: votes, probabilities, confidence and the mass for "unknown"."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedcc.core.method import Answer, AnyMethod, Trained, Votes
from fedcc.core.model import Arch
from fedcc.core.requests import Init, Predict
from fedcc.core.rng import Key
from fedcc.core.samples import Samples
from fedcc.engine import Plain, drive
from fedcc.errors import InputError
from fedcc.methods import SSL, FedAvg, FedCC, FedMD, find_method
from fedcc.methods.abstention import aggregate, trust

CLASSES, CLIENTS, NUMBER = 4, 3, 6


def linear(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, outputs))


@pytest.fixture
def engine() -> Plain:
    return Plain("cpu", "fp64")


@pytest.fixture
def samples() -> Samples:
    return Samples({"x": 3 * torch.randn(NUMBER, 5, generator=torch.Generator().manual_seed(0))})


def trained(engine: Plain, method: AnyMethod) -> Trained:
    arch = Arch((linear,), method.outputs(CLASSES), (5,))
    models = engine.serve([Init(arch, Key(0, client=k)) for k in range(CLIENTS)])
    return Trained(CLASSES, dict(enumerate(models)))


def logits(engine: Plain, t: Trained, samples: Samples) -> Tensor:
    return torch.stack([o.logits for o in engine.serve([Predict(m, samples) for m in t.clients.values()])])


def votes(engine: Plain, method: AnyMethod, t: Trained, samples: Samples) -> Votes:
    return drive([method.votes(t, samples)], engine)[0]


def answer(engine: Plain, method: AnyMethod, t: Trained, samples: Samples) -> Answer:
    return drive([method.answer(t, samples)], engine)[0]


def test_votes_of_clients_that_must_choose_count_the_same(engine: Plain, samples: Samples) -> None:
    method = FedMD()
    t = trained(engine, method)
    found = votes(engine, method, t, samples)
    assert torch.equal(found.known, logits(engine, t, samples).softmax(-1))
    assert torch.equal(found.trust, torch.full((CLIENTS, NUMBER), 1 / CLIENTS))


def test_nobody_votes_where_the_server_predicts(engine: Plain, samples: Samples) -> None:
    method = FedAvg()
    t = trained(engine, method)
    for server in (
        Trained(CLASSES, {}, {"global": t.clients[0]}),
        Trained(CLASSES, t.clients, {"global": t.clients[0]}),
    ):
        with pytest.raises(ValueError, match="FedAvg predicts with a model of the server, so no client votes"):
            votes(engine, method, server, samples)


def test_by_default_the_confidence_is_the_largest_probability(engine: Plain, samples: Samples) -> None:
    method = FedMD()
    t = trained(engine, method)
    found = answer(engine, method, t, samples)
    expected = method.probabilities(drive([method.predict(t, samples)], engine)[0])
    assert torch.equal(found.probabilities, expected)
    assert torch.equal(found.confidence, expected.max(-1).values)
    assert found.unknown is None


def test_fedcc_trusts_by_known_mass_and_is_as_sure_as_its_surest_client(engine: Plain, samples: Samples) -> None:
    method = FedCC(trust=2.0)
    t = trained(engine, method)
    everyone = logits(engine, t, samples).softmax(-1)
    found = votes(engine, method, t, samples)
    assert torch.equal(found.known, everyone[..., :CLASSES])
    assert torch.equal(found.trust, trust(everyone, 2.0))
    combined, told = aggregate(everyone, 2.0), answer(engine, method, t, samples)
    known = combined[:, :CLASSES]
    assert torch.allclose(told.probabilities, known / known.sum(-1, keepdim=True), atol=1e-12)
    assert torch.equal(
        told.confidence, torch.stack([vote[:, :CLASSES].max(-1).values for vote in everyone]).max(0).values
    )
    assert told.unknown is not None
    assert torch.equal(told.unknown, combined[:, CLASSES])


def test_methods_without_public_samples_need_none(samples: Samples) -> None:
    none = Samples({"x": samples.x[:0]})
    assert FedAvg().unusable_reason(none) == ""
    for method in (FedMD(), SSL()):
        assert f"{method.name} needs public samples" in method.unusable_reason(none)
    assert FedMD().unusable_reason(samples) == ""


def test_a_method_that_is_named_as_code_is_refused_unless_the_user_names_it() -> None:
    with pytest.raises(InputError, match="--code nobody:Method"):
        find_method("nobody:Method")
