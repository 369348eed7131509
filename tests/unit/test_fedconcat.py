from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedcc
from fedcc.core.messages import Weights, nbytes
from fedcc.core.model import HEAD, Model, Outputs, joined_state
from fedcc.core.requests import Init, Predict
from fedcc.core.samples import Samples
from fedcc.engine.plan import Plan
from fedcc.federation import Federation
from fedcc.losses import CrossEntropy
from fedcc.methods import FedAvg, FedConcat
from fedcc.methods.clusters import join
from fedcc.methods.fedavg import average
from fedcc.methods.fedconcat import Classifier, Encoder, label_shares
from private_steps import draw, same
from recording import record
from tiny import DIMENSIONS, Mlp, Tiny

LABELS = ((0,) * 20, (0,) * 15 + (1,) * 2, (1,) * 12 + (2,) * 8, (2,) * 20)  # 0 and 1 are alike; 2 and 3 too
SMALL = FedConcat(clusters=2, classifier_rounds=4)


def run(method: FedConcat = SMALL, rounds: int = 2, **options: Any) -> Tiny:
    return Tiny(method, **{"labels": LABELS, **options}).run(rounds)


def outputs(tiny: Tiny, model: Model, x: Tensor) -> Outputs:
    (found,) = tiny.executor.serve([Predict(model, Samples({"x": x}))])
    assert isinstance(found, Outputs)
    return found


class Absent:
    """Clients that do not take part in some rounds."""

    def __init__(self, tiny: Tiny, away: dict[int, set[int]]):
        everyone = list(tiny.cohort.clients)
        tiny.cohort.participants = lambda t: [c for c in everyone if c.id not in away.get(t, set())]  # type: ignore[method-assign]


def test_it_says_how_many_rounds_it_needs_and_which_are_evaluated() -> None:
    tiny = run()
    assert len(tiny.rounds) == SMALL.rounds(2) == 6
    assert [t for t in range(1, 7) if SMALL.evaluates(t, 2)] == [1, 6]
    assert FedConcat().rounds(15) == 215
    assert sum(FedConcat().evaluates(t, 15) for t in range(1, 216)) == 15  # fourteen encoder rounds and the end
    assert FedConcat(classifier_rounds=0).evaluates(15, 15)
    assert all(FedAvg().evaluates(t, 15) for t in range(1, 16))


def test_the_stages_and_what_they_send() -> None:
    tiny = run()
    for done in tiny.rounds[:2]:
        assert all(isinstance(up, Encoder) for up in done.ups.values())
    for done in tiny.rounds[2:]:
        assert all(isinstance(up, Classifier) for up in done.ups.values())
    first, second = tiny.rounds[0].ups[1], tiny.rounds[1].ups[1]
    assert first.histogram.tolist() == pytest.approx([15 / 17, 2 / 17, 0])
    assert second.histogram is None  # once
    assert nbytes(first) - nbytes(second) == 3 * 4
    head = 4 * (2 * 8 * 3 + 3)
    downs = [[nbytes(down) for down in done.downs.values()] for done in tiny.rounds]
    encoders = nbytes(Weights(tiny.server.models["concat"].floating)) - head
    assert downs[1] == [encoders + head] * 4  # the encoders once
    assert downs[2:] == [[head] * 4] * 4
    assert [done.bytes_up for done in tiny.rounds[2:]] == [4 * head] * 4


def test_clients_with_similar_labels_are_averaged_together() -> None:
    tiny = run()
    assert {frozenset(group) for group in tiny.server.memory["clusters"]} == {frozenset({0, 1}), frozenset({2, 3})}
    ups, downs = tiny.rounds[0].ups, tiny.rounds[0].downs
    assert same(downs[0].state, average([ups[0], ups[1]]))  # weighted by samples, as FedAvg
    assert same(downs[3].state, average([ups[2], ups[3]]))
    assert same(downs[0].state, downs[1].state)
    assert downs[0].cluster != downs[2].cluster


