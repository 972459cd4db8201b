"""What the package promises is what it has, and asking for it is what loads it."""

import subprocess
import sys
from pathlib import Path

import pytest

import accel_yolo

REPOSITORY = Path(__file__).resolve().parents[2]
PROMISED = [
    "AccelYoloError",
    "Batch",
    "Detections",
    "EvalResult",
    "Sample",
    "TrainConfig",
    "__version__",
    "load_config",
    "load_dataset",
    "load_model",
    "run",
    "select_device",
    "train",
    "validate",
]


def test_all_is_the_promised_list():
    assert sorted(accel_yolo.__all__) == PROMISED


@pytest.mark.parametrize("name", PROMISED)
def test_every_promised_name_resolves(name):
    assert getattr(accel_yolo, name) is not None
    assert name in dir(accel_yolo)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = accel_yolo.trian


def test_importing_the_package_its_settings_and_its_cli_takes_no_torch():
    code = (
        "import sys, accel_yolo, accel_yolo.cli; accel_yolo.load_config(data='x.yaml'); accel_yolo.Batch;"
        " print(sorted({'torch', 'accelerate', 'datasets', 'cv2', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout.strip() == "[]"
