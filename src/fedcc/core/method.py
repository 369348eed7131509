"""What a method is: frozen hyper-parameters and coroutines that ask."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, fields, replace
from types import UnionType
from typing import Any, ClassVar, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from fedcc.core.model import Model
from fedcc.core.naming import shortened
from fedcc.core.requests import Recalibrate, gather
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples

T = TypeVar("T")
Up = TypeVar("Up")
Down = TypeVar("Down")
Family = Literal["parameters", "distillation", "bound"]
LARGEST = 2**63 - 1  # of whole numbers: what 64 bits hold


def option(
    default: T,
    meaning: str,
    source: str = "",
    *,
    low: float | None = None,
    high: float | None = None,
    images: bool = False,
    mended: bool = False,
    before: T | None = None,
) -> T:
    """A hyper-parameter with its meaning, the place its default comes from, and the range it may take.

    ``images``: where inputs are no images it keeps its default. ``mended``: the method was another one before it had
    this, so runs that do not name it are none of today's. ``before``: what the method did before it had this option,
    where that is not its default: runs that do not name it have this value.
    """
    about = {"meaning": meaning, "source": source, "low": low, "high": high, "images": images, "mended": mended}
    return field(default=default, metadata=about | {"before": default if before is None else before})


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
        hints = get_type_hints(type(self))
        for f in fields(self):  # type: ignore[arg-type]
            low, high, value = f.metadata.get("low"), f.metadata.get("high"), getattr(self, f.name)
            check_value(f.name, value, hints[f.name], low, high)
            if isinstance(value, int) and float in (hints[f.name], *get_args(hints[f.name])):
                object.__setattr__(self, f.name, float(value))  # 1 and 1.0 are one setting, also in records

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def label(self) -> str:
        """The name for people, with the note that must stand beside its numbers."""
        return f"{self.name} ({self.note})" if self.note else self.name

    @property
    def one_network(self) -> bool:
        """Whether all clients have the same network, as where weights are averaged."""
        return self.family == "parameters"

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
        """What ``predict`` gives, as probabilities."""
        return shares(scores) if self.scores == "shares" else scores.softmax(-1)


AnyMethod = Method[Any, Any]


def shares(scores: Tensor) -> Tensor:
    """Scores that are none below 0 (votes, sums of probabilities), made to add up to 1; equal where all are 0."""
    total = scores.sum(-1, keepdim=True)
    return torch.where(total > 0, scores / total.where(total > 0, 1), 1 / scores.shape[-1])


def check_value(name: str, value: Any, hint: Any, low: float | None = None, high: float | None = None) -> None:
    """Refuse a value of the wrong type or out of range, naming the value and the rule."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and type(None) in options:
        return
    for kind in options:
        if get_origin(kind) is Literal:
            if value in get_args(kind):
                return
            raise ValueError(f"{name} must be one of {', '.join(map(str, get_args(kind)))}, got {shortened(value)}")
    if options == (str,) and not isinstance(value, str):
        raise ValueError(f"{name} must be a text, got {shortened(value)}")
    if bool in options and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {shortened(value)}")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if (float in options and not number) or (options[0] is int and not (number and isinstance(value, int))):
        raise ValueError(
            f"{name} must be {'a whole number' if options[0] is int else 'a number'}, got {shortened(value)}"
        )
    if number and not (_finite(value) if float in options else abs(value) <= LARGEST):
        rule = (
            "a finite number" if float in options else f"at most {LARGEST:,}" if value > 0 else f"at least {-LARGEST:,}"
        )
        raise ValueError(f"{name} must be {rule}, got {shortened(value)}")
    if number and ((low is not None and value < low) or (high is not None and value > high)):
        if low is None or high is None:
            rule = f"at least {low:g}" if high is None else f"at most {high:g}"
        else:
            rule = f"from {low:g} to {high:g}"
        raise ValueError(f"{name} must be {rule}, got {shortened(value)}")


def _finite(value: float) -> bool:
    """Whether a number is finite as a float; integers beyond 10^308 are not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
