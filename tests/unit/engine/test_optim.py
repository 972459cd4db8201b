"""The schedule's corners and the optimiser's groups; its numbers are held by tests/golden."""

import pytest
import torch
from torch import nn

from accel_yolo.config.schema import OptimConfig
from accel_yolo.engine.optim import Schedule, build_optimizer


def _model():
    return nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))


@pytest.mark.parametrize(
    ("name", "kind"), [("SGD", torch.optim.SGD), ("Adam", torch.optim.Adam), ("AdamW", torch.optim.AdamW)]
)
def test_groups_hold_every_parameter_once_and_only_weights_decay(name, kind):
    model = _model()
    optimizer = build_optimizer(model, OptimConfig(optimizer=name), batch_size=64)
    assert isinstance(optimizer, kind)
    grouped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(grouped) == len(set(map(id, grouped))) == len(list(model.parameters()))
    biases, weights, norms = (group["params"] for group in optimizer.param_groups)
    assert {id(p) for p in biases} == {id(model[1].bias), id(model[2].bias)}
    assert {id(p) for p in weights} == {id(model[0].weight), id(model[2].weight)}
    assert {id(p) for p in norms} == {id(model[1].weight)}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.0005, 0.0]


def test_weight_decay_follows_the_images_per_update():
    # 24 images, 64 / 24 rounds to 3 steps: 72 images per update.
    optimizer = build_optimizer(_model(), OptimConfig(), batch_size=24)
    assert optimizer.param_groups[1]["weight_decay"] == pytest.approx(0.0005 * 72 / 64)


def test_the_plan_writes_rates_and_momentum_into_the_groups():
    optimizer = build_optimizer(_model(), OptimConfig(), batch_size=64)
    Schedule(OptimConfig(), 10, 100, 64).at(0).apply(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.0, 0.0]
    assert {group["momentum"] for group in optimizer.param_groups} == {0.8}


def test_adam_keeps_its_betas_through_the_warm_up():
    optimizer = build_optimizer(_model(), OptimConfig(optimizer="Adam"), batch_size=64)
    plan = Schedule(OptimConfig(optimizer="Adam"), 10, 100, 64).at(5)
    plan.apply(optimizer)
    assert plan.momentum is None
    assert {group["betas"] for group in optimizer.param_groups} == {(0.937, 0.999)}


def test_rates_do_not_depend_on_how_the_steps_were_reached():
    schedule = Schedule(OptimConfig(cos_lr=True), 5, 40, 16)
    forward = [schedule.at(step) for step in range(200)]
    assert forward == [schedule.at(step) for step in reversed(range(200))][::-1]


def test_no_warm_up_starts_at_the_full_rate():
    schedule = Schedule(OptimConfig(warmup_epochs=0.0, warmup_min_steps=0), 10, 5, 64)
    assert schedule.at(0).rates == (0.01, 0.01, 0.01)
    assert schedule.at(1).rates == (0.01, 0.01, 0.01)


def test_a_step_that_the_gradient_scaler_skips_does_not_spoil_the_next_one():
    model = nn.Linear(2, 1, bias=False)
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.0), batch_size=64, uses_scaler=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = model.weight.detach().clone()
    for gradient in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        model.weight.grad.fill_(gradient)
        scaler.step(optimizer)
        scaler.update()
    # One step of Nesterov momentum from rest, on the gradient unscaled by the halved scale of 1.
    torch.testing.assert_close(before - model.weight, torch.full((1, 2), 0.01 * (1 + 0.937)))
