"""Many networks of one architecture as one: the clients' channels side by side, by replacing layers of the network.

An activation of K clients is ``[batch, K x channels, ...]``, the client outermost, so that convolutions become grouped
ones, BatchNorm runs over all channels at once, and layers without parameters stay as they are. Channels may mix only
inside modules; :func:`unstackable_reason` tests this on the network itself, so there is no list of known networks.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedcc.core.model import Arch, Outputs
from fedcc.core.rng import Key
from fedcc.engine.step_kernels import head
from fedcc.engine.trunk import MOST_CHANNELS, FastTrunk
from fedcc.nets.dropout import SeededDropout, dropout_layers
from fedcc.nets.network import Network, Trainable, build
from fedcc.nets.resnet import Shortcut, _ResNet

MORE_SURGERY = False  # GroupNorm and dropout, too, instead of vmap: which is faster on a GPU is to be measured
COUNTER = ".num_batches_tracked"
LARGE, LARGE_INPUT = 5_000_000, 3 * 64 * 64  # numbers of a network or an input, beyond which less is compared


class Unstackable(Exception):
    """A network with layers that have no stacked form."""


class StackedLayer(nn.Module):
    """Reads its tensors, ``[K, ...]`` each, from the slots of its network."""

    def __init__(self, slots: dict[str, Tensor], name: str):
        super().__init__()
        self.slots, self.name = slots, name

    def tensor(self, name: str) -> Tensor:
        return self.slots[f"{self.name}.{name}"]

    def optional(self, name: str) -> Tensor | None:
        return self.slots.get(f"{self.name}.{name}")


class StackedConv(StackedLayer):
    def __init__(self, slots: dict[str, Tensor], name: str, conv: nn.Conv2d):
        super().__init__(slots, name)
        if conv.padding_mode != "zeros":
            raise Unstackable(f"{name}: padding mode {conv.padding_mode}")
        self.settings: tuple[Any, Any, Any] = conv.stride, conv.padding, conv.dilation
        self.groups = conv.groups

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.tensor("weight"), self.optional("bias")
        groups = self.groups * len(weight)
        flat = None if bias is None else bias.reshape(-1).to(x.dtype)
        return F.conv2d(x, weight.flatten(0, 1).to(x.dtype), flat, *self.settings, groups)


class StackedNorm(StackedLayer):
    """BatchNorm over K x C channels: it treats each channel by itself."""

    def __init__(self, slots: dict[str, Tensor], name: str, norm: _BatchNorm):
        super().__init__(slots, name)
        if norm.momentum is None or not norm.track_running_stats:
            raise Unstackable(f"{name}: BatchNorm without running statistics of a fixed momentum")
        self.momentum, self.eps = norm.momentum, norm.eps
        self.freeze = False  # the running statistics, while the batch's are used (the second pass of SAM)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.optional("weight"), self.optional("bias")
        frozen = self.training and self.freeze
        mean = None if frozen else self.tensor("running_mean").view(-1)
        var = None if frozen else self.tensor("running_var").view(-1)
        scale = None if weight is None else weight.reshape(-1)
        shift = None if bias is None else bias.reshape(-1)
        return F.batch_norm(x, mean, var, scale, shift, self.training, self.momentum, self.eps)


class StackedGroups(StackedLayer):
    """GroupNorm: the groups of all clients side by side, in full precision."""

    def __init__(self, slots: dict[str, Tensor], name: str, norm: nn.GroupNorm):
        super().__init__(slots, name)
        if not norm.affine:
            raise Unstackable(f"{name}: GroupNorm without weights")
        self.groups, self.eps = norm.num_groups, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.tensor("weight"), self.tensor("bias")
        groups, full = self.groups * len(weight), x.to(weight.dtype)
        return F.group_norm(full, groups, weight.reshape(-1), bias.reshape(-1), self.eps).to(x.dtype)


class StackedDropout(StackedLayer):
    """Each client's entries are dropped as its own seed says."""

    def __init__(self, slots: dict[str, Tensor], name: str, layer: SeededDropout):
        super().__init__(slots, name)
        self.layer = [layer]  # not a child: what is in evaluation mode is this module

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        seeds = self.tensor("seed")
        own = x.reshape(len(x), len(seeds), -1, *x.shape[2:])
        out = torch.vmap(self.layer[0].dropped, in_dims=(1, 0), out_dims=1)(own, seeds).flatten(1, 2)
        return out.contiguous(memory_format=torch.channels_last) if out.ndim == 4 else out


