"""Two CPU processes by every launcher train the same run, and only the main process writes."""

import sys

import pytest

from tests.processes import REPOSITORY, run_command

# In one worker, one after the other, so that each launcher's losses are compared with the first one's.
pytestmark = pytest.mark.xdist_group("launchers")

TINY = "source: shapes\nnum_train: 16\nnum_val: 6\nimage_size: 64\nseed: 0\n"
FLAGS = [
    "--data", "tiny.yaml", "--cfg", "yolov5-shapes", "--imgsz", "64", "--batch-size", "8", "--epochs", "1",
    "--sync-bn", "--workers", "0", "--noplots", "--project", "runs", "--name", "exp",
]  # fmt: skip
TRAIN = str(REPOSITORY / "train.py")
LIMIT = 150


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


def _check(folder, finished, launcher):
    assert finished.code == 0, finished.output[-6000:]
    assert f"2 processes by {launcher}, backend gloo" in finished.output
    assert finished.output.count("epoch 1/1") == 1, "only the main process speaks"
    runs = [path.name for path in (folder / "runs").iterdir()]
    assert runs == ["exp"], "only the main process makes the run folder"
    rows = (folder / "runs" / "exp" / "results.csv").read_text().splitlines()
    assert len(rows) == 2
    return rows[1].split(",")[1:4]


@pytest.fixture(scope="module")
def expected_losses():
    """The first launcher's epoch losses; the other launchers must give the same text."""
    return []


def _agree(expected_losses, losses):
    expected_losses.append(losses)
    assert losses == expected_losses[0]


def test_accelerate_launch_trains_on_two_processes(folder, expected_losses):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    finished = run_command([*command, "--main_process_port", "0", TRAIN, *FLAGS], timeout=LIMIT, cwd=folder)
    _agree(expected_losses, _check(folder, finished, "accelerate launch"))


def test_accelerate_launch_with_our_two_process_cpu_file_trains_on_two_processes(folder, expected_losses):
    file = REPOSITORY / "configs" / "accelerate" / "cpu_2_processes.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    finished = run_command([*command, "--main_process_port", "0", TRAIN, *FLAGS], timeout=LIMIT, cwd=folder)
    _agree(expected_losses, _check(folder, finished, "accelerate launch"))


def test_torchrun_trains_on_two_processes_and_local_rank_flags_are_accepted(folder, expected_losses):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    finished = run_command([*command, TRAIN, *FLAGS, "--local-rank", "0"], timeout=LIMIT, cwd=folder)
    _agree(expected_losses, _check(folder, finished, "torchrun"))


SPAWN = """
import os, sys
import torch.distributed as dist
import torch.multiprocessing as mp
sys.path.insert(0, {repository!r})
from train import parse_opt, main
from accel_yolo import select_device

def worker(local_rank, world_size):
    os.environ['LOCAL_RANK'] = str(local_rank)
    os.environ['RANK'] = str(local_rank)
    os.environ['WORLD_SIZE'] = str(world_size)
    if {has_group}:
        dist.init_process_group(backend='gloo', init_method='env://')
        opt = parse_opt()
        opt.device = f'{{local_rank}}'
        assert select_device(opt.device).type == 'cpu'
    else:
        opt = parse_opt()
        opt.device = 'cpu'
    opt.batch_size = 8
    opt.sync_bn = True
    main(opt)
    if {has_group}:
        assert dist.is_initialized(), "the caller's group is left to the caller"
        dist.barrier()
        dist.destroy_process_group()

if __name__ == '__main__':
    os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'] = '127.0.0.1', {port!r}
    mp.spawn(worker, args=(2,), nprocs=2, join=True)
"""


def _free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize("has_group", [True, False])
def test_spawn_with_hand_set_ranks_trains_on_two_processes(folder, expected_losses, has_group):
    code = SPAWN.format(repository=str(REPOSITORY), has_group=has_group, port=_free_port())
    (folder / "spawn.py").write_text(code)
    flags = [flag for flag in FLAGS if flag != "--sync-bn"]
    flags[flags.index("--batch-size") + 1] = "4"
    finished = run_command([sys.executable, "spawn.py", *flags], timeout=LIMIT, cwd=folder)
    launcher = "the caller's process group" if has_group else "RANK and WORLD_SIZE in the environment"
    _agree(expected_losses, _check(folder, finished, launcher))


NOTEBOOK = """
import sys
sys.path.insert(0, {repository!r})
from accelerate import notebook_launcher
from train import parse_opt, main

opt = parse_opt({flags!r})
opt.device = 'cpu'
notebook_launcher(main, (opt,), num_processes=2, use_port={port!r})
print("the cell went on")
"""


def test_notebook_launcher_trains_on_two_processes(folder, expected_losses):
    code = NOTEBOOK.format(repository=str(REPOSITORY), flags=FLAGS, port=_free_port())
    (folder / "cell.py").write_text(code)
    finished = run_command([sys.executable, "cell.py"], timeout=LIMIT, cwd=folder)
    assert "the cell went on" in finished.output
    _agree(expected_losses, _check(folder, finished, "torchrun"))


RUN = """
import os, sys
sys.path.insert(0, {repository!r})
from train import run

before = dict(os.environ)
for _ in range(2):
    result = run(data='tiny.yaml', cfg='yolov5-shapes', imgsz=64, batch_size=8, epochs=1, sync_bn=True, workers=0,
                 noplots=True, project='runs', name='exp', exist_ok=True, device='cpu', num_processes=2)
assert dict(os.environ) == before
assert result.last.exists() and 0 <= result.metrics['metrics/mAP_0.5'] <= 1
print('returned', result.save_dir)
"""


def test_run_from_python_starts_two_processes_without_a_main_guard_twice(folder, expected_losses):
    (folder / "script.py").write_text(RUN.format(repository=str(REPOSITORY)))
    finished = run_command([sys.executable, "script.py"], timeout=2 * LIMIT, cwd=folder)
    assert finished.code == 0, finished.output[-6000:]
    assert "returned runs" in finished.output
    assert finished.output.count("2 processes by torchrun") == 2
    _agree(expected_losses, (folder / "runs" / "exp" / "results.csv").read_text().splitlines()[1].split(",")[1:4])


def test_cpu_flag_of_accelerate_launch_that_starts_one_process_is_refused_with_the_line_that_works(folder):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", TRAIN, *FLAGS]
    finished = run_command(command, timeout=LIMIT, cwd=folder)
    assert finished.code != 0
    assert "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2" in finished.output
    assert not (folder / "runs").exists()
