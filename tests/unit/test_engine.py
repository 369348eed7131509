"""The plain engine: batches, augmentation, Adam, what a fit may and may not move."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedcc.core.model import Arch, Model, Outputs
from fedcc.core.requests import Fit, Fitted, Frozen, Init, Predict, Recipe, Request
from fedcc.core.rng import Key
from fedcc.core.samples import Samples, View
from fedcc.core.step import Gradient, Loss, Step, norm
from fedcc.engine import Plain, default_precision
from fedcc.engine.adam import Adam
from fedcc.engine.fused import Fused
from fedcc.engine.plain import learning_rate
from fedcc.engine.plan import Plan
from fedcc.gradients import Ascent, Clip
from fedcc.losses import CrossEntropy, SoftCrossEntropy
from fedcc.methods import FedAvg
from fedcc.nets import ResNet, build
from recording import changed, record, same
from steps import augmentation, batches
from tiny import Mlp, Tiny, blobs

KEY = Key(0, 1, 2, "fit", "private")
quickly = settings(max_examples=40)


# -- plan


@quickly
@given(st.integers(1, 40), st.integers(1, 16), st.integers(0, 12), st.integers(0, 12))
def test_a_longer_plan_begins_with_the_shorter_one(samples: int, batch: int, steps: int, more: int) -> None:
    short, long = batches(KEY, samples, batch, steps), batches(KEY, samples, batch, steps + more)
    assert short.shape == (steps, batch)
    assert torch.equal(long[:steps], short)


@quickly
@given(st.integers(1, 40), st.integers(1, 16), st.lists(st.integers(0, 9), max_size=4), st.booleans())
def test_a_plan_made_in_parts_is_the_whole_plan(samples: int, batch: int, parts: list[int], strong: bool) -> None:
    view = View(pad=2, flip=True, hole=0.5 * strong)
    plan = Plan(KEY, samples, batch, view)
    made = [(plan.indices(n), plan.augmentation(n)) for n in parts]
    assert [len(rows) for rows, _ in made] == parts
    for column, whole in enumerate(
        (batches(KEY, samples, batch, sum(parts)), augmentation(KEY, view, batch, sum(parts)))
    ):
        assert torch.equal(torch.cat([whole[:0], *(part[column] for part in made)]), whole)


@quickly
@given(st.integers(1, 40), st.integers(1, 16), st.integers(1, 3))
def test_every_epoch_holds_every_sample_and_full_batches_only(samples: int, batch: int, epochs: int) -> None:
    per_epoch = math.ceil(samples / batch)
    plan = batches(KEY, samples, batch, epochs * per_epoch).view(epochs, per_epoch * batch)
    for epoch in plan:
        seen = torch.bincount(epoch, minlength=samples)
        assert len(seen) == samples  # no index beyond the samples
        assert seen.min() >= 1
        assert seen.max() - seen.min() <= 1  # topped up from another permutation: nobody twice as often
        assert sorted(epoch[:samples].tolist()) == list(range(samples))


def test_fewer_samples_than_a_batch_are_repeated_inside_it() -> None:
    plan = batches(KEY, 3, 8, 2)
    assert plan.shape == (2, 8)
    for row in plan:
        assert torch.bincount(row, minlength=3).min() >= 2
    assert not torch.equal(plan[0], plan[1])


def test_epochs_differ() -> None:
    plan = batches(KEY, 32, 8, 8)
    assert not torch.equal(plan[:4], plan[4:])


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"round": 2}, {"client": 3}, {"phase": "refine"}, {"stream": "public"}], ids=str
)
def test_another_key_is_another_plan(other: dict[str, Any]) -> None:
    assert torch.equal(batches(KEY, 32, 8, 4), batches(Key(0, 1, 2, "fit", "private"), 32, 8, 4))
    assert not torch.equal(batches(KEY, 32, 8, 4), batches(KEY.of(**other), 32, 8, 4))


def test_a_stream_without_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one sample, got 0"):
        batches(KEY, 0, 8, 1)


# -- augmentation


def test_augmentation_draws_cover_their_range() -> None:
    draws = augmentation(KEY, View(pad=2, flip=True), 64, 20)
    assert draws.shape == (20, 64, 3)
    assert [draws[..., i].unique().tolist() for i in range(3)] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1]]
    unflipped = augmentation(KEY, View(pad=2), 64, 20)
    assert unflipped[..., 2].unique().tolist() == [0]
    flipped = augmentation(KEY, View(flip=True), 64, 20)
    assert flipped[..., :2].unique().tolist() == [0]
    assert float(flipped[..., 2].double().mean()) == pytest.approx(0.5, abs=0.05)


def test_augmentation_has_draws_of_its_own_that_a_longer_fit_begins_with() -> None:
    view = View(pad=2, flip=True)
    draws = augmentation(KEY, view, 8, 5)
    assert torch.equal(augmentation(KEY, view, 8, 9)[:5], draws)
    assert not torch.equal(augmentation(KEY.of(stream="public"), view, 8, 5), draws)
    assert augmentation(KEY, View(), 8, 5).numel() == 0


def test_the_centre_draw_is_the_clean_image() -> None:
    view = View(1 / 255, (0.4, 0.5), (0.2, 0.3), pad=3, flip=True)
    x = torch.randint(0, 256, (4, 2, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    centre = torch.tensor([[3, 3, 0]] * 4)
    assert torch.equal(view.augmented(x, centre), view.clean(x))
    assert torch.equal(view.augmented(x, centre + torch.tensor([0, 0, 1])), view.clean(x).flip(-1))


def test_a_crop_moves_the_image_and_fills_with_black() -> None:
    view = View(1.0, (0.5,), (0.5,), pad=1)
    x = torch.ones(1, 1, 3, 3)
    seen = view.augmented(x, torch.tensor([[0, 2, 0]]))  # a row of padding above, a column of it to the right
    assert torch.equal(seen[0, 0], torch.tensor([[-1.0, -1, -1], [1, 1, -1], [1, 1, -1]]))


def test_each_image_of_a_batch_has_its_own_draw() -> None:
    x = torch.arange(2 * 16.0).view(2, 1, 4, 4)
    view = View(pad=1, flip=True)
    seen = view.augmented(x, torch.tensor([[1, 1, 0], [1, 1, 1]]))
    assert torch.equal(seen[0], x[0])
    assert torch.equal(seen[1], x[1].flip(-1))


STRONG = View(1 / 255, (0.4, 0.5), (0.2, 0.3), pad=2, flip=True).with_augment("strong")


def test_strong_draws_begin_with_the_standard_ones() -> None:
    standard = augmentation(KEY, STRONG.with_augment("hole=0,brightness=0,shift=0"), 64, 20)
    draws = augmentation(KEY, STRONG, 64, 20)
    assert draws.shape == (20, 64, 7)
    assert torch.equal(draws[..., :3], standard)
    assert [(int(draws[..., i].min()), int(draws[..., i].max())) for i in range(3, 7)] == [(0, 255)] * 4


def test_a_hole_shows_the_mean_colour_and_is_cut_at_the_border() -> None:
    view = View(1 / 255, (0.5,), (0.25,)).with_augment("hole=0.5")
    x = torch.full((2, 1, 8, 8), 255, dtype=torch.uint8)
    seen = view.augmented(x, torch.tensor([[0, 0, 0, 128, 128, 9, 9], [0, 0, 0, 255, 0, 9, 9]]))
    middle, corner = torch.full((8, 8), 2.0), torch.full((8, 8), 2.0)
    middle[2:6, 2:6] = 0
    corner[5:, :2] = 0
    assert torch.equal(seen[0, 0], middle)
    assert torch.equal(seen[1, 0], corner)


def test_brightness_multiplies_before_the_shift_adds() -> None:
    view = View(1 / 255).with_augment("brightness=0.2,shift=0.1")
    x = torch.full((3, 1, 2, 2), 102, dtype=torch.uint8)  # 0.4
    draws = torch.zeros(3, 7, dtype=torch.long)
    draws[:, 5:] = torch.tensor([[0, 0], [255, 255], [255, 0]])
    seen = view.augmented(x, draws, torch.float64)[:, 0, 0, 0]
    torch.testing.assert_close(seen, torch.tensor([0.22, 0.58, 0.38], dtype=torch.float64))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("srtong", "did you mean 'strong'"),
        ("hole=2", "hole of an augmentation must be from 0 to 1, got 2"),
        ("hole=nan", "must be from 0 to 1, got nan"),
        ("holes=0.5", "did you mean 'hole'"),
        ("shift=much", "shift of an augmentation must be a number, got 'much'"),
    ],
)
def test_an_augmentation_that_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        View().with_augment(text)


@pytest.mark.parametrize("augment", ["standard", "strong", "shift=0.1"])
def test_training_sees_augmented_images_and_predicting_does_not(augment: str) -> None:
    view = View(pad=2, flip=True).with_augment(augment)
    plain = Plain(precision="fp64")
    model = plain.init(Init(Arch((Flat(),), 2, (1, 4, 4)), Key(0)))
    images = Samples({"x": torch.rand(16, 1, 4, 4), "y": torch.arange(16) % 2}, view)
    bare = Samples(images.columns, View())
    fits = [plain.fit(fit_of(model, private=s)).model.state for s in (images, bare)]
    assert changed(*fits)
    a, b = (plain.predict(Predict(model, s.only("x"))).logits for s in (images, bare))
    assert torch.equal(a, b)


# -- Adam


def gradients(seed: int, params: Mapping[str, Tensor]) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=g, dtype=p.dtype) * 10.0**seed for p in params.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adam_is_torchs_fused_one_to_the_bit(dtype: torch.dtype) -> None:
    ours = {"a": torch.randn(7, 3, dtype=dtype), "b": torch.randn((), dtype=dtype), "idle": torch.ones(2, dtype=dtype)}
    theirs = [p.clone().requires_grad_() for p in ours.values()]
    adam, reference = Adam(ours), torch.optim.Adam(theirs, lr=1e-3, fused=True)
    for t in range(6):
        lr = 1e-3 * (t + 1)
        reference.param_groups[0]["lr"] = lr
        for p, q, g in zip(ours.values(), theirs, gradients(t - 3, ours), strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        ours["idle"].grad = theirs[2].grad = None
        adam.step(lr)
        reference.step()
        assert all(torch.equal(p, q) for p, q in zip(ours.values(), theirs, strict=True))
    assert torch.equal(ours["idle"], torch.ones(2, dtype=dtype))


def test_adam_goes_on_from_its_state() -> None:
    whole, parts = {"a": torch.ones(5)}, {"a": torch.ones(5)}
    one, state = Adam(whole), {}
    for t in range(5):
        whole["a"].grad = gradients(t, whole)[0]
        one.step(1e-2)
        anew = Adam(parts, state)
        parts["a"].grad = gradients(t, parts)[0]
        anew.step(1e-2)
        state = anew.state()
    assert torch.equal(whole["a"], parts["a"])
    assert same(one.state(), state)
    before = state["mean/a"].clone()
    anew.step(1e-2)
    assert torch.equal(state["mean/a"], before)  # a state that was handed on moves no more


def test_adam_with_state_kept_over_the_round_is_one_long_fit() -> None:
    """reset="round": two fits of three steps on the plan of one of six are that one; reset="phase" starts anew."""
    samples = Samples({"x": blobs([0] * 8, 3), "y": torch.zeros(8, dtype=torch.long)})  # one batch: plans agree
    tiny = Tiny(FedAvg())
    model = tiny.clients[0].model
    long = tiny.executor.fit(fit_of(model, Recipe(1e-2, 8, steps=6, reset="round"), private=samples))
    for reset, equal in (("round", True), ("phase", False)):
        half = Recipe(1e-2, 8, steps=3, reset=reset)
        client = tiny.clients[0]
        client.model = model
        client.begin(1)
        tiny.ask(twice(client, half, samples))
        close = [torch.allclose(v, long.model.state[n], atol=1e-12) for n, v in client.model.state.items()]
        assert all(close) is equal


def test_adams_state_ends_with_the_round() -> None:
    tiny = Tiny(FedAvg(), recipe=Recipe(1e-2, 8, 1, reset="round"))
    asked = record(tiny)
    client = tiny.clients[0]
    for t in (1, 2):
        client.begin(t)
        tiny.ask(twice(client, client.recipe, client.private))
    assert [bool(f.optimizer) for f in asked.fits()] == [False, True, False, True]


def test_a_fit_of_a_part_leaves_the_state_of_the_whole() -> None:
    tiny = Tiny(FedAvg(), recipe=Recipe(1e-2, 8, 1, reset="round"))
    asked, client = record(tiny), tiny.clients[0]

    async def between() -> None:
        for phase, only in (("fit", None), ("head", "head"), ("refine", None)):
            await client.fit(phase, CrossEntropy("private"), private=client.private, only=only)

    client.begin(1)
    tiny.ask(between())
    whole, part, again = asked.fits()
    assert not whole.optimizer
    assert not part.optimizer
    assert any(name.startswith("mean/trunks") for name in again.optimizer)


async def twice(client: Any, recipe: Recipe, samples: Samples) -> None:
    for phase in ("fit", "refine"):
        await client.fit(phase, CrossEntropy("private"), private=samples, recipe=recipe)


def test_the_cosine_schedule_and_the_constant_one() -> None:
    cosine = Recipe(lr=2.0, schedule="cosine")
    assert [learning_rate(cosine, t, 4) for t in range(5)] == pytest.approx(
        [2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5), 0]
    )
    assert {learning_rate(Recipe(lr=0.3), t, 4) for t in range(4)} == {0.3}


def test_the_schedule_reaches_the_fit() -> None:
    a, b = (fitted(Recipe(1e-2, 8, 2, schedule=s)).model.state for s in ("constant", "cosine"))
    assert changed(a, b)


@pytest.mark.parametrize(
    ("field", "value", "rule"), [("lr", -1, "0"), ("batch", 0, "1"), ("epochs", -1, "0"), ("steps", -1, "0")]
)
def test_a_recipe_out_of_range_is_refused(field: str, value: int, rule: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least {rule}, got {value}"):
        Recipe(**{field: value})


# -- fits


@dataclass(frozen=True)
class Flat:
    """A factory for images: flatten, linear, BatchNorm, dropout, linear."""

    dropout: float = 0.0

    def __call__(self, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Dropout(self.dropout), nn.Linear(6, outputs)
        )


def fit_of(model: Model, recipe: Recipe | None = None, **request: Any) -> Fit:
    names = ("private", "public")
    streams = {name: request.pop(name) for name in names if name in request}
    loss = request.pop("loss", CrossEntropy("private"))
    return Fit(model, loss, streams, Key(0, 1, 2, "fit"), recipe or Recipe(1e-2, 8, 2), **request)


PRIVATE = Samples({"x": blobs([0, 1, 2] * 8, 3), "y": torch.arange(24) % 3})
PUBLIC = Samples({"x": blobs([2, 1] * 8, 3, seed=5), "target": torch.full((16, 3), 1 / 3, dtype=torch.float64)})
BOTH = CrossEntropy("private") + 0.5 * SoftCrossEntropy("public")


def model_of(factory: Any = None, seed: int = 0, precision: Any = "fp64") -> Model:
    return Plain(precision=precision).init(Init(Arch((factory or Mlp(),), 3, (6,)), Key(seed)))


def fitted(recipe: Recipe | None = None, model: Model | None = None, **request: Any) -> Fitted:
    return Plain(precision="fp64").fit(fit_of(model or model_of(), recipe, **{"private": PRIVATE} | request))


def test_the_same_fit_twice_is_equal_to_the_bit() -> None:
    a, b = fitted(), fitted()
    assert same(a.model.state, b.model.state)
    assert (a.loss, a.steps) == (b.loss, 6)


def test_a_fit_leaves_no_trace_in_the_engine_or_the_model_it_was_given() -> None:
    plain, model = Plain(precision="fp64"), model_of()
    before = {n: v.clone() for n, v in model.state.items()}
    first = plain.fit(fit_of(model, private=PRIVATE))
    plain.fit(fit_of(model_of(seed=3), private=PRIVATE, only="head"))
    plain.predict(Predict(first.model, PUBLIC))
    again = plain.fit(fit_of(model, private=PRIVATE))
    assert same(model.state, before)
    assert same(first.model.state, again.model.state)
    assert changed(model.state, first.model.state) == set(model.state)


def test_a_fit_is_plain_training_with_torchs_adam() -> None:
    """The whole step by hand: module, plan, optimiser."""
    model = model_of()
    module = build(model.arch, Key(0)).double()
    module.load_state_dict(model.state)
    module.train()
    adam = torch.optim.Adam(module.parameters(), lr=1e-2, fused=True)
    losses = []
    for rows in batches(Key(0, 1, 2, "fit", "private"), 24, 8, 6):
        adam.zero_grad()
        loss = nn.functional.cross_entropy(module(PRIVATE.x[rows].double()).logits, PRIVATE["y"][rows])
        loss.backward()
        adam.step()
        losses.append(float(loss.detach()))
    found = fitted()
    assert same(found.model.state, module.state_dict())
    assert found.loss == pytest.approx(sum(losses) / 6)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_fit_with_momentum_is_plain_training_with_torchs_sgd(schedule: Any) -> None:
    model, recipe = model_of(), Recipe(1e-2, 8, 2, schedule=schedule, momentum=0.9)
    module = build(model.arch, Key(0)).double()
    module.load_state_dict(model.state)
    module.train()
    sgd = torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)
    for t, rows in enumerate(batches(Key(0, 1, 2, "fit", "private"), 24, 8, 6)):
        sgd.param_groups[0]["lr"] = learning_rate(recipe, t, 6)
        sgd.zero_grad()
        nn.functional.cross_entropy(module(PRIVATE.x[rows].double()).logits, PRIVATE["y"][rows]).backward()
        sgd.step()
    plain = fitted(recipe, model)
    (together,) = Fused("cpu", "fp64").serve([fit_of(model, recipe, private=PRIVATE)])
    for state in (plain.model.state, together.model.state):
        for name, value in module.state_dict().items():
            assert torch.allclose(state[name], value, atol=1e-12), name
    assert not plain.optimizer


def test_momentum_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"momentum must be at least 0 and below 1, got 1\.5"):
        Recipe(momentum=1.5)
    with pytest.raises(ValueError, match="is reset for each fit: reset must be 'phase', got 'round'"):
        Recipe(momentum=0.9, reset="round")


def test_fits_by_adam_and_by_sgd_share_no_step() -> None:
    """One after another or together, each is trained by its own rule."""
    model, fused = model_of(), Fused("cpu", "fp64")
    asked = [fit_of(model, Recipe(1e-2, 8, 2, momentum=m), private=PRIVATE) for m in (None, 0.9, None)]
    for found, fit in zip(fused.serve(asked), asked, strict=True):
        alone = Plain(precision="fp64").fit(fit)
        assert all(torch.allclose(found.model.state[n], v, atol=1e-12) for n, v in alone.model.state.items())


def test_no_epochs_give_the_model_back() -> None:
    model = model_of()
    found = fitted(Recipe(epochs=0), model)
    assert found.model is model
    assert found.steps == 0
    assert found.loss == 0


@pytest.mark.parametrize(
    ("recipe", "steps"),
    [
        (Recipe(1e-2, 8, 2), 6),
        (Recipe(1e-2, 8, 2, pace="public"), 4),
        (Recipe(1e-2, 8, 2, steps=5), 5),
        (Recipe(1e-2, 7, 1), 4),
    ],
    ids=str,
)
def test_how_many_steps_a_fit_makes(recipe: Recipe, steps: int) -> None:
    found = fitted(recipe, loss=BOTH, public=PUBLIC)
    assert found.steps == steps
    assert int(found.model.state["trunks.0.1.num_batches_tracked"]) == steps


def test_only_the_head_leaves_the_trunk_as_it_is() -> None:
    model = model_of()
    found = fitted(model=model, only="head")
    assert changed(model.state, found.model.state) == {"head.weight", "head.bias"}


def test_only_the_head_sees_the_trunk_in_evaluation_mode() -> None:
    """By running statistics, so on a model whose statistics are not the batch's the loss is another."""
    model = fitted().model
    still = Recipe(0.0, 24, 1)
    plain = Plain(precision="fp64")
    logits = plain.predict(Predict(model, PRIVATE)).logits
    expected = float(nn.functional.cross_entropy(logits, PRIVATE["y"]))
    assert fitted(still, model, only="head").loss == pytest.approx(expected)
    assert fitted(still, model).loss != pytest.approx(expected)


