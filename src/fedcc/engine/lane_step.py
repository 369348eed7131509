"""One training step of all lanes, on a GPU captured as a graph."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fedcc.core.model import Outputs
from fedcc.core.step import Batch, Step
from fedcc.engine import step_kernels
from fedcc.engine.adam import BETAS, EPS
from fedcc.engine.cuda import Side
from fedcc.engine.graphs import captured
from fedcc.engine.lanes import Compute, Lanes
from fedcc.engine.plain import Monitor
from fedcc.engine.trunk import FastTrunk
from fedcc.nets.dropout import step_seed


@dataclass(frozen=True)
class StepBatches:
    """The batches of a step: inputs [lanes, images, ...] of all streams side by side, and columns by stream."""

    x: Tensor
    sizes: Mapping[str, int]
    columns: dict[str, dict[str, Tensor]]
    ready: Any  # the mark of the inputs on the side stream

    def inputs(self) -> dict[str, Tensor]:
        return dict(zip(self.sizes, torch.split(self.x, list(self.sizes.values()), 1), strict=True))


class LaneStep:
    """Trains all lanes by one step: batches, forward, losses, gradients, Adam."""

    def __init__(self, lanes: Lanes, compute: Compute):
        self.lanes, self.compute, self.fit, self.stack = lanes, compute, lanes.fit, lanes.stack
        self.kernels, self.side = compute.kernels, Side(compute.device, compute.kernels)
        self.ones = torch.ones(lanes.width, dtype=compute.dtype, device=compute.device)
        self.climbs = False
        if self.fit.gradient is not None:  # asked once, not in every captured step
            template, own = self.stack.template, {"dtype": compute.dtype, "device": compute.device}
            ones = {n: torch.ones(template[n].shape, **own) for n in lanes.trained}  # type: ignore[call-overload]
            self.climbs = self.fit.gradient.ascent(ones) is not None
        pools = [pool for (_, column), pool in lanes.pools.pools.items() if column == "x"]
        # Networks that cast their inputs themselves take them as they are, not rounded.
        casts = any(networks.casts for networks in (self.stack, *lanes.teachers.values()))
        self.images = compute.kernels and not casts and all(p.ndim == 4 and p.dtype == torch.uint8 for p in pools)
        self.graph: Any = None
        if compute.graphs:
            self.capture()

    def run(self, steps: int, monitor: Monitor | None) -> None:
        for _ in range(steps):
            if self.graph is not None:
                self.graph.replay()
            else:
                self.once()
            if monitor:
                monitor.samples_trained(self.lanes.width * sum(self.lanes.batches.values()))

    def capture(self) -> None:
        """Record a step as a graph; loading clients overwrites what the trial steps do to the lanes."""
        pools, arch = self.compute.graph_pools, self.fit.model.arch
        # High priority, ahead of the weight gradients that run beside it: here each layer waits for the previous one.
        self.graph = captured(self.once, self.compute.device, self.attempt, pools.get(arch), priority=-1)
        pools[arch] = self.graph.pool()

    def attempt(self) -> None:
        self.once()
        self.lanes.numbers["position"].zero_()

    def once(self) -> None:
        """Train every lane by one step: weights are packed beside the batches, the step is counted beside gradients."""
        try:
            batches = self.batches()
            if self.stack.dropouts:
                seed = step_seed(self.lanes.numbers["seed"], self.lanes.numbers["step"])
                self.stack.use({f"{name}.seed": seed for name in self.stack.dropouts})
            losses, leaves = self.losses(self.lanes.params, batches)
            pace = self.tick(losses.detach())
            grads = self.gradients(losses, leaves)
            if self.fit.gradient is not None:
                grads = [self.adjusted(_whole(grads), batches)]
        finally:  # a capture that fails must end too
            self.side.join()
        if self.fit.recipe.momentum is None:
            self.adam(grads, *pace)
        else:
            self.descend(_whole(grads), pace[0], self.fit.recipe.momentum)

    # -- batches

    def batches(self) -> StepBatches:
        """This step's batches: gathered, augmented, normalised."""
        x = self._images(self.compute.low) if self.images else self._inputs(self.compute.dtype)
        with self.side.stretch():
            ready = self.side.mark()
            columns = {
                stream: {c: self._rows(stream, c) for c in samples.columns if c != "x"}
                for stream, samples in self.fit.streams.items()
            }
        return StepBatches(x, self.lanes.batches, columns, ready)

    def _inputs(self, dtype: torch.dtype) -> Tensor:
        """The inputs of all streams side by side."""
        lanes, inputs = self.lanes, []
        for stream, samples in self.fit.streams.items():
            x = self._rows(stream, "x")
            draws = lanes.draws[stream][lanes.rows, lanes.numbers["position"]].flatten(0, 1)
            augmented = samples.view.augmented(x.flatten(0, 1), draws.long(), dtype)
            inputs.append(augmented.reshape(*x.shape[:2], *augmented.shape[1:]))
        return torch.cat(inputs, 1) if len(inputs) > 1 else inputs[0]

    def _rows(self, stream: str, column: str) -> Tensor:
        """A column's batch, [lanes, batch, ...]."""
        lanes = self.lanes
        pool, offset = lanes.pools.pools[stream, column], lanes.offsets[stream, column]
        plan, position = lanes.plan[stream], lanes.numbers["position"]
        if self.kernels:
            return step_kernels.rows(pool, plan, position, offset)
        return pool[plan[lanes.rows, position].long() + offset]

    def _images(self, dtype: torch.dtype) -> Tensor:
        """The inputs of all streams side by side, by a kernel, on the side stream."""
        lanes, (channels, height, width) = self.lanes, next(iter(self.fit.streams.values())).shape
        shape = (lanes.width, sum(lanes.batches.values()), height, width, channels)
        out, first = torch.empty(shape, dtype=dtype, device=self.compute.device), 0
        with self.side.stretch():
            for stream, samples in self.fit.streams.items():
                steps = lanes.plan[stream], lanes.draws[stream], lanes.numbers["position"], lanes.offsets[stream, "x"]
                step_kernels.images(lanes.pools.pools[stream, "x"], *steps, samples.view, out, first)
                first += lanes.batches[stream]
        return out.permute(0, 1, 4, 2, 3)

    # -- losses and gradients

    def losses(self, flat: Tensor, batches: StepBatches) -> tuple[Tensor, list[Tensor]]:
        """All lanes' losses [lanes] at the parameters ``flat``, and the leaves to differentiate by."""
        lanes, compute, stack = self.lanes, self.compute, self.stack
        leaf = flat.detach().requires_grad_()
        params, leaves, inputs = lanes.blocks(leaf), [leaf], batches.inputs()
        weights = params
        for dropout in stack.dropouts.values():
            dropout.calls = 0
        if stack.fast:  # leaves of their own: most of their gradients are adjacent in memory already
            weights = {name: block.detach().requires_grad_() for name, block in params.items()}
            params = {name: block.detach().requires_grad_() for name, block in params.items()}  # what a loss may read
            leaves = [*weights.values(), *params.values()]
        if compute.low != compute.dtype and not stack.fast and not stack.casts:
            # convolutions and linear layers in low precision, cast all at once; BatchNorm's own stay
            low = lanes.blocks(leaf.to(compute.low))
            weights = {n: low[n] if low[n].ndim > 2 else params[n] for n in params}
        stack.use({**lanes.fixed, **weights})
        if stack.training:
            for trunk in stack.fast:
                cast(FastTrunk, trunk).pack()
        self.side.join(batches.ready)
        outputs: dict[str, Outputs] = {}
        if self.fit.joint:
            all_streams = compute.outputs(stack, batches.x)
            sizes = list(batches.sizes.values())
            cuts = [torch.split(part, sizes, 1) if len(sizes) > 1 else [part] for part in all_streams]
            outputs = {name: Outputs(*pair) for name, *pair in zip(inputs, *cuts, strict=True)}
        else:
            for name in lanes.streams:
                outputs[name] = compute.outputs(stack, inputs[name])
        seen = {}
        with torch.no_grad():
            for name, teacher in lanes.teachers.items():
                teacher.use(lanes.teacher_tensors[name])
                seen[name] = compute.outputs(teacher, inputs[self.fit.frozen[name].stream])

        def loss(outputs: Any, columns: Any, params: Any, constants: Any, seen: Any) -> Tensor:
            streams = {n: Batch(Outputs(*outputs[n]), columns[n]) for n in outputs}
            return self.fit.loss(Step(streams, params, constants, {n: Outputs(*s) for n, s in seen.items()}))

        self.side.join()
        streams = {n: tuple(o) for n, o in outputs.items()}, {n: batches.columns[n] for n in outputs}
        return torch.vmap(loss)(*streams, params, lanes.constants, {n: tuple(s) for n, s in seen.items()}), leaves

    def gradients(self, losses: Tensor, leaves: list[Tensor]) -> list[Tensor]:
        """Gradients of all lanes' losses, flat, in parts."""
        grads = torch.autograd.grad(losses, leaves, self.ones, allow_unused=True)
        split = len(self.lanes.trained) if self.stack.fast else len(leaves)
        own = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads[:split], strict=False)]
        more = [(grad, extra) for grad, extra in zip(own, grads[split:], strict=False) if extra is not None]
        if more:  # in place, so that neighbours in memory remain neighbours
            torch._foreach_add_([grad for grad, _ in more], [extra for _, extra in more])
        return flat_runs(own)

    def adjusted(self, grads: Tensor, batches: StepBatches) -> Tensor:
        """The gradients by the fit's gradient rule: perhaps taken again at other parameters, perhaps transformed."""
        lanes, rule = self.lanes, self.fit.gradient
        assert rule is not None
        if self.climbs:
            offsets = torch.vmap(rule.ascent)(lanes.blocks(grads))
            moved = lanes.params + torch.cat([offsets[n].reshape(-1) for n in lanes.trained])  # type: ignore[index]
            self.stack.freeze_statistics(True)
            grads = _whole(self.gradients(*self.losses(moved, batches)))
            self.stack.freeze_statistics(False)
        changed = torch.vmap(rule.transform)(lanes.blocks(grads))
        return torch.cat([changed[n].reshape(-1) for n in lanes.trained])

    # -- the optimizer

    def tick(self, losses: Tensor) -> tuple[Tensor, Tensor]:
        """Count a step; returns Adam's step sizes (with momentum: learning rates) and bias corrections [lanes]."""
        n, dtype, momentum = self.lanes.numbers, self.compute.dtype, self.fit.recipe.momentum
        if self.kernels and momentum is None:
            with self.side.stretch():
                return step_kernels.tick(losses, n, BETAS)
        n["loss"].add_(losses)
        n["finite_steps"].add_(n["loss"].isfinite())
        n["age"].add_(1)
        slower = 0.5 * (1 - torch.cos(math.pi * n["step"].double() / n["length"].clamp(min=1)))
        lr = n["lr"] * (1 - n["cosine"] * slower)
        n["step"].add_(1)
        n["position"].add_(1)
        size, root = lr / (1 - BETAS[0] ** n["age"]), (1 - BETAS[1] ** n["age"]).rsqrt()
        size = size if momentum is None else lr
        return size.to(dtype), root.to(dtype)

    def adam(self, parts: list[Tensor], size: Tensor, root: Tensor) -> None:
        """Adam with a step size and a bias correction per lane."""
        lanes = self.lanes
        if self.kernels:
            state = lanes.params, lanes.means, lanes.squares
            step_kernels.adam(*state, parts, lanes.lane_of, size, root, BETAS, EPS)
            return
        grads, size, root = _whole(parts), size[lanes.lane_of], root[lanes.lane_of]
        lanes.means.lerp_(grads, 1 - BETAS[0])
        lanes.squares.mul_(BETAS[1]).addcmul_(grads, grads, value=1 - BETAS[1])
        lanes.params.addcmul_(lanes.means / lanes.squares.sqrt().mul_(root).add_(EPS), size, value=-1)

    def descend(self, grads: Tensor, rate: Tensor, momentum: float) -> None:
        """SGD with momentum, with a learning rate per lane; the means hold the velocities."""
        lanes = self.lanes
        lanes.params.addcmul_(lanes.means.mul_(momentum).add_(grads), rate[lanes.lane_of], value=-1)


def flat_runs(tensors: Sequence[Tensor]) -> list[Tensor]:
    """These tensors as flat ones; neighbours that are adjacent in memory become one, without a copy.

    >>> a, b, c = torch.arange(6).split((2, 3, 1))
    >>> [run.tolist() for run in flat_runs([a, b, torch.tensor([[7, 8]]), c])]
    [[0, 1, 2, 3, 4], [7, 8], [5]]
    """
    runs: list[Tensor] = []
    for flat in (tensor.reshape(-1) for tensor in tensors):
        if runs and _adjacent(runs[-1], flat):
            runs[-1] = runs[-1].as_strided((len(runs[-1]) + len(flat),), (1,), runs[-1].storage_offset())
        else:
            runs.append(flat)
    return runs


def _adjacent(first: Tensor, second: Tensor) -> bool:
    """Whether the second of two flat tensors begins where the first ends, in the same storage."""
    same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    return same and first.storage_offset() + len(first) == second.storage_offset()


def _whole(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
