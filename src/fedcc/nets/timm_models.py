"""Networks of timm (the extra ``timm``): ``timm:NAME``, or ``timm:NAME@FILE.safetensors`` to begin with its weights.

Nothing is downloaded: weights come from a local file, or are random.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedcc.core.naming import unknown
from fedcc.errors import InputError


@dataclass(frozen=True)
class Timm:
    """A factory: a network of timm for images of this shape."""

    name: str
    shape: tuple[int, ...]
    weights: str = ""  # a file, in which the head may have another number of outputs

    @staticmethod
    def named(text: str, shape: tuple[int, ...]) -> Timm:
        """From ``timm:NAME`` or ``timm:NAME@FILE.safetensors``."""
        name, at, weights = text.removeprefix("timm:").partition("@")
        if not re.fullmatch(r"\w[\w.]*", name):
            raise ValueError(f"a network of timm is timm:NAME or timm:NAME@FILE.safetensors, got {text!r}")
        if at and not weights.endswith(".safetensors"):
            raise ValueError(f"{text}: weights are read from FILE.safetensors, got {weights!r}")
        if len(shape) != 3:
            raise ValueError(f"{text} takes images [channels, height, width], got inputs of shape {shape}")
        timm = _timm(text)
        if not timm.is_model(name.partition(".")[0]):
            raise unknown("network of timm", name, timm.list_models())
        return Timm(name, shape, weights)

    def __call__(self, outputs: int) -> nn.Module:
        timm = _timm(str(self))
        options: dict[str, Any] = {"num_classes": outputs, "in_chans": self.shape[0]}
        about = timm.models.get_pretrained_cfg(self.name)
        if about is not None and about.fixed_input_size:
            options["img_size"] = self.shape[1:]
        if self.weights and not Path(self.weights).is_file():
            raise InputError(f"{self}: there is no file {self.weights}")
        if self.weights:  # custom_load is for formats of other libraries
            options |= {"pretrained": True, "pretrained_cfg_overlay": {"file": self.weights, "custom_load": False}}
        try:
            module: nn.Module = timm.create_model(self.name, **options)
        except Exception as error:
            raise InputError(f"{self} cannot be built: {type(error).__name__}: {error}") from error
        return module

    def without_weights(self) -> Timm:
        """The same network where its state is known, so that the file is not needed."""
        return Timm(self.name, self.shape)

    def __str__(self) -> str:
        return f"timm:{self.name}@{self.weights}" if self.weights else f"timm:{self.name}"


def _timm(name: str) -> Any:
    try:
        import timm
    except ImportError as error:
        raise InputError(
            f"{name} needs timm, which cannot be imported ({error}): pip install '.[timm]' in fedcc's checkout"
        ) from None
    return timm
