"""A process that fails, is killed or stops answering ends the whole job soon, with its name, and leaves nothing alive.

`pytest -s` shows a table: what was done, seconds from there to the end, the exit code, and the line that tells why.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import REPOSITORY, clean_environment

# In one worker, one after the other: they measure seconds.
pytestmark = pytest.mark.xdist_group("failures")

# From the start of the launcher to its end, imports on busy cores included.
LIMIT = 120
# From the fault to the end.
SOON = 15
# Seconds without progress, or an answer; set-up on busy cores must be shorter.
WATCHDOG = 10

TINY = "source: shapes\nnum_train: 16\nnum_val: 6\nimage_size: 64\nseed: 0\n"

SCRIPT = """
import os, signal, sys, time
from pathlib import Path

sys.path.insert(0, {repository!r})
import accel_yolo.engine.training as training
from accel_yolo.commands.train import train
from accel_yolo.engine.callbacks import Callbacks

def fault(phase):
    rank = int(os.environ["RANK"])
    if phase != {phase!r} or rank != {rank}:
        return
    Path("fault.txt").write_text(str(time.time()))
    if {kind!r} == "raise":
        raise ZeroDivisionError(f"the fault in {{phase}} on rank {{rank}}")
    if {kind!r} == "sleep":
        time.sleep(600)
    os.kill(os.getpid(), getattr(signal, {kind!r}))

class Faulty(Callbacks):
    def on_batch_end(self, *, batch, state):
        # In the second step, when all the machinery runs.
        if state.micro_step == 2:
            fault("training")

def before(phase, function):
    def wrapped(*arguments, **keywords):
        fault(phase)
        return function(*arguments, **keywords)
    return wrapped

training.evaluate = before("validation", training.evaluate)
training.save_checkpoint = before("saving", training.save_checkpoint)

def main(rank=None):
    if rank is not None:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    # Ranks that import at different speeds would use up a short timeout before the story begins.
    Path(f"ready{{os.environ['RANK']}}.txt").touch()
    while not all(Path(f"ready{{other}}.txt").exists() for other in (0, 1)):
        time.sleep(0.05)
    train(callbacks=Faulty(), data="tiny.yaml", cfg="yolov5-shapes", imgsz=64, batch_size=8, epochs=50, device="cpu",
          noplots=True, project="runs", **{options!r})
"""
TORCHRUN = SCRIPT + "\nmain()\n"
SPAWN = (
    SCRIPT
    + """
if __name__ == "__main__":
    import torch.multiprocessing as mp
    os.environ |= dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT={port!r})
    mp.spawn(main, nprocs=2)
"""
)
NOTEBOOK = (
    SCRIPT
    + """
from accelerate import notebook_launcher
notebook_launcher(main, (), num_processes=2, use_port={port!r})
"""
)


@dataclass
class Ended:
    """How a job ended: its code, its output, the seconds since the fault, and the processes left a little later."""

    code: int
    output: str
    seconds: float
    left: list[int]


class Job:
    """A launcher with two processes in `folder`, all of them marked in their environment."""

    def __init__(self, folder: Path, template: str, *, kind: str, phase: str = "training", rank: int = 1, **options):
        (folder / "tiny.yaml").write_text(TINY)
        settings = {"workers": 0} | options
        code = template.format(
            repository=str(REPOSITORY), kind=kind, phase=phase, rank=rank, options=settings, port=_free_port()
        )
        (folder / "job.py").write_text(code)
        self.name, self.folder, self.mark = f"{kind} in {phase} on rank {rank}", folder, uuid.uuid4().hex
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        command = [sys.executable, *(launcher if template is TORCHRUN else []), "job.py"]
        with (folder / "output.txt").open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=clean_environment(ACCEL_YOLO_TEST_MARK=self.mark),
            )  # fmt: skip

    def wait_for(self, file_name: str, *, timeout: float = LIMIT) -> None:
        until = time.monotonic() + timeout
        while not list(self.folder.glob(file_name)):
            if time.monotonic() > until or self.process.poll() is not None:
                self._kill_all()
                pytest.fail(f"no {file_name} was written:\n{self._output()[-4000:]}", pytrace=False)
            time.sleep(0.05)

    def ended(self, *, since: float | None = None) -> Ended:
        """Wait for the end of everything, by force after `LIMIT`; `since` defaults to the moment of the fault."""
        try:
            code = self.process.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            self._kill_all()
            pytest.fail(f"no end after {LIMIT} s: {self.name}\n{self._output()[-4000:]}", pytrace=False)
        ended_at = time.time()
        if since is None:
            since = float((self.folder / "fault.txt").read_text())
        # The kernel ends orphans at once, but not in no time.
        until = time.monotonic() + 5
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.05)
        self._kill_all()
        return Ended(code, self._output(), ended_at - since, left)

    def processes(self) -> list[int]:
        """Every process, workers included, that carries the mark."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def _kill_all(self) -> None:
        for process in self.processes():
            os.kill(process, signal.SIGKILL)

    def _output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")


