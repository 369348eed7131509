"""What a step does besides the trunks, by the kernels of `step.cu`: on a GPU or emulated (the fixture `device`)."""

from __future__ import annotations

import math

import pytest
import torch

from fedcc.core.samples import View
from fedcc.engine import cuda, step_kernels
from fedcc.engine.lane_step import flat_runs

BETAS, EPS = (0.9, 0.999), 1e-8
on_gpu = pytest.mark.skipif(not cuda.available(torch.device("cuda")), reason="no GPU with NVRTC")


STANDARD = View(1 / 255, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3), pad=2, flip=True)


@pytest.mark.parametrize(
    "view", [STANDARD, View(1 / 255), *(STANDARD.with_augment(a) for a in ("strong", "shift=0.1"))]
)
def test_images_are_those_of_the_view(view: View, device: torch.device) -> None:
    lanes, window, batch, first = 3, 4, 5, 2
    g = torch.Generator().manual_seed(0)
    pool = torch.randint(0, 256, (40, 3, 33, 31), dtype=torch.uint8, generator=g)
    plan = torch.randint(0, 12, (lanes, window, batch), dtype=torch.int32, generator=g)
    shape = lanes, window, batch if view.augments else 0, view.draws_per_image
    draws = torch.randint(0, 256, shape, dtype=torch.uint8, generator=g)
    draws[..., :2] %= 5
    draws[..., 2:3] %= 2
    position, offset, rows = torch.tensor([1, 3, 0]), torch.tensor([[0], [15], [28]]), torch.arange(lanes)
    drawn = draws[rows, position].flatten(0, 1).long()
    expected = view.augmented(pool[plan[rows, position].long() + offset].flatten(0, 1), drawn)
    expected = expected.view(lanes, batch, 3, 33, 31).permute(0, 1, 3, 4, 2)
    out = torch.full((lanes, first + batch + 1, 33, 31, 3), -77.0, dtype=torch.bfloat16, device=device)
    step_kernels.images(*(t.to(device) for t in (pool, plan, draws, position, offset)), view, out, first)
    if view.strong:
        assert torch.equal(out[:, first:-1].cpu(), expected.bfloat16())  # to the bit
    torch.testing.assert_close(out[:, first:-1].cpu(), expected.bfloat16(), rtol=2**-7, atol=1e-6)
    assert (out[:, :first] == -77).all()
    assert (out[:, -1] == -77).all()


@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (100,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float64, torch.uint8, torch.bool, torch.bfloat16])
def test_rows_are_those_of_the_plan(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    lanes, window, batch = 3, 4, 7
    g = torch.Generator().manual_seed(0)
    pool = torch.randint(0, 256, (40, *shape), generator=g).to(dtype)
    plan = torch.randint(0, 12, (lanes, window, batch), dtype=torch.int32, generator=g)
    position, offset = torch.tensor([1, 3, 0]), torch.tensor([[0], [15], [28]])
    expected = pool[plan[torch.arange(lanes), position].long() + offset]
    found = step_kernels.rows(*(t.to(device) for t in (pool, plan, position, offset)))
    assert found.dtype == dtype
    assert torch.equal(found.cpu(), expected)


def check_a_head(device: torch.device, lanes: int, batch: int, inputs: int, outputs: int, wanted: list[bool]) -> None:
    """Values, and the gradients that are wanted, of features, weights and biases."""
    g = torch.Generator().manual_seed(0)
    shapes = (lanes, batch, inputs), (lanes, outputs, inputs), (lanes, outputs)
    given = [torch.randn(shape, generator=g) for shape in shapes]
    upstream = torch.randn(lanes, batch, outputs, generator=g)
    ours = [t.to(device, copy=True).requires_grad_(w) for t, w in zip(given, wanted, strict=True)]
    exact = [t.double().requires_grad_(w) for t, w in zip(given, wanted, strict=True)]
    found = step_kernels.head(*ours)
    expected = torch.baddbmm(exact[2].unsqueeze(1), exact[0], exact[1].transpose(1, 2))
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-4)
    grads = torch.autograd.grad(found, [t for t in ours if t.requires_grad], upstream.to(device))
    right = torch.autograd.grad(expected, [t for t in exact if t.requires_grad], upstream.double())
    for grad, gradient in zip(grads, right, strict=True):
        torch.testing.assert_close(grad.cpu().double(), gradient, rtol=1e-5, atol=1e-4)
    if wanted[1] and wanted[2]:
        assert len(flat_runs(grads[-2:])) == 1  # one behind the other


