"""The wheel holds everything: installed elsewhere, it trains from another folder."""

import subprocess
import sys
import zipfile

import pytest

from tests.processes import REPOSITORY, run_command


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(REPOSITORY)], check=True, timeout=120)
    (path,) = folder.glob("accel_yolo-*.whl")
    return path


def test_the_wheel_has_code_configs_and_licence_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0].removesuffix(".dist-info").split("-")[0] for name in names}
    assert tops == {"accel_yolo"}
    for file in ("accel_yolo/configs/models/yolov5n.yaml", "accel_yolo/configs/recipes/shapes.yaml"):
        assert file in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any("test" in name or name.endswith((".pt", ".safetensors")) for name in names)


def test_the_installed_wheel_trains_shapes_from_another_folder(wheel, tmp_path):
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(command, check=True, timeout=120)
    work = tmp_path / "work"
    work.mkdir()
    (work / "tiny.yaml").write_text("source: shapes\nnum_train: 16\nnum_val: 6\nimage_size: 64\nseed: 0\n")
    code = (
        "import sys, accel_yolo\n"
        f"assert accel_yolo.__file__.startswith({str(site)!r}), accel_yolo.__file__\n"
        "from accel_yolo.cli import main\n"
        "sys.exit(main(['train', '--set', 'data.source=tiny.yaml', '--cfg', 'yolov5-shapes', '--imgsz', '64',\n"
        "               '--batch-size', '8', '--epochs', '1', '--noplots', '--workers', '0']))\n"
    )
    finished = run_command([sys.executable, "-c", code], timeout=200, cwd=work, PYTHONPATH=str(site))
    assert finished.code == 0, finished.output[-4000:]
    assert (work / "runs" / "train" / "exp" / "weights" / "best.safetensors").exists()
