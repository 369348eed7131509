"""Options that several commands share, and the console they write to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="where data sets lie; FEDCC_DATA, else a cache folder")
]
SaveModels = Annotated[bool, typer.Option("--save-models/--no-save-models", help="keep the trained models")]
Checkpointed = Annotated[
    bool, typer.Option("--checkpoint/--no-checkpoint", help="write checkpoints, from which `fedcc resume` goes on")
]
CheckpointEvery = Annotated[
    int | None,
    typer.Option("--checkpoint-every", help="rounds from one to the next; 1 unless rounds are very short"),
]
KeepCheckpoints = Annotated[
    bool, typer.Option("--keep-checkpoints", help="keep the last checkpoints of the finished run")
]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda")]
Precision = Annotated[str | None, typer.Option(help="fp32, bf16 or fp64; bf16 on a GPU by default")]
Engine = Annotated[str | None, typer.Option(help="plain or fused; fused on a GPU by default")]
Deterministic = Annotated[
    bool | None, typer.Option("--deterministic/--no-deterministic", help="the same bits every time on one GPU")
]
Threads = Annotated[
    int | None, typer.Option(help="torch threads, at most 4 a core; a seed gives other bits with other numbers")
]
Track = Annotated[
    list[str] | None, typer.Option("--track", help="tensorboard, mlflow or wandb is told each round; repeatable")
]
Augment = Annotated[
    str | None,
    typer.Option(help="none, standard (crop and flip), strong, or a list as hole=0.5,brightness=0.2,shift=0.15"),
]
Json = Annotated[bool, typer.Option("--json", help="print JSON for programs")]


def rounds_between(checkpoint: bool, every: int | None) -> int | None:
    """The rounds from one checkpoint to the next; 0 for none at all, None to leave it to the run."""
    if every is not None and every < 1:
        raise ValueError(f"--checkpoint-every must be at least 1, got {every}; --no-checkpoint writes none")
    if every is not None and not checkpoint:
        raise ValueError(f"--no-checkpoint and --checkpoint-every {every} contradict each other; give one of them")
    return every if checkpoint else 0


def present_words(words: list[str]) -> list[str]:
    """A command line as it is spelled today: commands of older records have ``--augment`` and ``--no-augment``."""
    spelled = []
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        spelled += ["--augment", "none"] if word == "--no-augment" else [word]
        if word == "--augment" and after.startswith("--"):
            spelled.append("standard")
    return spelled


def out(stderr: bool = False) -> Console:
    """The console; wide enough for tables where there is no terminal."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 120
    return console
