"""The Python API on federations of the caller's own: what it takes, what it refuses, what it saves and loads."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedcc
from fedcc import FedAvg, FedCC, Federation, Local
from fedcc.core.messages import Weights
from fedcc.core.method import Family, Trained
from fedcc.core.requests import Predict
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples

WIDTH, CLASSES = 6, 3
rng = np.random.default_rng(0)
CENTRES = rng.normal(size=(CLASSES, WIDTH)) * 3


def points(labels: Any) -> np.ndarray:
    return CENTRES[np.asarray(labels)] + rng.normal(size=(len(labels), WIDTH))


def holder(*classes: int, n: int = 40) -> tuple[np.ndarray, np.ndarray]:
    labels = np.array([classes[i % len(classes)] for i in range(n)])
    return points(labels), labels


def mlp(outputs: int, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, outputs))


def plain(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, outputs))


class Deep(nn.Module):
    def __init__(self, outputs: int):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 10), nn.ReLU())
        self.out = nn.Linear(10, outputs)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.body(x))
        return scores


LABELS = np.arange(60) % CLASSES
NEW = points(LABELS)


def federation(models: Any = (mlp, plain, Deep), **changes: Any) -> Federation:
    parts: dict[str, Any] = {
        "clients": [holder(0, 1), holder(1, 2), holder(2, 0)],
        "public": points(LABELS),
        "test": (points(LABELS), LABELS),
        "models": models,
    }
    return Federation.of(**parts | changes)


QUICK: dict[str, Any] = {"rounds": 2, "epochs": 6, "lr": 1e-2, "batch": 16, "device": "cpu"}


# ----------------------------------------------------------------------------------------------- run, predict, save


def test_three_networks_of_the_callers_under_fedcc(tmp_path: Path) -> None:
    result = fedcc.run(FedCC(lam=0.3), federation(), **QUICK)
    assert result.accuracy > 80
    assert [r for r, _ in result.curve] == [1, 2]
    assert result.best[1] == max(a for _, a in result.curve)
    new = NEW
    scores = result.scores(new)
    assert scores.shape == (60, CLASSES)
    assert result.predict(new).tolist() == scores.argmax(-1).tolist()
    assert result.predict(torch.from_numpy(new)).tolist() == result.predict(new.tolist()).tolist()

    result.save(tmp_path / "saved")
    loaded = fedcc.load(tmp_path / "saved", models=[mlp, plain, Deep])
    assert torch.equal(loaded.scores(new), scores)
    assert (loaded.method, loaded.rounds, loaded.seconds) == (result.method, result.rounds, result.seconds)
    assert torch.equal(fedcc.load(tmp_path / "saved", models=(Deep, mlp, plain)).scores(new), scores)  # by name


def test_fedavg_where_it_fits_and_where_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"FedAvg averages weights.*got mlp, plain, Deep"):
        fedcc.run(FedAvg(), federation(), **QUICK)
    result = fedcc.run("fedavg", federation(mlp), **QUICK)
    assert result.accuracy > 60
    new = points(LABELS)
    assert torch.equal(fedcc.load(result.save(tmp_path), models=mlp).scores(new), result.scores(new))


def test_untrained_models_can_be_saved(tmp_path: Path) -> None:
    result = fedcc.run(FedAvg(), federation(mlp), **QUICK | {"epochs": 0})
    assert fedcc.load(result.save(tmp_path), models=mlp).predict(points([0])).shape == (1,)


def test_methods_that_leave_clients_alone_score_by_client() -> None:
    result = fedcc.run(Local(), federation(), **QUICK)
    assert result.scores(points(LABELS)).shape == (3, 60, CLASSES)
    assert 0 < result.accuracy < 100


def test_the_same_seed_gives_the_same_numbers_and_leaves_the_callers_generators_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    f = federation()
    one, two, other = (fedcc.run(FedCC(), f, **QUICK | {"seed": seed}).scores(NEW) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_the_federation_is_apart_from_the_callers_arrays() -> None:
    x, y = holder(0, 1, 2)
    f = federation(mlp, clients=[(x, y)])
    before = f.private[0].x.clone()
    x[:] = 0
    assert torch.equal(f.private[0].x, before)


def bag(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(8 * 5, outputs))


def conv(channels: int, outputs: int) -> nn.Module:
    body = (nn.Conv2d(channels, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(16, outputs))


@pytest.mark.parametrize(
    ("make", "model", "dtype"),
    [
        (lambda n: rng.normal(size=(n, WIDTH)), mlp, "float32"),
        (lambda n: rng.normal(size=(n, WIDTH)).tolist(), mlp, "float32"),
        (lambda n: np.asfortranarray(rng.normal(size=(n, WIDTH)))[::-1], mlp, "float32"),
        (lambda n: torch.randn(n, WIDTH, dtype=torch.float64, requires_grad=True), mlp, "float32"),
        (lambda n: rng.random((n, WIDTH)) > 0.5, mlp, "float32"),
        (lambda n: rng.integers(0, 256, (n, 3, 8, 8), dtype=np.uint8), "resnet8", "uint8"),
        (lambda n: torch.rand(n, 1, 8, 8), "resnet8", "float32"),
        (lambda n: rng.random((n, 2, 6, 5)).astype(np.float32), partial(conv, 2), "float32"),
        (lambda n: rng.integers(0, 20, (n, 5)), bag, "int64"),
        (lambda n: rng.integers(0, 20, (n, 5)).astype(np.uint16), bag, "int64"),
        (lambda n: torch.randint(0, 20, (n, 5), dtype=torch.int32), bag, "int64"),
    ],
    ids=[
        "float64",
        "lists",
        "strides",
        "gradients",
        "switches",
        "uint8",
        "images",
        "oblong",
        "tokens",
        "uint16",
        "int32",
    ],
)
def test_kinds_of_inputs(make: Callable[[int], Any], model: Any, dtype: str, tmp_path: Path) -> None:
    labels = [0, 1, 2] * 4
    f = Federation.of([(make(12), labels), (make(12), torch.tensor(labels))], make(9), (make(6), labels[:6]), model)
    result = fedcc.run(FedCC(), f, rounds=1, epochs=1, batch=8, device="cpu")
    assert result.dtype == dtype
    new = make(4)
    for kind in ("noise", "white", "black", "mean") if dtype == "int64" else ():
        fedcc.run(FedCC(probe_kind=kind), f, rounds=1, epochs=0, batch=8, device="cpu")  # type: ignore[arg-type]
    saved = result.save(tmp_path)
    loaded = fedcc.load(saved) if isinstance(model, str) else fedcc.load(saved, models=model)
    assert torch.equal(loaded.scores(new), result.scores(new))
    assert bool(torch.isfinite(result.scores(new)).all())


# ------------------------------------------------------------------------------------------------------- refusals

GOOD = holder(0, 1, 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clients": []}, r"at least one client"),
        ({"clients": [GOOD, (np.empty((0, WIDTH)), np.empty(0, int))]}, r"client 1 needs inputs .*at least one"),
        ({"clients": [GOOD, ([], [])]}, r"client 1 needs inputs of shape .*got \(0,\)"),
        ({"clients": [GOOD, GOOD[0]]}, r"client 1 must be a pair"),
        ({"clients": [GOOD, (*GOOD, 3)]}, r"client 1 must be a pair"),
        ({"test": GOOD[0]}, r"the test set must be a pair"),
        ({"clients": [(GOOD[0], GOOD[1][:-1])]}, r"client 0 has 40 inputs and 39 labels"),
        ({"clients": [(GOOD[0], GOOD[1] + 0.5)]}, r"client 0 needs whole-number labels .*float64"),
        ({"clients": [(GOOD[0], GOOD[1] > 1)]}, r"labels must be of one kind, got integers and strings"),
        ({"clients": [(GOOD[0], GOOD[1][:, None])]}, r"whole-number labels of shape .*\(40, 1\)"),
        ({"clients": [(GOOD[0], ["cat"] * 40)]}, r"labels must be of one kind, got integers and strings"),
        ({"clients": [(GOOD[0], [*["cat"] * 39, None])]}, r"1 samples of client 0 have no label"),
        ({"clients": [(GOOD[0], [[1], [1, 2]])]}, r"the labels of client 0: expected an array of numbers"),
        ({"clients": [(GOOD[0], GOOD[1] - 1)]}, r"no client holds class 2, so nobody"),
        ({"clients": [(GOOD[0][:, 0], GOOD[1])]}, r"client 0 needs inputs of shape .*\(40,\)"),
        ({"clients": [(GOOD[0][:, :4], GOOD[1])]}, r"inputs must be alike.*\(6,\).*client 0 .*\(4,\)"),
        ({"clients": [((GOOD[0] * 9).astype(int), GOOD[1])]}, r"inputs must be alike.*float32.*client 0 has .*int64"),
        ({"clients": [([[1.0], [1.0, 2.0]], [0, 1])]}, r"client 0: expected an array of numbers"),
        ({"clients": [(np.full((40, WIDTH), np.nan), GOOD[1])]}, r"client 0 has inputs that are not finite"),
        ({"public": np.full((9, WIDTH), np.inf)}, r"the public set has inputs that are not finite"),
        ({"public": np.empty((0, WIDTH))}, r"the public set needs inputs"),
        ({"public": points(LABELS)[:, :2]}, r"inputs must be alike"),
        ({"test": (points([0]), [5])}, r"no client holds class 5, so"),
        ({"clients": [holder(0, 1)]}, r"no client holds class 2, so nobody can learn it; .*allow_missing"),
        ({"classes": 2}, r"labels must lie in 0 .. 1, got 2"),
        ({"classes": 4}, r"no client holds class 3"),
        ({"classes": 3, "clients": [(GOOD[0], GOOD[1] - 1)]}, r"classes is for labels from 0 to 2, got -1 among them"),
        ({"classes": 0}, r"classes must be at least 1, got 0"),
        ({"classes": 2.5}, r"classes must be a whole number, got 2.5"),
        ({"models": []}, r"at least one network"),
        ({"models": " , "}, r"at least one network"),
        ({"models": "resnt8"}, r"did you mean 'resnet8'"),
        ({"models": "resnet8"}, r"resnet8 takes square images .*\(6,\)"),
    ],
)  # fmt: skip
def test_a_federation_is_checked_where_it_is_made(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        federation(**{"models": mlp} | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clients": [(np.ma.masked_greater(GOOD[0], 1), GOOD[1])]}, r"client 0: masked values"),
        ({"clients": [(list(np.ma.masked_greater(GOOD[0], 1)), GOOD[1])]}, r"client 0: masked values"),
        ({"clients": [(GOOD[0], np.ma.masked_equal(GOOD[1], 2))]}, r"the labels of client 0: masked values"),
        ({"public": np.ma.masked_greater(GOOD[0], 1)}, r"the public set: masked values"),
        ({"clients": [(GOOD[0] + 1j, GOOD[1])]}, r"client 0: expected an array of numbers, .*complex"),
        ({"clients": [(torch.tensor(GOOD[0] + 1j), GOOD[1])]}, r"client 0: expected an array of numbers, .*complex"),
        ({"clients": [(torch.tensor(GOOD[0]).to_sparse(), GOOD[1])]}, r"client 0: .*pass \.to_dense\(\)"),
        ({"clients": [(np.full((40, WIDTH), 2**63, np.uint64), GOOD[1])]}, r"client 0: .*9223372036854775808 is above"),
        ({"clients": [(GOOD[0], GOOD[1].astype(np.uint64) + 2**63)]}, r"the labels of client 0: .* is above"),
        ({"clients": [(GOOD[0], torch.full((40,), 2**63, dtype=torch.uint64))]}, r"labels of client 0: .* is above"),
        ({"clients": [(GOOD[0].astype(object), GOOD[1])]}, r"client 0: expected an array of numbers"),
        ({"clients": [(GOOD[0] * 1e300, GOOD[1])]}, r"client 0 has inputs that are not finite"),
        ({"classes": 65_537}, r"classes must be at most 65536, got 65537"),
    ],
)  # fmt: skip
def test_numbers_that_would_be_changed_in_silence_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        federation(**{"models": mlp} | changes)


def test_a_masked_array_without_a_masked_value_is_an_array() -> None:
    f = federation(mlp, clients=[(np.ma.masked_array(GOOD[0]), np.ma.masked_array(GOOD[1]))])
    assert np.allclose(f.private[0].x, GOOD[0])


def test_unsigned_numbers_that_fit_are_taken() -> None:
    f = federation(mlp, clients=[(GOOD[0], torch.tensor(GOOD[1]).to(torch.uint64)), (GOOD[0], GOOD[1].astype("u4"))])
    assert f.private[0]["y"].tolist() == f.private[1]["y"].tolist() == GOOD[1].tolist()


# --------------------------------------------------------------------------------------------------------- labels


def relabelled(values: list[int], **changes: Any) -> Federation:
    """The same federation with other labels for its classes."""
    names = np.array(values)
    pairs = [(x, names[y]) for x, y in (holder(0, 1), holder(1, 2), holder(2, 0))]
    return federation(mlp, **{"clients": pairs, "test": (points(LABELS), names[LABELS])} | changes)


@pytest.mark.parametrize("values", [[1, 2, 3], [7, 3_000_000_000, 2**62], [0, 1, 5]])
def test_labels_are_the_callers_own(values: list[int], tmp_path: Path) -> None:
    f = relabelled(values)
    assert f.classes == CLASSES  # none that nobody has
    assert f.labels == tuple(values)
    assert f.counts().tolist() == [[20, 20, 0], [0, 20, 20], [20, 0, 20]]
    result = fedcc.run(FedCC(), f, **QUICK)
    predicted = result.predict(NEW)
    assert set(predicted.tolist()) <= set(values)
    assert float(np.mean(predicted.numpy() == np.array(values)[LABELS])) > 0.8
    assert result.scores(NEW).shape == (60, CLASSES)
    loaded = fedcc.load(result.save(tmp_path), models=mlp)
    assert loaded.labels == tuple(values)
    assert torch.equal(loaded.predict(NEW), predicted)
    about = json.loads((tmp_path / "models.json").read_text())
    assert about["labels"] == values


def test_labels_from_zero_and_given_classes_stay_as_they_are() -> None:
    assert federation(mlp).labels == ()
    f = relabelled([0, 1, 3], classes=5, allow_missing=True)
    assert (f.classes, f.labels) == (5, ())
    assert f.counts().sum(0).tolist() == [40, 40, 0, 40, 0]
    with pytest.raises(ValueError, match=r"labels must lie in 0 \.\. 2, got 3"):
        relabelled([1, 2, 3], classes=3)
    with pytest.raises(ValueError, match=r"no client holds class 900, so nobody can learn it"):
        relabelled([1, 2, 3], test=(points([0]), [900]))


def test_more_labels_than_classes_may_be() -> None:
    x = np.zeros((65_537, WIDTH), np.float32)
    with pytest.raises(ValueError, match=r"labels must have at most 65,536 distinct values, got 65,537"):
        federation(mlp, clients=[(x, np.arange(65_537) * 10)], test=(x[:1], [0]))


def test_a_table_of_integers_is_told_from_tokens() -> None:
    x = np.arange(40 * WIDTH).reshape(40, WIDTH)
    f = federation(mlp, clients=[(x, GOOD[1])], public=x, test=(x, GOOD[1]))
    with pytest.raises(ValueError, match=r"mlp does not take integers of shape \(6,\) .*integers are tokens.*float32"):
        fedcc.run(FedCC(), f, **QUICK)


def test_absent_classes_can_be_meant() -> None:
    f = federation(mlp, clients=[holder(0, 1), holder(1)], allow_missing=True)
    assert f.counts().tolist() == [[20, 20, 0], [0, 40, 0]]


def test_networks_are_given_by_name_or_factory() -> None:
    with pytest.raises(TypeError, match=r"factories .*got an object of type Deep"):
        federation([Deep(3)])
    with pytest.raises(TypeError, match=r"factories .*got an object of type int"):
        federation([3])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"rounds": 1.5}, "rounds must be a whole number, got 1.5"),
        ({"epochs": -1}, "epochs must be at least 0, got -1"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"lr": -1.0}, "lr must be at least 0, got -1"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"participation": 0.0}, "participation must be above 0"),
        ({"wire": "fp8"}, "wire must be one of fp32, fp16, int8"),
        ({"precision": "int8"}, "precision must be one of"),
        ({"device": "gpu"}, "unknown device 'gpu'; did you mean 'cpu'"),
        ({"method": "fedccc"}, "did you mean 'fedcc'"),
    ],
)
def test_a_run_is_checked_too(changes: dict[str, Any], said: str) -> None:
    words: dict[str, Any] = {"method": "fedcc", "federation": federation(mlp), **QUICK} | changes
    with pytest.raises(ValueError, match=said):
        fedcc.run(**words)


def test_a_method_is_an_instance() -> None:
    with pytest.raises(TypeError, match=r"an instance such as FedCC\(\)"):
        fedcc.run(FedCC, federation(mlp))  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------- what load and predict refuse


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fedcc.run(FedCC(), federation(), **QUICK | {"epochs": 0}).save(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    for name in ("models.json", "models.safetensors"):
        (tmp_path / name).write_bytes((saved / name).read_bytes())
    return tmp_path


def load(folder: Path) -> fedcc.Result:
    return fedcc.load(folder, models=[mlp, plain, Deep])


def test_own_networks_are_asked_for(saved: Path) -> None:
    with pytest.raises(
        ValueError, match=r"client/0 is your own network, mlp: pass .* to load\(\.\.\., models=\.\.\.\)"
    ):
        fedcc.load(saved)
    with pytest.raises(ValueError, match=r"client/2 is your own network, Deep: .*, got mlp, plain"):
        fedcc.load(saved, models=[mlp, plain])


def test_nameless_networks_are_told_apart(tmp_path: Path) -> None:
    """Two lambdas have one name, and a partial's is that of its function."""
    pair = [lambda o: mlp(o, 8), lambda o: nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, o))]
    for i, models in enumerate((pair, [partial(mlp, width=5), partial(mlp, width=7)])):
        result = fedcc.run(FedCC(), federation(models), **QUICK | {"epochs": 1})
        loaded = fedcc.load(result.save(tmp_path / str(i)), models=models)
        assert torch.equal(loaded.scores(NEW), result.scores(NEW))
    with pytest.raises(ValueError, match=r"your own network, mlp\(width=7\)"):
        fedcc.load(tmp_path / "1", models=partial(mlp, width=5))


