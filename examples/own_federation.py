"""A federation on your own data: three hospitals with tabular data, each with a different network.

Each hospital has seen two of the four diagnoses. They share predictions on unlabelled public samples, never data or
weights, and together they know all four. Run ``python examples/own_federation.py`` (a few seconds).
"""

import tempfile

import numpy as np
from torch import nn

import fedcc

# Any arrays work. Here: four clusters of points in eight dimensions.
rng = np.random.default_rng(0)
centres = rng.normal(size=(4, 8)) * 2


def patients(labels: np.ndarray) -> np.ndarray:
    return (centres[labels] + rng.normal(size=(len(labels), 8))).astype(np.float32)


def hospital(*diagnoses: int) -> tuple[np.ndarray, np.ndarray]:
    labels = rng.choice(diagnoses, size=200)
    return patients(labels), labels


# A network is a function of the number of outputs; the module ends in a linear layer.
# FedCC asks for one output more than there are classes ("unknown").
def narrow(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, outputs))


def wide(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, outputs))


class Deep(nn.Module):
    def __init__(self, outputs: int):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
        self.head = nn.Linear(32, outputs)

    def forward(self, x):
        return self.head(self.body(x))


everyone = rng.integers(4, size=400)
federation = fedcc.Federation.of(
    clients=[hospital(0, 1), hospital(1, 2), hospital(2, 3)],
    public=patients(rng.integers(4, size=300)),  # no labels
    test=(patients(everyone), everyone),
    models=[narrow, wide, Deep],  # assigned to the clients in turn
)

local = fedcc.run(fedcc.Local(), federation, rounds=3, epochs=10)
result = fedcc.run(fedcc.FedCC(lam=0.2), federation, rounds=3, epochs=10)
print(f"each hospital alone: {local.accuracy:.1f} %, together with FedCC: {result.accuracy:.1f} %")

# Methods that average weights need the same architecture at every client, and refuse anything else.
try:
    fedcc.run(fedcc.FedAvg(), federation, rounds=1)
except ValueError as error:
    print(f"FedAvg: {error}")

# Predict, save, load. Your own networks are code, which is not saved, so pass them again when loading.
newcomers = patients(np.array([0, 1, 2, 3]))
with tempfile.TemporaryDirectory() as folder:
    result.save(folder)
    loaded = fedcc.load(folder, models=[narrow, wide, Deep])
print("predicted:", result.predict(newcomers).tolist(), "after loading:", loaded.predict(newcomers).tolist())
