"""Files, flags and keyword arguments become settings, in the stated order, with the origin of every value."""

import argparse
import textwrap
from pathlib import Path

import pytest
import yaml

from accel_yolo.config import load
from accel_yolo.config.load import (
    config_from_kwargs,
    find_config,
    hyp_values,
    load_config,
    opt_values,
    parse_train_args,
    parse_val_args,
    read_yaml,
    resolve,
    resolve_val,
)
from accel_yolo.config.schema import TrainConfig, build_config
from accel_yolo.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def empty_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str) -> str:
    Path(name).write_text(textwrap.dedent(text))
    return name


def train(*words: str):
    return resolve(parse_train_args(words))


# Order


def test_each_source_overrules_the_one_before():
    write("run.yaml", "optim: {lr0: 0.1, lrf: 0.1, momentum: 0.1}\nrun: {epochs: 1}\nloss: {box: 0.9}")
    write("hyp.yaml", "lrf: 0.2\nmomentum: 0.2\nlabel_smoothing: 0.2\nweight_decay: 0.2")
    words = (
        "--config run.yaml --hyp hyp.yaml --label-smoothing 0.3 --epochs 3 --set optim.momentum=0.4 --set run.epochs=4"
    )
    resolved = train(*words.split())
    config, origins = resolved.config, resolved.origins
    assert (config.loss.box, origins["loss.box"]) == (0.9, "run file run.yaml")
    assert (config.optim.lrf, origins["optim.lrf"]) == (0.2, "hyp file hyp.yaml")
    assert (config.loss.label_smoothing, origins["loss.label_smoothing"]) == (0.3, "--label-smoothing")
    assert (config.optim.momentum, origins["optim.momentum"]) == (0.4, "--set")
    assert (config.run.epochs, origins["run.epochs"]) == (4, "--set")
    assert (config.loss.obj, origins["loss.obj"]) == (1.0, "default")


def test_every_setting_has_an_origin():
    resolved = train()
    names = {f"{part}.{field}" for part, values in resolved.config.to_dict().items() for field in values}
    assert set(resolved.origins) == names


def test_the_printed_settings_are_a_run_file_that_gives_the_same_settings():
    resolved = train("--data", "x.yaml", "--freeze", "0", "2", "--set", "optim.lr0=1e-5", "--trackers", "wandb")
    write("run.yaml", resolved.describe())
    assert train("--config", "run.yaml").config == resolved.config


# Decision 21


def test_without_data_the_built_in_recipe_is_trained():
    resolved = train()
    assert resolved.config.data.source == "shapes"
    assert resolved.config.data.image_size == 128
    assert resolved.config.model.cfg == "yolov5-shapes"
    assert resolved.origins["data.image_size"] == "built-in recipe shapes"


@pytest.mark.parametrize("words", ["--data coco.yaml", "--set data.source=coco.yaml", "--resume"])
def test_named_data_or_a_resumed_run_get_yolov5s_at_640_from_scratch(words):
    config = train(*words.split()).config
    assert (config.model.cfg, config.model.weights, config.data.image_size) == ("yolov5s", "", 640)


def test_a_run_file_that_names_no_data_stands_on_the_built_in_recipe():
    write("run.yaml", "optim: {lr0: 0.5}\nrun: {epochs: 7}")
    resolved = train("--config", "run.yaml")
    config, origins = resolved.config, resolved.origins
    assert (config.data.source, config.data.image_size, config.model.cfg) == ("shapes", 128, "yolov5-shapes")
    assert (config.optim.lr0, config.run.epochs) == (0.5, 7)
    assert (origins["optim.lr0"], origins["data.image_size"]) == ("run file run.yaml", "built-in recipe shapes")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: {source: coco.yaml}", []),
        ("optim: {lr0: 0.5}", ["--data", "coco.yaml"]),
        ("optim: {lr0: 0.5}", ["--set", "data.source=coco.yaml"]),
        ("run: {resume: last}", []),
    ],
)
def test_a_run_file_with_data_stands_alone(text, words):
    write("run.yaml", text)
    config = train("--config", "run.yaml", *words).config
    assert (config.model.cfg, config.data.image_size) == ("yolov5s", 640)


def test_weights_alone_bring_their_architecture():
    assert train("--data", "x.yaml", "--weights", "a.pt").config.model.cfg == ""
    assert train("--weights", "a.pt").config.model.cfg == ""


def test_weights_with_a_cfg_keep_that_cfg():
    assert train("--data", "x.yaml", "--weights", "a.pt", "--cfg", "yolov5m.yaml").config.model.cfg == "yolov5m.yaml"


def test_a_run_file_that_names_a_model_keeps_it_beside_weights():
    write("run.yaml", "model: {cfg: yolov5l}")
    assert train("--config", "run.yaml", "--weights", "a.pt").config.model.cfg == "yolov5l"


