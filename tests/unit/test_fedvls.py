from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedcc.core.requests import Recipe
from fedcc.core.step import Loss
from fedcc.losses import masked_kl
from fedcc.methods import FedAvg, FedVLS
from fedcc.methods.fedvls import (
    PriorCrossEntropy,
    Suppression,
    VacantDistillation,
    suppressed_code,
    suppressed_paper,
)
from fedcc.nets import build
from private_steps import agrees_over_clients, asked, draw, initial, slopes, step
from tiny import Tiny

VACANT = torch.tensor([False, True, False, True, True])
PRIOR = torch.tensor([0.25, 0.0, 0.75, 0.0, 0.0], dtype=torch.float64)


def test_the_calibrated_cross_entropy_by_hand() -> None:
    logits, y = draw(4, 5), torch.tensor([0, 2, 2, 0])
    value, grad = slopes(PriorCrossEntropy(), logits, y, constants={"prior": PRIOR})
    p = torch.zeros(4, 5, dtype=torch.float64)
    for i in range(4):
        e = {c: float(PRIOR[c]) * math.exp(float(logits[i, c])) for c in (0, 2)}  # e^{f + ln pi}
        for c in e:
            p[i, c] = e[c] / sum(e.values())
    torch.testing.assert_close(value, -p[torch.arange(4), y].log().mean())
    torch.testing.assert_close(grad, (p - F.one_hot(y, 5)) / 4)
    assert torch.equal(grad[:, VACANT], torch.zeros(4, 3, dtype=torch.float64))


def naive_kl(teacher: Tensor, student: Tensor, vacant: Tensor) -> float:
    places = [c for c in range(len(vacant)) if vacant[c]]
    if len(places) < 2:
        return 0.0
    total = 0.0
    for i in range(len(teacher)):
        q, p = ([math.exp(float(z[i, c])) for c in places] for z in (teacher, student))
        q, p = [v / sum(q) for v in q], [v / sum(p) for v in p]
        total += sum(a * math.log(a / b) for a, b in zip(q, p, strict=True))
    return total / len(teacher)


def test_vacant_distillation_against_a_loop() -> None:
    teacher, student = draw(6, 5), draw(6, 5, seed=1)
    for mask in (VACANT, torch.ones(5).bool(), torch.tensor([1, 0, 0, 0, 1]).bool()):
        assert float(masked_kl(teacher, student, mask)) == pytest.approx(naive_kl(teacher, student, mask))
    assert float(masked_kl(teacher, student, VACANT)) > 0


def test_the_losses_are_those_of_the_step() -> None:
    logits, teacher, y = draw(6, 5), draw(6, 5, seed=1), torch.tensor([0, 2, 2, 0, 2, 2])
    at = step(logits, y, constants={"prior": PRIOR}, teacher=teacher)
    assert float(VacantDistillation()(at)) == pytest.approx(naive_kl(teacher, logits, VACANT))  # not the reverse
    for form in ("paper", "code"):
        expected = naive_suppression(logits, y, PRIOR, form == "code")
        assert float(Suppression(form)(at)) == pytest.approx(expected)  # type: ignore[arg-type]


def test_vacant_distillation_sees_vacant_logits_alone_and_no_shift() -> None:
    teacher, student = draw(6, 5), draw(6, 5, seed=1)
    value = masked_kl(teacher, student, VACANT)
    torch.testing.assert_close(masked_kl(teacher, student + 3 * VACANT, VACANT), value)
    torch.testing.assert_close(masked_kl(teacher - 2 * VACANT, student, VACANT), value)
    noise = 9 * draw(6, 5, seed=2) * ~VACANT
    assert torch.equal(masked_kl(teacher + noise, student - noise, VACANT), value)


@pytest.mark.parametrize("mask", [[0, 0, 0, 0, 0], [0, 1, 0, 0, 0]])
def test_fewer_than_two_vacant_classes_distil_nothing(mask: list[int]) -> None:
    student = draw(6, 5, seed=1).requires_grad_()
    value = masked_kl(draw(6, 5), student, torch.tensor(mask).bool())
    (grad,) = torch.autograd.grad(value, student)
    assert float(value.detach()) == 0
    assert torch.equal(grad, torch.zeros_like(grad))


