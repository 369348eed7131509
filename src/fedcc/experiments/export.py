"""A run's prediction as one file: ONNX, or torch.export's .pt2.

The file holds every network that predicts, the method's own rule and the scaling of inputs.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedcc.core.files import open_whole
from fedcc.core.method import Answer
from fedcc.core.model import Model
from fedcc.core.requests import Predict, Request
from fedcc.core.rng import Key
from fedcc.core.samples import Samples
from fedcc.engine import drive
from fedcc.errors import InputError
from fedcc.experiments.result import Result
from fedcc.nets import build

OUTPUTS = tuple(f.name for f in fields(Answer))  # the last one only where the method has it


class Predictor(nn.Module):
    """A result as one module: inputs as they are stored to what :class:`Answer` holds."""

    def __init__(self, result: Result):
        super().__init__()
        self.result = result
        self.networks = nn.ModuleList(self._network(model) for model in result.models.values())
        self.baseline = nn.ParameterDict()
        for k, mean in result.trained.baseline.items():
            self.baseline[str(k)] = nn.Parameter(mean.clone(), requires_grad=False)
        self.positions = {id(model): i for i, model in enumerate(result.models.values())}
        self.used: set[int] = set()  # positions of networks that have predicted
        self.eval()

    @staticmethod
    def _network(model: Model) -> nn.Module:
        network = build(model.arch, Key(0))
        network.load_state_dict(dict(model.state))
        return network

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        samples = Samples({"x": x}, self.result.view)
        trained = replace(self.result.trained, baseline={int(k): mean for k, mean in self.baseline.items()})
        answer = drive([self.result.method.answer(trained, samples)], self)[0]
        return tuple(value for value in vars(answer).values() if value is not None)

    def serve(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """The method's requests for predictions, answered by the networks."""
        answers = []
        for request in requests:
            assert isinstance(request, Predict)
            position = self.positions[id(request.model)]
            self.used.add(position)
            answers.append(self.networks[position](request.samples.view.clean(request.samples.x)))
        return answers


def export(result: Result, target: Path) -> int:
    """Write a result as FILE.onnx or FILE.pt2, with class names and a table's columns in its metadata.

    Returns how many networks the prediction needs.
    """
    if target.suffix not in (".onnx", ".pt2"):
        raise ValueError(f"an exported model is a FILE.onnx or a FILE.pt2, got {target}")
    if not target.parent.is_dir():
        raise ValueError(f"{target}: the folder {target.parent} does not exist")
    predictor = Predictor(result)
    example = torch.ones((2, *result.shape), dtype=getattr(torch, result.dtype))
    with torch.no_grad():
        outputs = predictor(example)
        if outputs[0].ndim != 2:
            raise ValueError(f"{result.method.name} has one model per client and no common prediction to export")
    about = {
        "classes": list(result.classes),
        "shape": list(result.shape),
        "dtype": result.dtype,
        "method": result.method.name,
        **({"columns": result.encoding.values()} if result.encoding else {}),
    }
    batch = {"x": {0: torch.export.Dim("batch")}}
    if target.suffix == ".pt2":
        with _quiet_torch():
            program = torch.export.export(predictor, (example,), dynamic_shapes=batch)
        with open_whole(target) as file:
            torch.export.save(program, file, extra_files={"fedcc.json": json.dumps(about)})
        return len(predictor.used)
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise InputError(
            f"{target}: ONNX files need onnx and onnxscript: pip install '.[onnx]' in fedcc's checkout"
        ) from None
    with _quiet_torch():
        converted = torch.onnx.export(
            predictor, (example,), dynamo=True, dynamic_shapes=batch, input_names=["x"],
            output_names=list(OUTPUTS[: len(outputs)]), verbose=False, optimize=True,
        )  # fmt: skip
    assert converted is not None  # with dynamo=True
    converted.model.metadata_props["fedcc"] = json.dumps(about)
    with open_whole(target) as file:
        file.write(converted.model_proto.SerializeToString())
    return len(predictor.used)


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Without torch's remarks on packages that are not installed and on its own internals."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)
