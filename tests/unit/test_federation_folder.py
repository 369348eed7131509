"""The federation folder: what init writes, what a site checks, and what is refused in which words."""

from __future__ import annotations

import dataclasses
import json
import shutil
import stat
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from program import call

pytest.importorskip("flwr")

from fedcc.experiments.experiment import Experiment, resolve_machine
from fedcc.flower.create import _own_experiment, create_federation
from fedcc.flower.data import site_samples
from fedcc.flower.folder import FederationFolder, Site, Task, disagreement, parse_clients
from fedcc.flower.keys import public_bytes
from fedcc.flower.rules import Rules
from fedcc.methods import make as make_method
from federation import NAMES, make


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> FederationFolder:
    return make(tmp_path_factory.mktemp("federation") / "f")


@pytest.fixture
def task() -> Task:
    return Task(3, ("cat", "dog", "owl"), (1, 4, 4), 5, "")


def test_what_is_written_is_read_again(folder: FederationFolder) -> None:
    assert FederationFolder.read(folder.path) == folder
    for number, name in enumerate(NAMES):
        site = Site.read(folder.path / "sites" / name)
        assert (site.name, site.number, site.share_model) == (name, number, False)
        assert disagreement(folder.terms(name), site.terms()) is None
        assert site.task.public_samples(site.path / "public.npz").x.equal(
            folder.task.public_samples(folder.path / "public.npz").x
        )


def test_secrets_are_readable_by_their_owner_alone_and_stay_apart(folder: FederationFolder) -> None:
    for name in ("ca.key", "server.key", "command.key"):
        assert stat.S_IMODE((folder.operator / name).stat().st_mode) == 0o600
    held = set()
    for name in NAMES:
        site = folder.path / "sites" / name
        assert stat.S_IMODE((site / "site.key").stat().st_mode) == 0o600
        assert {p.name for p in site.iterdir()} == {
            "site.toml", "experiment.toml", "public.npz", "ca.crt", "command.pub", "site.key", "app.yaml", "data.npz",
        }  # fmt: skip
        held.add((site / "site.key").read_bytes())
    assert len(held) == len(NAMES)
    assert stat.S_IMODE(folder.operator.stat().st_mode) == 0o700


def test_keys_and_certificate_are_what_flower_and_tls_want(folder: FederationFolder) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP384R1, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.cli.supernode.register import try_load_public_key

    server = x509.load_pem_x509_certificate((folder.operator / "server.crt").read_bytes())
    authority = x509.load_pem_x509_certificate((folder.operator / "ca.crt").read_bytes())
    key = authority.public_key()
    assert isinstance(key, EllipticCurvePublicKey)
    assert server.signature_hash_algorithm is not None
    key.verify(server.signature, server.tbs_certificate_bytes, ECDSA(server.signature_hash_algorithm))
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    private = load_ssh_private_key((folder.path / "sites" / "east" / "site.key").read_bytes(), None)
    assert isinstance(private.curve, SECP384R1)  # type: ignore[union-attr]
    assert try_load_public_key(folder.key("east")) == public_bytes(folder.key("east"))


def test_a_site_names_what_it_has_not_agreed_to(folder: FederationFolder) -> None:
    site = Site.read(folder.path / "sites" / "east")
    for changes, found in (
        ({"rounds": 9}, ("rounds", 9, 2)),
        ({"settings": {**folder.experiment.settings, "lam": 0.7}}, ("lam", 0.7, 0.2)),
    ):
        changed = dataclasses.replace(folder, experiment=Experiment.stored(folder.experiment.values() | changes))
        assert disagreement(changed.terms("east"), site.terms()) == found
    assert disagreement(folder.terms("west"), site.terms()) == ("client", 3, 1)


def test_other_public_images_are_refused(folder: FederationFolder, tmp_path: Path) -> None:
    x = np.load(folder.path / "public.npz")["x"]
    np.savez(tmp_path / "public.npz", x=x[::-1])
    with pytest.raises(ValueError, match="other public images than the federation's"):
        folder.task.public_samples(tmp_path / "public.npz")