def test_joint_and_separate_forwards_differ_by_batchnorm_alone() -> None:
    joint, apart = (fitted(loss=BOTH, public=PUBLIC, joint=j).model.state for j in (True, False))
    assert changed(joint, apart)
    bare = model_of(Mlp(norm=False))
    joint, apart = (fitted(model=bare, loss=BOTH, public=PUBLIC, joint=j).model.state for j in (True, False))
    assert all(torch.allclose(v, apart[n], atol=1e-12) for n, v in joint.items())


def test_a_joint_forward_normalises_the_mixture() -> None:
    """One step from the start: the running mean moves to that of both batches together."""
    model = model_of()
    found = fitted(Recipe(1e-2, 8, steps=1), model, loss=BOTH, public=PUBLIC).model.state
    rows = {n: batches(Key(0, 1, 2, "fit", n), len(s), 8, 1)[0] for n, s in (("private", PRIVATE), ("public", PUBLIC))}
    mixture = torch.cat([PRIVATE.x[rows["private"]], PUBLIC.x[rows["public"]]]).double()
    mean = (mixture @ model.state["trunks.0.0.weight"].T).mean(0)
    assert torch.allclose(found["trunks.0.1.running_mean"], 0.1 * mean, atol=1e-12)


def test_a_stream_the_loss_does_not_read_is_not_forwarded_by_itself() -> None:
    alone = fitted().model.state
    recipe = Recipe(1e-2, 8, 2, pace="private")
    unread = fitted(recipe, public=PUBLIC, joint=False).model.state
    assert same(alone, unread)
    joint = fitted(recipe, public=PUBLIC).model.state
    assert changed(alone, joint)


