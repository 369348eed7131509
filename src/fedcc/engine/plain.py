"""The plain engine: one request after another. The reference for every other engine, and the one for CPUs."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from fedcc.core.model import Arch, Model, Outputs
from fedcc.core.options import Precision, check_value
from fedcc.core.requests import Fit, Fitted, Init, Predict, Recalibrate, Recipe, Request
from fedcc.core.rng import Key
from fedcc.core.step import Batch, Gradient, Step, Tensors
from fedcc.engine.adam import Adam, Momentum
from fedcc.engine.finite import check_predictions, magnitudes, nonfinite_reason, overflowing_entry
from fedcc.engine.plan import Plan
from fedcc.engine.statistics import statistics
from fedcc.nets.dropout import dropout_layers, step_seed
from fedcc.nets.network import Network, build

PREDICT_BATCH = 500


class Monitor(Protocol):
    """Follows what an engine does."""

    def fit_started(self, fit: Fit) -> None:
        """A fit begins."""
        ...

    def samples_trained(self, number: int) -> None:
        """A step on ``number`` samples has ended."""
        ...


class Plain:
    """Serves requests one by one on one device.

    ``precision`` is ``fp32`` (no TF32), ``bf16`` (autocast; weights and statistics stay fp32) or ``fp64`` (for tests).
    """

    name = "plain"

    def __init__(
        self, device: str | torch.device = "cpu", precision: Precision = "fp32", monitor: Monitor | None = None
    ):
        check_value("precision", precision, Precision)
        self.device, self.precision, self.monitor = torch.device(device), precision, monitor
        self.dtype = torch.float64 if precision == "fp64" else torch.float32
        self.seconds: dict[str, float] = {}  # by phase, since last cleared
        self._modules: dict[tuple[Arch, str], Network] = {}
        if self.device.type == "cuda" and precision == "fp32":
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cudnn.allow_tf32 = False

    def serve(self, requests: Sequence[Request[Any]]) -> list[Any]:
        return [self._serve(request) for request in requests]

    def _serve(self, request: Request[Any]) -> Any:
        serve: dict[type[Any], Callable[[Any], Any]] = {
            Init: self.init, Fit: self.fit, Predict: self.predict, Recalibrate: self.recalibrate
        }  # fmt: skip
        if type(request) not in serve:
            raise TypeError(f"the plain engine does not serve {type(request).__name__}")
        phase = request.key.phase if isinstance(request, Fit) else type(request).__name__.lower()
        start = time.perf_counter()
        try:
            answer = serve[type(request)](request)
        except Exception as error:
            key = getattr(request, "key", None)
            if key is not None and str(key) not in getattr(error, "__notes__", ()):
                error.add_note(str(key))
            raise
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
        return answer

    def init(self, request: Init) -> Model:
        state = build(request.arch, request.key).state_dict()
        dtypes = {n: self.dtype if value.is_floating_point() else value.dtype for n, value in state.items()}
        return Model(request.arch, {n: value.to(self.device, dtypes[n]) for n, value in state.items()})

    @torch.no_grad()
    def predict(self, request: Predict) -> Outputs:
        module = self.load(request.model, "predict").eval()
        samples, parts = request.samples, []
        for start in range(0, len(samples), PREDICT_BATCH):
            x = samples.view.clean(samples.x[start : start + PREDICT_BATCH].to(self.device), self.dtype)
            parts.append(self.forward(module, x))
        if not parts:
            raise ValueError("nothing to predict: there are no samples")
        outputs = Outputs(torch.cat([p.logits for p in parts]), torch.cat([p.features for p in parts]))
        check_predictions([request], outputs.logits[None])
        return outputs

    @torch.no_grad()
    def recalibrate(self, request: Recalibrate) -> Model:
        samples, module = request.samples, self.load(request.model, "recalibrate")
        if not len(samples):
            raise ValueError("nothing to take statistics from: there are no samples")
        x = samples.x if len(samples) > 1 else torch.cat([samples.x] * 2)  # BatchNorm refuses a batch of one
        parts = x.tensor_split(-(-len(x) // PREDICT_BATCH))  # of equal size, so that none is tiny
        inputs = (samples.view.clean(x.to(self.device), self.dtype) for x in parts)
        state = statistics(module, lambda x: self.forward(module, x), inputs)
        if name := overflowing_entry(request.model.state, state, magnitudes(state)):
            raise FloatingPointError(f"BatchNorm's statistics are not finite ({name})")
        return request.model.with_(state) if state else request.model

    def fit(self, fit: Fit) -> Fitted:
        steps = fit.steps
        if self.monitor:
            self.monitor.fit_started(fit)
        module = self.load(fit.model, "fit")
        params = _trained(module, fit.only)
        if steps == 0:
            return Fitted(fit.model, 0, 0.0, fit.optimizer, tuple(params))
        training, momentum = Training(self, fit, module, params), fit.recipe.momentum
        optimizer = Adam(params, fit.optimizer) if momentum is None else Momentum(params, momentum)
        losses: list[Tensor] = []
        sum_on_device = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            _seed(fit.key.of(stream="dropout").integer(), self.device)
            for t in range(steps):
                loss = training.backward(t)
                if fit.gradient is not None:
                    training.adjust(t, fit.gradient)
                optimizer.step(learning_rate(fit.recipe, t, steps))
                sum_on_device += loss
                losses.append(loss)
                if self.monitor:
                    self.monitor.samples_trained(sum(training.sizes.values()))
        state = {n: v.detach().clone(memory_format=torch.contiguous_format) for n, v in module.state_dict().items()}
        total = float(sum_on_device)
        finite_steps = steps if math.isfinite(total) else int(torch.stack(losses).double().cumsum(0).isfinite().sum())
        if reason := nonfinite_reason(fit, state, total, finite_steps, magnitudes(state)):
            raise FloatingPointError(reason)
        moments = optimizer.state() if fit.recipe.reset == "round" else {}
        return Fitted(Model(fit.model.arch, state), steps, total / steps, moments, tuple(params))

    def forward(self, module: Network, x: Tensor) -> Outputs:
        if x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        if self.precision != "bf16":
            out: Outputs = module(x)
            return out
        with torch.autocast(self.device.type, torch.bfloat16):
            logits, features = module(x)
        return Outputs(logits.float(), features.float())

    def load(self, model: Model, use: str) -> Network:
        """A module with this model's state; there is one per architecture and use."""
        module = self._modules.get((model.arch, use))
        if module is None:
            module = build(model.arch, Key(0)).to(self.device, self.dtype)
            if len(model.arch.shape) == 3:
                module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self._modules[(model.arch, use)] = module
        module.load_state_dict(model.state)
        return module