class StackedLinear(StackedLayer):
    """A linear layer on ``[batch, K x features]``."""

    def forward(self, x: Tensor) -> Tensor:
        clients = len(self.tensor("weight"))
        out = self.per_client(x.reshape(len(x), clients, -1).transpose(0, 1))
        return out.transpose(0, 1).reshape(len(x), -1)

    def per_client(self, x: Tensor) -> Tensor:
        """``[K, batch, in] -> [K, batch, out]``."""
        weight, bias = self.tensor("weight").to(x.dtype), self.optional("bias")
        if bias is None:
            return torch.bmm(x, weight.transpose(1, 2))
        return torch.baddbmm(bias.to(x.dtype).unsqueeze(1), x, weight.transpose(1, 2))

    def fast(self, x: Tensor) -> Tensor:
        """The same on the project's own kernels, in fp32."""
        return head(x, self.tensor("weight"), self.tensor("bias"))


class StackedShortcut(StackedLayer):
    """The shortcut without parameters; each client's channels are padded by themselves."""

    def __init__(self, slots: dict[str, Tensor], name: str, shortcut: Shortcut, anchor: str):
        super().__init__(slots, name)
        self.stride, self.extra, self.anchor = shortcut.stride, shortcut.extra, anchor

    def forward(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if not self.extra:
            return x
        clients = len(self.slots[self.anchor])
        batch, channels, height, width = x.shape
        each = channels // clients
        wide = (each + 2 * self.extra) * clients
        out = torch.zeros((batch, wide, height, width), dtype=x.dtype, device=x.device)
        out = out.to(memory_format=torch.channels_last)
        padded = out.view(batch, clients, -1, height, width)
        padded[:, :, self.extra : self.extra + each] = x.reshape(batch, clients, each, height, width)
        return out


class Together(Trainable, ABC):
    """K networks of one architecture; ``slots`` holds their tensors, ``[K, ...]`` each, under one network's names."""

    fast: nn.ModuleList  # trunks on the project's own kernels, if any
    casts = False  # whether it casts its own tensors and inputs to low precision

    def __init__(self, network: Network):
        super().__init__()
        self.slots: dict[str, Tensor] = {}
        self.template = {name: value.clone() for name, value in network.state_dict().items()}
        self.parameter_names = [name for name, _ in network.named_parameters()]
        self.eval_modules, self.trainable = network.eval_modules, network.trainable
        self.dropouts: dict[str, SeededDropout] = {}
        self.fast = nn.ModuleList()

    def use(self, tensors: Mapping[str, Tensor]) -> None:
        """Use these tensors, ``[K, ...]`` each, from now on."""
        self.slots.update(tensors)

    @abstractmethod
    def freeze_statistics(self, freeze: bool) -> None:
        """Whether running statistics stay unchanged while training."""


class Stacked(Together):
    """K networks as one, by surgery."""

    def __init__(self, arch: Arch, kernels: bool = False):
        network = build(arch, Key(0))
        super().__init__(network)
        anchor = self.parameter_names[0]
        self.trunks = nn.ModuleList(
            _stacked_module(trunk, f"trunks.{i}", self.slots, anchor) for i, trunk in enumerate(network.trunks)
        )
        self.head = StackedLinear(self.slots, "head")
        self.dropouts = {m.name: m.layer[0] for m in self.trunks.modules() if isinstance(m, StackedDropout)}
        ours = [t for t in network.trunks if isinstance(t, _ResNet) and t.conv.in_channels <= MOST_CHANNELS]
        whole = not self.eval_modules and len(self.trainable) == len(self.parameter_names)  # kernels freeze nothing
        if kernels and whole and len(ours) == len(network.trunks):
            self.fast.extend(FastTrunk(trunk, f"trunks.{i}", self.slots) for i, trunk in enumerate(ours))
        self.train()

    def forward(self, x: Tensor) -> Outputs:
        """Outputs ``[K, batch, ...]`` of inputs ``[K, batch, ...]``."""
        clients, batch = x.shape[:2]
        if self.fast and (self.training or not any(trunk.training for trunk in self.trunks)):
            parts = [trunk(x) for trunk in self.fast]
            features = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
            return Outputs(self.head.fast(features), features)
        side = x.transpose(0, 1).flatten(1, 2)  # [batch, K x channels, ...]
        if side.ndim == 4:
            side = side.contiguous(memory_format=torch.channels_last)
        parts = [trunk(side).reshape(batch, clients, -1).transpose(0, 1) for trunk in self.trunks]
        features = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return Outputs(self.head.per_client(features), features)

    def freeze_statistics(self, freeze: bool) -> None:
        for module in self.modules():
            if isinstance(module, StackedNorm | FastTrunk):
                module.freeze = freeze


def _stacked_module(module: nn.Module, name: str, slots: dict[str, Tensor], anchor: str) -> nn.Module:
    """The module with its layers replaced by stacked ones."""
    if isinstance(module, nn.Conv2d):
        return StackedConv(slots, name, module)
    if isinstance(module, _BatchNorm):
        return StackedNorm(slots, name, module)
    if isinstance(module, nn.Linear):
        return StackedLinear(slots, name)
    if MORE_SURGERY and isinstance(module, nn.GroupNorm):
        return StackedGroups(slots, name, module)
    if MORE_SURGERY and isinstance(module, SeededDropout):
        return StackedDropout(slots, name, module)
    if isinstance(module, Shortcut):
        return StackedShortcut(slots, name, module, anchor)
    if any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False)):
        raise Unstackable(f"{name} is a {type(module).__name__} with tensors of its own")
    module = copy.copy(module)
    module._modules = {
        child: None if part is None else _stacked_module(part, f"{name}.{child}", slots, anchor)
        for child, part in module._modules.items()
    }
    return module