# -- a teacher


@dataclass(frozen=True)
class ToTeacher(Loss):
    """The squared distance to the teacher's logits."""

    def __call__(self, step: Step) -> Tensor:
        return (step["private"].logits - step.seen["teacher"].logits).square().mean()


def test_a_teacher_is_unchanged_and_in_evaluation_mode() -> None:
    teacher = fitted().model  # its running statistics are not the batch's
    before = {n: v.clone() for n, v in teacher.state.items()}
    seen: list[Outputs] = []

    @dataclass(frozen=True)
    class Spy(ToTeacher):
        def __call__(self, step: Step) -> Tensor:
            seen.append(step.seen["teacher"])
            return super().__call__(step)

    student = model_of(seed=4)
    found = fitted(model=student, loss=Spy(), frozen={"teacher": Frozen(teacher, "private")})
    assert same(teacher.state, before)
    assert changed(student.state, found.model.state)
    rows = batches(Key(0, 1, 2, "fit", "private"), 24, 8, 1)[0]
    expected = Plain(precision="fp64").predict(Predict(teacher, Samples({"x": PRIVATE.x[rows]})))
    assert torch.allclose(seen[0].logits, expected.logits)
    assert torch.allclose(seen[0].features, expected.features)
    assert not seen[0].logits.requires_grad