def _free_port() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _check(name: str, ended: Ended, *, says: str, within: float = SOON) -> None:
    line = next((line.strip() for line in reversed(ended.output.splitlines()) if says in line), "-")
    print(f"\n| {name} | {ended.seconds:.1f} s | {ended.code} | {line[:150]} |")
    assert ended.code != 0
    assert says in ended.output, ended.output[-6000:]
    assert ended.seconds < within, ended.output[-6000:]
    assert ended.left == []


@pytest.mark.parametrize(("phase", "rank"), [("training", 1), ("validation", 1), ("saving", 0)])
def test_a_process_that_raises_ends_the_job_with_its_own_traceback_last(tmp_path, phase, rank):
    job = Job(tmp_path, TORCHRUN, kind="raise", phase=phase, rank=rank)
    ended = job.ended()
    _check(job.name, ended, says=f"ZeroDivisionError: the fault in {phase} on rank {rank}")
    assert "ZeroDivisionError" in "\n".join(ended.output.splitlines()[-10:])
    report = ended.output.rpartition("Root Cause")[2]
    assert f"rank      : {rank} " in report, "the launcher blames the one that failed first"


@pytest.mark.parametrize("phase", ["training", "validation"])
def test_a_process_that_is_killed_is_named_with_the_signal(tmp_path, phase):
    job = Job(tmp_path, TORCHRUN, kind="SIGKILL", phase=phase)
    ended = job.ended()
    _check(job.name, ended, says="Signal 9 (SIGKILL)")
    assert "rank      : 1 " in ended.output.rpartition("Root Cause")[2]


@pytest.mark.parametrize(("phase", "rank"), [("training", 1), ("saving", 0)])
def test_a_process_that_stops_answering_is_named_by_the_others(tmp_path, phase, rank):
    job = Job(tmp_path, TORCHRUN, kind="SIGSTOP", phase=phase, rank=rank, watchdog=WATCHDOG)
    ended = job.ended()
    _check(job.name, ended, says="has not been heard of for", within=WATCHDOG + SOON)
    said = next(line for line in ended.output.splitlines() if "has not been heard of" in line)
    assert said.startswith(f"rank {rank} (pid")
    assert f"(last in {phase}, step " in said
    assert "its process is stopped" in said


def test_a_process_that_gets_nowhere_is_reported_with_the_place_where_it_stands(tmp_path):
    job = Job(tmp_path, TORCHRUN, kind="sleep", watchdog=WATCHDOG, workers=1)
    ended = job.ended()
    _check(f"{job.name}, watchdog {WATCHDOG} s", ended, says="no progress for", within=WATCHDOG + SOON)
    before_the_launchers_report = ended.output.partition("ChildFailedError")[0]
    assert before_the_launchers_report.count("Ending the job") == 1, "one process speaks for all"
    assert "time.sleep(600)" in ended.output, "the stack of the process that sleeps"
    assert "Where rank 0" in ended.output


def test_the_configured_timeout_is_in_force_and_says_who_did_what(tmp_path):
    job = Job(tmp_path, TORCHRUN, kind="sleep", ddp_timeout=5)
    ended = job.ended()
    _check(f"{job.name}, timeout 5 s", ended, says="Timed out waiting 5000ms", within=5 + SOON)
    assert "timeout 5 s" in ended.output, "the start-up lines show it"
    assert "rank 1 (pid" in ended.output
    assert ended.seconds >= 4


@pytest.mark.parametrize("template", [SPAWN, NOTEBOOK], ids=["spawn", "notebook"])
def test_a_process_that_raises_ends_the_job_of_other_launchers_too(tmp_path, template):
    job = Job(tmp_path, template, kind="raise")
    launcher = "mp.spawn" if template is SPAWN else "notebook_launcher"
    _check(f"{job.name}, {launcher}", job.ended(), says="ZeroDivisionError: the fault in training on rank 1")


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL], ids=lambda stop: stop.name)
def test_a_launcher_that_is_interrupted_or_killed_leaves_no_process_behind(tmp_path, stop):
    job = Job(tmp_path, TORCHRUN, kind="none", phase="never", workers=1)
    job.wait_for("runs/exp/results.csv")
    assert len(job.processes()) >= 5, "the launcher, two processes and a loader worker of each"
    at = time.time()
    if stop is signal.SIGINT:
        # Ctrl-C reaches the whole group of the terminal.
        os.killpg(job.process.pid, stop)
    else:
        job.process.send_signal(stop)
    ended = job.ended(since=at)
    _check(f"{stop.name} to the launcher", ended, says="")
