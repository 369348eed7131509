"""The driver: answers to the right coroutine, in order; groups; errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import pytest
import torch

from fedcc.core.model import Arch, Model
from fedcc.core.requests import Fit, Fitted, Frozen, Init, Predict, Recipe, Request, gather
from fedcc.core.rng import Key
from fedcc.core.samples import Samples, View
from fedcc.engine.drive import drive, kind, signature
from fedcc.gradients import Ascent
from fedcc.losses import CrossEntropy
from tiny import Mlp

ARCH = Arch((Mlp(),), 3, (6,))
WIDE = Arch((Mlp(12),), 3, (6,))


@dataclass
class Fake:
    """Answers an Init with (client, phase) and writes down its groups."""

    groups: list[list[str]] = field(default_factory=list)

    def serve(self, requests: Sequence[Request[Any]]) -> list[Any]:
        assert len({kind(r) for r in requests}) == 1
        self.groups.append([f"{r.key.client}{r.key.phase}" for r in requests])  # type: ignore[attr-defined]
        return [(r.key.client, r.key.phase) for r in requests]  # type: ignore[attr-defined]


def ask(client: int, phase: str, arch: Arch = ARCH) -> Init:
    return Init(arch, Key(0, 0, client, phase))


def test_results_come_in_the_order_of_the_coroutines() -> None:
    async def job(client: int, times: int) -> tuple[int, Any]:
        last: Any = None
        for i in range(times):
            last = await ask(client, f"p{i}")
            assert last == (client, f"p{i}")
        return client, last

    found = drive([job(0, 3), job(1, 1), job(2, 0), job(3, 2)], Fake())
    assert found == [(0, (0, "p2")), (1, (1, "p0")), (2, None), (3, (3, "p1"))]


def test_nothing_to_drive() -> None:
    assert drive([], Fake()) == []


def test_gather_answers_in_its_own_order_whatever_is_served_first() -> None:
    async def job() -> Any:
        return await gather(ask(0, "a", WIDE), ask(0, "b"), ask(0, "c", WIDE), ask(0, "d"), ask(0, "e"))

    fake = Fake()
    assert drive([job()], fake) == [((0, "a"), (0, "b"), (0, "c"), (0, "d"), (0, "e"))]
    assert fake.groups == [["0b", "0d", "0e"], ["0a", "0c"]]


def test_an_empty_gather_is_an_empty_tuple() -> None:
    async def job() -> Any:
        return await gather(), await ask(0, "a"), await gather()

    assert drive([job(), job()], Fake()) == [((), (0, "a"), ())] * 2


def test_a_gather_of_one_is_a_tuple_of_one() -> None:
    async def job() -> Any:
        return await gather(ask(0, "a"))

    assert drive([job()], Fake()) == [((0, "a"),)]


def test_the_largest_group_is_served_first() -> None:
    async def job(client: int, arch: Arch) -> None:
        await ask(client, "", arch)

    fake = Fake()
    drive([job(0, ARCH), job(1, WIDE), job(2, WIDE)], fake)
    assert fake.groups == [["1", "2"], ["0"]]


def test_a_client_that_skipped_a_phase_is_joined_again() -> None:
    """Client 0 has nothing to sync: it waits for the others, and all fit together."""

    async def job(client: int) -> None:
        if client > 0:
            await ask(client, "sync", WIDE)
        await ask(client, "fit", ARCH)
        await ask(client, "refine", WIDE)

    fake = Fake()
    drive([job(k) for k in range(3)], fake)
    assert fake.groups == [["1sync", "2sync"], ["0fit", "1fit", "2fit"], ["0refine", "1refine", "2refine"]]


def test_requests_of_several_clients_gather_together() -> None:
    async def job(client: int) -> Any:
        return await gather(ask(client, "a"), ask(client, "b", WIDE))

    fake = Fake()
    drive([job(0), job(1)], fake)
    assert fake.groups == [["0a", "1a"], ["0b", "1b"]]


def test_awaiting_anything_else_is_a_type_error() -> None:
    class Other:
        def __await__(self) -> Any:
            return (yield 3)

    async def job() -> None:
        await Other()

    with pytest.raises(TypeError, match="await requests only, got int"):
        drive([job()], Fake())


def test_a_request_no_engine_serves_is_a_type_error() -> None:
    async def job() -> None:
        await Request()

    with pytest.raises(TypeError, match="no engine serves Request"):
        drive([job()], Fake())


@pytest.mark.parametrize("where", ["engine", "coroutine"])
def test_coroutines_are_closed_after_an_error(where: str) -> None:
    ended = []

    class Broken(Fake):
        def serve(self, requests: Sequence[Request[Any]]) -> list[Any]:
            if where == "engine":
                raise RuntimeError("engine")
            return super().serve(requests)

    async def job(client: int) -> None:
        try:
            await ask(client, "")
            if client == 1:
                raise RuntimeError("coroutine")
            await ask(client, "")
        finally:
            ended.append(client)

    jobs = [job(k) for k in range(3)]
    with pytest.raises(RuntimeError, match=where):
        drive(jobs, Broken())
    assert sorted(ended) == [0, 1, 2]
    assert all(j.cr_frame is None for j in jobs)  # closed, so none can be "never awaited"


def test_coroutines_not_yet_begun_are_closed_too() -> None:
    async def bad() -> None:
        raise RuntimeError("at once")

    async def later() -> None:
        await ask(1, "")

    jobs = [bad(), later()]
    with pytest.raises(RuntimeError, match="at once"):
        drive(jobs, Fake())
    assert jobs[1].cr_frame is None


def test_an_engine_that_answers_too_little_is_an_error() -> None:
    class Short(Fake):
        def serve(self, requests: Sequence[Request[Any]]) -> list[Any]:
            return super().serve(requests)[1:]

    async def job(client: int) -> None:
        await ask(client, "")

    with pytest.raises(ValueError):
        drive([job(0), job(1)], Short())


# -- what makes a group

SAMPLES = Samples({"x": torch.zeros(4, 6), "y": torch.zeros(4, dtype=torch.long)})
MODEL = Model(ARCH, {})


def fit(**changes: Any) -> Fit:
    base = Fit(MODEL, CrossEntropy("private"), {"private": SAMPLES}, Key(0), Recipe(batch=4))
    return replace(base, **changes)


@pytest.mark.parametrize(
    "change",
    [
        {"key": Key(1, 2, 3, "other")},
        {"recipe": Recipe(lr=0.5, batch=4, epochs=7)},
        {"recipe": Recipe(batch=4, steps=9, schedule="cosine", pace="private")},
        {"streams": {"private": Samples({"x": torch.ones(9, 6), "y": torch.ones(9, dtype=torch.long)})}},
        {"model": Model(ARCH, {"w": torch.zeros(3)})},
        {"optimizer": {"mean/a": torch.zeros(2)}},
    ],
    ids=lambda c: next(iter(c)),
)
def test_epochs_rates_and_sizes_split_no_group(change: Mapping[str, Any]) -> None:
    assert signature(fit(**change)) == signature(fit())


@pytest.mark.parametrize(
    "change",
    [
        {"model": Model(WIDE, {})},
        {"loss": CrossEntropy("private", 2)},
        {"loss": 0.5 * CrossEntropy("private")},
        {"gradient": Ascent(0.1)},
        {"only": "head"},
        {"joint": False},
        {"recipe": Recipe(batch=5)},
        {"streams": {"public": SAMPLES}},
        {"streams": {"private": SAMPLES.with_(target=torch.zeros(4, 3))}},
        {"streams": {"private": SAMPLES.with_(x=torch.zeros(4, 7))}},
        {"streams": {"private": SAMPLES.with_(y=torch.zeros(4))}},
        {"streams": {"private": Samples(SAMPLES.columns, View(scale=0.5))}},
        {"constants": {"w": torch.zeros(2)}},
        {"constants": {"tree": {"a": [torch.zeros(2)], "b": (torch.zeros(3), 4.0)}}},
        {"frozen": {"teacher": Frozen(MODEL, "private")}},
    ],
    ids=lambda c: next(iter(c)),
)
def test_what_an_engine_cannot_serve_together(change: Mapping[str, Any]) -> None:
    assert signature(fit(**change)) != signature(fit())
    hash(signature(fit(**change)))


def test_constants_group_by_shape_not_by_value() -> None:
    a, b, c = ({"w": {"x": torch.full((n,), float(v))}} for n, v in ((2, 0), (2, 1), (3, 0)))
    assert signature(fit(constants=a)) == signature(fit(constants=b)) != signature(fit(constants=c))


def test_constants_may_be_any_mapping() -> None:
    """A model's state is declared a Mapping, so a read-only one must do as well."""
    frozen = MappingProxyType({"w": MappingProxyType({"x": torch.zeros(2)})})
    assert signature(fit(constants=frozen)) == signature(fit(constants={"w": {"x": torch.zeros(2)}}))


def test_teachers_group_by_name_network_and_stream() -> None:
    def teacher(name: str = "t", arch: Arch = ARCH, stream: str = "private") -> Any:
        return signature(fit(frozen={name: Frozen(Model(arch, {"w": torch.rand(1)}), stream)}))

    assert teacher() == teacher()
    assert len({teacher(), teacher("s"), teacher(arch=WIDE), teacher(stream="public")}) == 4


def test_predictions_group_by_network_and_inputs() -> None:
    a = signature(Predict(MODEL, SAMPLES))
    assert a == signature(Predict(MODEL, Samples({"x": torch.ones(9, 6)})))
    assert a != signature(Predict(Model(WIDE, {}), SAMPLES))
    assert a != signature(Predict(MODEL, Samples({"x": torch.ones(9, 7)})))
    assert a != signature(Init(ARCH, Key(0)))


def test_answers_are_typed() -> None:
    """A fit's answer is a Fitted: what the driver sends is what the request promised."""

    class One:
        def serve(self, requests: Sequence[Request[Any]]) -> list[Any]:
            return [Fitted(MODEL, 1, 0.5) for _ in requests]

    async def job() -> float:
        return (await fit()).loss

    assert drive([job()], One()) == [0.5]