def test_a_sites_samples_by_file_and_by_folder(task: Task, tmp_path: Path) -> None:
    x = np.arange(6 * 16, dtype=np.uint8).reshape(6, 1, 4, 4)
    y = np.array([0, 0, 1, 1, 2, 2])
    np.savez(tmp_path / "d.npz", x=x, y=y)
    (tmp_path / "arrays").mkdir()
    np.save(tmp_path / "arrays" / "x.npy", x)
    np.save(tmp_path / "arrays" / "y.npy", y)
    for k, (image, label) in enumerate(zip(x, y, strict=True)):
        place = tmp_path / "images" / ("0", "dog", "owl")[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0]).save(place / f"{k}.png")
    for name in ("d.npz", "arrays", "images"):
        samples = site_samples(tmp_path / name, task)
        assert (samples.x.numpy() == x).all()
        assert samples["y"].tolist() == y.tolist()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"x": np.zeros((2, 1, 4, 4))}, "x must be uint8 images of shape [samples, 1x4x4], got float64 [2, 1, 4, 4]"),
        ({"x": np.zeros((2, 4, 4), np.uint8)}, "got uint8 [2, 4, 4]"),
        ({"x": np.zeros((0, 1, 4, 4), np.uint8), "y": np.zeros(0, int)}, "holds no samples"),
        ({"y": np.array([0, 3])}, "labels must lie in 0 .. 2, got 0 .. 3"),
        ({"y": np.array([0, -1])}, "labels must lie in 0 .. 2, got -1 .. 0"),
        ({"y": np.array([0.0, 1.0])}, "y must be whole-number labels of shape [samples], got float64"),
        ({"y": np.array([0, 1, 2])}, "x has 2 images and y 3 labels"),
        ({"y": np.array([{}, {}])}, "is not a readable NPZ file"),
    ],
)
def test_bad_samples_are_refused(task: Task, tmp_path: Path, given: dict[str, Any], words: str) -> None:
    np.savez(tmp_path / "d.npz", **({"x": np.zeros((2, 1, 4, 4), np.uint8), "y": np.array([0, 1])} | given))
    with pytest.raises(ValueError) as error:
        site_samples(tmp_path / "d.npz", task)
    assert words in str(error.value)


