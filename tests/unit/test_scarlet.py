"""SCARLET: caches that agree on both sides, what is asked for, and the reductions (docs/deviations.md)."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fedcc.core.messages import Rows, nbytes
from fedcc.core.requests import Recipe
from fedcc.core.rng import SERVER, Key
from fedcc.core.roles import Server
from fedcc.core.samples import Samples
from fedcc.engine import Plain, drive
from fedcc.errors import PointlessSetting
from fedcc.methods import DSFL, LSR, SCARLET, FedMD, dsfl
from fedcc.methods.abstention import entropy
from fedcc.methods.scarlet import Cached, due, subset
from fedcc.methods.sharpen import enhanced_era
from recording import record
from steps import equal
from tiny import Mlp, Tiny

LABELS = ([0, 1] * 8, [1, 2] * 8, [2, 0] * 8)


def ran(method: Any, rounds: int = 3, **given: Any) -> Tiny:
    return Tiny(method, **{"labels": LABELS, "factories": (Mlp(8), Mlp(12))} | given).run(rounds)


def same_clients(a: Tiny, b: Tiny) -> bool:
    return all(equal(x.model.state, y.model.state) for x, y in zip(a.clients, b.clients, strict=True))


# -- reductions


@pytest.mark.filterwarnings("ignore::fedcc.errors.PointlessSetting")
def test_without_cache_subset_and_power_it_is_fedmd_and_lsr_to_the_bit() -> None:
    mine = ran(SCARLET(beta=1.0, lifetime=0, share=1.0))
    assert same_clients(mine, ran(FedMD(loss="kl", average="probs")))
    assert same_clients(mine, ran(LSR(a=0.0)))
    assert not same_clients(mine, ran(SCARLET(beta=2.0, lifetime=0, share=1.0)))
    assert not same_clients(mine, ran(SCARLET(beta=1.0, lifetime=1, share=1.0)))


def test_without_cache_and_subset_it_is_dsfl_with_a_power(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ran(SCARLET(beta=3.0, lifetime=0, share=1.0))
    monkeypatch.setattr(dsfl, "era", lambda p, _: enhanced_era(p, 3.0))
    theirs = ran(DSFL())
    assert same_clients(mine, theirs)
    assert equal(mine.server.models["global"].state, theirs.server.models["global"].state)
    assert torch.equal(mine.scores(), theirs.scores())


# -- sharpening


@pytest.mark.parametrize("beta", [1.0, 1.5, 4.0])
def test_the_entropy_never_rises(beta: float) -> None:
    p = torch.distributions.Dirichlet(torch.full((50,), 0.2, dtype=torch.float64)).sample(torch.Size((200,)))
    assert (entropy(enhanced_era(p, beta)) <= entropy(p) + 1e-12).all()
    assert enhanced_era(p, 500.0).amax(-1).median() > 0.99


# -- what is asked for


def test_both_sides_draw_the_same_samples_and_all_of_them_with_share_1() -> None:
    tiny = ran(SCARLET(), 1)
    for t in range(4):
        drawn = subset(tiny.server, t, 0.5)
        assert drawn.tolist() == sorted(Key(0, t, SERVER, "subset").generator().permutation(24)[:12])
        assert (drawn.diff() > 0).all()
        assert all(subset(c, t, 0.5).equal(drawn) for c in tiny.clients)
        assert subset(tiny.server, t, 1.0).equal(torch.arange(24))
    assert not subset(tiny.server, 1, 0.5).equal(subset(tiny.server, 2, 0.5))


def test_a_row_is_due_after_its_lifetime_and_not_before() -> None:
    rows = torch.arange(4)
    expires = torch.tensor([0, 5, 6, 7])
    assert due(expires, rows, 6).tolist() == [0, 1]
    assert due(expires, rows[2:], 7).tolist() == [2]


def asked(method: SCARLET, rounds: int, publics: int = 2000) -> list[float]:
    """The share of a round's samples that is asked for, from the server's bookkeeping alone."""
    arch = Tiny(method).clients[0].arch
    public = Samples({"x": torch.zeros(publics, 6)})
    server = Server(public=public, classes=3, recipe=Recipe(epochs=0), key=Key(0), archs={0: arch})
    engine, found = Plain("cpu", "fp32"), []
    downs = drive([method.start(server)], engine)[0]
    for t in range(1, rounds + 1):
        server.begin(t)
        request = downs[0].request
        found.append(len(request) / (method.share * publics))
        up = {0: dsfl.Predictions(torch.full((len(request), 3), 1 / 3))}
        downs = drive([method.server(server, up)], engine)[0]
    return found


@pytest.mark.parametrize(
    ("share", "lifetime", "expired", "saved"),
    [(0.5, 4, "refresh", 0.664), (0.5, 4, "drop", 0.500), (0.1, 50, "refresh", 0.832), (0.1, 50, "drop", 0.715)],
)
def test_the_share_of_answers_that_caches_save(share: float, lifetime: int, expired: Any, saved: float) -> None:
    """FD / (1 + fD) if an expired row is refreshed, fD / (2 + fD) if dropped. The official f and D come last."""
    begin, rounds = 4 * lifetime, max(40, 5 * lifetime)
    shares = asked(SCARLET(share=share, lifetime=lifetime, expired=expired), begin + rounds)
    assert shares[0] == 1
    assert 1 - sum(shares[begin:]) / rounds == pytest.approx(saved, abs=0.02)


@pytest.mark.parametrize(("expired", "saved"), [("refresh", 0.63), ("drop", 0.50)])
def test_what_caches_save_in_a_run_of_15_rounds(expired: Any, saved: float) -> None:
    assert 1 - sum(asked(SCARLET(expired=expired), 15)) / 15 == pytest.approx(saved, abs=0.02)
    assert sum(asked(SCARLET(lifetime=0), 4)) == 4


def test_caching_everything_at_once_is_warned_of() -> None:
    """All targets would expire together."""
    with pytest.warns(PointlessSetting) as found:
        ran(SCARLET(share=1.0, lifetime=2), 0)
    assert [str(warning.message) for warning in found] == [
        "with share=1 all targets of SCARLET expire together: for lifetime=2 rounds they stay the same; set lifetime=0 "
        "or a smaller share"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method in (SCARLET(), SCARLET(share=1.0, lifetime=0), SCARLET(share=0.99, lifetime=9)):
            ran(method, 0)


# -- caches


@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_the_clients_caches_are_the_servers(participation: float) -> None:
    """On every row of the round's samples, after any pattern of absences."""
    tiny = Tiny(SCARLET(), labels=LABELS + LABELS, options={"participation": participation})
    seen = 0
    for done in tiny_rounds(tiny, 6):
        visited = subset(tiny.server, tiny.server.round - 1, 0.5)
        for k in done.ups:
            if tiny.server.round > 1:
                memory = tiny.clients[k].memory
                assert memory["known"][visited].all()
                assert torch.equal(memory["cache"][visited], tiny.kept[visited])  # type: ignore[attr-defined]
                seen += 1
        tiny.kept = tiny.server.memory["cache"]  # type: ignore[attr-defined]
    assert seen > 8


