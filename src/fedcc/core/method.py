"""What a method is: hyper-parameters, and coroutines that send requests to an engine."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from fedcc.core.model import Model
from fedcc.core.options import check_options
from fedcc.core.options import option as option  # for methods, which declare theirs with it
from fedcc.core.requests import Predict, Recalibrate, gather
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples

Up = TypeVar("Up")
Down = TypeVar("Down")
Family = Literal["parameters", "distillation", "ensemble", "bound"]
Answers = Literal["none", "probabilities", "logits", "labels"]
LOST: Any = object()  # in ``Method.earlier``: no value of the option gives the numbers of that version


@dataclass(frozen=True, eq=False)
class Trained:
    """The result of training, which ``predict`` reads: the clients' models and the server's."""

    classes: int
    clients: Mapping[int, Model] = field(default_factory=dict)
    server: Mapping[str, Model] = field(default_factory=dict)
    baseline: Mapping[int, Tensor] = field(default_factory=dict)  # clients' mean votes, if the method keeps them

    @staticmethod
    def of(server: Server, clients: Mapping[int, Model]) -> "Trained":
        """What these clients and the server have learned; a method keeps mean votes in ``memory["baseline"]``."""
        baseline = {k: mean for k, mean in server.memory.get("baseline", {}).items() if k in clients}
        return Trained(server.classes, clients, dict(server.models), baseline)


@dataclass(frozen=True, eq=False)
class Votes:
    """What each client says of each sample, and how much that counts in the method's prediction."""

    known: Tensor  # [K, N, C]: mass for each class; less than 1 in all where a client can answer "unknown"
    trust: Tensor  # [K, N]: the clients' weights, which add up to 1


@dataclass(frozen=True, eq=False)
class Answer:
    """A prediction as probabilities, and how sure it is."""

    probabilities: Tensor  # [N, C]; [clients, N, C] if each client predicts by itself
    confidence: Tensor  # [N], in 0 .. 1: below a threshold the sample may be of no known class
    unknown: Tensor | None = None  # [N]: mass for "unknown", if the method has it


Reading = Callable[[Trained, Samples], Coroutine[Any, Any, Tensor | None]]
"""A way to predict with trained models: ``predict``, or an alternative, which returns None if it equals ``predict``."""


