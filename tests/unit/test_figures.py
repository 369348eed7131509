"""Pictures: every format, whole files, the same numbers give the same bytes."""

from __future__ import annotations

import io
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from fedcc.report.figures import curves_figure, partition_figure, save

CURVES = {"FedCC": [(1, 30.0), (2, 90.0)], "FedAvg": [(1, 10.0), (2, 12.0)], "nothing yet": []}


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (3, 2), (10, 10), (100, 10), (20, 200)])
def test_a_partition_of_any_size(clients: int, classes: int, tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(0, 50, (clients, classes)).tolist()
    with Image.open(save(partition_figure(counts, "a title"), tmp_path / "p.png")) as image:
        image.verify()
        assert 400 < image.width <= 2400
        assert 300 < image.height <= 2400


@pytest.mark.parametrize("ending", ["png", "pdf", "svg", "PNG"])
def test_every_format_is_written_whole(ending: str, tmp_path: Path) -> None:
    path = save(curves_figure(CURVES, "curves", chance=10.0), tmp_path / "new" / f"c.{ending}")
    content = path.read_bytes()
    if ending == "svg":
        assert ElementTree.parse(io.BytesIO(content)).getroot().tag.endswith("svg")
    elif ending == "pdf":
        assert content.startswith(b"%PDF-")
        assert content.rstrip().endswith(b"%%EOF")
    else:
        Image.open(io.BytesIO(content)).load()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
def test_the_same_numbers_give_the_same_bytes(ending: str, tmp_path: Path) -> None:
    one, two = (save(curves_figure(CURVES), tmp_path / f"{i}.{ending}").read_bytes() for i in range(2))
    assert one == two


@pytest.mark.parametrize("name", ["c.jpg", "c", "c.png.txt", ".png"])
def test_other_formats_are_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.png, \.pdf, \.svg, got"):
        save(curves_figure(CURVES), tmp_path / "new" / name)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_the_picture_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(curves_figure(CURVES), tmp_path / "c.png")
    before, figure = path.read_bytes(), curves_figure({})

    def broken(file: io.BufferedWriter, **_: object) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figure, "savefig", broken)
    with pytest.raises(OSError, match="No space left") as error:
        save(figure, path)
    assert error.value.filename == str(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["c.png"]
