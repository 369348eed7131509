"""FedCC: clients may answer "unknown", and the server trusts, sample by sample, those that abstain least.

Ye, Ayan, An and Carle, "FedCC: Towards Addressing Label Distribution Skews in Distillation-Based Federated Learning".
Shares C + 1 probabilities on the public samples [n_u, C + 1], the last one "unknown"; receives C soft targets
[n_u, C]; predicts by the ensemble of all clients' models, Eq. (11). F-1 to F-32 are explained in docs/deviations.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcc.core.messages import Predictions
from fedcc.core.method import Answer, Family, Method, Trained, Votes, option
from fedcc.core.requests import Predict, Recalibrate, gather
from fedcc.core.roles import Client, Server
from fedcc.core.samples import Samples
from fedcc.losses import CrossEntropy, Distill, SoftCrossEntropy
from fedcc.methods import abstention as eq


@dataclass(frozen=True)
class FedCC(Method[Predictions, Predictions]):
    """Abstain instead of guessing: an extra output "unknown", calibrated pseudo labels, trust by sample."""

    family: ClassVar[Family] = "distillation"
    source: ClassVar[str] = "Ye et al., FedCC"
    scores = "shares"
    uploads_models: ClassVar[bool] = True
    answers = "probabilities"
    retired: ClassVar[Mapping[str, Any]] = {
        "majority_recompute": True,
        "sync_mask_unknown": True,
        "epochs_sync": None,
        "epochs_fit": None,
        "epochs_refine": None,
        "refine_epoch": "max",
    }
    read_with = ({"trust": 2.0}, {"trust": 4.0}, {"mirror": True}, {"mirror": True, "trust": 4.0})

    lam: float = option(0.2, "weight of the public loss in Eq. (4)", "Sec. V-A", low=0)
    delta: float = option(1e-3, "smoothing of the bias probe, Eq. (9)", "Sec. V-A", low=0, high=1)
    majority_threshold: float = option(0.02, "a majority class is above this probability", "Sec. V-A", low=0, high=1)
    majority_source: Literal["probe", "labels"] = option("probe", "majority classes by probe or label counts", "F-21")
    majority_empty: Literal["argmax", "alpha_zero"] = option("argmax", "rule if none is above the threshold", "F-13")
    alpha_design: eq.Design = option("sample", "Eq. (10), without the sample's entropy, or always 1", "F-28")
    probe_kind: Literal[eq.Probe, "labels"] = option(
        "cdmad_ones", "the featureless input of the probe; labels: no probe, p is the label shares", "F-7, F-31"
    )
    entropy_space: Literal["known", "full"] = option("known", "entropies over C or C + 1 outputs", "F-9, F-10")
    sync_head: Literal["padded", "restricted"] = option("padded", "targets with 0 at unknown, or C outputs", "F-1")
    fit_head: Literal["full", "known"] = option("full", "softmax over C + 1 or C outputs on private data", "F-4")
    refine_joint_batch: bool = option(True, "private and public batch in one forward pass (decisive)", "F-14")
    bn_recalibrate: Literal["none", "public"] = option("none", "BatchNorm's statistics from public data", "F-19")
    trust: float = option(1.0, "exponent of the known mass in the weights mu; 0 for equal weights", "F-29", low=0)
    guard_votes: bool = option(False, "limit clients that claim too much or always say the same", "F-32")
    mirror: bool = option(False, "each image and its mirror image at inference", "F-30", images=True)

    def outputs(self, classes: int) -> int:
        return classes + 1

    async def client(self, c: Client, down: Predictions | None) -> Predictions:
        known = c.classes
        if down is not None:
            distill = Distill("public", known if self.sync_head == "restricted" else None)
            await c.fit("sync", distill, public=c.public.with_(target=eq.sync_target(down.values, self.sync_head)))

        supervised = CrossEntropy("private", known if self.fit_head == "known" else None)
        await c.fit("fit", supervised, private=c.private)  # theta_0

        if self.probe_kind == "labels":
            labels = self.pseudo_labels(c, None, (await c.predict(c.public)).logits)
        else:
            bias, clean = await gather(c.predict(eq.featureless(c, self.probe_kind)), c.predict(c.public))
            labels = self.pseudo_labels(c, bias.logits, clean.logits)
        await c.fit(
            "refine",
            CrossEntropy("private") + self.lam * SoftCrossEntropy("public"),  # Eq. (4)
            private=c.private,
            public=c.public.with_(target=labels),
            joint=self.refine_joint_batch,
        )
        if self.bn_recalibrate == "public":
            c.model = await Recalibrate(c.model, c.public, c.key.of(phase="recalibrate"))

        probabilities = (await c.predict(c.public)).logits.softmax(-1)
        c.log["unknown"] = float(probabilities[:, -1].mean())
        return Predictions(probabilities)

    async def server(self, s: Server, ups: Mapping[int, Predictions]) -> Mapping[int, Predictions]:
        votes = torch.stack([up.values for up in ups.values()])
        if self.guard_votes:
            means = dict(zip(ups, eq.baseline(votes), strict=True))
            s.memory["baseline"] = {**s.memory.get("baseline", {}), **means}
        return s.to_all(Predictions(eq.targets(self.counted(votes), self.trust)))

    def counted(self, votes: Tensor) -> Tensor:
        """The uploaded votes [K, n_u, C + 1] as they count."""
        return eq.guarded_uploads(votes) if self.guard_votes else votes

    def influence(self, ups: Mapping[int, Predictions]) -> Mapping[int, float]:
        """A client's mean trust over the public samples."""
        trust = eq.trust(self.counted(torch.stack([up.values for up in ups.values()])), self.trust)
        return dict(zip(ups, trust.mean(1).tolist(), strict=True))

    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        return eq.aggregate(await self.all_votes(t, samples), self.trust)[:, :-1]  # Sec. IV-C

    async def all_votes(self, t: Trained, samples: Samples) -> Tensor:
        """The clients' votes [K, N, C + 1], the last one "unknown", as they count."""
        views = (samples, samples.mirrored) if self.mirror else (samples,)
        outputs = await gather(*(Predict(model, s) for s in views for model in t.clients.values()))
        votes = eq.votes([o.logits for o in outputs], len(views))
        return self.guarded(t, votes) if self.guard_votes else votes

    def guarded(self, t: Trained, votes: Tensor) -> Tensor:
        """Votes measured by the clients' last uploads; a client that never uploaded has no say (F-32)."""
        if not t.baseline:
            raise ValueError("guard_votes needs the clients' mean votes on the public samples, which are not there")
        limit = eq.loudest(torch.stack(list(t.baseline.values())).to(votes))
        never = votes.new_ones(t.classes)  # no vote is above 1.25
        return eq.guarded(votes, torch.stack([t.baseline.get(k, never).to(votes) for k in t.clients]), limit)

    async def votes(self, t: Trained, samples: Samples) -> Votes:
        votes = await self.all_votes(t, samples)
        return Votes(votes[..., :-1], eq.trust(votes, self.trust))

    async def answer(self, t: Trained, samples: Samples) -> Answer:
        """The confidence is the largest vote of any client for any class: low where nobody recognises the sample."""
        votes = await self.all_votes(t, samples)
        combined = eq.aggregate(votes, self.trust)
        return Answer(self.probabilities(combined[:, :-1]), votes[..., :-1].amax((0, 2)), combined[:, -1])

    def pseudo_labels(self, c: Client, bias: Tensor | None, logits: Tensor) -> Tensor:
        """Soft pseudo labels of the public samples by the model after the fit phase (theta_0), Eqs. (8)-(10).

        ``bias`` are the probe's logits; without them p is the client's label shares (F-31).
        """
        space = c.classes if self.entropy_space == "known" else c.classes + 1
        p = eq.label_shares(c, space) if bias is None else bias[:, :space].softmax(-1).mean(0)
        majority = c.majority = self.majority(c, p[: c.classes])
        w_l, w_u = float(eq.entropy(eq.smoothed(p, self.delta))), eq.unknown_weight(c.classes, int(majority.sum()))
        a = eq.alpha(w_l, w_u, eq.entropy(logits[:, :space].softmax(-1)), self.alpha_design)
        if not majority.any():  # majority_empty="alpha_zero": the client abstains from everything
            a = torch.zeros_like(a)
        c.log |= {"majority": int(majority.sum()), "w_l": w_l, "w_u": w_u, "alpha": float(a.mean())}
        return eq.pseudo_labels(a, logits[:, : c.classes], majority)

    def majority(self, c: Client, p: Tensor) -> Tensor:
        """C_J as a mask [C]: p_c above the threshold (strictly), Sec. V-A."""
        share = p if self.majority_source == "probe" else eq.label_shares(c, c.classes)
        mask = eq.majority_classes(share, self.majority_threshold)
        if not mask.any() and self.majority_empty == "argmax":
            mask = F.one_hot(share.argmax(), c.classes).bool()
            c.log["majority_empty"] = 1
        return mask
