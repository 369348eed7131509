from __future__ import annotations

import math

import pytest
import torch

from fedcc.core.requests import Recipe
from fedcc.core.step import Loss
from fedcc.losses import CrossEntropy
from fedcc.methods import FedAvg, FedLC
from fedcc.methods.fedlc import Calibrated, CalibratedAgainstOthers, offsets
from private_steps import agrees_over_clients, asked, draw, initial, slopes
from tiny import Tiny

COUNTS = torch.tensor([16, 0, 81, 1])
OFFSET = offsets(COUNTS, 0.5)


def test_offsets_are_tau_over_the_fourth_root() -> None:
    assert OFFSET.tolist() == pytest.approx([0.5 / 2, math.inf, 0.5 / 3, 0.5])
    assert offsets(COUNTS, 0.0).tolist() == [0.0] * 4  # not 0 times infinity
    sizes = offsets(torch.arange(1, 50), 0.3)
    assert (sizes[1:] < sizes[:-1]).all()


def test_value_and_gradient_by_hand() -> None:
    logits, y = draw(6, 4), torch.tensor([0, 2, 2, 3, 0, 3])
    value, grad = slopes(Calibrated(), logits, y, constants={"offset": OFFSET})
    expected, slope = 0.0, torch.zeros(6, 4, dtype=torch.float64)
    for i in range(6):
        e = {c: math.exp(float(logits[i, c]) - 0.5 * float(COUNTS[c]) ** -0.25) for c in (0, 2, 3)}
        expected -= math.log(e[int(y[i])] / sum(e.values())) / 6
        for c in e:
            slope[i, c] = (e[c] / sum(e.values()) - float(c == y[i])) / 6
    assert float(value) == pytest.approx(expected)
    torch.testing.assert_close(grad, slope)
    assert torch.equal(grad[:, 1], torch.zeros(6, dtype=torch.float64))  # exactly, since Adam amplifies


def test_the_published_formula_by_hand() -> None:
    logits, y = draw(6, 4), torch.tensor([0, 2, 2, 3, 0, 3])
    value, grad = slopes(CalibratedAgainstOthers(), logits, y, constants={"offset": OFFSET})
    expected, slope = 0.0, torch.zeros(6, 4, dtype=torch.float64)
    for i in range(6):
        e = {c: math.exp(float(logits[i, c]) - 0.5 * float(COUNTS[c]) ** -0.25) for c in (0, 2, 3)}
        own = e.pop(int(y[i]))
        expected -= math.log(own / sum(e.values())) / 6
        slope[i, y[i]] = -1 / 6
        for c in e:
            slope[i, c] = e[c] / sum(e.values()) / 6
    assert float(value) == pytest.approx(expected)
    torch.testing.assert_close(grad, slope)
    assert torch.equal(grad[:, 1], torch.zeros(6, dtype=torch.float64))


@pytest.mark.parametrize("loss", [Calibrated(), CalibratedAgainstOthers()], ids=str)
def test_one_class_has_no_loss_and_no_gradient(loss: Loss) -> None:
    value, grad = slopes(
        loss, 30 * draw(5, 3), torch.ones(5).long(), constants={"offset": offsets(torch.tensor([0, 7, 0]), 0.5)}
    )
    assert float(value) == 0
    assert torch.equal(grad, torch.zeros(5, 3, dtype=torch.float64))


@pytest.mark.parametrize("denominator", ["include", "exclude"])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_a_one_class_client_returns_the_received_parameters(denominator: str, precision: str) -> None:
    tiny = Tiny(FedLC(denominator=denominator), precision=precision).run()  # type: ignore[arg-type]
    received = initial(tiny)
    for up in tiny.rounds[0].ups.values():
        assert all(torch.equal(up.state[name], received[name]) for name in received if "running" not in name)
        assert not torch.equal(up.state["trunks.0.1.running_mean"], received["trunks.0.1.running_mean"])


def test_equal_counts_are_fedavg() -> None:
    labels, recipe = ((0, 1, 2) * 8, (2, 1, 0) * 6), Recipe(lr=1e-2, batch=8, epochs=1)
    lc, plain = (Tiny(m, labels=labels, recipe=recipe).run() for m in (FedLC(), FedAvg()))
    torch.testing.assert_close(lc.server.models["global"].state, plain.server.models["global"].state)


def test_what_it_asks_for() -> None:
    c = Tiny(FedLC(), labels=((0,) * 16 + (2,),)).clients[0]
    request = asked(FedLC(), c)
    assert request.loss == Calibrated()
    assert request.constants["offset"].tolist() == pytest.approx([0.25, math.inf, 0.5])
    assert asked(FedLC(denominator="exclude"), c).loss == CalibratedAgainstOthers()
    assert asked(FedLC(tau=0.0), c).loss == CrossEntropy("private")
    request = asked(FedLC(tau=0.0, denominator="exclude"), c)  # no margin, no mask, still without the true class
    assert request.loss == CalibratedAgainstOthers()
    assert request.constants["offset"].tolist() == [0.0] * 3


@pytest.mark.parametrize("loss", [Calibrated(), CalibratedAgainstOthers()], ids=str)
def test_it_runs_over_clients(loss: Loss) -> None:
    counts = [torch.tensor([5, 0, 2, 9]), torch.tensor([0, 3, 0, 0]), torch.tensor([1, 1, 1, 1])]
    cases = [
        {
            "logits": draw(5, 4, seed=k),
            "y": torch.multinomial(n.double(), 5, replacement=True, generator=torch.Generator().manual_seed(k)),
            "constants": {"offset": offsets(n, 0.5)},
        }
        for k, n in enumerate(counts)
    ]
    agrees_over_clients(loss, cases)
