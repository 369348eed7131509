"""What a site has answered with noise: asked again about a sample with the same model, it gives the same answer.

Fresh noise for the same question would average out.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from fedcc.core.files import write_whole
from fedcc.flower.nonces import damaged

FILE, OLDER = "noisy-answers", "*/answers"  # no run is named like that; of an older version
KEY, LABEL = 32, 4  # bytes of a question's digest and of the label that was reported
Questions = Sequence[bytes]


def questions(model: str, x: Tensor) -> list[bytes]:
    """The digests of these samples, asked of the model with this fingerprint."""
    return [sha256(model.encode() + row.contiguous().numpy().tobytes()).digest() for row in x.cpu()]


class AnswerStore:
    """The answers of a site in all runs: the digest of each question, the label, and a checksum at the end.

    The server names the runs, and a run's first model follows from the seed: an answer counts in all of them. An older
    version had a file ``answers`` for each run; what they hold is taken over, and they go: beside them the loss of this
    file would not be noticed.
    """

    def __init__(self, state: Path, disclosed: int = 0):
        self.path = state / FILE
        self.labels = stored_labels(state, disclosed)
        older = list(state.glob(OLDER))
        if older or not self.path.exists():
            self._write()  # so that it is there before anything is disclosed
        for path in older:
            path.unlink()

    def missing(self, asked: Questions) -> list[int]:
        """The positions of the questions that have no answer yet, each question once."""
        new: dict[bytes, int] = {}
        for at, question in enumerate(asked):
            if question not in self.labels:
                new.setdefault(question, at)
        return list(new.values())

    def add(self, asked: Questions, labels: Tensor) -> None:
        """Store the answers to new questions."""
        self.labels |= dict(zip(asked, labels.tolist(), strict=True))
        self._write()

    def _write(self) -> None:
        rows = b"".join(question + label.to_bytes(LABEL, "little") for question, label in self.labels.items())
        write_whole(self.path, rows + sha256(rows).digest())

    def answers(self, asked: Questions) -> Tensor:
        """The answers to these questions, [n]."""
        return torch.tensor([self.labels[question] for question in asked], dtype=torch.long)


def stored_labels(state: Path, disclosed: int) -> dict[bytes, int]:
    """The labels by question. ``disclosed`` is how many answers with noise the audit log counts: if there are some,
    there is a file."""
    files = [path for path in (state / FILE, *sorted(state.glob(OLDER))) if path.exists()]
    if disclosed and not files:
        raise damaged(state / FILE, f"it is missing, but {disclosed:,} answers with noise were given")
    labels = dict[bytes, int]()
    for path in files:
        labels = _read(path) | labels
    return labels


def _read(path: Path) -> dict[bytes, int]:
    content = path.read_bytes()
    rows, digest = content[:-KEY], content[-KEY:]
    if len(rows) % (KEY + LABEL) or sha256(rows).digest() != digest:
        raise damaged(path, "its content does not match its checksum")
    starts = range(0, len(rows), KEY + LABEL)
    return {rows[at : at + KEY]: int.from_bytes(rows[at + KEY : at + KEY + LABEL], "little") for at in starts}
