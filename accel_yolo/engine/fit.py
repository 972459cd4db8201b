"""The training loop: `fit` is the story of a run, `train_epoch` of a pass over the data, `train_step` of a batch.

Legend: B images of this process, H W pixels, W processes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_yolo.data.order import multi_scale_size
from accel_yolo.engine.callbacks import Callbacks, call
from accel_yolo.engine.distributed import PendingSum, World, broadcast_from_main, sum_over_processes
from accel_yolo.engine.optim import MAX_GRAD_NORM, Schedule
from accel_yolo.engine.state import EarlyStopper, ModelEma, TrainState, note_fitness
from accel_yolo.errors import TrainingError
from accel_yolo.metrics import EvalResult
from accel_yolo.model.loss import DetectionLoss, Losses
from accel_yolo.structures import Batch

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Trainee:
    """What one training step changes, and the functions that it needs.

    Args:
        model: as `prepare()` returned it.
        optimizer: as `prepare()` returned it.
        batch_size: GLOBAL images per step.
        image_size: side of the square input, px; the centre of `--multi-scale`.
        stride: the model's largest stride, px.
        dtype: of weights and images; float32 but for proofs.
        seed: of the run; draws the sizes of `multi_scale`.
    """

    model: nn.Module
    ema: ModelEma
    optimizer: Any
    loss_fn: DetectionLoss
    schedule: Schedule
    accelerator: Accelerator
    world: World
    batch_size: int
    image_size: int
    stride: int
    seed: int = 0
    multi_scale: bool = False
    channels_last: bool = True
    dtype: torch.dtype = torch.float32


@dataclass(slots=True)
class Story:
    """What `fit` does around the epochs; everything here is called on every process.

    Args:
        evaluate: validates the weight average.
        save: writes weights and checkpoint; gets the state, whether this epoch is the best, and whether it is the last.
        record: takes the finished row of results.csv; on the main process it writes it.
        progress: wraps the loader in a bar; `bar.set_postfix_str` shows the losses.
    """

    evaluate: Callable[[], EvalResult]
    save: Callable[[TrainState, bool, bool], None]
    record: Callable[[dict[str, float]], None]
    progress: Callable[[Any, TrainState], Any]
    epochs: int
    stopper: EarlyStopper
    validate_every_epoch: bool = True
    save_every_epoch: bool = True
    callbacks: Callbacks | None = None


def fit(trainee: Trainee, loader: Any, state: TrainState, story: Story) -> EvalResult | None:
    """Train from `state` to the last epoch or until patience ends; returns the last validation's result."""
    accelerator = trainee.accelerator
    result: EvalResult | None = None

    def notify(name: str, **values: Any) -> None:
        call(story.callbacks, name, is_main_process=accelerator.is_main_process, state=state, **values)

    while state.epoch < story.epochs:
        started_at = time.perf_counter()
        is_last = state.epoch == story.epochs - 1
        notify("on_epoch_start")
        losses = train_epoch(trainee, loader, state, story)
        trained_at = time.perf_counter()

        is_best, stop = False, False
        if story.validate_every_epoch or is_last:
            result = story.evaluate()
            is_best = note_fitness(state, result.fitness)
            # One process decides, so that a rounding difference between processes can never part them.
            stop = broadcast_from_main(accelerator, story.stopper.should_stop(state))
            notify("on_validation_end", result=result)
        validated_at = time.perf_counter()

        row = _row(trainee, state, losses, result if story.validate_every_epoch or is_last else None)
        row["time/train"] = trained_at - started_at
        row["time/val"] = validated_at - trained_at
        row["time/images_per_second"] = len(loader) * trainee.batch_size / max(trained_at - started_at, 1e-9)
        # Recorded before it is saved: a run killed in between repeats the epoch and replaces the row.
        story.record(row)
        state.epoch, state.samples_seen = state.epoch + 1, 0
        if story.save_every_epoch or is_last or stop:
            story.save(state, is_best, is_last or stop)
        notify("on_epoch_end", values=row)
        if stop and not is_last:
            logger.info(
                "stopped early: no improvement for %d epochs, best is epoch %d (fitness %.4g)",
                story.stopper.patience,
                state.best_epoch + 1,
                state.best_fitness,
            )
            break
    return result


