"""FedAvg's average (McMahan et al., AISTATS 2017)."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcc.core.messages import Weights
from fedcc.methods.fedavg import average

value = st.floats(-1e3, 1e3)
clients = st.lists(st.tuples(st.lists(value, min_size=3, max_size=3), st.integers(1, 9_999)), min_size=1, max_size=8)


def uplinks(clients: list[tuple[list[float], int]]) -> list[Weights]:
    return [Weights({"w": torch.tensor(w, dtype=torch.float64)}, n) for w, n in clients]


@given(clients)
def test_every_coordinate_lies_between_the_clients(clients: list[tuple[list[float], int]]) -> None:
    ups = uplinks(clients)
    stacked = torch.stack([up.state["w"] for up in ups])
    found = average(ups)["w"]
    assert (found >= stacked.amin(0) - 1e-9).all()
    assert (found <= stacked.amax(0) + 1e-9).all()


@given(clients, st.randoms(use_true_random=False))
def test_the_order_of_clients_does_not_matter(clients: list[tuple[list[float], int]], random: object) -> None:
    shuffled = list(clients)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    torch.testing.assert_close(average(uplinks(shuffled)), average(uplinks(clients)), rtol=1e-9, atol=1e-9)


@given(clients, st.integers(0, 7))
def test_two_twins_of_half_the_size_count_as_one(clients: list[tuple[list[float], int]], which: int) -> None:
    i = which % len(clients)
    w, n = clients[i]
    whole = [*clients[:i], (w, 2 * n), *clients[i + 1 :]]
    halves = [*clients[:i], (w, n), (w, n), *clients[i + 1 :]]
    torch.testing.assert_close(average(uplinks(halves)), average(uplinks(whole)), rtol=1e-9, atol=1e-9)


@given(st.lists(value, min_size=3, max_size=3), st.lists(st.integers(1, 9_999), min_size=1, max_size=8))
def test_identical_clients_average_to_themselves(w: list[float], sizes: list[int]) -> None:
    found = average(uplinks([(w, n) for n in sizes]))["w"]
    torch.testing.assert_close(found, torch.tensor(w, dtype=torch.float64))


@given(st.lists(value, min_size=3, max_size=3), st.lists(st.integers(1, 9_999), min_size=1, max_size=8))
def test_what_all_clients_agree_on_is_not_rounded(w: list[float], sizes: list[int]) -> None:
    """So that a frozen weight stays the same to the bit, also beside one that is trained."""
    for dtype in (torch.float32, torch.float64):
        ups = [Weights({"w": torch.tensor([*w, float(k)], dtype=dtype)}, n) for k, n in enumerate(sizes)]
        found = average(ups)["w"]
        assert torch.equal(found[:3], torch.tensor(w, dtype=dtype))
