"""A federation: the clients' samples, the public and the test samples, and the networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedcc.code import allow
from fedcc.core.method import AnyMethod
from fedcc.core.model import Arch, Factory
from fedcc.core.options import Assignment, check_value
from fedcc.core.samples import IDENTITY, Samples, View
from fedcc.nets import network

if TYPE_CHECKING:
    from fedcc.data.partition import Partition
    from fedcc.inputs.tables import Encoding

T = TypeVar("T")
Models = str | Factory | Sequence[str | Factory]
"""One network for all, or several: names (``"resnet14,resnet20"``) or factories ``outputs -> nn.Module``."""

Array = Any
"""A numpy array, a tensor, or nested lists."""

MAX_CLASSES = 65_536


@dataclass(frozen=True, eq=False)
class Federation:
    """The data and networks of a run. Make one with :meth:`named` or :meth:`of`.

    >>> f = Federation.named("digits", skew="classes:1", clients=10)
    >>> len(f.private), f.classes, len(f.public)
    (10, 10, 144)
    """

    private: tuple[Samples, ...]  # x and y of each client
    public: Samples  # only x: labels, if there were any, are removed
    test: Samples  # x and y
    classes: int
    models: tuple[str | Factory, ...]  # dealt to the clients by ``assignment``
    shared_model: str | Factory | None = None  # for methods with one network, unless the caller chose the models
    assignment: Assignment = "alternate"
    data: str = "own data"
    skew: str = "own split"
    rounds: int = 15  # what the data set suggests
    epochs: int = 20
    partition: Partition | None = None
    fingerprint: str = ""  # of the data set's arrays
    hidden: Tensor | None = field(default=None, repr=False)  # the public labels, only for the evaluator
    names: tuple[str, ...] = ()  # of the classes, if the data set has some
    labels: tuple[int, ...] = ()  # the caller's label of each class, ascending; empty if they are 0 .. classes - 1
    encoding: Encoding | None = None  # of a table's columns, fitted on the public samples
    options: Mapping[str, Any] | None = field(default=None, init=False, repr=False)  # of ``named``, if it made this one

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
        label: str = "",
        test: float = 0.2,
        folder: Path | str | None = None,
    ) -> Federation:
        """A data set by name, split by label skew.

        Skew, clients and networks come from the data set by default. ``fraction`` keeps a random part of the training
        set. ``augment`` is ``none``, ``standard`` (the crop and flip of CIFAR and Tiny ImageNet), ``strong`` (a hole
        and random brightness too) or a list such as ``hole=0.5,brightness=0.2,shift=0.15``. ``validation`` holds out
        that share of each client's samples, which replace the test set.
        """
        from fedcc.data import load
        from fedcc.data.partition import partition
        from fedcc.inputs.tables import Encoding, Table

        allow(data, models)
        dataset = load(data, Path(folder) if folder is not None else None, resize=resize, label=label, test=test)
        x, y, defaults = dataset.train_x, dataset.train_y, dataset.defaults
        check_value("fraction", fraction, float, high=1, above=0)
        check_value("validation", validation, float, 0, below=1)
        if fraction < 1:
            part = np.sort(np.random.default_rng([seed, 3]).permutation(len(y))[: max(1, round(fraction * len(y)))])
            x, y = x[part], y[part]
        clients = defaults.clients if clients is None else clients
        own_public = dataset.public_x
        share = public if own_public is None else 0.0
        split = partition(y, clients, skew or defaults.skew, len(dataset.classes), seed, share, stratified)
        if isinstance(augment, bool):
            augment = "standard" if augment else "none"
        view = dataset.view.with_augment(augment or "standard")
        if augment == "standard" and not view.augments:
            raise ValueError(f"{dataset.name} has no augmentation to turn on")
        if own_public is None and not len(split.public):
            raise ValueError(f"the public set is empty: public must be above 0, got {public}")
        public_x, test_x, encoding = x[split.public] if own_public is None else own_public, dataset.test_x, None
        if isinstance(x, Table) and isinstance(public_x, Table) and isinstance(test_x, Table):
            encoding = Encoding.fit(public_x)
            x, public_x, test_x = (encoding.encode(table) for table in (x, public_x, test_x))
        assert isinstance(x, np.ndarray)  # Dataset checks that its parts are alike
        assert isinstance(public_x, np.ndarray)
        assert isinstance(test_x, np.ndarray)

        def samples(x: np.ndarray, y: np.ndarray) -> Samples:
            return Samples({"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, view)

        parts = [_divide(rows, validation, seed, k) for k, rows in enumerate(split.clients)]
        held_out = np.concatenate([rest for _, rest in parts])
        federation = Federation(
            private=tuple(samples(x[rows], y[rows]) for rows, _ in parts),
            public=Samples({"x": torch.from_numpy(public_x)}, view),
            test=samples(x[held_out], y[held_out]) if validation else samples(test_x, dataset.test_y),
            classes=len(dataset.classes),
            models=several(defaults.models if models is None else models),
            shared_model=defaults.shared_model if models is None else None,
            assignment=assignment,
            data=dataset.name,
            skew=split.skew,
            rounds=defaults.rounds,
            epochs=defaults.epochs,
            partition=split,
            fingerprint=dataset.sha256,
            hidden=torch.from_numpy(y[split.public]) if own_public is None else None,
            names=dataset.classes,
            encoding=encoding,
        )
        options = {"data": dataset.name, "skew": split.skew, "clients": clients, "seed": seed, "public": public,
                   "stratified": stratified, "fraction": fraction, "validation": validation, "assignment": assignment,
                   "augment": augment or ("standard" if view.augments else "none"), "resize": resize or 0,
                   "label": label, "test": test}  # fmt: skip
        object.__setattr__(federation, "options", options)
        return federation

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
        """A federation of the caller's own arrays or tensors: images or anything else a network takes.

        Floating-point inputs are used as they are, uint8 images are divided by 255, other integers stay integers
        (tokens). Labels are whole numbers from 0. The classes are their distinct values over all clients and the test
        set, in ascending order; with ``classes``, labels lie in 0 .. classes - 1 and are used as they are. A class
        that no client holds is an error unless ``allow_missing`` is set.
        """
        allow(models)
        if not clients:
            raise ValueError("a federation needs at least one client, got none")
        pairs = {f"client {k}": pair for k, pair in enumerate(clients)} | {"the test set": test}
        samples = [_labelled(who, pair, view) for who, pair in pairs.items()]
        public_samples = as_samples("the public set", public, view)
        samples, labels = _numbered(samples, classes)
        total = len(labels)
        for who, s in zip(pairs, samples, strict=True):
            if s.shape != public_samples.shape or s.x.dtype != public_samples.x.dtype:
                raise ValueError(
                    f"inputs must be alike: the public set has {public_samples.x.dtype} of shape "
                    f"{public_samples.shape}, {who} has {s.x.dtype} of shape {s.shape}"
                )
        own = () if labels == tuple(range(total)) else labels
        *private, test_set = samples
        federation = Federation(tuple(private), public_samples, test_set, total, several(models), labels=own)
        per_class = federation.counts().sum(0).tolist()
        missing = [label for label, number in zip(labels, per_class, strict=True) if not number]
        if missing and not allow_missing:
            more = f" and {len(missing) - 10:,} others" if len(missing) > 10 else ""
            raise ValueError(
                f"no client holds class {', '.join(map(str, missing[:10]))}{more}, so nobody can learn it; "
                "pass allow_missing=True if that is intended"
            )
        for name in federation.models:
            if isinstance(name, str):
                network(name, public_samples.shape)
        return federation

    @property
    def digests(self) -> dict[str, str | None]:
        """The digests of the data and of the partition, as records hold them."""
        return {"data_sha256": self.fingerprint, "partition_sha256": self.partition.sha256 if self.partition else None}

    def models_of(self, method: AnyMethod) -> tuple[str | Factory, ...]:
        """The networks that are dealt to the clients under a method."""
        return (self.shared_model,) if method.one_network and self.shared_model is not None else self.models

    def archs(self, method: AnyMethod) -> dict[int, Arch]:
        """Each client's architecture under a method."""
        outputs = method.outputs(self.classes)
        tokens = not self.public.x.is_floating_point() and self.public.view == IDENTITY
        factories = [network(m, self.public.shape) if isinstance(m, str) else m for m in self.models_of(method)]
        networks = deal(factories, len(self.private), self.assignment)
        return {k: Arch((factory,), outputs, self.public.shape, tokens) for k, factory in enumerate(networks)}

    def counts(self) -> Tensor:
        """Private samples per client and class, [clients, classes]."""
        return torch.stack([torch.bincount(s["y"], minlength=self.classes) for s in self.private])


