"""A site's own limits hold against its server, and its log tells what left it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from fedcc.core.messages import Predictions
from fedcc.experiments.store import RunFolder
from fedcc.flower.codec import encode
from fedcc.flower.command import CommandSigner
from fedcc.flower.exchange import Inputs
from fedcc.flower.folder import FederationFolder, Site
from fedcc.flower.policy import Usage
from federation import NAMES, LocalTransport, make, real
from program import call

Capsys = pytest.CaptureFixture[str]


def limit(folder: FederationFolder, name: str, **policy: Any) -> Site:
    """The site's folder with this policy, as its owner would write it."""
    path = folder.site(name) / "site.toml"
    head, task, rest = path.read_text().partition("[task]")
    lines = [f"{key} = {json.dumps(value)}" for key, value in policy.items()]
    path.write_text("\n".join([head, "[policy]", *lines, "", task + rest]))
    return Site.read(folder.site(name))


def test_what_left_a_site_is_in_its_log(tmp_path: Path, capsys: Capsys) -> None:
    folder = make(tmp_path / "f")
    LocalTransport(folder, share={"north"}).server().train()
    site = Site.read(folder.site("east"))
    entries = site.audit.entries()
    number = len(folder.test()["x"])  # type: ignore[index]
    assert [(e["purpose"], e["round"], e["samples"]) for e in entries if e["kind"] == "allowed"] == [
        ("train", 1, 0), ("train", 2, 0), ("query.model", 2, 0), ("query.predict", 2, number),
    ]  # fmt: skip
    assert [e["answer"] for e in entries if e["kind"] == "answered"] == ["sent", "sent", "declined", "sent"]
    assert [(e["share"], e["answers"]) for e in entries if e["kind"] == "disclosed"] == [
        ("predictions", folder.task.public), ("predictions", folder.task.public), ("predictions", number),
    ]  # fmt: skip
    assert len({e["nonce"] for e in entries}) == 4
    done = call(capsys, "federation", "audit", site.path)
    assert done.code == 0
    assert f"without noise: {2 * folder.task.public + number} predictions\nrecord-level epsilon" in done.out
    assert "infinite" in done.out
    assert "east: 11 lines, each follows from the one before it" in done.out
    assert all(e["time"][:19].replace("T", " ") in done.out for e in entries)
    assert "…" not in done.out  # nothing is cut off where there is no terminal
    assert json.loads(call(capsys, "federation", "audit", site.path, "--json").out) == entries
    site.audit.path.write_text(site.audit.path.read_text().replace('"sent"', '"kept"', 1))
    call(capsys, "federation", "audit", site.path).failed("audit.jsonl is damaged: line 3", code=2)


def test_a_site_that_predicts_nothing_more_is_left_out_of_predictions(tmp_path: Path, capsys: Capsys) -> None:
    folder = make(tmp_path / "f")
    site = limit(folder, "east", queries=0)
    transport = LocalTransport(folder, share=set(NAMES) - {"east"})
    transport.server().train()
    summary = RunFolder(folder.run).summary()
    assert summary is not None
    assert summary["accuracy"]["final"] > 0
    answers = {e["answer"] for e in site.audit.entries() if e["kind"] == "answered" and e["purpose"] == "query.predict"}
    assert answers == {"declined"}
    assert "policy: 0 of 0 queries used" in call(capsys, "federation", "audit", site.path).out
    np.savez(tmp_path / "in.npz", x=np.load(folder.path / "public.npz")["x"][:5])
    transport.server().query(tmp_path / "in.npz", tmp_path / "out.npz")
    assert site.audit.entries()[-1]["answer"] == "sent", "public samples may be asked about"


def test_a_federation_whose_sites_predict_nothing_more_has_no_accuracy(tmp_path: Path) -> None:
    folder = make(tmp_path / "f")
    for name in NAMES:
        limit(folder, name, queries=0)
    transport = LocalTransport(folder, share=set())
    transport.server().train()
    assert [r.get("accuracy") for r in RunFolder(folder.run).metrics()] == [None, None]
    np.savez(tmp_path / "in.npz", x=folder.test()["x"][:5].numpy())  # type: ignore[index]
    with pytest.raises(ValueError, match="no client has predicted"):
        transport.server().query(tmp_path / "in.npz", tmp_path / "out.npz")