def test_at_the_teacher_there_is_neither_loss_nor_gradient() -> None:
    student = draw(6, 5).requires_grad_()
    value = masked_kl(draw(6, 5), student, VACANT)
    (grad,) = torch.autograd.grad(value, student)
    assert float(value.detach()) == 0
    assert float(grad.abs().max()) < 1e-15


def naive_suppression(logits: Tensor, y: Tensor, prior: Tensor, code: bool) -> float:
    total, (n, classes) = 0.0, logits.shape
    for c in range(classes):
        if prior[c] == 0:
            continue
        terms = []
        for i in range(n):
            f = float(logits[i, c])
            if code:
                f = f - math.log(float(prior[c])) + math.log(1 / classes)
            if y[i] != c:
                terms.append(math.exp(f))
            elif code:
                terms.append(1.0)  # the code multiplies the logit by 0
        if terms:
            total += float(prior[c]) * math.log(sum(terms) / n)
    return total


@pytest.mark.parametrize("y", [[0, 2, 2, 0, 2, 2], [2, 2, 2, 2, 2, 2]], ids=["mixed", "one class"])
def test_suppression_against_a_loop(y: list[int]) -> None:
    logits, target = draw(6, 5), torch.tensor(y)
    for suppressed, code in ((suppressed_paper, False), (suppressed_code, True)):
        expected = naive_suppression(logits, target, PRIOR, code)
        assert float(suppressed(logits, target, PRIOR)) == pytest.approx(expected)


@pytest.mark.parametrize("form", ["paper", "code"])
def test_suppression_leaves_the_label_and_vacant_classes_alone(form: str) -> None:
    y = torch.tensor([0, 2, 2, 0])
    _, grad = slopes(Suppression(form), draw(4, 5), y, constants={"prior": PRIOR})  # type: ignore[arg-type]
    touched = grad != 0
    assert touched.tolist() == [[c in (0, 2) and c != int(label) for c in range(5)] for label in y]
    assert (grad >= 0).all()  # descent pushes the others down


@pytest.mark.parametrize("form", ["paper", "code"])
def test_suppression_skips_a_class_that_the_whole_batch_has(form: str) -> None:
    one = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    loss = Suppression(form)  # type: ignore[arg-type]
    value, grad = slopes(loss, draw(4, 5), torch.full((4,), 2), constants={"prior": one})
    assert float(value) == 0
    assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("depth", [10.0, 1e3, 1e6])
def test_the_loss_has_a_lower_bound(depth: float) -> None:
    """However far present logits sink: all together, which L_cal cannot see, or those that are not the label's."""
    c = Tiny(FedVLS()).clients[0]
    loss, y = asked(FedVLS(gamma=1.0), c).loss, torch.tensor([0, 2, 2, 2])
    lowest = sum(share * math.log(share) for share in (0.25, 0.75))  # of L_logit; L_cal and L_dis are at least 0
    others = ~VACANT & ~F.one_hot(y, 5).bool()
    for sunk in (~VACANT, others):
        logits = draw(4, 5) - depth * sunk
        value, grad = slopes(loss, logits, y, constants={"prior": PRIOR}, teacher=draw(4, 5, seed=1))
        assert float(value) >= lowest
        pull = slopes(Suppression(), logits, y, constants={"prior": PRIOR})[1]
        assert float(pull.abs().max()) <= 10 * math.exp(-depth)  # nothing is left for Adam to make a step of
        assert torch.isfinite(grad).all()


def test_present_classes_do_not_sink_under_vacant_ones() -> None:
    """Local training, longer than the cross entropy needs: with the paper's L_logit Adam goes on pushing them down."""
    sunk = {}
    for form in ("code", "paper"):
        method = FedVLS(suppress=form)  # type: ignore[arg-type]
        tiny = Tiny(method, labels=((0, 2) * 16,), recipe=Recipe(lr=1e-2, batch=8, epochs=300)).run(1)
        trained = tiny.clients[0]
        module = build(trained.arch, trained.key).double().eval()
        module.load_state_dict(trained.model.state)
        logits = module(trained.private.x.double())[0].detach()
        assert torch.equal(logits[:, [0, 2]].argmax(-1) * 2, trained.private["y"])
        sunk[form] = float(logits[:, 1].mean() - logits[:, [0, 2]].mean())
    assert sunk["code"] < 3
    assert sunk["paper"] > 10


