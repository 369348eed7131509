"""The result of a run: its rounds, and a predictor that saves and loads."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor

from fedcc.code import allow, code_digests, warn_of_changes
from fedcc.core.digests import BESIDE, DamagedFile, write_json
from fedcc.core.files import make_folder, write_whole
from fedcc.core.messages import Weights, nbytes
from fedcc.core.method import Answer, AnyMethod, Trained
from fedcc.core.model import Model
from fedcc.core.naming import listed
from fedcc.core.options import check_value
from fedcc.core.samples import Samples, View
from fedcc.engine import Plain, drive
from fedcc.experiments.record import Record
from fedcc.experiments.saved import (
    ABOUT,
    BASELINE,
    FORMAT,
    TENSORS,
    describe_archs,
    read_about,
    read_models,
    saved_method,
)
from fedcc.federation import Models, as_samples
from fedcc.inputs.tables import Encoding, Table
from fedcc.methods import class_name

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Explanation:
    """The clients' part in predictions of N inputs."""

    clients: tuple[str, ...]
    classes: tuple[str, ...]
    votes: Tensor  # [clients, N, classes]: each client's mass for each class
    trust: Tensor  # [clients, N]: the clients' weights, which add up to 1

    @property
    def known(self) -> Tensor:
        """The mass that each client gives to known classes, [clients, N]."""
        return self.votes.sum(-1)

    def best(self, index: int, number: int = 3) -> list[tuple[str, str, float, float]]:
        """The clients with the most trust for one input: client, its class, its vote for it, and its trust."""
        order = self.trust[:, index].argsort(descending=True, stable=True)[:number].tolist()
        rows = []
        for k in order:
            vote, c = self.votes[k, index].max(0)
            rows.append((self.clients[k], self.classes[int(c)], float(vote), float(self.trust[k, index])))
        return rows

    def lines(self, index: int) -> list[str]:
        """The same in words."""
        return [f"{who}: {name} {vote:.2f} (trust {trust:.2f})" for who, name, vote, trust in self.best(index)]

    def __repr__(self) -> str:
        number = self.trust.shape[1]
        lines = [f"Explanation of {number} inputs by {len(self.clients)} clients"]
        lines += [f"  {i}: {', '.join(self.lines(i))}" for i in range(min(number, 5))]
        return "\n".join(lines + ["  ..."] * (number > 5))


