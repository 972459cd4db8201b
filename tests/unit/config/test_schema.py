"""Settings check themselves, all faults together, and survive the way through a dict."""

import dataclasses
import math

import pytest

from accel_yolo.config.schema import PARTS, DataConfig, ModelConfig, TrainConfig, ValConfig, build_config
from accel_yolo.errors import ConfigError


def test_settings_cannot_be_written_to():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().data.image_size = 320


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("data", "image_size", 0),
        ("data", "image_size", 640.5),
        ("data", "image_size", "640"),
        ("data", "batch_size", 0),
        ("data", "bad_images", "ignore"),
        ("augment", "fliplr", 1.5),
        ("augment", "scale", 1.0),
        ("loss", "box", -0.1),
        ("loss", "box", math.nan),
        ("loss", "anchor_t", 0.5),
        ("optim", "lr0", True),
        ("optim", "optimizer", "sgd"),
        ("optim", "momentum", 2),
        ("run", "epochs", 0),
        ("run", "noval", "yes"),
        ("run", "seed", -1),
        ("run", "mixed_precision", "fp8"),
        ("model", "sync_bn", 1),
        ("model", "freeze", [-1]),
        ("eval", "max_det", 0),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(part, field, value):
    with pytest.raises(ConfigError, match=f"{part}.{field}"):
        build_config({part: {field: value}})


def test_the_faults_of_all_parts_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        build_config({"data": {"image_size": 1, "workers": -1}, "run": {"epochs": 0}})
    assert caught.value.what.startswith("3 settings")
    assert all(name in caught.value.found for name in ("data.image_size", "data.workers", "run.epochs"))


def test_a_model_needs_a_configuration_or_weights():
    with pytest.raises(ConfigError, match=r"model\.cfg and model\.weights"):
        build_config({"model": {"cfg": ""}})


def test_a_dict_of_all_settings_builds_the_same_settings():
    config = TrainConfig(model=ModelConfig(freeze=(0, 3)), data=DataConfig(image_size=96, batch_size=-1))
    assert build_config(config.to_dict()) == config


def test_whole_numbers_become_floats_where_the_setting_is_a_float():
    value = build_config({"optim": {"warmup_epochs": 3}}).optim.warmup_epochs
    assert isinstance(value, float)
    assert value == 3.0


def test_anchors_of_a_tuned_file_are_rounded():
    assert build_config({"model": {"anchors": 3.412}}).model.anchors == 3


@pytest.mark.parametrize(("freeze", "layers"), [((0,), ()), ((3,), (0, 1, 2)), ((0, 5), (0, 5)), ((), ())])
def test_one_number_freezes_the_first_layers_and_several_freeze_those(freeze, layers):
    assert ModelConfig(freeze=freeze).frozen_layers == layers


def test_every_setting_has_a_sentence():
    for kind in (*PARTS.values(), ValConfig):
        for item in dataclasses.fields(kind):
            assert len(item.metadata["help"]) > 5, f"{kind.__name__}.{item.name}"


def test_val_defaults_are_those_of_yolov5():
    config = ValConfig(weights="best.safetensors")
    assert (config.batch_size, config.image_size, config.conf_thres) == (32, 640, 0.001)
    assert (config.iou_thres, config.max_det, config.task, config.workers) == (0.6, 300, "val", 8)
    assert (config.project, config.name) == ("runs/val", "exp")


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights": ""},
        {"task": "speed"},
        {"half": True, "device": "cpu"},
        {"conf_thres": 1.1},
        {"batch_size": -1},
        {"augment": "yes"},
    ],
)
def test_val_refuses_what_it_cannot_use(wrong):
    with pytest.raises(ConfigError, match=rf"val\.{next(iter(wrong))}"):
        ValConfig(**{"weights": "best.safetensors", **wrong})