def test_a_site_stops_after_its_rounds(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", rounds=3, rules={"quorum": 3, "strikes": 1})
    site = limit(folder, "south", rounds=2)
    LocalTransport(folder).server().train()
    rounds = [r["federation"] for r in RunFolder(folder.run).metrics()]
    assert [r["present"] for r in rounds] == [[*NAMES], [*NAMES], [n for n in NAMES if n != "south"]]
    assert rounds[2]["failed"]["south"] == "the site's policy does not allow it"
    assert not list((site.state / "run1").glob("*000003*"))


def asked(folder: FederationFolder, name: str, purpose: str, content: Any) -> dict[str, Any]:
    """What a site answers to a message."""
    answer = LocalTransport(folder).served("1", name, purpose, content, None)
    return dict(answer.content["fedcc"])


def test_a_server_cannot_get_around_a_sites_limits(tmp_path: Path) -> None:
    """By asking for the same round with other targets, by sending a command again, or a sample in another type."""
    folder = make(tmp_path / "f", rules={"quorum": 3})
    number = len(folder.test()["x"])  # type: ignore[index]
    site = limit(folder, "east", rounds=2, queries=number + 3)
    LocalTransport(folder, share=set()).server().train()
    signer, public, classes = CommandSigner(folder.command_key), folder.task.public, folder.task.classes

    def command(purpose: str, message: Any) -> Any:
        encoded = encode(message, "fp32", run="run1", round=2)
        return signer.content(purpose, "east", "run1", 2, folder.terms("east"), encoded)[1]

    ours = Predictions(torch.full((public, classes), 1 / classes))
    assert asked(folder, "east", "train", command("train", ours))["error"] == "policy", "a third round"
    images = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
    for kind in (torch.float32, torch.int64):
        assert asked(folder, "east", "query.predict", command("query.predict", Inputs(images.to(kind))))["error"] == (
            "message"
        )
    assert asked(folder, "east", "query.predict", command("query.predict", Inputs(images[:, :, 1:])))["error"] == (
        "message"
    )
    question = command("query.predict", Inputs(images[:1]))
    assert "error" not in asked(folder, "east", "query.predict", question)
    for _ in range(5):
        assert asked(folder, "east", "query.predict", question)["error"] == "replay"
    used = Usage.of(site.audit.entries())
    assert (used.rounds, used.queries) == (2, number + 1)


def test_what_a_site_cannot_answer_uses_up_no_limit(tmp_path: Path) -> None:
    """It has not taken part in the run yet: there is no model that could answer."""
    folder = make(tmp_path / "f", "fedcc", NAMES[:2], skew="iid", models="mlp")
    site, signer = limit(folder, "east", queries=3, runs=1), CommandSigner(folder.command_key)
    images = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)

    def answer(purpose: str, run: str) -> str:
        message = Inputs(images) if purpose == "query.predict" else None
        encoded = encode(message, "fp32", run=run, round=1)
        content = signer.content(purpose, "east", run, 1, folder.terms("east"), encoded)[1]
        said = dict(LocalTransport(folder, share={"east"}).served("1", "east", purpose, content, None).content["fedcc"])
        return str(said.get("error", said.get("declined", "sent")))

    assert [answer("query.predict", "other"), answer("query.model", "other")] == ["rounds", "rounds"]
    assert not (site.state / "other").exists()
    assert Usage.of(site.audit.entries()) == Usage()
    assert answer("train", "run1") == "sent"
    assert [answer("query.predict", "run1"), answer("query.predict", "run1")] == ["sent", "yes"]
    assert Usage.of(site.audit.entries()) == Usage(frozenset({"run1"}), 1, 3)


def test_a_command_that_is_refused_leaves_what_a_site_has_kept(tmp_path: Path) -> None:
    """It is signed by its server, but repeated, of other terms, against the policy, or its message is not in order."""
    folder = make(tmp_path / "f", "fedcc", NAMES[:2], skew="iid", models="mlp")
    site, signer = limit(folder, "east", rounds=2, runs=1), CommandSigner(folder.command_key)
    kept: list[Any] = []

    def said(purpose: str, run: str, t: int, message: Any, **terms: Any) -> str:
        encoded = encode(message, "fp32", run=run, round=t)
        content = signer.content(purpose, "east", run, t, folder.terms("east") | terms, encoded)[1]
        kept.append((purpose, content))
        return str(asked(folder, "east", purpose, content).get("error", "sent"))

    def files() -> dict[str, bytes]:
        paths = (path for path in site.state.rglob("*") if path.is_file() and path.suffix != ".lock")
        return {str(p.relative_to(site.state)): p.read_bytes() for p in paths if p.name != "audit.jsonl"}

    ours = Predictions(torch.full((folder.task.public, folder.task.classes), 1 / folder.task.classes))
    assert [said("train", "run1", 1, None), said("train", "run1", 2, ours)] == ["sent", "sent"]
    before = files()
    assert any("round-" in name for name in before)
    assert asked(folder, "east", *kept[0])["error"] == "replay"
    image = Inputs(torch.zeros(1, 1, 8, 8, dtype=torch.uint8))
    for code, *question in (
        ("policy", "train", "run1", 1, ours),
        ("policy", "train", "run2", 1, None),
        ("round", "train", "run1", 3, ours),
        ("message", "query.predict", "run1", 2, Inputs(torch.zeros(1, 8, 8))),
        ("rounds", "query.predict", "run2", 1, image),
    ):
        assert said(*question) == code, question  # type: ignore[arg-type]
        assert files() == before, question
    assert said("train", "run1", 2, ours, rounds=9) == "terms"
    assert files() == before


