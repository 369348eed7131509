"""What every method keeps to, for all of METHODS: a new one is covered the day it is listed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor

from fedcc.core.method import AnyMethod
from fedcc.core.requests import Recipe
from fedcc.core.rng import SERVER
from fedcc.methods import METHODS, make
from recording import changed, record
from tiny import Mlp, Tiny

QUICK: dict[str, dict[str, Any]] = {
    "fedconcat": {"classifier_rounds": 2, "classifier_lr": 0.5},
    "fedaux": {"pretrain": "none"},
    "fens": {"aggregator_rounds": 2, "aggregator": "weights"},
}
"""Settings without which a method would take long here, or needs images."""

ONE_WIDTH = {"fedproto"}
"""Methods whose clients' networks may differ, but for the number of features."""

MIXED = [[0, 1, 2] * 4, [0, 1] * 5, [1, 2] * 5, [2, 0] * 6]

every = pytest.mark.parametrize("name", list(METHODS))


def method(name: str) -> AnyMethod:
    return make(name, QUICK.get(name))


def federation(name: str, **settings: Any) -> Tiny:
    """Four clients with mixed labels and one epoch a phase, unless told otherwise."""
    return Tiny(method(name), **{"labels": MIXED, "recipe": Recipe(lr=1e-2, batch=8, epochs=1)} | settings)


def leaves(tree: Any) -> Iterator[Any]:
    """Tensors, numbers and texts of a message, a mapping or a memory, in a fixed order."""
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield from leaves(tree[key])
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from leaves(value)
    elif is_dataclass(tree):
        for f in fields(tree):
            yield from leaves(getattr(tree, f.name))
    else:
        yield tree


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def everything(tiny: Tiny) -> list[Tensor]:
    """All that a run leaves behind."""
    messages = [[r.ups, r.downs] for r in tiny.rounds]
    states = [c.model.state for c in tiny.clients] + [m.state for m in tiny.server.models.values()]
    return [*tensors(messages), *tensors(states), tiny.scores()]


def assert_finite(tiny: Tiny) -> None:
    assert all(t.isfinite().all() for t in everything(tiny))
    numbers = [v for c in tiny.clients for v in c.log.values()] + list(tiny.server.log.values())
    assert torch.tensor(numbers, dtype=torch.float64).isfinite().all()


# -- a method is a value


@every
def test_frozen_hashable_and_equal_by_value(name: str) -> None:
    one, other = make(name), make(name)
    assert one == other
    assert hash(one) == hash(other)
    assert one != next(make(n) for n in METHODS if n != name)
    with pytest.raises(FrozenInstanceError):
        one.anything = 1  # type: ignore[attr-defined]


def alternatives(kind: type[AnyMethod]) -> Iterator[tuple[str, Any]]:
    """Another value for every setting."""
    hints = get_type_hints(kind)
    for f in fields(kind):  # type: ignore[arg-type]
        hint = hints[f.name]
        if get_origin(hint) is Literal:
            yield from ((f.name, value) for value in get_args(hint) if value != f.default)
        elif hint is bool:
            yield f.name, not f.default
        elif int in (hint, *get_args(hint)):
            yield f.name, (f.default or 0) + 1
        elif float in (hint, *get_args(hint)):
            yield f.name, (f.default or 1.0) * 0.5


@every
def test_settings_survive_a_file(name: str) -> None:
    """Plain values that say all: a method is what its settings say, and each of them makes another method."""
    kind = METHODS[name]
    assert make(name, asdict(make(name))) == make(name)
    for setting, value in alternatives(kind):
        try:
            other = make(name, {setting: value})
        except ValueError:  # not by itself: FedMD's average=probs needs loss=kl
            continue
        assert other != make(name)
        assert make(name, asdict(other)) == other
        assert replace(other) == other
        assert all(v is None or isinstance(v, bool | int | float | str) for v in asdict(other).values())


@every
def test_every_setting_says_what_it_means_and_where_it_comes_from(name: str) -> None:
    for f in fields(METHODS[name]):  # type: ignore[arg-type]
        assert f.metadata.get("meaning"), f.name
        assert f.metadata.get("source"), f.name


