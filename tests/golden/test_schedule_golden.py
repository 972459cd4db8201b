"""The schedule against the reference's iterations, and the weight average against its three updates."""

import csv
import json
import math

import pytest
import torch
from torch import nn

from accel_yolo.config.schema import OptimConfig
from accel_yolo.engine.optim import Schedule, build_optimizer
from accel_yolo.engine.state import ModelEma

CONFIGS = ("linear_b16", "cosine_b64", "short_b16_leftover", "adamw_cos_b24")


def _case(golden_dir, name):
    case = json.loads((golden_dir / "schedule.json").read_text())[name]
    config = OptimConfig(**case["hyp"], optimizer=case["optimizer"], cos_lr=case["cos_lr"])
    return case, config, Schedule(config, case["epochs"], case["nb"], case["total_batch"])


@pytest.mark.parametrize("name", CONFIGS)
def test_every_step_has_the_references_rates_momentum_and_updates(golden_dir, record_deviation, name):
    case, _, schedule = _case(golden_dir, name)
    ema = ModelEma(nn.Linear(1, 1))
    worst, last_update, updates = 0.0, -1, 0
    assert schedule.warmup_steps == case["nw"]
    with (golden_dir / f"schedule_{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        step = int(row["ni"])
        plan = schedule.at(step)
        assert plan.accumulate == int(row["accumulate"]), f"accumulation of step {step}"
        is_update = step - last_update >= plan.accumulate
        assert is_update == bool(int(row["opt_step"])), f"update at step {step}"
        if is_update:
            last_update, updates = step, updates + 1
        assert updates == int(row["ema_updates"])
        momentum = plan.momentum if plan.momentum is not None else schedule.config.momentum
        found = [*plan.rates, momentum]
        wanted = [float(row[key]) for key in ("lr_bias", "lr_decay", "lr_bn", "momentum")]
        if updates:
            found.append(ema.decay_at(updates))
            wanted.append(float(row["ema_decay"]))
        worst = max([worst, *(abs(a - b) for a, b in zip(found, wanted, strict=True))])
    assert updates == case["n_steps"]
    record_deviation(f"schedule_{name}.csv", "rates, momentum, EMA decay", worst, "1e-9")
    assert worst <= 1e-9


@pytest.mark.parametrize("name", CONFIGS)
def test_weight_decay_is_scaled_to_the_nominal_batch_and_only_weights_decay(golden_dir, record_deviation, name):
    case, config, _ = _case(golden_dir, name)
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    optimizer = build_optimizer(model, config, batch_size=case["total_batch"])
    found = [group["weight_decay"] for group in optimizer.param_groups]
    worst = max(abs(a - b) for a, b in zip(found, case["param_group_wd"], strict=True))
    record_deviation("schedule.json", f"{name}: weight decay per group", worst, "1e-9")
    assert worst <= 1e-9


def test_decay_and_three_updates_of_the_average(golden_dir, record_deviation):
    golden = json.loads((golden_dir / "ema.json").read_text())
    example = golden["example"]
    model = nn.Sequential()
    model.add_module("c", nn.Conv2d(3, 4, 1))
    model.add_module("b", nn.BatchNorm2d(4))
    _load(model, example["initial"])
    ema = ModelEma(model)
    worst = max(abs(ema.decay_at(int(u)) - value) for u, value in golden["decay_at"].items())
    record_deviation("ema.json", "decay", worst, "1e-6")
    assert worst <= 1e-6
    worst = 0.0
    for number, averages in enumerate(example["ema_after_update"], start=1):
        # The fixture's note: before update k every parameter += 0.1 k, running_mean += 0.5, the counter += 1.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * number
            model.b.running_mean += 0.5
            model.b.num_batches_tracked += 1
        ema.update(model, number)
        for name, wanted in averages.items():
            found = ema.module.state_dict()[name]
            assert torch.as_tensor(wanted).shape == found.shape
            worst = max(worst, float((found.double() - torch.tensor(wanted).double()).abs().max()))
    record_deviation("ema.json", "averages after three updates", worst, "1e-6")
    assert worst <= 1e-6 and math.isfinite(worst)


def _load(model, tensors):
    state = model.state_dict()
    with torch.no_grad():
        for name, value in tensors.items():
            state[name].copy_(torch.tensor(value))
