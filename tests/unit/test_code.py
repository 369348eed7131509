"""Code that the user names: what counts as named, entry points, and timm as far as it can be tried without timm."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedcc import code
from fedcc.core.model import Arch
from fedcc.core.rng import Key
from fedcc.nets import build, network


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "_allowed", set())
    monkeypatch.setattr(code, "_imported", {})


def test_nothing_is_imported_that_was_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loud.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(code.InputError, match="pass --code loud:thing"):
        network("loud:thing", (3,))
    assert "loud" not in sys.modules
    code.allow(["resnet8", "other:thing"], None, 3)
    with pytest.raises(code.InputError, match="loud:thing is code of yours"):
        code.import_reference("loud:thing")


def test_the_current_folder_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that happens to have a module's name does not replace it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    Path("colorsys.py").write_text("rgb_to_hsv = None\n")
    code.allow("colorsys:rgb_to_hsv")
    assert callable(code.import_reference("colorsys:rgb_to_hsv"))


def test_objects_of_python_are_never_imported() -> None:
    with pytest.raises(code.InputError, match="thing was an object in Python"):
        code.import_reference("own:thing")
    code.allow("own:thing")
    with pytest.raises(code.InputError, match="own:thing: own: is reserved for objects in Python; rename the module"):
        code.import_reference("own:thing")


def entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, "fedcc.networks")


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [entry("Square", "math:sqrt"), entry("resnet8", "math:sqrt")]
    monkeypatch.setattr(code, "entry_points", lambda group: points if group == "fedcc.networks" else [])
    assert str(network("SQUARE", (3,))) == "square"
    assert type(network("resnet8", (1, 8, 8))).__name__ == "ResNet"  # ours cannot be replaced
    with pytest.raises(ValueError, match="did you mean 'square'"):
        network("sqare", (3,))
    points.append(entry("square", "math:exp"))
    with pytest.raises(code.InputError, match=r"two packages bring square .* math:sqrt and math:exp"):
        network("square", (3,))
    points[:] = [entry("broken", "no_such_module:thing")]
    with pytest.raises(code.InputError, match=r"broken of fedcc\.networks cannot be imported"):
        network("broken", (3,))


# ------------------------------------------------------------------------------------------------------------- timm


class Net(nn.Module):
    """Stands in for a network of timm."""

    def __init__(self, classes: int, channels: int):
        super().__init__()
        self.stem = nn.Conv2d(channels, 4, 3)
        self.fc = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.stem(x).mean((2, 3)))
        return out


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A module that takes the calls that timm takes, and keeps them."""
    timm, calls = ModuleType("timm"), []  # type: ignore[var-annotated]

    def create_model(name: str, **options: Any) -> nn.Module:
        calls.append({"name": name, **options})
        return Net(options["num_classes"], options["in_chans"])

    timm.create_model = create_model  # type: ignore[attr-defined]
    timm.is_model = lambda name: name in ("resnet18", "vit_tiny")  # type: ignore[attr-defined]
    timm.list_models = lambda: ["resnet18", "vit_tiny"]  # type: ignore[attr-defined]
    fixed = {"vit_tiny": SimpleNamespace(fixed_input_size=True), "resnet18": SimpleNamespace(fixed_input_size=False)}
    timm.models = SimpleNamespace(get_pretrained_cfg=fixed.get)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", timm)
    return calls


def test_timm_is_asked_for_this_input_and_downloads_nothing(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    arch = Arch((network("timm:resnet18", (1, 8, 8)),), 11, (1, 8, 8))
    assert build(arch, Key(0))(torch.zeros(2, 1, 8, 8)).logits.shape == (2, 11)
    assert calls == [{"name": "resnet18", "num_classes": 11, "in_chans": 1}]  # pretrained is False unless said
    network("timm:vit_tiny", (3, 32, 32))(5)
    assert calls[-1] == {"name": "vit_tiny", "num_classes": 5, "in_chans": 3, "img_size": (32, 32)}
    weights = tmp_path / "w.safetensors"
    factory = network(f"timm:resnet18@{weights}", (3, 32, 32))
    with pytest.raises(code.InputError, match="there is no file"):
        factory(5)
    save_file({"a": torch.ones(1)}, weights)
    factory(5)
    assert calls[-1]["pretrained"] is True
    assert calls[-1]["pretrained_cfg_overlay"] == {"file": str(weights), "custom_load": False}
    assert str(network(str(factory), (3, 32, 32))) == str(factory)  # found again by its name


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("timm:resnt18", (3, 32, 32), "unknown network of timm 'resnt18'; did you mean 'resnet18'"),
        ("timm:hf-hub:a/b", (3, 32, 32), "timm:NAME or timm:NAME@FILE.safetensors"),
        ("timm:resnet18@w.pth", (3, 32, 32), "weights are read from FILE.safetensors, got 'w.pth'"),
        ("timm:resnet18", (64,), "takes images"),
    ],
)
def test_names_that_are_none_of_timms(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        network(name, shape)


def test_without_timm_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(code.InputError, match=r"timm:resnet18 needs timm, .*pip install '\.\[timm\]'"):
        network("timm:resnet18", (3, 32, 32))
