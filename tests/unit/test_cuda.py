"""CUDA C++ at run time: structs, compiling (wherever NVRTC is) and, on a GPU, launching."""

from __future__ import annotations

import ctypes
import math
import struct
from pathlib import Path

import pytest
import torch

from fedcc.core.samples import View
from fedcc.engine import cuda, stepping

DEVICE = torch.device("cuda")
BETAS, EPS = (0.9, 0.999), 1e-8
on_gpu = pytest.mark.skipif(not cuda.available(DEVICE), reason="no GPU with NVRTC")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, with NVRTC there to fill it."""
    try:
        cuda._nvrtc()
    except cuda.KernelError as error:
        pytest.skip(str(error))
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / name)
    cuda._cubin.cache_clear()
    return tmp_path / "fedcc" / "kernels"


class Mixed(ctypes.Structure):
    _fields_ = (
        ("flag", ctypes.c_int),
        ("pointer", ctypes.c_void_p),
        ("rate", ctypes.c_float),
        ("exact", ctypes.c_double),
        ("count", ctypes.c_int),
    )


def test_arguments_lie_as_the_c_compiler_lays_them() -> None:
    tensor = torch.zeros(3)
    given = cuda.arguments(True, tensor, 0.1, ctypes.c_double(0.1), -5)
    assert len(given) == ctypes.sizeof(Mixed)
    found = Mixed.from_buffer_copy(given)
    assert (found.flag, found.pointer, found.exact, found.count) == (1, tensor.data_ptr(), 0.1, -5)
    assert found.rate == pytest.approx(0.1)
    with pytest.raises(struct.error):
        cuda.arguments(1 << 31)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_kernels_of_a_step_compile(architecture: str) -> None:
    for augments in (False, True):
        defines = stepping.image_defines(3, 32, 32, augments)
        cubin = cuda.compiled(cuda.source("step.cu"), defines, architecture)
        assert cubin.startswith(b"\x7fELF")
        assert all(f".text.{name}\0".encode() in cubin for name in ("images", "tick", "adam"))


@pytest.mark.usefixtures("folder")
def test_an_error_in_a_source_is_shown_with_its_line() -> None:
    text = 'extern "C" __global__ void twice(float* x) {\n    x[0] = FACTOR * y;\n}\n'
    with pytest.raises(cuda.KernelError, match=r'(?s)-DFACTOR=2.*few\.cu\(2\): error: identifier "y" is undefined'):
        cuda.compiled(text, {"FACTOR": 2}, "sm_90", "few.cu")


def test_a_source_is_compiled_once_and_again_where_what_is_stored_is_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, compiled = [], cuda.compiled
    monkeypatch.setattr(cuda, "compiled", lambda *given: asked.append(given) or compiled(*given))

    def cubin(architecture: str = "sm_90", **defines: int) -> bytes:
        cuda._cubin.cache_clear()  # as in a new process
        return cuda._cubin("step.cu", tuple(defines.items()), architecture)

    first = cubin()
    assert cubin() == first
    assert len(asked) == 1
    (stored,) = folder.iterdir()
    stored.write_bytes(stored.read_bytes()[:-100])
    assert cubin() == first
    assert len(asked) == 2
    assert stored.read_bytes().endswith(first)
    cubin("sm_80")
    cubin(UNUSED=1)
    assert len(asked) == len(list(folder.iterdir())) + 1 == 4


def test_without_a_folder_to_write_to_it_compiles_all_the_same(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file, where the folder should be")
    assert cuda._cubin("step.cu", (), "sm_90").startswith(b"\x7fELF")


def test_many_are_compiled_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    sizes = [stepping.image_defines(1, size, size, True) for size in (8, 16, 24)]
    cuda.compile_all([("step.cu", name, defines) for defines in sizes for name in ("images", "adam")], DEVICE)
    assert len(list(folder.iterdir())) == 3


@on_gpu
@pytest.mark.parametrize("view", [View(1 / 255, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3), pad=2, flip=True), View(1 / 255)])
def test_images_are_those_of_the_view(view: View) -> None:
    lanes, window, batch, first = 3, 4, 5, 2
    g = torch.Generator().manual_seed(0)
    pool = torch.randint(0, 256, (40, 3, 33, 31), dtype=torch.uint8, generator=g)
    plan = torch.randint(0, 12, (lanes, window, batch), dtype=torch.int32, generator=g)
    draws = torch.randint(0, 5, (lanes, window, batch if view.augments else 0, 3), dtype=torch.uint8, generator=g)
    draws[..., 2] %= 2
    place, offset, rows = torch.tensor([1, 3, 0]), torch.tensor([[0], [15], [28]]), torch.arange(lanes)
    drawn = draws[rows, place].flatten(0, 1).long()
    expected = view.augmented(pool[plan[rows, place].long() + offset].flatten(0, 1), drawn)
    expected = expected.view(lanes, batch, 3, 33, 31).permute(0, 1, 3, 4, 2)
    out = torch.full((lanes, first + batch + 1, 33, 31, 3), -77.0, dtype=torch.bfloat16, device=DEVICE)
    stepping.images(*(t.to(DEVICE) for t in (pool, plan, draws, place, offset)), view, out, first)
    torch.testing.assert_close(out[:, first:-1].cpu(), expected.bfloat16(), rtol=2**-7, atol=1e-6)
    assert (out[:, :first] == -77).all()
    assert (out[:, -1] == -77).all()


@on_gpu
@pytest.mark.parametrize("captured", [False, True])
def test_a_step_of_adam(captured: bool) -> None:
    lanes, size = 5, 1000
    g = torch.Generator().manual_seed(0)
    counts = {"age": 3.0, "length": 9.0, "lr": 0.1, "cosine": 1.0, "loss": 2.0}
    numbers = {n: torch.full((lanes,), v, dtype=torch.float64, device=DEVICE) for n, v in counts.items()}
    numbers |= {"at": torch.arange(lanes, device=DEVICE), "place": torch.zeros(lanes, dtype=torch.long, device=DEVICE)}
    p, m, v, grad = (torch.rand(size, generator=g).to(DEVICE) for _ in range(4))
    lane = torch.randint(0, lanes, (size,), dtype=torch.int32, generator=g).to(DEVICE)
    losses = torch.rand(lanes, generator=g).to(DEVICE)
    before = {n: t.clone() for n, t in numbers.items()}
    old = p.clone(), m.clone(), v.clone()

    def step() -> None:
        stepping.adam(p, m, v, grad, lane, *stepping.tick(losses, numbers, BETAS), BETAS, EPS)

    step()
    if captured:  # replayed from where it began
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for tensor, kept in zip((p, m, v, *numbers.values()), (*old, *before.values()), strict=True):
            tensor.copy_(kept)
        graph.replay()
    slower = 0.5 * (1 - torch.cos(math.pi * before["at"].double() / 9))
    rate = (0.1 * (1 - slower) / (1 - BETAS[0] ** 4)).float()[lane]
    mean, square = old[1].lerp(grad, 1 - BETAS[0]), old[2] * BETAS[1] + grad * grad * (1 - BETAS[1])
    torch.testing.assert_close(m, mean)
    torch.testing.assert_close(v, square)
    torch.testing.assert_close(p, old[0] - rate * mean / (square.sqrt() * (1 - BETAS[1] ** 4) ** -0.5 + EPS))
    torch.testing.assert_close(numbers["loss"], 2 + losses.double())
    assert numbers["age"].tolist() == [4.0] * lanes
    assert numbers["at"].tolist() == [1, 2, 3, 4, 5]
    assert numbers["place"].tolist() == [1] * lanes


@on_gpu
def test_a_kernel_says_what_is_wrong_with_a_launch() -> None:
    tick = cuda.kernel("step.cu", "tick", {}, DEVICE)
    with pytest.raises(cuda.KernelError, match=r"tick, grid .* 2048 threads"):
        tick((1, 1, 1), 2048, 0, bytes(104), DEVICE)
    with pytest.raises(cuda.KernelError, match=r"no kernel 'tock' in step\.cu"):
        cuda.kernel("step.cu", "tock", {}, DEVICE)