def test_other_bad_places_are_refused(task: Task, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 1, 4, 4), np.uint8))
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd" / "bird").mkdir(parents=True)
    Image.new("L", (4, 4)).save(tmp_path / "odd" / "bird" / "1.png")
    (tmp_path / "t.csv").write_text("a,y\n1,cat\n")
    for name, words in (
        ("x.npz", "must hold the arrays x, y, got x"),
        ("text.npz", "not a readable NPZ"),
        ("empty", "expected a sub-folder of images per class, found none"),
        ("odd", r"no class of the federation is named 'bird'; its classes are \['cat', 'dog', 'owl'\]"),
        ("t.csv", "is a table: name the column of its labels with --label; it has 'a', 'y'"),
        ("nowhere", "does not exist"),
    ):
        with pytest.raises(ValueError, match=words):
            site_samples(tmp_path / name, task)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "needs at least one client"),
        (["a", "a=resnet8"], "different names"),
        (["../a"], "a client's name has letters"),
        (["a="], "NAME or NAME=MODEL"),
    ],
)
def test_bad_clients_are_refused(given: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_clients(given)


def test_rules_are_checked() -> None:
    for rules, words in (
        ({"quorum": 5}, "quorum must be from 1 to the number of clients, 4, got 5"),
        ({"quorum": 2, "deadline": 0.0}, "deadline must be at least 1"),
        ({"quorum": 2, "strikes": 0}, "strikes must be at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            Rules(**rules).check(4)


def test_a_file_that_was_cut_off_is_never_read_as_a_whole_one(tmp_path: Path) -> None:
    """An editor may be writing it. A task without its last values is another one, and `revoke` would keep it."""
    (tmp_path / "public.csv").write_text("width,colour\n" + "".join(f"{k}.5,red\n{k},blue\n" for k in range(20)))
    folder = create_federation(
        tmp_path / "f", "fedcc", {"a": None, "b": None}, options={}, port=9092,
        public_file=tmp_path / "public.csv", class_names=("x", "y"),
    )  # fmt: skip
    for file, read in (
        (folder.path / "federation.toml", lambda: FederationFolder.read(folder.path)),
        (folder.site("a") / "site.toml", lambda: Site.read(folder.site("a"))),
    ):
        whole = file.read_bytes()
        read()
        for length in range(len(whole) - 1):  # the last byte ends the last line
            file.write_bytes(whole[:length])
            with pytest.raises(ValueError, match=file.name):
                read()
        file.write_bytes(whole)


def test_init_refuses_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    init = ("federation", "init", tmp_path / "f", "--client", "a", "--client", "b", "--skew", "iid")
    call(capsys, *init, "--method", "centralized").refused("Centralized is a bound for simulations")
    call(capsys, *init, "--method", "fedavg", "--client", "c=resnet8", "--client", "d=resnet14").refused(
        "FedAvg averages weights, so all clients need the same network"
    )
    call(capsys, *init, "--quorum", 3).refused("quorum must be from 1 to the number of clients, 2, got 3")
    for host in ("fed.example.org:9092", "[::1]", ""):
        call(capsys, *init, "--host", host).refused(
            f"--host must be a name or an IP address, without port and brackets, got {host!r}; --port sets the port"
        )
    for port in (0, 91_920):
        call(capsys, *init, "--port", port).refused(f"port must be from 1 to 65535, got {port}")
    call(capsys, *init, "--client", "c=resnet9").refused("depth is 6n + 2 (8, 14, 20, ..., 1202), got 9")
    assert not (tmp_path / "f").exists()
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "mine").write_text("")
    call(capsys, *init).refused("is not empty")
    call(capsys, "federation", "demo", "--out", tmp_path / "f").refused(
        "is not empty; remove it or choose another --out"
    )
    call(capsys, "federation", "status", tmp_path / "f").refused("federation.toml is missing")


def test_own_public_images_and_classes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 255, (20, 3, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "public.npz", x=x)
    words = ("federation", "init", tmp_path / "f", "--client", "a=resnet8", "--client", "b=resnet14")
    own = ("--public-file", tmp_path / "public.npz")
    call(capsys, *words, *own).refused("the classes must be named")
    call(capsys, *words, *own, "--class", "cat", "--class", "dog", "--data", "digits").refused("--data applies only to")
    done = call(capsys, *words, *own, "--class", "cat", "--class", "dog", "--host", "fed.example.org")
    assert done.code == 0, done
    made = FederationFolder.read(tmp_path / "f")
    assert (made.task.classes, made.task.names, made.task.shape) == (2, ("cat", "dog"), (3, 8, 8))
    assert np.allclose(made.task.view.mean, (x / 255).mean((0, 2, 3)), atol=1e-4)
    assert made.test() is None
    assert made.address == "fed.example.org:9092"
    assert made.hosts == ("fed.example.org", "localhost", "127.0.0.1")


def test_a_key_that_others_can_read_and_a_wrong_model_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = make(tmp_path / "f")
    site = folder.path / "sites" / "east"
    start = ("federation", "client", site, "--data", site / "data.npz", "--device", "cpu")
    for server in ("fed.example.org", "https://fed.example.org:9092"):
        call(capsys, *start, "--server", server).refused(f"an address is HOST:PORT, got '{server}'")
    call(capsys, *start, "--model", "resnet14").refused("east has agreed on resnet8, got --model resnet14")
    (site / "site.key").chmod(0o644)
    call(capsys, *start).refused("can be read by others")
    call(capsys, "federation", "client", "nobody", "--data", "x").refused("unknown site 'nobody'")
    (tmp_path / "empty").mkdir()
    call(capsys, "federation", "client", tmp_path / "empty", "--data", "x").refused("site.toml is missing")


def test_a_site_does_not_start_with_damaged_keys(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would try for ever: with such files no server is the right one, and Flower says little."""
    site = make(tmp_path / "f", models="mlp").path / "sites" / "east"

    def started(*_: Any) -> None:
        raise ValueError("started")

    monkeypatch.setattr("fedcc.flower.supernode.site_samples", started)
    start = ("federation", "client", site, "--data", site / "data.npz", "--device", "cpu")
    call(capsys, *start).refused("started")
    for name in ("ca.crt", "site.key", "app.yaml"):
        content = (site / name).read_bytes()
        for damaged in (b"", content[: len(content) // 2], bytes(len(content)), b"{}"):
            (site / name).write_bytes(damaged)
            call(capsys, *start).refused(f"{site / name} is damaged")
        (site / name).write_bytes(content)
    (site / "site.key").write_bytes(b"")
    (site / "east.pub").unlink(missing_ok=True)
    call(capsys, "federation", "join", "east", "--folder", site).refused(f"{site / 'site.key'} is damaged")


def test_status_before_anything_has_run(capsys: pytest.CaptureFixture[str], folder: FederationFolder) -> None:
    done = call(capsys, "federation", "status", folder.path, "--json")
    about = json.loads(done.out)
    assert (about["server"], about["state"], about["rounds"]) == ("not running", "not started", 2)
    call(capsys, "federation", "run", folder.path).refused("the server is not running")


def test_damaged_files_of_the_operator_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "f", models="mlp")

    def started(*_: Any) -> None:
        raise ValueError("started")

    monkeypatch.setattr("fedcc.flower.superlink.ChildProcess", started)
    monkeypatch.setattr("fedcc.flower.superlink.flwr", started)
    monkeypatch.setattr("fedcc.flower.superlink.fetch_report", lambda _: None)
    folder.run.mkdir()
    (folder.run / "experiment.toml").write_bytes((folder.path / "experiment.toml").read_bytes())
    for command, name, advice in (
        ("status", "status.json", "run` writes it again"), ("server", "server.key", "renew` makes both again"),
        ("server", "app.json", "restore it"), ("server", "command.key", "restore it"), ("server", "ca.crt", "restore"),
        ("renew", "ca.key", "restore it"), ("run", "run.json", "--overwrite"),
    ):  # fmt: skip
        path = folder.operator / name
        content = path.read_bytes() if path.exists() else json.dumps({"run": "0123456789abcdef"}).encode()
        monkeypatch.setattr("fedcc.flower.superlink.is_serving", lambda _, runs=command == "run": runs)
        for damaged in (b"", content[: len(content) // 2], bytes(len(content)), b"5"):
            path.write_bytes(damaged)
            call(capsys, "federation", command, folder.path).refused(str(path), "damaged", advice)
        path.write_bytes(content)
    call(capsys, "federation", "run", folder.path).refused("started")
    (folder.operator / "run.json").unlink()
    call(capsys, "federation", "run", folder.path).refused("run.json is missing", "--overwrite")
    call(capsys, "federation", "run", folder.path, "--overwrite").refused("started")
    apps = folder.operator / "home" / "apps"
    apps.mkdir(parents=True)
    call(capsys, "federation", "server", folder.path).refused("started")
    assert not apps.exists(), "an app that was unpacked in part would be used"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[clients]", "[[clients]]", "damaged"),
        ('north = "resnet8"', "north = 3", "damaged"),
        ('north = "resnet8"', '"../north" = "resnet8"', "a client's name"),
        ('north = "resnet8"', 'north = "resnet9"', "depth is 6n + 2"),
        ("quorum = 4", "quorum = 9", "quorum must be"),
        ("quorum = 4", "quorum = true", "quorum must be a whole number"),
        ("classes = 10", "classes = 1.5", "classes must be a whole number"),
        ("classes = 10", "classes = 9", "one for each of 9 classes"),
        ("shape = [1, 8, 8]", "shape = [1, 0, 8]", "shape must be at least 1"),
        ("flip = false", "flip = 0", "flip must be true or false"),
        ('hosts = ["localhost", "127.0.0.1"]', "hosts = []", "hosts"),
        ('hosts = ["localhost", "127.0.0.1"]', "hosts = [1]", "hosts must be a text"),
    ],
)
def test_a_damaged_federation_file_is_refused_by_name(
    folder: FederationFolder, tmp_path: Path, old: str, new: str, said: str
) -> None:
    text = (folder.path / "federation.toml").read_text()
    assert old in text
    (tmp_path / "experiment.toml").write_bytes((folder.path / "experiment.toml").read_bytes())
    (tmp_path / "federation.toml").write_text(text.replace(old, new))
    with pytest.raises(ValueError) as refused:
        FederationFolder.read(tmp_path)
    assert str(tmp_path / "federation.toml") in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("share_model = false", "share_model = 1", "share_model must be true or false"),
        ("number = 0", "number = -1", "number must be at least 0"),
        ('model = "resnet8"', 'model = "x"', "x"),
        ('name = "north"', 'name = "a/b"', "a client's name"),
        ("number = 0", "", "number"),
    ],
)
def test_a_damaged_site_file_is_refused_by_name(
    folder: FederationFolder, tmp_path: Path, old: str, new: str, said: str
) -> None:
    place = folder.path / "sites" / "north"
    text = (place / "site.toml").read_text()
    assert old in text
    (tmp_path / "experiment.toml").write_bytes((place / "experiment.toml").read_bytes())
    (tmp_path / "site.toml").write_text(text.replace(old, new))
    with pytest.raises(ValueError) as refused:
        Site.read(tmp_path)
    assert str(tmp_path / "site.toml") in str(refused.value)
    assert said in str(refused.value)


def test_a_damaged_npz_or_array_is_refused_by_name(tmp_path: Path, task: Task) -> None:
    """The bytes of a member changed (its checksum differs), a member that is no array, a header of nonsense."""
    x, y = np.zeros((2, 1, 4, 4), np.uint8), np.array([0, 1])
    np.savez(tmp_path / "data.npz", x=x, y=y)
    content = (tmp_path / "data.npz").read_bytes()
    at = content.index(b"NUMPY") + 140
    (tmp_path / "changed.npz").write_bytes(content[:at] + b"\x01" + content[at + 1 :])
    with zipfile.ZipFile(tmp_path / "text.npz", "w") as packed:
        packed.writestr("x.npy", "no array")
        packed.writestr("y.npy", "no array")
    (tmp_path / "folder").mkdir()
    header = b"{'descr': ((((("
    (tmp_path / "folder" / "x.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    (tmp_path / "zeros.npz").write_bytes(bytes(len(content)))
    for name in ("changed.npz", "text.npz", "zeros.npz", "folder"):
        with pytest.raises(ValueError, match="is not a readable") as refused:
            site_samples(tmp_path / name, task)
        assert str(tmp_path / name) in str(refused.value)
        assert "\n" not in str(refused.value)
        assert "unsafely" not in str(refused.value)


def test_a_folder_of_an_older_version_opens(tmp_path: Path) -> None:
    """Made by commit 5a24957, which had fewer options: these have their values of then."""
    for path in (Path(__file__).parents[1] / "fixtures" / "federation-5a24957").iterdir():
        shutil.copy(path, tmp_path)
    folder, site = FederationFolder.read(tmp_path), Site.read(tmp_path)
    assert folder.clients == {"north": "resnet8", "east": "resnet14"}
    assert (folder.rules.quorum, folder.rules.deadline, folder.address) == (2, 3600.0, "localhost:9092")
    assert (folder.task.public, folder.task.view.scale, folder.task.view.hole) == (29, 0.0625, 0.0)
    split, training = folder.experiment.split, folder.experiment.training
    assert (split.augment, split.validation, training.schedule, training.decay) == ("none", 0.0, "constant", 1.0)
    assert folder.experiment.build_method() == make_method("fedcc")
    assert disagreement(folder.terms("east"), site.terms()) is None
    folder.write()
    site.write()
    assert (FederationFolder.read(tmp_path), Site.read(tmp_path)) == (folder, site)


def test_a_folder_without_a_command_key_is_refused_until_it_is_upgraded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "f", "fedcc", NAMES)
    for path in folder.path.rglob("command.*"):
        path.unlink()
    site = folder.path / "sites" / NAMES[0]
    refusal = "`fedcc federation upgrade` on the server makes it"
    call(capsys, "federation", "server", folder.path).refused("command.key is missing", refusal)
    call(capsys, "federation", "client", site, "--data", site / "data.npz").refused("command.pub is missing", refusal)
    assert "command.pub" in call(capsys, "federation", "upgrade", folder.path).out
    public = (folder.operator / "command.pub").read_bytes()
    assert {(folder.path / "sites" / name / "command.pub").read_bytes() for name in NAMES} == {public}
    key = folder.command_key.read_bytes()
    call(capsys, "federation", "upgrade", folder.path)
    assert folder.command_key.read_bytes() == key, "a key that is there is left alone"


def test_a_folder_of_an_older_algorithm_is_refused(tmp_path: Path) -> None:
    for path in (Path(__file__).parents[1] / "fixtures" / "federation-5a24957").iterdir():
        shutil.copy(path, tmp_path)
    experiment = tmp_path / "experiment.toml"
    options, _ = experiment.read_text().split("[settings]")
    experiment.write_text(options.replace('"fedcc"', '"fedconcat"') + "[settings]\nclusters = 2\n")
    with pytest.raises(ValueError, match="version 1 of FedConcat is another algorithm than version 2"):
        FederationFolder.read(tmp_path)


def test_a_file_that_is_far_too_large_is_not_read(
    folder: FederationFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "north"
    shutil.copytree(folder.site("north"), site)
    monkeypatch.setattr("fedcc.experiments.toml.LARGEST", 10_000)
    (site / "site.toml").write_text((site / "site.toml").read_text() + "# filler\n" * 2000)
    with pytest.raises(ValueError, match=r"site\.toml is not valid TOML: it has \d\d,\d{3} bytes, at most 10,000"):
        Site.read(site)


def test_the_device_is_asked_for_its_precision_only_if_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: object) -> str:
        raise AssertionError(f"{device} was asked")

    monkeypatch.setattr("fedcc.experiments.experiment.default_precision", refuse)
    options = {"clients": 2, "models": "resnet8", "device": "cpu", "precision": "bf16"}
    assert resolve_machine(options)["precision"] == "bf16"
    assert _own_experiment("fedavg", {}, options).machine.precision == "bf16"
