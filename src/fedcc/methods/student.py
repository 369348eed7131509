"""A student: one network that was trained on a run's predictions. It predicts; it takes part in no federation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedcc.core.method import Family, Method, Trained
from fedcc.core.requests import Predict
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples


@dataclass(frozen=True)
class Student(Method[None, None]):
    """One network, distilled from a run (`fedcc distil`)."""

    family: ClassVar[Family] = "bound"
    source: ClassVar[str] = "distilled from a run"

    async def client(self, c: Client, down: None) -> None:
        raise NotImplementedError("a student is trained by fedcc distil")

    async def server(self, s: Server, ups: Mapping[int, None]) -> Mapping[int, None]:
        raise NotImplementedError("a student is trained by fedcc distil")

    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        return (await Predict(t.server["student"], samples)).logits
