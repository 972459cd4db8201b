"""Every YAML under configs/ is read by the function that reads it in a run."""

from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from accel_yolo.config.load import config_from_kwargs, find_config, hyp_values

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "configs"
KINDS = {"accelerate", "data", "hyps", "models", "recipes"}

# training.md section 13: scratch-low, scratch-med, scratch-high, no-augmentation, VOC, Objects365.
HYP_NAMES = ("scratch-low", "scratch-med", "scratch-high", "no-augmentation", "VOC", "Objects365")
HYP_TABLE = {
    "lr0": (0.01, 0.01, 0.01, 0.01, 0.00334, 0.00258),
    "lrf": (0.01, 0.1, 0.1, 0.1, 0.15135, 0.17),
    "momentum": (0.937, 0.937, 0.937, 0.937, 0.74832, 0.779),
    "weight_decay": (0.0005, 0.0005, 0.0005, 0.0005, 0.00025, 0.00058),
    "warmup_epochs": (3.0, 3.0, 3.0, 3.0, 3.3835, 1.33),
    "warmup_momentum": (0.8, 0.8, 0.8, 0.8, 0.59462, 0.86),
    "warmup_bias_lr": (0.1, 0.1, 0.1, 0.1, 0.18657, 0.0711),
    "box": (0.05, 0.05, 0.05, 0.05, 0.02, 0.0539),
    "cls": (0.5, 0.3, 0.3, 0.3, 0.21638, 0.299),
    "cls_pw": (1.0, 1.0, 1.0, 1.0, 0.5, 0.825),
    "obj": (1.0, 0.7, 0.7, 0.7, 0.51728, 0.632),
    "obj_pw": (1.0, 1.0, 1.0, 1.0, 0.67198, 1.0),
    "iou_t": (0.2, 0.2, 0.2, 0.2, 0.2, 0.2),
    "anchor_t": (4.0, 4.0, 4.0, 4.0, 3.3744, 3.44),
    "anchors": (None, None, None, None, 3.412, 3.2),
    "fl_gamma": (0, 0, 0, 0, 0, 0),
    "hsv_h": (0.015, 0.015, 0.015, 0, 0.01041, 0.0188),
    "hsv_s": (0.7, 0.7, 0.7, 0, 0.54703, 0.704),
    "hsv_v": (0.4, 0.4, 0.4, 0, 0.27739, 0.36),
    "degrees": (0, 0, 0, 0, 0, 0),
    "translate": (0.1, 0.1, 0.1, 0, 0.04591, 0.0902),
    "scale": (0.5, 0.9, 0.9, 0, 0.75544, 0.491),
    "shear": (0, 0, 0, 0, 0, 0),
    "perspective": (0, 0, 0, 0, 0, 0),
    "flipud": (0, 0, 0, 0, 0, 0),
    "fliplr": (0.5, 0.5, 0.5, 0, 0.5, 0.5),
    "mosaic": (1.0, 1.0, 1.0, 0, 0.85834, 1.0),
    "mixup": (0, 0.1, 0.1, 0, 0.04266, 0),
    "copy_paste": (0, 0, 0.1, 0, 0, 0),
}


def files(kind: str) -> list[Path]:
    return sorted((CONFIGS / kind).glob("*.yaml"))


def named(path: Path) -> str:
    return path.stem


def test_configs_holds_these_kinds_of_yaml_files_and_nothing_else():
    assert {path.name for path in CONFIGS.iterdir()} == KINDS
    assert [path for path in CONFIGS.rglob("*") if path.is_file() and path.suffix != ".yaml"] == []


@pytest.mark.parametrize("path", files("hyps"), ids=named)
def test_a_hyp_file_loads(path):
    assert config_from_kwargs(data="shapes", hyp=path).origins["optim.lr0"] == f"hyp file {path}"


def test_there_are_exactly_the_hyp_files_of_yolov5():
    assert {path.stem for path in files("hyps")} == {f"hyp.{name}" for name in HYP_NAMES}


@pytest.mark.parametrize("column", range(len(HYP_NAMES)), ids=HYP_NAMES)
def test_a_hyp_file_has_the_numbers_of_its_column(column):
    path = find_config(f"hyp.{HYP_NAMES[column]}", "hyps")
    wanted = {key: row[column] for key, row in HYP_TABLE.items() if row[column] is not None}
    assert yaml.safe_load(path.read_text()) == wanted


def test_the_settings_defaults_are_hyp_scratch_low():
    assert hyp_values(config_from_kwargs(data="shapes").config) == hyp_values(
        config_from_kwargs(data="shapes", hyp="hyp.scratch-low").config
    )


@pytest.mark.parametrize("path", files("recipes"), ids=named)
def test_a_recipe_loads_and_its_model_exists(path):
    config = config_from_kwargs(config=path).config
    assert find_config(config.model.cfg, "models").is_file()


# anchors.yaml is a list of anchors to copy from, not a model.
@pytest.mark.parametrize("path", [path for path in files("models") if path.stem != "anchors"], ids=named)
def test_a_model_file_builds_a_network(path):
    from accel_yolo.model.detector import DetectionModel

    # On the meta device nothing is allocated, so that the largest takes no longer than the smallest.
    with torch.device("meta"):
        model = DetectionModel(path)
    assert model.num_classes == yaml.safe_load(path.read_text())["nc"]


@pytest.mark.parametrize("path", files("data"), ids=named)
def test_a_data_file_is_read(path):
    from accel_yolo.data.load import load_data
    from accel_yolo.data.sources.yolo_txt import load_yaml, read_spec

    values = load_yaml(path)
    # The demo set draws itself; of the others the images are not here, and the YAML alone is read.
    if "source" in values:
        assert set(load_data(str(path)).splits) == {"train", "val"}
    else:
        spec = read_spec(path, values)
        assert {"train", "val"} <= set(spec.splits)
        assert len(set(spec.names)) == len(spec.names)


@pytest.mark.parametrize("path", [*files("accelerate"), REPOSITORY / "accelerate_config.yaml"], ids=named)
def test_an_accelerate_file_loads_in_accelerate(path):
    config = load_config_from_file(str(path))
    assert config.num_processes == yaml.safe_load(path.read_text())["num_processes"]
    # Unquoted, YAML reads NO and no as false.
    assert config.mixed_precision == "no"
    assert str(config.distributed_type.value) in ("NO", "MULTI_GPU")
    assert (config.num_processes > 1) == (config.distributed_type.value == "MULTI_GPU")


def test_the_root_accelerate_file_is_one_process():
    assert load_config_from_file(str(REPOSITORY / "accelerate_config.yaml")).num_processes == 1
