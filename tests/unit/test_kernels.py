"""The kernels for residual blocks against the library's layers: on a GPU, or on a CPU by Triton's interpreter.

Skipped where there is neither: `TRITON_INTERPRET=1 pytest tests/unit/test_kernels.py` runs it on a CPU with Triton.
"""

from __future__ import annotations

import os

import pytest
import torch

from fedcc.core.model import Arch
from fedcc.core.requests import Fit, Init, Recipe
from fedcc.core.rng import Key
from fedcc.core.samples import Samples, View
from fedcc.engine.fused import Fused
from fedcc.engine.plain import Plain
from fedcc.engine.stack import Stacked, stacked_state
from fedcc.losses import CrossEntropy
from fedcc.nets import ResNet, build

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="no GPU, no interpreter")
DEVICE = "cuda" if GPU else "cpu"
os.environ["TRITON_F32_DEFAULT"] = "tf32x3"  # products in nearly full precision, or a GPU would take TF32


@pytest.mark.parametrize(("shape", "lanes", "batch"), [((3, 8, 8), 2, 3), ((1, 10, 10), 1, 2)])
def test_a_stacked_resnet_on_kernels_is_the_one_on_library_layers(
    shape: tuple[int, int, int], lanes: int, batch: int
) -> None:
    """Features, gradients and running statistics; sizes that halve evenly and that do not."""
    arch = Arch((ResNet(8, shape[0]),), 5, shape)
    networks = [build(arch, Key(0, client=k)).to(DEVICE) for k in range(lanes)]
    x = torch.randn(lanes, batch, *shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = []
    for kernels in (False, True):
        stack = Stacked(arch, kernels).train()
        assert bool(stack.fast) == kernels
        tensors = stacked_state([n.state_dict() for n in networks], stack.template)
        for name in tensors:
            if ".bn" in name and name.endswith(("weight", "bias")):  # not one and zero, as a new network has them
                tensors[name] = tensors[name] + torch.linspace(-0.3, 0.3, tensors[name].numel()).view_as(
                    tensors[name]
                ).to(DEVICE)
        trained = [n for n in stack.parameter_names if not n.startswith("head.")]
        for name in trained:
            tensors[name].requires_grad_()
        stack.hold(tensors)
        features = stack(x).features
        weights = torch.linspace(-1, 1, features.numel()).view_as(features).to(DEVICE)
        grads = torch.autograd.grad((features * weights).sum(), [tensors[n] for n in trained])
        found.append((features.detach(), grads, [v for n, v in tensors.items() if "running" in n]))
    (a, grads_a, buffers_a), (b, grads_b, buffers_b) = found
    close = {"rtol": 1e-3, "atol": 1e-4} if GPU else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(a, b, **close)
    for expected, got in zip([*grads_a, *buffers_a], [*grads_b, *buffers_b], strict=True):
        scale = float(expected.abs().max())
        torch.testing.assert_close(expected / scale, got / scale, **close)


def test_a_fit_on_kernels_is_the_plain_one() -> None:
    """A few steps of ragged clients, cropped and flipped, with the kernel's Adam."""
    arch, plain = Arch((ResNet(8, 1),), 5, (1, 8, 8)), Plain(DEVICE)
    fits = []
    for k in range(3):
        generator = torch.Generator().manual_seed(k)
        x = torch.randint(0, 256, (20 + k, 1, 8, 8), dtype=torch.uint8, generator=generator)
        y = torch.randint(0, 5, (20 + k,), generator=generator)
        private = Samples({"x": x, "y": y}, View(1 / 255, (0.5,), (0.2,), pad=2, flip=True)).to(DEVICE)
        recipe = Recipe(steps=2 + k % 2, batch=6)
        model = plain.init(Init(arch, Key(0, 0, k)))
        fits.append(Fit(model, CrossEntropy("private"), {"private": private}, Key(0, 1, k, "fit"), recipe))
    for expected, found in zip(plain.serve(fits), Fused(DEVICE, "fp32", kernels=True).serve(fits), strict=True):
        assert expected.loss == pytest.approx(found.loss, rel=1e-3 if GPU else 1e-4)
