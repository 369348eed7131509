"""FedCC: federated learning by distillation, with clients that may answer "unknown".

>>> import fedcc
>>> federation = fedcc.Federation.named("digits", skew="classes:1", clients=10, models="resnet8")
>>> result = fedcc.run(fedcc.FedCC(lam=0.2), federation, rounds=1, epochs=1)
>>> result.predict(federation.test.x[:5]).shape
torch.Size([5])
"""

import fedcc.interrupts  # noqa: F401  first, before the imports that take seconds
from fedcc.core.method import Method, option
from fedcc.experiments.result import Result
from fedcc.experiments.rounds import FinishedRound, Observer, Pause, Stop
from fedcc.experiments.run import run
from fedcc.federation import Federation
from fedcc.methods import METHODS, SSL, Centralized, FedAvg, FedCC, FedMD, Local, make

__version__ = "0.1.0"

load = Result.load

__all__ = [
    "METHODS",
    "SSL",
    "Centralized",
    "FedAvg",
    "FedCC",
    "FedMD",
    "Federation",
    "FinishedRound",
    "Local",
    "Method",
    "Observer",
    "Pause",
    "Result",
    "Stop",
    "load",
    "make",
    "option",
    "run",
]
