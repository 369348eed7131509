"""FedOV: outliers, the extra output, votes by certainty, and the reductions (docs/deviations.md)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcc.core.samples import Samples, View
from fedcc.losses import CrossEntropy
from fedcc.methods import FedOV, Local
from fedcc.methods import outliers as module
from fedcc.methods.abstention import aggregate
from fedcc.methods.fedov import SecondIsUnknown, heard, vote
from fedcc.methods.outliers import blurred, cropped, cut, erased, mixed, outliers, rotated
from recording import record
from steps import equal, gradient, labels, one
from tiny import Mlp, Tiny

LABELS = ([0] * 16, [1, 2] * 8, [2, 0] * 8)
VIEW = View(scale=1 / 255, mean=(0.5, 0.25, 0.0), std=(0.2, 0.2, 0.2))


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def images(n: int = 60, side: int = 16, seed: int = 0) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 3, side, side), dtype=torch.uint8, generator=draws)


def votes(seed: int = 0) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(5, 40, 4, dtype=torch.float64, generator=draws)).softmax(-1)


# -- votes


def test_all_votes_are_fedccs_aggregate_without_trust() -> None:
    v = votes()
    torch.testing.assert_close(vote(v) / 5, aggregate(v, 0)[:, :-1], rtol=0, atol=1e-15)
    assert vote(v).argmax(-1).equal(aggregate(v, 0)[:, :-1].argmax(-1))


def test_the_surest_vote_first() -> None:
    v = votes()
    best = v[..., -1].argmin(0)
    torch.testing.assert_close(vote(v, 1), torch.stack([v[k, i, :-1] for i, k in enumerate(best)]))
    assert heard(v, 2).sum(0).eq(2).all()
    assert torch.equal(vote(v, 5), vote(v))
    order = torch.tensor([3, 0, 4, 1, 2])
    for voters in (1, 2, None):
        torch.testing.assert_close(vote(v[order], voters), vote(v, voters))


def test_who_knows_nothing_changes_nothing() -> None:
    v = votes()
    silent = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64).expand(1, 40, 4)
    torch.testing.assert_close(vote(torch.cat([v, silent])), vote(v))


def test_votes_for_an_analysis_are_those_that_count() -> None:
    tiny = ran(FedOV(voters=2))
    trained, x = tiny.cohort.trained_models(tiny.server), tiny.test.only("x")
    found = tiny.ask(FedOV(voters=2).votes(trained, x))
    torch.testing.assert_close(found.trust.sum(0), torch.ones(24, dtype=torch.float64))
    torch.testing.assert_close(2 * (found.trust[..., None] * found.known).sum(0), tiny.scores())


# -- training


class KnownOnly(FedOV):
    """With as many outputs as Local has."""

    def outputs(self, classes: int) -> int:
        return classes


def ran(method: Any, rounds: int = 2) -> Tiny:
    return Tiny(method, LABELS, factories=(Mlp(8), Mlp(12))).run(rounds)


def test_without_outliers_and_unknown_it_is_local_to_the_bit() -> None:
    mine, theirs = ran(KnownOnly(weight=0.0)), ran(Local())
    assert all(equal(a.model.state, b.model.state) for a, b in zip(mine.clients, theirs.clients, strict=True))


def test_outliers_are_as_many_as_samples_and_labelled_unknown() -> None:
    asked = record(tiny := Tiny(FedOV(), LABELS))
    tiny.run(2)
    first, second = asked.fits(client=1)
    assert first.streams["outlier"]["y"].tolist() == [3] * 16
    assert len(first.streams["outlier"]) == len(first.streams["private"])
    assert first.joint
    assert not torch.equal(first.streams["outlier"].x, second.streams["outlier"].x)  # drawn anew
    assert str(first.loss) == str(0.5 * CrossEntropy("private") + 0.5 * CrossEntropy("outlier"))
    again = record(other := Tiny(FedOV(), LABELS))
    other.run(1)
    assert torch.equal(again.fits(client=1)[0].streams["outlier"].x, first.streams["outlier"].x)


def test_nothing_is_exchanged() -> None:
    tiny = ran(FedOV())
    assert [(done.bytes_up, done.bytes_down) for done in tiny.rounds] == [(0, 0)] * 2
    assert not FedOV().needs_public
    assert not FedOV().one_network


def test_unknown_learns_to_be_second() -> None:
    z, y = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), labels(1, 4, 6)
    expected = 0.0
    for row, label in zip(z, y, strict=True):
        others = torch.stack([v for c, v in enumerate(row) if c != label])
        expected -= float(others.log_softmax(0)[-1]) / 6
    assert float(one(SecondIsUnknown(), "private", z, y=y)) == pytest.approx(expected)
    slope = gradient(SecondIsUnknown(), "private", z, y=y)
    assert slope.gather(1, y[:, None]).abs().max() == 0
    assert (slope[:, -1] < 0).all()
    assert not torch.allclose(ran(FedOV(second=True)).scores(), ran(FedOV()).scores())


# -- outliers


def test_outliers_keep_shape_type_and_range_and_are_a_function_of_their_draws() -> None:
    samples = Samples({"x": images(200)}, VIEW)
    found = outliers(samples, generator())
    assert (found.shape, found.dtype) == (samples.x.shape, torch.uint8)
    assert torch.equal(found, outliers(samples, generator()))
    assert not torch.equal(found, outliers(samples, generator(1)))
    changed = (found != samples.x).flatten(1).double().mean(1)
    assert (changed > 0.1).all()
    floats = outliers(Samples({"x": images(20).float() / 255}), generator())
    assert floats.dtype == torch.float32
    assert 0 <= floats.min() <= floats.max() <= 1


def test_the_five_ways_have_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {}
    for name in ("cropped", "blurred", "erased", "cut", "rotated"):

        def noted(x: Tensor, *_: Any, name: str = name) -> Tensor:
            sizes[name] = len(x)
            return x

        monkeypatch.setattr(module, name, noted)
    outliers(Samples({"x": images(7000, 8)}, VIEW), generator())
    assert list(sizes) == ["cropped", "blurred", "erased", "cut", "rotated"]
    for n, weight in zip(sizes.values(), (1, 1, 1, 2, 2), strict=True):
        assert n == pytest.approx(1000 * weight, rel=0.15)


def test_a_crop_enlarges_a_part_of_the_image() -> None:
    """Of a ramp from left to right, a part remains: between 10 and 33 % of the area."""
    ramp = torch.arange(64.0).expand(300, 1, 64, 64)
    wide = cropped(ramp, generator())
    tall = cropped(ramp.mT, generator())
    spans = [(v.flatten(1).amax(1) - v.flatten(1).amin(1)) / 63 for v in (wide, tall)]
    area = spans[0] * spans[1]
    assert 0.09 < area.min() < 0.12
    assert 0.30 < area.max() < 0.34
    middle = (wide.flatten(1).amax(1) + wide.flatten(1).amin(1)) / 2
    assert middle.min() < 25 < 40 < middle.max()


def test_a_blur_is_a_mean_over_a_box() -> None:
    dot = torch.zeros(400, 1, 21, 21)
    dot[:, :, 10, 10] = 1
    found = blurred(dot, generator())
    torch.testing.assert_close(found.sum((1, 2, 3)), torch.ones(400))
    sizes = {(int(v.any(1).sum()), int(v.any(0).sum())) for v in found[:, 0] > 0}
    assert sizes == {(a, b) for a in (3, 5, 7, 9) for b in (1, 3, 5)} | {
        (b, a) for a in (3, 5, 7, 9) for b in (1, 3, 5)
    }


def test_a_third_to_a_half_is_erased_with_the_mean_colour() -> None:
    fill = VIEW.numbers(3, torch.device("cpu"))[0] / VIEW.scale
    found = erased(torch.full((300, 3, 32, 32), 9.0), generator(), fill)
    hidden = found[:, 0] != 9
    share = hidden.double().mean((1, 2))
    assert 0.28 < share.min() < 0.36
    assert 0.46 < share.max() < 0.54
    assert all(found[i][:, m].unique(dim=1).flatten().tolist() == fill.tolist() for i, m in enumerate(hidden))
    boxes = [int(m.any(1).sum()) * int(m.any(0).sum()) for m in hidden]
    assert boxes == hidden.sum((1, 2)).tolist()  # rectangles
    view_sees = VIEW.clean(found[:1].round())
    assert view_sees[0][:, hidden[0]].abs().max() < 0.02


def test_a_cut_pastes_a_band_or_swaps_halves() -> None:
    side = 16
    ramp = torch.arange(side).expand(400, 1, side, side).contiguous()
    found = cut(ramp, generator())
    rows = [v[0] for v in found if (v[0] == v[0][0]).all() and not torch.equal(v, ramp[0])]  # cut along the width
    swapped = torch.cat([torch.arange(8, 16), torch.arange(8)])
    kinds = {"swap": 0, "paste": 0}
    for row in (v[0] for v in rows):
        if row.equal(swapped):
            kinds["swap"] += 1
            continue
        kinds["paste"] += 1
        moved = (row != torch.arange(side)).nonzero()[:, 0]
        assert moved.tolist() == list(range(int(moved[0]), int(moved[0]) + 8))
        assert abs(int(row[moved[0]] - moved[0])) >= 4
        assert (row[moved].diff() == 1).all()
    assert len(rows) == pytest.approx(200, abs=40)
    assert kinds["swap"] == pytest.approx(100, abs=30)
    assert {int(r[0][(r[0] != torch.arange(side)).nonzero()[0, 0]] > 7) for r in rows} == {0, 1}  # both ways


def test_squares_of_a_band_are_turned() -> None:
    x = images(300, 8).float()
    found = rotated(x, generator())
    turns = set()
    for before, after in zip(x, found, strict=True):
        changed = (before != after).any(0)
        band = changed.any(1).nonzero()[:, 0]
        assert int(band[-1] - band[0]) <= 3
        top = next(t for t in range(5) if fits(before, after, t))
        for left in (0, 4):
            square, other = (v[:, top : top + 4, left : left + 4] for v in (before, after))
            turns |= {turn for turn in (1, 2, 3) if torch.equal(square.rot90(turn, (1, 2)), other)}
    assert turns == {1, 2, 3}


def fits(before: Tensor, after: Tensor, top: int) -> bool:
    """Whether both squares of this band were turned, and nothing else was."""
    rest = torch.ones(8, 8, dtype=torch.bool)
    rest[top : top + 4] = False
    squares = [(v[:, top : top + 4, left : left + 4] for v in (before, after)) for left in (0, 4)]
    return torch.equal(before[:, rest], after[:, rest]) and all(
        any(torch.equal(a.rot90(turn, (1, 2)), b) for turn in (1, 2, 3)) for a, b in squares
    )


def test_other_inputs_get_half_of_another_samples_numbers() -> None:
    x = torch.arange(30).view(5, 6)
    found = mixed(x, generator())
    assert ((found != x).sum(1) == 3).all()
    assert (found % 6 == torch.arange(6)).all()  # each stays in its place
    for row in found:
        assert len({int(v) // 6 for v in row}) == 2
    assert torch.equal(mixed(x[:1], generator()), x[:1])
    assert math.prod(mixed(torch.zeros(3, 5, 1), generator()).shape) == 15


# -- outliers, where exactly


def test_images_of_one_colour_show_what_is_erased_and_nothing_else() -> None:
    samples = Samples({"x": torch.full((300, 3, 16, 16), 9, dtype=torch.uint8)}, VIEW)
    found = outliers(samples, generator())
    changed = (found != 9).any(1)
    assert 25 < int(changed.any((1, 2)).sum()) < 65  # a seventh of them
    for channel, colour in enumerate((127, 64, 0)):
        assert found[:, channel][changed].unique().tolist() == [colour]
    torch.testing.assert_close(cropped(samples.x, generator()), samples.x.float())  # no border is mixed in


def test_erased_parts_lie_anywhere() -> None:
    hidden = erased(torch.ones(400, 1, 32, 32), generator(), torch.zeros(1))[:, 0] == 0
    for side in (1, 2):
        edges = hidden.any(side)[:, [0, -1]].double().mean(0)
        assert (edges > 0.004).all()
        assert (edges < 0.5).all()


@pytest.mark.parametrize(("side", "half", "quarter"), [(16, 8, 4), (10, 5, 3)])
def test_bands_of_a_cut_are_all_that_are_a_quarter_apart(side: int, half: int, quarter: int) -> None:
    ramp = torch.arange(side).expand(4000, 1, side, side).contiguous()
    pairs = set()
    for row in cut(ramp, generator())[:, 0, 0]:
        moved = (row != torch.arange(side)).nonzero()[:, 0]
        if len(moved) == half:
            pairs.add((int(moved[0]), int(row[moved[0]])))
    assert pairs == {(a, b) for a in range(half + 1) for b in range(half + 1) if abs(a - b) >= quarter}


def test_bands_of_turned_squares_lie_anywhere() -> None:
    x = images(400, 8)[:, :, :, :8].repeat(1, 1, 2, 1)[:, :, :12].float()  # 12 rows, 8 columns
    changed = (rotated(x, generator()) != x).any(1).any(2)
    tops = {int(rows.nonzero()[0]) for rows in changed}
    assert {0, 8} <= tops <= set(range(12))
    assert max(int(rows.nonzero()[-1]) for rows in changed) == 11


def test_images_of_three_pixels_are_mixed() -> None:
    x = images(9, 3)
    assert torch.equal(outliers(Samples({"x": x}, VIEW), generator()), mixed(x, generator()))
