"""All that changes during a run: its counters, the average of the weights, and the patience."""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(slots=True)
class TrainState:
    """The counters of a run; with weights, optimiser and buffers they are all that is needed to go on.

    Args:
        epoch: the epoch in progress, or the next one between epochs.
        samples_seen: images drawn in this epoch, over all processes.
        micro_step: global batches since the start.
        last_update: `micro_step` of the last optimiser update, -1 before the first.
        updates: optimiser updates so far; drives the EMA's decay.
        best_fitness: of all epochs so far; -1 before the first validation.
        best_epoch: the epoch that reached it.
    """

    epoch: int = 0
    samples_seen: int = 0
    micro_step: int = 0
    last_update: int = -1
    updates: int = 0
    best_fitness: float = -1.0
    best_epoch: int = -1

    def to_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self)


class ModelEma:
    """An exponential moving average of a model's weights and running statistics, kept in float32.

    Integer buffers are left alone; anchors are averaged like everything else, since recipes were tuned on that.

    Args:
        model: the unwrapped model, before `prepare()`.
        decay: the decay in the long run.
        tau: updates over which it is approached.

    Source: training.md 5 of the specification; numbers in tests/golden/ema.json.
    """

    def __init__(self, model: nn.Module, *, decay: float = 0.9999, tau: float = 2000.0) -> None:
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay
        self.tau = tau
        self._source: nn.Module | None = None
        self._averages: list[Tensor] = []
        self._values: list[Tensor] = []

    def decay_at(self, updates: int) -> float:
        """The decay of update number `updates`, counted from 1."""
        return self.decay * (1 - math.exp(-updates / self.tau))

    @torch.no_grad()
    def update(self, model: nn.Module, updates: int) -> None:
        """Move the average towards `model` (unwrapped), as update number `updates`."""
        if self._source is not model:
            self._pair_up(model)
        torch._foreach_lerp_(self._averages, self._values, 1 - self.decay_at(updates))

    def _pair_up(self, model: nn.Module) -> None:
        # The tensors stay the same objects for the whole run, so that the pairs need to be found only once.
        values = model.state_dict(keep_vars=True)
        averages = self.module.state_dict(keep_vars=True)
        names = [name for name, value in averages.items() if value.dtype.is_floating_point]
        self._averages = [averages[name].data for name in names]
        self._values = [values[name].data for name in names]
        self._source = model


@dataclass(slots=True)
class EarlyStopper:
    """Stops a run that has not improved for `patience` epochs; 0 = never.

    Only epochs with a measured fitness count: under `--noval` there is nothing to be patient about.
    """

    patience: int

    def should_stop(self, state: TrainState) -> bool:
        """Whether `state`, after the validation of `state.epoch`, has waited long enough."""
        if self.patience == 0 or state.best_epoch < 0:
            return False
        return state.epoch - state.best_epoch >= self.patience


def note_fitness(state: TrainState, fitness: float) -> bool:
    """Record the fitness of `state.epoch`; True if it is the best so far. Only a strict improvement counts."""
    if not math.isfinite(fitness) or fitness <= state.best_fitness:
        return False
    state.best_fitness, state.best_epoch = fitness, state.epoch
    return True
