"""What a method may ask for. Awaiting a request passes it to the driver, which sends the answer back.

No asyncio is involved: ``await request`` yields the request itself, and the driver calls ``send(answer)`` on the
coroutine. So the same method runs fused with other clients on a GPU, by itself on another machine, or plainly.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar, TypeVarTuple, cast, overload

from torch import Tensor

from fedcc.core.model import Arch, Model, Outputs
from fedcc.core.options import Reset, Schedule, check_value
from fedcc.core.rng import Key
from fedcc.core.samples import Samples
from fedcc.core.step import Gradient, Loss

R = TypeVar("R")
A = TypeVar("A")
B = TypeVar("B")
Ts = TypeVarTuple("Ts")


class Request(Generic[R]):
    """Something that a method may await; ``R`` is the type of the answer."""

    def __await__(self) -> Generator[Request[Any], R, R]:
        return (yield self)


@dataclass(frozen=True)
class Recipe:
    """How long and how fast a fit trains."""

    lr: float = 1e-3
    batch: int = 64
    epochs: int = 20  # each of ceil(n / batch) full batches of the longest stream
    steps: int | None = None  # instead of epochs
    schedule: Schedule = "constant"
    pace: str | None = None  # the stream whose epochs count, instead of the longest
    reset: Reset = "phase"  # "round" keeps Adam's state over the phases of a round
    batches: tuple[tuple[str, int], ...] = ()  # (stream, batch) of streams with a batch size of their own
    momentum: float | None = None  # of SGD, instead of Adam; reset for each fit
    decay: float = 1.0  # the factor of the learning rate per round; :meth:`at` applies it

    def __post_init__(self) -> None:
        for name, hint in {"lr": float, "epochs": int, "steps": int | None, "decay": float}.items():
            check_value(name, getattr(self, name), hint, 0)
        for size in (self.batch, *dict(self.batches).values()):
            check_value("batch", size, int, 1)
        check_value("momentum", self.momentum, float | None, 0, below=1)
        if self.momentum is not None and self.reset == "round":
            raise ValueError("SGD with momentum is reset for each fit: reset must be 'phase', got 'round'")

    def at(self, round: int) -> Recipe:
        """The recipe of a round: its learning rate is lr * decay ** (round - 1)."""
        return replace(self, lr=self.lr * self.decay ** max(round - 1, 0), decay=1.0)

    def batch_size(self, stream: str) -> int:
        """The samples of this stream in a step."""
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
    """The answer to a fit."""

    model: Model
    steps: int
    loss: float  # the mean over the steps
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)  # Adam's state, to continue from
    trained: tuple[str, ...] = ()  # entries of the state; the other floating ones are running statistics


@dataclass(frozen=True, eq=False)
class Fit(Request[Fitted]):
    """Train a model on streams of samples with Adam. A step takes one batch of each stream.

    All streams of a step pass through the network in **one** forward pass, so BatchNorm sees one mixture of them.
    """

    model: Model
    loss: Loss
    streams: Mapping[str, Samples]
    key: Key
    recipe: Recipe
    constants: Mapping[str, Any] = field(default_factory=dict)
    frozen: Mapping[str, Frozen] = field(default_factory=dict)
    gradient: Gradient | None = None
    only: str | None = None  # the part to train ("head"); the rest is frozen and in evaluation mode
    joint: bool = True  # False forwards each stream by itself, and only those that the loss reads
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "constants", _dicts(self.constants))

    @property
    def steps(self) -> int:
        if self.recipe.steps is not None:
            return self.recipe.steps
        paces = [self.recipe.pace] if self.recipe.pace else list(self.streams)
        return self.recipe.epochs * max(-(-len(self.streams[name]) // self.recipe.batch_size(name)) for name in paces)


def _dicts(tree: Any) -> Any:
    """A tree whose mappings are dicts, the only ones that torch walks into."""
    return {name: _dicts(value) for name, value in tree.items()} if isinstance(tree, Mapping) else tree


@dataclass(frozen=True, eq=False)
class Predict(Request[Outputs]):
    """The model's outputs on clean inputs, in evaluation mode; ``key``, if given, names the client in errors."""

    model: Model
    samples: Samples
    key: Key | None = None


@dataclass(frozen=True, eq=False)
class Recalibrate(Request[Model]):
    """The same model with BatchNorm's running statistics from one pass over these samples' clean inputs.

    What the network's author put into evaluation mode keeps its statistics. Without BatchNorm it is the model itself.
    """

    model: Model
    samples: Samples
    key: Key | None = None  # names the client in errors


@dataclass(frozen=True, eq=False)
class Gather(Request[tuple[Any, ...]]):
    """Several requests at once: an engine may serve them together."""

    requests: tuple[Request[Any], ...]


@overload
def gather(first: Request[A], second: Request[B], /) -> Request[tuple[A, B]]: ...
@overload
def gather(*requests: Request[A]) -> Request[tuple[A, ...]]: ...
def gather(*requests: Request[Any]) -> Request[Any]:
    """Several requests at once; the answer is a tuple.

    >>> len(gather(Request(), Request()).requests)
    2
    """
    return cast("Request[Any]", Gather(tuple(requests)))


class Executor(Protocol):
    """An engine: serves requests of one kind, whose networks may differ."""

    def serve(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """The answers, in the order of the requests."""
        ...
