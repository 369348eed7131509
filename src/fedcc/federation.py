"""A federation: who holds what, the public and the test samples, and the networks.

Made from a named data set and a skew, or from the caller's own arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedcc.core.method import AnyMethod
from fedcc.core.model import Arch, Factory, factory_name
from fedcc.core.options import check_value
from fedcc.core.samples import IDENTITY, Samples, View
from fedcc.nets import network

if TYPE_CHECKING:
    from fedcc.data.partition import Partition

Models = str | Factory | Sequence[str | Factory]
"""One network for all, or several: names (``"resnet14,resnet20"``) or factories ``outputs -> nn.Module``."""

Array = Any
"""A numpy array, a tensor, or nested lists."""

Assignment = Literal["alternate", "halves"]

MAX_CLASSES = 65_536


@dataclass(frozen=True, eq=False)
class Federation:
    """Everything a run needs to know about data and networks. Make one with :meth:`named` or :meth:`of`.

    >>> f = Federation.named("digits", skew="classes:1", clients=10)
    >>> len(f.private), f.classes, len(f.public)
    (10, 10, 144)
    """

    private: tuple[Samples, ...]  # x and y of each client
    public: Samples  # x alone: its labels, if there were any, are gone
    test: Samples  # x and y
    classes: int
    models: tuple[str | Factory, ...]  # given to the clients by ``assignment``
    shared_model: str | Factory | None = None  # for methods that average weights, where models are not the caller's
    assignment: Assignment = "alternate"
    data: str = "own data"
    skew: str = "own split"
    rounds: int = 15  # what the data set suggests
    epochs: int = 20
    partition: Partition | None = None
    fingerprint: str = ""  # of the data set's arrays
    hidden: Tensor | None = field(default=None, repr=False)  # the public labels, for the evaluator alone
    names: tuple[str, ...] = ()  # of the classes, where the data set has some
    labels: tuple[int, ...] = ()  # the caller's label of each class, ascending; none where they are 0 .. classes - 1

    @staticmethod
    def named(
        data: str = "digits",
        skew: str | None = None,
        clients: int | None = None,
        models: Models | None = None,
        seed: int = 0,
        *,
        public: float = 0.1,
        stratified: bool = False,
        fraction: float = 1.0,
        augment: str | bool | None = None,
        validation: float = 0.0,
        assignment: Assignment = "alternate",
        resize: int | None = None,
        folder: Path | str | None = None,
    ) -> Federation:
        """A data set by name, split by label skew.

        What is not given comes from the data set: its skew, clients and networks. ``fraction`` keeps a random part
        of the training set. ``augment`` is ``none``, ``standard`` (the crop and flip that CIFAR and Tiny ImageNet
        bring), ``strong`` (a hole and random brightness too) or a list as ``hole=0.5,brightness=0.2,shift=0.15``.
        ``validation`` holds out that share of each client's samples, which take the place of the test set.
        """
        from fedcc.data import load
        from fedcc.data.partition import partition

        dataset = load(data, Path(folder) if folder is not None else None, resize=resize)
        x, y = dataset.train_x, dataset.train_y
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, got {fraction}")
        if fraction < 1:
            kept = np.sort(np.random.default_rng([seed, 3]).permutation(len(y))[: max(1, round(fraction * len(y)))])
            x, y = x[kept], y[kept]
        defaults = dataset.defaults
        number = defaults.clients if clients is None else clients
        split = partition(y, number, skew or defaults.skew, len(dataset.classes), seed, public, stratified)
        if isinstance(augment, bool):
            augment = "standard" if augment else "none"
        view = dataset.view.with_augment(augment or "standard")
        if augment == "standard" and not view.augments:
            raise ValueError(f"{dataset.name} has no augmentation to turn on")
        if not 0 <= validation < 1:
            raise ValueError(f"validation must be at least 0 and below 1, got {validation}")
        if not len(split.public):
            raise ValueError(f"the public set is empty: public must be above 0, got {public}")

        def samples(rows: np.ndarray) -> Samples:
            return Samples({"x": torch.from_numpy(x[rows]), "y": torch.from_numpy(y[rows])}, view)

        trained, held_out = zip(
            *(_divide(rows, validation, seed, k) for k, rows in enumerate(split.clients)), strict=True
        )
        test = Samples({"x": torch.from_numpy(dataset.test_x), "y": torch.from_numpy(dataset.test_y)}, view)
        return Federation(
            private=tuple(samples(rows) for rows in trained),
            public=samples(split.public).only("x"),
            test=samples(np.concatenate(held_out)) if validation else test,
            classes=len(dataset.classes),
            models=several(models) if models is not None else several(defaults.models),
            shared_model=defaults.shared_model if models is None else None,
            assignment=assignment,
            data=dataset.name,
            skew=split.skew,
            rounds=defaults.rounds,
            epochs=defaults.epochs,
            partition=split,
            fingerprint=dataset.sha256,
            hidden=torch.from_numpy(y[split.public]),
            names=dataset.classes,
        )

    @staticmethod
    def of(
        clients: Sequence[tuple[Array, Array]],
        public: Array,
        test: tuple[Array, Array],
        models: Models,
        *,
        classes: int | None = None,
        view: View | None = None,
        allow_missing: bool = False,
    ) -> Federation:
        """A federation of the caller's own arrays or tensors: images or anything a network takes.

        Floating inputs are taken as they are, uint8 images are divided by 255, other integers stay integers (tokens).
        Labels are whole numbers from 0. The classes are their distinct values over all clients and the test set, in
        ascending order; where ``classes`` is given, labels lie in 0 .. classes - 1 and stay as they are. A class that
        no client holds is refused unless ``allow_missing`` says it is meant.
        """
        if not clients:
            raise ValueError("a federation needs at least one client, got none")
        private = tuple(_labelled(f"client {k}", pair, view) for k, pair in enumerate(clients))
        tested = _labelled("the test set", test, view)
        shared = as_samples("the public set", public, view)
        private, tested, labels = _numbered(private, tested, classes)
        total = len(labels)
        for who, s in [*((f"client {k}", s) for k, s in enumerate(private)), ("the test set", tested)]:
            if s.shape != shared.shape or s.x.dtype != shared.x.dtype:
                raise ValueError(
                    f"inputs must be alike: the public set has {shared.x.dtype} of shape {shared.shape}, "
                    f"{who} has {s.x.dtype} of shape {s.shape}"
                )
        held = torch.stack([torch.bincount(s["y"], minlength=total) for s in private]).sum(0)
        missing = [label for label, number in zip(labels, held.tolist(), strict=True) if not number]
        if missing and not allow_missing:
            more = f" and {len(missing) - 10:,} others" if len(missing) > 10 else ""
            raise ValueError(
                f"no client holds class {', '.join(map(str, missing[:10]))}{more}, so nobody can learn it; "
                "pass allow_missing=True if that is meant"
            )
        own = () if labels == tuple(range(total)) else labels
        federation = Federation(private, shared, tested, total, several(models), labels=own)
        for name in federation.models:
            if isinstance(name, str):
                network(name, shared.shape)
        return federation

    @property
    def digests(self) -> dict[str, str | None]:
        """The digests of the data and of the partition, as records hold them."""
        return {"data_sha256": self.fingerprint, "partition_sha256": self.partition.sha256 if self.partition else None}

    def archs(self, method: AnyMethod) -> dict[int, Arch]:
        """Each client's architecture under a method."""
        models = self.models
        if self.shared_model is not None and (method.family == "parameters" or method.name == "Centralized"):
            models = (self.shared_model,)
        outputs, tokens = method.outputs(self.classes), not _floats(self.public)
        factories = [network(m, self.public.shape) if isinstance(m, str) else m for m in models]
        number = len(self.private)
        if self.assignment == "halves":
            given = [factories[k * len(factories) // number] for k in range(number)]
        else:
            given = [factories[k % len(factories)] for k in range(number)]
        return {k: Arch((factory,), outputs, self.public.shape, tokens) for k, factory in enumerate(given)}

    def counts(self) -> Tensor:
        """Private samples per client and class, [clients, classes]."""
        return torch.stack([torch.bincount(s["y"], minlength=self.classes) for s in self.private])


def _divide(rows: np.ndarray, held_out: float, seed: int, client: int) -> tuple[np.ndarray, np.ndarray]:
    """A client's samples to train on, and those held out; both in the order they had, and one at least to train on."""
    number = min(round(held_out * len(rows)), len(rows) - 1)
    chosen = np.zeros(len(rows), bool)
    chosen[np.random.default_rng([seed, 4, client]).permutation(len(rows))[:number]] = True
    return rows[~chosen], rows[chosen]


def several(models: Models) -> tuple[str | Factory, ...]:
    """Networks given by one name, names with commas, a factory, or a sequence of these.

    >>> several("resnet14,resnet20")
    ('resnet14', 'resnet20')
    """
    if isinstance(models, str):
        names = tuple(name.strip() for name in models.split(",") if name.strip())
        if not names:
            raise ValueError(f"models must name at least one network, got {models!r}")
        return names
    given = tuple(models) if isinstance(models, Sequence) else (models,)
    if not given:
        raise ValueError("models must name at least one network, got none")
    for m in given:
        if isinstance(m, nn.Module) or not (isinstance(m, str) or callable(m)):
            kind = type(m).__name__
            raise TypeError(f"models takes names and factories (outputs -> nn.Module), got an object of {kind}")
    return given


def models_text(models: Sequence[str | Factory]) -> str:
    """Networks as text, for records."""
    return ",".join(m if isinstance(m, str) else factory_name(m) for m in models)


def as_samples(who: str, x: Array, view: View | None) -> Samples:
    """Inputs as float32, uint8 (images) or int64 (tokens), checked."""
    inputs = _tensor(who, x)
    if inputs.ndim < 2 or not len(inputs):
        raise ValueError(
            f"{who} needs inputs of shape [samples, ...] with at least one sample, got {tuple(inputs.shape)}"
        )
    if inputs.is_floating_point() or inputs.dtype == torch.bool:
        inputs = inputs.float()
        if not bool(torch.isfinite(inputs).all()):
            raise ValueError(f"{who} has inputs that are not finite")
    elif inputs.dtype != torch.uint8:
        inputs = inputs.long()
    usual = View(scale=1 / 255) if inputs.dtype == torch.uint8 else IDENTITY
    return Samples({"x": inputs}, view or usual)


def _tensor(who: str, values: Array) -> Tensor:
    """An array of numbers, a table or nested lists as a tensor of its own, apart from the caller's memory."""
    if np.ma.is_masked(values) or (isinstance(values, Sequence) and any(map(np.ma.is_masked, values))):
        raise ValueError(f"{who}: masked values cannot be trained on; fill them or leave those samples out")
    try:
        if isinstance(values, Tensor) and values.dtype != torch.uint64:
            tensor = values.detach().clone()
        else:
            array = np.array(values.detach().cpu().numpy() if isinstance(values, Tensor) else values)
            if array.dtype.kind == "u" and array.itemsize > 1:
                if array.size and int(array.max()) > np.iinfo(np.int64).max:
                    raise ValueError(f"{array.max()} is above {np.iinfo(np.int64).max}")
                array = array.astype(np.int64)
            tensor = torch.from_numpy(array)
        if tensor.is_complex():
            raise ValueError("complex numbers; pass real and imaginary parts as inputs of their own")
        if tensor.layout != torch.strided:
            raise ValueError(f"layout {tensor.layout}; pass .to_dense()")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{who}: expected an array of numbers, got {type(values).__name__} ({error})") from None
    return tensor


def _numbered(
    private: tuple[Samples, ...], test: Samples, classes: int | None
) -> tuple[tuple[Samples, ...], Samples, tuple[int, ...]]:
    """The samples with the number of their class as ``y``, and the caller's label of each class."""
    every = [s["y"] for s in (*private, test)]
    if classes is not None:
        check_value("classes", classes, int, 1)
        check_value("classes", classes, int, high=MAX_CLASSES)
        highest = max(int(y.max()) for y in every)
        if highest >= classes:
            raise ValueError(f"labels must lie in 0 .. {classes - 1}, got {highest}")
        return private, test, tuple(range(classes))
    values = torch.unique(torch.cat(every))
    if len(values) > MAX_CLASSES:
        raise ValueError(f"labels must have at most {MAX_CLASSES:,} distinct values, got {len(values):,}")
    *parts, last = (s.with_(y=torch.searchsorted(values, s["y"])) for s in (*private, test))
    return tuple(parts), last, tuple(values.tolist())


def _labelled(who: str, pair: tuple[Array, Array], view: View | None) -> Samples:
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise ValueError(f"{who} must be a pair (inputs, labels), got {type(pair).__name__}")
    samples, labels = as_samples(who, pair[0], view), _tensor(f"the labels of {who}", pair[1])
    if labels.ndim != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f"{who} needs whole-number labels of shape [samples], got {labels.dtype} {tuple(labels.shape)}"
        )
    if len(labels) != len(samples):
        raise ValueError(f"{who} has {len(samples)} inputs and {len(labels)} labels")
    if int(labels.min()) < 0:
        raise ValueError(f"{who}: labels must be at least 0, got {int(labels.min())}")
    return samples.with_(y=labels.long())


def _floats(samples: Samples) -> bool:
    return samples.x.is_floating_point() or samples.view != IDENTITY
