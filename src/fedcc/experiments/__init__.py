"""One run's description, its folder, and running it."""

from fedcc.experiments.experiment import Experiment
from fedcc.experiments.run import execute, prepare, unfinished
from fedcc.experiments.store import RunFolder, RunFolderError, Unfinished

__all__ = ["Experiment", "RunFolder", "RunFolderError", "Unfinished", "execute", "prepare", "unfinished"]
