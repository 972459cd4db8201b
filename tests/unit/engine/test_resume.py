"""Which run is meant, and which settings may differ from those it was started with."""

import json
import os

import pytest

from accel_yolo.config.load import config_from_kwargs
from accel_yolo.engine.checkpoint import Checkpoint
from accel_yolo.engine.resume import find_run, merge_with_saved
from accel_yolo.errors import CheckpointError


def _run(project, name, *, age):
    pointer = project / name / "checkpoints" / "last.json"
    pointer.parent.mkdir(parents=True)
    pointer.write_text(json.dumps({}))
    (project / name / "weights").mkdir()
    (project / name / "weights" / "last.safetensors").write_text("")
    os.utime(pointer, (1e9 - age, 1e9 - age))
    return project / name


def test_last_is_the_newest_run_of_the_project(tmp_path):
    _run(tmp_path, "exp", age=100)
    newest = _run(tmp_path, "exp2", age=1)
    _run(tmp_path, "exp3", age=50)
    assert find_run("last", tmp_path) == newest


def test_a_run_is_found_by_its_folder_and_by_a_file_inside(tmp_path):
    run = _run(tmp_path, "exp", age=0)
    for name in ("", "weights", "weights/last.safetensors", "checkpoints"):
        assert find_run(str(run / name), tmp_path) == run


@pytest.mark.parametrize("resume", ["last", "nowhere/exp"])
def test_no_run_is_an_error_that_says_where_it_looked(tmp_path, resume):
    with pytest.raises(CheckpointError) as caught:
        find_run(resume, tmp_path / "runs")
    assert str(tmp_path) in caught.value.found or "nowhere" in caught.value.found


def _saved(tmp_path, **options):
    config = config_from_kwargs(data="d.yaml", cfg="yolov5n", **options).config
    return Checkpoint(
        tmp_path / "exp" / "checkpoints" / "step-1", {"config": config.to_dict(), "batch_size": config.data.batch_size}
    )


def test_settings_not_given_now_are_those_of_the_run(tmp_path):
    merged = merge_with_saved(config_from_kwargs(resume="last"), _saved(tmp_path, imgsz=320, epochs=7)).config
    assert (merged.data.image_size, merged.run.epochs, merged.data.source) == (320, 7, "d.yaml")


def test_a_setting_that_may_change_is_applied_and_its_origin_kept(tmp_path):
    from accel_yolo.config.load import parse_train_args, resolve

    asked = resolve(parse_train_args(["--resume", "x", "--epochs", "30"]))
    merged = merge_with_saved(asked, _saved(tmp_path, epochs=7))
    assert merged.config.run.epochs == 30 and merged.origins["run.epochs"] == "--epochs"


def test_a_setting_that_may_not_change_is_refused_with_both_values(tmp_path):
    from accel_yolo.config.load import parse_train_args, resolve

    asked = resolve(parse_train_args(["--resume", "x", "--batch-size", "32", "--imgsz", "320"]))
    with pytest.raises(CheckpointError, match="cannot change") as caught:
        merge_with_saved(asked, _saved(tmp_path, imgsz=320))
    assert "data.batch_size is 32 now (--batch-size), was 16 when the run was started" in caught.value.found
    assert "image_size" not in caught.value.found


def test_options_from_python_and_hyp_files_count_as_asked_for(tmp_path):
    merged = merge_with_saved(config_from_kwargs(resume="x", epochs=200), _saved(tmp_path, epochs=7))
    assert merged.config.run.epochs == 200
    with pytest.raises(CheckpointError, match="cannot change"):
        merge_with_saved(config_from_kwargs(resume="x", hyp={"lr0": 0.5}), _saved(tmp_path))


def test_what_is_about_the_machine_comes_from_this_call(tmp_path):
    saved = _saved(tmp_path, device="0,1", workers=3, trackers=["tensorboard"])
    merged = merge_with_saved(config_from_kwargs(resume="x", project="elsewhere"), saved).config
    assert (merged.run.device, merged.data.workers, merged.run.trackers) == ("", 8, ())


def test_a_measured_batch_size_is_kept(tmp_path):
    saved = _saved(tmp_path, batch_size=-1)
    saved.state["batch_size"] = 24
    assert merge_with_saved(config_from_kwargs(resume="x"), saved).config.data.batch_size == 24