def test_every_training_counts(tmp_path: Path) -> None:
    """Two messages in turn overwrite each other's answer, so each is a training again; purposes are those of a list."""
    folder = make(tmp_path / "f", "fedcc", NAMES[:2], rounds=3, skew="iid")
    site, signer = limit(folder, "east", rounds=3), CommandSigner(folder.command_key)
    messages = [torch.rand(folder.task.public, folder.task.classes).softmax(-1) for _ in range(2)]

    def answer(which: int | None, t: int = 1, purpose: str = "train") -> str:
        message = None if which is None else Predictions(messages[which])
        encoded = encode(message, "fp32", run="run1", round=t)
        content = signer.content(purpose, "east", "run1", t, folder.terms("east"), encoded)[1]
        return str(asked(folder, "east", purpose, content).get("error", "sent"))

    def trained() -> int:
        return len((site.state / "run1" / "rounds.jsonl").read_text().splitlines())

    assert answer(None, purpose="train.default") == "command"
    assert not (site.state / "run1").exists(), "nothing is written for a command that is refused"
    assert [answer(0), answer(0), answer(1), answer(1), answer(0), answer(0)] == ["sent"] * 6
    assert trained() == Usage.of(site.audit.entries()).rounds == 3
    assert [answer(0), answer(1), answer(1, t=2), answer(0)] == ["sent", "policy", "policy", "sent"]
    assert answer(1, purpose="train.default") == "command"
    assert trained() == Usage.of(site.audit.entries()).rounds == 3


def test_a_round_whose_answer_is_no_longer_kept_counts_again(tmp_path: Path) -> None:
    """A site keeps two rounds: the server cannot have the first one trained again and again."""
    folder = make(tmp_path / "f", rounds=3)
    site = limit(folder, "east", rounds=4)
    transport = LocalTransport(folder)
    transport.server().train()
    signer = CommandSigner(folder.command_key)

    def again() -> str:
        encoded = encode(None, "fp32", run="run1", round=1)
        content = signer.content("train", "east", "run1", 1, folder.terms("east"), encoded)[1]
        return str(asked(folder, "east", "train", content).get("error", "sent"))

    assert [again(), again()] == ["sent", "sent"]
    assert Usage.of(site.audit.entries()).rounds == 4
    for path in (site.state / "run1").glob("round-*"):
        path.unlink()
    assert again() == "policy"


def test_a_method_that_is_not_allowed(tmp_path: Path, capsys: Capsys) -> None:
    folder = make(tmp_path / "f")
    limit(folder, "west", methods=["fedmd"])
    words = ("federation", "client", folder.site("west"), "--data", folder.site("west") / "data.npz")
    call(capsys, *words).failed("the policy of west forbids it: methods are fedmd, the experiment's is fedcc", code=2)
    with pytest.raises(ValueError, match="runs must be at least -1, got -3"):
        limit(folder, "north", runs=-3)


@pytest.mark.slow
def test_limits_hold_between_processes(tmp_path: Path) -> None:
    names = NAMES[:2]
    folder = make(tmp_path / "f", "fedcc", names, rules={"quorum": 1, "strikes": 1}, skew="iid")
    site = limit(folder, "east", rounds=1, queries=0)
    with real(folder, tmp_path / "programs") as federation:
        federation.server()
        federation.client("north", "--share-model")
        limited = federation.client("east")
        done = federation.run().end(240)
        assert done.code == 0, done
        assert "policy: 0 of 1 rounds used, 0 of 0 queries used" in federation.said(limited)
        (line, *_) = (
            s for s in federation.said(limited).splitlines() if "at most 1 rounds, this would be number 2" in s
        )
        assert " WARNING fedcc: policy: " in line
    rounds = [r["federation"] for r in RunFolder(folder.run).metrics()]
    assert [r["present"] for r in rounds] == [["north", "east"], ["north"]]
    answers = [e["answer"] for e in site.audit.entries() if e["kind"] == "answered"]
    assert answers[:2] == ["sent", "policy"]
    assert set(answers[2:]) <= {"declined"}
