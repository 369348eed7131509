"""Pictures: every format, whole files, the same numbers give the same bytes."""

from __future__ import annotations

import base64
import io
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from fedcc.report.analysis_figures import decoded, embeddings_figure, example_figure, margins_figure
from fedcc.report.figures import accuracy_by_bytes, bytes_figure, curves_figure, log_figure, partition_figure, save
from fedcc.report.parts import Traffic

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
        assert b"/Type3" not in content  # font dictionaries are not compressed
        assert b"/FontFile2" in content
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


@pytest.mark.parametrize("rounds", [2, 15, 100])
def test_rounds_after_the_last_are_one_marker(rounds: int) -> None:
    """FedConcat's 200 rounds at the end do not squeeze the curves of the others."""
    other = [(t, 20.0) for t in range(1, rounds + 1)]
    axes = curves_figure({"FedConcat": [*other[:-1], (rounds + 200, 60.0)], "Other": other}, rounds=rounds).axes[0]
    assert axes.get_xlim()[1] < 1.2 * rounds + 2
    line, end, flat = axes.lines
    assert list(line.get_xdata()) == list(range(1, rounds))
    assert (end.get_xdata()[-1] > rounds, end.get_ydata()[-1]) == (True, 60.0)
    assert [line.get_label() for line in (line, flat)] == [
        f"FedConcat 60.0 (\N{BLACK DIAMOND} after {rounds + 200} rounds)", "Other 20.0"
    ]  # fmt: skip
    labels = [t.get_text() for t in axes.get_xticklabels()]
    assert labels[-1] == "later"
    assert all(int(t) <= rounds for t in labels[:-1])


def test_without_later_rounds_the_axis_is_as_ever() -> None:
    assert "later" not in texts(curves_figure(CURVES, rounds=2))


# ------------------------------------------------------------------------------------------- from records and analyses


def texts(figure: Any) -> str:
    """All that is written in a figure."""
    from matplotlib.text import Text

    return "\n".join(t.get_text() for t in figure.findobj(Text))


def drawn(figure: Any, folder: Path) -> None:
    for ending in ("png", "pdf"):
        assert save(figure, folder / f"f.{ending}").stat().st_size > 2000


