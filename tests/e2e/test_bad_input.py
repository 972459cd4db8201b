"""Bad input ends with code 2, three lines on how to mend it, no traceback, and nothing written."""

from pathlib import Path

import cv2
import numpy as np
import pytest

HYP = "lr0: 0.01\nmosaic: 1.0\n"


def _images(folder: Path, number: int = 2, label: str = "0 0.5 0.5 0.4 0.4\n") -> None:
    (folder / "images").mkdir(parents=True)
    (folder / "labels").mkdir()
    for index in range(number):
        cv2.imwrite(str(folder / "images" / f"{index}.jpg"), np.full((64, 64, 3), 90 + index, np.uint8))
        (folder / "labels" / f"{index}.txt").write_text(label)


def _yaml(folder: Path, **values: object) -> str:
    content = {"train": "set/images", "val": "set/images", "names": "[a, b]", **values}
    path = folder / "data.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in content.items()))
    return str(path)


def _check(finished, folder: Path, *parts: str) -> None:
    before = {"data.yaml", "set", "bad.yaml", "weights.safetensors", "empty", "runs-is-a-file", "tiny.yaml"}
    assert finished.code == 2, finished.output[-3000:]
    assert "Traceback" not in finished.output
    lines = finished.output.strip().splitlines()[-3:]
    assert lines[1].startswith("  found: ") and lines[2].startswith("  fix:   "), finished.output
    for part in parts:
        assert part in finished.output, (part, finished.output)
    assert {path.name for path in folder.iterdir()} <= before, "nothing may be written"


def test_a_missing_data_yaml_names_the_nearest(train, tmp_path):
    _check(train("--data", "shaps.yaml"), tmp_path, "shaps.yaml", "shapes")


def test_a_missing_image_folder_shows_every_path_that_was_tried(train, tmp_path):
    data = _yaml(tmp_path, path="nowhere", train="images")
    _check(train("--data", data), tmp_path, str(tmp_path / "nowhere"), "tried")


def test_a_class_outside_the_names_is_listed_with_its_files(train, tmp_path):
    _images(tmp_path / "set", label="7 0.5 0.5 0.4 0.4\n")
    _check(train("--data", _yaml(tmp_path)), tmp_path, "7", "0.txt")


def test_an_empty_training_set_is_refused(train, tmp_path):
    (tmp_path / "set" / "images").mkdir(parents=True)
    _check(train("--data", _yaml(tmp_path)), tmp_path, "no image to train on", "data.yaml")


def test_an_unknown_flag_names_the_nearest(train, tmp_path):
    _check(train("--epoch", "3"), tmp_path, "--epoch", "--epochs")


def test_an_unknown_key_of_the_hyp_file_names_the_nearest(train, tmp_path):
    (tmp_path / "bad.yaml").write_text(HYP + "mozaic: 1.0\n")
    _check(train("--hyp", "bad.yaml"), tmp_path, "mozaic", "mosaic")


def test_an_unknown_key_of_the_data_yaml_names_the_nearest(train, tmp_path):
    _images(tmp_path / "set")
    _check(train("--data", _yaml(tmp_path, nmaes="[a]")), tmp_path, "nmaes", "names")


def test_a_hyp_value_of_a_wrong_type_names_file_and_key(train, tmp_path):
    (tmp_path / "bad.yaml").write_text("lr0: fast\n")
    _check(train("--hyp", "bad.yaml"), tmp_path, "bad.yaml", "lr0", "fast")


def test_unreadable_weights_are_refused(train, tmp_path, tiny):
    (tmp_path / "weights.safetensors").write_bytes(b"\xff" * 100)
    _check(train("--data", str(tiny), "--weights", "weights.safetensors"), tmp_path, "weights.safetensors")


def test_missing_weights_are_refused_and_not_downloaded(train, tmp_path, tiny):
    _check(train("--data", str(tiny), "--weights", "yolov5s.pt"), tmp_path, "yolov5s.pt")


def test_a_run_folder_that_cannot_be_written_is_named(train, tmp_path, tiny):
    (tmp_path / "runs-is-a-file").write_text("")
    _check(train("--data", str(tiny), "--project", "runs-is-a-file/train"), tmp_path, "runs-is-a-file")


def test_a_batch_that_cannot_be_shared_is_refused_before_data_or_group(train, tmp_path):
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    finished = train("--data", "does-not-matter.yaml", "--batch-size", "63", timeout=60, **environment)
    _check(finished, tmp_path, "--batch-size must be multiple of", "60 or 64")


def test_a_measured_batch_on_several_processes_is_refused_with_the_way_out(train, tmp_path):
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    finished = train("--data", "does-not-matter.yaml", "--batch-size", "-1", timeout=60, **environment)
    _check(finished, tmp_path, "--batch-size -1", "one process")


def test_more_devices_than_there_are_is_refused(train, tmp_path):
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    finished = train("--device", "0,1", timeout=60, **environment)
    _check(finished, tmp_path, "insufficient CUDA devices")


@pytest.mark.parametrize("flags", [["--evolve"], ["--cache", "ram"], ["--quad"], ["--image-weights"]])
def test_flags_that_are_not_supported_say_so_and_what_to_do(train, tmp_path, flags):
    _check(train(*flags), tmp_path, flags[0])
