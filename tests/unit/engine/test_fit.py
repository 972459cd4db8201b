"""The loop with a stand-in accelerator and a one-parameter model: updates, skipped syncs and averages are counted."""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accel_yolo.config.schema import OptimConfig
from accel_yolo.engine.distributed import World
from accel_yolo.engine.fit import Story, Trainee, fit, metric_columns, resize_images, train_step
from accel_yolo.engine.optim import Schedule
from accel_yolo.engine.state import EarlyStopper, ModelEma, TrainState
from accel_yolo.errors import TrainingError
from accel_yolo.metrics import EvalResult
from accel_yolo.structures import Batch, SampleKey, Targets

ALONE = World("test", "none", True, None, 1.0, "default")


class StandInAccelerator:
    """Counts what the loop asks of an Accelerator."""

    is_main_process = True
    num_processes = 1
    process_index = 0
    device = torch.device("cpu")
    optimizer_step_was_skipped = False

    def __init__(self):
        self.unsynced = self.clips = 0

    @contextlib.contextmanager
    def no_sync(self, model):
        self.unsynced += 1
        yield

    def autocast(self):
        return contextlib.nullcontext()

    def backward(self, loss):
        loss.backward()

    def clip_grad_norm_(self, parameters, limit):
        assert limit == 10.0
        self.clips += 1

    def unwrap_model(self, model):
        return model


class OneParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, images):
        return self.weight * images.mean()


class StandInLoss:
    def assign(self, targets, *, batch_size, image_hw):
        self.image_hw = image_hw
        return SimpleNamespace(counts=torch.ones(1, 2))

    def __call__(self, maps, assignment, *, counts, batch_size, num_processes):
        total = maps * batch_size * num_processes
        part = total.detach().sum() * 0 + 0.5
        losses = SimpleNamespace(box=part, objectness=part, classification=part, total=total.sum())
        losses.detach = lambda: losses
        return losses


def _trainee(*, batch_size=16, nominal=64, steps=4, epochs=3, **optim):
    config = OptimConfig(nominal_batch=nominal, warmup_epochs=0.0, warmup_min_steps=0, **optim)
    model = OneParameter()
    optimizer = torch.optim.SGD([{"params": [p]} for p in (model.weight, nn.Parameter(), nn.Parameter())], lr=0.1)
    return Trainee(
        model=model,
        ema=ModelEma(model),
        optimizer=optimizer,
        loss_fn=StandInLoss(),
        schedule=Schedule(config, epochs, steps, batch_size),
        accelerator=StandInAccelerator(),
        world=ALONE,
        batch_size=batch_size,
        image_size=64,
        stride=32,
    )


def _batch():
    targets = Targets(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4))
    return Batch(torch.full((1, 64, 64, 3), 255, dtype=torch.uint8), targets, [SampleKey(0, 0, 0)], [None])


class StandInLoader:
    def __init__(self, steps):
        self.steps, self.epochs = steps, []

    def __len__(self):
        return self.steps

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        return iter([_batch() for _ in range(self.steps)])


def _result(fitness):
    return EvalResult(
        precision=0.1, recall=0.2, f1=0.1, best_confidence=0.5, map50=fitness, map50_95=fitness, yolo_map50=0.3,
        yolo_map50_95=0.4, per_class=(), losses={"box": 1.0, "objectness": 2.0, "classification": 3.0}, images=1,
        instances=1, coco_stats=(0.0,) * 12,
    )  # fmt: skip


def _story(fitnesses, *, epochs, patience=0, **options):
    saved, rows, results = [], [], iter(fitnesses)
    story = Story(
        evaluate=lambda: _result(next(results)),
        save=lambda state, is_best, is_last: saved.append((state.epoch, is_best, is_last)),
        record=rows.append,
        progress=lambda loader, state: loader,
        epochs=epochs,
        stopper=EarlyStopper(patience),
        **options,
    )
    return story, saved, rows


def test_weights_move_every_fourth_step_and_gradients_meet_only_then():
    trainee, state = _trainee(), TrainState()
    moves = []
    for _ in range(8):
        before = trainee.model.weight.item()
        train_step(_batch(), trainee, state)
        moves.append(trainee.model.weight.item() != before)
    # The first update comes at step 3: step - last_update(-1) reaches 4.
    assert moves == [False, False, False, True, False, False, False, True]
    assert trainee.accelerator.unsynced == 6 and trainee.accelerator.clips == 2
    assert (state.updates, state.last_update, state.micro_step) == (2, 7, 8)


def test_accumulated_gradients_are_added_and_not_divided():
    trainee, state = _trainee(momentum=0.0, weight_decay=0.0), TrainState()
    for _ in range(4):
        train_step(_batch(), trainee, state)
    # Four steps of gradient 16 (the batch size) at the rate of step 3.
    rate = trainee.schedule.at(3).rates[0]
    assert trainee.model.weight.item() == pytest.approx(-rate * 4 * 16, rel=1e-6)


