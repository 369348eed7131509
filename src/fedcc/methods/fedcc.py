"""FedCC: clients may answer "unknown", and the server trusts, sample by sample, those that abstain least.

Ye, Ayan, An and Carle, "FedCC: Towards Addressing Label Distribution Skews in Distillation-Based Federated Learning".
Shares C + 1 probabilities on the public samples [n_u, C + 1], the last one "unknown"; receives C soft targets
[n_u, C]; predicts by the ensemble of all clients' models, Eq. (11).
Deviations and the choices where the paper is silent: docs/deviations.md, F-1 to F-27.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedcc.core.messages import Predictions
from fedcc.core.method import Family, Method, Trained, option
from fedcc.core.requests import Predict, gather
from fedcc.core.roles import Client, Server
from fedcc.core.samples import IDENTITY, Samples
from fedcc.losses import CrossEntropy, Distill, SoftCrossEntropy
from fedcc.methods.ssl import PACES

Probe = Literal["cdmad_ones", "white", "black", "mean", "noise"]
CALIBRATION_STEPS = 100  # with BatchNorm's momentum of 0.1 nothing of the old statistics is left: 0.9^100 < 3e-5


@dataclass(frozen=True)
class FedCC(Method[Predictions, Predictions]):
    """Abstain instead of guessing: an extra output "unknown", calibrated pseudo labels, trust by sample."""

    family: ClassVar[Family] = "distillation"
    source: ClassVar[str] = "Ye et al., FedCC"
    uploads_models: ClassVar[bool] = True

    lam: float = option(0.2, "weight of the public loss in Eq. (4)", "Sec. V-A", low=0)
    delta: float = option(1e-3, "smoothing of the bias probe, Eq. (9)", "Sec. V-A", low=0, high=1)
    majority_threshold: float = option(
        0.02, "a class is a majority class above this probe probability", "Sec. V-A", low=0, high=1
    )
    majority_source: Literal["probe", "labels"] = option("probe", "majority classes by probe or label counts", "F-21")
    majority_empty: Literal["argmax", "alpha_zero"] = option("argmax", "if no class is above the threshold", "F-13")
    majority_recompute: bool = option(True, "find the majority classes anew every round", "F-16")
    probe_kind: Probe = option("cdmad_ones", "the featureless input of the probe", "F-7")
    entropy_space: Literal["known", "full"] = option("known", "entropies over C or C + 1 outputs", "F-9, F-10")
    sync_head: Literal["padded", "restricted"] = option(
        "padded", "targets padded with 0 at unknown, or C outputs", "F-1"
    )
    sync_mask_unknown: bool = option(True, "no loss on samples that nobody knows (exactly uniform targets)", "F-3")
    fit_head: Literal["full", "known"] = option("full", "softmax over C + 1 or C outputs on private data", "F-4")
    epochs_sync: int | None = option(None, "epochs of the sync phase; the run's by default", "F-5", low=0)
    epochs_fit: int | None = option(None, "epochs of the fit phase; the run's by default", "F-5", low=0)
    epochs_refine: int | None = option(None, "epochs of the refine phase; the run's by default", "F-5", low=0)
    refine_joint_batch: bool = option(True, "private and public batch in one forward pass (decisive)", "F-14")
    refine_epoch: Literal["max", "labelled", "public"] = option("max", "which set's length makes an epoch", "F-15")
    bn_recalibrate: Literal["none", "public"] = option(
        "none", "re-estimate BatchNorm on public data at the end", "F-19"
    )

    def outputs(self, classes: int) -> int:
        return classes + 1

    async def client(self, c: Client, down: Predictions | None) -> Predictions:
        known = c.classes
        if down is not None:
            restricted = known if self.sync_head == "restricted" else None
            public = c.public.with_(target=sync_target(down.values, self.sync_head, self.sync_mask_unknown))
            await c.fit("sync", Distill("public", restricted), public=public, recipe=c.recipe_(epochs=self.epochs_sync))

        supervised = CrossEntropy("private", known if self.fit_head == "known" else None)
        await c.fit("fit", supervised, private=c.private, recipe=c.recipe_(epochs=self.epochs_fit))  # theta_0

        bias, clean = await gather(c.predict(featureless(c, self.probe_kind)), c.predict(c.public))
        labels = self.pseudo_labels(c, bias.logits, clean.logits)
        await c.fit(
            "refine",
            CrossEntropy("private") + self.lam * SoftCrossEntropy("public"),  # Eq. (4)
            private=c.private,
            public=c.public.with_(target=labels),
            joint=self.refine_joint_batch,
            recipe=c.recipe_(epochs=self.epochs_refine, pace=PACES[self.refine_epoch]),
        )
        if self.bn_recalibrate == "public":
            still = c.recipe_(lr=0.0, steps=CALIBRATION_STEPS)
            await c.fit("calibrate", SoftCrossEntropy("public"), public=c.public.with_(target=labels), recipe=still)

        shared = (await c.predict(c.public)).logits.softmax(-1)
        c.log["unknown"] = float(shared[:, -1].mean())
        return Predictions(shared)

    async def server(self, s: Server, ups: Mapping[int, Predictions]) -> Mapping[int, Predictions]:
        return s.to_all(Predictions(targets(torch.stack([up.values for up in ups.values()]))))

    async def predict(self, t: Trained, samples: Samples) -> Tensor:
        outputs = await gather(*(Predict(model, samples) for model in t.clients.values()))
        return aggregate(torch.stack([o.logits.softmax(-1) for o in outputs]))[:, :-1]  # argmax over C, Sec. IV-C

    def pseudo_labels(self, c: Client, bias: Tensor, logits: Tensor) -> Tensor:
        """Soft pseudo labels of the public samples by the model after the fit phase (theta_0), Eqs. (8)-(10)."""
        space = c.classes if self.entropy_space == "known" else c.classes + 1
        p = bias[:, :space].softmax(-1).mean(0)
        majority = self.majority(c, p[: c.classes])
        w_l, w_u = float(entropy(smoothed(p, self.delta))), unknown_weight(c.classes, int(majority.sum()))
        a = alpha(w_l, w_u, entropy(logits[:, :space].softmax(-1)))
        if not majority.any():  # majority_empty="alpha_zero": the client abstains from everything
            a, majority = torch.zeros_like(a), torch.ones_like(majority)
            c.log["majority"] = 0
        else:
            c.log["majority"] = int(majority.sum())
        c.log |= {"w_l": w_l, "w_u": w_u, "alpha": float(a.mean())}
        return pseudo_labels(a, logits[:, : c.classes], majority)

    def majority(self, c: Client, p: Tensor) -> Tensor:
        """C_J as a mask [C]: p_c above the threshold (strictly), Sec. V-A."""
        if not self.majority_recompute and "majority" in c.memory:
            kept: Tensor = c.memory["majority"]
            return kept
        share = p if self.majority_source == "probe" else c.counts() / len(c.private)
        mask = share > self.majority_threshold
        if not mask.any() and self.majority_empty == "argmax":
            mask = F.one_hot(share.argmax(), c.classes).bool()
            c.log["majority_empty"] = 1
        c.memory["majority"] = mask
        return mask


def smoothed(p: Tensor, delta: float) -> Tensor:
    """(1 - delta) p + delta / |C|, Eq. (9)."""
    return (1 - delta) * p + delta / p.shape[-1]


def entropy(p: Tensor) -> Tensor:
    """H(p) = -sum_c p_c ln p_c with 0 ln 0 = 0."""
    return -torch.xlogy(p, p).sum(-1)


def unknown_weight(classes: int, majority: int) -> float:
    """w_u = ln(|C| - |C_J| + 1), Sec. IV-B."""
    return math.log(classes - majority + 1)


def alpha(w_l: float, w_u: float, h: Tensor) -> Tensor:
    """(w_l - min(w_l, h)) / (w_l + w_u) for samples of entropy h, Eq. (10); 0 where nothing is known (w_l = 0)."""
    if w_l <= 0:
        return torch.zeros_like(h)
    return (w_l - h.clamp(max=w_l)) / (w_l + w_u)


def pseudo_labels(alpha: Tensor, known_logits: Tensor, majority: Tensor) -> Tensor:
    """Alpha e_m + (1 - alpha) e_u with m the best majority class, Eq. (8): [N, C + 1]."""
    best = known_logits.masked_fill(~majority, -math.inf).argmax(-1)
    return torch.cat([alpha[:, None] * F.one_hot(best, known_logits.shape[-1]), (1 - alpha)[:, None]], -1)


def trust(votes: Tensor) -> Tensor:
    """mu_k = a_k / sum_j a_j with a_k = 1 - v_{k,u}, Alg. 1 line 7: [K, N] from votes [K, N, C + 1].

    Equal weights where all abstain (F-17).
    """
    a = votes[..., :-1].sum(-1)  # not 1 - v_u, which cancels
    total = a.sum(0)
    return torch.where(total < 1e-12, torch.full_like(a, 1 / len(a)), a / total.clamp(min=1e-12))


def aggregate(votes: Tensor) -> Tensor:
    """The server's prediction [N, C + 1] from the clients' [K, N, C + 1], Eq. (11)."""
    return (trust(votes)[..., None] * votes).sum(0)


def targets(votes: Tensor) -> Tensor:
    """Soft targets [N, C]: Eq. (11) without "unknown", renormalised, Alg. 1 line 9; uniform where nobody knows."""
    known = aggregate(votes)[:, :-1]
    mass = known.sum(-1, keepdim=True)
    nobody = mass == 0
    return torch.where(nobody, torch.full_like(known, 1 / known.shape[-1]), known / mass.masked_fill(nobody, 1))


def sync_target(targets: Tensor, head: str, mask_unknown: bool) -> Tensor:
    """Targets as the sync phase takes them: padded with 0 at "unknown" (F-1), all zero where nobody knew (F-3)."""
    if mask_unknown:
        uniform = (targets == targets[:, :1]).all(-1, keepdim=True)  # also where the wire rounded 1 / C
        targets = targets.masked_fill(uniform, 0)
    return F.pad(targets, (0, 1)) if head == "padded" else targets


def featureless(c: Client, kind: Probe) -> Samples:
    """x_0: a solid colour in the space the network sees; for ``noise`` a hundred images of uniform noise (F-7)."""
    shape, view = (1, *c.public.shape), c.public.view
    device = c.public.x.device
    if view == IDENTITY and not c.public.x.is_floating_point():  # tokens: one and the same in every place
        ids = np.full(shape, int(kind in ("cdmad_ones", "white")))
        if kind == "noise":
            ids = c.key.of(phase="probe").generator().integers(0, int(c.public.x.max()) + 1, (100, *c.public.shape))
        return Samples({"x": torch.from_numpy(ids).to(device)}, IDENTITY)
    if kind == "cdmad_ones":
        x = torch.ones(shape, device=device)
    elif kind == "noise":
        draws = c.key.of(phase="probe").generator().random((100, *c.public.shape))
        x = view.normalised(torch.from_numpy(draws).to(device))
    elif kind == "mean":
        x = torch.zeros(shape, device=device)
    else:
        x = view.normalised(torch.full(shape, 1.0 if kind == "white" else 0.0, device=device))
    return Samples({"x": x.long() if c.arch.tokens else x}, IDENTITY)