def test_a_teacher_may_be_the_model_itself() -> None:
    """Same architecture, same state: the student's own module must not be the teacher's."""
    model = model_of()
    found = fitted(model=model, loss=ToTeacher(), frozen={"teacher": Frozen(model, "private")})
    assert changed(model.state, found.model.state)
    assert found.loss > 0


def test_constants_and_parameters_reach_the_loss() -> None:
    @dataclass(frozen=True)
    class Pull(Loss):
        def __call__(self, step: Step) -> Tensor:
            near = [(p - step.constants["w"][n]).square().sum() for n, p in step.params.items()]
            return torch.stack(near).sum() + 0 * step["private"].logits.sum()

    model = model_of()
    zero = {n: torch.zeros_like(v) for n, v in model.floating.items()}
    found = fitted(Recipe(1e-2, 8, steps=30), model, loss=Pull(), constants={"w": zero}).model.state
    assert found["head.weight"].abs().sum() < model.state["head.weight"].abs().sum() / 2


# -- gradients


@dataclass(frozen=True)
class Quadratic(Loss):
    """a w^2 / 2 for the one parameter of a 1 -> 1 network, whatever the data."""

    curvature: float

    def __call__(self, step: Step) -> Tensor:
        return self.curvature / 2 * step.params["head.weight"].square().sum() + 0 * step["private"].logits.sum()


