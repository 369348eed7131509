"""Tables, tokens, images of mixed sizes and networks of the sites' own in a federation's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from program import call

pytest.importorskip("flwr")

from fedcc.core.samples import IDENTITY
from fedcc.errors import LeftOut
from fedcc.experiments.toml import dumps, parse
from fedcc.flower.create import create_federation
from fedcc.flower.data import new_inputs, site_samples
from fedcc.flower.folder import FederationFolder, Site, Task
from fedcc.flower.own_network import NotKnown
from fedcc.flower.supernode import check_network
from fedcc.inputs.images import DarkImages
from fedcc.inputs.tables import Encoding, Table
from fedcc.methods import make

Capsys = pytest.CaptureFixture[str]
ROWS = {"size": [1.0, 2.5, 1 / 3, None], "colour": ["red", "dark blue", "red", None]}


@pytest.fixture
def table() -> Task:
    """A task on a table with a column of numbers and one of two categories."""
    encoding = Encoding.fit(Table.of(ROWS))
    return Task(2, ("cat", "dog"), (3,), 4, "", dtype="float32", encoding=encoding)


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def init(capsys: Capsys, *words: Any) -> FederationFolder:
    done = call(capsys, "federation", "init", "fed", "--client", "a", "--client", "b", *words)
    assert done.code == 0, done
    return FederationFolder.read(Path("fed"))


def test_a_task_keeps_its_columns_to_the_last_bit(table: Task) -> None:
    written = parse(dumps({"task": table.table()}))["task"]
    assert Task.read(written) == table
    columns = [{"name": "size", "mean": table.encoding.columns[0].mean, "std": table.encoding.columns[0].std},  # type: ignore[union-attr]
               {"name": "colour", "categories": ["dark blue", "red"]}]  # fmt: skip
    assert (written["dtype"], written["columns"]) == ("float32", columns)
    for changes, words in (
        ({"dtype": "float16"}, "dtype must be one of uint8, float32, int64"),
        ({"dtype": "int64"}, "columns give 3 inputs in float32, not int64"),
        ({"shape": [4]}, "columns give 3 inputs in float32, not float32 of shape"),
    ):
        with pytest.raises(ValueError, match=words):
            Task.read(written | changes)
    older = {name: value for name, value in written.items() if name not in ("dtype", "columns")}
    assert (Task.read(older).dtype, Task.read(older).encoding) == ("uint8", None)


def test_a_sites_table_is_encoded_as_the_public_one(table: Task, tmp_path: Path) -> None:
    path = tmp_path / "site.csv"
    path.write_text("kind,colour,size,id\ndog,red,2.5,7\ncat,green,?,8\n1,dark blue,1,9\n")
    with pytest.warns(LeftOut, match=r"does not have are left out: \['id'\]"):
        samples = site_samples(path, table, "kind")
    assert samples["y"].tolist() == [1, 0, 1]  # a name or, as no class is named by a number, a number
    assert table.encoding is not None
    expected = table.encoding.encode(Table.of({"size": [2.5, None, 1], "colour": ["red", "green", "dark blue"]}))
    assert (samples.x.numpy() == expected).all()
    assert samples.x.dtype.itemsize == 4
    assert (new_inputs(path, table) == expected).all()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("colour,kind\nred,cat\n", "site.csv: the table has no column 'size'; it has 'colour'"),
        ("size,colour\n1,red\n", "site.csv: the table has no column 'kind'; it has 'size', 'colour'"),
        ("size,colour,kind\n1,red,cow\n", "no class of the federation is named 'cow'; its classes are ['cat', 'dog']"),
        ("size,colour,kind\n1,red,2\n", "no class of the federation is named '2'"),
        ("size,colour,kind\nbig,red,cat\n", "site.csv: column 'size' holds numbers, found 'big'"),
        ("size,colour,kind\n1,red,\n", "1 samples have no label"),
    ],
)
def test_what_is_wrong_with_a_sites_table_is_said_in_one_line(
    table: Task, tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "site.csv").write_text(text)
    with pytest.raises(ValueError) as error:
        site_samples(tmp_path / "site.csv", table, "kind")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_arrays_of_other_kinds(table: Task, tmp_path: Path) -> None:
    tokens = Task(2, ("5", "7"), (3,), 4, "", view=IDENTITY, dtype="int64")
    np.savez(tmp_path / "t.npz", x=np.array([[1, 2, 3], [4, 5, 6]], np.int32), y=np.array(["7", "5"]))
    samples = site_samples(tmp_path / "t.npz", tokens)
    assert (str(samples.x.dtype), samples["y"].tolist()) == ("torch.int64", [1, 0])
    assert tokens.arch(make("fedcc"), "bag9").tokens
    assert not table.arch(make("fedcc"), "mlp").tokens
    for x, words in (
        (np.array([[1, -2, 3]]), "tokens must not be negative, got -2"),
        (np.zeros((1, 3)), "x must be integers (tokens) of shape [samples, 3], got float64 [1, 3]"),
    ):
        np.savez(tmp_path / "bad.npz", x=x, y=np.array([0]))
        with pytest.raises(ValueError) as error:
            site_samples(tmp_path / "bad.npz", tokens)
        assert words in str(error.value)
    np.savez(tmp_path / "bad.npz", x=np.array([[1, 2, 3]]), y=np.array(["1"]))
    with pytest.raises(ValueError, match="no class of the federation is named '1'"):  # numbers are names here
        site_samples(tmp_path / "bad.npz", tokens)
    (tmp_path / "t.csv").write_text("a,y\n1,5\n")
    with pytest.raises(ValueError, match=r"is a table, but the federation's inputs are integers \(tokens\)"):
        site_samples(tmp_path / "t.csv", tokens, "y")


def test_public_rows_decide_the_encoding_and_the_network(capsys: Capsys) -> None:
    Path("public.csv").write_text("size,colour,kind\n1,red,cat\n2.5,blue,\n4,red,dog\n")
    Path("test.csv").write_text("size,colour,kind\n1,red,dog\n")
    classes = ("--class", "cat", "--class", "dog")
    fed = init(capsys, "--public-file", "public.csv", "--label", "kind", *classes, "--test-file", "test.csv")
    task = fed.task
    assert (task.dtype, task.shape, task.public, task.names) == ("float32", (3,), 3, ("cat", "dog"))
    assert task.encoding == Encoding.fit(Table.of({"size": [1, 2.5, 4], "colour": ["red", "blue", "red"]}))
    assert fed.clients == {"a": "mlp", "b": "mlp"}
    test = fed.test()
    assert test is not None
    assert test["y"].tolist() == [1]
    site = Site.read(Path("fed/sites/a"))
    assert (site.task, site.experiment.split.label) == (task, "kind")
    assert site.terms() == fed.terms("a")


def test_public_tokens_and_numbers_in_a_file(capsys: Capsys) -> None:
    np.savez("public.npz", x=np.array([[1, 5], [2, 8]]))
    assert init(capsys, "--public-file", "public.npz", "--class", "a", "--class", "b").clients["a"] == "bag9"
    np.savez("numbers.npz", x=np.array([[1.0, 5.0], [2.0, 8.0]]))
    words = ("federation", "init", "other", "--client", "a", "--class", "a", "--class", "b")
    call(capsys, *words, "--public-file", "numbers.npz", "--resize", 8).refused("resize is for a folder of images")
    call(capsys, *words, "--public-file", "numbers.npz", "--label", "y").refused("label names a column of a table")
    assert not Path("other").exists()
    assert call(capsys, *words, "--public-file", "numbers.npz").code == 0
    task = FederationFolder.read(Path("other")).task
    np.savez("site.npz", x=np.array([[1.5, 6.5]]), y=np.array([1]))
    samples = site_samples(Path("site.npz"), task)
    assert (samples.x.tolist(), samples.view.mean, samples.view.std) == ([[1.5, 6.5]], (1.5, 6.5), (0.5, 1.5))


def test_images_of_mixed_sizes_get_the_tasks_size(capsys: Capsys) -> None:
    rng = np.random.default_rng(0)
    for i, size in enumerate([(8, 8), (16, 12), (30, 30)]):
        for folder in ("public", "site/cat", "site/dog"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, size, np.uint8)).save(f"{folder}/{i}.png")
    classes = ("--class", "cat", "--class", "dog")
    fed = init(
        capsys, "--public-file", "public", "--resize", 10, *classes, "--test-file", "site", "--models", "resnet8"
    )
    assert (fed.task.shape, fed.task.public, fed.task.dtype) == ((1, 10, 10), 3, "uint8")
    samples = site_samples(Path("site"), fed.task)
    assert (tuple(samples.x.shape), samples["y"].tolist()) == ((6, 1, 10, 10), [0, 0, 0, 1, 1, 1])
    assert new_inputs(Path("site"), fed.task).shape == (6, 1, 10, 10)


def test_a_site_is_told_of_12_bits_in_files_of_16(tmp_path: Path) -> None:
    task = Task(2, ("cat", "dog"), (1, 8, 8), 4, "")
    for name in ("cat", "dog"):
        (tmp_path / "site" / name).mkdir(parents=True)
        Image.new("I;16", (8, 8), 4_095).save(tmp_path / "site" / name / "1.png")
    with pytest.warns(DarkImages, match=r"1\.png and 1 others: no value is above 4,095 of 65,535"):
        assert site_samples(tmp_path / "site", task).x.max() == 15


def test_a_table_of_ones_own_is_split_for_the_sites(capsys: Capsys) -> None:
    rng = np.random.default_rng(0)
    rows = [f"{a:.3f},{b:.3f},{'cat' if a > b else 'dog'}" for a, b in rng.normal(size=(80, 2))]
    Path("own.csv").write_text("\n".join(["a,b,kind", *rows]) + "\n")
    fed = init(capsys, "--data", "./own.csv", "--label", "kind", "--skew", "iid", "--simulate-sites")
    federation = fed.experiment.federation()
    for k, name in enumerate("ab"):
        samples = site_samples(Path(f"fed/sites/{name}/data.npz"), fed.task)
        assert samples.x.equal(federation.private[k].x)
        assert samples["y"].equal(federation.private[k]["y"])
    assert Site.read(Path("fed/sites/a")).experiment.split.data == "own.csv", "the operator's folders are not told"


# ------------------------------------------------------------------------------------------------ the sites' networks


def test_the_manuals_first_federation(capsys: Capsys) -> None:
    clients = [word for name in "abcd" for word in ("--client", name)]
    words = ("--method", "fedcc", "--data", "digits", "--skew", "classes:3", "--epochs", "2", "--simulate-sites")
    done = call(capsys, "federation", "init", "fed", *clients, *words)
    networks = "a (resnet8), b (resnet14), c (resnet8), d (resnet14)"
    assert f"FedCC on digits: {networks}; T=3, E=2; 144 public images; server localhost:9092\n" in done.out
    assert all(Path("fed", "sites", name, "data.npz").is_file() for name in "abcd")


@pytest.fixture
def own(capsys: Capsys) -> FederationFolder:
    np.savez("public.npz", x=np.random.default_rng(0).normal(size=(6, 4)))
    np.savez("site.npz", x=np.zeros((2, 4)), y=np.array([0, 1]))
    words = ("federation", "init", "fed", "--client", "a=own", "--client", "b=mlp64", "--public-file", "public.npz")
    assert call(capsys, *words, "--class", "x", "--class", "y", "--make-keys").code == 0
    return FederationFolder.read(Path("fed"))


def test_a_network_of_the_sites_own_is_known_to_the_site_alone(own: FederationFolder) -> None:
    assert own.clients == {"a": "own", "b": "mlp64"}
    assert (Site.read(Path("fed/sites/a")).model, own.experiment.split.models) == ("own", "own,mlp64")
    arch = own.archs(make("fedcc"))[0]
    assert (arch.name, arch.outputs) == ("own", 3)
    with pytest.raises(NotKnown, match="only the site knows its own network"):
        arch.trunks[0](3)


def test_methods_that_send_weights_are_refused(capsys: Capsys) -> None:
    np.savez("public.npz", x=np.random.default_rng(0).normal(size=(6, 4)))
    words = ("federation", "init", "fed", "--client", "a=own", "--client", "b=own", "--public-file", "public.npz",
             "--class", "x", "--class", "y", "--method")  # fmt: skip
    for method in ("fedavg", "fednova", "fedconcat", "feddf", "fedet", "fedhkt"):
        call(capsys, *words, method).refused("sends weights, and the server knows no weights of a network that its")
        assert not Path("fed").exists()
    for method in ("fedcc", "fedmd", "lsr", "fedct"):
        create_federation(Path(method), method, {"a": "own", "b": None}, options={}, port=9092,
                          public_file=Path("public.npz"), class_names=("x", "y"))  # fmt: skip


@pytest.mark.parametrize("method", ["dsfl", "scarlet"])
def test_a_network_on_the_server_must_be_known_there(method: str, capsys: Capsys) -> None:
    np.savez("public.npz", x=np.random.default_rng(0).normal(size=(6, 4)))
    words = ("federation", "init", "fed", "--client", "a=mlp", "--client", "b=own", "--public-file", "public.npz",
             "--class", "x", "--class", "y", "--method", method)  # fmt: skip
    call(capsys, *words).refused("trains a network on the server", "only its site knows", "--set server_arch=NAME")
    assert not Path("fed").exists()
    assert call(capsys, *words, "--set", "server_arch=mlp64").code == 0


@pytest.mark.usefixtures("own")
def test_code_is_named_by_the_site_and_by_nobody_else(capsys: Capsys) -> None:
    words = ("federation", "init", "g", "--public-file", "public.npz", "--class", "x", "--class", "y")
    call(capsys, *words, "--client", "a=nets:small").refused("nets:small is code", "give the client as NAME=own")
    call(capsys, *words, "--client", "a", "--method", "mine:Method").refused("mine:Method is code, which sites do not")
    path = Path("fed/sites/a/site.toml")
    path.write_text(path.read_text().replace('"own"', '"nets:small"'))
    with pytest.raises(ValueError, match="nets:small is code, which a federation's files cannot name"):
        Site.read(path.parent)


@pytest.mark.usefixtures("own")
def test_the_site_is_told_what_is_wrong_with_its_network(capsys: Capsys) -> None:
    start = ("federation", "client", "--data", "site.npz", "--device", "cpu")
    call(capsys, *start, "fed/sites/a").refused("a brings its own network: name it with --network")
    call(capsys, *start, "fed/sites/b", "--network", "mlp").refused("b has agreed on mlp64, which --network cannot")
    call(capsys, *start, "fed/sites/a", "--network", "mlp", "--share-model").refused("cannot use its model")
    call(capsys, *start, "fed/sites/a", "--network", "mlp", "--label", "y").refused("--label names a column of a table")
    Path("bad_nets.py").write_text(
        "from torch import nn\n\n\ndef narrow(outputs):\n    return nn.Linear(3, outputs)\n\n\n"
        "def stubborn(outputs):\n    return nn.Linear(4, 7)\n"
    )
    site = Site.read(Path("fed/sites/a"))
    for name, words in (
        ("bad_nets:narrow", "bad_nets:narrow does not take a batch of two inputs of shape (4,)"),
        ("bad_nets:stubborn", "must return logits of shape"),
        ("bad_nets:missing", "bad_nets:missing: module bad_nets has no missing"),
        ("no_such_nets:x", "no_such_nets:x: module no_such_nets cannot be imported"),
        ("resnet8", "resnet8 takes square images"),
    ):
        with pytest.raises(ValueError) as error:
            check_network(site, name)
        assert words in str(error.value)
        assert "\n" not in str(error.value)
    check_network(site, "mlp64")
