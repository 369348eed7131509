"""`--validation`: a part of each client's samples is held out and takes the place of the test set."""

from __future__ import annotations

import pytest
import torch

from fedcc import Federation
from fedcc.experiments.experiment import Experiment


def rows(federation: Federation) -> list[set[bytes]]:
    """The images of each client, by content."""
    return [{image.numpy().tobytes() for image in samples.x} for samples in federation.private]


def test_what_is_held_out_is_tested_and_not_trained_on() -> None:
    whole = Federation.named("digits", "dirichlet:0.5", seed=10)
    held = Federation.named("digits", "dirichlet:0.5", seed=10, validation=0.1)
    tested = {image.numpy().tobytes() for image in held.test.x}
    for before, after, samples in zip(rows(whole), rows(held), whole.private, strict=True):
        assert after < before
        assert before - after <= tested
        assert not after & tested
        assert len(before) - len(after) == pytest.approx(0.1 * len(samples), abs=1)
    assert len(held.test) == sum(len(a) - len(b) for a, b in zip(whole.private, held.private, strict=True))
    assert torch.equal(held.public.x, whole.public.x)
    assert held.partition is not None
    assert held.partition == whole.partition or held.partition.sha256 == whole.partition.sha256  # type: ignore[union-attr]


def test_labels_stay_with_their_images() -> None:
    held = Federation.named("digits", "classes:1", validation=0.3)
    for samples in held.private:
        assert len(samples["y"].unique()) == 1
    assert held.test["y"].bincount(minlength=10).min() > 0


def test_a_client_of_one_sample_keeps_it() -> None:
    held = Federation.named("digits", "iid", clients=1000, validation=0.9)
    assert min(len(s) for s in held.private) == 1


def test_the_seed_decides() -> None:
    a, b, c = (Federation.named("digits", seed=s, validation=0.1).test.x for s in (3, 3, 4))
    assert torch.equal(a, b)
    assert a.shape != c.shape or not torch.equal(a, c)


@pytest.mark.parametrize("value", [-0.1, 1.0, 7])
def test_a_share_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="validation must be at least 0 and below 1"):
        Federation.named("digits", validation=value)
    with pytest.raises(ValueError, match="validation must be at least 0 and below 1"):
        Experiment.resolve("fedavg", validation=float(value))


def test_it_belongs_to_the_experiment() -> None:
    experiment = Experiment.resolve("fedavg", data="digits", validation=0.1)
    assert "--validation 0.1" in experiment.command()
    assert len(experiment.federation().test) == len(Federation.named("digits", validation=0.1).test)
    assert Experiment.resolve("fedavg", data="digits", augment=False).split.augment == "none"