@dataclass(frozen=True)
class Line:
    def __call__(self, outputs: int) -> nn.Module:
        return nn.Linear(1, outputs, bias=False)


def test_ascent_takes_the_gradient_beside_the_parameters() -> None:
    """On a w^2 / 2 the gradient at w + rho is a (w + rho); Adam's first moment after one step is a tenth of it."""
    model = Model(Arch((Line(),), 1, (1,)), {"head.weight": torch.tensor([[2.0]], dtype=torch.float64)})
    one = Samples({"x": torch.ones(1, 1), "y": torch.zeros(1, dtype=torch.long)})
    recipe = Recipe(1e-2, 1, steps=1, reset="round")
    for gradient, expected in ((None, 3 * 2.0), (Ascent(0.5), 3 * 2.5), (Ascent(0.0), 3 * 2.0)):
        fit = fit_of(model, recipe, loss=Quadratic(3.0), private=one, gradient=gradient)
        found = Plain(precision="fp64").fit(fit)
        assert float(found.optimizer["mean/head.weight"]) == pytest.approx(0.1 * expected)
        assert float(found.model.state["head.weight"]) == pytest.approx(2.0 - 1e-2)  # from w itself, not from w + rho
        assert found.loss == pytest.approx(3 / 2 * 4)  # the loss at w