def test_other_networks_under_the_same_name_are_noticed(saved: Path) -> None:
    def other(outputs: int) -> nn.Module:
        return mlp(outputs, width=9)

    other.__qualname__ = "mlp"
    with pytest.raises(ValueError, match=r"client/0: .* should be .* found"):
        fedcc.load(saved, models=[other, plain, Deep])


def test_missing_and_damaged_files(copy: Path) -> None:
    from fedcc.core.digests import write_json

    with pytest.raises(FileNotFoundError, match=r"nowhere holds no saved result: models\.json is missing"):
        load(copy / "nowhere")
    tensors, about = (copy / "models.safetensors").read_bytes(), json.loads((copy / "models.json").read_text())
    for content in (tensors[:-100], tensors[:5], b"", b"\xff" * 100):
        (copy / "models.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=r"models\.safetensors is damaged"):
            load(copy)
    (copy / "models.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"models\.safetensors is missing"):
        load(copy)
    (copy / "models.safetensors").write_bytes(tensors)
    for text in ("", "{", '{"format": 1', "\x00", "[]"):
        (copy / "models.json").write_text(text)
        with pytest.raises(ValueError, match=r"models\.json is damaged"):
            load(copy)
    for altered in ({}, about | {"format": 99}):
        write_json(copy / "models.json", altered)
        with pytest.raises(ValueError, match=r"models\.json is not of format 1"):
            load(copy)


@pytest.mark.filterwarnings("ignore:.*older version:UserWarning")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": None}, "'method' is missing"),
        ({"method": 3}, "'method' is missing or of the wrong kind"),
        ({"method": "FedCD"}, "FedCD is your own method"),
        ({"settings": {"lamb": 1}}, "did you mean 'lam'"),
        ({"settings": {"lam": -1}}, "lam must be at least 0"),
        ({"view": {"zoom": 1}}, "models.json is damaged: TypeError"),
        ({"models": {"client/0": {"trunks": ["own:mlp"]}}}, "models.json is damaged: KeyError 'shape'"),
        ({"models": {"client/0": 3}}, "models.json is damaged"),
        ({"rounds": 3}, "'rounds' is missing or of the wrong kind"),
        ({"labels": [1, 2]}, "'labels' must be 3 ascending numbers"),
        ({"labels": [3, 2, 1]}, "'labels' must be 3 ascending numbers"),
        ({"labels": [1, 2, "3"]}, "'labels' must be 3 ascending numbers"),
    ],
)
def test_altered_descriptions(change: dict[str, Any], said: str, copy: Path) -> None:
    from fedcc.core.digests import write_json

    about = json.loads((copy / "models.json").read_text())
    older(copy, **change)
    with pytest.raises(ValueError, match=said):
        load(copy)
    write_json(copy / "models.json", about | change)
    with pytest.raises(ValueError, match=said):
        load(copy)


