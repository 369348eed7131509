"""The number of torch threads of a run: fixed, and limited by the machine's cores."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedcc.core.options import check_value

MOST = 4  # threads per core; more of them mostly wait for each other


class ThreadsWarning(UserWarning):
    """A run has more threads than the machine has cores."""


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_threads(number: int) -> None:
    """Refuse more threads than this machine can serve; at the start of a run, not in records of other machines."""
    check_value("threads", number, int, 1)
    if number > MOST * cores():
        raise ValueError(
            f"threads must be at most {MOST * cores()}, {MOST} for each core of this machine, got {number}"
        )


@contextmanager
def fixed_threads(number: int) -> Iterator[None]:
    """Fix the number of torch threads: results are bit-identical only for the same number."""
    check_value("threads", number, int, 1)
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def warn_of_threads(number: int) -> None:
    """Warn if there are more threads than cores."""
    if number > cores():
        text = f"{number} threads on {cores()} cores: they wait for each other, and a run takes longer than with fewer"
        warnings.warn(text, ThreadsWarning, stacklevel=3)