def test_ascent_climbs_by_rho_along_the_gradient() -> None:
    grads = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    offsets = Ascent(0.1).ascent(grads)
    assert offsets is not None
    assert float(norm(offsets)) == pytest.approx(0.1)
    assert offsets["a"].tolist() == pytest.approx([0.06, 0.0])
    assert offsets["b"].tolist() == [pytest.approx([0.08])]
    assert Ascent(0.0).ascent(grads) is None
    still = Ascent(0.1).ascent({"a": torch.zeros(2)})
    assert still is not None
    assert still["a"].tolist() == [0, 0]


def test_ascent_moves_the_running_statistics_once() -> None:
    """The second pass leaves them alone: after one step they are those of a fit with one pass."""
    model = model_of()
    one = Recipe(1e-2, 8, steps=1)
    single, double = fitted(one, model).model.state, fitted(one, model, gradient=Ascent(0.5)).model.state
    buffers = {n for n in single if "running" in n or "tracked" in n}
    assert len(buffers) == 3
    assert changed(single, double).isdisjoint(buffers)
    assert changed(fitted(model=model).model.state, fitted(model=model, gradient=Ascent(0.5)).model.state)


def test_ascent_of_nothing_is_no_ascent() -> None:
    assert same(fitted().model.state, fitted(gradient=Ascent(0.0)).model.state)
    assert same(fitted().model.state, fitted(gradient=Gradient()).model.state)