def test_large_logits_stay_finite() -> None:
    for loss in (PriorCrossEntropy(), VacantDistillation(), Suppression("paper"), Suppression("code")):
        constants = {"prior": PRIOR.float()}
        big = 1e4 * draw(4, 5).float()
        value, grad = slopes(loss, big, torch.tensor([0, 2, 2, 0]), constants=constants, teacher=-big)
        assert torch.isfinite(value)
        assert torch.isfinite(grad).all()


def test_without_its_terms_and_with_equal_counts_it_is_fedavg() -> None:
    labels = ((0, 1, 2) * 8, (2, 1, 0) * 6)
    recipe = Recipe(lr=1e-2, batch=8, epochs=1)
    vls, plain = (Tiny(m, labels=labels, recipe=recipe).run() for m in (FedVLS(lam=0.0, gamma=0.0), FedAvg()))
    torch.testing.assert_close(vls.server.models["global"].state, plain.server.models["global"].state)


def test_a_one_class_client_has_no_gradient_at_the_received_weights() -> None:
    """With BatchNorm frozen; Adam would turn 5e-9 into a visible step, so the gradient itself is looked at."""
    tiny = Tiny(FedVLS(), classes=5)
    c = tiny.clients[0]
    c.model = c.model.with_(initial(tiny))
    request = asked(tiny.method, c)
    module = build(c.arch, c.key).double().eval()
    module.load_state_dict(c.model.state)
    logits, features = module(c.private.x.double())
    at = step(logits, c.private["y"], features, request.constants, logits.detach())
    grads = torch.autograd.grad(request.loss(at), list(module.parameters()), retain_graph=True)
    assert max(float(g.abs().max()) for g in grads) < 1e-7
    elsewhere = step(logits, c.private["y"], features, request.constants, draw(20, 5))
    moved = torch.autograd.grad(request.loss(elsewhere), list(module.parameters()))
    assert max(float(g.abs().max()) for g in moved) > 1e-4


def test_what_it_asks_for() -> None:
    tiny = Tiny(FedVLS(), labels=((0,) * 15 + (2,) * 5,))
    c = tiny.clients[0]
    request = asked(FedVLS(lam=0.3, gamma=0.2, suppress="code"), c)
    assert request.loss == PriorCrossEntropy() + 0.3 * VacantDistillation() + 0.2 * Suppression("code")
    assert request.constants["prior"].tolist() == [0.75, 0.0, 0.25]
    assert request.frozen["teacher"].model is c.model  # the received one, before it is trained
    assert request.frozen["teacher"].stream == "private"
    assert asked(FedVLS(), c).loss == PriorCrossEntropy() + 0.1 * VacantDistillation() + 0.005 * Suppression()
    assert asked(FedVLS(lam=0.0, gamma=0.0), c).loss == PriorCrossEntropy()
    assert not asked(FedVLS(lam=0.0), c).frozen  # no teacher is run for nothing
    c.classes = 10
    assert asked(FedVLS(), c).loss == PriorCrossEntropy() + 0.1 * VacantDistillation() + 0.005 * Suppression()
    c.classes = 100
    assert asked(FedVLS(), c).loss == PriorCrossEntropy() + 0.5 * VacantDistillation() + 0.005 * Suppression()


@pytest.mark.parametrize(
    "loss", [PriorCrossEntropy(), VacantDistillation(), Suppression("paper"), Suppression("code")], ids=str
)
def test_all_run_over_clients(loss: Loss) -> None:
    counts = [torch.tensor([5, 0, 2, 0, 0]), torch.tensor([0, 3, 0, 0, 0]), torch.tensor([1, 1, 1, 1, 1])]
    cases = [
        {
            "logits": draw(5, 5, seed=k),
            "y": torch.multinomial(n.double(), 5, replacement=True, generator=torch.Generator().manual_seed(k)),
            "constants": {"prior": n.double() / n.sum()},
            "teacher": draw(5, 5, seed=k + 9),
        }
        for k, n in enumerate(counts)
    ]
    agrees_over_clients(loss, cases)