def test_a_skipped_half_precision_step_does_not_move_the_average():
    trainee, state = _trainee(nominal=16), TrainState()
    trainee.accelerator.optimizer_step_was_skipped = True
    train_step(_batch(), trainee, state)
    assert (state.updates, state.last_update) == (0, 0)


def test_leftover_gradients_of_an_epoch_are_dropped_without_resetting_the_count():
    trainee, state = _trainee(steps=3, epochs=2), TrainState()
    story, _, _ = _story([0.1, 0.1], epochs=2)
    fit(trainee, StandInLoader(3), state, story)
    # Six steps, accumulate 4: one update at step 3, whose gradient is that of step 3 alone.
    assert (state.updates, state.last_update) == (1, 3)
    rate = trainee.schedule.at(3).rates[0]
    assert trainee.model.weight.item() == pytest.approx(-rate * 16, rel=1e-6)


def test_every_epoch_is_set_on_the_loader_recorded_validated_and_saved():
    trainee, state, loader = _trainee(), TrainState(), StandInLoader(4)
    story, saved, rows = _story([0.2, 0.1, 0.3], epochs=3)
    result = fit(trainee, loader, state, story)
    assert loader.epochs == [0, 1, 2]
    assert saved == [(1, True, False), (2, False, False), (3, True, True)]
    assert [row["epoch"] for row in rows] == [0, 1, 2]
    assert rows[0]["train/box_loss"] == pytest.approx(0.5)
    assert rows[0]["val/cls_loss"] == 3.0 and rows[0]["x/lr2"] > 0
    assert result.map50 == 0.3 and (state.best_epoch, state.epoch) == (2, 3)


def test_patience_ends_the_run_and_saves_it():
    trainee, state = _trainee(epochs=9), TrainState()
    story, saved, rows = _story([0.5] + [0.1] * 8, epochs=9, patience=2)
    fit(trainee, StandInLoader(4), state, story)
    assert len(rows) == 3 and saved[-1] == (3, False, True)


def test_without_validation_only_the_last_epoch_is_measured_and_the_cells_stay_empty():
    trainee, state = _trainee(), TrainState()
    story, saved, rows = _story([0.4], epochs=3, validate_every_epoch=False, save_every_epoch=False, patience=1)
    fit(trainee, StandInLoader(4), state, story)
    assert ["metrics/mAP_0.5" in row for row in rows] == [False, False, True]
    assert saved == [(3, True, True)]


def test_a_finished_run_has_nothing_left_to_do():
    trainee, state = _trainee(), TrainState(epoch=3)
    story, saved, rows = _story([], epochs=3)
    assert fit(trainee, StandInLoader(4), state, story) is None
    assert saved == [] and rows == []


def test_callbacks_are_called_by_name_in_the_order_of_events():
    calls = []

    class Noting:
        def __getattr__(self, name):
            return lambda **values: calls.append(name)

    trainee, state = _trainee(steps=1), TrainState()
    story, _, _ = _story([0.1], epochs=1, callbacks=Noting())
    fit(trainee, StandInLoader(1), state, story)
    assert calls == ["on_epoch_start", "on_batch_end", "on_validation_end", "on_epoch_end"]


def test_a_loss_that_is_not_finite_ends_the_run_before_anything_is_saved(monkeypatch):
    trainee, state = _trainee(), TrainState()
    call = StandInLoss.__call__

    def spoilt(self, *args, **kwargs):
        losses = call(self, *args, **kwargs)
        losses.box = losses.box * math.nan
        return losses

    monkeypatch.setattr(StandInLoss, "__call__", spoilt)
    story, saved, rows = _story([0.1], epochs=1)
    with pytest.raises(TrainingError, match="not a finite number") as caught:
        fit(trainee, StandInLoader(4), state, story)
    assert "epoch 1" in caught.value.found
    assert saved == [] and rows == []


def test_resized_images_have_sides_that_are_multiples_of_the_stride():
    images = torch.rand(1, 3, 64, 96)
    assert resize_images(images, 96, 32) is images
    assert resize_images(images, 128, 32).shape == (1, 3, 96, 128)


def test_multi_scale_changes_the_input_but_not_the_targets():
    trainee, state = _trainee(), TrainState()
    trainee.multi_scale = True
    sizes = set()
    for _ in range(12):
        train_step(_batch(), trainee, state)
        sizes.add(trainee.loss_fn.image_hw)
    assert len(sizes) > 1 and all(side % 32 == 0 for size in sizes for side in size)


def test_undefined_metrics_stay_undefined_in_the_row():
    result = _result(math.nan)
    assert math.isnan(metric_columns(result)["metrics/mAP_0.5"])
