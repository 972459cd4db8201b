"""The notebook of examples/ runs in a real kernel; and nothing that a cell does before training touches CUDA."""

import sys

import pytest

from tests.processes import REPOSITORY, run_command

NOTEBOOK = REPOSITORY / "examples" / "train_in_a_notebook.ipynb"
LIMIT = 240

# In a process of its own: past the limit the kernel and what it started are killed with it.
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
settings = next(cell for cell in notebook.cells if cell.cell_type == "code")
for usual, short in {"epochs = 20": "epochs = 2", "size = 128": "size = 64", "= 400, 100": "= 32, 12"}.items():
    assert usual in settings.source
    settings.source = settings.source.replace(usual, short)
NotebookClient(notebook, kernel_name="python3", timeout=200).execute()
nbformat.write(notebook, "executed.ipynb")
"""


def _words(cell):
    """All that a cell printed, and the kinds of what it showed."""
    text = "".join(output.get("text", "") for output in cell.outputs)
    return text, [kind for output in cell.outputs for kind in output.get("data", {})]


def test_the_notebook_runs_in_a_real_kernel_and_shows_data_curve_and_predictions(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel: pip install 'accel-yolo[test]'")
    for module in ("nbclient", "ipykernel"):
        pytest.importorskip(module, reason="needs nbclient and ipykernel: pip install 'accel-yolo[test]'")
    command = [sys.executable, "-c", EXECUTE, str(NOTEBOOK)]
    finished = run_command(command, timeout=LIMIT, cwd=tmp_path, TMPDIR=str(tmp_path), **_kernel_folders(tmp_path))
    assert finished.code == 0, finished.output[-6000:]
    executed = nbformat.read(tmp_path / "executed.ipynb", as_version=4)
    settings, data, samples, training, curve, predictions, callbacks = (
        _words(cell) for cell in executed.cells if cell.cell_type == "code"
    )
    assert "2 process(es)" in settings[0]
    assert "train" in data[0] and "32 images" in data[0]
    for picture in (samples, curve, predictions):
        assert "image/png" in picture[1]
    assert "2 processes by torchrun, backend gloo" in training[0]
    assert training[0].count("epoch 2/2") == 1, "only the main process speaks"
    assert "2 processes by torchrun, backend gloo" in callbacks[0]
    assert callbacks[0].count("the run is in") == 1
    for rank in (0, 1):
        assert f"notes-of-rank-{rank}.txt says: epoch 0 ended" in callbacks[0]


def test_the_notebook_is_kept_without_outputs():
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat: pip install 'accel-yolo[test]'")
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert cells and all(not cell.outputs and cell.execution_count is None for cell in cells)


def _kernel_folders(folder):
    """Nothing of the user's Jupyter or IPython settings, and nothing written into them."""
    names = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    return {name: str(folder / name.lower()) for name in names}


# Two devices that break when they are used, whatever machine this is.
UNTOUCHED = """
import pkgutil, importlib, sys, torch

def touched(*arguments, **keywords):
    raise AssertionError("CUDA was touched")

torch.cuda._lazy_init = torch.cuda.init = torch._C._cuda_init = torch.cuda.current_device = touched
torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 2)

import accel_yolo
for module in pkgutil.walk_packages(accel_yolo.__path__, "accel_yolo."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)

config = accel_yolo.load_config(data="tiny.yaml", cfg="yolov5-shapes", imgsz=64, device="0,1")
data = accel_yolo.load_dataset("files.yaml", index_cache="cache")
assert data.splits["train"].report.boxes == 1

from accel_yolo.commands import train

def start(module, settings, *, num_processes, environment, **others):
    assert num_processes == 2 and environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    return {"save_dir": "a", "best": "b", "last": "c", "metrics": {}}

train.start_processes = start
accel_yolo.run(data="tiny.yaml", cfg="yolov5-shapes", imgsz=64, device="0,1")
assert not torch.cuda.is_initialized()
assert torch.cuda.device_count() == 2
print("untouched")
"""


def test_importing_the_package_building_a_config_indexing_data_and_starting_a_run_never_touch_cuda(tmp_path):
    import cv2
    import numpy as np

    (tmp_path / "images").mkdir()
    (tmp_path / "labels").mkdir()
    cv2.imwrite(str(tmp_path / "images" / "a.jpg"), np.full((32, 32, 3), 90, np.uint8))
    (tmp_path / "labels" / "a.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    (tmp_path / "files.yaml").write_text(f"path: {tmp_path}\ntrain: images\nval: images\nnames: [thing]\n")
    (tmp_path / "tiny.yaml").write_text("source: shapes\nnum_train: 4\nnum_val: 4\nimage_size: 64\nseed: 0\n")
    finished = run_command([sys.executable, "-c", UNTOUCHED], timeout=120, cwd=tmp_path)
    assert finished.code == 0, finished.output[-4000:]
    assert "untouched" in finished.output
