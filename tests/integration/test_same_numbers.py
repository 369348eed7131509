"""Five small runs give the numbers that are stored in ``same_numbers.json``; ``make same`` compares many more.

The file was made by commit 5a24957. After a change that is meant to change numbers,
``python tests/integration/test_same_numbers.py`` writes it anew, with the code that is imported.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedcc import Federation, make, run

STORED = Path(__file__).with_name("same_numbers.json")
DIGITS = {"skew": "classes:3", "clients": 4, "models": "resnet8", "fraction": 0.2}
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "FedCC, two networks": ("fedcc", {}, DIGITS | {"models": "resnet8,resnet14"}, {"rounds": 2}),
    "FedAvg, half of the clients, fp16": (
        "fedavg",
        {},
        DIGITS | {"skew": "dirichlet:0.5", "seed": 1},
        {"rounds": 3, "participation": 0.5, "wire": "fp16", "seed": 1},
    ),
    "FedMD by KL on probabilities": (
        "fedmd",
        {"loss": "kl", "average": "probs"},
        DIGITS | {"stratified": True},
        {"rounds": 2, "reset": "round"},
    ),
    "FedConcat": ("fedconcat", {"clusters": 2, "classifier_rounds": 3}, DIGITS, {"rounds": 2, "batch": 16}),
    "FedET": ("fedet", {}, DIGITS | {"models": "resnet8,resnet14"}, {"rounds": 2, "batch": 32}),
}
"""Method, settings, federation and options of each run."""


def numbers(name: str) -> dict[str, Any]:
    """A run's curve, the digest and the norm of every upload, and the norm of its predictions."""
    method, settings, federation, options = RUNS[name]
    kind, sent = type(make(method)), dict[str, Any]()

    class Watched(kind):  # type: ignore[misc, valid-type]
        async def client(self, c: Any, down: Any) -> Any:
            up = await super().client(c, down)
            sent[f"round {c.round}, client {c.id}"] = up
            return up

    samples = Federation.named("digits", **federation)
    # Doubles and small steps: what other processors round otherwise stays below the fourth digit
    result = run(Watched(**settings), samples, epochs=1, lr=1e-4, device="cpu", precision="fp64", **options)
    scores = result.scores(samples.test.x)
    return {
        "accuracy": {f"round {t}": accuracy for t, accuracy in result.curve},
        "bytes": {f"round {r['round']}": r["bytes"]["up"] for r in result.rounds},
        "norms": {who: norm(up) for who, up in sent.items()} | {"predictions": norm(scores)},
        "sha256": {who: sha256(up) for who, up in sent.items()} | {"predictions": sha256(scores)},
    }


def tensors(message: Any) -> Iterator[Tensor]:
    if isinstance(message, Tensor):
        yield message
    elif isinstance(message, Mapping):
        for name in sorted(message):
            yield from tensors(message[name])
    elif is_dataclass(message):
        for f in fields(message):
            yield from tensors(getattr(message, f.name))


def sha256(message: Any) -> str:
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors(message))).hexdigest()[:16]


def norm(message: Any) -> float:
    return float(torch.cat([t.double().flatten() for t in tensors(message)]).norm())


def machine() -> dict[str, str]:
    """What the last bits depend on."""
    info = Path("/proc/cpuinfo")
    names = (
        [line for line in info.read_text().splitlines() if line.startswith(("model name", "flags"))]
        if info.exists()
        else []
    )
    flags = hashlib.sha256("\n".join(sorted(set(names))).encode()).hexdigest()[:16]
    capability = torch.backends.cpu.get_cpu_capability()
    return {"processor": platform.machine(), "flags": flags, "capability": capability, "torch": torch.__version__}


@pytest.mark.parametrize("name", RUNS)
def test_a_small_run_gives_the_stored_numbers(name: str) -> None:
    stored = json.loads(STORED.read_text())
    found, expected = numbers(name), stored["runs"][name]
    if machine() == stored["machine"]:
        assert found == expected
    for kind in ("accuracy", "bytes", "norms"):
        assert found[kind] == pytest.approx(expected[kind], rel=1e-4), kind
    assert found["sha256"].keys() == expected["sha256"].keys()


if __name__ == "__main__":
    torch.set_num_threads(1)
    text = json.dumps({"machine": machine(), "runs": {name: numbers(name) for name in RUNS}}, indent=1)
    STORED.write_text(text + "\n")