def boxes(figure: Any) -> dict[str, Any]:
    """Where each text of a figure lies once it is drawn, in pixels; the numbers at ticks are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    ticks = [t for axes in figure.axes for a in (axes.xaxis, axes.yaxis) for t in a.get_ticklabels(which="both")]
    shown = (t for t in figure.findobj(Text) if t.get_visible() and t.get_text() and t not in ticks)
    return {t.get_text(): t.get_window_extent(canvas.get_renderer()) for t in shown}


def record(sent: list[int], accuracy: list[float | None], models: int = 0) -> Any:
    """A run that sent so many bytes in each round."""
    return SimpleNamespace(traffic=Traffic(sum(sent), tuple(sent), models), curve=tuple(accuracy))


def test_bytes_add_up_over_rounds() -> None:
    assert accuracy_by_bytes(record([10, 15, 15], [20.0, None, 40.0])) == [(10, 20.0), (40, 40.0)]
    assert accuracy_by_bytes(record([0, 0], [20.0, 30.0])) == []  # nothing was sent: no place on a log axis
    assert accuracy_by_bytes(record([], [1.0])) == []  # an old record has the sum alone


def test_bytes_figure_shows_the_models_too(tmp_path: Path) -> None:
    runs = {"FedCC": record([10**6, 2 * 10**6], [50.0, 90.0], 5 * 10**6), "FedAvg": record([14], [10.0])}
    figure = bytes_figure(runs, "digits")
    lines = figure.axes[0].get_lines()
    assert [line.get_xdata().tolist()[-1] if hasattr(line.get_xdata(), "tolist") else line.get_xdata()[-1]
            for line in lines] == [3.0, 8.0, 14 / 1e6]  # fmt: skip
    assert "models" in texts(figure)
    assert "models" not in texts(bytes_figure({"FedAvg": runs["FedAvg"]}))
    drawn(figure, tmp_path)
    drawn(bytes_figure({"local": record([0], [9.0])}), tmp_path)


@pytest.mark.parametrize("spread", [1, 10_000])
def test_no_label_is_cut_or_overlaps_another(spread: int) -> None:
    names = ["FedCC", "FedHKT (reconstruction), clusters=10", "FedAvg"]
    runs = {n: record([10**6 * (1 + spread * i)] * 3, [9.0, 8.0, 7.0], 10**7) for i, n in enumerate(names)}
    curves = {n: [(1, 9.0), (2, 8.0)] for n in names}
    for figure in (bytes_figure(runs, "Table I: CIFAR-10, N = 2"), curves_figure(curves, "Table I: CIFAR-10, N = 2")):
        for text, box in boxes(figure).items():
            assert box.x0 >= 0, text
            assert box.x1 <= figure.bbox.x1, text
            assert box.y0 >= 0, text
        (axes,) = figure.axes
        ticks = axes.xaxis.get_ticklabels(which="both")
        ends = sorted((t.get_window_extent().x0, t.get_window_extent().x1) for t in ticks if t.get_text())
        ends = [e for e in ends if axes.bbox.x0 - 1 <= sum(e) / 2 <= axes.bbox.x1 + 1]
        assert len(ends) > 1
        assert all(one[1] < two[0] for one, two in itertools.pairwise(ends))


def test_log_figure_has_a_panel_for_what_was_noted(tmp_path: Path) -> None:
    log = {"alpha": {"0": [0.1, None, 0.3], "1": [None, 0.2, 0.1]}, "w_l": {"0": [1.0, 1.0, 1.0]}}
    figure = log_figure(log, "a title")
    (axes,) = figure.axes
    assert [np.isnan(line.get_ydata()).tolist() for line in axes.get_lines()] == [
        [False, True, False],
        [True, False, False],
    ]
    drawn(figure, tmp_path)
    drawn(log_figure({}), tmp_path)
    drawn(log_figure({"majority": {str(k): [float(k)] for k in range(100)}}), tmp_path)


def histogram(mean: float, place: int) -> dict[str, Any]:
    counts = [0] * 40
    counts[place] = 100
    edges = [round(-1 + i / 20, 2) for i in range(41)]
    return {"edges": edges, "models": [{"name": "clients", "mean": mean, "counts": counts}]}


def test_margins_figure_prints_the_means(tmp_path: Path) -> None:
    unknown = {"edges": [-1, 1], "models": [{"name": "global", "mean": 0.5, "counts": [1]}]}
    methods = {"FedCC": histogram(0.33, 30), "FedAvg": histogram(-0.5, 5), "FedMD": unknown}
    figure = margins_figure(methods, "classes:1")
    (axes,) = figure.axes
    assert (axes.get_yscale(), axes.get_title()) == ("log", "classes:1")
    assert "FedCC, mean +0.33" in texts(figure)
    assert "FedAvg, mean −0.50" in texts(figure)
    assert "FedMD" not in texts(figure)  # it has no margins of clients
    drawn(figure, tmp_path)
    drawn(margins_figure({}), tmp_path)


def test_the_legend_of_margins_hides_no_line() -> None:
    figure = margins_figure({"FedCC": histogram(0.1, 30), "FedAvg": histogram(-0.1, 5)})
    written = boxes(figure)
    (axes,) = figure.axes
    assert not axes.get_legend().get_window_extent().overlaps(axes.bbox)
    assert not axes.get_legend().get_window_extent().overlaps(written["decision margin"])


@pytest.mark.parametrize("classes", [2, 10, 20, 100])
def test_embeddings_figure(classes: int, tmp_path: Path) -> None:
    labels = [i % classes for i in range(200)]
    points = np.random.default_rng(0).normal(size=(200, 2)).tolist()
    both = [{"name": n, "points": points, "purity": p} for n, p in (("local", 0.5), ("global", 0.97))]
    panels = {
        "FedAvg": {"labels": labels, "panels": both},
        "FedCC": {"labels": labels, "panels": both},
        "Centralized": {"labels": labels, "panels": both[1:]},
    }
    figure = embeddings_figure(panels)
    written = texts(figure)
    assert len(figure.axes) == 5
    for text in ("(a) FedAvg local", "(d) FedCC global", "(e) Centralized\nglobal", "purity 0.97"):
        assert text in written
    assert len(figure.legends) == (classes <= 20)
    drawn(figure, tmp_path)
    drawn(embeddings_figure({}), tmp_path)


def address(pixels: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize(
    ("clients", "names", "label", "pixels"),
    [
        (10, [*"0123456789"], 3, np.zeros((8, 8), np.uint8)),
        (3, ["airplane", "ship"], None, np.zeros((32, 32, 3), np.uint8)),
        (60, [f"class {c}" for c in range(100)], 7, np.zeros((32, 32, 3), np.uint8)),
    ],
)
def test_example_figure(clients: int, names: list[str], label: int | None, pixels: np.ndarray, tmp_path: Path) -> None:
    plain = [1 / len(names)] * len(names)
    ours = [0.0] * len(names)
    ours[label or 0] = 1.0
    example = {
        "public": 17, "image": address(pixels), "label": label, "classes": names,
        "clients": [{"client": k, "unknown": [*plain, 0.0], "plain": plain, "weight": 0.1} for k in range(clients)],
        "aggregates": {"unknown": ours, "plain": plain},
        "accuracy": None if label is None else {"unknown": 95.0, "plain": 50.0},
    }  # fmt: skip
    figure = example_figure(example)
    written = texts(figure)
    assert f"FedCC's aggregate: {names[label or 0]} (1.00)" in written
    assert ("hidden label" in written) == (label is not None)
    assert ("20 of 100 classes" in written) == (len(names) == 100)
    assert ("95.0 %" in written) == (label is not None)
    drawn(figure, tmp_path)
    np.testing.assert_array_equal(decoded(example["image"]), pixels)


def test_figures_have_the_widths_of_columns_and_no_label_is_cut_off(tmp_path: Path) -> None:
    """Everything that a report draws, with more methods and longer names than the paper has."""
    import synthetic
    from fedcc.report.gallery import pictures
    from fedcc.report.records import find_records
    from fedcc.report.tables import tables

    given = {"data": "cifar10", "skew": "classes:2"}
    for method in ("fedavg", "fedmd", "fedhkt", "fedconcat", "fedcc"):
        summary = synthetic.record(method, **given)
        synthetic.write(summary, tmp_path / f"{method}.json", analysed=method in ("fedavg", "fedcc"))
    synthetic.write(synthetic.record("fedavg", epochs=85, **given), tmp_path / "long.json")
    seen = set()
    for name, make in pictures(tables(find_records([tmp_path]).runs)):
        figure = make()
        seen.add(name.rpartition("_")[2])
        assert figure.get_figwidth() in (3.5, 7.16), name
        figure.draw_without_rendering()
        drawn, slack = figure.get_tightbbox(), 0.01
        assert -slack <= drawn.x0, name
        assert -slack <= drawn.y0, name
        assert drawn.x1 <= figure.get_figwidth() + slack, name
        assert drawn.y1 <= figure.get_figheight() + slack, name
    assert seen == {"curves", "bytes", "partition", "log", "margins", "embeddings", "example"}
