"""What of a run can be asked without training; the rest is in tests/e2e and tests/distributed."""

import math

import numpy as np
import pytest
import torch

from accel_yolo.config.load import config_from_kwargs
from accel_yolo.data.load import load_data
from accel_yolo.data.table import FlatTable
from accel_yolo.engine.distributed import make_accelerator
from accel_yolo.engine.training import Training, epoch_line, label_sizes, read_start
from accel_yolo.errors import ConfigError, WeightsError
from accel_yolo.model.detector import DetectionModel
from accel_yolo.model.weights import save_weights


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text("source: shapes\nnum_train: 6\nnum_val: 4\nimage_size: 64\nseed: 0\n")
    return path


def _training(tiny, **options):
    resolved = config_from_kwargs(
        data=str(tiny), cfg="yolov5-shapes", imgsz=64, batch_size=4, workers=0, device="cpu", **options
    )
    accelerator, world = make_accelerator(device="cpu")
    return Training(resolved, accelerator, world, None, read_start(resolved.config, None), None)


def test_label_sizes_are_those_at_the_input_size_give_or_take_a_tenth(tiny):
    table = FlatTable(load_data(str(tiny)).splits["train"].table)
    sizes = label_sizes(table, image_size=128, seed=0)
    true = (table.boxes[:, 2:] - table.boxes[:, :2]) * 2
    assert sizes.shape == true.shape
    assert ((sizes / true > 0.9) & (sizes / true < 1.1)).all()
    np.testing.assert_array_equal(sizes, label_sizes(table, image_size=128, seed=0))


def test_the_epochs_line_counts_from_one_and_leaves_out_what_was_not_measured():
    row = {"epoch": 0, "train/box_loss": 0.1, "train/obj_loss": 0.2, "train/cls_loss": 0.3, "time/train": 1.0,
           "time/val": 0.5, "time/images_per_second": 10.0}  # fmt: skip
    assert epoch_line(row, 9).startswith("epoch 1/9  box 0.1000")
    assert "mAP" not in epoch_line(row, 9)
    measured = row | {f"metrics/{name}": 0.5 for name in ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95")}
    assert "mAP50 0.500  mAP50-95 0.500" in epoch_line(measured, 9)


def test_a_wrong_model_name_or_weights_file_is_found_before_any_data(tmp_path):
    with pytest.raises(ConfigError, match="yolov5ss"):
        read_start(config_from_kwargs(data="d.yaml", cfg="yolov5ss").config, None)
    with pytest.raises(WeightsError):
        read_start(config_from_kwargs(data="d.yaml", weights=str(tmp_path / "no.safetensors")).config, None)
    save_weights(tmp_path / "bare.safetensors", {"model.0.conv.weight": torch.zeros(1)})
    with pytest.raises(WeightsError, match="which network") as caught:
        read_start(config_from_kwargs(data="d.yaml", weights=str(tmp_path / "bare.safetensors")).config, None)
    assert "--cfg" in caught.value.fix


def test_the_same_seed_gives_the_same_network_and_another_seed_another(tiny):
    weights = []
    for seed in (0, 0, 1):
        training = _training(tiny, seed=seed)
        training.assemble()
        weights.append(training.model.model[0].conv.weight.detach().clone())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_assembling_writes_nothing_and_starts_the_average_at_the_weights(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    training = _training(tiny)
    state = training.assemble()
    assert (state.epoch, state.micro_step, math.isclose(state.best_fitness, -1)) == (0, 0, True)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]
    average = training.ema.module.state_dict()
    assert all(torch.equal(value, average[name]) for name, value in training.model.state_dict().items())


def test_weights_of_another_class_count_keep_everything_but_the_head(tiny, tmp_path):
    torch.manual_seed(7)
    other = DetectionModel("yolov5-shapes", num_classes=5)
    save_weights(tmp_path / "other.safetensors", other)
    training = _training(tiny, weights=str(tmp_path / "other.safetensors"))
    training.assemble()
    assert torch.equal(training.model.model[0].conv.weight, other.model[0].conv.weight)
    assert training.model.num_classes == 3


def test_freezing_everything_is_refused(tiny):
    with pytest.raises(ConfigError, match="every layer is frozen"):
        _training(tiny, freeze=[25]).assemble()
