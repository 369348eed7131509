"""Trackers: each round is logged to TensorBoard, MLflow or Weights & Biases.

The run folder's ``tracking.json`` holds a run's name at each tracker and the last round that was logged there, so that
a resumed run continues there.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from fedcc.core.digests import read_json, write_json
from fedcc.core.naming import unknown
from fedcc.core.options import check_value
from fedcc.errors import error_line
from fedcc.experiments.experiment import Experiment
from fedcc.experiments.record import Record
from fedcc.experiments.result import Result
from fedcc.experiments.rounds import FinishedRound, Observer

Warn = Callable[[str], None]
State = dict[str, Any]  # of one run at a tracker: "run", its name there, and "step", the last round that was logged


class Tracker(Protocol):
    """One run at one tracker."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self, finished: bool) -> None: ...


class TensorBoard:
    """Event files in the run folder. Those of a resumed run replace the rounds from its first one on."""

    def __init__(self, experiment: Experiment, folder: Path, first: int, state: State):
        from torch.utils.tensorboard import SummaryWriter

        state["step"] = 0
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first)
        if first == 1:
            self.writer.add_text("experiment", f"```\n{experiment.toml()}```", 1)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self, finished: bool) -> None:
        self.writer.close()


class MLflow:
    """A run of the MLflow experiment ``fedcc``, at MLFLOW_TRACKING_URI or in ``mlflow.db`` here."""

    def __init__(self, experiment: Experiment, folder: Path, first: int, state: State):
        self.client, name = mlflow_store()
        if "run" not in state:
            run = self.client.create_run(name, run_name=title(folder), tags={"folder": str(folder)})
            state["run"] = run.info.run_id
            for key, value in flat(experiment.values()).items():
                self.client.log_param(state["run"], key, value)
        else:
            self.client.update_run(state["run"], status="RUNNING")
        self.run = state["run"]

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self.client.log_batch(self.run, metrics=[Metric(name, value, now, step) for name, value in numbers.items()])

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.run, "FINISHED" if finished else "KILLED")


