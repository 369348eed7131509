"""What the public samples must be like: FedCC on digits, one class per client, with other public samples each time.

    python experiments/public_data.py OUT.json [SEEDS]

"known" is the mean over the public samples of the largest vote of any client for any class after round 1: how well
the sample is known to the one who knows it best.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

import fedcc
from fedcc.data import load
from fedcc.experiments.rounds import FinishedRound, Observer


def kinds(x: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Public samples of 144 and fewer or more; ``x`` are digits that no client has."""
    first, top = x[:144], int(x.max())
    scrambled = first.reshape(144, -1)[:, rng.permutation(64)].reshape(first.shape)
    return {
        **{f"{number} digits": x[:number] for number in (5, 10, 20, 50, 144, 433)},
        "144 digits, only 0 to 4": x[y < 5][:144],
        "144 digits, inverted": top - first,
        "144 digits, mirrored": np.ascontiguousarray(first[..., ::-1]),
        "144 digits, rotated by 90 degrees": np.ascontiguousarray(np.rot90(first, axes=(2, 3))),
        "144 digits, brightness halved": (first // 2).astype(first.dtype),
        "144 digits, pixels in another order": scrambled,
        "144 mixtures of two digits": ((first.astype(int) + first[rng.permutation(144)]) // 2).astype(first.dtype),
        "144 images of noise": rng.integers(0, top + 1, first.shape).astype(first.dtype),
        "144 grey images": np.broadcast_to(rng.integers(0, top + 1, (144, 1, 1, 1)), first.shape).astype(first.dtype),
    }


class Known(Observer):
    """Keeps the largest votes of the first round."""

    value = 0.0

    def round(self, done: FinishedRound) -> None:
        if done.t == 1:
            votes = torch.stack([up.values for up in done.messages.ups.values()])
            self.value = round(float(votes[..., :-1].amax((0, 2)).mean()), 4)


def rows(seeds: range) -> list[dict[str, object]]:
    data, found = load("digits"), []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(data.train_y))
        x, y = data.train_x[order], data.train_y[order]
        clients = [(x[433:][y[433:] == c], y[433:][y[433:] == c]) for c in range(10)]
        for name, public in kinds(x[:433], y[:433], rng).items():
            federation = fedcc.Federation.of(clients, public, (data.test_x, data.test_y), "resnet8", view=data.view)
            known = Known()
            result = fedcc.run("fedcc", federation, rounds=3, epochs=5, seed=seed, device="cpu", threads=1,
                               readings=False, client_accuracy=False, observers=[known])  # fmt: skip
            found.append({"public": name, "seed": seed, "accuracy": result.accuracy, "known": known.value})
            print(found[-1], flush=True)
    return found


if __name__ == "__main__":
    out, seeds = sys.argv[1], range(int(sys.argv[2]) if len(sys.argv) > 2 else 3)
    record = {"command": "python experiments/public_data.py " + " ".join(sys.argv[1:]), "fedcc": fedcc.__version__}
    Path(out).write_text(json.dumps(record | {"torch": torch.__version__, "rows": rows(seeds)}, indent=1) + "\n")
