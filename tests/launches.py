"""Kernels of the engine as tests launch them: on a GPU or, without one, on a CPU (`cuda_on_cpu`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cuda_on_cpu import arguments, emulated, guarded
from fedcc.engine import cuda

ENGINE = Path(cuda.__file__).parent
Launch = Callable[..., None]


def twice(real: Launch | None) -> Launch:
    """What launches a kernel two times on copies of its tensors and wants the same bits, whatever the order of work.

    On a CPU, where ``real`` is none, memory behind each tensor cannot be touched, and the orders are other ones; a
    kernel that begins early finds the packed weights, [lanes, 9, in, out], and nothing else until it waits.
    """

    def launch(
        file: str, name: str, defines: Mapping[str, int], grid: tuple[int, int, int], threads: int, shared: int,
        values: Sequence[Any], early: bool = False,
    ) -> None:  # fmt: skip
        tensors = {(v.data_ptr(), v.nbytes): v for v in values if isinstance(v, Tensor)}
        assert all(t.is_contiguous() for t in tensors.values()), f"{name} reads tensors as they lie"
        ends = []
        for seed in range(2):
            own = {key: t.detach().clone() if real else guarded(t.detach()) for key, t in tensors.items()}
            given = [own[v.data_ptr(), v.nbytes] if isinstance(v, Tensor) else v for v in values]
            if real:
                real(file, name, defines, grid, threads, shared, given, early)
            else:
                kernel = emulated(ENGINE / file, dict(defines), name)
                later = [t for t in own.values() if early and (t.ndim, t.dtype) != (4, torch.bfloat16)]
                kernel(grid, threads, shared, arguments(*given), seed=seed, later=later)
            ends.append(own)
        for key, tensor in tensors.items():
            first, second = (end[key].flatten().view(torch.uint8) for end in ends)
            assert torch.equal(first, second), f"{name} gives other bits in another order"
            tensor.data.copy_(ends[0][key])  # as a kernel writes: autograd does not know

    return launch
