"""Predict with an exported .onnx file: needs onnxruntime and numpy, not torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcc.errors import InputError
from fedcc.inputs import read_inputs
from fedcc.inputs.tables import Encoding

BATCH = 256


@dataclass(frozen=True, eq=False)
class Exported:
    """A model that ``fedcc export`` wrote."""

    session: Any
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    encoding: Encoding | None

    @staticmethod
    def open(path: Path) -> Exported:
        """Read an exported file."""
        try:
            import onnxruntime
        except ImportError:
            raise InputError(f"{path}: exported models need onnxruntime: pip install 'fedcc[onnx]'") from None
        if not path.is_file():
            raise InputError(f"{path}: no such file")
        try:
            session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
            about = json.loads(session.get_modelmeta().custom_metadata_map["fedcc"])
            encoding = Encoding.of(about["columns"]) if "columns" in about else None
            return Exported(session, tuple(about["classes"]), tuple(about["shape"]), about["dtype"], encoding)
        except Exception as error:  # onnxruntime has an exception class for each kind of damage
            raise InputError(
                f"{path}: expected a model of `fedcc export`, found: {type(error).__name__} {error}"
            ) from None

    def predict_proba(self, x: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Probabilities [N, classes] and confidence [N]."""
        if x.shape[1:] != self.shape or x.dtype.name != self.dtype:
            raise InputError(f"inputs must be {self.dtype} of shape {self.shape}, got {x.dtype} of shape {x.shape[1:]}")
        parts = [self.session.run(None, {"x": x[i : i + BATCH]}) for i in range(0, len(x), BATCH)]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def rows(self, inputs: Path, abstain: float | None = None) -> Iterator[dict[str, Any]]:
        """One row per input, as ``fedcc predict`` prints them."""
        names, x = read_inputs(inputs, self.shape, self.dtype, self.encoding)
        probabilities, confidence = self.predict_proba(x)
        for name, p, sure in zip(names, probabilities, confidence, strict=True):
            unknown = abstain is not None and sure < abstain
            yield {
                "input": name,
                "class": "unknown" if unknown else self.classes[int(p.argmax())],
                "probability": f"{p.max():.4f}",
                "confidence": f"{sure:.4f}",
            }
