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
    """Slow tests begin first, so that none is left when the others are done; one that fails runs once more.

    They wait for real programs, and a busy machine may be late. ``-rR`` lists those that ran again; a fast test never
    does.
    """
    slow = {item for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item not in slow)
    for item in slow:
        item.add_marker(pytest.mark.flaky(reruns=1))


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
