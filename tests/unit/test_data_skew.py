"""Skews by name, what each draws, what each refuses, and partitions on disk."""

from __future__ import annotations

import time

import numpy as np
import pytest

from fedcc.data.dataset import DataError
from fedcc.data.partition import Partition, partition, public_split
from fedcc.data.skew import Classes, Dirichlet, Iid, parse
from fedcc.data.split import split


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("text", "skew", "canonical"),
    [
        ("dirichlet:0.05", Dirichlet(0.05), "dirichlet:0.05"),
        ("Dirichlet:1", Dirichlet(1.0), "dirichlet:1"),
        ("dirichlet:0.05,balance", Dirichlet(0.05, balance=True), "dirichlet:0.05,balance"),
        ("dirichlet:0.05, balance=false", Dirichlet(0.05), "dirichlet:0.05"),
        ("dirichlet:0.05,minimum=1", Dirichlet(0.05, minimum=1), "dirichlet:0.05,minimum=1"),
        ("classes:2", Classes(2), "classes:2"),
        ("classes:2,assignment=niid_bench", Classes(2, "niid_bench"), "classes:2,assignment=niid_bench"),
        ("iid", Iid(), "iid"),
        ("homo", Iid(), "iid"),
        ("noniid-labeldir", Dirichlet(0.5), "dirichlet:0.5"),
        ("noniid-labeldir:0.1", Dirichlet(0.1), "dirichlet:0.1"),
        ("noniid-#label2", Classes(2), "classes:2"),
    ],
)
def test_parse(text, skew, canonical):
    assert parse(text) == skew
    assert str(skew) == canonical


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dirchlet:0.5", ["dirchlet:0.5", "did you mean 'dirichlet:ETA'", "classes:N"]),
        ("dirichlet", ["ETA", "'dirichlet'"]),
        ("dirichlet:0", ["> 0", "0.0"]),
        ("dirichlet:-1", ["> 0", "-1"]),
        ("dirichlet:nan", ["> 0", "nan"]),
        ("dirichlet:inf", ["> 0", "inf"]),
        ("dirichlet:x", ["ETA", "'dirichlet:x'"]),
        ("dirichlet:0.5,minimum=0", ["minimum", ">= 1", "0"]),
        ("dirichlet:0.5,minimum=x", ["minimum", "'x'"]),
        ("dirichlet:0.5,ballance", ["ballance", "did you mean 'balance'"]),
        ("dirichlet:0.5,minimum=1,minimum=2", ["minimum", "twice"]),
        ("classes:0", [">= 1", "0"]),
        ("classes:1.5", ["whole number", "classes:1.5"]),
        ("classes:2,assignment=evn", ["evn", "did you mean 'even'"]),
        ("iid:3", ["iid:3"]),
        ("iid,balance", ["balance"]),
        ("", ["Known"]),
    ],
)
def test_parse_refuses_with_value_and_rule(text, words):
    with pytest.raises(ValueError) as error:
        parse(text)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("skew", "clients", "classes", "n", "words"),
    [
        (Dirichlet(0.5), 10, 2, 99, ["10 x 10 = 100", "99"]),
        (Classes(1), 3, 4, 100, ["1 x 3 = 3", "4 classes", "classes:2"]),
        (Classes(5), 3, 4, 100, ["5 of 4 classes"]),
        (Classes(1), 30, 3, 24, ["30 clients", "24 samples"]),
        (Classes(2), 12, 3, 18, ["6 samples", "8 holders"]),
        (Iid(), 5, 2, 4, ["5 clients", "4 samples"]),
        (Iid(), 0, 2, 4, [">= 1", "0"]),
    ],
)
def test_split_refuses_what_cannot_be_dealt(skew, clients, classes, n, words):
    with pytest.raises(ValueError) as error:
        split(np.arange(n) % classes, clients, skew, classes, rng())
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("labels", [[0, 1, 2], [-1, 0], [[0, 1]], [0.0, 1.0]])
def test_split_refuses_labels_that_are_none(labels):
    with pytest.raises(ValueError, match="labels"):
        split(labels, 1, Iid(), 2, rng())


def test_a_class_absent_everywhere():
    y = np.array([0, 1, 3, 4] * 25)
    for skew in (Dirichlet(0.3, minimum=1), Dirichlet(0.3, minimum=1, balance=True), Iid()):
        assert sum(map(len, split(y, 5, skew, 6, rng()).parts)) == 100
    with pytest.raises(ValueError, match="no sample of classes 2, 5"):
        split(y, 6, Classes(2), 6, rng())


def test_niid_bench_assignment_and_the_class_it_leaves_without_a_holder():
    y = np.arange(400) % 4
    parts = split(y, 8, Classes(2, "niid_bench"), 4, rng()).parts
    for i, part in enumerate(parts):
        held = set(y[part].tolist())
        assert i % 4 in held
        assert len(held) == 2
    with pytest.raises(ValueError, match="drew no holder for class"):
        split(np.arange(1000) % 100, 10, Classes(10, "niid_bench"), 100, rng())