def tiny_rounds(tiny: Tiny, rounds: int) -> Any:
    from fedcc.federate import federate

    return federate(tiny.method, tiny.server, tiny.cohort, rounds, tiny.executor)


@pytest.mark.filterwarnings("ignore::fedcc.errors.PointlessSetting")
def test_targets_are_the_sharpened_mean_and_stay_until_they_expire() -> None:
    tiny = ran(SCARLET(beta=2.0, share=1.0, lifetime=2), 5)
    sizes = [len(done.ups[0].values) for done in tiny.rounds]
    assert sizes == [24, 0, 0, 24, 0]
    first = tiny.rounds[0]
    mean = torch.stack([up.values for up in first.ups.values()]).mean(0)
    torch.testing.assert_close(first.downs[0].values, mean**2 / (mean**2).sum(-1, keepdim=True))
    assert [len(done.downs[0].rows) for done in tiny.rounds] == [24, 0, 0, 24, 0]
    assert nbytes(first.downs[0]) == 24 * 4 * (3 + 1)
    assert [done.bytes_up for done in tiny.rounds] == [3 * 4 * 3 * n for n in sizes]


@pytest.mark.filterwarnings("ignore::fedcc.errors.PointlessSetting")
def test_a_sample_that_nobody_answered_keeps_its_target_or_has_none() -> None:
    """Without a target it teaches nobody, and is asked for again."""
    tiny = Tiny(SCARLET(share=1.0, lifetime=1), labels=LABELS, factories=(Mlp(norm=False),))
    downs = tiny.ask(tiny.method.start(tiny.server))
    first, targets = tiny.server.models["global"], []
    for t, answered in enumerate((False, True, True, False), 1):
        tiny.server.begin(t)
        for c in tiny.clients:
            c.begin(t)
        ups = {k: tiny.ask(tiny.method.client(c, downs[k])) for k, c in enumerate(tiny.clients)}
        downs = tiny.ask(tiny.method.server(tiny.server, ups if answered else {}))
        targets.append(tiny.server.memory["cache"].clone())
        if t == 1:
            assert not targets[0].any()
            assert equal(tiny.server.models["global"].state, first.state)
            assert all(not len(down.rows) and len(down.request) == 24 for down in downs.values())
    torch.testing.assert_close(targets[1].sum(-1), torch.ones(24, dtype=torch.float64))
    assert targets[3].equal(targets[1])
    assert all(len(down.request) == 24 for down in downs.values())