def deal(models: Sequence[T], clients: int, assignment: Assignment) -> list[T]:
    """A model for each client: in turn, or the first model to the first clients and so on.

    >>> deal("ab", 4, "alternate"), deal("ab", 4, "halves")
    (['a', 'b', 'a', 'b'], ['a', 'a', 'b', 'b'])
    """
    if assignment == "halves":
        return [models[k * len(models) // clients] for k in range(clients)]
    return [models[k % len(models)] for k in range(clients)]


def _divide(rows: np.ndarray, share: float, seed: int, client: int) -> tuple[np.ndarray, np.ndarray]:
    """A client's samples to train on, at least one, and those held out; both in their order."""
    number = min(round(share * len(rows)), len(rows) - 1)
    rest = np.zeros(len(rows), bool)
    rest[np.random.default_rng([seed, 4, client]).permutation(len(rows))[:number]] = True
    return rows[~rest], rows[rest]


def several(models: Models) -> tuple[str | Factory, ...]:
    """Networks from one name, names with commas, a factory, or a sequence of these.

    >>> several("resnet14,resnet20")
    ('resnet14', 'resnet20')
    """
    networks: tuple[str | Factory, ...]
    if isinstance(models, str):
        networks = tuple(name.strip() for name in models.split(",") if name.strip())
    else:
        networks = tuple(models) if isinstance(models, Sequence) else (models,)
    if not networks:
        raise ValueError(f"models must name at least one network, got {models!r}")
    for m in networks:
        if isinstance(m, nn.Module) or not (isinstance(m, str) or callable(m)):
            kind = type(m).__name__
            raise TypeError(f"models takes names and factories (outputs -> nn.Module), got an object of type {kind}")
    return networks


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
    return Samples({"x": inputs}, view or (View(scale=1 / 255) if inputs.dtype == torch.uint8 else IDENTITY))


def _tensor(who: str, values: Array) -> Tensor:
    """A copy of an array, a table or nested lists of numbers as a tensor."""
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


def _numbered(samples: list[Samples], classes: int | None) -> tuple[list[Samples], tuple[int, ...]]:
    """The samples with the number of their class as ``y``, and the caller's label of each class."""
    values = torch.unique(torch.cat([s["y"] for s in samples]))
    if classes is not None:
        check_value("classes", classes, int, 1)
        check_value("classes", classes, int, high=MAX_CLASSES)
        if (highest := int(values[-1])) >= classes:
            raise ValueError(f"labels must lie in 0 .. {classes - 1}, got {highest}")
        return samples, tuple(range(classes))
    if len(values) > MAX_CLASSES:
        raise ValueError(f"labels must have at most {MAX_CLASSES:,} distinct values, got {len(values):,}")
    return [s.with_(y=torch.searchsorted(values, s["y"])) for s in samples], tuple(values.tolist())


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