def test_small_eta_is_more_skewed_than_large():
    y = np.arange(5000) % 10

    def largest_share(eta):
        parts = split(y, 10, Dirichlet(eta), 10, rng()).parts
        counts = np.stack([np.bincount(y[p], minlength=10) for p in parts])
        return (counts.max(axis=0) / 500).mean()

    assert largest_share(0.05) > 0.6
    assert largest_share(100.0) < 0.2


def test_dirichlet_proportions_are_dirichlet():
    """The mean share is 1/K and its variance (1/K)(1 - 1/K) / (eta K + 1), before any minimum interferes."""
    eta, clients, y = 2.0, 4, np.zeros(20_000, int)
    shares = [len(split(y, clients, Dirichlet(eta, minimum=1), 1, rng(seed)).parts[0]) / 20_000 for seed in range(400)]
    assert np.mean(shares) == pytest.approx(1 / 4, abs=0.03)
    assert np.var(shares) == pytest.approx((1 / 4) * (3 / 4) / (eta * clients + 1), rel=0.25)


def test_balance_bounds_the_largest_client():
    y = np.arange(10_000) % 10

    def largest(balance):
        skew = Dirichlet(0.1, balance=balance)
        return [max(map(len, split(y, 10, skew, 10, rng(seed)).parts)) for seed in range(20)]

    assert max(largest(balance=True)) <= 1000 + 1000  # n/K, and at most one class on top
    assert np.mean(largest(balance=True)) < np.mean(largest(balance=False))


def test_the_repair_takes_from_the_largest_and_is_recorded():
    y = np.arange(1000) % 10
    result = split(y, 100, Dirichlet(0.01), 10, rng())  # n is exactly minimum x K
    assert result.retries == 100
    assert {len(p) for p in result.parts} == {10}
    assert result.moved > 500


def test_a_thousand_clients_in_under_a_second():
    y = np.random.default_rng(0).integers(0, 10, 50_000)
    start = time.process_time()
    p = partition(y, 1000, "dirichlet:0.5", 10, seed=0)
    assert time.process_time() - start < 1
    assert p.counts.sum(axis=1).min() >= 10


def test_many_classes_for_many_clients_end_soon():
    y = np.arange(200_000) % 200
    start = time.process_time()
    for n in (10, 100, 199, 200):
        split(y, 500, Classes(n), 200, rng())
    assert time.process_time() - start < 10


def test_public_split_refuses():
    for fraction in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="at least 0 and below 1"):
            public_split(np.zeros(10, np.int64), fraction, rng())
    with pytest.raises(ValueError, match="selects none of the 4 samples"):
        public_split(np.zeros(4, np.int64), 0.1, rng())


def test_the_public_split_knows_nothing_of_skew_clients_or_labels():
    y = np.arange(500) % 5
    a = partition(y, 5, "classes:1", 5, seed=3)
    b = partition(y[::-1].copy(), 2, "dirichlet:0.1", 5, seed=3)
    assert np.array_equal(a.public, b.public)
    assert len(a.public) == 50


def test_seed_must_not_be_negative():
    with pytest.raises(ValueError, match="seed must be >= 0, got -1"):
        partition([0, 1], 1, "iid", 2, seed=-1, public=0)


def test_the_split_of_a_seed_is_pinned():
    """Other numbers here mean that old runs can no longer be repeated; say so in the release notes."""
    y = np.arange(1000) % 10
    found = {s: partition(y, 10, s, 10, seed=0).sha256[:16] for s in ("dirichlet:0.5", "classes:2", "iid")}
    assert found == {"dirichlet:0.5": "e3981c37d8522c8c", "classes:2": "3a8221b64fd445c8", "iid": "4e26b2aa74af6c7e"}


def test_save_and_load(tmp_path):
    p = partition(np.arange(1000) % 10, 10, "dirichlet:0.05,minimum=5", 10, seed=7)
    path = tmp_path / "partition.npz"
    p.save(path)
    assert [f.name for f in tmp_path.iterdir()] == ["partition.npz"]
    q = Partition.load(path)
    assert (q.sha256, q.skew, q.seed, q.moved, q.retries) == (p.sha256, p.skew, p.seed, p.moved, p.retries)
    assert np.array_equal(q.counts, p.counts)


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    p = partition(np.arange(100) % 2, 2, "iid", 2, seed=0)
    path = tmp_path / "partition.npz"
    p.save(path)
    before = path.read_bytes()
    monkeypatch.setattr(np, "savez_compressed", lambda file, **_: (file.write(b"half"), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        p.save(path)
    assert path.read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["partition.npz"]


def test_load_refuses_other_files(tmp_path):
    path = tmp_path / "partition.npz"
    with pytest.raises(DataError, match="no partition here"):
        Partition.load(path)
    partition(np.arange(100) % 2, 2, "iid", 2, seed=0).save(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"partition\.npz"):
        Partition.load(path)
    np.savez(path, public=np.array([object()], dtype=object))
    with pytest.raises(DataError, match="expected a saved partition"):
        Partition.load(path)
