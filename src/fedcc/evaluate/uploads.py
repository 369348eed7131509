"""What the server can tell of each client from what it uploaded, and which clients should be looked at.

Nothing here is used in training. docs/attacks.md says how often the warnings are right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedcc.core.messages import Labels, Predictions, Weights
from fedcc.core.method import AnyMethod
from fedcc.core.model import Model
from fedcc.core.requests import Executor, Predict
from fedcc.core.samples import Samples
from fedcc.core.wire import is_probabilities
from fedcc.methods.fednova import Update

Signs = dict[str, dict[str, float]]
"""By client (its number as text) and name of the sign."""

LOOKED_AT = 500  # public samples for the relation, at most
FEWEST = 20  # public samples below which the relation says nothing
RELATED = 3.0  # standard deviations of what answers that ignore the samples give
SMALLEST = 1e-6  # probability whose logarithm is taken
LARGE = 3.0  # times the median size of an update
CHANGED = 0.05  # mean total variation between an upload and the model behind it; rounding on the wire gives less


def upload_signs(method: AnyMethod, classes: int, ups: Mapping[int, Any], received: Mapping[int, Any]) -> Signs:
    """The signs of a round's uploads.

    Predictions and labels: ``known``, ``agreement``, ``trust`` and, with enough samples, ``relation``. Weights:
    ``size``, ``direction`` and ``trust``. Each is defined at the function of its name; ``trust`` is the share of a
    client in what the server combines.
    """
    found: dict[int, dict[str, float]] = {}
    if len(ups) > 1 and all(isinstance(up, Predictions | Labels) for up in ups.values()):
        votes = torch.stack([answers(up, classes) for up in ups.values()])
        columns = {"known": known(votes[..., :classes]), "agreement": agreement(votes[..., :classes])}
        if votes.shape[1] >= FEWEST:
            columns["relation"] = relation(votes)
        found = {k: {name: float(values[i]) for name, values in columns.items()} for i, k in enumerate(ups)}
    for members in alike(ups).values():
        if len(members) > 1 and all(state_of(received.get(k)) for k in members):
            sizes, directions = size_and_direction([ups[k] for k in members], [received[k] for k in members])
            found |= {k: {"size": float(sizes[i]), "direction": float(directions[i])} for i, k in enumerate(members)}
    shares = method.influence(ups) if found else {}
    found = {k: {**signs, **({"trust": shares[k]} if k in shares else {})} for k, signs in found.items()}
    return {str(k): {name: round(value, 4) for name, value in found[k].items()} for k in ups if k in found}


def upload_warnings(signs: Signs) -> dict[str, str]:
    """Clients that look as if they answered without looking, each with the reason.

    A client is compared with the others: where half of them look alike, nothing is said of any.
    """
    warnings = {k: reason for k, own in signs.items() if (reason := _reason(own))}
    return warnings if 2 * len(warnings) < len(signs) else {}


def _reason(own: Mapping[str, float]) -> str:
    if "relation" in own and own["relation"] < RELATED:
        return f"its answers have nothing to do with the samples (relation {own['relation']:.1f})"
    if "size" in own and not 1 / LARGE <= own["size"] <= LARGE:
        return f"its update is {own['size']:.2g} times as large as the median"
    return ""


def answers(up: Predictions | Labels, classes: int) -> Tensor:
    """An upload as probabilities [N, C] or, with "unknown", [N, C + 1]: logits and labels are converted."""
    if isinstance(up, Labels):
        return torch.nn.functional.one_hot(up.values.long(), classes).double()
    values = up.values.double()
    return values if is_probabilities(values, 1e-2) else values.softmax(-1)


def changed_models(
    method: AnyMethod, models: Mapping[int, Model], ups: Mapping[int, Any], public: Samples, executor: Executor
) -> dict[int, float]:
    """Clients whose model answers the public samples otherwise than their last upload did.

    By client: the mean total variation of the two, if it is more than rounding explains. Only for methods whose upload
    is what the client's model says.
    """
    found: dict[int, float] = {}
    for k, model in models.items():
        up = ups.get(k)
        if method.answers == "none" or not isinstance(up, Predictions | Labels):
            continue
        logits = executor.serve([Predict(model, public)])[0].logits.to(up.values.device)
        columns = logits.shape[-1]
        said = Labels(logits.argmax(-1)) if isinstance(up, Labels) else Predictions(logits.softmax(-1))
        distance = (answers(up, columns) - answers(said, columns)).abs().sum(-1).mean() / 2
        if distance > CHANGED:
            found[k] = round(float(distance), 4)
    return found


def known(votes: Tensor) -> Tensor:
    """mean_x a_k(x) with a_k the mass for known classes: [K] from votes [K, N, C]; 1 where nobody can abstain."""
    return votes.sum(-1).mean(1)


def agreement(votes: Tensor) -> Tensor:
    """sum_x sum_j v_k . v_j / sum_x sum_j a_k a_j over the other clients j: [K] from votes [K, N, C].

    The chance that a client and another one name the same class where both claim to know the sample.
    """
    mass = votes.sum(-1)
    same = (votes * (votes.sum(0) - votes)).sum((1, 2))
    both = (mass * (mass.sum(0) - mass)).sum(1)
    return same / both.clamp(min=1e-12)


def relation(votes: Tensor) -> Tensor:
    """How much a client's answers vary with the others' from sample to sample: [K] from votes [K, N, columns].

    The unbiased HSIC (Song et al. 2012) of its answers and all others', in standard deviations of what answers that
    ignore the samples would give: about a standard normal number for those, 0 for constant answers. It does not matter
    which classes are named, so one-class clients that share no class are related too.
    """
    n = min(votes.shape[1], LOOKED_AT)
    rows = torch.linspace(0, votes.shape[1] - 1, n).long()
    kernels = torch.stack([answer_kernel(own) for own in votes[:, rows]])
    others = torch.stack([unit(rest) for rest in kernels.sum(0) - kernels])
    return n / 2**0.5 * (kernels * others).sum((1, 2))


def answer_kernel(votes: Tensor) -> Tensor:
    """How similar a client's answers [n, columns] to any two samples are, by roots and by logarithms: [n, n], unit."""
    features = (votes.clamp(min=0).sqrt(), votes.clamp(min=SMALLEST).log())
    return unit(sum((unit(u_centred(x @ x.T)) for x in features), torch.zeros(())))


