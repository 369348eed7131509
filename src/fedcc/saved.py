"""Trained models as files: ``models.safetensors``, and ``models.json`` that says what they are."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from fedcc.core.digests import BESIDE, DIGEST, UNCHECKED, DamagedFile, Unchecked, read_json, write_json
from fedcc.core.files import make_folder, written_whole
from fedcc.core.model import Arch, Factory, Model, factory_name
from fedcc.core.rng import Key
from fedcc.federation import Models, several
from fedcc.nets import ResNet, build, network

ABOUT, TENSORS = "models.json", "models.safetensors"
FORMAT = 1
ENTRIES = {"method": str, "settings": dict, "classes": int, "view": dict, "dtype": str, "models": dict, "rounds": list,
           "seconds": float | int}  # fmt: skip


def write_models(place: Path, models: Mapping[str, Model], about: Mapping[str, Any]) -> None:
    """Write models by name, and what else is known about them."""
    from safetensors.torch import save

    make_folder(place)
    content = save(
        {  # copies: models may share tensors (FedConcat's encoders), which the format refuses
            f"{who}/{n}": v.cpu().clone(memory_format=torch.contiguous_format)
            for who, m in models.items()
            for n, v in m.state.items()
        }
    )
    with written_whole(place / TENSORS) as file:
        file.write(content)
    archs = described({who: m.arch for who, m in models.items()})
    digests = {TENSORS: hashlib.sha256(content).hexdigest()}
    write_json(place / ABOUT, {"format": FORMAT, **about, "models": archs, BESIDE: digests})


def read_about(place: Path) -> dict[str, Any]:
    """What is known about saved models, checked."""
    path = place / ABOUT
    try:
        about = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{place} holds no saved result: {ABOUT} is missing") from None
    if about.get("format") != FORMAT:
        raise ValueError(f"{path} is not of format {FORMAT}")
    lacking = [key for key, kind in ENTRIES.items() if not isinstance(about.get(key), kind)]
    if lacking:
        raise DamagedFile(f"{path} is damaged: {lacking[0]!r} is missing or of the wrong kind")
    if DIGEST not in about:
        warnings.warn(f"{path} {UNCHECKED}", Unchecked, stacklevel=3)
    return about


def read_models(place: Path, about: Mapping[str, Any], models: Models | None) -> dict[str, Model]:
    """Saved models by name, checked against their digest and their networks."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    path = place / TENSORS
    try:
        archs = rebuilt(about["models"], models)
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"{place / ABOUT} is damaged: {type(error).__name__} {error}") from None
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{place} holds no saved result: {TENSORS} is missing") from None
    if BESIDE in about and about[BESIDE].get(TENSORS) != hashlib.sha256(content).hexdigest():
        raise DamagedFile(f"{path} is damaged: it is not the file whose {DIGEST} is in {ABOUT}")
    try:
        tensors = load(content)
    except (ValueError, SafetensorError) as error:
        raise DamagedFile(f"{path} is damaged ({error})") from None
    states: dict[str, dict[str, torch.Tensor]] = {who: {} for who in archs}
    for name, value in tensors.items():
        who = next((w for w in archs if name.startswith(f"{w}/")), None)
        if who is None:
            raise DamagedFile(f"{path} has an entry of nobody: {name}")
        states[who][name.removeprefix(f"{who}/")] = value
    return {who: _checked(f"{path}, {who}", Model(arch, states[who])) for who, arch in archs.items()}


def _checked(place: str, model: Model) -> Model:
    """The model, if its entries are those that its network has, and finite."""
    expected = build(model.arch, Key(0)).state_dict()
    for name in sorted(expected.keys() | model.state.keys()):
        fresh, value = expected.get(name), model.state.get(name)
        if fresh is None or value is None or fresh.shape != value.shape:
            should, found = (tuple(v.shape) if v is not None else None for v in (fresh, value))
            raise DamagedFile(f"{place}: {name} should be {should}, found {found}")
        doubled = fresh.is_floating_point() and value.dtype == torch.float64  # a run in fp64
        if value.dtype != fresh.dtype and not doubled:
            raise DamagedFile(f"{place}: {name} should be {fresh.dtype}, found {value.dtype}")
        if not bool((value.isfinite() | ~fresh.isfinite()).all()):  # a network may have infinite constants
            raise DamagedFile(f"{place}: {name} has values that are not finite")
    return model


# ------------------------------------------------------------------------------------------------------- architectures


def described(archs: Mapping[str, Arch]) -> dict[str, Any]:
    """Architectures as plain values, from which :func:`rebuilt` makes them again."""
    own = _labels(t for arch in archs.values() for t in arch.trunks if not isinstance(t, ResNet))
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
    """The caller's own networks by name; those of one name (two lambdas) are numbered in their order."""
    labels: dict[Factory, str] = {}
    for factory in dict.fromkeys(factories):
        name = factory_name(factory)
        same = sum(factory_name(f) == name for f in labels)
        labels[factory] = f"{name}#{same + 1}" if same else name
    return labels


def rebuilt(descriptions: Mapping[str, Any], models: Models | None) -> dict[str, Arch]:
    """The architectures of saved models; networks of the caller's own are found among ``models`` by name."""
    given = several(models) if models is not None else ()
    own = {label: factory for factory, label in _labels(m for m in given if not isinstance(m, str)).items()}
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
                    f"{who} is a network of yours, {label}: give load(..., models=...) the same as before"
                    + (f", got {', '.join(own)}" if own else "")
                )
        archs[who] = Arch(tuple(trunks), about["outputs"], shape, about["tokens"])
    return archs
