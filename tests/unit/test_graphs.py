"""A step as a CUDA graph: in which order, and what is left when a capture fails."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedcc.core.model import Arch
from fedcc.engine import graphs
from fedcc.engine.mapped import alone_reason, unmappable_reason

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICE = torch.device("cuda")


class Fake:
    """torch.cuda's streams and graphs as far as they are used; a capture may end in an error, as torch's does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool):
        self.said, self.fails, self.mode = list[str](), fails, 0
        self.current = self.main = self.Stream(self, "main")
        values = {
            "current_stream": lambda _: self.current,
            "Stream": lambda _, priority: self.Stream(self, f"side {priority}"),
            "stream": self.stream,
            "CUDAGraph": lambda: "graph",
            "graph": lambda _, pool, stream: self.Capture(self, stream, pool),
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "mode", mode),
        }
        for name, value in values.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    class Stream:
        def __init__(self, fake: Fake, name: str):
            self.fake, self.name = fake, name

        def wait_stream(self, other: Any) -> None:
            self.fake.said.append(f"{self.name} waits for {other.name}")

    class Capture:
        def __init__(self, fake: Fake, stream: Any, pool: Any):
            self.fake, self.stream, self.before = fake, stream, fake.current
            fake.said.append(f"pool {pool}")

        def __enter__(self) -> None:
            self.fake.current = self.stream
            self.fake.said.append(f"collects: {gc.isenabled()}")

        def __exit__(self, *_: object) -> None:
            if self.fake.fails:
                raise RuntimeError("capture_end")
            self.fake.current = self.before

    def step(self) -> None:
        self.said.append(f"step on {self.current.name}")


@pytest.mark.parametrize("collects", [False, True])
def test_a_step_runs_twice_before_it_is_captured(collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, fails=False)
    (gc.enable if collects else gc.disable)()
    try:
        assert graphs.captured(fake.step, DEVICE, fake.step, 7, priority=-1) == "graph"  # type: ignore[comparison-overlap]
        assert gc.isenabled() == collects
    finally:
        gc.enable()
    ran = "step on side -1"
    assert fake.said == [
        "side -1 waits for main", ran, ran, "main waits for side -1", "pool 7", "collects: False", ran
    ]  # fmt: skip
    assert fake.current is fake.main


def test_a_capture_that_fails_leaves_the_stream_and_collection_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, fails=True)
    with pytest.raises(RuntimeError, match="capture_end"):
        graphs.captured(fake.step, DEVICE, fake.step)
    assert fake.current is fake.main
    assert gc.isenabled()


def test_waiting_is_an_error_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, fails=False)
    with graphs.no_waiting():
        assert fake.mode == "error"
    assert fake.mode == 0
    with pytest.raises(ValueError, match="whatever"), graphs.no_waiting():
        raise ValueError("whatever")
    assert fake.mode == 0


class Copying(nn.Module):
    """A number that is copied from the host in every pass: vmap maps it, but no graph can hold it."""

    def __init__(self, outputs: int):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x) * torch.tensor([2.0], device=x.device))
        return out


def test_a_network_that_waits_can_be_mapped() -> None:
    assert not unmappable_reason(Arch((Copying,), 3, (6,)))


@on_gpu
def test_a_network_that_waits_trains_alone_and_leaves_no_trace() -> None:
    before = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()
    reason = alone_reason(Arch((Copying,), 3, (6,)), DEVICE, torch.float32, torch.bfloat16)
    assert "synchroniz" in reason
    assert (torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()) == before
    graphs.captured(lambda: torch.zeros(3, device=DEVICE) + 1, DEVICE, lambda: None)  # others can be captured after it
