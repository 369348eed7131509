"""The options of a run, each declared once: command line, TOML, sweeps, federations, records and help follow.

Imports no torch, so that ``--help`` is fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedcc.core.options import (
    REQUIRED,
    Assignment,
    Engine,
    Optimizer,
    Option,
    Precision,
    Reset,
    Schedule,
    Share,
    Wire,
    check_options,
    option,
    options_of,
)

if TYPE_CHECKING:
    from fedcc.core.disclosure import Disclosure
    from fedcc.core.method import AnyMethod
    from fedcc.core.requests import Recipe

ANSWER_EPSILON = 4.0  # the default: with 11 different labels, five of six answers are true


@dataclass(frozen=True, kw_only=True)
class Group:
    """Options that belong together; types and ranges are checked when one is made."""

    def __post_init__(self) -> None:
        check_options(self)


G = TypeVar("G", bound=Group)


@dataclass(frozen=True, kw_only=True)
class Split(Group):
    """Which data, split how, and the clients' networks.

    Options without a default come from the data set unless given.
    """

    data: str = option(
        "digits",
        "Use this data set (`fedcc data list` lists them), or your own: a folder (images, .npy, Hugging Face), .npz, "
        ".csv, .parquet, module:function.",
    )
    skew: str = option(REQUIRED, "Split the data by this label skew: dirichlet:ETA, classes:N, or iid for none.")
    clients: int = option(REQUIRED, "Set the number of clients.", low=1, most=1_000_000)
    models: str = option(REQUIRED, "Give the clients these networks, such as resnet14,resnet20.")
    assignment: Assignment = option(
        "alternate", "Give the networks to clients in turn (alternate) or by halves (halves)."
    )
    public: float = option(0.1, "Make this share of the training set public.", above=0, below=1)
    stratified: bool = option(False, "Draw the public share from each class.")
    fraction: float = option(1.0, "Use this share of the training set.", above=0, high=1)
    augment: str = option(
        REQUIRED,
        "Augment images: none, standard (crop and flip), strong, or a list such as hole=0.5,brightness=0.2,shift=0.15.",
    )
    validation: float = option(
        0.0, "Hold out this share of each client's samples, and evaluate on it instead of the test set.", low=0, below=1
    )
    resize: int = option(
        0,
        "Resize images to squares of this side; Tiny ImageNet takes 32 or 64. 0 keeps equal squares up to 64 and "
        "resizes others to at most 32.",
        low=0,
        most=1024,
    )
    label: str = option(
        "",
        "Read labels from this column of a table. A Hugging Face data set with one column of class labels needs none.",
    )
    test: float = option(0.2, "Use this share as test samples if your data has no test part.", above=0, below=1)


@dataclass(frozen=True, kw_only=True)
class Training(Group):
    """How a run trains."""

    rounds: int = option(REQUIRED, "Train for this many rounds, T.", low=1, most=100_000, agreed=True)
    epochs: int = option(REQUIRED, "Train for this many local epochs per phase, E.", low=0, most=100_000, agreed=True)
    optimizer: Optimizer = option(
        "adam", "Train with adam, or with sgd and momentum; for sgd, lr is often 0.01.", agreed=True
    )
    momentum: float = option(0.9, "Set the momentum of sgd.", low=0, below=1, agreed=True)
    lr: float = option(1e-3, "Set the learning rate.", low=0, agreed=True)
    schedule: Schedule = option(
        "constant", "Set the learning rate within each fit: constant, or cosine, which lowers it.", agreed=True
    )
    decay: float = option(
        1.0, "Multiply the learning rate by this factor from one round to the next.", above=0, high=1, agreed=True
    )
    batch: int = option(64, "Set the batch size.", low=1, most=65_536, agreed=True)
    reset: Reset = option("phase", "Reset Adam's state before each phase or each round.", agreed=True)
    participation: float = option(1.0, "Let this share of the clients take part in each round.", above=0, high=1)
    wire: Wire = option("fp32", "Send numbers as fp32, fp16, int8 or int8-stochastic.", agreed=True)
    share: Share = option(
        "predictions",
        "Let clients share predictions, labels, or noisy (randomised) labels.",
        agreed=True,
    )
    answer_epsilon: float = option(
        ANSWER_EPSILON,
        "With share=noisy, set the epsilon of each single answer (not of a record).",
        above=0,
        high=20,
        agreed=True,
    )
    seed: int = option(0, "Set the seed of everything random except the noise of share=noisy.", low=0, agreed=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share != "noisy" and self.answer_epsilon != ANSWER_EPSILON:
            raise ValueError(f"answer_epsilon={self.answer_epsilon:g} is for share=noisy, got share={self.share}")

    def disclosure(self, method: AnyMethod, classes: int) -> Disclosure:
        """The form in which a method's clients share their answers."""
        from fedcc.core.disclosure import Disclosure

        return Disclosure.of(method, classes, self.share, self.answer_epsilon)

    def recipe(self) -> Recipe:
        """How long and how fast a fit trains."""
        from fedcc.core.requests import Recipe

        momentum = self.momentum if self.optimizer == "sgd" else None
        return Recipe(lr=self.lr, batch=self.batch, epochs=self.epochs, reset=self.reset, schedule=self.schedule,
                      decay=self.decay, momentum=momentum)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Measurement(Group):
    """What is measured; training does not depend on it."""

    client_accuracy: bool = option(True, "Evaluate each client's own model too.")
    evaluate_every: int = option(1, "Evaluate every N rounds, and always after the last one.", low=1)
    readings: bool = option(True, "Evaluate the other readings of the models too.")


