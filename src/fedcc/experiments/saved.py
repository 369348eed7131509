"""Saved models: what ``models.json`` says of them, read back and checked."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from fedcc.code import is_reference
from fedcc.core.digests import BESIDE, DIGEST, UNCHECKED, DamagedFile, Unchecked, read_json
from fedcc.core.method import AnyMethod
from fedcc.core.model import Arch, Factory, Model, State, factory_name
from fedcc.core.rng import Key
from fedcc.errors import InputError
from fedcc.experiments.experiment import first_difference
from fedcc.federation import Models, several
from fedcc.methods import METHODS, build_method, recorded_settings
from fedcc.nets import BUILT_IN, build, network
from fedcc.nets.timm_models import Timm

ABOUT, TENSORS = "models.json", "models.safetensors"
BASELINE = "baseline"  # tensors of this name and a client's number: its mean vote (``Trained.baseline``)
FORMAT = 1
ENTRIES = {"method": str, "settings": dict, "classes": int, "view": dict, "dtype": str, "models": dict, "rounds": list,
           "seconds": float | int}  # fmt: skip


def saved_method(folder: Path, about: Mapping[str, Any], given: AnyMethod | str | None) -> AnyMethod:
    """The method of saved models: by its name, or the given one if it is the same with the same settings."""
    name, own, version = about["method"], about.get("method_code"), about.get("version")
    try:
        settings = recorded_settings(name, about["settings"], version)[0]
        if given is None or isinstance(given, str):
            known = own or name
            if given is None and not (is_reference(known) or known.lower() in (*METHODS, "student") or own):
                raise ValueError(f"{name} is your own method: pass the same one to load(..., method=...)")
            given = build_method(given or known, settings)
            settings = asdict(given)  # type: ignore[call-overload]
    except ValueError as error:
        raise ValueError(f"{folder}/{ABOUT}: {error}") from None
    if given.name != name:
        raise ValueError(f"{folder} was saved by {name}, got method={given.name}")
    if version is None or name.lower() in METHODS:  # whose settings are translated from older versions
        version = given.version
    values = {"version": given.version, **asdict(given)}  # type: ignore[call-overload]
    if difference := first_difference(*(json.loads(json.dumps(v)) for v in ({"version": version, **settings}, values))):
        raise ValueError("{}: {} was saved with {}={}, got {}".format(folder, name, *difference))
    return given


def read_about(folder: Path) -> dict[str, Any]:
    """The description of saved models, checked."""
    path = folder / ABOUT
    try:
        about = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        if keeping := _keeping(folder):
            raise InputError(
                f"{folder}: {', '.join(keeping)} keep their models at their sites, so there is nothing to predict with "
                "here; `fedcc federation predict` asks the sites"
            ) from None
        raise FileNotFoundError(f"{folder} holds no saved result: {ABOUT} is missing") from None
    if about.get("format") != FORMAT:
        raise ValueError(f"{path} is not of format {FORMAT}")
    if wrong := [key for key, kind in ENTRIES.items() if not isinstance(about.get(key), kind)]:
        raise DamagedFile(f"{path} is damaged: {wrong[0]!r} is missing or of the wrong kind")
    if not isinstance(about.get("code", {}), dict) or not isinstance(about.get("method_code", ""), str):
        raise DamagedFile(f"{path} is damaged: 'code' must be a table and 'method_code' a text")
    if DIGEST not in about:
        warnings.warn(f"{path} {UNCHECKED}", Unchecked, stacklevel=3)
    return about


def _keeping(folder: Path) -> list[str]:
    """The clients of a federation across machines that kept their models."""
    if not (folder / "summary.json").is_file():
        return []
    return list(read_json(folder / "summary.json").get("federation", {}).get("kept_models", []))


def read_models(
    folder: Path, about: Mapping[str, Any], models: Models | None
) -> tuple[dict[str, Model], dict[int, torch.Tensor]]:
    """Saved models by name, checked against their digest and their networks, and clients' mean votes, if any."""
    path = folder / TENSORS
    try:
        archs = {who: _with_state(arch) for who, arch in rebuild_archs(about["models"], models).items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"{folder / ABOUT} is damaged: {type(error).__name__} {error}") from None
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} holds no saved result: {TENSORS} is missing") from None
    if BESIDE in about and about[BESIDE].get(TENSORS) != hashlib.sha256(content).hexdigest():
        raise DamagedFile(f"{path} is damaged: it is not the file whose {DIGEST} is in {ABOUT}")
    try:
        tensors = safetensors.torch.load(content)
    except (ValueError, safetensors.SafetensorError) as error:
        raise DamagedFile(f"{path} is damaged ({error})") from None
    baseline = {k: tensors.pop(f"{BASELINE}/{k}") for k in _with_baseline(tensors, archs)}
    if wrong := [k for k, mean in baseline.items() if not _is_mean_vote(mean, about["classes"])]:
        raise DamagedFile(f"{path}: the mean vote of client {wrong[0]} must be {about['classes']} probabilities")
    states: dict[str, dict[str, torch.Tensor]] = {who: {} for who in archs}
    for name, value in tensors.items():
        who = next((w for w in archs if name.startswith(f"{w}/")), None)
        if who is None:
            raise DamagedFile(f"{path} has an entry of no model: {name}")
        states[who][name.removeprefix(f"{who}/")] = value
    for who, arch in archs.items():
        check_state(f"{path}, {who}", arch, states[who])
    return {who: Model(arch, states[who]) for who, arch in archs.items()}, baseline