@lru_cache(maxsize=256)
def unstackable_reason(arch: Arch) -> str:
    """Why stacked networks would not compute what the networks compute one by one; empty if they do."""
    try:
        return _difference(arch)
    except Unstackable as error:
        return str(error)
    except Exception as error:  # whatever else goes wrong, this network cannot be stacked
        return f"{type(error).__name__}: {error}"


def _difference(arch: Arch) -> str:
    if arch.tokens:
        return "inputs are indices"
    return difference(arch, Stacked(arch))


def difference(arch: Arch, together: Together) -> str:
    """Compare networks in float64: values, gradients and buffers in training and evaluation; large ones in less."""
    large = sum(v.numel() for v in together.template.values()) > LARGE or math.prod(arch.shape) > LARGE_INPUT
    clients, batch = (2, 2) if large else (3, 4)
    generator = torch.Generator().manual_seed(0)
    networks = [_perturbed(build(arch, Key(0, client=k, phase="stackable")), generator) for k in range(clients)]
    floating = [name for name, value in together.template.items() if value.is_floating_point()]
    leaves = stacked_state([n.state_dict() for n in networks], floating)
    together.use({name: value.requires_grad_(name in together.trainable) for name, value in leaves.items()})
    together.use({f"{name}.seed": torch.arange(clients) for name in together.dropouts})
    for k, network in enumerate(networks):
        for dropout in dropout_layers(network).values():
            dropout.seed = torch.tensor(k)
    others = [_other_buffers(network, leaves) for network in networks]
    for training in (True, False) if large else (True, True, False):
        x = _inputs(networks[0], arch, (clients, batch), generator)
        together.train(training)
        outputs = together(x)
        weights = torch.randn(outputs.logits.shape, generator=generator, dtype=torch.float64)
        params = [leaves[n] for n in together.trainable]
        loss = (outputs.logits * weights).sum() + outputs.features.square().sum()
        grads = torch.autograd.grad(loss, params, materialize_grads=True)  # some may have no effect
        for k, network in enumerate(networks):
            one = network.train(training)(x[k])
            loss = (one.logits * weights[k]).sum() + one.features.square().sum()
            params = [network.get_parameter(name) for name in network.trainable]
            expected = torch.autograd.grad(loss, params, materialize_grads=True)
            pairs = [(outputs.logits[k], one.logits), (outputs.features[k], one.features)]
            pairs += [(g[k], e) for g, e in zip(grads, expected, strict=True)]
            pairs += [(leaves[n][k], b) for n, b in network.named_buffers() if n in leaves]
            if not all(torch.allclose(a, b, rtol=1e-8, atol=1e-9) for a, b in pairs):
                return "stacked networks do not compute what the networks compute one by one"
            now = _other_buffers(network, leaves)
            if any(not torch.equal(value, others[j][n]) for n, value in now.items() for j in (0, k)):
                return "a buffer that is not a float, or not saved, differs between networks or changes in training"
    if not _repeats(networks[0].train(), x[0]):
        return "what it computes depends on how often it was called, which differs between clients"
    return ""