@dataclass(frozen=True, kw_only=True)
class Machine(Group):
    """What a run computes on. Results depend on it only by rounding."""

    device: str = option("auto", "Compute on this device: auto, cpu or cuda.")
    precision: Precision = option(REQUIRED, "Compute in fp32, bf16 or fp64. The default is bf16 on a GPU, else fp32.")
    threads: int = option(
        1,
        "Use this many torch threads. Results are bit-identical only for the same number of threads.",
        low=1,
        most=1_024,
    )
    engine: Engine = option(
        REQUIRED, "Train with the plain or the fused engine. The default is fused on a GPU, else plain."
    )
    deterministic: bool = option(False, "Make results on one GPU bit-identical.")


@dataclass(frozen=True, kw_only=True)
class Output(Group):
    """What a run reads and writes; not part of the experiment."""

    data_dir: Path | None = option(
        None, "Keep data sets in this folder. The default is $FEDCC_DATA, else a cache folder."
    )
    save_models: bool = option(True, "Keep the trained models.")
    checkpoint: bool = option(True, "Write checkpoints, which `fedcc resume` continues from.")
    checkpoint_every: int | None = option(
        None, "Write a checkpoint every N rounds. The default is 1, or more if rounds are very short."
    )
    keep: bool = option(True, "Keep the last checkpoint of a finished run, from which `fedcc resume` can extend it.")
    keep_checkpoints: bool = option(False, "Keep the last two checkpoints of a finished run.")
    track: tuple[str, ...] = option((), "Log each round to tensorboard, mlflow or wandb; repeatable.")

    def __post_init__(self) -> None:
        every = self.checkpoint_every
        if every is not None and every < 1:
            raise ValueError(f"--checkpoint-every must be at least 1, got {every}; --no-checkpoint writes none")
        if every is not None and not self.checkpoint:
            raise ValueError(f"--no-checkpoint and --checkpoint-every {every} contradict each other; give one of them")

    @property
    def kept(self) -> int:
        """How many checkpoints of a finished run stay."""
        return 2 if self.keep_checkpoints else int(self.keep)

    @property
    def interval(self) -> int | None:
        """Rounds between checkpoints: 0 for none, None to leave it to the run."""
        return self.checkpoint_every if self.checkpoint else 0


@dataclass(frozen=True, kw_only=True)
class Analysis(Group):
    """What `fedcc analyse` computes."""

    samples: int = option(1000, "Embed this many test samples.", low=20)
    variance: float = option(0.9, "Keep this share of the variance in PCA whitening.", low=0, high=1)
    client: int = option(0, "Take this client's model as the local one.", low=0)
    public_index: int | None = option(
        None, "Show the example at this position of the training set. By default one is chosen.", low=0
    )


GROUPS: tuple[type[Group], ...] = (Split, Training, Measurement, Machine)
OPTIONS: dict[str, Option] = {name: o for group in GROUPS for name, o in options_of(group).items()}
"""Every option of an experiment, by name."""

DEFAULTS = {name: o.default for name, o in OPTIONS.items() if o.default is not REQUIRED}
"""The options that have a default of their own; a file written before an option existed means its default."""

MEASUREMENT = tuple(options_of(Measurement))
MACHINE = tuple(options_of(Machine))
"""What a run takes from the machine unless it is given; a run on another machine counts as the same run."""


def group_of(group: type[G], values: Mapping[str, Any]) -> G:
    """A group of those values that it declares; options that are not given have their defaults."""
    return group(**{name: values[name] for name in options_of(group) if name in values})


def current_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an older file as they are spelled now: ``augment`` used to be true or false."""
    current = dict(values)
    if isinstance(current.get("augment"), bool):
        current["augment"] = "standard" if current["augment"] else "none"
    return current


def current_words(words: list[str]) -> list[str]:
    """A command line of an older record as it is spelled now: ``--augment`` and ``--no-augment`` took no value."""
    current = []
    for word, following in zip(words, [*words, "--"][1:], strict=True):
        current += ["--augment", "none"] if word == "--no-augment" else [word]
        if word == "--augment" and following.startswith("--"):
            current.append("standard")
    return current