class Training:
    """One fit in progress: its network, teachers and batches."""

    def __init__(self, engine: Plain, fit: Fit, module: Network, params: Tensors):
        device, self.dtype, self.forward = engine.device, engine.dtype, engine.forward
        self.fit, self.module, self.params = fit, module, params
        self.constants = tree_map_only(Tensor, lambda t: t.to(device), fit.constants)
        self.teachers = {name: engine.load(f.model, f"teacher {name}").eval() for name, f in fit.frozen.items()}
        self.sizes = {name: fit.recipe.batch_size(name) for name in fit.streams}
        self.samples = {name: s.to(device) for name, s in fit.streams.items()}
        plans = {n: Plan(fit.key.of(stream=n), len(s), self.sizes[n], s.view) for n, s in self.samples.items()}
        self.rows = {n: plan.indices(fit.steps).to(device) for n, plan in plans.items()}
        self.draws = {n: plan.augmentation(fit.steps).to(device) for n, plan in plans.items()}
        self.dropouts = list(dropout_layers(module).values())
        self.seed = torch.tensor(fit.key.of(stream="dropout").integer(), device=device)

    def backward(self, t: int) -> Tensor:
        """Put the gradients of step t into the parameters and return the loss."""
        fit, inputs, columns = self.fit, dict[str, Tensor](), dict[str, dict[str, Tensor]]()
        for parameter in self.params.values():
            parameter.grad = None
        for dropout in self.dropouts:
            dropout.seed, dropout.calls = step_seed(self.seed, t), 0
        for name, s in self.samples.items():
            rows = self.rows[name][t]
            inputs[name] = s.view.augmented(s.x[rows], self.draws[name][t], self.dtype)
            columns[name] = {n: c[rows] for n, c in s.columns.items() if n != "x"}
        streams: Mapping[str, Batch]
        if fit.joint:
            x = torch.cat(list(inputs.values())) if len(inputs) > 1 else next(iter(inputs.values()))
            cuts = [torch.split(part, list(self.sizes.values())) for part in self.forward(self.module, x)]
            streams = {n: Batch(Outputs(*pair), columns[n]) for n, *pair in zip(inputs, *cuts, strict=True)}
        else:
            streams = LazyStreams(inputs, lambda n: Batch(self.forward(self.module, inputs[n]), columns[n]))
        with torch.no_grad():
            seen = {name: self.forward(self.teachers[name], inputs[f.stream]) for name, f in fit.frozen.items()}
        loss = fit.loss(Step(streams, self.params, self.constants, seen))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def adjust(self, t: int, rule: Gradient) -> None:
        """Apply a gradient rule: a second pass at theta + offsets if it asks for one, then its transform."""
        offsets = rule.ascent(_grads(self.params))
        if offsets is not None:
            saved = {name: p.detach().clone() for name, p in self.params.items()}
            with torch.no_grad():
                for name, p in self.params.items():
                    p.add_(offsets[name])
            with _frozen_statistics(self.module):
                self.backward(t)
            with torch.no_grad():
                for name, p in self.params.items():
                    p.copy_(saved[name])
        for name, grad in rule.transform(_grads(self.params)).items():
            self.params[name].grad = grad


class LazyStreams(Mapping[str, Batch]):
    """Streams that pass through the network when the loss first reads them; a stream that is never read does not."""

    def __init__(self, names: Mapping[str, Any], forward: Callable[[str], Batch]):
        self._names, self._forward, self._batches = names, forward, dict[str, Batch]()

    def __getitem__(self, name: str) -> Batch:
        if name not in self._batches:
            self._batches[name] = self._forward(name)
        return self._batches[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _seed(seed: int, device: torch.device) -> None:
    """Seed what draws by itself, like F.dropout; torch.manual_seed would queue a call each time if there is no GPU."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def learning_rate(recipe: Recipe, t: int, steps: int) -> float:
    """The learning rate of step t of a fit."""
    if recipe.schedule == "cosine":
        return recipe.lr * 0.5 * (1 + math.cos(math.pi * t / steps))
    return recipe.lr


def _trained(module: Network, only: str | None) -> dict[str, nn.Parameter]:
    """The parameters to train; the others, frozen or outside the named part, get no gradient."""
    names, params = module.train_part(only), dict(module.named_parameters())
    for name, parameter in params.items():
        parameter.requires_grad_(name in names)
    return {name: params[name] for name in names}


def _grads(params: Tensors) -> dict[str, Tensor]:
    return {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in params.items()}


@contextlib.contextmanager
def _frozen_statistics(module: nn.Module) -> Iterator[None]:
    """BatchNorm uses the batch's statistics and leaves the running ones unchanged."""
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    for m in norms:
        m.track_running_stats = False
    try:
        yield
    finally:
        for m in norms:
            m.track_running_stats = True
