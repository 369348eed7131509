"""The rounds of a federation, with clients that are served in this process: equality with the simulator, faults."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import Array, ArrayRecord

from fedcc import __version__
from fedcc.engine import Plain
from fedcc.experiments.result import Result
from fedcc.experiments.store import RunFolder
from fedcc.flower import cohort as cohort_module
from fedcc.flower import superlink
from fedcc.flower.codec import EncodedMessage, read_content, write_content
from fedcc.flower.cohort import NoQuorum
from fedcc.flower.demo import simulate
from fedcc.flower.folder import FederationFolder
from fedcc.flower.logs import Level
from fedcc.flower.members import revoke_client
from federation import NAMES, LocalTransport, make


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohort_module, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(cohort_module, "ONLINE_SECONDS", 0.0)


def records(folder: FederationFolder) -> list[dict[str, Any]]:
    return RunFolder(folder.run).metrics()


def sent(folder: FederationFolder) -> dict[tuple[int, str], str]:
    found = {}
    for name in folder.clients:
        for lines in (folder.path / "sites" / name / "state").glob("*/rounds.jsonl"):
            for line in map(json.loads, lines.read_text().splitlines()):
                found[line["round"], name] = line["sent"]
    return found


@pytest.mark.parametrize("method", ["fedcc", "fedavg"])
def test_uplinks_and_accuracy_are_the_simulators(method: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "f", method)
    LocalTransport(folder).server().train()
    simulated = simulate(folder.experiment)
    assert sent(folder) == simulated.uplinks
    found = RunFolder(folder.run).summary()
    assert found is not None
    assert found["accuracy"]["final"] == simulated.accuracy
    assert [list(r["readings"]) for r in records(folder)] == {  # FedCC's clients hand over their models at the end
        "fedavg": [["re-estimated"], ["re-estimated", "mirror"]],
        "fedcc": [[], ["trust=2", "trust=4", "mirror", "mirror,trust=4"]],
    }[method]
    assert [r["federation"]["present"] for r in records(folder)] == [list(NAMES)] * 2
    test = folder.test()
    assert test is not None
    right = Result.load(folder.run).predict(test["x"]) == test["y"]
    assert round(100 * float(right.double().mean()), 4) == simulated.accuracy


@pytest.mark.parametrize("method", ["fens", "fedproto", "scaffold", "scarlet"])
def test_methods_beyond_the_paper(method: str, tmp_path: Path) -> None:
    """Sites run each other's networks (FENS), the server keeps models on features and asks for some rows (SCARLET)."""
    settings = {"aggregator_rounds": 2} if method == "fens" else {}
    models = "resnet8" if method == "scaffold" else "resnet8,resnet14"
    folder = make(tmp_path / "f", method, settings=settings, models=models)
    LocalTransport(folder).server().train()
    simulated = simulate(folder.experiment)
    assert sent(folder) == simulated.uplinks
    test = folder.test()
    assert test is not None
    right = Result.load(folder.run).predict(test["x"]) == test["y"]
    assert round(100 * float(right.double().mean()), 4) == simulated.accuracy


def test_clients_that_keep_their_models_are_asked_to_predict(tmp_path: Path) -> None:
    folder = make(tmp_path / "f")
    transport = LocalTransport(folder, share={"north"})
    transport.server().train()
    found = RunFolder(folder.run).summary()
    assert found is not None
    assert found["accuracy"]["final"] == simulate(folder.experiment).accuracy
    assert found["federation"]["kept_models"] == ["east", "south", "west"]
    assert [r["readings"] for r in records(folder)] == [{}, {}]  # nobody is asked more than the method needs
    assert [purpose for _, purpose, _ in transport.sent].count("query.predict") == 3
    assert not (folder.run / "models.json").exists()
    x = folder.test()["x"][:7].numpy()  # type: ignore[index]
    np.savez(tmp_path / "in.npz", x=x)
    transport.server().query(tmp_path / "in.npz", tmp_path / "out.npz")
    answer = np.load(tmp_path / "out.npz")
    assert answer["scores"].shape == (7, 10)
    assert (answer["labels"] == answer["scores"].argmax(1)).all()


