"""Run a method on a federation, and what comes back: the rounds, and a predictor that saves and loads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedcc.core.messages import Weights, nbytes
from fedcc.core.method import AnyMethod, Method, Trained
from fedcc.core.model import Arch, Model
from fedcc.core.naming import unknown
from fedcc.core.options import check_value
from fedcc.core.requests import Recipe
from fedcc.core.rng import Key
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples, View
from fedcc.engine import be_deterministic, drive, usual_engine, usual_precision
from fedcc.engine import engine as engine_named
from fedcc.engine.counting import Counting
from fedcc.engine.plain import Monitor, Plain, Precision
from fedcc.evaluate import Evaluation, evaluate
from fedcc.federate import Simulated, Snapshot, federate
from fedcc.federation import Federation, Models, as_samples
from fedcc.methods import METHODS, completed, make
from fedcc.nets import network
from fedcc.record import record_of
from fedcc.saved import read_about, read_models, write_models
from fedcc.threads import check_threads, fixed_threads, warn_of_threads

Record = dict[str, Any]
"""One round as a line of ``metrics.jsonl``."""


@dataclass(frozen=True, eq=False)
class Result:
    """A finished run: its rounds, and the models to predict with by the method's own rule."""

    method: AnyMethod
    trained: Trained
    view: View
    dtype: str = "float32"  # of the inputs: float32, uint8 (images) or int64 (tokens)
    rounds: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    labels: tuple[int, ...] = ()  # the caller's label of each class; none where they are 0 .. classes - 1

    @property
    def accuracy(self) -> float:
        """Accuracy of the last evaluated round on the global test set, in percent."""
        return float(self.curve[-1][1])

    @property
    def best(self) -> tuple[int, float]:
        """The best round and its accuracy."""
        return max(self.curve, key=lambda point: (point[1], -point[0]))

    @property
    def curve(self) -> list[tuple[int, float]]:
        """(round, accuracy) of every evaluated round."""
        return [(r["round"], r["accuracy"]) for r in self.rounds if r.get("accuracy") is not None]

    @property
    def model_bytes(self) -> int:
        """What handing the clients' models over once costs; nothing where the server predicts by itself."""
        return sum(nbytes(Weights.of(m)) for m in self.trained.clients.values()) if self.method.uploads_models else 0

    def scores(self, x: Any) -> Tensor:
        """Scores [N, classes] of new inputs, in the form of those it was trained on, by the method's own rule.

        Methods that leave each client alone (``local``, ``SSL``) give one set per client, [clients, N, classes].
        """
        model = next(iter(_models(self.trained).values()))
        device, samples = model.state["head.weight"].device, as_samples("predict", x, self.view)
        found = str(samples.x.dtype).removeprefix("torch.")
        if samples.shape != model.arch.shape or found != self.dtype:
            raise ValueError(
                f"inputs must be like those of training, {self.dtype} of shape {model.arch.shape}, "
                f"got {found} of shape {samples.shape}"
            )
        return drive([self.method.predict(self.trained, samples.to(device))], Plain(device))[0].cpu()

    def predict(self, x: Any) -> Tensor:
        """The predicted label of each input: a class from 0 on, or where the federation had others, one of those."""
        classes = self.scores(x).argmax(-1)
        return torch.tensor(self.labels)[classes] if self.labels else classes

    def save(self, folder: Path | str) -> Path:
        """Write ``models.safetensors`` and ``models.json`` into a folder; :meth:`load` reads them back."""
        about = {
            "method": self.method.name,
            "settings": asdict(self.method),  # type: ignore[call-overload]
            "classes": self.trained.classes,
            "labels": list(self.labels),
            "view": asdict(self.view),
            "dtype": self.dtype,
            "rounds": self.rounds,
            "seconds": self.seconds,
        }
        write_models(Path(folder), _models(self.trained), about)
        return Path(folder)

    @staticmethod
    def load(folder: Path | str, models: Models | None = None, method: AnyMethod | None = None) -> Result:
        """Read what :meth:`save` wrote; files that were damaged since then are refused.

        Networks that the caller made are not in the files: give the same ``models=`` as to the federation. Likewise
        ``method=`` for a method that this package does not know.
        """
        place = Path(folder)
        about = read_about(place)
        if method is None:
            if about["method"].lower() not in METHODS:
                raise ValueError(
                    f"{about['method']} is a method of yours: give load(..., method=...) the same as before"
                )
            try:
                method = make(about["method"], completed(about["method"], about["settings"]))
            except ValueError as error:
                raise ValueError(f"{place}/models.json: {error}") from None
        elif method.name != about["method"]:
            raise ValueError(f"{place} was saved by {about['method']}, got method={method.name}")
        try:
            shown: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in about["view"].items()}
            view = View(**shown)
        except TypeError as error:
            raise ValueError(f"{place}/models.json is damaged: {type(error).__name__} {error}") from None
        loaded = read_models(place, about, models)
        trained = Trained(
            about["classes"],
            {int(w.removeprefix("client/")): m for w, m in loaded.items() if w.startswith("client/")},
            {w.removeprefix("server/"): m for w, m in loaded.items() if w.startswith("server/")},
        )
        labels = about.get("labels", [])  # results from before labels were kept have none
        whole = isinstance(labels, list) and all(type(label) is int and 0 <= label < 1 << 63 for label in labels)
        if not whole or labels != sorted(set(labels)) or len(labels) not in (0, trained.classes):
            raise ValueError(f"{place}/models.json is damaged: 'labels' must be {trained.classes} ascending numbers")
        return Result(method, trained, view, about["dtype"], about["rounds"], about["seconds"], tuple(labels))