# Flags


@pytest.mark.parametrize("flag", ["--img", "--imgsz", "--img-size", "--img_size"])
def test_all_names_of_the_image_size_are_one_flag(flag):
    assert parse_train_args([flag, "320"]).imgsz == 320
    assert parse_train_args([f"{flag}=320"]).imgsz == 320


def test_resume_without_a_value_means_the_last_run():
    assert train("--resume").config.run.resume == "last"
    assert train("--resume", "runs/train/exp7").config.run.resume == "runs/train/exp7"


def test_autobatch_is_minus_one():
    assert train("--batch-size", "-1").config.data.batch_size == -1


def test_freeze_takes_several_layers():
    assert train("--freeze", "0", "1", "2").config.model.freeze == (0, 1, 2)
    assert train("--freeze", "10").config.model.freeze == (10,)


def test_negative_flags_turn_their_setting_off():
    config = train("--noautoanchor", "--no-channels-last").config
    assert (config.model.autoanchor, config.model.channels_last) == (False, False)


def test_the_local_rank_of_old_launchers_is_accepted():
    assert train("--local_rank", "1").config == train("--local-rank=0").config == train().config


def test_abbreviations_are_unknown_flags():
    with pytest.raises(ConfigError, match=r"did you mean --epochs\?"):
        parse_train_args(["--epoch", "3"])


def test_a_hyperparameter_as_a_flag_is_told_its_way():
    with pytest.raises(ConfigError, match=r"--set optim\.lr0="):
        parse_train_args(["--lr0", "0.1"])


def test_unknown_words_can_be_ignored():
    assert parse_train_args(["--epochs", "3", "--unknown", "x"], known=True).epochs == 3


def test_a_flag_out_of_range_is_named():
    with pytest.raises(ConfigError, match=r"run\.epochs is 'many' .* \(from --epochs\)"):
        train("--epochs", "many")


@pytest.mark.parametrize(
    ("assignment", "hint"),
    [("lr0=1", "did you mean optim.lr0"), ("optim.lr=1", "optim.lr0"), ("optim.lr0", "needs part.field=value")],
)
def test_a_wrong_set_says_what_it_should_be(assignment, hint):
    with pytest.raises(ConfigError, match=hint):
        train("--set", assignment)


@pytest.mark.parametrize(
    ("assignment", "part", "field", "value"),
    [
        ("run.noval=true", "run", "noval", True),
        ("run.name=7", "run", "name", "7"),
        ("optim.lr0=1e-3", "optim", "lr0", 0.001),
        ("model.freeze=0,4", "model", "freeze", (0, 4)),
        ("run.trackers=wandb,tensorboard", "run", "trackers", ("wandb", "tensorboard")),
        ("run.name=a=b", "run", "name", "a=b"),
    ],
)
def test_set_reads_a_value_in_the_type_of_its_setting(assignment, part, field, value):
    assert getattr(getattr(train("--set", assignment).config, part), field) == value


# Python


def test_attributes_edited_after_parsing_count():
    options = parse_train_args(["--data", "x.yaml"])
    options.device, options.batch_size, options.sync_bn = "1", 64, True
    config = resolve(options).config
    assert (config.run.device, config.data.batch_size, config.model.sync_bn) == ("1", 64, True)


def test_keyword_arguments_have_the_names_of_yolov5():
    resolved = config_from_kwargs(data="x.yaml", imgsz=320, batch_size=8, noautoanchor=True, resume=False, evolve=None)
    config = resolved.config
    assert (config.data.image_size, config.data.batch_size, config.model.autoanchor) == (320, 8, False)
    assert config.run.resume == ""
    assert resolved.origins["data.image_size"] == "imgsz="


@pytest.mark.parametrize(
    ("device", "text"), [("0,1", "0,1"), ([0, 1], "0,1"), (0, "0"), ("10,11", "10,11"), ("cpu", "cpu"), ("", "")]
)
def test_devices_may_be_texts_numbers_or_lists(device, text):
    assert config_from_kwargs(device=device).config.run.device == text


def test_paths_are_accepted_for_files():
    config = config_from_kwargs(data=Path("x.yaml"), weights=Path("a.pt")).config
    assert (config.data.source, config.model.weights) == ("x.yaml", "a.pt")


def test_an_unknown_keyword_names_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean batch_size"):
        config_from_kwargs(batchsize=8)


def test_one_option_under_two_names_is_refused():
    with pytest.raises(ConfigError, match="given twice"):
        config_from_kwargs(imgsz=320, img_size=640)