def test_predictions_do_not_wait_for_a_quorum_of_sites_that_are_not_connected(tmp_path: Path) -> None:
    rules = {"quorum": 3, "deadline": 1.0, "patience": 1, "grace": 0.1}
    folder = make(tmp_path / "f", rounds=1, models="mlp", rules=rules)
    LocalTransport(folder, share=set()).server().train()
    np.savez(tmp_path / "in.npz", x=np.load(folder.path / "public.npz")["x"][:3])
    transport = LocalTransport(folder, share=set(), away={"east", "south", "west"})
    transport.server().query(tmp_path / "in.npz", tmp_path / "out.npz")
    assert np.load(tmp_path / "out.npz")["scores"].shape == (3, 10)
    assert {name for name, *_ in transport.sent} == {"north"}
    assert "without east, south, west (absent)" in (folder.operator / "run.log").read_text()
    with pytest.raises(NoQuorum, match="none of north, east, south, west is connected"):
        LocalTransport(folder, away=set(NAMES)).server().query(tmp_path / "in.npz", tmp_path / "out.npz")


@pytest.mark.parametrize("share", [set[str](), set(NAMES)])
def test_predictions_have_nothing_of_a_revoked_client(tmp_path: Path, share: set[str]) -> None:
    """Neither by asking the sites nor, where all models are on the server, with the models."""
    folder = make(tmp_path / "f", rounds=1, models="mlp")
    LocalTransport(folder, share=share).server().train()
    source, asked = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, x=np.load(folder.path / "public.npz")["x"][:3])
    before = LocalTransport(folder, share=share)
    before.server().query(source, asked)
    with_all = np.load(asked)["scores"]
    folder = revoke_client(folder, "east")
    transport = LocalTransport(folder, share=share)
    transport.server().query(source, asked)
    assert {name for name, *_ in before.sent} - {name for name, *_ in transport.sent} == {"east"}
    scores = np.load(asked)["scores"]
    assert not np.allclose(scores, with_all)
    if share:
        superlink.predict(folder, source, tmp_path / "here.npz", print)
        np.testing.assert_array_equal(np.load(tmp_path / "here.npz")["scores"], scores)


