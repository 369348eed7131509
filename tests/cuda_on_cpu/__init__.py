"""The project's CUDA kernels on a CPU: compiled by g++ against `cuda.h` of this folder, thread by thread.

conv = emulated(source, {"CHANNELS": 64}, "conv")
conv((images, 1, 1), 256, 40_000, arguments(guarded(x), guarded(weights), images, 1e-5))
"""

import ctypes
import functools
import mmap
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pytest
import torch
from torch import Tensor

from fedcc.engine.cuda import arguments

__all__ = ["AVAILABLE", "Kernel", "KernelError", "arguments", "emulated", "guarded", "needs_compiler"]

HERE = Path(__file__).parent
# Not optimised, since kernels take longer to compile than to run; a fortified longjmp refuses to change stacks; a large
# frame must not leap over the page below its stack.
FLAGS = ["-std=c++17", "-O0", "-fPIC", "-U_FORTIFY_SOURCE", "-fstack-clash-protection", "-w", "-DON_CPU"]
CHECKS = ["-fsanitize=alignment,bounds", "-fno-sanitize-recover=all"]

AVAILABLE = sys.platform == "linux" and shutil.which("g++") is not None
needs_compiler = pytest.mark.skipif(not AVAILABLE, reason="needs g++ on Linux")


class KernelError(Exception):
    """A kernel did what a GPU forbids: the message says which block, which thread and what."""


class Kernel(Protocol):
    def __call__(
        self, grid: tuple[int, int, int], threads: int, shared_bytes: int, arguments: bytes, *, seed: int = 0,
        later: Sequence[Tensor] = (),
    ) -> None: ...  # fmt: skip


class Launch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in "xyz"),
        ("threads", ctypes.c_int),
        ("shared_bytes", ctypes.c_int),
        ("seed", ctypes.c_uint),
    )


def emulated(source: Path, defines: dict[str, object], kernel: str) -> Kernel:
    """The kernel of that name, to be launched; another `seed` gives another order of blocks, warps and copies.

    What tensors in `later` hold is there only once the kernel has waited (`follow`); before that, no numbers.
    """
    library = _library(source.resolve(), source.read_text(), tuple(defines.items()), kernel)
    run = library.emulate
    run.restype = ctypes.c_char_p
    run.argtypes = (ctypes.POINTER(Launch), ctypes.c_char_p, ctypes.c_size_t)

    def launch(
        grid: tuple[int, int, int], threads: int, shared_bytes: int, arguments: bytes, *, seed: int = 0,
        later: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        held = [tensor.clone() for tensor in later]
        for tensor, value in zip(later, held, strict=True):
            tensor.flatten().view(torch.uint8).fill_(255)
            given = (ctypes.c_void_p(t.data_ptr()) for t in (tensor, value))
            library.arrive(*given, ctypes.c_size_t(tensor.nbytes))
        error = run(ctypes.byref(Launch(*grid, threads, shared_bytes, seed)), arguments, len(arguments))
        if error is not None:
            raise KernelError(f"{kernel}, {error.decode()}")

    return launch


@functools.cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="cuda_on_cpu_")


@functools.cache
def _header() -> Path:
    """A folder with `cuda.h`, and beside it the same as the compiler reads it fastest."""
    header = Path(shutil.copy(HERE / "cuda.h", _folder().name))
    _compile([*FLAGS, *CHECKS, "-x", "c++-header", str(header), "-o", f"{header}.gch"], header.name)
    return header.parent


def _compile(options: list[str], name: str) -> None:
    done = subprocess.run(["g++", *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelError(f"{name} does not compile:\n{done.stderr}")


@functools.cache
def _library(source: Path, text: str, defines: tuple[tuple[str, object], ...], kernel: str) -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp(dir=_folder().name))
    main, compiled, library = folder / "main.cpp", folder / "main.o", folder / "main.so"
    given = "".join(f"#define {name} {value}\n" for name, value in defines)
    main.write_text(  # the names given come after cuda.h, which they might otherwise change
        f'#include "cuda.h"\n{given}#line 1 "{source}"\n{text}\n'
        f'extern "C" const char *emulate(const emulator::Launch *launch, const void *arguments, size_t bytes) {{\n'
        f"    return emulator::run({kernel}, *launch, arguments, bytes);\n}}\n"
        'extern "C" void arrive(void *to, const void *from, size_t bytes) {\n'
        "    emulator::arrivals.push_back({to, from, bytes});\n}\n"
    )
    # In two steps, so that the compiler's own library for the checks is not linked: cuda.h has what they call.
    folders = [f"-I{place}" for place in (_header(), source.parent)]
    _compile([*FLAGS, *CHECKS, *folders, "-c", str(main), "-o", str(compiled)], source.name)
    _compile(["-shared", str(compiled), "-o", str(library)], source.name)
    return ctypes.CDLL(str(library))


def guarded(tensor: Tensor) -> Tensor:
    """A copy of the tensor, contiguous, that ends where memory that cannot be touched begins.

    A kernel that reads or writes behind it gets a `KernelError`; up to 15 bytes are free where the tensor's length is
    no multiple of 16.
    """
    if not tensor.numel():
        return tensor.clone()  # its address is null
    bytes_kept = -(-tensor.nbytes // 16) * 16
    size = -(-bytes_kept // mmap.PAGESIZE) * mmap.PAGESIZE
    area = mmap.mmap(-1, size + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    library = ctypes.CDLL(None, use_errno=True)
    if library.mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    within = torch.frombuffer(area, dtype=tensor.dtype, count=tensor.numel(), offset=size - bytes_kept)
    return within.view(tensor.shape).copy_(tensor)
