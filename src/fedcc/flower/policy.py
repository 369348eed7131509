"""What a site allows beyond the experiment that it has agreed to, and its own log of everything that it was asked.

The log is the ledger too: what was allowed is counted in it, over all runs, so a limit survives restarts. Each line
holds the digest of the line before it and of itself; a line that is changed, removed or put in between shows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedcc.core.disclosure import STRICTNESS
from fedcc.core.files import write_end
from fedcc.core.naming import printable
from fedcc.core.options import Share, check_options, option
from fedcc.flower.ledger import DISCLOSED, Ledger
from fedcc.flower.nonces import Nonces, damaged, obeyed_before
from fedcc.flower.site_error import SiteError

ALLOWED, ANSWERED = "allowed", "answered"  # kinds of lines
FIRST = "0" * 64  # before the first line
LONGEST = 200  # characters of a text that was sent
CLAIMS = ("run", "round")  # that an answer's line repeats: a command that is refused has no line of its own


@dataclass(frozen=True)
class Policy:
    """A site's own limits, ``[policy]`` of its ``site.toml``; -1 stands for no limit."""

    methods: tuple[str, ...] = option((), "methods that the site takes part in; all if none is named")
    runs: int = option(-1, "runs that the site takes part in", low=-1)
    rounds: int = option(-1, "rounds that the site trains, in all runs together", low=-1)
    share: Share = option("predictions", "the least strict form in which the site shares answers")
    answer_epsilon: float = option(-1.0, "the largest epsilon of a noisy answer", low=-1)
    queries: int = option(-1, "samples beyond the public ones that the site predicts, in all runs together", low=-1)

    @staticmethod
    def read(table: Mapping[str, Any]) -> Policy:
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in table.items()}
        policy = Policy(**values)
        check_options(policy)
        return policy

    def table(self) -> dict[str, Any]:
        """The limits that there are, as a file holds them."""
        values = asdict(self) | {"methods": list(self.methods)}
        return {name: value for name, value in values.items() if value not in ([], -1, "predictions")}

    def check_method(self, method: str) -> None:
        """Refuse a method that is not on the list."""
        if self.methods and method not in self.methods:
            raise SiteError("policy", f"methods are {', '.join(self.methods)}, the experiment's is {method}")

    def check_share(self, share: Share, answer_epsilon: float) -> None:
        """Refuse a run that wants answers in a form that tells more than the site is willing to tell."""
        if STRICTNESS.index(share) < STRICTNESS.index(self.share):
            raise SiteError("policy", f"share is {self.share} or stricter, the experiment's is {share}")
        if share == "noisy" and 0 <= self.answer_epsilon < answer_epsilon:
            limit = f"at most {self.answer_epsilon:g}"
            raise SiteError("policy", f"answer_epsilon is {limit}, the experiment's is {answer_epsilon:g}")

    def check(self, used: Usage, run: str, samples: int, trains: bool) -> None:
        """Refuse what would go beyond a limit, given what was allowed before."""
        wanted = {
            "runs": len(used.runs | {run}),
            "rounds": used.rounds + 1 if trains else 0,
            "queries": used.queries + samples if samples else 0,
        }
        for name, number in wanted.items():
            if 0 <= getattr(self, name) < number:
                text = f"at most {getattr(self, name):,} {name}, this would be number {number:,}"
                raise SiteError("policy", text)


@dataclass(frozen=True)
class Usage:
    """What a site has allowed so far."""

    runs: frozenset[str] = frozenset()
    rounds: int = 0  # each time that the site trained
    queries: int = 0

    @staticmethod
    def of(entries: Sequence[Mapping[str, Any]]) -> Usage:
        allowed = [entry for entry in entries if entry["kind"] == ALLOWED]
        older = [e for e in allowed if e["purpose"] == "train" and "trains" not in e]  # counted by what was asked
        return Usage(
            frozenset(entry["run"] for entry in allowed),
            sum(e.get("trains", False) for e in allowed) + len({(e["run"], e["round"], e.get("asked")) for e in older}),
            sum(entry["samples"] for entry in allowed),
        )