def test_yolov5s_defaults_of_refused_options_ask_for_nothing():
    harmless = {
        "evolve": None,
        "cache": None,
        "quad": False,
        "bucket": "",
        "bbox_interval": -1,
        "upload_dataset": False,
    }
    assert config_from_kwargs(**harmless, artifact_alias="latest", image_weights=False).config == train().config


def test_load_config_takes_the_model_first():
    config = load_config("yolov5m", data="coco.yaml", epochs=50)
    assert (config.model.cfg, config.data.source, config.run.epochs) == ("yolov5m", "coco.yaml", 50)


def test_hyperparameters_and_settings_may_be_dicts():
    resolved = config_from_kwargs(data="x.yaml", hyp={"lr0": 0.3, "fliplr": 0}, set={"optim.nominal_batch": 8})
    assert (resolved.config.optim.lr0, resolved.config.augment.fliplr) == (0.3, 0.0)
    assert resolved.config.optim.nominal_batch == 8
    assert resolved.origins["optim.lr0"] == "hyp="


def test_the_number_of_processes_is_kept_for_run():
    assert config_from_kwargs(num_processes=2).num_processes == 2
    assert train("--num-processes", "3").num_processes == 3
    with pytest.raises(ConfigError, match="number of processes"):
        config_from_kwargs(num_processes=0)


def test_opt_and_hyp_files_of_a_run_give_its_settings_back():
    changed = {
        "model": {"cfg": "yolov5n", "freeze": [0, 1], "autoanchor": False, "anchors": 3},
        "data": {"source": "x.yaml", "image_size": 96, "rect": True},
        "augment": {"hsv_h": 0.5},
        "loss": {"label_smoothing": 0.1, "cls": 0.7},
        "optim": {"optimizer": "AdamW", "lr0": 1e-5, "warmup_min_steps": 7},
        "run": {"epochs": 3, "device": "0,1", "trackers": ["wandb"]},
    }
    config = build_config(changed)
    opt, hyp = (yaml.safe_load(yaml.safe_dump(values)) for values in (opt_values(config), hyp_values(config)))
    assert config_from_kwargs(**opt, hyp=hyp).config == config


def test_hyp_values_leave_anchors_out_unless_they_are_computed():
    assert "anchors" not in hyp_values(TrainConfig())


# Files


def test_a_hyp_file_in_yolov5s_format_loads_and_missing_keys_keep_their_default():
    name = write("mine.yaml", "lr0: 1e-3\nanchors: 3.4\nmosaic: 0\ncls_pw: 2")
    config = train("--data", "x.yaml", "--hyp", name).config
    assert (config.optim.lr0, config.model.anchors, config.augment.mosaic) == (0.001, 3, 0.0)
    assert (config.loss.cls_pw, config.loss.cls) == (2.0, 0.5)


def test_an_unknown_hyp_key_names_the_file_and_the_nearest_key():
    name = write("mine.yaml", "lr: 0.1")
    with pytest.raises(ConfigError, match=r"'lr' in mine.yaml\n.*lr0"):
        train("--hyp", name)


@pytest.mark.parametrize("value", ["fast", "[1, 2]", "true", "", ".nan", "-1"])
def test_a_wrong_hyp_value_names_the_file_and_the_key(value):
    name = write("mine.yaml", f"lr0: {value}")
    with pytest.raises(ConfigError, match=r"optim\.lr0 is .*\(from hyp file mine\.yaml\)"):
        train("--hyp", name)


def test_a_yaml_error_names_its_line():
    name = write("mine.yaml", "lr0: 0.1\nlrf: [0.1\nbox: 0.05\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml line 3"):
        train("--hyp", name)


@pytest.mark.parametrize(("content", "reason"), [(b"", "nothing"), (b"- 1\n", "list"), (b"\xff\xfe\x00", "mine.yaml")])
def test_a_file_without_keys_is_refused(content, reason):
    Path("mine.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        train("--hyp", "mine.yaml")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("modle: {cfg: x}", "did you mean model"),
        ("model: {cgf: x}", "did you mean cfg"),
        ("model: yolov5s", "not a list of"),
        ("data: {image_size: big}", r"data\.image_size is 'big' .*\(from run file run\.yaml\)"),
    ],
)
def test_a_wrong_run_file_says_where(text, reason):
    write("run.yaml", text)
    with pytest.raises(ConfigError, match=reason):
        train("--config", "run.yaml")


def test_a_scalar_in_a_run_file_is_enough_for_a_list_setting():
    write("run.yaml", "model: {freeze: 10}\nrun: {trackers: wandb, device: 0}")
    config = train("--config", "run.yaml").config
    assert (config.model.freeze, config.run.trackers, config.run.device) == ((10,), ("wandb",), "0")


@pytest.mark.parametrize("name", ["hyp.scratch-med", "hyp.scratch-med.yaml", "data/hyps/hyp.scratch-med.yaml"])
def test_our_files_are_found_by_their_name(name):
    assert find_config(name, "hyps").name == "hyp.scratch-med.yaml"


