"""One run on 1, 2 and 3 processes: the same batches, losses, metrics and weights; and everything agreed."""

import json
import math
import sys

import pytest
import torch
from safetensors.torch import load_file

from accel_yolo.engine.run_folder import read_results
from accel_yolo.model.detector import DetectionModel
from tests.processes import REPOSITORY, run_command

# In one worker, because the run on one process is made once for all.
pytestmark = pytest.mark.xdist_group("invariance")

TINY = "source: shapes\nnum_train: 21\nnum_val: 7\nimage_size: 64\nseed: 0\n"
LIMIT = 200

CODE = """
import json, os, sys
sys.path.insert(0, {repository!r})
import accel_yolo
from accel_yolo.config.load import config_from_kwargs
from accel_yolo.engine.callbacks import Callbacks

class Noting(Callbacks):
    def __init__(self):
        self.rows, self.places, self.epochs = [], [], []
    def on_batch_end(self, *, batch, state):
        self.rows.append([key.index for key in batch.keys])
        self.places.append([key.place for key in batch.keys])
    def on_epoch_end(self, *, values, state):
        self.epochs.append(values)

options = json.loads({options!r})
noting = Noting()
result = accel_yolo.train(config_from_kwargs(**options), callbacks=noting)
rank = os.environ.get("RANK", "0")
with open(f"rank{{rank}}.json", "w") as file:
    json.dump(dict(rows=noting.rows, places=noting.places, epochs=noting.epochs, metrics=result.metrics), file)
"""


def _run(folder, processes, **options):
    folder.mkdir()
    (folder / "tiny.yaml").write_text(TINY)
    options = {
        "data": "tiny.yaml", "cfg": "yolov5-shapes", "imgsz": 64, "batch_size": 6, "epochs": 2, "sync_bn": True,
        "workers": 0, "noplots": True, "device": "cpu", "project": "runs", **options,
    }  # fmt: skip
    (folder / "script.py").write_text(CODE.format(repository=str(REPOSITORY), options=json.dumps(options)))
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    finished = run_command([*command, "script.py"], timeout=LIMIT, cwd=folder)
    assert finished.code == 0, finished.output[-5000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)], finished.output


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    return _run(folder, 1)[0][0], folder


@pytest.mark.parametrize("processes", [2, 3])
def test_the_same_run_on_several_processes(tmp_path, alone, processes):
    ranks, _ = _run(tmp_path / "run", processes)
    expected, expected_folder = alone
    # 21 images in batches of 6: 4 steps an epoch, the last one completed; each rank has its slice of each batch.
    for step, (rows, places) in enumerate(zip(expected["rows"], expected["places"], strict=True)):
        assert [row for rank in ranks for row in rank["rows"][step]] == rows
        assert [place for rank in ranks for place in rank["places"][step]] == places
    first_epoch = [row for rows in expected["rows"][:4] for row in rows]
    assert set(first_epoch) == set(range(21)) and len(first_epoch) == 24
    for rank in ranks:
        assert rank["epochs"][0]["train/box_loss"] == pytest.approx(expected["epochs"][0]["train/box_loss"], rel=1e-3)
        for name in ("train/box_loss", "train/obj_loss", "train/cls_loss", "val/box_loss", "val/obj_loss"):
            assert rank["epochs"][0][name] == pytest.approx(expected["epochs"][0][name], rel=1e-3), name
        assert rank["metrics"] == ranks[0]["metrics"], "the result is the same on every rank"
    assert _distance(expected_folder, tmp_path / "run") < 0.02


def _distance(folder, other) -> float:
    """|w_N - w_1| / |w_1 - w_0| of the weight averages: how far apart two runs are, as a part of the way travelled."""
    left, right = (load_file(path / "runs/exp/weights/last.safetensors") for path in (folder, other))
    torch.manual_seed(0)
    start = DetectionModel("yolov5-shapes", num_classes=3).state_dict()
    names = [name for name, value in left.items() if value.is_floating_point()]
    apart = sum(float((left[name] - right[name]).double().square().sum()) for name in names)
    travelled = sum(float((left[name] - start[name]).double().square().sum()) for name in names)
    return math.sqrt(apart / travelled)


def test_own_statistics_are_merged_for_what_is_measured_and_saved(tmp_path):
    ranks, output = _run(tmp_path / "run", 2, sync_bn=False, epochs=1)
    assert "BatchNorm  per process, merged for validation and saving" in output
    assert "hint       3 images per process" in output
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
    (checkpoint,) = (tmp_path / "run" / "runs" / "exp" / "checkpoints").glob("step-*")
    own = load_file(checkpoint / "statistics.safetensors")
    name = "ema/model.0.bn.running_mean"
    left, right = own[f"0/{name}"], own[f"1/{name}"]
    assert not torch.equal(left, right)
    merged = load_file(tmp_path / "run" / "runs" / "exp" / "weights" / "last.safetensors")["model.0.bn.running_mean"]
    torch.testing.assert_close(merged, (left + right) / 2)


def test_patience_ends_all_processes_in_the_same_epoch_and_another_number_of_them_goes_on(tmp_path, alone):
    # Without a learning rate nothing improves after the first epoch.
    ranks, output = _run(tmp_path / "run", 2, epochs=9, patience=2, set={"optim.lr0": 0.0, "optim.warmup_bias_lr": 0.0})
    assert [len(rank["epochs"]) for rank in ranks] == [len(ranks[0]["epochs"])] * 2
    assert 3 <= len(ranks[0]["epochs"]) < 9 and output.count("stopped early") == 1
    # Two processes' run is continued by one.
    command = [
        sys.executable,
        str(REPOSITORY / "train.py"),
        "--resume",
        "runs/exp",
        "--epochs",
        "10",
        "--patience",
        "0",
    ]
    finished = run_command(command, timeout=LIMIT, cwd=tmp_path / "run")
    assert finished.code == 0, finished.output[-4000:]
    assert "resume: run.epochs is now 10, was 9" in finished.output
    assert [row["epoch"] for row in read_results(tmp_path / "run" / "runs/exp/results.csv")] == list(range(10))


def test_a_users_error_on_several_processes_is_printed_once(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    flags = [str(REPOSITORY / "train.py"), "--batch-size", "7", "--device", "cpu"]
    finished = run_command([*command, *flags], timeout=60, cwd=tmp_path)
    assert finished.code == 1
    assert finished.output.count("--batch-size must be multiple of the number of processes (2)") == 1
    assert "6 or 8" in finished.output
    assert not list(tmp_path.iterdir())