def _perturbed(network: Network, generator: torch.Generator) -> Network:
    """The network in float64, off its first weights, so that factors that start at 0 have an effect."""
    network = network.double()
    with torch.no_grad():
        for p in network.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.add_(noise, alpha=0.1 / math.sqrt(max(1, p[0].numel() if p.ndim > 1 else 1)))
    return network


def _inputs(network: Network, arch: Arch, sizes: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Numbers, or the tokens 0 and 1 and those that embeddings treat as padding."""
    if not arch.tokens:
        return torch.randn(*sizes, *arch.shape, generator=generator, dtype=torch.float64)
    tables = [m for m in network.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    tokens = torch.tensor(sorted({0, 1} | {m.padding_idx for m in tables if m.padding_idx is not None}))
    order = torch.randperm(math.prod(sizes) * math.prod(arch.shape), generator=generator)
    return tokens[order % len(tokens)].view(*sizes, *arch.shape)


def _repeats(network: Network, x: Tensor) -> bool:
    """Whether the same state gives the same outputs again: a step counter in Python is not part of a state."""
    state, seen = {name: value.clone() for name, value in network.state_dict().items()}, []
    with torch.no_grad():
        for _ in range(2):
            network.load_state_dict(state)
            for dropout in dropout_layers(network).values():
                dropout.calls = 0
            seen.append(network(x).logits)
    return torch.allclose(seen[0], seen[1], rtol=1e-8, atol=1e-9)


def _other_buffers(network: Network, floating: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the buffers that all networks must have in common: the rest but for counters and seeds."""
    ends = (COUNTER, ".seed")
    return {n: b.clone() for n, b in network.named_buffers() if n not in floating and not n.endswith(ends)}


@lru_cache(maxsize=256)
def batches_counted(arch: Arch) -> Mapping[str, int]:
    """What a forward pass in training adds to each counter of batches: usually 1; layers may run twice, or never."""
    network = build(arch, Key(0)).train()
    counters = {n: b for n, b in network.named_buffers() if n.endswith(COUNTER)}
    before = {name: int(counter) for name, counter in counters.items()}
    if counters:
        with torch.no_grad():
            network.double()(_inputs(network, arch, (1, 2), torch.Generator())[0])
    return {name: int(counter) - before[name] for name, counter in counters.items()}


def stacked_state(states: list[Mapping[str, Tensor]], names: Any) -> dict[str, Tensor]:
    """Several states as one, ``[K, ...]`` each."""
    return {name: torch.stack([state[name] for state in states]) for name in names}
