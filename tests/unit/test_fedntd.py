"""FedNTD: distillation over the classes that a sample is not of (docs/deviations.md)."""

from __future__ import annotations

import pytest
import torch

from fedcc.losses import CrossEntropy
from fedcc.methods import FedNTD
from fedcc.methods.fedntd import NotTrue
from fedcc.methods.fedvls import VacantDistillation
from private_steps import agrees_over_clients, asked, draw, labels, same, slopes, step
from tiny import Tiny


@pytest.mark.parametrize(("tau", "value"), [(1.0, 0.46212), (3.0, 0.49542)])
def test_the_specified_values(tau: float, value: float) -> None:
    teacher, student = torch.tensor([[2.0, 1.0, 0.0]]).double(), torch.tensor([[3.0, 0.0, 1.0]]).double()
    found = NotTrue(tau)(step(student, torch.tensor([0]), teacher=teacher))
    assert float(found) == pytest.approx(value, abs=5e-6)


def test_it_ignores_the_true_classes_logits_and_a_shift_of_all() -> None:
    teacher, student, y = draw(6, 5), draw(6, 5, seed=1), labels(6, 5)
    value, grad = slopes(NotTrue(2.0), student, y, teacher=teacher)
    own = torch.nn.functional.one_hot(y, 5) * 7.0
    for other in (slopes(NotTrue(2.0), student + own, y, teacher=teacher - own),):
        torch.testing.assert_close(other[0], value)
        torch.testing.assert_close(other[1], grad)
    torch.testing.assert_close(slopes(NotTrue(2.0), student + 3, y, teacher=teacher - 2)[0], value)
    assert torch.equal(grad.gather(1, y[:, None]), torch.zeros(6, 1, dtype=torch.float64))
    assert float(value) > 0


def test_on_one_class_it_is_fedvls_distillation_of_the_vacant_classes() -> None:
    teacher, student, y = draw(6, 5), draw(6, 5, seed=1), torch.full((6,), 3)
    prior = torch.nn.functional.one_hot(torch.tensor(3), 5).double()
    vacant = slopes(VacantDistillation(), student, y, teacher=teacher, constants={"prior": prior})
    own = slopes(NotTrue(1.0), student, y, teacher=teacher)
    assert torch.equal(own[0], vacant[0])
    assert torch.equal(own[1], vacant[1])


def test_two_classes_leave_nothing_to_distil() -> None:
    value, grad = slopes(NotTrue(1.0), draw(6, 2), labels(6, 2), teacher=draw(6, 2, seed=1))
    assert float(value) == 0
    assert torch.equal(grad, torch.zeros_like(grad))


def test_at_the_teacher_there_is_neither_loss_nor_gradient() -> None:
    value, grad = slopes(NotTrue(3.0), draw(6, 5), labels(6, 5), teacher=draw(6, 5))
    assert float(value) == 0
    assert float(grad.abs().max()) < 1e-15


def test_many_clients_at_once() -> None:
    cases = [{"logits": draw(6, 5, seed=k), "y": labels(6, 5, seed=k), "teacher": draw(6, 5, seed=9 + k)}
             for k in range(3)]  # fmt: skip
    agrees_over_clients(NotTrue(2.0), cases)


def test_the_received_model_teaches() -> None:
    tiny = Tiny(FedNTD(beta=0.5, tau=2.0))
    request = asked(tiny.method, tiny.clients[0])
    assert request.loss == CrossEntropy("private") + 0.5 * NotTrue(2.0)
    assert same(request.frozen["teacher"].model.state, tiny.clients[0].model.state)
    assert request.frozen["teacher"].stream == "private"
    assert not asked(FedNTD(beta=0.0), tiny.clients[0]).frozen
