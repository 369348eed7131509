"""CUDA C++ compiled at run time by NVRTC, which comes with torch, and launched by the driver, both through ctypes.

A source is compiled once for a set of defines and an architecture; the result stays in memory and in the user's cache
folder. Kernels are ``extern "C"`` and take one struct by value, which :func:`arguments` packs.
"""

import ctypes
import hashlib
import importlib.util
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcc.core.files import write_whole

OLDEST = (8, 0)  # compute capability: the first with bf16
LEAST_SHARED = 160 * 1024  # bytes per block: the widest kernel needs them; some cheaper GPUs have less
STATIC_SHARED, DYNAMIC_SHARED = 1, 8  # CUfunction_attribute: bytes it takes, and bytes a launch may add
SERIALIZATION = 6  # CUlaunchAttributeID: programmatic stream serialization
GRAPH_EDGES = 12030  # the first CUDA driver whose graphs keep that attribute
ALL_SHARED = 97  # CUdevice_attribute: bytes that a block can have


class KernelError(RuntimeError):
    """A kernel cannot be compiled, loaded or launched."""


def arguments(*values: Tensor | float | ctypes.c_double) -> bytes:
    """A C struct: a tensor is a pointer to its data, other values are an int, a float or a double.

    >>> arguments(True, 2, 0.5) == bytes([1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 63])
    True
    >>> len(arguments(1, torch.zeros(3), 2))  # 4 bytes before the pointer and at the end are padding
    24
    """
    formats = {Tensor: "Q", ctypes.c_double: "d", int: "i"}
    kinds = "".join(next((f for kind, f in formats.items() if isinstance(value, kind)), "f") for value in values)
    numbers = (v.data_ptr() if isinstance(v, Tensor) else getattr(v, "value", v) for v in values)
    end = "0Q" if set(kinds) & set("Qd") else ""  # padded to the alignment of its widest part
    return struct.pack(f"@{kinds}{end}", *numbers)


