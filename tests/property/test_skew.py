"""Every split, whatever its numbers: disjoint, covering, as skewed as its name says, and the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from fedcc.data.partition import partition, public_split
from fedcc.data.skew import Classes, Dirichlet, Iid, parse
from fedcc.data.split import _in_order, split

seeds = st.integers(0, 2**32 - 1)
etas = st.floats(1e-3, 100, allow_nan=False)


def dealt_once(parts: list[np.ndarray], n: int) -> bool:
    together = np.concatenate(parts)
    ascending = all((np.diff(part) > 0).all() for part in parts)
    return ascending and sorted(together.tolist()) == list(range(n))


def labels_of(n: int, classes: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, 99]).integers(0, classes, n)


@given(seeds, etas, st.integers(1, 30), st.integers(1, 12), st.integers(1, 12), st.booleans(), st.integers(0, 200))
@example(0, 1e-3, 30, 12, 12, False, 0)  # redrawing alone can never do it: n is exactly minimum x K
def test_dirichlet_covers_respects_the_minimum_and_ends(seed, eta, clients, classes, minimum, balance, more):
    y = labels_of(clients * minimum + more, classes, seed)
    skew = Dirichlet(eta, minimum, balance)
    result = split(y, clients, skew, classes, np.random.default_rng(seed))
    assert dealt_once(result.parts, len(y))
    assert min(map(len, result.parts)) >= minimum
    assert result.retries <= 100
    again = split(y, clients, skew, classes, np.random.default_rng(seed))
    assert all(np.array_equal(a, b) for a, b in zip(result.parts, again.parts, strict=True))
    assert again.moved == result.moved
    assert result.moved == 0 or result.retries == 100


@given(seeds, st.integers(1, 30), st.integers(1, 25), st.data())
def test_classes_gives_each_client_n_and_each_class_floor_or_ceil_holders(seed, clients, classes, data):
    n = data.draw(st.integers(-(-classes // clients), classes)) if clients * classes >= classes else 1
    y = np.repeat(np.arange(classes), clients + 2)
    result = split(y, clients, Classes(n), classes, np.random.default_rng(seed))
    assert dealt_once(result.parts, len(y))
    held = np.stack([np.bincount(y[part], minlength=classes) for part in result.parts])
    assert ((held > 0).sum(axis=1) == n).all()
    holders = (held > 0).sum(axis=0)
    assert holders.min() >= max(1, n * clients // classes)
    assert holders.max() <= -(-n * clients // classes)
    for c in range(classes):  # split evenly among its holders
        shares = held[held[:, c] > 0, c]
        assert shares.max() - shares.min() <= 1
    again = split(y, clients, Classes(n), classes, np.random.default_rng(seed))
    assert all(np.array_equal(a, b) for a, b in zip(result.parts, again.parts, strict=True))


@given(seeds, st.integers(1, 20), st.integers(1, 20), st.data())
def test_the_construction_of_last_resort_always_fits(seed, clients, classes, data):
    n = data.draw(st.integers(1, classes))
    rng = np.random.default_rng(seed)
    slots = np.arange(clients * n)
    held = _in_order(slots % classes, slots % clients, clients, classes, rng)
    assert (held.sum(axis=1) == n).all()
    assert held.sum(axis=0).min() >= n * clients // classes
    assert held.sum(axis=0).max() <= -(-n * clients // classes)


@given(seeds, st.integers(1, 50), st.integers(0, 100))
def test_iid_parts_are_equal_to_one_sample(seed, clients, more):
    n = clients + more
    result = split(labels_of(n, 3, seed), clients, Iid(), 3, np.random.default_rng(seed))
    assert dealt_once(result.parts, n)
    sizes = [len(part) for part in result.parts]
    assert max(sizes) - min(sizes) <= 1


@given(seeds, st.integers(1, 300), st.floats(0, 0.99), st.booleans())
def test_the_public_split_is_the_fraction_and_the_rest(seed, n, fraction, stratified):
    assume(fraction == 0 or round(n * fraction) > 0)
    y = labels_of(n, 4, seed)
    public, private = public_split(y, fraction, np.random.default_rng(seed), stratified)
    assert dealt_once([public, private], n)
    assert len(public) == round(n * fraction)
    if stratified:
        wanted = np.bincount(y, minlength=4) * (len(public) / n)
        assert (np.abs(np.bincount(y[public], minlength=4) - wanted) < 1).all()


@given(seeds, st.sampled_from(["dirichlet:0.1,minimum=1", "classes:2", "iid"]), st.integers(2, 8))
@settings(max_examples=50)
def test_a_partition_deals_every_sample_once(seed, skew, clients):
    y = np.arange(400) % 4
    p = partition(y, clients, skew, 4, seed)
    together = np.concatenate([p.public, *p.clients])
    assert sorted(together.tolist()) == list(range(400))
    assert np.array_equal(p.counts, [[int((y[part] == c).sum()) for c in range(4)] for part in p.clients])
    assert p.sha256 == partition(y, clients, skew, 4, seed).sha256
    assert p.sha256 != partition(y, clients, skew, 4, seed + 1).sha256


skews = st.one_of(
    st.builds(Dirichlet, st.floats(1e-300, 1e300), st.integers(1, 99), st.booleans()),
    st.builds(Classes, st.integers(1, 500), st.sampled_from(["even", "niid_bench"])),
    st.just(Iid()),
)


@given(skews)
def test_the_text_of_a_skew_is_the_skew(skew):
    assert parse(str(skew)) == skew


@given(st.text(max_size=20))
def test_any_text_is_a_skew_or_a_value_error(text):
    try:
        skew = parse(text)
    except ValueError:
        return
    assert parse(str(skew)) == skew


@pytest.mark.parametrize("classes", [10, 100, 200])
@pytest.mark.parametrize("r", [1, 2])
def test_the_papers_six_settings(classes, r):
    """K = 10, N = C/10 or C/5: every class has exactly r = 1 or 2 holders."""
    for seed in range(20):
        y = np.arange(classes * 20) % classes
        parts = split(y, 10, Classes(r * classes // 10), classes, np.random.default_rng(seed)).parts
        held = np.stack([np.bincount(y[part], minlength=classes) for part in parts]) > 0
        assert (held.sum(axis=0) == r).all()
        assert (held.sum(axis=1) == r * classes // 10).all()