def test_a_file_of_the_user_comes_before_ours():
    write("hyp.VOC.yaml", "lr0: 0.5")
    assert find_config("hyp.VOC.yaml", "hyps") == Path("hyp.VOC.yaml")
    assert train("--hyp", "hyp.VOC.yaml").config.optim.lr0 == 0.5


def test_a_missing_file_names_the_nearest_of_ours():
    with pytest.raises(ConfigError, match=r"hyp\.scratch-low"):
        find_config("hyp.scratch-lo", "hyps")


def test_a_wrong_absolute_path_does_not_become_one_of_ours(tmp_path):
    with pytest.raises(ConfigError):
        find_config(str(tmp_path / "hyp.VOC.yaml"), "hyps")


@pytest.mark.parametrize("name", ["sets/coco", "./sets/coco", "sets/coco/", "absolute"])
def test_a_folder_in_place_of_a_data_file_is_told_with_the_files_in_it(tmp_path, name):
    Path("sets/coco").mkdir(parents=True)
    for file in ("data.yaml", "other.yml", "notes.txt"):
        write(f"sets/coco/{file}", "")
    with pytest.raises(ConfigError, match="this is a folder") as caught:
        find_config(str(tmp_path / "sets/coco") if name == "absolute" else name, "data")
    assert caught.value.found.endswith("coco, which holds data.yaml, other.yml")
    assert "data.yaml" in caught.value.fix


def test_a_folder_hides_none_of_ours_and_an_empty_one_is_told():
    Path("shapes").mkdir()
    Path("mine").mkdir()
    assert find_config("shapes", "data").name == "shapes.yaml"
    with pytest.raises(ConfigError, match=r"holds no \*\.yaml"):
        find_config("mine", "data")


def test_a_name_too_long_for_a_file_is_told():
    with pytest.raises(ConfigError, match="no such file"):
        find_config("x" * 5000, "data")


@pytest.mark.parametrize(("kept", "found"), [("packed", True), ("checkout", True), ("site-packages", False)])
def test_the_folder_beside_the_package_is_ours_only_in_a_checkout(tmp_path, monkeypatch, kept, found):
    package = tmp_path / "root" / "accel_yolo"
    package.mkdir(parents=True)
    folder = (package if kept == "packed" else package.parent) / "configs/data"
    folder.mkdir(parents=True)
    (folder / "rare.yaml").write_text("a: 1")
    if kept == "packed":
        (package.parent / "configs/data").mkdir(parents=True)
        (package.parent / "configs/data/foreign.yaml").write_text("a: 1")
    if kept != "site-packages":
        (package.parent / "pyproject.toml").write_text("")
    monkeypatch.setattr(load, "_PACKAGE", package)
    if found:
        assert find_config("rare", "data") == folder / "rare.yaml"
    with pytest.raises(ConfigError):
        find_config("foreign" if found else "rare", "data")


def test_a_yaml_file_is_read_with_the_error_of_its_reader(tmp_path):
    assert read_yaml(Path(write("good.yaml", "a: 1"))) == {"a": 1}
    faults = {"line.yaml": "a: 1\nb: [\n", "date.yaml": "a: 2024-13-45", "list.yaml": "- a", "gone.yaml": None}
    for name, text in faults.items():
        if text is not None:
            write(name, text)
        for error in (ConfigError, DataError):
            with pytest.raises(error) as caught:
                read_yaml(Path(name), error=error)
            assert caught.value.found.startswith(name)


# val


def test_val_flags_become_settings():
    words = "--weights best.safetensors --data x.yaml --img 320 --task test --augment --conf_thres 0.01"
    config = resolve_val(parse_val_args(words.split()))
    assert (config.weights, config.data, config.image_size) == ("best.safetensors", "x.yaml", 320)
    assert (config.task, config.augment, config.conf_thres) == ("test", True, 0.01)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--weights a.pt --task speed", "task speed"),
        ("--weights a.pt --task study", "task study"),
        ("--weights a.pt b.pt", "ensemble"),
        ("--weights a.pt --half --device cpu", r"val\.half .*\(from --half\)"),
        ("--data x.yaml", r"val\.weights is empty"),
        ("--weights a.pt --save-json", "COCO"),
    ],
)
def test_val_refuses_with_a_reason(words, reason):
    with pytest.raises(ConfigError, match=reason):
        resolve_val(parse_val_args(words.split()))


def test_val_takes_keyword_arguments():
    assert resolve_val({"weights": ["a.pt"], "imgsz": 96}).image_size == 96
    assert resolve_val(argparse.Namespace(weights="a.pt", batch_size=4)).batch_size == 4
