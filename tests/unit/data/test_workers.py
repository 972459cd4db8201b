"""Loader processes: how many, and that they end with their parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accel_yolo.data import workers
from accel_yolo.data.workers import choose_workers


@pytest.mark.parametrize(
    ("requested", "processes", "cores", "chosen"),
    [(8, 1, 4, 4), (2, 1, 4, 2), (8, 4, 4, 1), (8, 8, 4, 1), (0, 1, 4, 0), (-1, 1, 4, 0), (8, 0, 2, 2)],
)
def test_workers_never_exceed_the_share_of_the_cores(monkeypatch, requested, processes, cores, chosen):
    monkeypatch.setattr(workers, "usable_cores", lambda: cores)
    assert choose_workers(requested, processes) == chosen


def test_a_container_quota_limits_the_cores(tmp_path, monkeypatch):
    assert workers._container_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert workers._container_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert workers._container_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    monkeypatch.setattr(workers, "_container_quota", lambda: 0.5)
    assert workers.usable_cores() == 1


PARENT = """
import multiprocessing, os, time
from accel_yolo.data.workers import start_worker

def work(parent):
    start_worker(parent)
    print(os.getpid(), flush=True)
    time.sleep(60)

if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=work, args=(os.getpid(),))
    process.start()
    process.join()
"""


@pytest.fixture
def family(tmp_path):
    """A process and the worker that it started."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment, text=True)
    worker = int(parent.stdout.readline())
    yield parent, worker
    parent.kill()
    parent.wait()
    parent.stdout.close()


def ends(process, within):
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_worker_ends_when_its_parent_is_killed(family):
    parent, worker = family
    parent.kill()
    parent.wait()
    assert ends(worker, 10)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_worker_obeys_no_signal_but_its_parents(family):
    _, worker = family
    os.kill(worker, signal.SIGINT)
    os.kill(worker, signal.SIGTERM)
    assert not ends(worker, 0.5)
