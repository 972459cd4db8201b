"""`accel-yolo verify-ddp`: SyncBN passes in double precision, each process's own BatchNorm fails the same limit."""

import json
import sys

import pytest

from tests.processes import run_command

TINY = "source: shapes\nnum_train: 18\nnum_val: 6\nimage_size: 64\nseed: 0\n"
FLAGS = ["--data", "tiny.yaml", "--cfg", "yolov5-shapes", "--imgsz", "64", "--batch-size", "6", "--workers", "0"]


@pytest.fixture
def verify(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)

    def run(*flags):
        command = [sys.executable, "-m", "accel_yolo", "verify-ddp", *FLAGS, "--device", "cpu", *flags]
        return run_command(command, timeout=280, cwd=tmp_path)

    return run


def test_two_and_three_processes_pass_in_double_precision_and_leave_a_certificate(verify, tmp_path):
    finished = verify("--processes", "2", "3", "--steps", "5", "--float64")
    assert finished.code == 0, finished.output[-4000:]
    assert "passed; certificate in verify-ddp.json" in finished.output
    certificate = json.loads((tmp_path / "verify-ddp.json").read_text())
    assert certificate["passed"] and [item["processes"] for item in certificate["comparisons"]] == [2, 3]
    for item in certificate["comparisons"]:
        assert item["gradient"] < 1e-10 and item["loss"] < 1e-10 and 0 < item["weights"] < 1e-10
    assert certificate["settings"]["data"]["source"] == "tiny.yaml"
    assert not (tmp_path / "runs").exists()


def test_own_batchnorm_statistics_fail_the_same_limit(verify):
    finished = verify("--steps", "5", "--float64", "--no-sync-bn")
    assert finished.code == 3, finished.output[-4000:]
    assert "2 processes: beyond the tolerance in weights, gradient" in finished.output


def test_a_batch_that_cannot_be_shared_is_refused_at_once(verify):
    finished = verify("--processes", "4")
    assert finished.code == 2
    assert "--batch-size must be multiple of" in finished.output