def test_a_cluster_of_one_has_its_clients_model() -> None:
    tiny = run(FedConcat(clusters=4, classifier_rounds=1))
    ups, down = tiny.rounds[1].ups, tiny.rounds[1].downs[0]
    for m, (k,) in enumerate(tiny.server.memory["clusters"]):
        own = {n.replace("trunks.0.", f"trunks.{m}."): v for n, v in ups[k].state.items() if n not in HEAD}
        assert all(torch.equal(down.encoders[name], value) for name, value in own.items())


def test_one_cluster_is_fedavg_and_then_a_new_head() -> None:
    one, plain = run(FedConcat(clusters=1, classifier_rounds=2)), Tiny(FedAvg(), labels=LABELS).run(2)
    averaged, found = plain.server.models["global"].state, one.server.models["concat"].state
    for name in averaged:
        if averaged[name].is_floating_point():
            assert torch.equal(found[name], averaged[name]) == (name not in HEAD)


def test_the_last_stage_leaves_the_encoders_alone() -> None:
    tiny = run(FedConcat(clusters=2, classifier_rounds=4))
    sent = tiny.rounds[1].downs[0].encoders
    assert any("running_var" in name for name in sent)
    for model in (tiny.server.models["concat"], *(c.model for c in tiny.clients)):
        assert all(torch.equal(model.state[name], value) for name, value in sent.items())


def test_features_stand_side_by_side() -> None:
    tiny = run()
    model = tiny.server.models["concat"]
    x = draw(5, DIMENSIONS)
    assert outputs(tiny, model, x).features.shape == (5, 2 * 8)
    assert model.state["head.weight"].shape == (3, 2 * 8)
    assert len(model.arch.trunks) == 2


def test_joined_heads_add_up_the_clusters_logits() -> None:
    tiny = run(FedConcat(clusters=2, classifier_rounds=0, head_init="joined"))
    ups, model, x = tiny.rounds[1].ups, tiny.server.models["concat"], draw(5, DIMENSIONS)
    total = torch.zeros(5, 3, dtype=torch.float64)
    for group in tiny.server.memory["clusters"]:
        merged = Model(tiny.clients[0].arch, {**_counters(model), **average([ups[k] for k in group])})
        total += outputs(tiny, merged, x).logits
    torch.testing.assert_close(outputs(tiny, model, x).logits, total)
    assert torch.equal(tiny.scores(), outputs(tiny, model, tiny.test.x).logits)


def _counters(model: Model) -> dict[str, Tensor]:
    return {n: v for n, v in model.state.items() if n.startswith("trunks.0.") and not v.is_floating_point()}


def test_which_head_it_begins_with() -> None:
    method = FedConcat(clusters=2, classifier_rounds=0)
    fresh = run(method).server.models["concat"]
    joined = run(FedConcat(clusters=2, classifier_rounds=0, head_init="joined")).server.models["concat"]
    assert not torch.equal(fresh.state["head.weight"], joined.state["head.weight"])
    many = run(method, classes=100).server.models["concat"]
    expected = run(FedConcat(clusters=2, classifier_rounds=0, head_init="joined"), classes=100).server.models["concat"]
    assert same(many.state, expected.state)
    random = run(FedConcat(clusters=2, classifier_rounds=0, head_init="random"), classes=100).server.models["concat"]
    assert not torch.equal(random.state["head.weight"], expected.state["head.weight"])


def test_a_cluster_holds_at_most_cap_times_its_share_of_the_clients() -> None:
    labels = ((0,) * 8,) * 7 + ((1,) * 8,) * 3
    for cap, sizes in ((1.2, [4, 6]), (1.0, [5, 5]), (2.0, [3, 7])):
        tiny = run(FedConcat(clusters=2, classifier_rounds=0, cap=cap), rounds=1, labels=labels)
        assert sorted(map(len, tiny.server.memory["clusters"])) == sizes


def test_heads_are_joined_by_hand() -> None:
    arch = Tiny(FedAvg()).clients[0].arch
    models = [
        Model(arch, {"trunks.0.w": draw(2, seed=k), "head.weight": draw(3, 2, seed=k), "head.bias": draw(3, seed=k)})
        for k in range(2)
    ]
    state = joined_state(models)
    assert set(state) == {"trunks.0.w", "trunks.1.w", *HEAD}
    assert torch.equal(state["trunks.1.w"], models[1].state["trunks.0.w"])
    assert torch.equal(state["head.weight"][:, 2:], models[1].state["head.weight"])
    assert torch.equal(state["head.bias"], models[0].state["head.bias"] + models[1].state["head.bias"])


