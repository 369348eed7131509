"""The two sides of a federation: all that each of them can see.

A server has no attribute through which it could reach a client's model or data, and neither side has public labels:
the split drops them, and only the evaluator keeps them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedcc.core.model import Arch, Model
from fedcc.core.requests import Fit, Fitted, Frozen, Init, Predict, Recipe
from fedcc.core.rng import SERVER, Key
from fedcc.core.samples import Samples
from fedcc.core.step import Gradient, Loss
from fedcc.errors import UserError


@dataclass(eq=False, kw_only=True)
class Role:
    """What clients and the server have in common: public samples, the run's recipe, all clients' architectures, a key
    and a memory of their own.
    """

    public: Samples
    classes: int
    recipe: Recipe
    key: Key
    archs: Mapping[int, Arch] = field(default_factory=dict)  # of all clients; descriptions, not weights
    memory: dict[str, Any] = field(default_factory=dict)  # tensors and JSON values that survive between rounds
    log: dict[str, float] = field(default_factory=dict)  # numbers of this round, for the record; never sent

    @property
    def round(self) -> int:
        return self.key.round

    def begin(self, round: int) -> None:
        """Start a round with its own key and an empty log."""
        self.key = self.key.of(round=round)
        self.log = {}

    def recipe_with(self, **changes: Any) -> Recipe:
        """The recipe of this round with some values changed; None leaves a value unchanged."""
        changes = {name: value for name, value in changes.items() if value is not None}
        return replace(self.recipe.at(self.round), **changes)

    def fit_request(
        self,
        phase: str,
        model: Model,
        loss: Loss,
        *,
        recipe: Recipe | None = None,
        constants: Mapping[str, Any] | None = None,
        frozen: Mapping[str, Frozen] | None = None,
        gradient: Gradient | None = None,
        only: str | None = None,
        joint: bool = True,
        **streams: Samples,
    ) -> Fit:
        """A request to train ``model``; ``phase`` is part of the keys of its batches and appears in errors."""
        key, recipe = self.key.of(phase=phase), recipe or self.recipe.at(self.round)
        return Fit(model, loss, streams, key, recipe, constants or {}, frozen or {}, gradient, only, joint)


@dataclass(eq=False, kw_only=True)
class Client(Role):
    """One client: its id, network, model and private samples, and the public samples that all share."""

    id: int
    arch: Arch
    private: Samples
    majority: Tensor | None = None  # the classes it claims to know in this round, a mask [classes]; never sent
    first_model: Callable[[], Model] | None = None  # makes its first model, when that is first needed
    _model: Model | None = None
    _optimizer: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def model(self) -> Model:
        if self._model is None and self.first_model is not None:
            self._model = self.first_model()
        if self._model is None:
            raise RuntimeError(f"client {self.id} has no model yet")
        return self._model

    @property
    def has_model(self) -> bool:
        """Whether its model is in memory: that of a client that never took part may not be."""
        return self._model is not None

    @model.setter
    def model(self, model: Model) -> None:
        self._model = model

    def begin(self, round: int) -> None:
        super().begin(round)
        self.majority = None
        self._optimizer = {}

    def counts(self) -> Tensor:
        """Private samples per class, [classes]; known only to the client."""
        return torch.bincount(self.private["y"], minlength=self.classes)

    async def fit(self, phase: str, loss: Loss, **request: Any) -> Fitted:
        """Train the client's own model and keep the result; arguments as in :meth:`fit_request`."""
        fit = self.fit_request(phase, self.model, loss, **request)
        keep_optimizer = fit.recipe.reset == "round" and fit.only is None  # a part of the network has its own state
        fitted = await (replace(fit, optimizer=self._optimizer) if keep_optimizer else fit)
        if keep_optimizer:
            self._optimizer = fitted.optimizer
        self.model = fitted.model
        return fitted

    def predict(self, samples: Samples) -> Predict:
        """The outputs of the client's own model on clean inputs."""
        return Predict(self.model, samples, self.key.of(phase="predict"))


@dataclass(eq=False, kw_only=True)
class Server(Role):
    """The server: public samples, and models of its own."""

    models: dict[str, Model] = field(default_factory=dict)
    networks: Callable[[str], Arch] | None = None  # the architecture of a network by its name, for this data
    _rounds: int | None = 0  # None: not for this method

    @property
    def rounds(self) -> int:
        """T, as requested: a method with several stages, which declares it, begins the next stage after T rounds."""
        if self._rounds is None:
            raise UserError("only a method that declares depends_on_rounds = True can read the number of rounds T")
        return self._rounds

    @rounds.setter
    def rounds(self, rounds: int | None) -> None:
        self._rounds = rounds

    def init(self, arch: Arch, name: str = "init") -> Init:
        """A request for a first model of the server's own; its weights depend on the name."""
        return Init(arch, self.key.of(client=SERVER, phase=name))

    def to_all(self, message: Any) -> dict[int, Any]:
        """The same downlink for every client."""
        return dict.fromkeys(self.archs, message)