def train_epoch(trainee: Trainee, loader: Any, state: TrainState, story: Story) -> Tensor:
    """One pass over the data; returns the epoch's mean box, objectness and class loss (3,), over all processes."""
    model, accelerator = trainee.model, trainee.accelerator
    model.train()
    # A prepared loader keeps an epoch count of its own, from zero; this sets it and the sampler's.
    loader.set_epoch(state.epoch)
    trainee.optimizer.zero_grad()
    # Apple's devices have no float64.
    precise = torch.float32 if accelerator.device.type == "mps" else torch.float64
    total = torch.zeros(3, device=accelerator.device, dtype=precise)
    bar = story.progress(loader, state)
    shown_at = time.perf_counter()
    for step, batch in enumerate(bar, start=1):
        losses = train_step(batch, trainee, state)
        total += torch.stack([losses.box, losses.objectness, losses.classification])
        state.samples_seen += trainee.batch_size
        call(story.callbacks, "on_batch_end", is_main_process=accelerator.is_main_process, batch=batch, state=state)
        # Reading a loss makes the device wait, so it is done about twice a second and not at every step.
        if hasattr(bar, "set_postfix_str") and time.perf_counter() - shown_at > 0.5:
            shown_at = time.perf_counter()
            box, objectness, classification = (total * accelerator.num_processes / step).tolist()
            bar.set_postfix_str(f"box {box:.4f}, obj {objectness:.4f}, cls {classification:.4f}")
    means = sum_over_processes(total, trainee.world, device=accelerator.device) / max(len(loader), 1)
    if not means.isfinite().all():
        # The same sum on every process, so all leave here together; the last good checkpoint is not overwritten.
        raise TrainingError(
            "the loss is not a finite number any more; the weights are spoilt.",
            found=f"mean losses {[round(value, 4) for value in means.tolist()]} in epoch {state.epoch + 1}",
            fix="lower lr0 (or --mixed-precision no), and go on from the last good epoch with --weights, or --resume",
        )
    return means


def train_step(batch: Batch, trainee: Trainee, state: TrainState) -> Losses:
    """One global batch; every `accumulate`-th call also updates the weights.

    Returns:
        This process's share of the global mean losses, detached; the shares of all processes add up to them.
    """
    accelerator, model, optimizer = trainee.accelerator, trainee.model, trainee.optimizer
    plan = trainee.schedule.at(state.micro_step)
    plan.apply(optimizer)
    is_update = state.micro_step - state.last_update >= plan.accumulate
    images = batch.floats(channels_last=trainee.channels_last, dtype=trainee.dtype)
    if trainee.multi_scale:
        images = resize_images(
            images, multi_scale_size(trainee.seed, state.micro_step, trainee.image_size, trainee.stride), trainee.stride
        )
    assignment = trainee.loss_fn.assign(
        batch.targets, batch_size=len(batch), image_hw=(images.shape[2], images.shape[3])
    )
    # The divisors depend on targets and grids alone, so their exchange runs beside the forward pass.
    counts = PendingSum(assignment.counts, trainee.world, device=accelerator.device)

    with nullcontext() if is_update else accelerator.no_sync(model):
        with accelerator.autocast():
            maps = model(images)
        losses = trainee.loss_fn(
            maps,
            assignment,
            counts=counts.result(),
            batch_size=trainee.batch_size,
            num_processes=accelerator.num_processes,
        )
        accelerator.backward(losses.total)

    if is_update:
        accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if not accelerator.optimizer_step_was_skipped:
            state.updates += 1
            trainee.ema.update(accelerator.unwrap_model(model), state.updates)
        state.last_update = state.micro_step
    state.micro_step += 1
    return losses.detach()


def resize_images(images: Tensor, size: int, stride: int) -> Tensor:
    """Images (B, 3, H, W) -> their longer side about `size` px, both sides multiples of `stride`, bilinear."""
    factor = size / max(images.shape[2:])
    if factor == 1:
        return images
    height, width = (math.ceil(side * factor / stride) * stride for side in images.shape[2:])
    return F.interpolate(images, size=(height, width), mode="bilinear", align_corners=False)


def _row(trainee: Trainee, state: TrainState, losses: Tensor, result: EvalResult | None) -> dict[str, float]:
    """The epoch's row of results.csv; losses and metrics are the same on every process."""
    box, objectness, classification = losses.tolist()
    rates = trainee.schedule.at(state.micro_step - 1).rates
    row: dict[str, float] = {
        "epoch": state.epoch,
        "train/box_loss": box,
        "train/obj_loss": objectness,
        "train/cls_loss": classification,
        **{f"x/lr{index}": rate for index, rate in enumerate(rates)},
    }
    if result is not None:
        row |= metric_columns(result)
    return row


def metric_columns(result: EvalResult) -> dict[str, float]:
    """A validation's result under the column names of results.csv."""
    return {
        "metrics/precision": result.precision,
        "metrics/recall": result.recall,
        "metrics/mAP_0.5": result.map50,
        "metrics/mAP_0.5:0.95": result.map50_95,
        "val/box_loss": result.losses.get("box", math.nan),
        "val/obj_loss": result.losses.get("objectness", math.nan),
        "val/cls_loss": result.losses.get("classification", math.nan),
        "yolo/mAP_0.5": result.yolo_map50,
        "yolo/mAP_0.5:0.95": result.yolo_map50_95,
    }