@cache
def source(name: str) -> str:
    """The text of a ``.cu`` file of this folder."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _nvrtc_paths() -> Iterator[str]:
    """Where NVRTC may be: what torch has loaded already, what came with it, then the system's."""
    major = (torch.version.cuda or "").split(".")[0]
    if os.name == "nt":
        yield f"nvrtc64_{major}0_0.dll"
        return
    if major:
        yield f"libnvrtc.so.{major}"
    packages = importlib.util.find_spec("nvidia")
    folders = list(packages.submodule_search_locations or ()) if packages else []
    patterns = [(folder, f"*/lib/libnvrtc.so.{major}*") for folder in folders]
    patterns.append((str(Path(torch.__file__).parent), "lib/libnvrtc*.so*"))
    patterns += [(home, "lib64/libnvrtc.so*") for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    for folder, pattern in patterns:
        yield from (str(path) for path in sorted(Path(folder).glob(pattern)) if "builtins" not in path.name)
    yield "libnvrtc.so"


@cache
def _nvrtc() -> ctypes.CDLL:
    for path in _nvrtc_paths():
        with suppress(OSError):
            library = ctypes.CDLL(path)
            library.nvrtcGetErrorString.restype = c_char_p
            return library
    raise KernelError("NVRTC was not found: it comes with torch for CUDA, or as the package nvidia-cuda-nvrtc")


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError as error:
        raise KernelError(f"CUDA's driver was not found: {error}") from error


def _compiler(function: str, *args: Any) -> None:
    """Call NVRTC."""
    result = getattr(_nvrtc(), function)(*args)
    if result:
        raise KernelError(f"{function}: {_nvrtc().nvrtcGetErrorString(result).decode()}")


def _cuda(function: str, *args: Any) -> None:
    """Call the driver."""
    result = getattr(_driver(), function)(*args)
    if result:
        text = c_char_p()
        _driver().cuGetErrorString(result, byref(text))
        raise KernelError(f"{function}: {(text.value or str(result).encode()).decode()}")


@cache
def available(device: torch.device) -> bool:
    """Whether kernels can be compiled for this device and launched there."""
    if device.type != "cuda" or not torch.version.cuda or not torch.cuda.is_available():
        return False
    if torch.cuda.get_device_capability(device) < OLDEST:
        return False
    with suppress(KernelError):
        return bool(_nvrtc()) and _most_shared(_device(_index(device))) >= LEAST_SHARED
    return False


def compiled(text: str, defines: Mapping[str, int], architecture: str, name: str = "kernels.cu") -> bytes:
    """Machine code (a cubin) for an architecture such as ``sm_90``; needs no GPU."""
    options = [f"--gpu-architecture={architecture}", "-std=c++17", *(f"-D{n}={int(v)}" for n, v in defines.items())]
    program, size = c_void_p(), c_size_t()
    _compiler("nvrtcCreateProgram", byref(program), text.encode(), name.encode(), 0, None, None)
    try:
        encoded = (c_char_p * len(options))(*(option.encode() for option in options))
        try:
            _compiler("nvrtcCompileProgram", program, len(options), encoded)
        except KernelError as error:
            _compiler("nvrtcGetProgramLogSize", program, byref(size))
            log = ctypes.create_string_buffer(size.value)
            _compiler("nvrtcGetProgramLog", program, log)
            raise KernelError(f"{name} with {' '.join(options)}: {error}\n{log.value.decode()}") from None
        _compiler("nvrtcGetCUBINSize", program, byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        _compiler("nvrtcGetCUBIN", program, cubin)
        return cubin.raw
    finally:
        _compiler("nvrtcDestroyProgram", byref(program))


@cache
def _cubin(file: str, defines: tuple[tuple[str, int], ...], architecture: str) -> bytes:
    """Machine code from the user's cache folder; compiled and stored there if missing."""
    major, minor = c_int(), c_int()
    _compiler("nvrtcVersion", byref(major), byref(minor))
    inputs = repr((source(file), defines, architecture, major.value, minor.value))
    name = f"{Path(file).stem}-{architecture}-{hashlib.sha256(inputs.encode()).hexdigest()[:32]}.cubin"
    path = Path()
    with suppress(OSError, RuntimeError):  # a user may have no home
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedcc" / "kernels" / name
        stored = path.read_bytes()
        if hashlib.sha256(stored[32:]).digest() == stored[:32]:  # the driver would read past the end of a truncated one
            return stored[32:]
    cubin = compiled(source(file), dict(defines), architecture, file)
    with suppress(OSError):  # a folder that cannot be written to only costs time
        if not path.name:
            return cubin
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, hashlib.sha256(cubin).digest() + cubin)
    return cubin


def _architecture(device: torch.device) -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def compile_all(kernels: Sequence[tuple[str, str, Mapping[str, int]]], device: torch.device) -> None:
    """Compile kernels, (file, name, defines) each, on all cores."""
    architecture = _architecture(device)
    sources = dict.fromkeys((file, tuple(sorted(defines.items()))) for file, _, defines in kernels)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda source: _cubin(*source, architecture), sources))


@contextmanager
def _current(context: c_void_p) -> Iterator[None]:
    """Make torch's context of a device current in this thread: a new thread, such as autograd's, may have none."""
    _cuda("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        _cuda("cuCtxPopCurrent_v2", byref(c_void_p()))


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int), ("rest", ctypes.c_char * 60))