def older(folder: Path, **changes: Any) -> None:
    """Make the folder one of a version that wrote no digests."""
    about = json.loads((folder / "models.json").read_text()) | changes
    (folder / "models.json").write_text(json.dumps({k: v for k, v in about.items() if k not in ("sha256", "files")}))


@pytest.mark.filterwarnings("ignore:.*older version:UserWarning")
@pytest.mark.parametrize("digest", [True, False])
def test_altered_tensors(digest: bool, copy: Path) -> None:
    path = copy / "models.safetensors"
    tensors = load_file(path)
    name = "client/0/head.weight"
    weight = tensors[name]
    if not digest:
        older(copy)
    whole = tensors | {"client/7/head.weight": weight.clone()}
    for altered, said in (
        (tensors | {name: weight[:2].clone()}, r"client/0: head.weight should be \(4, 8\), found \(2, 8\)"),
        ({n: t for n, t in tensors.items() if n != name}, r"head.weight should be \(4, 8\), found None"),
        (whole, "an entry of no model: client/7"),
        (tensors | {name: weight.view(torch.int32)}, r"head.weight should be torch.float32, found torch.int32"),
        (tensors | {name: weight.half()}, r"head.weight should be torch.float32, found torch.float16"),
        (tensors | {name: weight * math.nan}, "client/0: head.weight has values that are not finite"),
    ):
        save_file(altered, path)
        with pytest.raises(
            ValueError, match=rf"models\.safetensors{' is damaged: it is not' if digest else '.*' + said}"
        ):
            load(copy)