def unit(kernel: Tensor) -> Tensor:
    """A kernel divided by its norm; 0 if that is nothing but rounding."""
    norm = kernel.norm()
    return torch.where(norm > 1e-9, kernel / norm.clamp(min=1e-9), 0)


def u_centred(kernel: Tensor) -> Tensor:
    """A kernel [n, n] with rows that add up to 0 without its diagonal, which is 0 (Szekely and Rizzo 2014)."""
    n = len(kernel)
    kernel = kernel.clone().fill_diagonal_(0)
    means = kernel.sum(0) / (n - 2)
    return (kernel - means - means[:, None] + kernel.sum() / ((n - 1) * (n - 2))).fill_diagonal_(0)


def size_and_direction(ups: list[Any], received: list[Any]) -> tuple[Tensor, Tensor]:
    """Of updates u_k: ``size``, |u_k| by the median; ``direction``, the cosine with the others' u_j / |u_j| summed.

    An update is what was sent minus what was received, without BatchNorm's running statistics.
    """
    names = [n for n in state_of(ups[0]) if "running_" not in n and n in state_of(received[0])]
    products = torch.zeros(len(ups), len(ups), dtype=torch.float64)
    for name in names:
        rows = [state_of(up)[name] - state_of(down)[name] for up, down in zip(ups, received, strict=True)]
        flat = torch.stack(rows).flatten(1).double()
        products += (flat @ flat.T).cpu()
    sizes = products.diagonal().clamp(min=0).sqrt()
    scale = sizes.clamp(min=1e-30)
    cosines = products / scale / scale[:, None]
    apart = 1 - torch.eye(len(ups), dtype=torch.float64)
    lengths = torch.einsum("ki,ij,kj->k", apart, cosines, apart).clamp(min=1e-12).sqrt()
    return sizes / sizes.median().clamp(min=1e-30), (cosines * apart).sum(1) / lengths


def alike(ups: Mapping[int, Any]) -> dict[Any, list[int]]:
    """The clients by the names and shapes of the weights that they sent: those of one network."""
    groups: dict[Any, list[int]] = {}
    for k, up in ups.items():
        if state := state_of(up):
            groups.setdefault(tuple((n, v.shape) for n, v in state.items()), []).append(k)
    return groups


def state_of(message: Any) -> Mapping[str, Tensor]:
    """The weights in a message; empty if it has none."""
    if isinstance(message, Weights):
        return message.state
    return message.weights if isinstance(message, Update) else {}
