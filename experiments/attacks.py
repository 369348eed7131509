"""What a few of ten clients can do to a federation that lie: the table of docs/attacks.md.

    python experiments/attacks.py OUT.json [--jobs N] [--seconds S]
    python experiments/attacks.py OUT.json --table

Digits with the demo's settings (10 clients, T=3, E=5). The first clients are the attackers; each row of OUT.json is one
run: its accuracy, and whom the operator was warned of in each round. Runs that OUT.json already has are not repeated,
so that the study can be interrupted; no run starts after S seconds. ``--jobs`` runs several at a time, each in its own
process. ``--table`` prints the tables.

In the first round nothing has been received, so honest clients do the same whoever attacks: a process trains it once.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fedcc
from fedcc.core.files import write_whole
from fedcc.core.messages import Predictions, Weights
from fedcc.core.method import AnyMethod
from fedcc.core.model import Model
from fedcc.core.roles import Client
from fedcc.experiments.environment import commit
from fedcc.experiments.workers import ProcessPool, WorkerDeath
from fedcc.losses import Distill

Study = tuple[str, str, int, str, int]  # method, skew, seed, attack, number of attackers

SKEWS = ("classes:1", "classes:3", "dirichlet:0.5")
METHODS = {
    "FedCC": ("fedcc", {}),
    "FedCC, guard_votes": ("fedcc", {"guard_votes": True}),
    "FedMD": ("fedmd", {}),
    "FedMD, logits": ("fedmd", {"loss": "l1", "average": "logits"}),
    "FedDF": ("feddf", {}),
    "FedAvg": ("fedavg", {}),
}
ATTACKS = {
    "honest": "nobody lies",
    "absent": "no data; always unknown: what is left without the client's data (FedCC)",
    "constant": "no data; always class 0, certain (weights: a model that says so)",
    "random": "no data; a random answer to each sample, new in every round (weights: random numbers of the same size)",
    "labels": "trained on private labels y -> 9 - y",
    "answers": "trained honestly; each class is given the next one's name, on public samples and when predicting",
    "half": "adaptive, no data: certain of class 0 on half of the samples, as often as it may be",
    "informed": "adaptive: learns the classes of the public samples from the server's targets, then names the next "
    "class of each with certainty; its mean vote is as low as an honest client's",
    "quiet": "adaptive: like informed, but only about samples of three classes, and unknown otherwise, so that nothing "
    "of its votes is scaled down",
    "turncoat": "adaptive: honest in all rounds; its model says class 0, certain, when the federation predicts",
    "huge": "logits of 1e30 for class 0",
    "sign": "weights: the update with the opposite sign",
    "scaled": "weights: ten times the update",
    "counts": "weights: honest, but claims a hundred times its number of samples",
}


@dataclass(eq=False)
class Plot:
    """Who attacks and how; models that attackers hide between rounds."""

    attack: str
    attackers: frozenset[int]
    shared: dict[int, tuple[Model, Any]]  # the first round of honest clients
    hidden: dict[int, Model] = field(default_factory=dict)
    learned: dict[int, Tensor] = field(default_factory=dict)  # the classes of the public samples, from the targets


def attacked(method: AnyMethod, plot: Plot) -> AnyMethod:
    """The same method with some clients that follow a plot."""
    kind: Any = type(method)

    class Attacked(kind):  # type: ignore[misc]
        async def client(self, c: Client, down: Any) -> Any:
            if c.id not in plot.attackers:
                if c.round > 1:
                    return await kind.client(self, c, down)
                if c.id not in plot.shared:
                    up = await kind.client(self, c, down)
                    plot.shared[c.id] = c.model, up
                c.model, up = plot.shared[c.id]
                return up
            c.model = plot.hidden.get(c.id, c.model)
            return await (lying_weights if isinstance(down, Weights) else lying_predictions)(self, kind, plot, c, down)

    Attacked.__name__ = method.name
    return Attacked(**asdict(method))  # type: ignore[call-overload,no-any-return]


async def lying_predictions(method: Any, kind: Any, plot: Plot, c: Client, down: Predictions | None) -> Predictions:
    """What an attacker answers to the public samples; its model then answers the same way when predicting."""
    attack, last = plot.attack, c.arch.outputs
    if attack == "constant":
        c.model = with_head(c.model, torch.zeros_like, 50.0 * F.one_hot(torch.tensor(0), last))
    elif attack == "absent":
        c.model = with_head(c.model, torch.zeros_like, 50.0 * F.one_hot(torch.tensor(last - 1), last))
    elif attack == "random":
        draws = torch.Generator().manual_seed(1000 * c.round + 10 * c.id + c.key.seed)
        features = (await c.predict(c.public)).features
        weight = 200 * torch.randn(last, features.shape[1], generator=draws)
        c.model = with_head(c.model, lambda _: weight, -weight @ features.mean(0))  # another answer to each sample
        return Predictions(shared(method, 10 * torch.randn(len(c.public), last, generator=draws)))
    elif attack == "half":
        features = (await c.predict(c.public)).features
        draws = torch.Generator().manual_seed(c.key.seed + c.id)
        direction = 1000 * torch.randn(features.shape[1], generator=draws)
        weight = torch.zeros(last, features.shape[1])
        weight[0], weight[-1] = direction, -direction
        middle = float((features @ direction).median())
        bias = torch.full((last,), -1e6)
        bias[0], bias[-1] = -middle, middle
        c.model = with_head(c.model, lambda _: weight, bias)
    elif attack == "labels":
        if c.round == 1:
            c.private = c.private.with_(y=c.classes - 1 - c.private["y"])
        return await kind.client(method, c, down)  # type: ignore[no-any-return]
    elif attack in ("informed", "quiet") and down is not None:
        classes = plot.learned.setdefault(c.id, down.values.argmax(-1))  # before its own lies are in the targets
        answers = (classes + 1) % c.classes
        if attack == "quiet":
            answers = answers.where((classes >= 1) & (classes <= 3), last - 1)
        target = F.one_hot(answers, last).float()
        recipe = c.recipe_with(epochs=20 * c.recipe.epochs)
        await c.fit("sync", Distill("public"), public=c.public.with_(target=target), recipe=recipe)
        plot.hidden[c.id] = c.model
        return Predictions(target)
    else:
        up = await kind.client(method, c, down)
        plot.hidden[c.id] = c.model
        if attack == "answers":
            order = torch.arange(c.classes).roll(1).tolist() + list(range(c.classes, last))
            c.model = with_head(c.model, lambda w: w[order], c.model.state["head.bias"][order])
        elif attack == "turncoat":
            c.model = with_head(c.model, torch.zeros_like, 50.0 * F.one_hot(torch.tensor(0), last))
            return up  # type: ignore[no-any-return]
        elif attack == "huge":
            return Predictions(torch.zeros_like(up.values).index_fill(1, torch.tensor(0), 1e30))
        else:
            return up  # type: ignore[no-any-return]
    return Predictions(shared(method, (await c.predict(c.public)).logits))


async def lying_weights(method: Any, kind: Any, plot: Plot, c: Client, down: Weights) -> Weights:
    """What an attacker sends where weights are shared."""
    attack, received = plot.attack, down.state
    if attack == "labels" and c.round == 1:
        c.private = c.private.with_(y=c.classes - 1 - c.private["y"])
    if attack == "constant":
        bias = 50.0 * F.one_hot(torch.tensor(0), c.arch.outputs)
        return Weights({**received, "head.weight": 0 * received["head.weight"], "head.bias": bias}, len(c.private))
    if attack == "random":
        draws = torch.Generator().manual_seed(1000 * c.round + 10 * c.id + c.key.seed)
        return Weights({n: noise_like(v, draws, n) for n, v in received.items()}, len(c.private))
    up: Weights = await kind.client(method, c, down)
    if attack == "answers":
        head = {n: up.state[n].roll(1, 0) for n in ("head.weight", "head.bias")}
        return Weights({**up.state, **head}, up.samples)
    if attack in ("sign", "scaled"):
        factor = -1 if attack == "sign" else 10
        state = {n: received[n] + factor * (v - received[n]) for n, v in up.state.items()}
        state |= {n: v.clamp(min=0) for n, v in state.items() if n.endswith("running_var")}
        return Weights(state, up.samples)
    return replace(up, samples=100 * up.samples) if attack == "counts" else up


def noise_like(value: Tensor, draws: torch.Generator, name: str) -> Tensor:
    spread = value.std() if value.numel() > 1 and float(value.std()) > 0 else value.abs().mean() + 0.1
    noise = value.mean() + spread * torch.randn(value.shape, generator=draws)
    return noise.abs() if name.endswith("running_var") else noise


def shared(method: Any, logits: Tensor) -> Tensor:
    """Logits as the method shares them."""
    return method.shared(logits) if hasattr(method, "shared") else logits.softmax(-1)  # type: ignore[no-any-return]


def with_head(model: Model, weight: Any, bias: Tensor) -> Model:
    old = model.state["head.weight"]
    return model.with_({**model.floating, "head.weight": weight(old).clone(), "head.bias": bias.float()})


def studies() -> Iterator[Study]:
    """All runs, the most important first."""
    ours = ("FedCC", "FedCC, guard_votes")
    for attack in ("honest", "constant"):
        for skew in SKEWS:
            for seed in range(3):
                for method in reversed(ours):
                    yield method, skew, seed, attack, int(attack != "honest")
    for seed in range(3):
        yield "FedCC", "classes:1", seed, "absent", 1
    for attack in ("random", "informed", "quiet", "half", "answers", "labels", "turncoat"):
        for skew in SKEWS:
            for method in ours:
                yield method, skew, 0, attack, 1
    for method in ("FedAvg", "FedMD", "FedDF"):
        kinds = ("sign", "scaled", "counts") if method != "FedMD" else ("informed", "turncoat")
        for attack in ("honest", "constant", "random", "labels", "answers", *kinds):
            for skew in SKEWS:
                yield method, skew, 0, attack, int(attack != "honest")
    for seed in (1, 2):
        for skew in SKEWS:
            yield "FedCC, guard_votes", skew, seed, "random", 1
    for attack in ("honest", "huge"):
        yield "FedMD, logits", "dirichlet:0.5", 0, attack, int(attack != "honest")
    for number in (3, 2):
        for method in ("FedCC, guard_votes", "FedCC", "FedMD", "FedAvg", "FedDF"):
            adaptive = ("informed", "quiet", "half") if method in ours else ()
            for attack in ("constant", "random", "labels", "answers", *adaptive):
                for skew in SKEWS:
                    yield method, skew, 0, attack, number


def name_of(method: str, skew: str, seed: int, attack: str, number: int) -> str:
    return f"{method} | {skew} | seed {seed} | {attack} x {number}"


def main(out: Path, jobs: int, seconds: float) -> None:
    record = json.loads(out.read_text()) if out.exists() else {"rows": {}}
    rows, begin = record["rows"], time.monotonic()
    if "commit" in record:  # a file of the time before each row had its own
        made = {"commit": record.pop("commit"), "torch": record.pop("versions")["torch"]}
        rows |= {name: row | made for name, row in rows.items()}
    missing = iter([study for study in studies() if name_of(*study) not in rows])
    pool = ProcessPool[Study, dict[str, Any]](perform, jobs)
    try:
        while True:
            while len(pool.busy) < jobs and time.monotonic() - begin < seconds and (study := next(missing, None)):
                pool.give(study)
            if not pool.busy:
                break
            for study, row in pool.wait(3600):
                if isinstance(row, WorkerDeath):
                    raise SystemExit(f"{name_of(*study)}: {row.reason}")
                rows[name_of(*study)] = row
                print(f"{name_of(*study)}: {row['accuracy']:.1f} %, {time.monotonic() - begin:.0f} s", flush=True)
                order = {name: rows[name] for name in (name_of(*s) for s in studies()) if name in rows}
                write_whole(out, json.dumps(record | provenance() | {"rows": order}, indent=1))
    finally:
        pool.close()


def perform(study: Study) -> dict[str, Any]:
    """One run, as a row of the record."""
    method, skew, seed, attack, number = study
    kind, settings = METHODS[method]
    first_round = FIRST_ROUNDS.setdefault((kind, skew, seed, "logits" in method), {})
    plot = Plot(attack, frozenset(range(number)), first_round)
    federation = fedcc.Federation.named("digits", skew=skew, seed=seed)
    result = fedcc.run(attacked(fedcc.make(kind, **settings), plot), federation, seed=seed, device="cpu", threads=1,
                       client_accuracy=False, readings=False)  # fmt: skip
    return {
        "method": method, "skew": skew, "seed": seed, "attack": attack, "attackers": number,
        "accuracy": round(result.accuracy, 2), "rounds": [round(a, 2) for _, a in result.curve],
        "warned": [sorted(map(int, r.get("warnings", {}))) for r in result.rounds],
        "commit": (commit() or "")[:7], "torch": torch.__version__,
    }  # fmt: skip


FIRST_ROUNDS: dict[tuple[str, str, int, bool], dict[int, tuple[Model, Any]]] = {}  # of this process


def provenance() -> dict[str, Any]:
    return {
        "command": "python experiments/attacks.py OUT.json",
        "about": "digits, 10 clients, T=3, E=5, CPU, one thread; accuracy in percent of the last round",
        "attacks": ATTACKS,
    }


def table(out: Path) -> None:
    """Accuracies by method, attack and number of attackers (columns: skews), and how often warnings were right."""
    rows = list(json.loads(out.read_text())["rows"].values())
    cells: dict[tuple[str, str, int], dict[str, list[tuple[int, float]]]] = {}
    for r in sorted(rows, key=lambda r: r["seed"]):
        cell = cells.setdefault((r["method"], r["attack"], r["attackers"]), {})
        cell.setdefault(r["skew"], []).append((r["seed"], r["accuracy"]))
    print(f"| | attack | attackers | {' | '.join(f'`{skew}`' for skew in SKEWS)} |\n|---|---|---|{'---|' * len(SKEWS)}")
    order = [(m, a, n) for m in METHODS for a in ATTACKS for n in range(4)]
    for method, attack, number in [key for key in order if key in cells]:
        found = cells[method, attack, number]
        texts = [", ".join(f"{accuracy:.1f}" for _, accuracy in found.get(skew, [])) for skew in SKEWS]
        print(f"| {method} | {attack} | {number or ''} | {' | '.join(texts)} |")
    print("\n| attack | runs | an attacker is named | an honest client is named |\n|---|---|---|---|")
    for attack in [a for a in ATTACKS if any(r["attack"] == a for r in rows)]:
        runs = [r for r in rows if r["attack"] == attack and "warned" in r]
        named = [{k for warned in r["warned"] for k in warned or ()} for r in runs]
        right = sum(any(k < r["attackers"] for k in who) for r, who in zip(runs, named, strict=True))
        wrong = sum(any(k >= r["attackers"] for k in who) for r, who in zip(runs, named, strict=True))
        print(f"| {attack} | {len(runs)} | {right} | {wrong} |")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("out", type=Path)
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("--seconds", type=float, default=float("inf"))
    options.add_argument("--table", action="store_true")
    chosen = options.parse_args()
    table(chosen.out) if chosen.table else main(chosen.out, chosen.jobs, chosen.seconds)
