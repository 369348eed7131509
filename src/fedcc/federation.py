"""A federation: the clients' samples, the public and the test samples, and the networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from fedcc.code import allow, is_reference
from fedcc.core.method import AnyMethod
from fedcc.core.model import Arch, Factory, factory_name
from fedcc.core.naming import listed
from fedcc.core.options import Assignment, check_value
from fedcc.core.samples import Samples, View
from fedcc.data import Dataset, load
from fedcc.data.arrays import as_samples as as_samples
from fedcc.data.arrays import labels_of, numbered, usual_network, whole_labels
from fedcc.data.deal import Dealt, deal_samples, encoded
from fedcc.nets import network

if TYPE_CHECKING:
    from fedcc.data.partition import Partition
    from fedcc.inputs.tables import Encoding

T = TypeVar("T")
Models = str | Factory | Sequence[str | Factory]
"""One network for all, or several: names (``"resnet14,resnet20"``) or factories ``outputs -> nn.Module``."""


@dataclass(frozen=True, eq=False)
class Federation:
    """The data and networks of a run. Make one with :meth:`named`, :meth:`split` or :meth:`of`.

    >>> f = Federation.named("digits", skew="classes:1", clients=10)
    >>> len(f.private), f.classes, len(f.public)
    (10, 10, 144)
    """

    private: tuple[Samples, ...]  # x and y of each client
    public: Samples  # only x: labels, if there were any, are removed; may be empty
    test: Samples  # x and y; may be empty
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

        >>> Federation.named("digits", skew="dirichlet:0.5", clients=4, fraction=0.5)
        Federation(digits, dirichlet:0.5)
          clients: 4, with 118 to 200 samples of 8 to 10 classes each
          public: 72 samples; test: 355
          inputs: uint8 [1, 8, 8]
          classes: 10 (0, 1, 2, 3, 4, 5, 6, 7, ...)
          networks: resnet8, resnet14
        """
        allow(data, models)
        dataset = load(data, Path(folder) if folder is not None else None, resize=resize, label=label, test=test)
        dealt = deal_samples(dataset, skew, clients, seed, public=public, stratified=stratified, fraction=fraction,
                             augment=augment, validation=validation)  # fmt: skip
        federation = Federation._of_dataset(dataset, dealt, models, assignment)
        view = federation.public.view
        options = {"data": dataset.name, "skew": federation.skew, "clients": len(federation.private), "seed": seed,
                   "public": public, "stratified": stratified, "fraction": fraction, "validation": validation,
                   "assignment": assignment, "augment": augment or ("standard" if view.augments else "none"),
                   "resize": resize or 0, "label": label, "test": test}  # fmt: skip
        object.__setattr__(federation, "options", options)
        return federation

    @staticmethod
    def split(
        data: Any,
        skew: str | None = None,
        clients: int | None = None,
        models: Models | None = None,
        seed: int = 0,
        *,
        public: Any = 0.1,
        test: Any = 0.2,
        label: str = "",
        view: View | None = None,
        stratified: bool = False,
        fraction: float = 1.0,
        augment: str | bool | None = None,
        validation: float = 0.0,
        assignment: Assignment = "alternate",
        resize: int = 0,
    ) -> Federation:
        """One data set of your own, split by label skew.

        ``data`` is a pair (inputs, labels) of arrays, a data frame, a torch or Hugging Face data set, a
        :class:`~fedcc.data.Dataset`, or a path. ``public`` and ``test`` are shares to split off where the data has no
        such part (0 or None: none), or data of their own; ``label`` is the column of the labels. ``view`` says what
        the networks see of the inputs. The other options are those of :meth:`named`.

        >>> Federation.split((torch.eye(40), ["yes", "no"] * 20), skew="classes:1", clients=2).names
        ('no', 'yes')
        """
        from fedcc.data import own

        allow(data if isinstance(data, str) else None, models)
        share = 0.0 if public is None else public
        own_public = None if isinstance(share, int | float) else share
        share = share if own_public is None else 0.0
        check_value("public", share, float, 0, below=1)
        if isinstance(data, str) and (is_reference(data) or not (own.is_own(data) or Path(data).exists())):
            data = load(data, resize=resize or None, label=label)
        if not isinstance(data, Dataset):
            dataset = Dataset.of(data, test, own_public, label=label, view=view, resize=resize)
        elif own_public is not None or not isinstance(test, int | float | None):
            raise ValueError(f"{data.name} has test and public samples of its own; pass shares as test= and public=")
        else:
            dataset = data if view is None else replace(data, view=view)
        dealt = deal_samples(dataset, skew, clients, seed, public=share, stratified=stratified, fraction=fraction,
                             augment=augment, validation=validation)  # fmt: skip
        return Federation._of_dataset(dataset, dealt, models, assignment)

    @staticmethod
    def _of_dataset(dataset: Dataset, dealt: Dealt, models: Models | None, assignment: Assignment) -> Federation:
        defaults = dataset.defaults
        return Federation(
            private=dealt.private,
            public=dealt.public,
            test=dealt.test,
            classes=len(dataset.classes),
            models=several(defaults.models if models is None else models),
            shared_model=defaults.shared_model if models is None else None,
            assignment=assignment,
            data=dataset.name,
            skew=dealt.partition.skew,
            rounds=defaults.rounds,
            epochs=defaults.epochs,
            partition=dealt.partition,
            fingerprint=dataset.sha256,
            hidden=dealt.hidden,
            names=dataset.classes,
            labels=whole_labels(dataset.classes),
            encoding=dealt.encoding,
        )

    @staticmethod
    def of(
        clients: Sequence[Any],
        public: Any = None,
        test: Any = None,
        models: Models | None = None,
        *,
        label: str = "",
        classes: int | None = None,
        view: View | None = None,
        allow_missing: bool = False,
    ) -> Federation:
        """A federation of the caller's own data: images or anything else a network takes.

        Clients and ``test`` are pairs (inputs, labels) of arrays or tensors, data frames with a column ``label``, or
        torch or Hugging Face data sets; ``public`` is the same without labels, which are dropped. Methods that use no
        public samples need no ``public``; without ``test`` there are no accuracies.

        Floating-point inputs are used as they are, uint8 images are divided by 255, other integers stay integers
        (tokens). Data frames are scaled and encoded by the public ones. Labels are strings, bools or integers. The
        classes are their distinct values over all clients and the test set, in ascending order; with ``classes``,
        labels lie in 0 .. classes - 1 and are used as they are. A class that no client holds is an error unless
        ``allow_missing`` is set.

        >>> clients = [(torch.randn(20, 4) + k, [name] * 20) for k, name in enumerate(["low", "mid", "high"])]
        >>> Federation.of(clients, public=torch.randn(30, 4) + 1, models="mlp").names
        ('high', 'low', 'mid')
        """
        from fedcc.data.objects import read_object, read_pair

        allow(models)
        if not clients:
            raise ValueError("a federation needs at least one client, got none")
        parts = {f"client {k}": part for k, part in enumerate(clients)}
        parts |= {"the test set": test} if test is not None else {}
        pairs = {who: read_pair(who, part, label) for who, part in parts.items()}
        public_x = public
        if public is not None and (found := read_object("the public set", public, label, labelled=False)):
            public_x = found[0]
        inputs, encoding = encoded({who: x for who, (x, _) in pairs.items()}, public_x)
        samples = {who: as_samples(who, x, view) for who, x in inputs.items() if x is not None}
        first = samples["client 0"]
        public_samples = samples.pop("the public set", Samples({"x": first.x[:0]}, first.view))
        ys = [labels_of(who, y, len(samples[who])) for who, (_, y) in pairs.items()]
        for who, s in samples.items():
            if s.shape != public_samples.shape or s.x.dtype != public_samples.x.dtype:
                other = "the public set" if public is not None else "client 0"
                raise ValueError(
                    f"inputs must be alike: {other} has {public_samples.x.dtype} of shape "
                    f"{public_samples.shape}, {who} has {s.x.dtype} of shape {s.shape}"
                )
        numbers, labels, names = numbered(ys, classes)
        private = [s.with_(y=y) for s, y in zip(samples.values(), numbers, strict=True)]
        empty = Samples({"x": first.x[:0], "y": numbers[0][:0]}, first.view)
        test_set, total = empty if test is None else private.pop(), len(labels)
        kept = () if labels == tuple(range(total)) else labels
        networks = several(usual_network(public_samples) if models is None else models)
        federation = Federation(tuple(private), public_samples, test_set, total, networks, labels=kept, names=names,
                                encoding=encoding)  # fmt: skip
        per_class = federation.counts().sum(0).tolist()
        missing = [c for c, number in zip(names or labels, per_class, strict=True) if not number]
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

    def __repr__(self) -> str:
        sizes = [len(s) for s in self.private] or [0]
        counts = (self.counts() > 0).sum(1).tolist() if self.private else [0]
        names = listed(self.names or tuple(map(str, self.labels or range(self.classes))))
        networks = listed([m if isinstance(m, str) else factory_name(m) for m in self.models])
        dtype = str(self.public.x.dtype).removeprefix("torch.")
        return (
            f"Federation({self.data}, {self.skew})\n"
            f"  clients: {len(self.private)}, with {_span(sizes)} of {_span(counts, 'class', 'classes')} each\n"
            f"  public: {len(self.public):,} samples; test: {len(self.test):,}\n"
            f"  inputs: {dtype} {list(self.public.shape)}\n"
            f"  classes: {self.classes:,} ({names})\n"
            f"  networks: {networks}"
        )

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
        factories = [network(m, self.public.shape) if isinstance(m, str) else m for m in self.models_of(method)]
        networks = deal(factories, len(self.private), self.assignment)
        return {
            k: Arch((factory,), outputs, self.public.shape, self.public.are_tokens)
            for k, factory in enumerate(networks)
        }

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


def _span(numbers: Sequence[int], one: str = "sample", more: str = "samples") -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,} {one if low == 1 else more}" if low == high else f"{low:,} to {high:,} {more}"
