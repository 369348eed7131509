"""What a site has disclosed, over all runs, and what it means for one record."""

from __future__ import annotations

import math
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcc.core.digests import DamagedFile
from fedcc.flower.answers import AnswerStore, questions, stored_labels
from fedcc.flower.ledger import Ledger
from fedcc.flower.policy import AuditLog, Policy
from fedcc.flower.site_error import SiteError

pytest.importorskip("dp_accounting")


def note(log: AuditLog, answers: int, run: str = "a", share: str = "noisy", epsilon: float = 2.0) -> None:
    noise = {"epsilon": epsilon, "columns": 11} if share == "noisy" else {}
    log.disclosed("train", run, 1, "n", share, answers, **noise)  # type: ignore[arg-type]


def test_all_runs_count_together(tmp_path: Path) -> None:
    note(AuditLog(tmp_path), 144)
    note(AuditLog(tmp_path), 144, "b")
    note(AuditLog(tmp_path), 10, "b", epsilon=1.0)
    ledger = AuditLog(tmp_path).ledger()
    assert ledger.noisy == {(2.0, 11): 288, (1.0, 11): 10}
    assert ledger.summed_epsilon == 586
    assert ledger.text().startswith(
        "noisy: 10 answers with epsilon 1 per answer (11 different labels)\nnoisy: 288 answers"
    )
    assert "at delta 1e-06, 586 at delta 0" in ledger.text()


def test_one_answer_costs_its_epsilon_and_many_cost_far_more() -> None:
    assert Ledger({(2.0, 11): 1}).record_epsilon() == 2.0
    assert Ledger().record_epsilon() == 0
    assert Ledger().text() == ""
    one_run = Ledger({(2.0, 11): 787}).record_epsilon()
    assert 577 < one_run < 787 * 2, "at least the mean loss, (p - q) epsilon for each answer"
    assert Ledger({(2.0, 11): 7870}).record_epsilon() > 5 * one_run


@settings(max_examples=25)
@given(epsilon=st.floats(0.05, 8), columns=st.integers(2, 101), number=st.integers(1, 10**6))
def test_a_record_level_epsilon_lies_between_the_mean_loss_and_the_sum(
    epsilon: float, columns: int, number: int
) -> None:
    found = Ledger({(epsilon, columns): number}).record_epsilon()
    gap = math.expm1(epsilon) / (math.exp(epsilon) + columns - 1)  # chance of the true label minus that of another
    assert found <= number * epsilon
    assert found >= min(number * epsilon, 0.9 * number * gap * epsilon) - 1e-9
    assert found <= Ledger({(epsilon, columns): 2 * number}).record_epsilon()


def test_what_is_sent_without_noise_has_no_bound(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    note(log, 144)
    note(log, 144, share="labels")
    note(log, 1, share="models")
    assert log.ledger().record_epsilon() == math.inf
    assert "without noise: 144 labels, 1 models\nrecord-level epsilon over all runs: infinite" in log.ledger().text()


def test_answers_of_an_older_version_count_as_bare(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    for run in ("older", "old", "new"):
        if run == "new":
            log.allow(Policy(), run, 1, run, "train", 0, "", True)  # all of its answers were drawn in another run
        else:
            line = {"purpose": "train", "run": run, "round": 1, "nonce": run, "samples": 0}
            log._append(log.entries(), {"kind": "allowed", **line})
        if run == "old":
            note(log, 144, run)
        log.answered("train", {"nonce": run}, {"uint8": b"x"})
    assert log.ledger().bare == {"answers that an older version has sent": 1}


def test_a_policy_is_as_strict_as_it_says() -> None:
    refused = {
        ("labels", -1.0): {("predictions", 4.0)},
        ("noisy", -1.0): {("predictions", 4.0), ("labels", 4.0)},
        ("noisy", 2.0): {("predictions", 4.0), ("labels", 4.0), ("noisy", 4.0)},
        ("predictions", 2.0): {("noisy", 4.0)},
        ("predictions", -1.0): set(),
    }
    for (share, limit), wrong in refused.items():
        policy = Policy.read({"share": share, "answer_epsilon": limit})
        for form in [("predictions", 4.0), ("labels", 4.0), ("noisy", 4.0), ("noisy", 2.0)]:
            if form in wrong:
                with pytest.raises(SiteError, match="the experiment's is") as error:
                    policy.check_share(*form)  # type: ignore[arg-type]
                assert error.value.code == "policy"
            else:
                policy.check_share(*form)  # type: ignore[arg-type]
    assert Policy.read({"share": "labels"}).table() == {"share": "labels"}
    with pytest.raises(ValueError, match="share must be one of"):
        Policy.read({"share": "nothing"})


def test_a_stored_answer_is_given_again(tmp_path: Path) -> None:
    x = torch.arange(12.0).view(4, 3)
    x[3] = x[0]
    store, asked = AnswerStore(tmp_path), questions("model", x)
    assert store.missing(asked) == [0, 1, 2], "the same sample is one question"
    store.add([asked[at] for at in (0, 1, 2)], torch.tensor([5, 300, 7]))
    again = AnswerStore(tmp_path)
    assert again.answers(asked).tolist() == [5, 300, 7, 5]
    assert again.missing(asked) == []
    assert len(again.missing(questions("another", x))) == 3, "another model is another question"
    store.path.write_bytes(store.path.read_bytes()[:-1] + b"?")
    with pytest.raises(DamagedFile, match="does not match its checksum"):
        AnswerStore(tmp_path)


def test_answers_that_are_lost_are_not_drawn_again(tmp_path: Path) -> None:
    """With fresh noise for each loss, noise would average out."""
    asked = questions("model", torch.arange(6.0).view(2, 3))
    store = AnswerStore(tmp_path)
    assert AnswerStore(tmp_path, 2).missing(asked) == [0, 1], "a crash between the log's line and the answers"
    store.add(asked, torch.tensor([5, 6]))
    store.path.unlink()
    for read in (AnswerStore, stored_labels):
        with pytest.raises(DamagedFile, match="noisy-answers is damaged: it is missing, but 2 answers with noise"):
            read(tmp_path, 2)
    assert AnswerStore(tmp_path).missing(asked) == [0, 1], "a site that has given none"


def test_answers_of_an_older_version_are_taken_over(tmp_path: Path) -> None:
    """It had a file for each run; what two of them say of a question, the first one says."""
    asked = questions("model", torch.arange(12.0).view(4, 3))
    for run, labels in (("run1", {0: 5, 1: 6}), ("run2", {1: 7, 2: 8})):
        (tmp_path / run).mkdir()
        rows = b"".join(asked[at] + label.to_bytes(4, "little") for at, label in labels.items())
        (tmp_path / run / "answers").write_bytes(rows + sha256(rows).digest())
    assert AnswerStore(tmp_path).missing(asked) == [3]
    store = AnswerStore(tmp_path)
    assert store.answers(asked[:3]).tolist() == [5, 6, 8]
    store.path.unlink()
    with pytest.raises(DamagedFile, match="noisy-answers is damaged: it is missing"):
        AnswerStore(tmp_path, 3)