def test_every_altered_byte_of_the_models_is_noticed(copy: Path) -> None:
    path = copy / "models.safetensors"
    content = path.read_bytes()
    for place in random.Random(0).sample(range(len(content)), 50):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match=r"models\.safetensors is damaged"):
            load(copy)


@pytest.mark.parametrize("change", [{"view": {"scale": 2.0}}, {"settings": {"mirror": True}}, {"classes": 2}])
def test_altered_values_are_noticed(change: dict[str, Any], copy: Path) -> None:
    about = json.loads((copy / "models.json").read_text())
    for key, value in change.items():
        about[key] = about[key] | value if isinstance(value, dict) else value
    (copy / "models.json").write_text(json.dumps(about, indent=1))
    with pytest.raises(ValueError, match=r"models\.json is damaged: its content does not match its sha256"):
        load(copy)


def test_a_folder_of_an_older_version_loads_with_a_note(copy: Path) -> None:
    expected = load(copy).scores(NEW)
    older(copy)
    with pytest.warns(UserWarning, match=r"models\.json was written by an older version, without a digest"):
        found = load(copy)
    assert torch.equal(found.scores(NEW), expected)


def test_models_in_double_precision_load(tmp_path: Path) -> None:
    result = fedcc.run(FedCC(), federation(), precision="fp64", **QUICK)
    assert torch.equal(load(result.save(tmp_path)).scores(NEW), result.scores(NEW))