def _with_baseline(tensors: Mapping[str, torch.Tensor], archs: Mapping[str, Arch]) -> list[int]:
    """The clients whose mean vote is stored."""
    clients = (int(who.removeprefix("client/")) for who in archs if who.startswith("client/"))
    return [k for k in clients if f"{BASELINE}/{k}" in tensors]


def _is_mean_vote(mean: torch.Tensor, classes: int) -> bool:
    inside = (mean >= 0) & (mean <= 1 + 1e-6)  # but for rounding
    return mean.shape == (classes,) and mean.is_floating_point() and bool(inside.all())


def _with_state(arch: Arch) -> Arch:
    """The same architecture without files of first weights, which a model with a state does not need."""
    trunks = (trunk.without_weights() if isinstance(trunk, Timm) else trunk for trunk in arch.trunks)
    return replace(arch, trunks=tuple(trunks))


def check_state(where: str, arch: Arch, state: State) -> None:
    """Refuse a state whose entries are not those of its network, or not finite."""
    expected = build(arch, Key(0)).state_dict()
    for name in sorted(expected.keys() | state.keys()):
        fresh, value = expected.get(name), state.get(name)
        if fresh is None or value is None or fresh.shape != value.shape:
            shapes = [None if v is None else tuple(v.shape) for v in (fresh, value)]
            raise DamagedFile(f"{where}: {name} should be {shapes[0]}, found {shapes[1]}")
        doubled = fresh.is_floating_point() and value.dtype == torch.float64  # a run in fp64
        if value.dtype != fresh.dtype and not doubled:
            raise DamagedFile(f"{where}: {name} should be {fresh.dtype}, found {value.dtype}")
        if not bool((value.isfinite() | ~fresh.isfinite()).all()):  # a network may have infinite constants
            raise DamagedFile(f"{where}: {name} has values that are not finite")


def describe_archs(archs: Mapping[str, Arch]) -> dict[str, Any]:
    """Architectures as plain values, from which :func:`rebuild_archs` makes them again."""
    own = _labels(t for arch in archs.values() for t in arch.trunks if not isinstance(t, BUILT_IN))
    return {
        who: {
            "trunks": [f"own:{own[t]}" if t in own else str(t) for t in arch.trunks],
            "outputs": arch.outputs,
            "shape": list(arch.shape),
            "tokens": arch.tokens,
        }
        for who, arch in archs.items()
    }


def _labels(factories: Iterable[Factory]) -> dict[Factory, str]:
    """Names of the caller's own networks; networks of the same name (two lambdas) are numbered."""
    labels: dict[Factory, str] = {}
    for factory in dict.fromkeys(factories):
        name = factory_name(factory)
        same = sum(factory_name(f) == name for f in labels)
        labels[factory] = f"{name}#{same + 1}" if same else name
    return labels


def rebuild_archs(descriptions: Mapping[str, Any], models: Models | None) -> dict[str, Arch]:
    """The architectures of saved models; the caller's own networks are looked up in ``models`` by name."""
    factories = [m for m in several(models) if not isinstance(m, str)] if models is not None else []
    own = {label: factory for factory, label in _labels(factories).items()}
    archs = {}
    for who, about in descriptions.items():
        shape, trunks = tuple(about["shape"]), []
        for name in about["trunks"]:
            label = name.removeprefix("own:")
            if name == label:
                trunks.append(network(name, shape))
            elif label in own:
                trunks.append(own[label])
            else:
                raise ValueError(
                    f"{who} is your own network, {label}: pass the same models to load(..., models=...)"
                    + (f", got {', '.join(own)}" if own else "")
                )
        archs[who] = Arch(tuple(trunks), about["outputs"], shape, about["tokens"])
    return archs
