"""A memory map as a tensor: batches and slices are read from the file when they are used."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fedcc.inputs.maps import MappedRows

aten = torch.ops.aten


class MappedTensor(Tensor):
    """Rows of a memory map. Indices and single rows are read, slices and mirror images stay in the file.

    Any other use, such as a copy to a GPU, reads all rows.

    >>> import numpy as np
    >>> x = MappedTensor(MappedRows.of(np.arange(6.0).reshape(3, 2)))
    >>> type(x[1:]).__name__, x[torch.tensor([2, 0])].tolist(), (x + 1).sum().item()
    ('MappedTensor', [[4.0, 5.0], [0.0, 1.0]], 21.0)
    """

    source: MappedRows

    @staticmethod
    def __new__(cls, source: MappedRows) -> MappedTensor:
        dtype = torch.from_numpy(source.read(slice(0))).dtype
        tensor: MappedTensor = Tensor._make_wrapper_subclass(cls, source.shape, dtype=dtype)
        tensor.source = source
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MappedTensor({list(self.shape)}, {self.dtype})"

    def numpy(self, *, force: bool = False) -> NDArray[Any]:
        return self.source.read()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        x, rest = args[0], args[1:]
        if isinstance(x, cls):
            if func is aten.detach.default:
                return x
            if func is aten.index.Tensor and len(rest[0]) == 1:
                return torch.from_numpy(x.source.read(rest[0][0].cpu().numpy()))
            if func is aten.select.int and rest[0] == 0:
                return torch.from_numpy(x.source.read(slice(rest[1], rest[1] + 1 or None)))[0]
            if func is aten.slice.Tensor and (not rest or rest[0] == 0):
                return cls(x.source[slice(*rest[1:])] if rest[1:] else x.source)
            if func is aten.flip.default and not any(axis in (0, -x.ndim) for axis in rest[0]):
                return cls(x.source.flipped(tuple(rest[0])))
        args, kwargs = tree_map_only(cls, lambda t: torch.from_numpy(t.source.read()), (args, kwargs or {}))
        return func(*args, **kwargs)
