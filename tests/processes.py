"""Starts real processes on gloo, under a hard time limit: a hang is a failure, and nothing is left behind."""

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

# What a launcher around the test run may have set must not leak into the processes under test.
_LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK",
)  # fmt: skip
_LAUNCHER_PREFIXES = ("ACCELERATE_", "TORCHELASTIC_", "PYTEST_", "SLURM_", "PET_", "GLOO_", "NCCL_")


@dataclass
class Finished:
    """What a command did: its exit code and all its output, both streams joined."""

    code: int
    output: str


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment for spawned processes: one thread each, no launcher's variables, no user's accelerate file."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    return environment | extra


def run_command(command: list[str], *, timeout: float, cwd: Path | None = None, **extra: str) -> Finished:
    """Run one command in a session of its own; past `timeout` seconds everything in it is killed and the test fails."""
    process = subprocess.Popen(
        command, cwd=cwd, env=clean_environment(**extra), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill_tree(process.pid)
        output, _ = process.communicate()
        pytest.fail(f"no end after {timeout:.0f} s: {' '.join(command)}\n{output[-4000:]}", pytrace=False)
    return Finished(process.returncode, output)


def _kill_tree(root: int) -> None:
    # torchrun starts its workers in sessions of their own, so the group alone is not enough.
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(root)], capture_output=True, text=True, check=False)
    for child in children.stdout.split():
        _kill_tree(int(child))
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(root, signal.SIGKILL)
