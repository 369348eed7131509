"""One round as plain values, a line of ``metrics.jsonl``; docs/design.md says what each key means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedcc.evaluate import Evaluation
from fedcc.federate import Round

BY_CLIENT = ("clients", "local", "valid", "valid_labels", "local_full")


def record_of(
    done: Round,
    found: Evaluation,
    spent: Mapping[str, float],
    logs: Mapping[int, Mapping[str, float]],
    majorities: Mapping[int, Tensor | None] | None = None,
    images: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A round's record; ``logs`` and ``majorities`` hold what each client of the round has noted.

    ``images`` are those that networks processed in it, if they were counted.
    """
    record: dict[str, Any] = {
        "round": done.t,
        "accuracy": found.accuracy,
        "readings": found.readings,
        **{name: {str(k): v for k, v in getattr(found, name).items()} for name in BY_CLIENT},
        "targets": found.targets,
        "majority": {
            str(k): mask.nonzero().flatten().tolist() for k, mask in (majorities or {}).items() if mask is not None
        },
        "log": {str(k): {n: round(float(v), 6) for n, v in log.items()} for k, log in logs.items() if log},
        "present": list(logs),
        "bytes": {"up": done.bytes_up, "down": done.bytes_down},
        "seconds": {phase: round(seconds, 4) for phase, seconds in spent.items()},
    }
    if images is not None:
        record["images"] = dict(images)
    if found.confusion:
        record["confusion"] = found.confusion
    if found.known:
        record["known"] = {str(k): row for k, row in found.known.items()}
    return record