class _Launch(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """A function on a device."""

    name: str
    function: c_void_p
    context: c_void_p
    size: int | None  # bytes of its struct, where the driver can say

    def __call__(
        self, grid: tuple[int, int, int], threads: int, shared: int, arguments: bytes, device: torch.device,
        early: bool = False,
    ) -> None:  # fmt: skip
        """Launch it on torch's current stream of its device, without allocating or waiting.

        ``early``: it may begin while the kernel before it ends, if that one allows it; it waits by itself.
        """
        if self.size not in (None, len(arguments)):
            raise KernelError(f"{self.name} takes a struct of {self.size} bytes, got {len(arguments)}")
        buffer = ctypes.create_string_buffer(arguments, len(arguments))
        parameters = (c_void_p * 1)(ctypes.addressof(buffer))
        stream = c_void_p(torch.cuda.current_stream(device).cuda_stream)
        config = _Launch((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(threads, 1, 1), shared, stream)
        if early and _overlaps(_index(device)):
            config.attributes, config.count = (_Attribute * 1)(_Attribute(id=SERIALIZATION, value=1)), 1
        with _current(self.context):
            try:
                _cuda("cuLaunchKernelEx", byref(config), self.function, parameters, None)
            except KernelError as error:
                launch = f"{self.name}, grid {grid}, {threads} threads, {shared} bytes of shared memory"
                raise KernelError(f"{launch}: {error}") from None


class Side:
    """A stream beside the current one, for work that is needed later; without one everything runs in order.

    A stretch begins after everything that was launched before it, and a join follows. So memory allocated on this
    stream is reused only after its uses elsewhere; memory allocated elsewhere and used here must live until the join.
    """

    def __init__(self, device: torch.device, enabled: bool = True):
        self.device, self.active = device, False
        self.stream: Any = None
        if enabled and device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def stretch(self) -> Iterator[None]:
        """What is launched inside the block runs beside what is launched after it."""
        if self.stream is None:
            yield
            return
        self.active = True
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> Any:
        """An event after what was launched here so far."""
        return None if self.stream is None else self.stream.record_event()

    def join(self, mark: Any = None) -> None:
        """What is launched next waits for everything launched here, or for what was launched before the mark."""
        if self.active:  # a capture must not wait for a stream that is not part of it
            torch.cuda.current_stream(self.device).wait_event(mark or self.mark())
            self.active = mark is not None


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _device(index: int) -> c_int:
    device = c_int()
    _cuda("cuDeviceGet", byref(device), index)
    return device


def _most_shared(device: c_int) -> int:
    """The most bytes of shared memory that a block can have."""
    most = c_int()
    _cuda("cuDeviceGetAttribute", byref(most), ALL_SHARED, device)
    return most.value


@cache
def _overlaps(index: int) -> bool:
    """Whether GPU and driver let a kernel begin while another ends, also in a captured graph."""
    version = c_int()
    _cuda("cuDriverGetVersion", byref(version))
    return torch.cuda.get_device_capability(index) >= (9, 0) and version.value >= GRAPH_EDGES


@cache
def _module(file: str, defines: tuple[tuple[str, int], ...], index: int) -> tuple[c_void_p, c_void_p]:
    """A loaded source and its context; never unloaded."""
    cubin = _cubin(file, defines, _architecture(torch.device("cuda", index)))
    context, module = c_void_p(), c_void_p()
    _cuda("cuDevicePrimaryCtxRetain", byref(context), _device(index))
    with _current(context):
        _cuda("cuModuleLoadData", byref(module), cubin)
    return context, module


@cache
def _kernel(file: str, name: str, defines: tuple[tuple[str, int], ...], index: int) -> Kernel:
    context, module = _module(file, defines, index)
    function, static, size = c_void_p(), c_int(), c_size_t()
    with _current(context):
        try:
            _cuda("cuModuleGetFunction", byref(function), module, name.encode())
        except KernelError as error:
            raise KernelError(f"no kernel {name!r} in {file} with {dict(defines)}: {error}") from None
        _cuda("cuFuncGetAttribute", byref(static), STATIC_SHARED, function)
        # The maximum, set once: a launch, which may be captured in a graph, then sets nothing.
        _cuda("cuFuncSetAttribute", function, DYNAMIC_SHARED, _most_shared(_device(index)) - static.value)
        has_size = hasattr(_driver(), "cuFuncGetParamInfo")  # since CUDA 12.4
        if has_size:
            _cuda("cuFuncGetParamInfo", function, c_size_t(0), byref(c_size_t()), byref(size))
    return Kernel(name, function, context, size.value if has_size else None)


def kernel(file: str, name: str, defines: Mapping[str, int], device: torch.device) -> Kernel:
    """A kernel of a ``.cu`` file of this folder; the first call loads it, which is not possible during a capture."""
    return _kernel(file, name, tuple(sorted(defines.items())), _index(device))


def launch(
    file: str, name: str, defines: Mapping[str, int], grid: tuple[int, int, int], threads: int, shared: int,
    values: Sequence[Tensor | float | ctypes.c_double], early: bool = False,
) -> None:  # fmt: skip
    """Launch a kernel of a ``.cu`` file of this folder on its tensors' device, with ``values`` as its struct."""
    device = next(value for value in values if isinstance(value, Tensor)).device
    kernel(file, name, defines, device)(grid, threads, shared, arguments(*values), device, early)
