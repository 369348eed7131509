"""The driver: advances coroutines, groups their requests, and has an engine serve one group at a time."""

from collections.abc import Coroutine, Hashable, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path

from fedcc.core.requests import Executor, Fit, Gather, Init, Predict, Recalibrate, Request

T = TypeVar("T")


def drive(coroutines: Sequence[Coroutine[Any, Any, T]], executor: Executor) -> list[T]:
    """Run coroutines to their ends, serving their requests; returns their results in order."""
    results: dict[int, T] = {}
    pending: dict[int, tuple[Request[Any], list[Request[Any]], dict[int, Any]]] = {}

    def advance(i: int, answer: Any) -> None:
        try:
            request = coroutines[i].send(answer)
        except StopIteration as stop:
            pending.pop(i, None)
            results[i] = stop.value
            return
        if not isinstance(request, Request):
            raise TypeError(f"a method may await requests only, got {type(request).__name__}")
        pending[i] = (request, list(request.requests) if isinstance(request, Gather) else [request], {})
        if isinstance(request, Gather) and not request.requests:
            advance(i, ())

    try:
        for i in range(len(coroutines)):
            advance(i, None)
        while pending:
            groups: dict[Hashable, list[tuple[int, int]]] = {}
            for i, (_, parts, answers) in pending.items():
                for j, part in enumerate(parts):
                    if j not in answers:
                        groups.setdefault(kind(part), []).append((i, j))
            group = max(groups.values(), key=len)  # the rest wait for those who have not skipped a phase
            served = executor.serve([pending[i][1][j] for i, j in group])
            for (i, j), answer in zip(group, served, strict=True):
                pending[i][2][j] = answer
            for i in dict.fromkeys(i for i, _ in group):
                request, parts, answers = pending[i]
                if len(answers) == len(parts):
                    values = tuple(answers[j] for j in range(len(parts)))
                    advance(i, values if isinstance(request, Gather) else values[0])
    finally:
        for coroutine in coroutines:
            coroutine.close()
    return [results[i] for i in range(len(coroutines))]


def signature(request: Request[Any]) -> Hashable:
    """Equal for requests that can be served as one: the same kind on the same network."""
    return (kind(request), request.model.arch if isinstance(request, Predict | Recalibrate | Fit) else None)


def kind(request: Request[Any]) -> Hashable:
    """Equal for requests that can be served side by side, whatever their networks, epochs, learning rates and sizes."""
    if isinstance(request, Init):
        return (Init, request.arch)
    if isinstance(request, Predict | Recalibrate):
        return (type(request), request.samples.view, request.samples.shape)
    if isinstance(request, Fit):
        columns = {
            s: tuple((n, c.dtype, c.shape[1:]) for n, c in v.columns.items()) for s, v in request.streams.items()
        }
        streams = ((s, request.recipe.batch_size(s), v.view, columns[s]) for s, v in request.streams.items())
        constants = (
            (keystr(path), (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf)
            for path, leaf in tree_leaves_with_path(request.constants)
        )
        teachers = ((name, f.model.arch, f.stream) for name, f in request.frozen.items())
        own = request.loss, request.gradient, request.only, request.joint, request.recipe.momentum
        return (Fit, *own, tuple(streams), tuple(constants), tuple(teachers))
    raise TypeError(f"no engine serves {type(request).__name__}")