class Method(ABC, Generic[Up, Down]):
    """A federated method: subclass it as a frozen dataclass of hyper-parameters.

    ``client`` and ``server`` read like the paper's algorithm: they await requests (fits, predictions) and return
    messages. They never train, and know nothing of engines, devices or transports.

    Here each client trains its own network, uploads nothing, and the clients' mean probabilities predict:

    >>> import fedcc
    >>> from fedcc.losses import CrossEntropy
    >>> @dataclass(frozen=True)
    ... class Alone(fedcc.Method[None, None]):
    ...     family: ClassVar[Family] = "ensemble"
    ...     source: ClassVar[str] = "an example"
    ...
    ...     async def client(self, c, down):
    ...         await c.fit("fit", CrossEntropy("private"), private=c.private)
    ...
    ...     async def server(self, s, ups):
    ...         return dict.fromkeys(s.archs)
    ...
    ...     async def predict(self, t, samples):
    ...         outputs = await gather(*(Predict(model, samples) for model in t.clients.values()))
    ...         return torch.stack([out.logits.softmax(-1) for out in outputs]).mean(0)
    >>> federation = fedcc.Federation.named("digits", skew="iid", clients=2, models="resnet8")
    >>> fedcc.run(Alone(), federation, rounds=1, epochs=3).accuracy > 50
    True
    """

    family: ClassVar[Family]
    source: ClassVar[str]  # the paper it comes from
    note: ClassVar[str] = ""  # printed with its numbers wherever they appear ("reconstruction")
    trains_clients: ClassVar[bool] = True  # clients have models of their own to evaluate
    scores: ClassVar[Literal["logits", "shares"]] = "logits"  # what ``predict`` returns; shares are not negative
    averaged: ClassVar[bool] = False  # predicts with an average, whose BatchNorm statistics match no data
    read_with: ClassVar[tuple[Mapping[str, Any], ...]] = ()  # other settings of ``predict``, evaluated as readings
    knows_networks: ClassVar[bool] = False  # clients use each other's networks, so none can be added during a run
    uploads_models: ClassVar[bool] = False  # clients upload their models once, at the end, for prediction
    answers: ClassVar[Answers] = (
        "none"  # what clients upload of each public sample, and nothing else; none: other things
    )
    depends_on_rounds: ClassVar[bool] = False  # reads ``Server.rounds``, so that a run of T rounds cannot be extended
    version: ClassVar[int] = 1  # counts the changes after which the same settings give other numbers
    earlier: ClassVar[Mapping[int, Mapping[str, Any]]] = {}  # by version: settings that give its numbers today
    retired: ClassVar[Mapping[str, Any]] = {}  # former options, and the only value still supported

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def label(self) -> str:
        """The name in tables and figures, with the note."""
        return f"{self.name} ({self.note})" if self.note else self.name

    @property
    def one_network(self) -> bool:
        """Whether all clients have the same network, as where weights are averaged."""
        return self.family == "parameters"

    @property
    def needs_public(self) -> bool:
        """Whether the method uses public samples; others run without any."""
        return self.family == "distillation"

    def outputs(self, classes: int) -> int:
        """The number of outputs of a client's network."""
        return classes

    def rounds(self, rounds: int) -> int:
        """The number of rounds that the method needs if a run has T."""
        return rounds

    def evaluates(self, t: int, rounds: int) -> bool:
        """Whether round t of a run of T can be evaluated; the last round always can."""
        return True

    def extension_reason(self) -> str:
        """Why a run cannot be extended to more rounds; empty if it can."""
        kind = type(self)
        if kind.depends_on_rounds or kind.rounds is not Method.rounds or kind.evaluates is not Method.evaluates:
            return f"what {self.name} does in a round depends on the number of rounds T"
        return ""

    async def start(self, s: Server) -> Mapping[int, Down | None]:
        """Before the first round: a downlink for every client, perhaps None."""
        return dict.fromkeys(s.archs)

    @abstractmethod
    async def client(self, c: Client, down: Down | None) -> Up:
        """One client's round: from what it received to what it sends."""

    @abstractmethod
    async def server(self, s: Server, ups: Mapping[int, Up]) -> Mapping[int, Down | None]:
        """The server's round: from the uplinks that arrived to a downlink for **every** client."""

    @abstractmethod
    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        """Scores [N, classes] by the method's own rule; [clients, N, classes] if each client predicts by itself."""

    def readings(self, public: Samples) -> Mapping[str, Reading]:
        """Other ways to predict with the same trained models, by name.

        They are evaluated in addition to ``predict`` and never used in training.
        """
        others: dict[str, Method[Up, Down]] = {}
        for settings in self.read_with:
            other = replace(self, **settings)  # type: ignore[type-var]
            if other not in (self, *others.values()) and not other.unusable_reason(public):
                others[",".join(n if v is True else f"{n}={v:g}" for n, v in settings.items())] = other

        async def re_estimated(t: Trained, samples: Samples) -> Tensor | None:
            models = await gather(*(Recalibrate(model, public) for model in t.server.values()))
            if all(new is old for new, old in zip(models, t.server.values(), strict=True)):
                return None  # no BatchNorm
            return await self.predict(replace(t, server=dict(zip(t.server, models, strict=True))), samples)

        readings: dict[str, Reading] = {name: other.predict for name, other in others.items()}
        return readings | ({"re-estimated": re_estimated} if self.averaged and len(public) else {})

    def last_readings(self, public: Samples) -> Mapping[str, Reading]:
        """Readings that need predictions of their own, so that only the last round has them."""
        if not public.are_images or any(f.name == "mirror" for f in fields(self)):  # type: ignore[arg-type]
            return {}

        async def mirror(t: Trained, samples: Samples) -> Tensor:  # the mean for an image and its mirror image
            plain, mirrored = await self.predict(t, samples), await self.predict(t, samples.mirrored)
            return (self.probabilities(plain) + self.probabilities(mirrored)) / 2

        return {"mirror": mirror}

    async def votes(self, t: Trained, samples: Samples) -> Votes:
        """The clients' votes that ``predict`` combines; by default all count the same."""
        if not t.clients or t.server:
            raise ValueError(f"{self.name} predicts with a model of the server, so no client votes")
        outputs = await gather(*(Predict(model, samples) for model in t.clients.values()))
        known = torch.stack([o.logits[:, : t.classes].softmax(-1) for o in outputs])
        return Votes(known, torch.full(known.shape[:2], 1 / len(known), device=known.device))

    async def answer(self, t: Trained, samples: Samples) -> Answer:
        """``predict`` as probabilities; the confidence is the largest one unless a method knows better."""
        probabilities = self.probabilities(await self.predict(t, samples))
        return Answer(probabilities, probabilities.amax(-1))

    def influence(self, ups: Mapping[int, Up]) -> Mapping[int, float]:
        """Each client's share in what the server makes of these uploads, for the record; by default all are equal."""
        return dict.fromkeys(ups, 1 / len(ups))

    def unusable_reason(self, samples: Samples) -> str:
        """Why the method cannot be used with public samples like these; empty if it can."""
        if self.needs_public and not len(samples):
            return f"{self.name} needs public samples, and the federation has none: give public"
        for f in fields(self):  # type: ignore[arg-type]
            if f.metadata.get("images") and getattr(self, f.name) != f.default and not samples.are_images:
                return f"{f.name} is for {samples.IMAGES}, got inputs of shape {list(samples.shape)}"
        return ""

    def probabilities(self, scores: Tensor) -> Tensor:
        """The scores of ``predict`` as probabilities; they may be whole numbers, such as counts of votes."""
        scores = scores if scores.is_floating_point() else scores.float()
        return shares(scores) if self.scores == "shares" else scores.softmax(-1)


AnyMethod = Method[Any, Any]


def shares(scores: Tensor, dim: int = -1) -> Tensor:
    """Scores that are not negative (votes, sums of probabilities), divided by their sum; equal if all are 0."""
    total = scores.sum(dim, keepdim=True)
    return torch.where(total > 0, scores / total.where(total > 0, 1), 1 / scores.shape[dim])
