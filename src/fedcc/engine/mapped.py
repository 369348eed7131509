"""Many networks of one architecture together by ``torch.func``: for networks that surgery cannot stack.

The network itself computes, mapped over the clients' tensors (``torch.vmap``), so any layer works for which torch has
a batching rule: other norms, attention, embeddings, channels that mix outside modules. LSTM and GRU, which have none,
compute step by step (``recurrent.py``). It is compared with the networks one by one in float64 before use, and tried
once where it will train.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from fedcc.core.model import Arch, Outputs
from fedcc.core.rng import Key
from fedcc.engine.graphs import captured, no_waiting
from fedcc.engine.recurrent import unroll_recurrent
from fedcc.engine.stack import Stacked, Together, difference, unstackable_reason
from fedcc.nets.dropout import dropout_layers
from fedcc.nets.network import build

# What torch's autocast computes in low precision, and what in full; autocast itself does not reach into vmap on CPUs.
LOW: set[Callable[..., Any]] = {
    F.linear, F.bilinear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
    torch.conv1d, torch.conv2d, torch.conv3d, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm,
    torch.einsum, Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm,
    F.scaled_dot_product_attention, F.multi_head_attention_forward, F.prelu,
}  # fmt: skip
FULL: set[Callable[..., Any]] = {
    F.batch_norm, F.layer_norm, F.group_norm, F.instance_norm, F.rms_norm, F.normalize, F.softmax, F.log_softmax,
    torch.softmax, torch.log_softmax, Tensor.softmax, Tensor.log_softmax, torch.layer_norm, torch.group_norm,
    torch.exp, torch.log, torch.pow, torch.rsqrt, Tensor.exp, Tensor.log, Tensor.pow, Tensor.rsqrt,
    torch.expm1, torch.log1p, torch.log2, torch.log10, Tensor.expm1, Tensor.log1p, Tensor.log2, Tensor.log10,
    torch.cumsum, torch.cumprod, torch.prod, torch.logsumexp, Tensor.cumsum, Tensor.cumprod, Tensor.prod,
    Tensor.logsumexp, torch.norm, Tensor.norm, torch.cdist, F.softplus, F.cosine_similarity, F.local_response_norm,
    F.grid_sample, torch.grid_sampler, torch.cross, torch.dot, torch.tensordot,  # autocast: the widest of their inputs'
}  # fmt: skip


class AloneWarning(UserWarning):
    """Networks that could train together train one after another."""


class LowPrecision(TorchFunctionMode):
    """Matrix products and convolutions in one number format, norms and the like in another."""

    def __init__(self, low: torch.dtype, full: torch.dtype):
        super().__init__()
        self.low, self.full = low, full

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = self.low if func in LOW else self.full if func in FULL else None
        if dtype is not None:
            args = [_cast(a, dtype) for a in args]
            kwargs = {name: _cast(a, dtype) for name, a in (kwargs or {}).items()}
        if func is F.embedding:
            return _embedding(*args, **(kwargs or {}))
        if func is F.group_norm and args:  # vmap takes it in this layout only; a convolution may leave another
            args = [args[0].contiguous(), *args[1:]]
        return func(*args, **(kwargs or {}))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _embedding(tokens: Tensor, table: Tensor, padding_idx: int | None = None, **options: Any) -> Tensor:
    """Rows of a table. vmap makes one table of all clients', of which torch would freeze a single padding row."""
    out = F.embedding(tokens, table, **options)
    if padding_idx is None:
        return out
    return torch.where((tokens == padding_idx % len(table)).unsqueeze(-1), out.detach(), out)


class Mapped(Together):
    """K networks by ``torch.vmap`` over one network's forward."""

    casts = True

    def __init__(self, arch: Arch):
        network = build(arch, Key(0))
        unroll_recurrent(network)
        super().__init__(network)
        self.network = [network]  # not a child, so that its modules keep their names here
        self.trunks, self.head = network.trunks, network.head
        self.dropouts = dropout_layers(network)
        self.norms = [m for m in network.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        if any(norm.momentum is None and norm.training for norm in self.norms):
            raise ValueError("BatchNorm with momentum=None averages over all its batches, which each client counts")
        self.low: torch.dtype | None = None  # None: the tensors' own
        self.train()

    def forward(self, x: Tensor) -> Outputs:
        """Outputs ``[K, batch, ...]`` of inputs ``[K, batch, ...]``."""

        def one(tensors: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
            logits, features = functional_call(self.network[0], tensors, (x,), strict=False)
            return logits, features

        full = self.slots["head.weight"].dtype
        with attention_by_products(), LowPrecision(self.low or full, full):
            return Outputs(*torch.vmap(one)(self.slots, x))

    def freeze_statistics(self, freeze: bool) -> None:
        for norm in self.norms:
            norm.track_running_stats = not freeze


@contextmanager
def attention_by_products() -> Iterator[None]:
    """Attention as products and a softmax: torch's other forms of it have no batching rule, or no gradient."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@lru_cache(maxsize=256)
def unmappable_reason(arch: Arch) -> str:
    """Why mapped networks would not compute what the networks compute one by one; empty if they do."""
    try:
        return difference(arch, Mapped(arch).double())
    except Exception as error:  # whatever goes wrong, this network trains alone
        return f"{type(error).__name__}: {error}"


def together(arch: Arch, kernels: bool, device: torch.device, dtype: torch.dtype, low: torch.dtype) -> Together:
    """Networks of one architecture together, by surgery where that is possible."""
    if not unstackable_reason(arch):
        return Stacked(arch, kernels)
    mapped = Mapped(arch).to(device, dtype)
    mapped.low = low
    return mapped


def alone_reason(arch: Arch, device: torch.device, dtype: torch.dtype, low: torch.dtype) -> str:
    """Why networks of this architecture cannot train together on a device; empty if they can."""
    stacking = unstackable_reason(arch)
    if not stacking:
        return ""
    mapping = unmappable_reason(arch)
    if not mapping:
        try:
            _trial(together(arch, False, device, dtype, low), arch, device, dtype)
        except torch.cuda.OutOfMemoryError:  # who else uses the device must not decide how networks are computed
            raise
        except Exception as error:  # an operation that this device or number format lacks
            mapping = f"{type(error).__name__}: {error}"
    return f"{stacking}; {mapping}" if mapping else ""


def _trial(networks: Together, arch: Arch, device: torch.device, dtype: torch.dtype) -> None:
    """A forward and a backward pass of two networks, captured as a graph on a GPU, and one in evaluation."""
    floating = {n: v for n, v in networks.template.items() if v.is_floating_point()}
    networks.use({n: torch.stack([v, v]).to(device, dtype).requires_grad_() for n, v in floating.items()})
    networks.use({n: networks.slots[n].detach() for n in floating if n not in networks.trainable})
    networks.use({f"{name}.seed": torch.arange(2, device=device) for name in networks.dropouts})
    leaves = [networks.slots[n] for n in networks.trainable]
    x = torch.ones(2, 2, *arch.shape, dtype=torch.long if arch.tokens else dtype, device=device)
    if len(arch.shape) == 3:  # images may come with channels last
        x = x.movedim(2, -1).contiguous().movedim(-1, 2)

    def step() -> None:
        torch.autograd.grad(networks(x).logits.to(dtype).square().sum(), leaves, allow_unused=True)

    step()
    if device.type == "cuda":
        with no_waiting():
            step()
        captured(step, device, step)
    with torch.no_grad():
        networks.eval()(x)
