"""The optimiser's groups, and its schedule: rate, momentum and accumulation as a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from accel_yolo.config.schema import OptimConfig

MAX_GRAD_NORM = 10.0

# The order is YOLOv5's and gives `x/lr0`, `x/lr1`, `x/lr2` of results.csv their meaning.
BIAS_GROUP, WEIGHT_GROUP, NORM_GROUP = 0, 1, 2

_NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm)


def build_optimizer(
    model: nn.Module, config: OptimConfig, *, batch_size: int, uses_scaler: bool = False
) -> torch.optim.Optimizer:
    """The optimiser over three groups: biases, weights (decayed), weights of normalisation layers.

    Args:
        model: before `prepare()`; frozen parameters are included, they get no gradient.
        config: its weight decay is that of a nominal batch and is scaled here.
        batch_size: global images per step.
        uses_scaler: True under fp16, whose gradient scaler skips steps.
    """
    groups: tuple[list[nn.Parameter], ...] = ([], [], [])
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name == "bias":
                groups[BIAS_GROUP].append(parameter)
            elif name == "weight" and isinstance(module, _NORMS):
                groups[NORM_GROUP].append(parameter)
            else:
                groups[WEIGHT_GROUP].append(parameter)
    accumulate = max(round(config.nominal_batch / batch_size), 1)
    decay = config.weight_decay * batch_size * accumulate / config.nominal_batch
    layout = [
        {"params": parameters, "weight_decay": decay if index == WEIGHT_GROUP else 0.0}
        for index, parameters in enumerate(groups)
    ]
    # The fused kernels are 2 to 4 times as fast as the loop on CPU as well as on CUDA. But they decide themselves
    # whether to skip a step: a skipped first step leaves the momentum uninitialised, and nobody learns of the skip.
    fused = not uses_scaler
    if config.optimizer == "SGD":
        return torch.optim.SGD(layout, lr=config.lr0, momentum=config.momentum, nesterov=True, fused=fused)
    kind = torch.optim.Adam if config.optimizer == "Adam" else torch.optim.AdamW
    return kind(layout, lr=config.lr0, betas=(config.momentum, 0.999), fused=fused)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step of training uses.

    Args:
        rates: learning rates of the bias, weight and norm groups.
        momentum: SGD's momentum; None for optimisers whose momentum is not warmed up.
        accumulate: steps per weight update.
    """

    rates: tuple[float, float, float]
    momentum: float | None
    accumulate: int

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Write rates and momentum into the optimiser's groups."""
        for group, rate in zip(optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate
            if self.momentum is not None:
                group["momentum"] = self.momentum


@dataclass(frozen=True, slots=True)
class Schedule:
    """Rate, momentum and accumulation of every step, warm-up and YOLOv5's one-epoch lag included.

    Args:
        config: rates, momenta and lengths.
        epochs: length of the run.
        steps_per_epoch: global batches per epoch.
        batch_size: global images per step.
    """

    config: OptimConfig
    epochs: int
    steps_per_epoch: int
    batch_size: int

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up; the step of this number is still part of it."""
        return max(round(self.config.warmup_epochs * self.steps_per_epoch), self.config.warmup_min_steps)

    def factor(self, epoch: int) -> float:
        """The decay at `epoch` as a fraction of lr0, from 1 down to lrf."""
        lrf, progress = self.config.lrf, epoch / self.epochs
        if self.config.cos_lr:
            return ((1 - math.cos(progress * math.pi)) / 2) * (lrf - 1) + 1
        return (1 - progress) * (1 - lrf) + lrf

    def at(self, step: int) -> StepPlan:
        """The plan of global batch number `step`, counted from the start of the run.

        Source: training.md 2 and 3 of the specification; numbers in tests/golden/schedule_*.csv.
        """
        config = self.config
        epoch, last_warm = step // self.steps_per_epoch, self.warmup_steps
        warms_momentum = config.optimizer == "SGD"
        if step <= last_warm:
            progress = step / last_warm if last_warm else 1.0
            rate = config.lr0 * self.factor(epoch)
            warm = float(np.interp(progress, [0, 1], [0.0, rate]))
            bias = float(np.interp(progress, [0, 1], [config.warmup_bias_lr, rate]))
            momentum = float(np.interp(progress, [0, 1], [config.warmup_momentum, config.momentum]))
            return StepPlan((bias, warm, warm), momentum if warms_momentum else None, self._accumulate(progress))
        # Recipes were tuned on a scheduler that runs one epoch late. The epoch in which the warm-up ends keeps its
        # own rate, since the warm-up had set that.
        warmup_ended_here = last_warm >= epoch * self.steps_per_epoch
        rate = config.lr0 * self.factor(epoch if warmup_ended_here else max(epoch - 1, 0))
        return StepPlan((rate, rate, rate), config.momentum if warms_momentum else None, self._accumulate(1.0))

    def _accumulate(self, progress: float) -> int:
        wanted = np.interp(progress, [0, 1], [1, self.config.nominal_batch / self.batch_size])
        return max(1, round(float(wanted)))