@every
def test_it_says_what_it_is(name: str) -> None:
    kind = METHODS[name]
    module = sys.modules[kind.__module__]
    assert module.__doc__
    assert len(module.__doc__) > 80
    assert kind.__doc__
    assert kind.source
    assert kind.family in ("parameters", "distillation", "ensemble", "bound")
    assert name == kind.__name__.lower()
    assert make(name).name == kind.__name__


# -- hard cases


@pytest.mark.parametrize(
    "case",
    [
        {"labels": [[0] * 9, [1] * 9, [2] * 9]},
        {"labels": [[0, 1, 2] * 4, [1], [2, 0] * 4]},
        {"labels": [[0, 1, 2] * 4, [0, 1] * 4], "classes": 4},
        {"labels": [[0, 1, 2]]},
    ],
    ids=["one class each", "a client of one sample", "a class nobody has", "one client"],
)
@every
def test_finite(name: str, case: dict[str, Any]) -> None:
    tiny = federation(name, **case).run(2)
    assert_finite(tiny)
    scores = tiny.scores()
    assert scores.shape[-2:] == (24, tiny.classes)
    assert scores.ndim == 2 or len(scores) == len(tiny.clients)


@every
def test_clients_may_miss_rounds(name: str) -> None:
    tiny = federation(name, options={"participation": 0.5}).run(4)
    assert len({k for r in tiny.rounds for k in r.ups}) > 2  # not always the same two
    assert all(len(r.ups) == 2 for r in tiny.rounds)
    assert all(set(r.downs) == {0, 1, 2, 3} for r in tiny.rounds)
    assert_finite(tiny)


@every
def test_the_server_copes_with_lost_uplinks(name: str) -> None:
    """All four trained, the uplinks of two arrived: still a downlink for every client, and the next round goes on."""
    tiny = federation(name)
    downs = tiny.ask(tiny.method.start(tiny.server))
    for t in range(1, tiny.method.rounds(2) + 1):
        assert set(downs) == {0, 1, 2, 3}
        tiny.server.begin(t)
        ups = tiny.cohort.round(t, downs)
        lost = {1, 2} if t % 2 else {0}
        arrived = {k: up for k, up in ups.items() if k not in lost}
        downs = tiny.ask(tiny.method.server(tiny.server, arrived))
    assert set(downs) == {0, 1, 2, 3}
    assert all(t.isfinite().all() for t in tensors(downs))


@every
def test_the_order_of_uplinks_does_not_matter(name: str) -> None:
    found = []
    for turn in (1, -1):
        tiny = federation(name)
        downs = tiny.ask(tiny.method.start(tiny.server))
        for t in range(1, tiny.method.rounds(2) + 1):
            tiny.server.begin(t)
            ups = tiny.cohort.round(t, downs)
            downs = tiny.ask(tiny.method.server(tiny.server, dict(list(ups.items())[::turn])))
        found.append(tensors(downs))
    assert len(found[0]) == len(found[1])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True))


# -- randomness and labels

PHASES: dict[str, tuple[list[str], list[str]]] = {
    "fedconcat": (["fit", "fit", "head", "head"], []),
    "fedmd": (["fit", "sync", "fit"], []),
    "feddf": (["fit", "fit"], ["distill"]),
    "lsr": (["fit", "sync", "fit"], []),
    "fedet": (["fit", "fit"], ["consensus"]),
    "fedhkt": (["fit", "fit"], ["down", "up"]),
    "fedcc": (["fit", "refine", "sync", "fit", "refine"], []),
    "ssl": (["fit", "refine"] * 2, []),
    "scaffold": (["fit", "variate"] * 2, []),
    "fens": (["fit", "fit", "aggregate", "aggregate"], []),
    "centralized": ([], ["fit"]),
    "dsfl": (["fit", "sync", "fit"], ["distil"]),
    "scarlet": (["fit", "sync", "fit"], ["distil"]),
    "selectivefd": (["fit", "sync", "fit"], []),
    "comet": (["fit", "sync", "fit"], []),
    "fedaux": (["fit", "fit"], ["distill"]),
}
"""A client's phases in two rounds, and the server's, where they are not a fit every round."""


