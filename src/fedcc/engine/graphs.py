"""CUDA graphs: a step recorded once and replayed."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def captured(
    step: Callable[[], object], device: torch.device, before: Callable[[], object], pool: Any = None, priority: int = 0
) -> Any:
    """A step as a graph; ``before`` runs twice ahead of it, since first calls allocate and choose kernels."""
    current = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(2):
            before()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()  # freeing an old graph during the capture would spoil the new one
    try:
        # The outer block restores the stream where a capture fails: the inner one raises before it does.
        with torch.cuda.stream(current), torch.cuda.graph(graph, pool=pool, stream=side):
            step()
    finally:
        if collects:
            gc.enable()
    return graph


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises an error: no graph can hold it, and a capture that fails leaves a mess."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
