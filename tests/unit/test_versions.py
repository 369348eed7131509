"""Records, saved models and settings of earlier versions of a method keep their meaning."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

import fedcc
from fedcc.core.method import LOST
from fedcc.experiments.experiment import Experiment
from fedcc.methods import METHODS, make, recorded_settings

every = pytest.mark.parametrize("name", METHODS)


@every
def test_a_complete_record_is_todays_method(name: str) -> None:
    settings: dict[str, Any] = asdict(make(name))  # type: ignore[call-overload]
    for version in (None, METHODS[name].version):
        assert recorded_settings(name, settings, version) == (settings, None)


@every
def test_what_it_says_of_earlier_versions_is_about_its_options(name: str) -> None:
    kind = METHODS[name]
    options = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    assert sorted(kind.earlier) == list(range(1, kind.version))
    for values in kind.earlier.values():
        assert values.keys() <= options
        make(name, {key: value for key, value in values.items() if value is not LOST})
    assert not kind.retired.keys() & options


def test_a_record_that_lacks_an_option_has_what_its_method_did_then() -> None:
    assert recorded_settings("fednova", {"normaliser": "steps"})[0]["statistics"] == "average"
    assert recorded_settings("FedNova", {"normaliser": "steps"})[0]["statistics"] == "average"
    assert recorded_settings("fednova", {}, 1)[0]["statistics"] == "average"
    assert recorded_settings("fednova", {}, 2)[0]["statistics"] == "normalised"
    assert recorded_settings("fednova", {"statistics": "normalised"})[0]["statistics"] == "normalised"
    settings, reason = recorded_settings("fedmd", {}, 1)
    assert (settings["loss"], settings["average"], reason) == ("l1", "logits", None)
    assert recorded_settings("fedcc", {"lam": 0.1})[0]["trust"] == 1.0  # an option that came without another version


@pytest.mark.parametrize(
    ("settings", "version"), [({"clusters": 4}, None), ({}, 1), ({"classifier_lr": 0.1}, 1), ({}, 3)]
)
def test_a_record_of_another_algorithm_says_so(settings: dict[str, Any], version: int | None) -> None:
    completed, reason = recorded_settings("fedconcat", settings, version)
    assert reason == f"version {version or 1} of FedConcat is another algorithm than version 2"
    assert make("fedconcat", completed)  # its models still predict


def test_an_unknown_method_has_the_settings_of_its_record() -> None:
    assert recorded_settings("theirs", {"a": 1}) == ({"a": 1}, None)


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name, kind in METHODS.items() for option in kind.retired]
)
def test_an_option_that_a_method_no_longer_has(name: str, option: str) -> None:
    kept = METHODS[name].retired[option]
    assert make(name, {option: kept}) == make(name)
    assert recorded_settings(name, {option: kept})[1] is None or name == "fedconcat"
    with pytest.raises(ValueError, match=f"no longer has {option}=other"):
        make(name, {option: "other"})
    completed, reason = recorded_settings(name, {option: "other"})
    assert reason == f"{METHODS[name].__name__} no longer has {option}=other"
    assert make(name, completed)


def test_files_name_the_version(tmp_path: Path) -> None:
    experiment = Experiment.resolve("fednova", device="cpu")
    assert experiment.values()["version"] == 2
    assert "--version" not in experiment.command()
    path = tmp_path / "experiment.toml"
    path.write_text(experiment.toml())
    assert Experiment.read(path) == experiment
    path.write_text('method = "fednova"\nversion = 1\n')
    assert Experiment.read(path).settings["statistics"] == "average"
    path.write_text('method = "fednova"\n')
    assert Experiment.read(path).settings["statistics"] == "normalised"  # written by hand, for today's method
    for text, said in (("version = 1", "is another algorithm"), ("version = 'x'", "version must be a whole number")):
        path.write_text(f'method = "fedconcat"\n{text}\n')
        with pytest.raises(ValueError, match=said):
            Experiment.read(path)


def test_an_experiment_may_name_an_option_that_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text('method = "fedcc"\n[settings]\nrefine_epoch = "max"\nmajority_recompute = true\n')
    assert Experiment.read(path).build_method() == fedcc.FedCC()