def mlflow_store() -> tuple[Any, str]:
    """A client, and the id of the MLflow experiment ``fedcc``, which is created if it does not exist."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path('mlflow.db').absolute()}")
    experiment = client.get_experiment_by_name("fedcc")
    return client, experiment.experiment_id if experiment else client.create_experiment("fedcc")


class WandB:
    """A run of the project WANDB_PROJECT, ``fedcc`` by default; WANDB_MODE=offline keeps it in the run folder."""

    def __init__(self, experiment: Experiment, folder: Path, first: int, state: State):
        import wandb

        state.setdefault("run", secrets.token_hex(4))
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedcc"),
            id=state["run"],
            name=title(folder),
            dir=str(folder),
            config=flat(experiment.values()),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def close(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


TRACKERS: dict[str, tuple[Callable[[Experiment, Path, int, State], Tracker], tuple[str, ...]]] = {
    "tensorboard": (TensorBoard, ("tensorboard",)),
    "mlflow": (MLflow, ("mlflow", "sqlalchemy", "alembic")),
    "wandb": (WandB, ("wandb",)),
}
"""By name, with the packages that each needs."""


def check_trackers(names: Iterable[str], warn: Warn) -> tuple[str, ...]:
    """The names without repeats; refuses one that is unknown or whose package is missing, before any training."""
    unique = tuple(dict.fromkeys(name.lower() for name in names))
    for name in unique:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
        if missing := [package for package in TRACKERS[name][1] if find_spec(package) is None]:
            raise ValueError(f"--track {name} needs {', '.join(missing)}: pip install '.[{name}]' in fedcc's checkout")
    if "mlflow" in unique:
        try:
            mlflow_store()  # once, before several processes would create it at the same time
        except Exception as error:
            warn(_failure("mlflow", error))
    return unique


class Trackers(Observer):
    """Tells trackers of each round; one that fails is dropped with a warning, and never ends a run."""

    def __init__(self, names: Sequence[str], experiment: Experiment, folder: Path, warn: Warn):
        self.names, self.experiment, self.folder, self.warn = list(names), experiment, folder, warn
        self.states: dict[str, State] = {}
        self.open: dict[str, Tracker] = {}

    def round(self, done: FinishedRound) -> None:
        path = self.folder / "tracking.json"
        if self.names and not self.states and path.exists():  # only now: before, the folder may be another run's
            self.states = read_states(path, self.warn)
        for name in tuple(self.names):
            with self._attempt(name):
                self._log(name, done.record)
        if self.names:
            write_json(path, self.states)

    def end(self, result: Result | None) -> None:
        for name in [name for name in self.names if name in self.open]:
            with self._attempt(name):
                self.open[name].close(result is not None)

    def _log(self, name: str, record: Record) -> None:
        state = self.states.setdefault(name, {})
        if name not in self.open:
            self.open[name] = TRACKERS[name][0](self.experiment, self.folder, record["round"], state)
        if record["round"] > state.get("step", 0):
            self.open[name].log(record["round"], numbers(record))
            state["step"] = record["round"]

    @contextmanager
    def _attempt(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.names.remove(name)
            self.warn(_failure(name, error))


def read_states(path: Path, warn: Warn) -> dict[str, State]:
    """The content of ``tracking.json``; if it is damaged, nothing, with a warning: trackers then begin a new run."""
    try:
        states: dict[str, State] = {name: value for name, value in read_json(path).items() if name in TRACKERS}
        for name, state in states.items():
            if not isinstance(state, dict):
                raise ValueError(f"{path} is damaged: {name} must have a run and a step")
            check_value(f"{path} is damaged: the run of {name}", state.get("run", ""), str)
            check_value(f"{path} is damaged: the step of {name}", state.get("step", 0), int, 0)
    except (OSError, ValueError) as error:
        warn(f"{error_line(error)}; trackers begin a new run")
        return {}
    return states


def numbers(record: Record) -> dict[str, float]:
    """A round's record as names and numbers; values of each client are averaged.

    >>> numbers({"round": 1, "accuracy": 50.0, "targets": None, "clients": {"0": 10.0, "1": 30.0},
    ...          "readings": {"trust=2": 60.0}, "bytes": {"up": 8}, "log": {"0": {"alpha": 0.5}}})
    {'accuracy': 50.0, 'readings/trust-2': 60.0, 'clients': 20.0, 'bytes/up': 8.0, 'log/alpha': 0.5}
    """
    values = {name: record.get(name) for name in ("accuracy", "targets")}
    for name, value in record.get("readings", {}).items():
        values[f"readings/{re.sub('[^A-Za-z0-9]+', '-', name)}"] = value  # MLflow refuses "=" and ","
    for name, value in record.get("metrics", {}).items():
        values[f"metrics/{re.sub('[^A-Za-z0-9]+', '-', name)}"] = value
    for name in ("clients", "local"):
        if record.get(name):
            values[name] = sum(record[name].values()) / len(record[name])
    for group in ("bytes", "seconds"):
        values |= {f"{group}/{name}": value for name, value in record.get(group, {}).items()}
    logs = list(record.get("log", {}).values())
    for name in dict.fromkeys(name for log in logs for name in log):
        own = [log[name] for log in logs if name in log]
        values[f"log/{name}"] = sum(own) / len(own)
    return {name: float(value) for name, value in values.items() if value is not None}


def flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table of tables as one, with dotted names."""
    values: dict[str, Any] = {}
    for name, value in table.items():
        values |= {f"{name}.{n}": v for n, v in value.items()} if isinstance(value, Mapping) else {name: value}
    return values


def title(folder: Path) -> str:
    """A run's name for people: the last parts of its folder."""
    return "/".join(folder.absolute().parts[-3:])


def _failure(name: str, error: Exception) -> str:
    return " ".join(f"no longer logging to {name}: {type(error).__name__}: {error}".split())
