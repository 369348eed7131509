"""What a terminal shows while runs in other processes are in progress: a row each, read from their folders."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fedcc.core.digests import DamagedFile
from fedcc.core.naming import clock

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


@dataclass
class RunRows:
    """Rows of the runs below a folder: which round of how many, the accuracy, the time so far and the time left."""

    root: Path
    totals: dict[Path, int] = field(default_factory=dict)  # rounds, as far as they are known

    def table(self, head: tuple[RenderableType, ...], rows: Iterable[tuple[RenderableType, ...]]) -> Table:
        """The state now. Where a line is too long, names are cut."""
        from rich.table import Column, Table
        from rich.text import Text

        table = Table.grid(Column(), *(Column(no_wrap=True) for _ in range(4)), padding=(0, 2, 0, 0))
        for name, *rest in (head, *rows):  # the only column that gives way
            table.add_row(Text(str(name), no_wrap=True, overflow="ellipsis"), *rest)
        return table

    def row(self, folder: Path, start_time: float) -> tuple[str, ...]:
        """One run in progress."""
        from fedcc.experiments.store import RunFolder

        records = []
        with suppress(DamagedFile):  # the run itself reports it and rewrites the file
            records = RunFolder(self.root / folder).metrics()
        total, elapsed = self.total(folder), time.monotonic() - start_time
        accuracy = records[-1].get("accuracy") if records else None
        state = f"round {min(len(records) + 1, total)}/{total}" if total else "starting"
        left = ""
        if records and total:  # judged by the rounds that are done
            since = time.time() - (self.root / folder / "metrics.jsonl").stat().st_mtime
            seconds = (elapsed - since) / len(records) * total - elapsed
            left = f"{clock(seconds)} left" if seconds > 0 else ""  # nothing is known of a round that takes longer
        return str(folder), state, f"{accuracy:.1f} %" if accuracy is not None else "", clock(elapsed), left

    def total(self, folder: Path) -> int:
        """The rounds of a run, once it has begun; 0 before."""
        from fedcc.experiments.experiment import Experiment

        if folder not in self.totals:
            with suppress(ValueError, OSError):
                experiment = Experiment.read(self.root / folder / "experiment.toml")
                self.totals[folder] = experiment.build_method().rounds(experiment.training.rounds)
        return self.totals.get(folder, 0)
