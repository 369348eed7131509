"""A method's settings survive an experiment.toml and the command line's ``--set``, and weights have their range."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from test_methods import alternatives

from fedcc.core.options import setting_text
from fedcc.experiments.experiment import Experiment, parse_settings
from fedcc.methods import METHODS, make

WITH: dict[tuple[str, str], dict[str, Any]] = {
    ("fedmd", "loss"): {"average": "logits"},
    ("fedconcat", "cap"): {"cap": 1.5},
}
"""What a value needs beside it, or which one is allowed."""

NAMED = [{"server_arch": "resnet14"}]


def variants(name: str) -> list[dict[str, Any]]:
    """No setting, and each other value of each of them."""
    others = [{setting: value, **WITH.get((name, setting), {})} for setting, value in alternatives(METHODS[name])]
    known = {f.name for f in fields(METHODS[name])}  # type: ignore[arg-type]
    return [{}, *others, *(named for named in NAMED if named.keys() <= known)]


@pytest.mark.parametrize("name", METHODS)
def test_settings_survive_toml(name: str, tmp_path: Path) -> None:
    for settings in variants(name):
        written = Experiment.resolve(name, settings=settings, device="cpu")
        path = tmp_path / "experiment.toml"
        path.write_text(written.toml())
        read = Experiment.read(path)
        assert read == written
        assert read.build_method() == make(name, settings)


@pytest.mark.parametrize("name", METHODS)
def test_settings_survive_the_command_line(name: str) -> None:
    for settings in variants(name):
        method: Any = make(name, settings)
        pairs = [f"{setting}={setting_text(value)}" for setting, value in asdict(method).items()]
        parsed = parse_settings(name, pairs)
        assert parsed == asdict(method)
        assert make(name, parsed) == method
        given = parse_settings(name, [f"{setting}={setting_text(value)}" for setting, value in settings.items()])
        assert make(name, given) == method


WEIGHTS = [
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
    ("comet", "lam"),
    ("fedov", "weight"),
    ("fedntd", "beta"),
    ("moon", "mu"),
    ("fedproto", "lam"),
]


@pytest.mark.parametrize(("name", "setting"), WEIGHTS)
def test_a_weight_may_be_zero_but_not_negative(name: str, setting: str) -> None:
    make(name, {setting: 0.0})
    with pytest.raises(ValueError, match=rf"{setting} must be .*0.* got -0\.5"):
        make(name, {setting: -0.5})