def test_clip_shortens_long_gradients_and_leaves_short_ones() -> None:
    grads = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    short = Clip(1.0).transform(grads)
    assert float(norm(short)) == pytest.approx(1.0, abs=1e-5)
    assert float(short["a"][0] / short["b"][0, 0]) == pytest.approx(0.75)
    assert all(torch.equal(g, grads[n]) for n, g in Clip(10.0).transform(grads).items())


def test_clip_reaches_the_optimiser() -> None:
    kept = Recipe(1e-2, 8, steps=1, reset="round")
    means = {n: v for n, v in fitted(kept, gradient=Clip(1e-3)).optimizer.items() if n.startswith("mean/")}
    assert float(norm(means)) == pytest.approx(0.1 * 1e-3, rel=1e-2)


# -- errors


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_a_loss_that_is_not_finite_says_who_when_and_where(precision: Any) -> None:
    broken = PRIVATE.with_(x=PRIVATE.x / 0)
    with pytest.raises(FloatingPointError, match="not finite") as error:
        Plain(precision=precision).serve([fit_of(model_of(precision=precision), private=broken)])
    (note,) = error.value.__notes__
    assert "client 2" in note
    assert "round 1" in note
    assert "'fit'" in note


def test_an_error_inside_a_loss_says_so_too() -> None:
    with pytest.raises(KeyError) as error:
        Plain().serve([fit_of(model_of(precision="fp32"), loss=CrossEntropy("nowhere"), private=PRIVATE)])
    assert error.value.__notes__ == ["client 2, round 1, 'fit'"]


def test_what_is_no_request_of_an_engine() -> None:
    with pytest.raises(TypeError, match="does not serve Request"):
        Plain().serve([Request()])


def test_a_precision_nobody_knows() -> None:
    with pytest.raises(ValueError, match=r"^precision must be one of fp32, bf16, fp64, got 'fp8'"):
        Plain(precision="fp8")  # type: ignore[arg-type]


def test_predicting_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to predict"):
        Plain(precision="fp64").predict(Predict(model_of(), Samples({"x": torch.zeros(0, 6)})))


# -- randomness