def run(
    method: AnyMethod | str,
    federation: Federation,
    rounds: int | None = None,
    *,
    epochs: int | None = None,
    lr: float = 1e-3,
    batch: int = 64,
    participation: float = 1.0,
    seed: int = 0,
    device: str = "auto",
    precision: Precision | None = None,
    engine: str | None = None,
    deterministic: bool = False,
    threads: int = 1,
    wire: str = "fp32",
    reset: Literal["phase", "round"] = "phase",
    client_accuracy: bool = True,
    on_round: Callable[[Record], None] | None = None,
    monitor: Monitor | None = None,
    start: Snapshot | None = None,
    on_snapshot: Callable[[Snapshot], None] | None = None,
) -> Result:
    """Train a method on a federation; rounds and epochs come from the data set unless given.

    ``on_round`` is told each round's record as it ends, then ``on_snapshot`` what the next one depends on; a run that
    is given such a snapshot as ``start`` goes on behind it, and its result has the rounds from there on. The same seed
    gives the same numbers for the same number of CPU ``threads``; on a GPU, up to rounding unless ``deterministic``.
    The engine is ``fused`` with bf16 on a GPU and ``plain`` with fp32 on a CPU unless given.
    """
    method = make(method) if isinstance(method, str) else method
    if not isinstance(method, Method):
        raise TypeError(f"a method is a name or an instance, as FedCC(), got {method!r}")
    total = federation.rounds if rounds is None else rounds
    check_value("rounds", total, int, 1)
    check_value("seed", seed, int, 0)
    check_threads(threads)
    warn_of_threads(threads)
    recipe = Recipe(lr=lr, batch=batch, epochs=federation.epochs if epochs is None else epochs, reset=reset)
    place = chosen_device(device)
    executor = engine_named(engine or usual_engine(place), place, precision or usual_precision(place), monitor)
    be_deterministic(deterministic)
    begun = time.perf_counter()
    with fixed_threads(threads):
        server, clients = parties(method, federation, recipe, seed, executor.device)
        counting = Counting(executor)  # of what training asks for; evaluation is not counted
        cohort = Simulated(method, clients, counting, participation=participation, wire=wire, start=start)
        test = federation.test.to(executor.device)
        wanted = client_accuracy and method.trains_clients
        counts = {c.id: c.counts().cpu() for c in clients} if wanted else {}
        records: list[Record] = []
        for done in federate(method, server, cohort, total, counting, start):
            spent, now = dict(executor.seconds), time.perf_counter()
            found, last = Evaluation(), done.t == method.rounds(total)
            if method.evaluates(done.t, total):
                found = evaluate(
                    method,
                    cohort.trained(server),
                    test,
                    executor,
                    counts={c.id: counts[c.id] for c in cohort.present if c.id in counts},
                    majority={c.id: c.majority for c in cohort.present if c.majority is not None},
                    downs=done.downs,
                    hidden=federation.hidden,
                    readings={
                        **method.readings(server.public),
                        **(method.last_readings(server.public) if last else {}),
                    },
                    detailed=last,
                )
            spent["evaluate"] = time.perf_counter() - now
            logs, majorities = {c.id: c.log for c in cohort.present}, {c.id: c.majority for c in cohort.present}
            records.append(record_of(done, found, spent, logs, majorities, counting.take()))
            executor.seconds = {}
            if on_round:
                on_round(records[-1])
            if on_snapshot:
                on_snapshot(cohort.snapshot(server, done))
    public, dtype = federation.public, str(federation.public.x.dtype).removeprefix("torch.")
    seconds = time.perf_counter() - begun
    return Result(method, cohort.trained(server), public.view, dtype, records, seconds, federation.labels)


def rehearse(method: AnyMethod, federation: Federation) -> None:
    """Raise what the first moments of a run would: a method and networks that do not go together."""
    server, _ = parties(method, federation, Recipe(), 0, "cpu")
    drive([method.start(server)], Plain("cpu"))


def parties(
    method: AnyMethod, federation: Federation, recipe: Recipe, seed: int, device: torch.device | str
) -> tuple[Server, list[Client]]:
    """The server and the clients of a run, each with what it may see and nothing else."""
    archs, public, classes = federation.archs(method), federation.public.to(device), federation.classes
    clients = [
        client_of(public, classes, recipe, seed, k, archs[k], private.to(device))
        for k, private in enumerate(federation.private)
    ]
    return server_of(method, public, classes, recipe, seed, archs), clients


def client_of(
    public: Samples, classes: int, recipe: Recipe, seed: int, number: int, arch: Arch, private: Samples
) -> Client:
    """One client, wherever it is."""
    key = Key(seed, 0, number)
    return Client(public=public, classes=classes, recipe=recipe, key=key, id=number, arch=arch, private=private)


def server_of(
    method: AnyMethod, public: Samples, classes: int, recipe: Recipe, seed: int, archs: Mapping[int, Arch]
) -> Server:
    """The server of clients with these networks, wherever they are."""
    if reason := method.refusal(public):
        raise ValueError(reason)
    return Server(
        public=public,
        classes=classes,
        recipe=recipe,
        key=Key(seed),
        archs=archs,
        networks=lambda name: Arch((network(name, public.shape),), method.outputs(classes), public.shape),
    )


def chosen_device(name: str) -> torch.device:
    """``auto`` is the GPU where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise unknown("device", name, ("auto", "cpu", "cuda")) from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} is not there: {torch.cuda.device_count()} CUDA devices were found")
    return device


def _models(trained: Trained) -> dict[str, Model]:
    return {f"client/{k}": m for k, m in trained.clients.items()} | {
        f"server/{n}": m for n, m in trained.server.items()
    }


load = Result.load
