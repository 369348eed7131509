"""Every method's settings and their defaults, as algorithms.md gives them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from fedcc.core.requests import Recipe
from fedcc.methods import METHODS, make

DEFAULTS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"mu": 0.01},
    "fednova": {"normaliser": "steps", "momentum": 0.9, "server_momentum": 0.0, "statistics": "normalised"},
    "fedrs": {"alpha": 0.5, "rule": "binary"},
    "fedsam": {"rho": 0.1},
    "fedlc": {"tau": 0.5, "denominator": "include"},
    "fedmr": {"mode": "code", "mu": 0.01, "mu2": 0.01},
    "fedconcat": {
        "clusters": 4,
        "classifier_rounds": 200,
        "classifier_steps": 3,
        "classifier_lr": 0.01,
        "histogram": "labels",
        "head_init": "auto",
        "cap": None,
        "cache_features": True,
    },
    "fedvls": {"lam": None, "gamma": 0.005, "suppress": "code"},
    "fedmd": {"loss": "kl", "average": "probs", "digest_epochs": None, "revisit_epochs": None},
    "feddf": {
        "average": "logits",
        "epochs": None,
        "steps": None,
        "clip": 5.0,
        "early_stop": "none",
        "patience": 1000,
    },
    "lsr": {"a": 0.1, "variant": "ls"},
    "fedet": {
        "lam": 0.05,
        "temperature": 1.0,
        "epochs": None,
        "steps": None,
        "lr": None,
        "server_arch": None,
        "reuse_server": False,
    },
    "fedhkt": {"clusters": 4, "kappa": 0.9, "cluster_on": "histogram", "epochs": None, "server_arch": None},
    "fedct": {"public_batch": None, "tie": "lowest"},
    "fedcc": {
        "lam": 0.2,
        "delta": 1e-3,
        "majority_threshold": 0.02,
        "majority_source": "probe",
        "majority_empty": "argmax",
        "majority_recompute": True,
        "alpha_design": "sample",
        "probe_kind": "cdmad_ones",
        "entropy_space": "known",
        "sync_head": "padded",
        "sync_mask_unknown": True,
        "fit_head": "full",
        "epochs_sync": None,
        "epochs_fit": None,
        "epochs_refine": None,
        "refine_joint_batch": True,
        "refine_epoch": "max",
        "bn_recalibrate": "none",
        "trust": 1.0,
        "mirror": False,
    },
    "ssl": {
        "lam": 0.2,
        "threshold": 0.0,
        "cycles": None,
        "refine_joint_batch": True,
        "refine_epoch": "max",
    },
    "local": {},
    "centralized": {},
}


@pytest.mark.parametrize("name", METHODS)
def test_defaults_are_the_specified_ones(name: str) -> None:
    method: Any = make(name)
    assert asdict(method) == DEFAULTS[name]


NO_WEIGHT = [
    ("fedprox", "mu"),
    ("fedsam", "rho"),
    ("fedlc", "tau"),
    ("fedrs", "alpha"),
    ("fedmr", "mu"),
    ("fedmr", "mu2"),
    ("fedvls", "lam"),
    ("fedvls", "gamma"),
    ("lsr", "a"),
    ("fedet", "lam"),
    ("fedhkt", "kappa"),
    ("fedcc", "lam"),
    ("fedcc", "trust"),
    ("ssl", "lam"),
]


@pytest.mark.parametrize(("name", "setting"), NO_WEIGHT)
def test_a_weight_may_be_zero_but_not_negative(name: str, setting: str) -> None:
    make(name, {setting: 0.0})
    with pytest.raises(ValueError, match=rf"{setting} must be .*0.* got -0\.5"):
        make(name, {setting: -0.5})


def test_the_paper_has_one_recipe_for_all() -> None:
    assert Recipe() == Recipe(lr=1e-3, batch=64, epochs=20, schedule="constant", reset="phase")
