"""Sites that share labels or noisy labels: the same numbers as the simulator's, the same bytes when asked again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from test_federation_policy import limit

from fedcc.experiments.store import RunFolder
from fedcc.flower.codec import EncodedMessage, read_content, write_content
from fedcc.flower.cohort import NoQuorum
from fedcc.flower.demo import sent_uplinks, simulate
from fedcc.flower.folder import FederationFolder, Site
from federation import NAMES, LocalTransport, make
from program import call

Capsys = pytest.CaptureFixture[str]


@pytest.mark.parametrize("method", ["fedcc", "fedct"])
def test_labels_give_the_simulators_numbers(method: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "f", method, share="labels")
    transport = LocalTransport(folder)  # started with --share-model, which labels forbid
    transport.server().train()
    simulated = simulate(folder.experiment, names=NAMES)
    assert sent_uplinks(folder) == simulated.uplinks
    summary = RunFolder(folder.run).summary()
    assert summary is not None
    assert summary["accuracy"]["final"] == simulated.accuracy
    assert summary["bytes"]["up"] == 2 * len(NAMES) * folder.task.public
    assert summary["bytes"]["models"] == 0
    assert summary["federation"]["kept_models"] == [*NAMES]
    assert {purpose for _, purpose, _ in transport.sent} == {"train", "query.predict"}, "nobody is asked for a model"
    ledger = Site.read(folder.site("east")).audit.ledger()
    assert ledger.bare == {"labels": 2 * folder.task.public + len(folder.test()["x"])}  # type: ignore[index]


def ask(folder: FederationFolder, x: np.ndarray, scores: Path) -> np.ndarray:
    np.savez(scores.with_suffix(".in.npz"), x=x)
    LocalTransport(folder).server().query(scores.with_suffix(".in.npz"), scores)
    return np.asarray(np.load(scores)["scores"])


def test_a_noisy_answer_is_drawn_once_and_counted_once(tmp_path: Path, capsys: Capsys) -> None:
    folder = make(tmp_path / "f", rounds=1, share="noisy", answer_epsilon=1.0)
    replies: list[dict[str, bytes]] = []

    def keep(name: str, purpose: str, _t: int) -> Any:
        if (name, purpose) != ("east", "train"):
            return None
        return lambda content: [content, replies.append(read_content(content)[1])][0]

    LocalTransport(folder, fault=keep).server().train()
    site, public, test = Site.read(folder.site("east")), folder.task.public, folder.test()
    assert test is not None
    count = public + len(test["x"])
    assert site.audit.ledger().noisy == {(1.0, 11): count}
    for path in folder.run.glob("*"):  # the operator loses the run, and asks for the round again
        if path.is_file():
            path.unlink()
    LocalTransport(folder, fault=keep).server().train()
    assert len(replies) == 2
    assert replies[0] == replies[1]
    assert len(replies[0]["uint8"]) == public
    x = test["x"].numpy()
    first = ask(folder, x, tmp_path / "1.npz")
    assert np.array_equal(first, ask(folder, x, tmp_path / "2.npz")), "noise would average out"
    ask(folder, np.load(folder.path / "public.npz")["x"][:7], tmp_path / "3.npz")
    assert site.audit.ledger().noisy == {(1.0, 11): count}, "nothing new was answered"
    ask(folder, 255 - x[:5], tmp_path / "4.npz")
    assert site.audit.ledger().noisy == {(1.0, 11): count + 5}
    simulated = simulate(folder.experiment, names=NAMES)
    assert all(simulated.uplinks[key] != sent for key, sent in sent_uplinks(folder).items()), "not drawn from the seed"
    shown = call(capsys, "federation", "audit", site.path).out
    assert f"noisy: {count + 5} answers with epsilon 1 per answer (11 different labels)" in shown
    assert "record-level epsilon over all runs: " in shown
    assert json.loads((folder.run / "summary.json").read_text())["noise"].startswith("the operating system's")
    (site.state / "noisy-answers").unlink()
    with pytest.raises(NoQuorum, match="east: an error at the site"):
        ask(folder, x, tmp_path / "5.npz")
    assert site.audit.ledger().noisy == {(1.0, 11): count + 5}, "fresh noise for the same questions"
    start = ("federation", "client", site.path, "--data", site.path / "data.npz", "--device", "cpu")
    call(capsys, *start).failed("noisy-answers is damaged: it is missing", "put a copy back", code=2)


def test_a_site_refuses_to_share_more_than_its_policy_says(tmp_path: Path, capsys: Capsys) -> None:
    folder = make(tmp_path / "f", rounds=1, rules={"quorum": 3, "strikes": 1})
    site = limit(folder, "east", share="labels")
    LocalTransport(folder).server().train()
    attendance = RunFolder(folder.run).metrics()[0]["federation"]
    assert attendance["failed"] == {"east": "the site's policy does not allow it"}
    assert site.audit.ledger().text() == ""
    refused = [e for e in site.audit.entries() if e["purpose"] == "train"]
    assert [(e["kind"], e["answer"], e["run"], e["round"]) for e in refused] == [("answered", "policy", "run1", "1")]
    words = ("federation", "client", site.path, "--data", site.path / "data.npz")
    text = "share is labels or stricter, the experiment's is predictions"
    call(capsys, *words).failed(f"the policy of east forbids it: {text}", code=2)
    folder = make(tmp_path / "g", share="labels")
    words = ("federation", "client", folder.site("west"), "--data", folder.site("west") / "data.npz")
    call(capsys, *words, "--share-model").failed(
        "west shares no more than labels, but a model tells everything", code=2
    )


def test_a_federation_whose_method_shares_weights_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="share=noisy is for methods that share predictions"):
        make(tmp_path / "f", "fedavg", share="noisy")


@pytest.mark.parametrize("method", ["fedcc", "fedct"])
def test_a_model_that_does_not_fit_the_last_upload_is_named(method: str, tmp_path: Path) -> None:
    def turn(name: str, purpose: str, _t: int) -> Any:
        return changed if (name, purpose) == ("south", "query.model") else None

    def changed(content: Any) -> Any:
        """The model with other weights of the last layer: it says class 0, whatever it sees."""
        texts, arrays = read_content(content)
        numbers = np.frombuffer(arrays["float32"], np.float32).copy()
        numbers[-11 if method == "fedcc" else -10] += 100  # the bias of class 0, which comes last
        header = {name: texts[name] for name in ("kind", "header", "nonce")}
        whole = EncodedMessage.parse(header.pop("kind"), header.pop("header"), {"float32": numbers.tobytes()})
        return write_content(header, whole)

    folder = make(tmp_path / "f", method, rounds=1, wire="fp16")
    LocalTransport(folder, fault=turn).server().train()
    summary = RunFolder(folder.run).summary()
    assert summary is not None
    assert set(summary["federation"]["changed_models"]) == {"south"}, "rounding does not change a model"
    assert "warning: south: its model does not give the answers" in (folder.operator / "run.log").read_text()
