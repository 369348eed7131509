"""What of a client's answers leaves it: predictions, labels, or noisy labels. At a site: test_federation_share.py."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedcc
from fedcc.core.disclosure import OPEN, Disclosure
from fedcc.core.messages import Labels, Predictions, Weights, nbytes
from fedcc.core.model import Outputs
from fedcc.evaluate.predictions import DisclosedPredictions
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.options import Training
from fedcc.methods import METHODS, make
from tiny import Tiny


def disclosure(method: str = "fedcc", share: Any = "labels", epsilon: float = 4.0, classes: int = 3) -> Disclosure:
    return Disclosure.of(make(method), classes, share, epsilon)


def probabilities(*rows: list[float]) -> Predictions:
    return Predictions(torch.tensor(rows))


def test_a_label_or_unknown_for_each_sample() -> None:
    up = probabilities([0.5, 0.2, 0.1, 0.2], [0.1, 0.1, 0.1, 0.7])
    sent = disclosure().sent(up)
    assert isinstance(sent, Labels)
    assert sent.values.tolist() == [0, 3]  # 3: "unknown"
    assert disclosure().received(sent).values.tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]
    assert OPEN.sent(up) is up
    assert OPEN.received(up) is up
    voted = Labels(torch.tensor([2, 0], dtype=torch.uint8))
    assert disclosure("fedct").received(disclosure("fedct").sent(voted)).values.tolist() == [2, 0], "FedCT takes labels"


def test_a_label_has_one_byte_on_the_wire() -> None:
    up = Predictions(torch.full((144, 11), 1 / 11))
    assert [nbytes(up), nbytes(up, "int8"), nbytes(disclosure(classes=10).sent(up))] == [6336, 1584, 144]
    assert nbytes(disclosure(classes=255).sent(up)) == 144, "256 different labels with unknown"
    assert nbytes(disclosure(classes=256).sent(up)) == 288


def test_methods_that_share_other_things_refuse() -> None:
    fit = {"fedcc", "fedmd", "lsr", "fedct", "dsfl", "comet"}
    for name in METHODS:
        for share in ("labels", "noisy"):
            if name in fit:
                assert disclosure(name, share).filters
                continue
            with pytest.raises(
                ValueError, match=rf"share={share} is for methods that share predictions.* shares weights"
            ):
                disclosure(name, share)
        assert not disclosure(name, "predictions").filters
    with pytest.raises(ValueError, match="FedMD shares logits: set average=probs"):
        Disclosure.of(make("fedmd", {"loss": "l1", "average": "logits"}), 3, "labels", 4.0)
    with pytest.raises(ValueError, match="FedAvg shares weights or other values"):
        Experiment.resolve("fedavg", share="labels")
    with pytest.raises(ValueError, match=r"answer_epsilon=2 is for share=noisy, got share=labels"):
        Training(rounds=1, epochs=1, share="labels", answer_epsilon=2)
    with pytest.raises(ValueError, match="answer_epsilon must be"):
        Training(rounds=1, epochs=1, share="noisy", answer_epsilon=0)
    with pytest.raises(ValueError, match="needs probabilities or labels, got Weights"):
        disclosure().sent(Weights({}))
    with pytest.raises(ValueError, match="needs probabilities or labels, got Predictions"):
        disclosure().sent(Predictions(torch.tensor([[3.0, -1.0, 0.0, 0.0]])))


@given(epsilon=st.floats(0.01, 20), columns=st.integers(2, 1001))
def test_the_noise_has_the_epsilon_that_is_stated(epsilon: float, columns: int) -> None:
    noise = Disclosure("noisy", epsilon, columns)
    other = (1 - noise.keep) / columns
    assert 0 < noise.keep < 1
    assert math.log((noise.keep + other) / other) == pytest.approx(epsilon, rel=1e-6)


def test_as_many_labels_are_true_as_randomised_response_says() -> None:
    noise, number = disclosure("fedcc", "noisy", 2.0), 20_000
    reported = noise.randomised(torch.full((number,), 3))
    shares = torch.bincount(reported, minlength=4) / number
    true = math.exp(2) / (math.exp(2) + 3)
    assert torch.allclose(shares, torch.tensor([(1 - true) / 3] * 3 + [true]), atol=0.02)


def test_noise_is_not_drawn_from_any_seed() -> None:
    noise, labels = disclosure("fedcc", "noisy", 0.5), torch.zeros(200, dtype=torch.long)
    drawn = []
    for _ in range(2):
        random.seed(0)
        torch.manual_seed(0)
        drawn.append(noise.randomised(labels).tolist())
    assert drawn[0] != drawn[1]
    runs = [Tiny(make("fedcc"), options={"disclosure": disclosure("fedcc", "noisy", 1.0)}).run(1) for _ in range(2)]
    first, second = (torch.stack([up.values for up in run.rounds[0].sent.values()]) for run in runs)
    assert not torch.equal(first, second), "two runs of the same seed"


@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    epsilon=st.floats(0.01, 20),
    method=st.sampled_from(["fedcc", "fedct"]),
)
def test_what_the_server_makes_of_labels_are_probabilities(labels: list[int], epsilon: float, method: str) -> None:
    answer = Labels.of(torch.tensor(labels), 4)
    for share in ("labels", "noisy"):
        form = Disclosure.of(make(method), 3 if method == "fedcc" else 4, share, epsilon)
        p = form.probabilities(answer.values)
        assert p.shape == (len(labels), 4)
        assert bool((p >= 0).all())
        assert torch.allclose(p.sum(-1), torch.ones(len(labels)), atol=1e-5)
        logits = form.logits(answer)
        assert bool(logits.isfinite().all())
        assert torch.allclose(logits.softmax(-1), p, atol=1e-5)
        if share == "labels" or method == "fedct":
            assert p.argmax(-1).tolist() == labels or epsilon < 1e-2


def test_a_client_that_hardly_ever_knows_is_read_so() -> None:
    """With 11 labels and epsilon 2, more than half of the classes that such a client reports are noise.

    The noise has no seed. Over 300 draws the first two means and the last ratio are 0.82, 0.44 and 3.0; their bounds
    are five or six standard deviations away. Without the client's own shares, the first would be 0.06.
    """
    noise, true = disclosure("fedcc", "noisy", 2.0, classes=10), torch.full((2000,), 10)
    true[:200] = 4
    reported = noise.randomised(true)
    p = noise.probabilities(reported)
    absent = (reported != 4) & (reported != 10)
    assert p[absent, 10].mean() > 0.65, "classes that it does not have"
    assert p[reported == 4, 4].mean() > 0.15
    assert p[true == 4, 4].mean() > 2 * p[true == 10, 4].mean()


def test_bytes_and_uploads_of_a_simulated_run() -> None:
    run = Tiny(make("fedcc"), options={"disclosure": disclosure()}).run(2)
    for messages in run.rounds:
        assert messages.bytes_up == len(run.clients) * len(run.public)
        for k, up in messages.ups.items():
            assert torch.equal(up.values.argmax(-1), messages.sent[k].values.long())
            assert up.values.sum() == len(run.public)


def test_clients_predict_in_the_same_form_and_answer_once() -> None:
    tiny = Tiny(make("fedmd"))
    trained = tiny.run(1).cohort.trained_models(tiny.server)
    form = disclosure("fedmd", "noisy", 1.0)
    engine = DisclosedPredictions(tiny.executor, trained, form)
    request = fedcc.core.requests.Predict(trained.clients[0], tiny.test.only("x"))
    one, other = engine.serve([request])[0], engine.serve([request])[0]
    assert isinstance(one, Outputs)
    assert torch.equal(one.logits, other.logits)
    assert len(one.logits.unique(dim=0)) <= 3, "one row for each label"