def test_infinite_constants_of_a_network_load(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self, outputs: int):
            super().__init__()
            self.body = mlp(outputs)
            self.register_buffer("mask", torch.tensor([0.0, -math.inf]))

        def forward(self, x: torch.Tensor) -> Any:
            return self.body(x)

    result = fedcc.run("fedmd", federation([Masked]), **QUICK | {"epochs": 0})
    assert torch.equal(fedcc.load(result.save(tmp_path), models=[Masked]).scores(NEW), result.scores(NEW))


def test_predict_takes_inputs_like_those_of_training(saved: Path) -> None:
    result = load(saved)
    for x, said in (
        (points([0])[:, :2], r"float32 of shape \(6,\), got float32 of shape \(2,\)"),
        (np.ones((2, WIDTH), int), r"float32 of shape \(6,\), got int64"),
        (np.ones((2, WIDTH), np.uint8), r"got uint8"),
        (points([0])[0], r"predict needs inputs of shape \[samples"),
        (np.empty((0, WIDTH)), r"at least one sample"),
        ([["a"] * WIDTH], r"expected an array of numbers"),
        (np.full((1, WIDTH), np.nan), r"not finite"),
    ):
        with pytest.raises(ValueError, match=said):
            result.predict(x)


# ------------------------------------------------------------------------------------------------ a method of one's own