def test_heads_are_averaged_without_weights() -> None:
    tiny = run()
    for done in tiny.rounds[2:]:
        heads = [up.head for up in done.ups.values()]
        for name in HEAD:
            torch.testing.assert_close(done.downs[0].head[name], torch.stack([h[name] for h in heads]).mean(0))


class Inside(FedConcat):
    """The head is trained inside the network, on images that are forwarded anew in every step."""

    async def classify(self, c: Any, down: Classifier) -> Classifier:
        if down.encoders is not None:
            c.model = (await Init(c.arch.times(down.trunks), c.key.of(phase="concat"))).with_(down.encoders)
        c.model = c.model.with_(down.head)
        recipe = c.recipe_with(steps=self.classifier_steps, lr=self.classifier_lr, momentum=0.9, reset="phase")
        await c.fit("head", CrossEntropy("private"), recipe=recipe, private=c.private, only="head")
        return Classifier({name: c.model.state[name] for name in HEAD})


def test_features_computed_once_change_nothing_without_augmentation() -> None:
    cached, fresh = run(), run(Inside(clusters=2, classifier_rounds=4))
    for name, value in cached.server.models["concat"].state.items():
        torch.testing.assert_close(value, fresh.server.models["concat"].state[name], rtol=1e-10, atol=1e-12)


def test_a_client_takes_three_steps_a_classifier_round() -> None:
    tiny = Tiny(SMALL, labels=LABELS)
    steps, serve = [], tiny.executor.fit
    tiny.executor.fit = lambda fit: steps.append((fit.key.phase, fit.steps)) or serve(fit)  # type: ignore[method-assign, func-returns-value]
    tiny.run(1)
    assert steps[4:] == [("head", 3)] * 16


def test_the_head_learns_by_sgd_with_momentum_even_where_adams_state_outlives_phases() -> None:
    recipe = Tiny(FedAvg()).recipe
    tiny = Tiny(SMALL, labels=LABELS, recipe=replace(recipe, reset="round"))
    asked = record(tiny)
    tiny.run(2)
    assert {(f.recipe.lr, f.recipe.momentum, f.recipe.reset) for f in asked.fits("head")} == {(0.01, 0.9, "phase")}
    assert {f.recipe.momentum for f in asked.fits("fit")} == {None}


def test_a_clients_round_for_the_head_is_three_steps_of_torchs_sgd_with_momentum() -> None:
    tiny = Tiny(SMALL, labels=LABELS)
    asked = record(tiny)
    tiny.run(1)
    for fit, fitted in asked.fitted("head", round=2):
        head = torch.nn.Linear(16, 3, dtype=torch.float64)
        head.load_state_dict({name: fit.model.state[f"head.{name}"] for name in ("weight", "bias")})
        sgd = torch.optim.SGD(head.parameters(), lr=0.01, momentum=0.9)
        private = fit.streams["private"]
        plan = Plan(fit.key.of(stream="private"), len(private), fit.recipe.batch, private.view)
        for rows in plan.indices(3):
            sgd.zero_grad()
            torch.nn.functional.cross_entropy(head(private.x[rows].double()), private["y"][rows]).backward()
            sgd.step()
        for name, value in head.state_dict().items():
            torch.testing.assert_close(fitted.model.state[f"head.{name}"], value, rtol=1e-10, atol=1e-12)


def test_heads_of_clients_with_two_classes_each_add_up() -> None:
    """Which they do not with Adam: its first steps have the size of its rate, whatever the gradient's."""
    f = Federation.named("digits", "classes:2", clients=10, models=["resnet8"], fraction=0.5)
    found = fedcc.run(FedConcat(classifier_rounds=60), f, rounds=2, epochs=6, device="cpu", client_accuracy=False)
    assert found.rounds[-1]["accuracy"] > 60


