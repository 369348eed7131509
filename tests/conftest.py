"""One torch thread per process: two threads on a busy core are ten times slower than one."""

import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from browsing import axe, browser, site  # noqa: F401 -- fixtures

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# The same examples every time, and no time limit on a busy machine.
hypothesis.settings.register_profile("fedcc", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fedcc")

# A shell may have started the tests with Ctrl-C ignored, and the programs that they start would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests begin first, in all processes, so that none is left when the others are done.

    They wait for real programs, and a busy machine may be late: one that fails runs once more. ``-rR`` lists those that
    did; a fast test never does. pytest-xdist gives each process one stretch of the list at first: each begins with slow
    tests, those of a module together, since they share what they start.
    """
    slow: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            slow.setdefault(item.nodeid.partition("::")[0], []).append(item)
            item.add_marker(pytest.mark.flaky(reruns=1))
    fast = [item for item in items if not item.get_closest_marker("slow")]
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ordered: list[pytest.Item] = []
    for i in range(processes):
        first = [item for module in list(slow.values())[i::processes] for item in module]
        more = max(0, len(items) // processes - len(first))
        ordered += first + fast[:more]
        fast = fast[more:]
    items[:] = ordered + fast


def pytest_runtest_setup() -> None:
    """A test that draws from torch's global generator draws the same numbers whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Where the engine's kernels run in this test: a GPU, or a CPU by emulation. Each launch is made twice.

    What torch.empty gives is not a number, so that a place that no kernel writes to shows.
    """
    from cuda_on_cpu import AVAILABLE
    from fedcc.engine import cuda
    from launches import twice

    device = torch.device("cuda" if cuda.available(torch.device("cuda")) else "cpu")
    if device.type == "cpu" and not AVAILABLE:
        pytest.skip("needs a GPU, or g++ on Linux")
    monkeypatch.setattr(cuda, "launch", twice(cuda.launch if device.type == "cuda" else None))
    monkeypatch.setattr(cuda, "available", lambda given: given.type == device.type)
    torch.set_deterministic_debug_mode("warn")
    yield device
    torch.set_deterministic_debug_mode("default")
