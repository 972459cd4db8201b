"""Checkpoints come back bit by bit, a damaged one is noticed, and a failed save costs nothing."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accel_yolo.config.schema import OptimConfig
from accel_yolo.engine import checkpoint as module
from accel_yolo.engine.checkpoint import find_checkpoint, merge_statistics, restore_checkpoint, save_checkpoint
from accel_yolo.engine.optim import build_optimizer
from accel_yolo.engine.state import ModelEma, TrainState
from accel_yolo.errors import CheckpointError

ALONE = SimpleNamespace(is_main_process=True, num_processes=1, process_index=0, scaler=None)


def _objects(optimizer="SGD", seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1))
    model = model.to(memory_format=torch.channels_last)
    return model, ModelEma(model), build_optimizer(model, OptimConfig(optimizer=optimizer), batch_size=64)


def _train(model, ema, optimizer, state, steps):
    generator = torch.Generator().manual_seed(state.micro_step)
    for _ in range(steps):
        model(torch.rand(2, 3, 8, 8, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.micro_step += 1
        state.updates += 1
        ema.update(model, state.updates)


def _save(folder, objects, state):
    model, ema, optimizer = objects
    save_checkpoint(
        folder,
        accelerator=ALONE,
        model=model,
        ema=ema,
        optimizer=optimizer,
        state=state,
        settings={"names": {}},
        per_process_statistics=False,
    )


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_restored_run_goes_on_bit_by_bit(tmp_path, optimizer):
    straight, state = _objects(optimizer), TrainState()
    _train(*straight, state, 3)
    _save(tmp_path, straight, state)
    _train(*straight, state, 1)
    resumed = _objects(optimizer, seed=1)
    restored = restore_checkpoint(
        find_checkpoint(tmp_path), accelerator=ALONE, model=resumed[0], ema=resumed[1], optimizer=resumed[2]
    )
    assert restored.micro_step == 3
    _train(*resumed, restored, 1)
    for left, right in ((straight[0], resumed[0]), (straight[1].module, resumed[1].module)):
        for name, value in left.state_dict().items():
            assert torch.equal(value, right.state_dict()[name]), name


def test_optimizer_buffers_have_the_parameters_strides(tmp_path):
    objects, state = _objects(), TrainState()
    _train(*objects, state, 1)
    _save(tmp_path, objects, state)
    model, ema, optimizer = _objects(seed=1)
    restore_checkpoint(find_checkpoint(tmp_path), accelerator=ALONE, model=model, ema=ema, optimizer=optimizer)
    weight = model[0].weight
    assert optimizer.state[weight]["momentum_buffer"].stride() == weight.stride()


def test_two_generations_are_kept(tmp_path):
    objects, state = _objects(), TrainState()
    for _ in range(4):
        _train(*objects, state, 1)
        _save(tmp_path, objects, state)
    folders = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert folders == ["step-00000003", "step-00000004"]
    assert json.loads((tmp_path / "checkpoints" / "last.json").read_text()) == {"checkpoint": "step-00000004"}


def test_a_flipped_byte_falls_back_to_the_earlier_one_and_says_so(tmp_path, caplog):
    objects, state = _objects(), TrainState()
    for _ in range(2):
        _train(*objects, state, 1)
        _save(tmp_path, objects, state)
    damaged = tmp_path / "checkpoints" / "step-00000002" / "ema.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    logging.getLogger("accel_yolo").propagate = True
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(tmp_path).train_state.micro_step == 1
    assert "ema.safetensors" in caplog.text


def test_a_run_without_a_usable_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        find_checkpoint(tmp_path)


def test_a_failed_save_keeps_the_earlier_checkpoint_and_leaves_no_parts(tmp_path, monkeypatch):
    objects, state = _objects(), TrainState()
    _save(tmp_path, objects, state)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    state.micro_step = 9
    with pytest.raises(CheckpointError, match="No space left") as caught:
        _save(tmp_path, objects, state)
    assert "MB" in caught.value.found
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["last.json", "step-00000000"]
    assert find_checkpoint(tmp_path).train_state.micro_step == 0


def test_another_model_is_refused_with_the_parameter_named(tmp_path):
    objects, state = _objects(), TrainState()
    _train(*objects, state, 1)
    tensors = module.optimizer_tensors(objects[2], objects[0])
    other = nn.Sequential(nn.Conv2d(3, 9, 3, bias=False), nn.BatchNorm2d(9), nn.Conv2d(9, 4, 1))
    with pytest.raises(CheckpointError, match=r"0\.weight|1\.weight|2\.weight|1\.bias"):
        module.load_optimizer_tensors(build_optimizer(other, OptimConfig(), batch_size=64), other, tensors)


def test_merged_statistics_are_those_of_the_joined_images():
    parts = [torch.randn(100, 3) * scale + shift for scale, shift in ((1, 0), (2, 5))]
    stacks = {
        "bn.running_mean": torch.stack([part.mean(0) for part in parts]),
        "bn.running_var": torch.stack([part.var(0, correction=0) for part in parts]),
    }
    merged, joined = merge_statistics(stacks), torch.cat(parts)
    torch.testing.assert_close(merged["bn.running_mean"], joined.mean(0))
    torch.testing.assert_close(merged["bn.running_var"], joined.var(0, correction=0))
