"""`spawn`: a script on several real processes."""

import sys

import pytest

from tests.processes import run_command


@pytest.fixture
def spawn(tmp_path):
    """`spawn(code, processes)`: run a script under torchrun; a non-zero exit fails the test with the output."""

    def start(code: str, processes: int, *, timeout: float = 120, **extra: str) -> str:
        script = tmp_path / "script.py"
        script.write_text(code)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        finished = run_command([*command, str(script)], timeout=timeout, cwd=tmp_path, **extra)
        assert finished.code == 0, finished.output[-6000:]
        return finished.output

    return start