def test_every_classifier_round_starts_from_the_servers_head() -> None:
    tiny = Tiny(FedConcat(clusters=2, classifier_rounds=3), labels=LABELS)
    fits, serve = [], tiny.executor.fit
    tiny.executor.fit = lambda fit: fits.append(fit) or serve(fit)  # type: ignore[method-assign, func-returns-value]
    tiny.run(1)
    heads = [fit for fit in fits if fit.key.phase == "head"]
    assert len(heads) == 3 * 4
    for fit in heads:
        sent = tiny.rounds[fit.key.round - 2].downs[fit.key.client].head
        assert all(torch.equal(fit.model.state[name], sent[name]) for name in HEAD)


def test_a_client_away_at_first_gets_a_cluster_when_it_appears() -> None:
    tiny = Tiny(SMALL, labels=LABELS)
    Absent(tiny, {1: {3}, 2: {0}})
    tiny.run(3)
    assert tiny.rounds[0].downs[3].cluster == -1
    assert same(tiny.rounds[0].downs[3].state, tiny.ask(_start(SMALL))[0].state)  # the first weights once more
    late = tiny.rounds[1].ups[3]
    assert late.histogram is not None
    place = tiny.rounds[1].downs[3].cluster
    assert place == tiny.rounds[1].downs[2].cluster
    assert same(tiny.rounds[1].downs[3].state, average([tiny.rounds[1].ups[2]]))  # it does not count yet
    assert same(tiny.rounds[2].downs[0].encoders, _encoders(tiny, 2))


async def _start(method: FedConcat) -> Any:
    return await method.start(Tiny(method, labels=LABELS).server)


def _encoders(tiny: Tiny, t: int) -> dict[str, Tensor]:
    merged = {}
    for m, group in enumerate(tiny.server.memory["clusters"]):
        state = average([tiny.rounds[t].ups[k] for k in sorted(group)])
        merged |= {n.replace("trunks.0.", f"trunks.{m}."): v for n, v in state.items() if n not in HEAD}
    return merged


def test_encoders_are_sent_until_they_have_arrived() -> None:
    tiny = Tiny(SMALL, labels=LABELS)
    Absent(tiny, {2: {1}, 3: {1, 2}, 4: {1}})
    tiny.run(2)
    has = [[down.encoders is not None for down in done.downs.values()] for done in tiny.rounds[1:]]
    assert has == [[True] * 4, [False, True, True, False], [False, True, False, False], [False] * 4, [False] * 4]
    assert tiny.accuracy() > 0.5


def test_nobody_in_the_last_encoder_round() -> None:
    tiny = Tiny(SMALL, labels=LABELS)
    Absent(tiny, {2: {0, 1, 2, 3}})
    tiny.run(2)  # the encoders are concatenated one round later
    assert all(isinstance(up, Encoder) for up in tiny.rounds[2].ups.values())
    assert all(isinstance(up, Classifier) for up in tiny.rounds[3].ups.values())
    assert "concat" in tiny.server.models


def test_before_there_is_a_head_the_clusters_predict_together() -> None:
    tiny = Tiny(SMALL, labels=LABELS)
    downs = tiny.ask(tiny.method.start(tiny.server))
    tiny.server.rounds = 5
    assert tiny.scores().shape == (24, 3)  # by the initial model
    tiny.server.begin(1)
    tiny.ask(tiny.method.server(tiny.server, tiny.cohort.round(1, downs)))
    models = [tiny.server.models[f"cluster {m}"] for m in range(2)]
    mean = torch.stack([outputs(tiny, m, tiny.test.x).logits for m in models]).mean(0)
    torch.testing.assert_close(tiny.scores(), mean)