@dataclass(frozen=True)
class Newest(fedcc.Method[Weights, Weights]):
    """The server keeps what the client with the most samples sends."""

    family: ClassVar[Family] = "parameters"
    source: ClassVar[str] = "this test"

    boost: float = fedcc.option(1.0, "weights are multiplied by this", low=0)

    async def start(self, s: Server) -> Mapping[int, Weights]:
        s.models["kept"] = await s.init(next(iter(s.archs.values())))
        return s.to_all(Weights.of(s.models["kept"]))

    async def client(self, c: Client, down: Weights | None) -> Weights:
        assert down is not None
        from fedcc.losses import CrossEntropy

        c.model = c.model.with_(down.state)
        await c.fit("fit", CrossEntropy("private"), private=c.private)
        c.log["samples"] = len(c.private)
        return Weights.of(c.model, len(c.private))

    async def server(self, s: Server, ups: Mapping[int, Weights]) -> Mapping[int, Weights]:
        newest = max(ups.values(), key=lambda up: up.samples)
        s.models["kept"] = s.models["kept"].with_({n: self.boost * v for n, v in newest.state.items()})
        return s.to_all(Weights.of(s.models["kept"]))

    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        return (await Predict(t.server["kept"], samples)).logits


def test_a_method_of_the_callers_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="boost must be at least 0, got -1"):
        Newest(boost=-1)
    result = fedcc.run(Newest(boost=0.9), federation(mlp), **QUICK)
    assert result.rounds[0]["log"]["0"] == {"samples": 40}
    result.save(tmp_path)
    with pytest.raises(ValueError, match=r"Newest is your own method: pass .* to load\(\.\.\., method=\.\.\.\)"):
        fedcc.load(tmp_path, models=mlp)
    with pytest.raises(ValueError, match="saved by Newest, got method=FedCC"):
        fedcc.load(tmp_path, models=mlp, method=FedCC())
    loaded = fedcc.load(tmp_path, models=mlp, method=Newest(boost=0.9))
    assert torch.equal(loaded.scores(NEW), result.scores(NEW))


def test_the_example_runs() -> None:
    example = Path(__file__).parents[2] / "examples" / "own_federation.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, refusal, last = done.stdout.splitlines()
    alone, together = map(float, re.findall(r"([\d.]+) %", first))
    assert together > 90 > 60 > alone
    assert refusal.startswith("FedAvg: FedAvg averages weights")
    assert last == "predicted: [0, 1, 2, 3] after loading: [0, 1, 2, 3]"


def test_a_run_on_a_cpu_imports_no_compiler() -> None:
    """It would cost every process 3 s and 150 MB; scikit-learn, with scipy and perhaps pandas, as long as torch."""
    code = (
        "import sys, fedcc\n"
        "federation = fedcc.Federation.named('digits', models='resnet8')\n"
        "fedcc.run('fedavg', federation, rounds=1, epochs=1)\n"
        "unwanted = {'torch._dynamo', 'torch._inductor', 'sympy', 'matplotlib', 'sklearn', 'scipy', 'pandas'}\n"
        "assert not unwanted & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
