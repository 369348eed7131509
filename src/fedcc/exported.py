"""Predict with an exported .onnx file: needs onnxruntime and numpy, not torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
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
            raise InputError(
                f"{path}: exported models need onnxruntime: pip install '.[onnx]' in fedcc's checkout"
            ) from None
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

    def answer(self, x: NDArray[Any]) -> dict[str, NDArray[np.float32]]:
        """Probabilities [N, classes], confidence [N] and, of FedCC, the mass for "unknown" [N]."""
        if x.shape[1:] != self.shape or x.dtype.name != self.dtype:
            raise InputError(f"inputs must be {self.dtype} of shape {self.shape}, got {x.dtype} of shape {x.shape[1:]}")
        names = [output.name for output in self.session.get_outputs()]
        parts = [self.session.run(names, {"x": x[i : i + BATCH]}) for i in range(0, len(x), BATCH)]
        return {name: np.concatenate(columns) for name, *columns in zip(names, *parts, strict=True)}

    def rows(self, inputs: Path, abstain: float | None = None) -> Iterator[dict[str, str]]:
        """One row per input, as ``fedcc predict`` prints them."""
        names, x = read_inputs(inputs, self.shape, self.dtype, self.encoding)
        return rows(names, self.classes, self.answer(x), abstain)


def rows(
    names: Sequence[str], classes: Sequence[str], answer: Mapping[str, NDArray[Any]], abstain: float | None = None
) -> Iterator[dict[str, str]]:
    """Predictions as rows of a table; below the threshold ``abstain`` of confidence the class is "unknown"."""
    for i, name in enumerate(names):
        probabilities, confidence = answer["probabilities"][i], float(answer["confidence"][i])
        best = int(probabilities.argmax())
        yield {
            "input": name,
            "class": "unknown" if abstain is not None and confidence < abstain else classes[best],
            "probability": f"{probabilities[best]:.4f}",
            **({"unknown": f"{answer['unknown'][i]:.4f}"} if "unknown" in answer else {}),
            "confidence": f"{confidence:.4f}",
        }
