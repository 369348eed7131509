"""What a site has answered with noise: asked again about a sample with the same model, it gives the same answer.

Fresh noise for the same question would average out.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from fedcc.core.digests import DamagedFile
from fedcc.core.files import write_whole

KEY, LABEL = 32, 4  # bytes of a question's digest and of the label that was reported
Questions = Sequence[bytes]


def questions(model: str, x: Tensor) -> list[bytes]:
    """The digests of these samples, asked of the model with this fingerprint."""
    return [sha256(model.encode() + row.contiguous().numpy().tobytes()).digest() for row in x.cpu()]


class AnswerStore:
    """The file ``answers`` of a run at a site: the digest of each question, the label, and a checksum at the end."""

    def __init__(self, folder: Path):
        self.path = folder / "answers"
        self.labels: dict[bytes, int] = {}
        if self.path.exists():
            content = self.path.read_bytes()
            rows, digest = content[:-KEY], content[-KEY:]
            if len(rows) % (KEY + LABEL) or sha256(rows).digest() != digest:
                raise DamagedFile(f"{self.path} is damaged: its content does not match its checksum")
            for at in range(0, len(rows), KEY + LABEL):
                self.labels[rows[at : at + KEY]] = int.from_bytes(rows[at + KEY : at + KEY + LABEL], "little")

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
        rows = b"".join(question + label.to_bytes(LABEL, "little") for question, label in self.labels.items())
        write_whole(self.path, rows + sha256(rows).digest())

    def answers(self, asked: Questions) -> Tensor:
        """The answers to these questions, [n]."""
        return torch.tensor([self.labels[question] for question in asked], dtype=torch.long)
