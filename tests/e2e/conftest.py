"""Runs the program as a person does: a subprocess, an exit code, and what it wrote."""

import sys
from pathlib import Path

import pytest

from tests.processes import REPOSITORY, Finished, run_command

TINY = "source: shapes\nnum_train: 16\nnum_val: 6\nimage_size: 64\nseed: 0\n"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A data YAML of 16 + 6 small shapes images."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture
def train(tmp_path: Path):
    """`train(*flags)`: `python train.py` in an empty folder."""

    def run(*flags: str, timeout: float = 200, **extra: str) -> Finished:
        return run_command(
            [sys.executable, str(REPOSITORY / "train.py"), *flags], timeout=timeout, cwd=tmp_path, **extra
        )

    return run
