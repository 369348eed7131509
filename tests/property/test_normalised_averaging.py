from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcc.methods.fedavg import shares
from fedcc.methods.fednova import coefficients

clients = st.lists(st.tuples(st.integers(1, 10_000), st.integers(1, 3_000)), min_size=1, max_size=12)


@given(clients)
def test_coefficients_add_up_to_one_or_more(clients: list[tuple[int, int]]) -> None:
    n, a = [n for n, _ in clients], [float(a) for _, a in clients]
    total = sum(coefficients(shares(n), a))
    assert total >= 1 - 1e-12
    if max(n) < 3 * min(n) and max(a) > 2 * min(a):
        assert total > 1 + 1e-4  # equal only if all steps are


@given(clients, st.integers(1, 3_000))
def test_equal_steps_give_fedavgs_shares(clients: list[tuple[int, int]], steps: int) -> None:
    p = shares([n for n, _ in clients])
    assert coefficients(p, [float(steps)] * len(p)) == pytest.approx(p)


@given(clients)
def test_the_effective_steps_are_kept(clients: list[tuple[int, int]]) -> None:
    """sum_k c_k a_k = tau_eff: the server moves as far as the clients did on average."""
    n, a = [n for n, _ in clients], [float(a) for _, a in clients]
    p = shares(n)
    moved = sum(c * steps for c, steps in zip(coefficients(p, a), a, strict=True))
    assert moved == pytest.approx(sum(share * steps for share, steps in zip(p, a, strict=True)))
