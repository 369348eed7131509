"""Any network as trunks and a head: features are what enters its last linear layer."""

from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from fedcc.core.model import Arch, Factory, Outputs, factory_name
from fedcc.core.rng import Key
from fedcc.nets.dropout import use_seeded_dropout


class Trainable(nn.Module):
    """A module with frozen parts: its author left them in evaluation mode, or without a gradient."""

    eval_modules: frozenset[str] = frozenset()  # names of modules that stay in evaluation mode
    trainable: tuple[str, ...] = ()  # parameters

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for name, part in self.named_modules():
            if name in self.eval_modules:
                part.training = False
        return self

    def train_part(self, only: str | None) -> list[str]:
        """Set the named part (None: all) to training mode and the rest to evaluation mode; the parameters to train."""
        self.train()
        for name, part in self.named_modules():
            if only is not None and name != only and not name.startswith(f"{only}."):
                part.training = False
        names = [name for name in self.trainable if only is None or name.startswith(f"{only}.")]
        if not names:
            raise ValueError(f"nothing to train in {only!r}: all its parameters are frozen")
        return names


class Network(Trainable):
    """One or more trunks side by side, their features concatenated, and one linear head."""

    def __init__(self, trunks: list[nn.Module], head: nn.Linear):
        super().__init__()
        self.trunks = nn.ModuleList(trunks)
        self.head = head
        use_seeded_dropout(self)
        self.eval_modules = frozenset(name for name, part in self.named_modules() if not part.training)
        self.trainable = tuple(name for name, parameter in self.named_parameters() if parameter.requires_grad)

    def forward(self, x: Tensor) -> Outputs:
        features = [logits_of(trunk(x)) for trunk in self.trunks]
        joined = features[0] if len(features) == 1 else torch.cat(features, -1)
        return Outputs(self.head(joined), joined)


def logits_of(output: Any) -> Any:
    """The logits in what a network returns: a tensor, a mapping or object with ``logits``, or a tuple.

    A tuple's first entry counts, and of a mapping without ``logits`` its only tensor; outputs of Hugging Face's models
    are such mappings.

    >>> logits_of({"logits": torch.ones(1), "hidden": torch.zeros(1)}), logits_of((torch.ones(1), None))
    (tensor([1.]), tensor([1.]))
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        tensors = [value for value in output.values() if isinstance(value, Tensor)]
        return output.get("logits", tensors[0] if len(tensors) == 1 else output)
    if isinstance(output, tuple | list) and not hasattr(output, "logits"):
        return output[0] if output else output
    return getattr(output, "logits", output)


def build(arch: Arch, key: Key) -> Network:
    """A new network; its weights depend only on the key."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key.integer())
        pairs = [_split(factory, arch) for factory in arch.trunks]
        if len(pairs) == 1:
            return Network([pairs[0][0]], pairs[0][1])
        width = sum(head.in_features for _, head in pairs)
        return Network([trunk for trunk, _ in pairs], nn.Linear(width, arch.outputs))


def _split(factory: Factory, arch: Arch) -> tuple[nn.Module, nn.Linear]:
    """A factory's network without its last linear layer, and that layer; only its first network is tested."""
    module: nn.Module = factory(arch.outputs)
    paths = _head_paths(factory, arch)
    if not paths:
        paths.append(_tested_head_path(factory, arch, module))
    head = cast(nn.Linear, module.get_submodule(paths[0]))
    return _with_layer(module, paths[0], nn.Identity()), head


@lru_cache(maxsize=256)
def _head_paths(_factory: Factory, _arch: Arch) -> list[str]:
    """Where a factory's networks have their last linear layer, once that is known."""
    return []


def _with_layer(module: nn.Module, path: str, layer: nn.Module) -> nn.Module:
    """A network with another layer at a path."""
    if not path:
        return layer
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, layer)
    return module


def _tested_head_path(factory: Factory, arch: Arch, module: nn.Module) -> str:
    """Where a network has its last linear layer; tested: what comes before, and that layer, equal the whole."""
    name = factory_name(factory)
    if not isinstance(module, nn.Module):
        raise ValueError(f"{name}({arch.outputs}) must return an nn.Module, got {type(module).__name__}")
    probe = torch.ones(2, *arch.shape, dtype=torch.long if arch.tokens else torch.float32)
    probe = probe if arch.tokens else probe * torch.linspace(-1, 1, probe.numel()).view_as(probe)
    paths = {sub: path for path, sub in module.named_modules() if isinstance(sub, nn.Linear)}
    call_order: list[nn.Linear] = []
    hooks = [sub.register_forward_hook(lambda sub, *_: call_order.append(sub)) for sub in paths]
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            whole = logits_of(module(probe))
    except Exception as error:
        if arch.tokens:
            raise ValueError(
                f"{name} does not take integers of shape {arch.shape} ({error}); integers are tokens: for a table of"
                " numbers pass floats, for example with x.astype('float32')"
            ) from error
        raise ValueError(
            f"{name} does not take a batch of two inputs of shape {arch.shape} ({type(error).__name__}: {error})"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if not call_order:
        raise ValueError(f"{name} uses no nn.Linear; its outputs must come from a last nn.Linear, its head")
    head = call_order[-1]
    path: str = paths[head]
    trunk, parts = _with_layer(module, path, nn.Identity()), None
    with torch.no_grad(), suppress(RuntimeError):  # what follows the layer may not take its inputs
        features = logits_of(trunk(probe))
        parts = head(features) if isinstance(features, Tensor) else None
    _with_layer(module, path, head)
    for part, mode in modes.items():
        part.training = mode
    if not isinstance(whole, Tensor) or tuple(whole.shape) != (2, arch.outputs):
        shape = tuple(whole.shape) if isinstance(whole, Tensor) else type(whole).__name__
        raise ValueError(f"{name}({arch.outputs}) must return logits of shape (batch, {arch.outputs}), got {shape}")
    if parts is None or features.ndim != 2 or not torch.equal(parts, whole):
        raise ValueError(
            f"{name}: its last nn.Linear must take features [batch, width] and give the logits themselves, "
            f"but {path or 'the layer'} does not"
        )
    if not all(parameter.requires_grad for parameter in head.parameters()):
        frozen = "all its parameters are" if not any(p.requires_grad for p in module.parameters()) else "it is"
        raise ValueError(f"{name}: its last nn.Linear must be trainable, but {frozen} frozen (requires_grad is False)")
    return path
