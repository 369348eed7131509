"""What a method is: frozen hyper-parameters and coroutines that ask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from fedcc.core.model import Model
from fedcc.core.options import check_options
from fedcc.core.options import option as option  # for methods, which declare theirs with it
from fedcc.core.requests import Recalibrate, gather
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples

Up = TypeVar("Up")
Down = TypeVar("Down")
Family = Literal["parameters", "distillation", "bound"]


@dataclass(frozen=True, eq=False)
class Trained:
    """What training leaves behind: the clients' models and the server's; a method's ``predict`` reads these."""

    classes: int
    clients: Mapping[int, Model] = field(default_factory=dict)
    server: Mapping[str, Model] = field(default_factory=dict)


Reading = Callable[[Trained, Samples], Coroutine[Any, Any, Tensor | None]]
"""A way to predict with trained models: a method's ``predict``, or another one of the same form.

None where it would be the method's own: there is nothing to record.
"""


class Method(ABC, Generic[Up, Down]):
    """A federated method: subclass it as a frozen dataclass of hyper-parameters.

    ``client`` and ``server`` read like the paper's algorithm: they await requests (fits, predictions) and return
    messages. They never train, and know nothing of engines, devices or transports.
    """

    family: ClassVar[Family]
    source: ClassVar[str]  # the paper it comes from
    note: ClassVar[str] = ""  # what must stand beside its numbers wherever they appear ("reconstruction")
    trains_clients: ClassVar[bool] = True  # clients have models of their own worth looking at
    scores: ClassVar[Literal["logits", "shares"]] = "logits"  # what ``predict`` gives; shares are none below 0
    averaged: ClassVar[bool] = False  # predicts with an average, whose BatchNorm statistics fit no data
    read_with: ClassVar[tuple[Mapping[str, Any], ...]] = ()  # settings that matter to ``predict``, as readings
    uploads_models: ClassVar[bool] = False  # clients hand their models over once, at the end, for prediction

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def label(self) -> str:
        """The name for people, with the note that must stand beside its numbers."""
        return f"{self.name} ({self.note})" if self.note else self.name

    def outputs(self, classes: int) -> int:
        """How many outputs a client's network has."""
        return classes

    def rounds(self, rounds: int) -> int:
        """How many rounds the method needs where T are asked for."""
        return rounds

    def evaluates(self, t: int, rounds: int) -> bool:
        """Whether there is something to evaluate after round t where T are asked for; the last round always is."""
        return True

    async def start(self, s: Server) -> Mapping[int, Down | None]:
        """Before the first round: a downlink for every client; None where there is nothing to say yet."""
        return dict.fromkeys(s.archs)

    @abstractmethod
    async def client(self, c: Client, down: Down | None) -> Up:
        """One client's round: from what it received to what it sends."""

    @abstractmethod
    async def server(self, s: Server, ups: Mapping[int, Up]) -> Mapping[int, Down | None]:
        """The server's part: from the uplinks that arrived to a downlink for **every** client."""

    @abstractmethod
    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        """Scores [N, classes] by the method's own rule; [clients, N, classes] where each client predicts alone."""

    def readings(self, public: Samples) -> Mapping[str, Reading]:
        """Other ways to read the same trained models, by name: evaluated beside ``predict``, never trained with.

        An averaged model is read with BatchNorm's statistics of the public samples, others with the settings of
        ``read_with``, where these are not the method's own and inputs like the public ones allow them.
        """
        others: dict[str, Method[Up, Down]] = {}
        for settings in self.read_with:
            other = replace(self, **settings)  # type: ignore[type-var]
            if other not in (self, *others.values()) and not other.refusal(public):
                others[",".join(n if v is True else f"{n}={v:g}" for n, v in settings.items())] = other

        async def re_estimated(t: Trained, samples: Samples) -> Tensor | None:
            models = await gather(*(Recalibrate(model, public) for model in t.server.values()))
            if all(new is old for new, old in zip(models, t.server.values(), strict=True)):
                return None  # no BatchNorm
            return await self.predict(replace(t, server=dict(zip(t.server, models, strict=True))), samples)

        found: dict[str, Reading] = {name: other.predict for name, other in others.items()}
        return found | ({"re-estimated": re_estimated} if self.averaged else {})

    def last_readings(self, public: Samples) -> Mapping[str, Reading]:
        """Readings that cost predictions of their own, so that only the last round has them.

        ``mirror`` is the mean of the method's probabilities for an image and its mirror image, unless the method has
        an option of that name with a definition of its own.
        """
        if not public.are_images or any(f.name == "mirror" for f in fields(self)):  # type: ignore[arg-type]
            return {}

        async def mirror(t: Trained, samples: Samples) -> Tensor:
            plain, mirrored = await self.predict(t, samples), await self.predict(t, samples.mirrored)
            return (self.probabilities(plain) + self.probabilities(mirrored)) / 2

        return {"mirror": mirror}

    def refusal(self, samples: Samples) -> str:
        """Why the method can't be used on inputs like these; empty if it can."""
        for f in fields(self):  # type: ignore[arg-type]
            if f.metadata.get("images") and getattr(self, f.name) != f.default and not samples.are_images:
                return f"{f.name} is for {samples.IMAGES}, got inputs of shape {list(samples.shape)}"
        return ""

    def probabilities(self, scores: Tensor) -> Tensor:
        """What ``predict`` gives, as probabilities; scores may be whole numbers, such as counts of votes."""
        scores = scores if scores.is_floating_point() else scores.float()
        return shares(scores) if self.scores == "shares" else scores.softmax(-1)


AnyMethod = Method[Any, Any]


def shares(scores: Tensor) -> Tensor:
    """Scores that are none below 0 (votes, sums of probabilities), made to add up to 1; equal where all are 0."""
    total = scores.sum(-1, keepdim=True)
    return torch.where(total > 0, scores / total.where(total > 0, 1), 1 / scores.shape[-1])