class FunctionalDropout(nn.Sequential):
    """Dropout that is called as a function."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(nn.functional.dropout(x, 0.5, self.training))
        return out


def functional_dropout(outputs: int) -> nn.Module:
    return FunctionalDropout(nn.Flatten(), nn.Linear(16, outputs))


@pytest.mark.parametrize("factory", [Flat(0.5), functional_dropout])
def test_dropout_is_seeded_by_the_key_and_leaves_torchs_generator_alone(factory: Any) -> None:
    images = Samples({"x": torch.rand(16, 1, 4, 4), "y": torch.arange(16) % 2})
    plain = Plain(precision="fp64")
    model = plain.init(Init(Arch((factory,), 2, (1, 4, 4)), Key(0)))
    fit = fit_of(model, private=images)
    state = torch.get_rng_state()
    first = plain.fit(fit)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(17)  # wherever the global generator stands
    assert same(first.model.state, plain.fit(fit).model.state)
    other = replace(fit, key=fit.key.of(client=9), streams=fit.streams)
    assert changed(first.model.state, plain.fit(other).model.state)


def test_dropout_differs_from_step_to_step() -> None:
    seen = []

    @dataclass(frozen=True)
    class Spy(CrossEntropy):
        def __call__(self, step: Step) -> Tensor:
            seen.append(step["private"].features == 0)
            return super().__call__(step)

    images = Samples({"x": torch.rand(8, 1, 4, 4), "y": torch.arange(8) % 2})
    plain = Plain(precision="fp64")
    model = plain.init(Init(Arch((Flat(0.5),), 2, (1, 4, 4)), Key(0)))
    plain.fit(fit_of(model, loss=Spy("private"), private=images))
    assert not torch.equal(seen[0], seen[1])
    assert 0.2 < seen[0].double().mean() < 0.8


def test_an_engines_other_work_does_not_touch_torchs_generator() -> None:
    state = torch.get_rng_state()
    plain = Plain(precision="fp64")
    model = plain.init(Init(Arch((Mlp(),), 3, (6,)), Key(0)))
    plain.predict(Predict(model, PUBLIC))
    assert torch.equal(torch.get_rng_state(), state)


# -- numbers


def test_precisions_keep_their_types() -> None:
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.float32), ("fp64", torch.float64)):
        plain = Plain(precision=precision)
        model = plain.init(Init(Arch((Mlp(),), 3, (6,)), Key(0)))
        found = plain.fit(fit_of(model, private=PRIVATE))
        outputs = plain.predict(Predict(found.model, PUBLIC))
        assert {v.dtype for v in found.model.floating.values()} == {dtype}
        assert {outputs.logits.dtype, outputs.features.dtype} == {dtype}
        assert all(v.isfinite().all() for v in found.model.floating.values())
        assert math.isfinite(found.loss)


def test_bf16_computes_in_bf16() -> None:
    """Close to fp32 but not equal to it."""
    model = model_of(precision="fp32")
    full, half = (Plain(precision=p).predict(Predict(model, PUBLIC)).logits for p in ("fp32", "bf16"))
    assert not torch.equal(full, half)
    assert torch.allclose(full, half, atol=0.1)


class Contiguous(Plain):
    """The plain engine without channels_last."""

    def forward(self, module: Any, x: Tensor) -> Outputs:
        out: Outputs = module(x.contiguous())
        return out

    def load(self, model: Model, use: str) -> Any:
        module = super().load(model, use)
        return module.to(memory_format=torch.contiguous_format)


def test_channels_last_changes_nothing_but_the_order_of_sums() -> None:
    arch = Arch((ResNet(8, 1),), 3, (1, 8, 8))
    images = Samples(
        {"x": torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(0)), "y": torch.arange(16) % 3}
    )
    found = []
    for kind in (Plain, Contiguous):
        plain = kind(precision="fp64")
        model = plain.init(Init(arch, Key(0)))
        found.append(plain.fit(fit_of(model, Recipe(1e-3, 8, 1), private=images)).model.state)
    assert all(torch.allclose(v.double(), found[1][n].double(), atol=1e-8) for n, v in found[0].items())
    assert all(v.is_contiguous() for v in found[0].values())


def test_predictions_come_in_parts_but_in_order() -> None:
    many = Samples({"x": torch.randn(1203, 6, generator=torch.Generator().manual_seed(1))})
    plain, model = Plain(precision="fp64"), fitted().model
    logits, features = plain.predict(Predict(model, many))
    assert logits.shape == (1203, 3)
    assert features.shape == (1203, 8)
    one = plain.predict(Predict(model, Samples({"x": many.x[1100:1101]})))
    assert torch.allclose(logits[1100], one.logits[0])
    assert torch.allclose(features[1100], one.features[0])
    assert torch.allclose(features @ model.state["head.weight"].T + model.state["head.bias"], logits)


def test_a_monitor_is_told() -> None:
    class Listener:
        def __init__(self) -> None:
            self.phases: list[str] = []
            self.samples = 0

        def fit_started(self, fit: Fit) -> None:
            self.phases.append(fit.key.phase)

        def samples_trained(self, number: int) -> None:
            self.samples += number

    listener = Listener()
    plain = Plain(precision="fp64", monitor=listener)
    plain.serve([fit_of(model_of(), loss=BOTH, private=PRIVATE, public=PUBLIC)])
    assert listener.phases == ["fit"]
    assert listener.samples == 6 * 8 * 2
    assert set(plain.seconds) == {"fit"}


@pytest.mark.parametrize(("capability", "precision"), [((7, 5), "fp32"), ((8, 0), "bf16"), ((9, 0), "bf16")])
def test_a_gpu_without_bf16_computes_in_fp32_with_a_warning(
    capability: tuple[int, int], precision: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    assert default_precision(torch.device("cuda", 0)) == precision
    assert [str(w.message)[:21] for w in recwarn] == (["Tesla T4 has no bf16;"] if precision == "fp32" else [])
    assert default_precision(torch.device("cpu")) == "fp32"