@pytest.mark.filterwarnings("ignore::fedcc.errors.PointlessSetting")
def test_a_client_that_was_away_gets_the_difference() -> None:
    tiny = Tiny(SCARLET(share=1.0, lifetime=9), labels=LABELS)
    downs = tiny.ask(tiny.method.start(tiny.server))
    ups: dict[int, Any] = {}
    for t in (1, 2):
        tiny.server.begin(t)
        for k in (0, 1):  # client 2 is away
            tiny.clients[k].begin(t)
            ups[k] = tiny.ask(tiny.method.client(tiny.clients[k], downs[k]))
        downs = tiny.ask(tiny.method.server(tiny.server, ups))
    assert [len(downs[k].rows) for k in range(3)] == [0, 0, 24]


def test_the_server_learns_only_this_rounds_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, Tensor]] = []
    tiny = Tiny(SCARLET(share=0.25), labels=LABELS)
    fit = tiny.executor.fit

    def noted(request: Any) -> Any:
        if request.key.phase == "distil":
            sizes.append((len(request.streams["public"]), request.streams["public"]["target"].sum(-1)))
        return fit(request)

    monkeypatch.setattr(tiny.executor, "fit", noted)
    tiny.run(3)
    assert [n for n, _ in sizes] == [6, 6, 6]
    assert all(torch.allclose(total, torch.ones_like(total)) for _, total in sizes)  # all have a target


def test_clients_learn_the_samples_of_the_round_before() -> None:
    asked = record(tiny := Tiny(SCARLET(share=0.25), labels=LABELS))
    tiny.run(3)
    for fit in asked.fits("sync", client=0):
        rows = subset(tiny.server, fit.key.round - 1, 0.25)
        assert torch.equal(fit.streams["public"].x, tiny.public.x[rows])


def test_a_cached_message_is_rows_with_a_request() -> None:
    assert issubclass(Cached, Rows)
    with pytest.raises(ValueError, match="a row of values for each of 2, got 1"):
        Rows(torch.arange(2), torch.zeros(1, 3))
