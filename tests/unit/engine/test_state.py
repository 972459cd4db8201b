"""The average of the weights and the patience; the average's numbers are held by tests/golden."""

import math

import torch
from torch import nn

from accel_yolo.engine.state import EarlyStopper, ModelEma, TrainState, note_fitness


def test_the_average_is_a_frozen_copy_that_leaves_the_model_alone():
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))
    ema = ModelEma(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        ema.module[0].weight += 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not ema.module.training
    assert not any(parameter.requires_grad for parameter in ema.module.parameters())


def test_integer_buffers_are_left_alone_and_running_statistics_are_averaged():
    model = nn.BatchNorm2d(1)
    ema = ModelEma(model)
    model.running_mean += 1.0
    model.num_batches_tracked += 7
    ema.update(model, 2000)
    assert ema.module.num_batches_tracked.item() == 0
    decay = 0.9999 * (1 - math.exp(-1))
    assert abs(ema.module.running_mean.item() - (1 - decay)) < 1e-6


def test_a_frozen_value_stays_bit_identical():
    model = nn.Conv2d(8, 8, 3)
    ema = ModelEma(model)
    for updates in range(1, 50):
        ema.update(model, updates)
    assert torch.equal(ema.module.weight, model.weight)


def test_only_a_strict_improvement_is_the_best():
    state = TrainState()
    assert note_fitness(state, 0.0)
    state.epoch = 1
    assert not note_fitness(state, 0.0)
    assert not note_fitness(state, math.nan)
    assert note_fitness(state, 0.1)
    assert (state.best_epoch, state.best_fitness) == (1, 0.1)


def test_patience_counts_epochs_since_the_best():
    stopper = EarlyStopper(patience=2)
    assert not stopper.should_stop(TrainState(epoch=50)), "without any validation there is nothing to wait for"
    assert not stopper.should_stop(TrainState(epoch=4, best_epoch=3))
    assert stopper.should_stop(TrainState(epoch=5, best_epoch=3))
    assert not EarlyStopper(patience=0).should_stop(TrainState(epoch=500, best_epoch=0))
