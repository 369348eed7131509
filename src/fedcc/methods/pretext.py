"""A pretext task on public images: which way was the image turned? It gives features without labels.

Gidaris, Singh and Komodakis, "Unsupervised representation learning by predicting image rotations", ICLR 2018.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fedcc.core.model import HEAD, Model
from fedcc.core.roles import Server
from fedcc.core.samples import Samples
from fedcc.losses import CrossEntropy

TURNS = 4


def rotation_reason(samples: Samples) -> str:
    """Why these inputs cannot be turned by 90 degrees; empty if they can."""
    if samples.are_images and samples.x.shape[-2] == samples.x.shape[-1]:
        return ""
    return f"rotations are for square images, got inputs of shape {list(samples.shape)}"


def turned(samples: Samples) -> Samples:
    """Each image four times, turned by 0, 90, 180 and 270 degrees, with the number of turns as its label.

    Training does not flip them: a quarter turn that is flipped is three quarter turns of the mirror image.
    """
    x = torch.cat([samples.x.rot90(turn, (2, 3)) for turn in range(TURNS)])
    y = torch.arange(TURNS, device=x.device).repeat_interleave(len(samples))
    return Samples({"x": x, "y": y}, replace(samples.view, flip=False))


async def pretrained(s: Server, model: Model) -> Model:
    """The model with trunks that have learned the task; its head is unchanged."""
    first = await s.init(replace(model.arch, outputs=TURNS), "pretext")
    fitted = await s.fit_request("pretext", first, CrossEntropy("public"), public=turned(s.public))
    return model.with_({name: value for name, value in fitted.model.floating.items() if name not in HEAD})
