"""What a method may ask for. Awaiting a request hands it to the driver, which sends the answer back.

No asyncio is involved: ``await request`` yields the request itself, and a driver that holds the coroutine calls
``send(answer)``. So one method file runs fused with other clients on a GPU, alone on another machine, or plainly.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Protocol, TypeVar, TypeVarTuple, cast, overload

from torch import Tensor

from fedcc.core.model import Arch, Model, Outputs
from fedcc.core.rng import Key
from fedcc.core.samples import Samples
from fedcc.core.step import Gradient, Loss

R = TypeVar("R")
A = TypeVar("A")
B = TypeVar("B")
Ts = TypeVarTuple("Ts")


class Request(Generic[R]):
    """Something a coroutine may await; ``R`` is the answer's type."""

    def __await__(self) -> Generator[Request[Any], R, R]:
        return (yield self)


@dataclass(frozen=True)
class Recipe:
    """How long and how fast a fit trains.

    An epoch is ``ceil(n / batch)`` full batches of the longest stream, or of the stream that ``pace`` names;
    ``steps``, if given, is the length itself. ``reset="round"`` keeps Adam's state over the phases of a round.
    ``momentum``, if given, is that of SGD, which then takes Adam's place; it begins anew with each fit.
    ``batches`` holds (stream, batch) for streams whose batches have a size of their own.
    ``decay`` is the factor of the learning rate per round; :meth:`at` applies it.
    """

    lr: float = 1e-3
    batch: int = 64
    epochs: int = 20
    steps: int | None = None
    schedule: Literal["constant", "cosine"] = "constant"
    pace: str | None = None
    reset: Literal["phase", "round"] = "phase"
    batches: tuple[tuple[str, int], ...] = ()
    momentum: float | None = None
    decay: float = 1.0

    def __post_init__(self) -> None:
        sizes = [size for _, size in self.batches]
        for name, value, rule in (
            ("lr", self.lr, self.lr >= 0),
            ("batch", min([self.batch, *sizes]), min([self.batch, *sizes]) >= 1),
            ("epochs", self.epochs, self.epochs >= 0),
            ("steps", self.steps, self.steps is None or self.steps >= 0),
            ("decay", self.decay, self.decay >= 0),
        ):
            if not rule:
                raise ValueError(f"{name} must be at least {1 if name == 'batch' else 0}, got {value}")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {self.momentum}")
        if self.momentum is not None and self.reset == "round":
            raise ValueError("SGD with momentum begins anew with each fit: reset must be 'phase', got 'round'")

    def at(self, round: int) -> Recipe:
        """The recipe of a round: its learning rate is lr * decay ** (round - 1)."""
        return replace(self, lr=self.lr * self.decay ** max(round - 1, 0), decay=1.0)

    def batch_of(self, stream: str) -> int:
        """How many samples of this stream make a step."""
        return dict(self.batches).get(stream, self.batch)


@dataclass(frozen=True, eq=False)
class Init(Request[Model]):
    """A first model; the same key gives the same weights on every device."""

    arch: Arch
    key: Key


@dataclass(frozen=True)
class Frozen:
    """A teacher: its outputs on a stream's (augmented) inputs, in evaluation mode, without gradient."""

    model: Model
    stream: str


@dataclass(frozen=True, eq=False)
class Fitted:
    """What comes back from a fit. ``loss`` is the mean over its steps; ``optimizer`` is Adam's state, to go on with.

    ``trained`` names the entries of the state that the optimiser moved: the other floating ones are running statistics.
    """

    model: Model
    steps: int
    loss: float
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
    trained: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Fit(Request[Fitted]):
    """Train a model on streams of samples with Adam. One batch of each stream makes a step.

    All streams of a step go through the network in **one** forward pass, so BatchNorm sees one mixture
    (``joint=False`` forwards each stream by itself, and only those that the loss reads).
    ``only`` names the part that is trained (``"head"``); the rest is frozen and in evaluation mode.
    """

    model: Model
    loss: Loss
    streams: Mapping[str, Samples]
    key: Key
    recipe: Recipe
    constants: Mapping[str, Any] = field(default_factory=dict)
    frozen: Mapping[str, Frozen] = field(default_factory=dict)
    gradient: Gradient | None = None
    only: str | None = None
    joint: bool = True
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        if self.recipe.steps is not None:
            return self.recipe.steps
        paces = [self.recipe.pace] if self.recipe.pace else list(self.streams)
        return self.recipe.epochs * max(-(-len(self.streams[name]) // self.recipe.batch_of(name)) for name in paces)


@dataclass(frozen=True, eq=False)
class Predict(Request[Outputs]):
    """The model's outputs on clean inputs, in evaluation mode; ``key``, if given, says in errors who asks."""

    model: Model
    samples: Samples
    key: Key | None = None


@dataclass(frozen=True, eq=False)
class Recalibrate(Request[Model]):
    """The same model with BatchNorm's running statistics taken anew, from one pass over these samples' clean inputs.

    Weights and counters stay, nothing is drawn; a network without BatchNorm comes back as it is. BatchNorm that the
    network's author put into evaluation mode keeps its statistics. ``key``, if given, says in errors who asks.
    """

    model: Model
    samples: Samples
    key: Key | None = None


@dataclass(frozen=True, eq=False)
class Gather(Request[tuple[Any, ...]]):
    """Several requests at once: an engine may serve them together."""

    requests: tuple[Request[Any], ...]


@overload
def gather(first: Request[A], second: Request[B], /) -> Request[tuple[A, B]]: ...
@overload
def gather(*requests: Request[A]) -> Request[tuple[A, ...]]: ...
def gather(*requests: Request[Any]) -> Request[Any]:
    """Ask for several things at once and get a tuple of answers.

    >>> len(gather(Request(), Request()).requests)
    2
    """
    return cast("Request[Any]", Gather(tuple(requests)))


class Executor(Protocol):
    """Serves requests of one kind, which differ in their networks at most; an engine."""

    def serve(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """The answers, in the order of the requests."""
        ...
