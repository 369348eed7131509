"""A data set's samples, dealt to the public set and the clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcc.core.options import check_value
from fedcc.core.samples import IDENTITY, Samples, View
from fedcc.data.arrays import stored_tensor
from fedcc.data.dataset import Dataset
from fedcc.data.partition import Partition, partition
from fedcc.errors import InputError
from fedcc.inputs.maps import MappedRows
from fedcc.inputs.tables import Encoding, Table

PUBLIC = "the public set"
FITTED_BYTES = 1 << 26  # of a memory map, from which mean and standard deviation are taken


@dataclass(frozen=True, eq=False)
class Dealt:
    """Who holds what, as samples."""

    private: tuple[Samples, ...]
    public: Samples
    test: Samples
    partition: Partition
    hidden: Tensor | None  # the public labels
    encoding: Encoding | None


def deal_samples(
    dataset: Dataset,
    skew: str | None,
    clients: int | None,
    seed: int,
    *,
    public: float,
    stratified: bool,
    fraction: float,
    augment: str | bool | None,
    validation: float,
) -> Dealt:
    """Split a data set; ``Federation.named`` explains the options."""
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
    public_x = x[split.public] if own_public is None else own_public
    inputs, encoding = encoded({"train": x, "test": dataset.test_x}, public_x)
    view = _augmented(dataset, standardised(inputs[PUBLIC]) if dataset.view is None else dataset.view, augment)

    def samples(x: Any, y: NDArray[np.int64]) -> Samples:
        return Samples({"x": stored_tensor(x), "y": torch.from_numpy(y)}, view)

    parts = [_divide(rows, validation, seed, k) for k, rows in enumerate(split.clients)]
    held_out = np.concatenate([rest for _, rest in parts])
    x = inputs["train"]
    return Dealt(
        private=tuple(samples(x[rows], y[rows]) for rows, _ in parts),
        public=Samples({"x": stored_tensor(inputs[PUBLIC])}, view),
        test=samples(x[held_out], y[held_out]) if validation else samples(inputs["test"], dataset.test_y),
        partition=split,
        hidden=torch.from_numpy(y[split.public]) if own_public is None else None,
        encoding=encoding,
    )


def _augmented(dataset: Dataset, view: View, augment: str | bool | None) -> View:
    """The view with the augmentation that was asked for, by default the data set's."""
    turned_on = dataset.defaults.augment if augment is None else augment
    name = turned_on if isinstance(turned_on, str) else "standard" if turned_on else "none"
    view = view.with_augment(name)
    if augment is not None and name == "standard" and not view.augments:
        raise ValueError(f"{dataset.name} has no augmentation to turn on")
    return view


def encoded(inputs: Mapping[str, Any], public: Any) -> tuple[dict[str, Any], Encoding | None]:
    """Inputs and public inputs by name, tables among them encoded by the public one."""
    everything = {**inputs, PUBLIC: public}
    tables = {who: x for who, x in everything.items() if isinstance(x, Table)}
    if not tables:
        return everything, None
    if public is None or not len(public):
        raise InputError("tables are scaled and encoded by their public samples, and there are none: give public")
    if other := next((who for who, x in everything.items() if who not in tables), None):
        raise InputError(f"{next(iter(tables))} is a table, so {other} must be one too")
    encoding, result = Encoding.fit(tables[PUBLIC]), {}
    for who, table in tables.items():
        try:
            result[who] = encoding.encode(table)
        except InputError as error:
            raise InputError(f"{who}: {error}") from None
    return result, encoding


def standardised(public: NDArray[Any] | MappedRows) -> View:
    """The view that scales numbers [N, width] by the public samples' mean and standard deviation."""
    if not len(public):
        return IDENTITY
    rows = public.sample(FITTED_BYTES // public.row_bytes or 1) if isinstance(public, MappedRows) else public
    mean, std = rows.mean(0, np.float64), rows.std(0, np.float64)
    return View(mean=tuple(mean.tolist()), std=tuple(np.where(std > 0, std, 1.0).tolist()))


def _divide(
    rows: NDArray[np.int64], share: float, seed: int, client: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A client's samples to train on, at least one, and those held out; both in their order."""
    number = min(round(share * len(rows)), len(rows) - 1)
    rest = np.zeros(len(rows), bool)
    rest[np.random.default_rng([seed, 4, client]).permutation(len(rows))[:number]] = True
    return rows[~rest], rows[rest]