@dataclass(frozen=True, eq=False)
class Result:
    """A run's rounds, and its models to predict with by the method's own rule.

    >>> import fedcc
    >>> federation = fedcc.Federation.named("digits", skew="classes:2", clients=5, models="resnet8")
    >>> result = fedcc.run("fedcc", federation, rounds=1, epochs=1)
    >>> images = federation.test.x[:3]
    >>> result.predict(images).shape, result.scores(images).shape
    (torch.Size([3]), torch.Size([3, 10]))
    """

    method: AnyMethod
    trained: Trained
    view: View
    dtype: str = "float32"  # of the inputs: float32, uint8 (images) or int64 (tokens)
    rounds: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    labels: tuple[int, ...] = ()  # the caller's label of each class; empty where they are 0 .. classes - 1
    stopped: str = ""  # why an observer ended the run before its last round; empty if none did
    names: tuple[str, ...] = ()  # of the classes, if the data set has some
    encoding: Encoding | None = None  # of a table's columns

    def __repr__(self) -> str:
        networks = listed([f"{n} x {arch}" for arch, n in Counter(str(m.arch) for m in self.models.values()).items()])
        scores = "not evaluated"
        if self.curve:
            scores = f"accuracy {self.accuracy:.2f} %, best {self.best[1]:.2f} % in round {self.best[0]}"
        return (
            f"Result({self.method.label}, {len(self.rounds)} rounds, {self.seconds:.1f} s: {scores})\n"
            f"  networks: {networks}\n"
            f"  inputs: {self.dtype} {list(self.shape)}\n"
            f"  classes: {len(self.classes):,} ({listed(self.classes)})"
        )

    @property
    def accuracy(self) -> float:
        """Accuracy of the last evaluated round on the global test set, in percent."""
        return float(self._evaluated[-1][1])

    @property
    def best(self) -> tuple[int, float]:
        """The best round and its accuracy."""
        return max(self._evaluated, key=lambda point: (point[1], -point[0]))

    @property
    def _evaluated(self) -> list[tuple[int, float]]:
        if not self.curve:
            raise ValueError("this result has no accuracy: no round was evaluated, or there were no test samples")
        return self.curve

    @property
    def curve(self) -> list[tuple[int, float]]:
        """(round, accuracy) of every evaluated round."""
        return [(r["round"], r["accuracy"]) for r in self.rounds if r.get("accuracy") is not None]

    @property
    def model_bytes(self) -> int:
        """The bytes of the clients' models, handed over once; 0 where the server predicts by itself."""
        return sum(nbytes(Weights.of(m)) for m in self.trained.clients.values()) if self.method.uploads_models else 0

    @property
    def models(self) -> dict[str, Model]:
        """All models, by ``client/ID`` and ``server/NAME``."""
        clients = {f"client/{k}": model for k, model in self.trained.clients.items()}
        return clients | {f"server/{name}": model for name, model in self.trained.server.items()}

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each class: the data set's, else its label."""
        return self.names or tuple(map(str, self.labels or range(self.trained.classes)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input of the networks."""
        return next(iter(self.models.values())).arch.shape

    def scores(self, x: Any) -> Tensor:
        """Scores [N, classes] of new inputs, in the form of those it was trained on, by the method's own rule.

        Methods without a common model (``local``, ``SSL``) give one set per client, [clients, N, classes].
        """
        return _joined(self._ask(self.method.predict, x), -2)

    def _ask(self, question: Callable[[Trained, Samples], Coroutine[Any, Any, T]], x: Any) -> list[T]:
        """What the method answers about new inputs; of a memory map, a part at a time."""
        device = next(iter(self.models.values())).state["head.weight"].device
        parts = (part.to(device) for part in self._samples(x).chunks())
        return [drive([question(self.trained, part)], Plain(device))[0] for part in parts]

    def _samples(self, x: Any) -> Samples:
        """New inputs, checked; rows of a table are encoded as in training."""
        from fedcc.data.objects import read_object

        if found := read_object("predict", x, labelled=False, resize=self.shape[-1] if self.dtype == "uint8" else 0):
            x = found[0]
        if isinstance(x, Table):
            if self.encoding is None:
                raise ValueError("this model was not trained on a table")
            x = self.encoding.encode(x)
        model = next(iter(self.models.values()))
        samples = as_samples("predict", x, self.view)
        dtype = str(samples.x.dtype).removeprefix("torch.")
        if samples.shape != model.arch.shape or dtype != self.dtype:
            raise ValueError(
                f"inputs must be like those of training, {self.dtype} of shape {model.arch.shape}, "
                f"got {dtype} of shape {samples.shape}"
            )
        return samples

    def predict(self, x: Any, abstain: float | None = None) -> Tensor:
        """The predicted label of each input: a class from 0 on, or one of the labels that the federation had.

        With ``abstain``, inputs whose :meth:`confidence` is below this threshold get -1, "unknown".
        """
        if abstain is None:
            return self._labelled(self.scores(x).argmax(-1))
        check_value("abstain", abstain, float, 0, 1)
        answer = self.answer(x)
        return self._labelled(answer.probabilities.argmax(-1)).masked_fill(answer.confidence < abstain, -1)

    def _labelled(self, classes: Tensor) -> Tensor:
        return torch.tensor(self.labels)[classes] if self.labels else classes

    def predict_proba(self, x: Any) -> Tensor:
        """Probabilities [N, classes] of new inputs, [clients, N, classes] where each client predicts by itself."""
        return self.answer(x).probabilities

    def confidence(self, x: Any) -> Tensor:
        """How sure the prediction is, [N]: for FedCC the largest vote of any client, else the largest probability."""
        return self.answer(x).confidence

    def answer(self, x: Any) -> Answer:
        """Probabilities, confidence and the mass for "unknown" (FedCC) of new inputs."""
        answers = self._ask(self.method.answer, x)
        unknown = [a.unknown for a in answers if a.unknown is not None]
        return Answer(
            _joined([a.probabilities for a in answers], -2),
            _joined([a.confidence for a in answers], -1),
            _joined(unknown, -1) if unknown else None,
        )

    def explain(self, x: Any) -> Explanation:
        """Who knew: each client's votes for the classes, its known mass and the trust it gets."""
        votes = self._ask(self.method.votes, x)
        known, trust = _joined([v.known for v in votes], -2), _joined([v.trust for v in votes], -1)
        clients = tuple(f"client {k}" for k in self.trained.clients)
        return Explanation(clients, self.classes, known, trust)

    def to(self, device: torch.device | str) -> Result:
        """The same result with its models on another device."""
        clients = {k: model.to(device) for k, model in self.trained.clients.items()}
        server = {name: model.to(device) for name, model in self.trained.server.items()}
        baseline = {k: mean.to(device) for k, mean in self.trained.baseline.items()}
        return replace(self, trained=Trained(self.trained.classes, clients, server, baseline))

    def save(self, folder: Path | str) -> Path:
        """Write ``models.safetensors`` and ``models.json`` into a folder; :meth:`load` reads them."""
        folder = Path(folder)
        make_folder(folder)
        states = {f"{who}/{n}": v for who, model in self.models.items() for n, v in model.state.items()}
        states |= {f"{BASELINE}/{k}": mean for k, mean in self.trained.baseline.items()}
        # models may share tensors (FedConcat's encoders), which the format refuses
        copies = {n: v.cpu().clone(memory_format=torch.contiguous_format) for n, v in states.items()}
        content = safetensors.torch.save(copies)
        write_whole(folder / TENSORS, content)
        about = {
            "format": FORMAT,
            "method": self.method.name,
            **({"method_code": source} if (source := class_name(type(self.method))) != self.method.name else {}),
            "version": self.method.version,
            "settings": asdict(self.method),  # type: ignore[call-overload]
            "classes": self.trained.classes,
            "labels": list(self.labels),
            **({"names": list(self.names)} if self.names else {}),
            **({"columns": self.encoding.values()} if self.encoding else {}),
            "view": asdict(self.view),
            "dtype": self.dtype,
            "rounds": self.rounds,
            "seconds": self.seconds,
            **({"stopped": self.stopped} if self.stopped else {}),
            "models": describe_archs({who: model.arch for who, model in self.models.items()}),
            **({"code": code} if (code := self.code_digests()) else {}),
            BESIDE: {TENSORS: hashlib.sha256(content).hexdigest()},
        }
        write_json(folder / ABOUT, about)
        return folder

    def code_digests(self) -> dict[str, str]:
        """The digests of the files of imported code that it predicts with."""
        trunks = {str(trunk) for model in self.models.values() for trunk in model.arch.trunks}
        return code_digests([class_name(type(self.method)), *sorted(trunks)])

    @staticmethod
    def load(folder: Path | str, models: Models | None = None, method: AnyMethod | str | None = None) -> Result:
        """Read what :meth:`save` wrote; damaged files are refused.

        The files do not hold networks that you defined: pass the same ``models=`` as to the federation. Likewise
        ``method=`` for a method that is not in this package: the same object, or ``module:Class``. Both may be left out
        for what an installed package brings by entry points. A warning says if code has changed since.

        >>> import fedcc, tempfile
        >>> federation = fedcc.Federation.named("digits", skew="classes:2", clients=5, models="resnet8")
        >>> result = fedcc.run("fedcc", federation, rounds=1, epochs=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     again = fedcc.load(result.save(folder))
        >>> bool((again.predict(federation.test.x) == result.predict(federation.test.x)).all())
        True
        """
        allow(models, method)
        folder = Path(folder)
        about = read_about(folder)
        method = saved_method(folder, about, method)
        try:
            values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in about["view"].items()}
            view = View(**values)
        except TypeError as error:
            raise DamagedFile(f"{folder}/{ABOUT} is damaged: {type(error).__name__} {error}") from None
        by_name, baseline = read_models(folder, about, models)
        warn_of_changes(about.get("code", {}), folder)
        clients = {int(n.removeprefix("client/")): m for n, m in by_name.items() if n.startswith("client/")}
        server = {n.removeprefix("server/"): m for n, m in by_name.items() if n.startswith("server/")}
        trained = Trained(about["classes"], clients, server, baseline)
        labels = about.get("labels", [])  # results of older versions have none
        whole = isinstance(labels, list) and all(type(label) is int and 0 <= label < 1 << 63 for label in labels)
        if not whole or labels != sorted(set(labels)) or len(labels) not in (0, trained.classes):
            raise DamagedFile(f"{folder}/{ABOUT} is damaged: 'labels' must be {trained.classes} ascending numbers")
        stopped = str(about.get("stopped", ""))
        names = about.get("names", [])
        if (
            not isinstance(names, list)
            or len(names) not in (0, trained.classes)
            or not all(isinstance(n, str) for n in names)
        ):
            raise DamagedFile(f"{folder}/{ABOUT} is damaged: 'names' must be {trained.classes} texts")
        try:
            encoding = Encoding.of(about["columns"]) if "columns" in about else None
        except (TypeError, KeyError, ValueError) as error:
            raise DamagedFile(f"{folder}/{ABOUT} is damaged: 'columns': {type(error).__name__} {error}") from None
        return Result(
            method, trained, view, about["dtype"], about["rounds"], about["seconds"], tuple(labels), stopped,
            tuple(names), encoding,
        )  # fmt: skip


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """What was answered a part at a time, as one tensor."""
    return torch.cat([part.cpu() for part in parts], dim) if len(parts) > 1 else parts[0].cpu()


load = Result.load
