"""CUDA C++ at run time: structs, compiling (wherever NVRTC is) and, on a GPU, what is wrong with a launch."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import pytest
import torch

from fedcc.core.model import Arch
from fedcc.core.rng import Key
from fedcc.core.samples import View
from fedcc.engine import cuda, step_kernels
from fedcc.engine import trunk_kernels as kernels
from fedcc.engine.stack import Stacked, stacked_state
from fedcc.nets import ResNet, build

DEVICE = torch.device("cuda")
on_gpu = pytest.mark.skipif(not cuda.available(DEVICE), reason="no GPU with NVRTC")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, with NVRTC there to fill it."""
    try:
        cuda._nvrtc()
    except cuda.KernelError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
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
    for view in (View(), View(pad=4, flip=True), View(pad=4, flip=True).with_augment("strong")):
        defines = step_kernels.image_defines(3, 32, 32, view)
        cubin = cuda.compiled(cuda.source("step.cu"), defines, architecture)
        assert cubin.startswith(b"\x7fELF")
        assert all(
            f".text.{name}\0".encode() in cubin for name in ("images", "rows", "head", "head_back", "tick", "adam")
        )


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_kernels_of_a_trunk_compile(architecture: str) -> None:
    arch = Arch((ResNet(8),), 5, (3, 8, 8))
    stack = Stacked(arch, True).train()
    state = stacked_state([build(arch, Key(0)).state_dict()], stack.template)
    stack.use({name: value.requires_grad_(name in stack.parameter_names) for name, value in state.items()})
    with kernels.collect_launches() as found:
        stack.fast[0](torch.zeros(1, 2, 3, 8, 8, dtype=torch.bfloat16)).sum().backward()
    each = {name: (file, defines) for file, name, defines in found}
    assert set(each) == {"gather", "conv", "tail", "pool", "back", "grad", "collect"}
    for name, (file, defines) in each.items():
        assert f".text.{name}\0".encode() in cuda.compiled(cuda.source(file), defines, architecture)


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


def test_without_a_home_it_compiles_all_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    cuda._cubin.cache_clear()
    assert cuda._cubin("step.cu", (), "sm_90").startswith(b"\x7fELF")
    assert not folder.exists()


def test_many_are_compiled_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    sizes = [step_kernels.image_defines(1, size, size, View(pad=2)) for size in (8, 16, 24)]
    cuda.compile_all([("step.cu", name, defines) for defines in sizes for name in ("images", "adam")], DEVICE)
    assert len(list(folder.iterdir())) == 3


@on_gpu
def test_a_kernel_says_what_is_wrong_with_a_launch() -> None:
    tick = cuda.kernel("step.cu", "tick", {}, DEVICE)
    with pytest.raises(cuda.KernelError, match=r"tick, grid .* 2048 threads"):
        tick((1, 1, 1), 2048, 0, bytes(112), DEVICE)
    with pytest.raises(cuda.KernelError, match=r"no kernel 'tock' in step\.cu"):
        cuda.kernel("step.cu", "tock", {}, DEVICE)