def test_models_that_stay_at_their_sites_see_mirror_images_too(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", settings={"mirror": True})
    transport = LocalTransport(folder, share={"north"})
    transport.server().train()
    found = RunFolder(folder.run).summary()
    assert found is not None
    simulated = simulate(folder.experiment).accuracy
    assert found["accuracy"]["final"] == simulated
    assert simulated != simulate(dataclasses.replace(folder.experiment, settings={})).accuracy
    assert [purpose for _, purpose, _ in transport.sent].count("query.predict") == 6


def test_a_server_that_was_stopped_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", rounds=3)

    class Cut(Exception):
        pass

    def cut(*message: Any) -> None:
        if message == ("south", "train", 2):
            raise Cut

    transport = LocalTransport(folder, fault=cut)
    with pytest.raises(Cut):
        transport.server().train()
    assert [r["round"] for r in records(folder)] == [1]
    transport = LocalTransport(folder)
    transport.server().train()
    simulated = simulate(folder.experiment)
    assert sent(folder) == simulated.uplinks
    assert RunFolder(folder.run).summary()["accuracy"]["final"] == simulated.accuracy  # type: ignore[index]
    assert [r["round"] for r in records(folder)] == [1, 2, 3]
    lines = (folder.path / "sites" / "north" / "state" / "run1" / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3], "round 2 was computed once, and sent twice"


def test_failing_refused_late_and_lost_clients_are_recorded_and_the_run_ends(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", rounds=4, rules={"quorum": 2, "grace": 0.0, "strikes": 2})

    def spoiled(content: Any) -> Any:
        array = content["arrays"]["float32"]
        values = np.frombuffer(array.data, "<f4").copy()
        values[5] = np.nan
        content["arrays"] = ArrayRecord({"float32": Array("float32", array.shape, "fedcc", values.tobytes())})
        return content

    def fault(name: str, purpose: str, t: int) -> Any:
        if purpose != "train":
            return None
        return {("east", 1): RuntimeError("boom"), ("south", 2): spoiled, ("west", 1): "late"}.get((name, t))

    transport = LocalTransport(folder, fault=fault)
    server = transport.server()
    say = server.log.say

    def heard(text: str, level: Level = "info") -> None:
        say(text, level)
        if text.startswith("round 1 of"):
            transport.release()

    server.log.say = heard  # type: ignore[method-assign]
    server.train()
    first, second, third, fourth = (r["federation"] for r in records(folder))
    assert first["failed"] == {"east": "boom"}
    assert first["slow"] == ["west"]
    assert first["present"] == ["north", "south"]
    assert second["late"] == {"west": 1}
    assert "must be finite" in second["refused"]["south"]
    assert {"north", "east"} <= set(second["present"])
    assert third["present"] == fourth["present"] == list(NAMES)
    assert records(folder)[0]["present"] == [0, 2]


def test_a_client_that_says_it_was_lost_is_asked_again_ever_less_often(tmp_path: Path) -> None:
    """A client may report Flower's error for a lost message itself; it was sent the question as fast as it did."""
    folder = make(tmp_path / "f", rounds=1, models="mlp", rules={"quorum": 3, "grace": 2.0})
    lost = LocalTransport(
        folder, fault=lambda name, purpose, _: "lose" if (name, purpose) == ("west", "train") else None
    )
    lost.server().train()
    assert 2 <= lost.sent.count(("west", "train", 1)) <= 4
    assert records(folder)[0]["federation"]["present"] == ["north", "east", "south"]
    assert "WARNING round 1: west was lost" in (folder.operator / "run.log").read_text()


def test_a_client_that_keeps_failing_is_set_aside(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", rounds=3, rules={"quorum": 3, "grace": 0.0, "strikes": 2})
    transport = LocalTransport(folder, fault=lambda name, *_: RuntimeError("no disk") if name == "east" else None)
    transport.server().train()
    assert [r["federation"]["aside"] for r in records(folder)] == [[], ["east"], ["east"]]
    assert [s for s in transport.sent if s[0] == "east"] == [("east", "train", 1), ("east", "train", 2)]
    status = json.loads((folder.operator / "status.json").read_text())
    assert status["clients"]["east"]["aside"]
    assert status["clients"]["east"]["problem"] == "no disk"


def test_a_client_that_joins_late_starts_from_the_current_targets(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", rounds=3, rules={"quorum": 3, "grace": 0.0})
    transport = LocalTransport(folder, away={"west"})
    server = transport.server()
    say = server.log.say

    def heard(text: str, level: Level = "info") -> None:
        say(text, level)
        if text.startswith("round 2 of"):
            transport.away.clear()

    server.log.say = heard  # type: ignore[method-assign]
    server.train()
    assert [("west" in r["federation"]["present"], "west" in r["federation"]["absent"]) for r in records(folder)] == [
        (False, True),
        (False, True),
        (True, False),
    ]
    (lines,) = (folder.path / "sites" / "west" / "state").glob("*/rounds.jsonl")
    assert [json.loads(line)["round"] for line in lines.read_text().splitlines()] == [3]


def test_whoever_failed_is_asked_again_where_the_quorum_needs_it(tmp_path: Path) -> None:
    """West is not connected: waiting for it alone would never make a round."""
    folder = make(tmp_path / "f", rounds=1, rules={"quorum": 3, "deadline": 1.0, "patience": 30})
    tries = iter([RuntimeError("no memory")])
    transport = LocalTransport(folder, away={"west"})
    transport.fault = lambda name, *_: next(tries, None) if name == "east" else None
    transport.server().train()
    (report,) = (r["federation"] for r in records(folder))
    assert (report["present"], report["absent"]) == (["north", "east", "south"], ["west"])
    assert report["failed"] == {}


def test_a_server_that_goes_on_knows_who_answered_last(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", rules={"quorum": 3, "grace": 0.0, "deadline": 1.0, "patience": 1})
    transport = LocalTransport(folder, away={"west"})
    transport.fault = lambda *message: "lose" if message[2] == 2 else None
    with pytest.raises(NoQuorum):
        transport.server().train()
    with pytest.raises(NoQuorum):
        LocalTransport(folder, away=set(folder.clients)).server().train()
    status = json.loads((folder.operator / "status.json").read_text())
    assert [status["clients"][name]["answered"] for name in folder.clients] == [1, 1, 1, 0]


def test_a_client_whose_message_was_lost_without_notice_is_asked_anew(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", rounds=6, rules={"quorum": 3, "deadline": 1.0, "grace": 0.5})
    LocalTransport(folder, fault=lambda *message: "late" if message == ("west", "train", 1) else None).server().train()
    reports = [r["federation"] for r in records(folder)]
    assert reports[0]["slow"] == ["west"]
    assert "west" in reports[-1]["present"]
    assert not any(report["late"] for report in reports)


def test_without_a_quorum_the_run_stops_and_says_who_is_missing(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", rules={"deadline": 1.0, "patience": 1})
    transport = LocalTransport(folder, away={"west"})
    with pytest.raises(NoQuorum, match="west is not connected"):
        transport.server().train()
    transport.away.clear()
    transport.server().train()
    assert [r["federation"]["present"] for r in records(folder)] == [list(NAMES)] * 2


def test_a_site_refuses_an_experiment_that_it_has_not_agreed_to(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", rules={"strikes": 1})
    changed = dataclasses.replace(folder, experiment=folder.experiment.with_options(epochs=7))
    with pytest.raises(NoQuorum, match="epochs is 7 on the server, 1 at the site"):
        LocalTransport(changed).server().train()


def test_a_site_refuses_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "f", rules={"strikes": 1})
    monkeypatch.setattr(cohort_module, "__version__", "9.9")
    with pytest.raises(NoQuorum, match=rf"another version of fedcc: {re.escape(__version__)}, the server has 9\.9"):
        LocalTransport(folder).server().train()


def test_a_damaged_state_is_passed_over_and_the_one_before_is_used(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", rounds=2)
    LocalTransport(folder).server().train()
    state = folder.path / "sites" / "north" / "state" / "run1"
    latest = sorted(state.glob("round-*"))[-1]
    latest.write_bytes(latest.read_bytes()[:-1] + b"x")
    before = sent(folder)
    RunFolder(folder.run).clear()
    LocalTransport(folder).server().train()
    assert sent(folder) == before


def test_a_run_without_a_whole_checkpoint_is_not_begun_again(tmp_path: Path) -> None:
    """Its sites have the models of later rounds, and its records would be deleted."""
    folder = make(tmp_path / "f", "fedavg", rounds=2, models="mlp")
    LocalTransport(folder, share=set()).server().train()
    checkpoints = {path: path.read_bytes() for path in folder.run.glob("checkpoint-*")}
    (folder.run / "summary.json").unlink()
    records, last = (folder.run / "metrics.jsonl").read_bytes(), max(checkpoints)
    np.savez(tmp_path / "in.npz", x=np.load(folder.path / "public.npz")["x"][:3])
    last.write_bytes(b"")
    LocalTransport(folder).server().query(tmp_path / "in.npz", tmp_path / "out.npz")
    assert f"WARNING warning: {last} is not used" in (folder.operator / "run.log").read_text()
    for damage in (lambda path: path.write_bytes(checkpoints[path][:-9]), Path.unlink):
        for path in checkpoints:
            damage(path)
        with pytest.raises(ValueError, match=r"has no whole checkpoint: .*restore one.*--overwrite"):
            LocalTransport(folder).server().train()
    assert (folder.run / "metrics.jsonl").read_bytes() == records
    last.write_bytes(checkpoints[last])
    LocalTransport(folder).server().train()
    assert RunFolder(folder.run).summary() is not None


def test_whose_numbers_end_a_run_is_said(tmp_path: Path) -> None:
    """Within the limits of an upload; predictions of their average overflow."""
    folder = make(tmp_path / "f", "fedavg", rounds=1, rules={"quorum": 4, "strikes": 1})

    def spoiled(content: Any) -> Any:
        texts, buffers = read_content(content)
        kind, header = texts.pop("kind"), texts.pop("header")
        numbers = np.full_like(np.frombuffer(buffers["float32"], "<f4"), 1e18)
        return write_content(texts, EncodedMessage.parse(kind, header, {**buffers, "float32": numbers.tobytes()}))

    transport = LocalTransport(folder, fault=lambda name, *_: spoiled if name == "west" else None)
    with pytest.raises(FloatingPointError, match=r"not finite.*; the largest number in .* is west's, 1e\+18"):
        transport.server().train()


@pytest.mark.parametrize("method", ["fedcc", "fedavg"])
def test_a_server_without_a_test_set_trains_all_the_same(method: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "f", method)
    (folder.operator / "test.npz").unlink()
    LocalTransport(folder).server().train()
    found = RunFolder(folder.run).summary()
    assert found is not None
    assert found["accuracy"]["final"] is found["accuracy"]["best"] is None
    assert sent(folder) == simulate(folder.experiment).uplinks
    assert Result.load(folder.run).predict(np.zeros((2, 1, 8, 8), np.uint8)).shape == (2,)


def test_models_are_uploaded_whole_whatever_the_wire(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", wire="fp16", rounds=1)
    LocalTransport(folder).server().train()
    simulated = simulate(folder.experiment)
    assert sent(folder) == simulated.uplinks
    assert RunFolder(folder.run).summary()["accuracy"]["final"] == simulated.accuracy  # type: ignore[index]
    assert torch.is_tensor(next(iter(Result.load(folder.run).trained.clients.values())).state["head.weight"])


def test_a_site_computes_the_learning_rate_of_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "f", "fedavg", decay=0.5, schedule="cosine")
    rates, fit = dict[int, tuple[float, str]](), Plain.fit

    def recorded(self: Plain, request: Any) -> Any:
        rates[request.key.round] = request.recipe.lr, request.recipe.schedule
        return fit(self, request)

    with monkeypatch.context() as patch:
        patch.setattr(Plain, "fit", recorded)
        LocalTransport(folder).server().train()
    assert rates == {1: (0.001, "cosine"), 2: (0.0005, "cosine")}
    assert sent(folder) == simulate(folder.experiment).uplinks
    constant = simulate(folder.experiment.with_options(decay=1.0)).uplinks
    assert {t for t, name in constant if constant[t, name] != sent(folder)[t, name]} == {2}


def test_a_federation_evaluates_as_often_as_it_is_asked_to(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", "fedavg", rounds=3, evaluate_every=2, readings=False)
    LocalTransport(folder).server().train()
    assert [r["accuracy"] is None for r in records(folder)] == [True, False, False]
    assert [r["readings"] for r in records(folder)] == [{}, {}, {}]
    assert records(folder)[-1]["accuracy"] == simulate(folder.experiment).accuracy


def test_a_run_after_a_revocation_has_nothing_of_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`revoke` and `run --overwrite`: the numbers are those of a federation that the client never took part in."""

    def app(folder: FederationFolder, *_: Any) -> None:
        run = json.loads((folder.operator / "run.json").read_text())["run"]
        LocalTransport(folder).server(run).train()

    def outcome(folder: FederationFolder) -> tuple[dict[str, list[Any]], list[Any], Any]:
        run = json.loads((folder.operator / "run.json").read_text())["run"]
        lines = {p.parts[-4]: p.read_text().splitlines() for p in folder.path.glob(f"sites/*/state/{run}/rounds.jsonl")}
        uploads = {name: [json.loads(line)["sent"] for line in text] for name, text in lines.items()}
        return uploads, [r["present"] for r in records(folder)], RunFolder(folder.run).summary()["accuracy"]["final"]  # type: ignore[index]

    monkeypatch.setattr(superlink, "_run_app", app)
    monkeypatch.setattr(superlink, "check_server", lambda _: None)
    monkeypatch.setattr(superlink, "close_to_others", lambda *_: None)  # it changes this process's umask
    folder, other = make(tmp_path / "f"), make(tmp_path / "other")
    superlink.train(folder, False, print)
    assert outcome(folder)[1] == [[0, 1, 2, 3]] * 2
    for revoked in (folder, other):
        revoke_client(revoked, "east")
        superlink.train(FederationFolder.open(revoked.path), True, print)
    assert outcome(folder) == outcome(other)
    assert outcome(folder)[1] == [[0, 2, 3]] * 2
    assert set(outcome(folder)[0]) == {"north", "south", "west"}
