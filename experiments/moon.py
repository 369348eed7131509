"""Why MOON is behind FedAvg after few rounds on digits: its weight, its received model's statistics, more rounds.

    python experiments/moon.py OUT.json [SEEDS]
    python experiments/moon.py --table OUT.json

Ten clients with three classes each, E=5, T=12, so that every curve also shows what three rounds give. OUT.json keeps
what it has, so that the study can be interrupted.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fedcc
from fedcc.core.messages import Weights
from fedcc.core.requests import Frozen, Recalibrate
from fedcc.core.roles import Client
from fedcc.losses import CrossEntropy
from fedcc.methods import MOON
from fedcc.methods.moon import ModelContrast

ROUNDS, SHOWN = 12, (1, 2, 3, 6, 12)
SGD = {"optimizer": "sgd", "lr": 0.01}


@dataclass(frozen=True)
class Refitted(MOON):
    """MOON whose received teacher has BatchNorm's statistics from the client's own samples, not averaged ones."""

    async def client(self, c: Client, down: Weights | None) -> Weights:
        assert down is not None
        if not c.memory.get("trained"):
            return await super().client(c, down)
        previous, c.model = c.model, c.model.with_(down.state)
        received = await Recalibrate(c.model, c.private)
        frozen = {"received": Frozen(received, "private"), "previous": Frozen(previous, "private")}
        loss = CrossEntropy("private") + 5.0 * ModelContrast(self.kappa)
        await c.fit("fit", loss, private=c.private, frozen=frozen)
        return Weights.of(c.model, len(c.private))


STUDY: dict[str, tuple[Any, dict[str, Any]]] = {
    "FedAvg": (fedcc.make("fedavg"), {}),
    "MOON, mu=0.1": (MOON(mu=0.1), {}),
    "MOON, mu=1": (MOON(mu=1.0), {}),
    "MOON, mu=5": (MOON(mu=5.0), {}),
    "MOON, mu=5, statistics of own samples": (Refitted(mu=5.0), {}),
    "FedAvg, SGD": (fedcc.make("fedavg"), SGD),
    "MOON, mu=1, SGD": (MOON(mu=1.0), SGD),
    "MOON, mu=5, SGD": (MOON(mu=5.0), SGD),
}


def main(path: Path, seeds: int) -> None:
    record = json.loads(path.read_text()) if path.exists() else {"command": "python experiments/moon.py OUT.json"}
    record |= {"fedcc": fedcc.__version__, "rows": record.get("rows", [])}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    done = {(row["what"], row["seed"]) for row in record["rows"]}
    for seed in range(seeds):
        federation = fedcc.Federation.named("digits", skew="classes:3", seed=seed)
        for what, (method, options) in STUDY.items():
            if (what, seed) in done:
                continue
            result = fedcc.run(
                method, federation, rounds=ROUNDS, seed=seed, device="cpu", threads=1, readings=False,
                client_accuracy=False, **options,
            )  # fmt: skip
            curve = [accuracy for _, accuracy in result.curve]
            record["rows"].append({"what": what, "seed": seed, "rounds": curve, "commit": commit.stdout.strip()})
            path.write_text(json.dumps(record, indent=1) + "\n")


def table(path: Path) -> str:
    """The mean accuracy after some of the rounds, over the seeds."""
    rows = json.loads(path.read_text())["rows"]
    lines = [["", *(f"round {t}" for t in SHOWN)], ["---"] * (len(SHOWN) + 1)]
    for what in dict.fromkeys(row["what"] for row in rows):
        curves = [row["rounds"] for row in rows if row["what"] == what]
        lines.append([what, *(f"{sum(c[t - 1] for c in curves) / len(curves):.1f}" for t in SHOWN)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    if sys.argv[1] == "--table":
        print(table(Path(sys.argv[2])))
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3)
