"""How well a score tells inputs of new classes from known ones, and what leaving out unsure answers gains.

    python experiments/abstention.py digits OUT.json        eight clients with one digit each; 8 and 9 are new
    python experiments/abstention.py runs OUT.json RUN...   saved runs on CIFAR-10; CIFAR-100's test images are new

The score is ``Result.confidence``: of FedCC the largest vote of any client for any class, of other methods the largest
probability. AUROC: the chance that a known input has a higher score than a new one. Accuracy at 80 % coverage: of the
80 % of the known inputs with the highest scores.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

import fedcc
from fedcc.data import load

NEW = (8, 9)
METHODS = ("fedcc", "fedmd", "fedavg")
SEEDS = (0, 1, 2)


def measure(result: fedcc.Result, known: tuple[np.ndarray, np.ndarray], new: np.ndarray) -> dict[str, object]:
    from sklearn.metrics import roc_auc_score

    x, y = known
    parts = [result.answer(x[i : i + 2000]) for i in range(0, len(x), 2000)]
    scores = np.concatenate([part.confidence.numpy() for part in parts])
    right = np.concatenate([part.probabilities.argmax(-1).numpy() for part in parts]) == y
    foreign = np.concatenate([result.confidence(new[i : i + 2000]).numpy() for i in range(0, len(new), 2000)])
    order = np.argsort(-scores, kind="stable")
    accuracy = np.cumsum(right[order]) / np.arange(1, len(order) + 1)
    curve = {
        f"{share:.2f}": round(100 * float(accuracy[round(share * len(order)) - 1]), 2)
        for share in np.arange(0.1, 1.01, 0.1)
    }
    auroc = roc_auc_score(np.r_[np.ones(len(scores)), np.zeros(len(foreign))], np.r_[scores, foreign])
    return {
        "auroc": round(float(auroc), 4),
        "accuracy": curve["1.00"],
        "accuracy at 0.8": curve["0.80"],
        "coverage": curve,
    }


def digits() -> list[dict[str, object]]:
    data, rows = load("digits"), []
    known, new = ~np.isin(data.test_y, NEW), data.test_x[np.isin(data.test_y, NEW)]
    for seed in SEEDS:
        shuffled = np.random.default_rng(seed).permutation(len(data.train_y))
        x, y = data.train_x[shuffled], data.train_y[shuffled]
        public, private = x[:144], (x[144:], y[144:])
        for seen in (True, False):
            shown = public if seen else public[~np.isin(y[:144], NEW)]
            clients = [(private[0][private[1] == c], private[1][private[1] == c]) for c in range(8)]
            federation = fedcc.Federation.of(
                clients, shown, (data.test_x[known], data.test_y[known]), "resnet8", view=data.view
            )
            for name in METHODS:
                result = fedcc.run(name, federation, rounds=3, epochs=5, seed=seed, device="cpu", threads=1)
                row = {"method": name, "seed": seed, "public has new classes": seen}
                rows.append(row | measure(result, (data.test_x[known], data.test_y[known]), new))
                print({k: v for k, v in rows[-1].items() if k != "coverage"}, flush=True)
    return rows


def runs(folders: list[str]) -> list[dict[str, object]]:
    data, new, rows = load("cifar10"), load("cifar100").test_x, []
    for folder in folders:
        result = fedcc.load(folder)
        row = {"method": result.method.name.lower(), "run": Path(folder).name}
        rows.append(row | measure(result, (data.test_x, data.test_y), new))
        print({k: v for k, v in rows[-1].items() if k != "coverage"}, flush=True)
    return rows


if __name__ == "__main__":
    kind, out, *folders = sys.argv[1:]
    torch.set_num_threads(1 if kind == "digits" else 2)
    rows = digits() if kind == "digits" else runs(folders)
    command = " ".join(["python", "experiments/abstention.py", *sys.argv[1:]])
    record = {"command": command, "fedcc": fedcc.__version__, "torch": torch.__version__, "rows": rows}
    Path(out).write_text(json.dumps(record, indent=1) + "\n")
