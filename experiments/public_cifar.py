"""FedCC on CIFAR-10 with other public images: public_cifar.py SKEW PUBLIC FOLDER [ROUNDS].

PUBLIC is cifar10 (the 5,000 images that the split sets aside) or cifar100 (as many of its training images, by random
choice, without labels). The clients' samples are those of `fedcc run fedcc --data cifar10 --skew SKEW --seed 0` in both
cases. FOLDER gets the run, FOLDER.json the result. "known" is the mean over the public images of the largest vote of
any client for any class in a round.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import fedcc
from fedcc.core.samples import Samples
from fedcc.data import load
from fedcc.experiments.environment import commit
from fedcc.experiments.rounds import FinishedRound, Observer

skew, kind, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
rounds = int(sys.argv[4]) if len(sys.argv) > 4 else 15
EPOCHS = 20


class Known(Observer):
    """How well the clients know the public images."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def round(self, done: FinishedRound) -> None:
        votes = torch.stack([up.values for up in done.messages.ups.values()]).float()
        self.values.append(round(float(votes[..., :-1].amax((0, 2)).mean()), 4))


federation = fedcc.Federation.named("cifar10", skew=skew, clients=10, seed=0)
number = len(federation.public)
if kind != "cifar10":
    other = load(kind).train_x
    chosen = np.sort(np.random.default_rng(0).permutation(len(other))[:number])
    x = torch.from_numpy(np.ascontiguousarray(other[chosen]))
    federation = replace(federation, public=Samples({"x": x}, federation.public.view), hidden=None)
known = Known()
result = fedcc.run("fedcc", federation, rounds=rounds, epochs=EPOCHS, seed=0, observers=[known], out=folder,
                   progress=True)  # fmt: skip
record = {
    "command": f"python experiments/public_cifar.py {skew} {kind} FOLDER {rounds}",
    "commit": commit(),
    "torch": torch.__version__,
    "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    "data": "cifar10",
    "skew": skew,
    "clients": 10,
    "seed": 0,
    "rounds": rounds,
    "epochs": EPOCHS,
    "public": {"images of": kind, "number": number},
    "known": known.values,
    "accuracy": [r.get("accuracy") for r in result.rounds],
    "targets": [r.get("targets") for r in result.rounds],
    "readings": [r.get("readings") for r in result.rounds],
    "seconds": round(result.seconds, 1),
}
Path(f"{folder}.json").write_text(json.dumps(record, indent=1) + "\n")
