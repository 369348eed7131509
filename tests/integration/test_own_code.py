"""Methods, networks and data of one's own: named on the command line, in files and in Python, and never imported
unless they are named."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

import fedcc
from fedcc.experiments.store import RunFolder
from fedcc.signals import Interrupted
from program import call

Capsys = pytest.CaptureFixture[str]
SMALL = (
    "--data", "digits", "--fraction", 0.2, "--clients", 3, "--skew", "iid", "--models", "own_nets:tiny,resnet8",
    "--epochs", 1, "--device", "cpu",
)  # fmt: skip
CODE = {
    "own_method": """
        from dataclasses import dataclass
        import fedcc

        @dataclass(frozen=True)
        class Steady(fedcc.FedMD):
            \"\"\"FedMD under another name.\"\"\"
            weight: float = fedcc.option(0.5, "has no effect", low=0)
    """,
    "own_nets": """
        from torch import nn

        def tiny(outputs):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, outputs))

        def tall(outputs):
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            return nn.Sequential(nn.Flatten(1, 2), layer, nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, outputs))

        def other(outputs):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

        def broken(outputs):
            return nn.Sequential(nn.Flatten(), nn.Linear(63, outputs))

        def none(outputs):
            return None

        def failing(outputs):
            raise KeyError("no weights")
    """,
    "own_script": """
        import sys
        sys.exit(3)
    """,
    "own_data": """
        from dataclasses import replace
        from fedcc.data import load

        def halved():
            digits = load("digits")
            return replace(digits, name="anything", train_x=digits.train_x[::4], train_y=digits.train_y[::4])
    """,
}


@pytest.fixture(autouse=True)
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules in the current folder, as in a process in which nobody has named them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in CODE.items():
        Path(f"{name}.py").write_text(dedent(text))
    forget(monkeypatch)
    yield
    for name in CODE:
        sys.modules.pop(name, None)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcc.code._allowed", set())
    monkeypatch.setattr("fedcc.code._imported", {})
    for name in CODE:
        sys.modules.pop(name, None)


def numbers(folder: Path | str) -> list[dict[str, object]]:
    rounds = RunFolder(Path(folder)).metrics()
    return [{k: v for k, v in r.items() if k not in ("seconds", "sharing")} for r in rounds]


def test_a_network_of_ones_own_trains_in_lanes_and_goes_on_to_the_same_numbers(capsys: Capsys) -> None:
    """A file outside the package, with attention and dropout, on the fused engine: it is named in no warning."""
    words = ("run", "fedavg", *SMALL[:-6], "--models", "own_nets:tall", "--epochs", 1, "--device", "cpu")
    for folder, rounds in (("whole", 2), ("half", 1)):
        done = call(capsys, *words, "--engine", "fused", "--rounds", rounds, "--out", folder)
        assert (done.code, done.err) == (0, "")
    done = call(capsys, "resume", "half", "--rounds", 2, "--code", "own_nets:tall")
    assert (done.code, done.err) == (0, "")
    assert numbers("half") == numbers("whole")
    whole, half = (RunFolder(Path(folder)).path / "models.safetensors" for folder in ("whole", "half"))
    assert whole.read_bytes() == half.read_bytes()


def test_a_method_of_ones_own_from_run_to_report(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("run", "own_method:Steady", *SMALL, "--set", "weight=0.5")
    assert call(capsys, *words, "--rounds", 2, "--out", "runs/steady").code == 0
    assert call(capsys, "run", "fedmd", *SMALL, "--rounds", 2, "--out", "runs/fedmd").code == 0
    assert numbers("runs/steady") == numbers("runs/fedmd")  # it is FedMD
    summary = json.loads(Path("runs/steady/summary.json").read_text())
    assert sorted(summary["code"]) == ["own_method:Steady", "own_nets:tiny"]
    assert all(len(digest) == 64 for digest in summary["code"].values())

    forget(monkeypatch)
    done = call(capsys, "report", "runs", "--out", "report", "--no-figures")
    assert done.code == 0, done.err
    assert "own_method" not in sys.modules  # a report imports nobody's code
    table = next(Path("report/tables").glob("digits*.md")).read_text()
    assert "Steady" in table
    assert "FedMD" in table
    assert "weight" not in table  # a default: a row of the same table, not a variant

    np.savez("x.npz", x=fedcc.Federation.named("digits").test.x[:4].numpy())
    call(capsys, "predict", "runs/steady", "x.npz").refused("own_method:Steady is code of yours", "--code")
    call(capsys, "predict", "runs/steady", "x.npz", "--code", "own_method:Steady").refused("own_nets:tiny is code of")
    forget(monkeypatch)
    call(capsys, "resume", "runs/steady", "--rounds", 3).refused("own_method:Steady is code of yours")
    call(capsys, "resume", "runs/steady", "--code", "steady").refused("--code takes module:name, got 'steady'")
    named = ("--code", "own_method:Steady", "--code", "own_nets:tiny")
    assert call(capsys, "predict", "runs/steady", "x.npz", *named).err == ""

    forget(monkeypatch)
    with Path("own_nets.py").open("a") as file:
        file.write("\n# edited\n")
    done = call(capsys, "predict", "runs/steady", "x.npz", *named)
    assert done.code == 0
    assert done.err == "fedcc: warning: the file of own_nets:tiny has changed since runs/steady was written\n"
    done = call(capsys, "resume", "runs/steady", "--rounds", 3, *named)
    assert done.code == 0, done.err
    assert "the file of own_nets:tiny has changed since runs/steady/environment.json was written" in done.err
    assert call(capsys, "run", "fedmd", *SMALL, "--rounds", 3, "--out", "runs/longer").code == 0
    assert numbers("runs/steady") == numbers("runs/longer")


def test_files_of_ones_own_name_code_and_written_ones_do_not(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    common = 'epochs = 1\nrounds = 1\nclients = 3\nskew = "iid"\ndevice = "cpu"\n'
    Path("sweep.toml").write_text(
        f'methods = ["own_method:Steady", "fedavg"]\ndata = "own_data:halved"\nmodels = "own_nets:tiny"\n{common}'
    )
    done = call(capsys, "sweep", "sweep.toml", "--out", "runs")
    assert done.code == 0, done.out + done.err
    folder = Path("runs/own_data-halved_iid")
    assert sorted(p.name for p in folder.iterdir()) == ["fedavg", "own_method-Steady"]
    written = folder / "own_method-Steady" / "seed0" / "experiment.toml"
    assert 'data = "own_data:halved"' in written.read_text()

    forget(monkeypatch)
    assert "finished" in call(capsys, "sweep", "sweep.toml", "--out", "runs", "--dry-run").out
    forget(monkeypatch)
    done = call(capsys, "run", "--config", written, "--out", "again")  # the user names this file
    assert done.code == 0, done.err
    assert numbers("again") == numbers(written.parent)
    forget(monkeypatch)
    assert "own_method:Steady is code of yours" in call(capsys, "analyse", "again").err
    assert not set(CODE) & set(sys.modules)
    assert call(capsys, "skew", "--data", "own_data:halved", "--skew", "iid", "--clients", 2).code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("own_method:Nobody",), "own_method:Nobody: module own_method has no Nobody"),
        (("own_nets:tiny",), "own_nets:tiny must be a method: a frozen dataclass derived from fedcc.Method"),
        (("fedcc", "--models", "own_nets:other"), "must return logits of shape (batch, 11), got (2, 3)"),
        (("fedcc", "--models", "own_nets:broken"), "does not take a batch of two inputs of shape (1, 8, 8)"),
        (("fedcc", "--models", "own_nets:failing"), "own_nets:failing(11) failed: KeyError: 'no weights'"),
        (("fedcc", "--models", "timm:resnet18"), "timm:resnet18 needs timm, which cannot be imported"),
        (("fedcc", "--data", "own_nets:tiny"), "own_nets:tiny() failed: TypeError"),
        (("fedcc", "--models", "own_nets:none"), "own_nets:none(11) must return an nn.Module, got NoneType"),
        (
            ("fedcc", "--models", "own_script:net"),
            "own_script:net: module own_script cannot be imported: SystemExit: 3",
        ),
        (("fedcc", "--data", "own:load"), "own:load: own: is reserved for objects in Python; rename the module"),
        (("fedcc", "--models", "own:net"), "own:net: own: is reserved for objects in Python; rename the module"),
        (("own:Method",), "own:Method: own: is reserved for objects in Python; rename the module"),
        (("fedcc", "--data", "own_data:halved", "--test", 0.5), "test=0.5 is for files; own_data:halved is a function"),
        (("fedcc", "--data", "digits", "--test", 0.5), "test is for data of your own, got test=0.5 for digits"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_written(
    words: tuple[str, ...], message: str, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    call(capsys, "run", *words, "--rounds", 1, "--out", "run").refused(message)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [("{}['x']", "KeyError: 'x'"), ("nn.functional.linear(x, x.new_ones(2, 3))", "RuntimeError: mat1 and mat2 shapes")],
)
def test_an_error_in_the_users_code_is_placed_there(line: str, message: str, capsys: Capsys) -> None:
    text = f"""
        from torch import nn

        class Net(nn.Module):
            def __init__(self, outputs):
                super().__init__()
                self.last = nn.Linear(64, outputs)

            def forward(self, x):
                if self.training:
                    {line}
                return self.last(x.flatten(1))
    """
    Path("own_nets.py").write_text(dedent(text))
    done = call(capsys, "run", "local", *SMALL, "--models", "own_nets:Net", "--rounds", 1, "--out", "run")
    done.failed(f"error in your code {Path('own_nets.py').resolve()}:11: {message}", "see run")


def test_the_command_that_resumes_names_the_code(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise Interrupted(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("fedcc.experiments.run.Checkpoints.write", stop)
        done = call(capsys, "run", "own_method:Steady", *SMALL, "--rounds", 1, "--out", "run")
    command = "fedcc resume run --code own_method:Steady --code own_nets:tiny"
    done.failed(f"resume with `{command}`", code=130)
    forget(monkeypatch)
    assert call(capsys, *command.split()[1:]).code == 0


def test_names_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument is named by the user; what a file says is not."""
    federation = fedcc.Federation.named("own_data:halved", skew="iid", clients=2, models="own_nets:tiny")
    method = fedcc.make("own_method:Steady", weight=0.25)
    result = fedcc.run(method, federation, rounds=1, epochs=1, seed=0, device="cpu")
    result.save("saved")
    forget(monkeypatch)
    with pytest.raises(ValueError, match="own_method:Steady is code of yours"):
        fedcc.load("saved")
    loaded = fedcc.load("saved", models="own_nets:tiny", method="own_method:Steady")
    assert (loaded.method.name, getattr(loaded.method, "weight", None)) == ("Steady", 0.25)
    x = federation.test.x[:50]
    assert (loaded.predict_proba(x) == result.predict_proba(x)).all()
    with pytest.raises(ValueError, match=r"Steady was saved with weight=0\.25, got 0\.5"):
        fedcc.load("saved", method=fedcc.make("own_method:Steady", weight=0.5))


def test_load_refuses_other_settings_of_our_methods() -> None:
    federation = fedcc.Federation.named("digits", skew="iid", clients=2, models="own_nets:tiny", fraction=0.1)
    fedcc.run(fedcc.FedProx(mu=0.1), federation, rounds=1, epochs=0).save("p")
    assert fedcc.load("p", method=fedcc.FedProx(mu=0.1)).method == fedcc.FedProx(mu=0.1)
    with pytest.raises(ValueError, match=r"FedProx was saved with mu=0\.1, got 0\.2"):
        fedcc.load("p", method=fedcc.FedProx(mu=0.2))


def test_every_method_is_exported() -> None:
    for name, kind in fedcc.METHODS.items():
        assert getattr(fedcc, kind.__name__) is kind
        assert kind.__name__ in fedcc.__all__
        assert type(fedcc.make(name)) is kind
