"""What a site has disclosed so far, over all runs, and what that means for one of its private records.

One private record may change the model and with it every answer, in every round and to every query. So all answers
count together: each randomised answer is one use of randomised response, and they are composed by an accountant
(dp-accounting). Whatever left the site without noise has no bound at all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DISCLOSED = "disclosed"  # the kind of a line of the audit log
DELTA = 1e-6  # the chance with which a record-level epsilon may fail
ORDERS = tuple(1 + 10 ** (i / 20) for i in range(-120, 41))  # of Renyi divergences: near 1 for very many answers


@dataclass(frozen=True)
class Ledger:
    """How many answers left the site: with noise, by (epsilon of an answer, different labels), and without."""

    noisy: Mapping[tuple[float, int], int] = field(default_factory=dict)
    bare: Mapping[str, int] = field(default_factory=dict)  # by what it was: predictions, labels, uploads, models

    @staticmethod
    def of(entries: Sequence[Mapping[str, Any]]) -> Ledger:
        """The ledger that an audit log holds."""
        noisy: Counter[tuple[float, int]] = Counter()
        bare: Counter[str] = Counter()
        allowed = [entry for entry in entries if entry["kind"] == "allowed"]
        runs = {entry["nonce"]: entry["run"] for entry in allowed}
        new = {entry["nonce"] for entry in allowed if "trains" in entry}  # of a version that notes what it discloses
        counted = {entry["run"] for entry in entries if entry["kind"] == DISCLOSED}
        for entry in entries:
            if entry["kind"] == DISCLOSED and entry["share"] == "noisy":
                noisy[entry["epsilon"], entry["columns"]] += entry["answers"]
            elif entry["kind"] == DISCLOSED:
                bare[entry["share"]] += entry["answers"]
            elif (
                entry.get("answer") == "sent" and entry["nonce"] not in new and runs.get(entry["nonce"]) not in counted
            ):
                bare["answers that an older version has sent"] += 1
        return Ledger(noisy, bare)

    @property
    def answers(self) -> int:
        """How many answers were randomised."""
        return sum(self.noisy.values())

    @property
    def summed_epsilon(self) -> float:
        """The record-level epsilon at delta 0: the sum over all answers."""
        return math.inf if any(self.bare.values()) else math.fsum(n * e for (e, _), n in self.noisy.items())

    def record_epsilon(self, delta: float = DELTA) -> float:
        """The record-level epsilon over everything that was disclosed, at this delta; infinite without noise."""
        from dp_accounting import NeighboringRelation, RandomizedResponseDpEvent
        from dp_accounting.rdp import RdpAccountant

        if math.isinf(self.summed_epsilon) or not self.answers:
            return self.summed_epsilon
        accountant = RdpAccountant(ORDERS, NeighboringRelation.REPLACE_ONE)
        for (epsilon, columns), number in self.noisy.items():
            replaced = columns / (math.expm1(epsilon) + columns)  # the chance that a draw replaces a label
            accountant.compose(RandomizedResponseDpEvent(replaced, columns), number)
        return min(float(accountant.get_epsilon(delta)), self.summed_epsilon)

    def text(self) -> str:
        """The ledger in words; empty if nothing was disclosed."""
        lines = [
            f"noisy: {number:,} answers with epsilon {epsilon:g} per answer ({columns} different labels)"
            for (epsilon, columns), number in sorted(self.noisy.items())
        ]
        bare = {name: number for name, number in self.bare.items() if number}
        if bare:
            lines.append("without noise: " + ", ".join(f"{number:,} {name}" for name, number in bare.items()))
            lines.append("record-level epsilon over all runs: infinite, because of what was sent without noise")
        elif lines:
            lines.append(f"record-level epsilon over all runs: {self._record_text()}")
        return "\n".join(lines)

    def _record_text(self) -> str:
        summed = f"{self.summed_epsilon:,.4g} at delta 0"
        try:
            return f"{self.record_epsilon():,.4g} at delta {DELTA:g}, {summed}"
        except ImportError:
            return f"{summed} (for a smaller bound at delta {DELTA:g}: pip install '.[privacy]' in fedcc's checkout)"