class AuditLog:
    """``state/audit.jsonl`` of a site: lines for commands that are allowed, answers that are disclosed and replies."""

    def __init__(self, state: Path):
        self.path = state / "audit.jsonl"

    def entries(self) -> list[dict[str, Any]]:
        """All lines, if they follow from each other; an end without a line break was being written at a crash.

        Every nonce that was spent has a line: a log that lost its end, or that is not there, is damaged too.
        """
        spent = Nonces.of_all_runs(self.path.parent)  # first: another process may obey a command meanwhile
        found: list[dict[str, Any]] = []
        for number, line in enumerate(self._whole_lines().splitlines(), start=1):
            try:
                entry = json.loads(line)
                good = entry["digest"] == _digest(entry) and entry["previous"] == _last(found)
            except (ValueError, KeyError, TypeError, RecursionError):
                good = False
            if not good:
                raise damaged(self.path, f"line {number} does not follow from those before it")
            found.append(entry)
        if lost := spent - {entry["nonce"] for entry in found if entry["kind"] == ALLOWED}:
            text = f"it has no line for {len(lost):,} of the commands that were obeyed (nonce {min(lost)})"
            raise damaged(self.path, text)
        return found

    def allow(
        self, policy: Policy, run: str, t: int, nonce: str, purpose: str, samples: int, asked: str, trains: bool
    ) -> None:
        """Note that a command is allowed, unless it was allowed before or would go beyond a limit.

        ``asked`` is the digest of the message. ``trains`` says that the site is going to train for it, not to send what
        it has stored.
        """
        with self._locked():
            entries = self.entries()
            if any(entry["nonce"] == nonce for entry in entries if entry["kind"] == ALLOWED):
                raise obeyed_before(nonce)
            policy.check(Usage.of(entries), run, samples, trains)
            about = {"purpose": purpose, "run": run, "round": t, "nonce": nonce, "samples": samples, "asked": asked}
            self._append(entries, {"kind": ALLOWED, **about, "trains": trains})

    def answered(
        self,
        purpose: str,
        texts: Mapping[str, str],
        arrays: Mapping[str, bytes],
        asked: Mapping[str, str] | None = None,
    ) -> None:
        """Note an answer: what it says, and the digest of its arrays; ``asked`` is what the command says of itself."""
        content = sha256()
        for name in sorted(arrays):
            content.update(f"{name}\0{len(arrays[name])}\0".encode() + arrays[name])
        outcome = texts.get("error") or ("declined" if texts.get("declined") else "sent")
        claims = {name: (asked or {})[name] for name in CLAIMS if name in (asked or {})}
        about = {"purpose": purpose, "nonce": texts.get("nonce", ""), **claims}
        about = {name: printable(text)[:LONGEST] for name, text in about.items()}
        size = sum(map(len, arrays.values()))
        with self._locked():
            entry = {"kind": ANSWERED, **about, "answer": outcome, "bytes": size, "sha256": content.hexdigest()}
            self._append(self.entries(), entry)

    def disclosed(self, purpose: str, run: str, t: int, nonce: str, share: str, answers: int, **noise: float) -> None:
        """Note how many new answers are about to leave, and in which form; written before they are stored or sent."""
        with self._locked():
            about = {"purpose": purpose, "run": run, "round": t, "nonce": nonce, "share": share, "answers": answers}
            self._append(self.entries(), {"kind": DISCLOSED, **about, **noise})

    def ledger(self) -> Ledger:
        """What has left the site, over all runs."""
        return Ledger.of(self.entries())

    def _whole_lines(self) -> bytes:
        content = self.path.read_bytes() if self.path.exists() else b""
        return content[: content.rfind(b"\n") + 1]

    def _locked(self) -> Any:
        from filelock import FileLock

        self.path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(self.path.with_suffix(".lock"))

    def _append(self, entries: list[dict[str, Any]], about: Mapping[str, Any]) -> None:
        entry = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **about, "previous": _last(entries)}
        entry["digest"] = _digest(entry)
        write_end(self.path, len(self._whole_lines()), json.dumps(entry).encode() + b"\n")


def _last(entries: Sequence[Mapping[str, Any]]) -> str:
    return str(entries[-1]["digest"]) if entries else FIRST


def _digest(entry: Mapping[str, Any]) -> str:
    """The digest of a line, but for itself."""
    rest = {name: value for name, value in entry.items() if name != "digest"}
    return sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