def test_inferred_histograms_are_the_models_own_and_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcc.methods.fedconcat.NOISE", 50)
    tiny = run(FedConcat(clusters=2, classifier_rounds=1, histogram="inferred"))
    ups = tiny.rounds[0].ups
    assert all(up.histogram is None for done in tiny.rounds[:2] for up in done.ups.values())
    assert sorted(k for group in tiny.server.memory["clusters"] for k in group) == [0, 1, 2, 3]

    tiny.server.models["init"] = tiny.executor.serve([tiny.server.init(tiny.clients[0].arch)])[0]
    seen: list[Predict] = []
    predict = tiny.executor.predict
    tiny.executor.predict = lambda request: seen.append(request) or predict(request)  # type: ignore[method-assign, func-returns-value]
    found = tiny.ask(label_shares(tiny.server, ups))
    noise = seen[0].samples.view.clean(seen[0].samples.x)
    assert noise.shape == (50, DIMENSIONS)
    draws = tiny.server.key.of(round=0, phase="noise").generator().integers(0, 256, (50, DIMENSIONS), "uint8")
    assert torch.equal(seen[0].samples.x, torch.from_numpy(draws))
    assert (float(noise.min()), float(noise.max())) == pytest.approx((draws.min() / 255, draws.max() / 255))
    for k, up in ups.items():
        own = outputs(tiny, tiny.server.models["init"].with_(up.state), noise).logits.softmax(-1).mean(0)
        torch.testing.assert_close(found[k], own)
    told = tiny.ask(label_shares(tiny.server, {**ups, 0: Encoder(ups[0].state, 1, -1, torch.tensor([0.5, 0.5, 0]))}))
    assert told[0].tolist() == [0.5, 0.5, 0.0]
    centres = [torch.stack([found[k] for k in group]).mean(0) for group in tiny.server.memory["clusters"]]
    torch.testing.assert_close(tiny.server.memory["centres"], torch.stack(centres))


def test_clusters_depend_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr("fedcc.methods.fedconcat.join", lambda *a: seeds.append(a[3]) or join(*a))  # type: ignore[func-returns-value]
    tiny = run(FedConcat(clusters=2, classifier_rounds=0))
    assert seeds == [tiny.server.key.of(round=0, phase="cluster").integer()]


def test_large_federations_of_many_classes_have_capped_clusters() -> None:
    labels = tuple((0,) * 4 + (k,) * (1 if k < 7 else 40) for k in range(1, 9))
    method = FedConcat(clusters=2, classifier_rounds=0)
    recipe = Tiny(FedAvg()).recipe
    sizes = {}
    for classes in (10, 100):
        tiny = Tiny(method, labels=labels, classes=classes, recipe=recipe).run(1)
        sizes[classes] = max(len(group) for group in tiny.server.memory["clusters"])
    assert sizes[100] == 4  # 1.2 K / M, rounded down
    assert sizes[10] > 4


def test_it_learns_what_one_class_clients_cannot_alone() -> None:
    tiny = Tiny(FedConcat(clusters=3, classifier_rounds=60), factories=(Mlp(16),)).run(2)
    assert tiny.accuracy() > 0.9


def test_the_order_of_uplinks_does_not_matter() -> None:
    one, two = Tiny(SMALL, labels=LABELS), Tiny(SMALL, labels=LABELS)
    for tiny, order in ((one, (0, 1, 2, 3)), (two, (3, 1, 0, 2))):
        downs = tiny.ask(tiny.method.start(tiny.server))
        tiny.server.rounds = 1
        for t in (1, 2):
            tiny.server.begin(t)
            ups = tiny.cohort.round(t, downs)
            downs = tiny.ask(tiny.method.server(tiny.server, {k: ups[k] for k in order}))
    assert same(one.server.models["concat"].state, two.server.models["concat"].state)


def test_a_saved_result_predicts_the_same_though_models_share_their_encoders(tmp_path: Path) -> None:
    digits = Federation.named("digits", skew="dirichlet:0.5", models="resnet8")
    result = fedcc.run(FedConcat(classifier_rounds=2), digits, rounds=2, epochs=1)
    again = fedcc.load(result.save(tmp_path))
    assert torch.equal(again.predict(digits.test.x[:50]), result.predict(digits.test.x[:50]))
    assert [(r["round"], r["accuracy"] is not None) for r in result.rounds] == [
        (1, True),
        (2, False),
        (3, False),
        (4, True),
    ]
    assert result.accuracy == result.curve[-1][1]