@every
def test_phases_have_fixed_names(name: str) -> None:
    """Batches are drawn by them, so another name gives other numbers."""
    asked = record(tiny := federation(name))
    tiny.run(2)
    clients, server = PHASES.get(name, (["fit", "fit"], []))
    assert [fit.key.phase for fit in asked.fits(client=0)] == clients
    assert sorted({fit.key.phase for fit in asked.fits(client=SERVER)}) == server


@every
def test_the_same_seed_twice_is_the_same_and_another_is_not(name: str) -> None:
    one, two, other = (
        everything(federation(name, seed=seed, options={"participation": 0.75}).run(2)) for seed in (0, 0, 1)
    )
    assert len(one) == len(two)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one[-1], other[-1])


@every
def test_torchs_own_generator_is_left_alone(name: str) -> None:
    state = torch.get_rng_state()
    federation(name, labels=MIXED[:2]).run(2).scores()
    assert torch.equal(torch.get_rng_state(), state)


@every
def test_public_labels_are_neither_there_nor_read(name: str) -> None:
    clean, poisoned = federation(name), federation(name)
    for role in (*clean.clients, clean.server):
        assert list(role.public.columns) == ["x"]
    for role in (*poisoned.clients, poisoned.server):
        role.public = role.public.with_(y=torch.full((24,), 10**6), target=torch.full((24,), torch.nan))
    one, other = everything(clean.run(2)), everything(poisoned.run(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- learning


@every
def test_learns_from_mixed_labels(name: str) -> None:
    tiny = federation(name, labels=[[0, 1, 2] * 8] * 3, recipe=Recipe(lr=2e-2, batch=8, epochs=6)).run(3)
    assert tiny.accuracy() > 0.75  # a third is chance


@every
def test_private_data_and_models_do_not_change_in_place(name: str) -> None:
    tiny = federation(name)
    before = [{n: v.clone() for n, v in c.private.columns.items()} for c in tiny.clients]
    models = [c.model for c in tiny.clients]
    states = [{n: v.clone() for n, v in m.state.items()} for m in models]
    tiny.run(1)
    assert not any(changed(b, c.private.columns) for b, c in zip(before, tiny.clients, strict=True))
    assert not any(changed(s, m.state) for s, m in zip(states, models, strict=True))


# -- the wire


@every
def test_bytes_are_the_sum_of_the_arrays(name: str) -> None:
    tiny = federation(name, options={"participation": 0.75})
    received = tiny.ask(method(name).start(federation(name).server))
    tiny.run(3)
    for r in tiny.rounds:
        assert r.bytes_up == sum(map(size, tensors(r.ups)))
        assert r.bytes_down == sum(size(t) for k in r.ups for t in tensors(received[k]))
        received = r.downs


def size(array: Tensor) -> int:
    """Four bytes for a floating number (fp64 is for tests alone), their own size for whole ones."""
    return array.numel() * (4 if array.is_floating_point() else array.element_size())


@every
def test_memories_hold_tensors_and_plain_values(name: str) -> None:
    """What survives between rounds can be written to a checkpoint."""
    tiny = federation(name).run(2)
    kept = [c.memory for c in tiny.clients] + [tiny.server.memory]
    assert all(isinstance(leaf, Tensor | bool | int | float | str | None) for leaf in leaves(kept))


# -- networks


@every
def test_different_networks(name: str) -> None:
    """Taken where predictions are shared or nothing is; refused, with both names, where weights or features are."""
    wide = Mlp(12)
    tiny = federation(name, factories=(Mlp(), wide))
    if name in ONE_WIDTH:
        assert_finite(federation(name, factories=(Mlp(), Mlp(norm=False))).run(2))
    elif tiny.method.family != "parameters":
        assert_finite(tiny.run(2))
        return
    with pytest.raises(ValueError) as error:
        tiny.run(1)
    assert str(Mlp()) in str(error.value)
    assert str(wide) in str(error.value)
    assert tiny.method.name in str(error.value)


@every
def test_one_file_for_a_method(name: str) -> None:
    """Named after it, but for the bounds."""
    file = Path(inspect.getfile(METHODS[name])).stem
    assert file == name or file == "bounds"