@pytest.mark.parametrize("outputs", [2, 11, 101])
@pytest.mark.parametrize(("lanes", "batch", "inputs"), [(1, 64, 64), (3, 5, 128), (3, 1, 4), (1, 21, 300)])
def test_a_head(lanes: int, batch: int, inputs: int, outputs: int, device: torch.device) -> None:
    check_a_head(device, lanes, batch, inputs, outputs, [True] * 3)


@pytest.mark.parametrize("wanted", [[False, True, True], [True, False, False], [True, True, False]])
def test_a_head_has_the_gradients_that_are_wanted(wanted: list[bool], device: torch.device) -> None:
    check_a_head(device, 2, 9, 64, 11, wanted)


def test_a_head_of_features_that_no_kernel_reads() -> None:
    with pytest.raises(ValueError, match="four features at a time, got 6"):
        step_kernels.head(torch.zeros(1, 2, 6), torch.zeros(1, 3, 6), torch.zeros(1, 3))


def check_a_step_of_adam(device: torch.device, captured: bool, parts: list[int]) -> None:
    lanes, size = 5, 1000
    g = torch.Generator().manual_seed(0)
    counts = {"age": 3.0, "length": 9.0, "lr": 0.1, "loss": 2.0, "finite_steps": 3.0}
    numbers = {n: torch.full((lanes,), v, dtype=torch.float64, device=device) for n, v in counts.items()}
    numbers |= {
        "step": torch.arange(lanes, device=device),
        "position": torch.zeros(lanes, dtype=torch.long, device=device),
    }
    numbers["cosine"] = torch.tensor([1.0, 0, 1, 0, 1], dtype=torch.float64, device=device)
    p, m, v, grad = (torch.rand(size, generator=g).to(device) for _ in range(4))
    lane = torch.randint(0, lanes, (size,), dtype=torch.int32, generator=g).to(device)
    losses = torch.rand(lanes, generator=g).to(device)
    before = {n: t.clone() for n, t in numbers.items()}
    old = p.clone(), m.clone(), v.clone()
    given = [part.clone() for part in grad.split(parts)]

    def step() -> None:
        step_kernels.adam(p, m, v, given, lane, *step_kernels.tick(losses, numbers, BETAS), BETAS, EPS)

    step()
    if captured:  # replayed from where it began
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for tensor, kept in zip((p, m, v, *numbers.values()), (*old, *before.values()), strict=True):
            tensor.copy_(kept)
        graph.replay()
    slower = 0.5 * (1 - torch.cos(math.pi * before["step"].double() / 9))
    rate = (0.1 * (1 - numbers["cosine"] * slower) / (1 - BETAS[0] ** 4)).float()[lane]
    mean, square = old[1].lerp(grad, 1 - BETAS[0]), old[2] * BETAS[1] + grad * grad * (1 - BETAS[1])
    torch.testing.assert_close(m, mean)
    torch.testing.assert_close(v, square)
    torch.testing.assert_close(p, old[0] - rate * mean / (square.sqrt() * (1 - BETAS[1] ** 4) ** -0.5 + EPS))
    torch.testing.assert_close(numbers["loss"], 2 + losses.double())
    assert numbers["age"].tolist() == numbers["finite_steps"].tolist() == [4.0] * lanes
    assert numbers["step"].tolist() == [1, 2, 3, 4, 5]
    assert numbers["position"].tolist() == [1] * lanes


@pytest.mark.parametrize("parts", [[1000], [300, 700], [700, 1, 200, 99], [200] * 5])
def test_a_step_of_adam(parts: list[int], device: torch.device) -> None:
    check_a_step_of_adam(device, False, parts)


def test_the_steps_of_a_lane_are_counted_until_its_loss_is_not_finite(device: torch.device) -> None:
    names = ("age", "length", "lr", "loss", "finite_steps", "cosine")
    numbers = {name: torch.zeros(3, dtype=torch.float64, device=device) for name in names}
    numbers |= {name: torch.zeros(3, dtype=torch.long, device=device) for name in ("step", "position")}
    for losses in ([1.0, 1.0, 1.0], [1.0, math.nan, 1.0], [1.0, 1.0, -math.inf], [1.0, 1.0, math.inf]):
        step_kernels.tick(torch.tensor(losses, device=device), numbers, BETAS)
    assert numbers["finite_steps"].tolist() == [4.0, 1.0, 2.0]
    assert numbers["loss"].isfinite().tolist() == [True, False, False]


@on_gpu
def test_a_step_of_adam_in_a_graph() -> None:
    check_a_step_of_adam(torch.device("cuda"), True, [300, 700])
