"""Every launcher starts what was asked for and trains the same run, or says what does work; each under a time limit."""

import argparse
import socket
import sys

import pytest
import yaml
from accelerate.commands.config.config import config_command
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.menu.selection_menu import BulletMenu

from tests.processes import REPOSITORY, run_command

# In one worker, one after the other, so that each launcher's losses are compared with the first one's.
pytestmark = pytest.mark.xdist_group("launchers")

TINY = "source: shapes\nnum_train: 16\nnum_val: 6\nimage_size: 64\nseed: 0\n"
FLAGS = [
    "--data", "tiny.yaml", "--cfg", "yolov5-shapes", "--imgsz", "64", "--batch-size", "8", "--epochs", "1",
    "--sync-bn", "--workers", "0", "--noplots", "--project", "runs", "--name", "exp",
]  # fmt: skip
TRAIN = str(REPOSITORY / "train.py")
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LIMIT = 150


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


def _check(folder, finished, launcher, *, processes="2 processes", backend="backend gloo"):
    assert finished.code == 0, finished.output[-6000:]
    assert f"{processes} by {launcher}, {backend}" in finished.output
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


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


# `accelerate launch` ---------------------------------------------------------------------------------------------


def test_accelerate_launch_with_flags_trains_on_two_processes(folder, expected_losses):
    command = [*ACCELERATE, "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    finished = run_command([*command, TRAIN, *FLAGS], timeout=LIMIT, cwd=folder)
    _agree(expected_losses, _check(folder, finished, "accelerate launch"))


def test_accelerate_launch_with_our_two_process_cpu_file_trains_on_two_processes(folder, expected_losses):
    file = REPOSITORY / "configs" / "accelerate" / "cpu_2_processes.yaml"
    command = [*ACCELERATE, "--config_file", str(file), "--main_process_port", "0"]
    finished = run_command([*command, TRAIN, *FLAGS], timeout=LIMIT, cwd=folder)
    _agree(expected_losses, _check(folder, finished, "accelerate launch"))


def test_accelerate_launch_with_the_repositorys_accelerate_config_trains_on_one_process(folder, expected_losses):
    command = [*ACCELERATE, "--config_file", str(REPOSITORY / "accelerate_config.yaml")]
    finished = run_command([*command, TRAIN, *FLAGS], timeout=LIMIT, cwd=folder)
    _agree(expected_losses, _check(folder, finished, "accelerate launch", processes="1 process", backend="alone"))


def test_cpu_flag_of_accelerate_launch_that_starts_one_process_is_refused_with_the_line_that_works(folder):
    finished = run_command([*ACCELERATE, "--cpu", "--num_processes", "2", TRAIN, *FLAGS], timeout=LIMIT, cwd=folder)
    assert finished.code != 0
    assert "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2" in finished.output
    assert not (folder / "runs").exists()


# `accelerate launch` with files of the wizard ----------------------------------------------------------------------

# Machine type, and what else is not answered by Enter: a piece of each question -> the answer.
WIZARD = {
    "cpu": {"type of machine": "No distributed training", "on CPU only": "yes"},
    "gpu_1": {"type of machine": "No distributed training", "What GPU(s) (by id)": "0"},
    "multi_cpu": {"type of machine": "multi-CPU", "How many processes": "2"},
    "gpu_2": {"type of machine": "multi-GPU", "How many GPU(s)": "2"},
    "gpu_2_by_id": {"type of machine": "multi-GPU", "How many GPU(s)": "2", "What GPU(s) (by id)": "0,1"},
    "gpu_4": {"type of machine": "multi-GPU", "How many GPU(s)": "4"},
    "two_nodes": {
        "type of machine": "multi-GPU", "different machines": "2", "IP address": "10.0.0.1",
        "What is the port": "29500", "How many GPU(s)": "8",
    },
}  # fmt: skip


@pytest.fixture
def wizard(folder, monkeypatch):
    """`wizard(name)`: the file that `accelerate config` itself writes for the answers of that name."""

    def write(name):
        answers = dict(WIZARD[name])

        def answer(question):
            # Each once: the wizard asks again and again where it does not understand.
            return next((answers.pop(piece) for piece in list(answers) if piece in question), None)

        def choose(menu, default_choice=0):
            choice = answer(menu.prompt)
            return default_choice if choice is None else menu.choices.index(choice)

        monkeypatch.setattr(BulletMenu, "run", choose)
        monkeypatch.setattr("builtins.input", lambda question="": answer(question) or "")
        path = folder / "wizard.yaml"
        config_command(argparse.Namespace(config_file=str(path)))
        assert not answers, "a question of the wizard has changed its words"
        return path

    return write


def _launch_file(folder, file, *flags, **extra):
    # A free port only where there is one to choose: the flag would make the one-process launcher think of several.
    ports = ["--main_process_port", "0"] if load_config_from_file(str(file)).num_processes > 1 else []
    command = [*ACCELERATE, "--config_file", str(file), *ports, TRAIN, *FLAGS, *flags]
    return run_command(command, timeout=LIMIT, cwd=folder, **extra)


def test_the_wizards_file_for_no_distributed_training_on_the_cpu_trains_on_one_process(folder, wizard, expected_losses):
    finished = _launch_file(folder, wizard("cpu"))
    _agree(expected_losses, _check(folder, finished, "accelerate launch", processes="1 process", backend="alone"))


def test_the_wizards_file_for_one_gpu_trains_on_the_cpu_and_says_so_where_there_is_none(
    folder, wizard, expected_losses
):
    finished = _launch_file(folder, wizard("gpu_1"))
    _agree(expected_losses, _check(folder, finished, "accelerate launch", processes="1 process", backend="alone"))
    assert "rank 0: cpu" in finished.output
    assert "CUDA_VISIBLE_DEVICES is 0, but torch finds no CUDA device" in finished.output


def test_the_wizards_multi_cpu_file_without_mpirun_is_refused_with_the_line_that_works(folder, wizard):
    finished = _launch_file(folder, wizard("multi_cpu"))
    assert finished.code != 0
    assert "several CPU processes were asked for, but the launcher started only one" in finished.output
    assert "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2" in finished.output
    assert not (folder / "runs").exists()


def test_the_wizards_multi_gpu_file_trains_on_as_many_cpu_processes_and_says_so_where_there_is_no_gpu(
    folder, wizard, expected_losses
):
    finished = _launch_file(folder, wizard("gpu_2_by_id"))
    _agree(expected_losses, _check(folder, finished, "accelerate launch"))
    assert "rank 0: cpu (1 thread), rank 1: cpu (1 thread)" in finished.output
    assert "CUDA_VISIBLE_DEVICES is 0,1, but torch finds no CUDA device" in finished.output


def test_the_wizards_multi_gpu_file_with_device_ids_is_refused_where_there_is_no_gpu(folder, wizard):
    finished = _launch_file(folder, wizard("gpu_2"), "--device", "0,1")
    assert finished.code != 0
    assert "insufficient CUDA devices for this launch" in finished.output
    assert "0 CUDA device(s); 2 process(es) on this machine" in finished.output
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("name", ["cpu", "gpu_1", "gpu_4", "two_nodes"])
def test_our_accelerate_file_is_the_one_that_the_wizard_writes(wizard, name):
    ours = REPOSITORY / "configs" / "accelerate" / f"{name}.yaml"
    assert yaml.safe_load(ours.read_text()) == yaml.safe_load(wizard(name).read_text())


def test_the_wizards_multi_node_file_loads_with_its_machines_and_its_total_of_processes(wizard):
    config = load_config_from_file(str(wizard("two_nodes")))
    assert (config.num_machines, config.num_processes, config.machine_rank) == (2, 8, 0)
    assert (config.main_process_ip, config.main_process_port) == ("10.0.0.1", 29500)


# torchrun ----------------------------------------------------------------------------------------------------------


def test_torchrun_standalone_trains_on_two_processes_and_local_rank_flags_are_accepted(folder, expected_losses):
    command = [*TORCHRUN, "--standalone", "--nproc_per_node", "2"]
    finished = run_command([*command, TRAIN, *FLAGS, "--local-rank", "0"], timeout=LIMIT, cwd=folder)
    _agree(expected_losses, _check(folder, finished, "torchrun"))


# torch.multiprocessing.spawn ---------------------------------------------------------------------------------------

# The listing that people copy, word for word but for its import of `select_device`, which is ours, and for what a
# machine without GPUs needs: gloo, and a number of processes. The lines after `main(opt)` are the test's.
LISTING = """
import os
import torch
import torch.distributed as dist
from train import parse_opt, main
from accel_yolo import select_device

def worker(local_rank, world_size):
    os.environ['LOCAL_RANK'] = str(local_rank)
    os.environ['RANK'] = str(local_rank)
    os.environ['WORLD_SIZE'] = str(world_size)

    dist.init_process_group(
        backend='gloo',
        init_method='env://'
    )

    opt = parse_opt()
    opt.device = f'{local_rank}'
    opt.batch_size = 64
    opt.sync_bn = True

    main(opt)

    assert select_device(opt.device).type == 'cpu'
    assert dist.is_initialized(), "the caller's group is left to the caller"
    dist.barrier()
    dist.destroy_process_group()

if __name__ == '__main__':
    world_size = 2
    torch.multiprocessing.spawn(worker, args=(world_size,), nprocs=world_size, join=True)
"""


def test_the_spawn_listing_with_a_group_of_its_own_and_edited_options_trains_on_two_processes(folder):
    (folder / "listing.py").write_text(LISTING)
    flags = [flag for flag in FLAGS if flag != "--sync-bn"]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    finished = run_command([sys.executable, "listing.py", *flags], timeout=LIMIT, cwd=folder, **meeting)
    _check(folder, finished, "the caller's process group")
    assert "64 images over all processes" in finished.output
    assert "synchronised over all processes" in finished.output


SPAWN = """
import os
import torch.multiprocessing as mp
from train import parse_opt, main

def worker(rank, world_size):
    os.environ['RANK'], os.environ['WORLD_SIZE'] = str(rank), str(world_size)
    opt = parse_opt()
    opt.device = 'cpu'
    main(opt)

if __name__ == '__main__':
    os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'] = '127.0.0.1', {port!r}
    mp.spawn(worker, args=(2,), nprocs=2, join=True)
"""


def test_spawn_with_hand_set_ranks_and_no_group_trains_on_two_processes(folder, expected_losses):
    (folder / "spawn.py").write_text(SPAWN.format(port=_free_port()))
    finished = run_command([sys.executable, "spawn.py", *FLAGS], timeout=LIMIT, cwd=folder)
    _agree(expected_losses, _check(folder, finished, "RANK and WORLD_SIZE in the environment"))


# From Python -------------------------------------------------------------------------------------------------------


NOTEBOOK = """
from accelerate import notebook_launcher
from train import parse_opt, main

opt = parse_opt({flags!r})
opt.device = 'cpu'
notebook_launcher(main, (opt,), num_processes=2, use_port={port!r})
print("the cell went on")
"""


def test_notebook_launcher_trains_on_two_processes(folder, expected_losses):
    code = NOTEBOOK.format(flags=FLAGS, port=_free_port())
    (folder / "cell.py").write_text(code)
    finished = run_command([sys.executable, "cell.py"], timeout=LIMIT, cwd=folder)
    assert "the cell went on" in finished.output
    _agree(expected_losses, _check(folder, finished, "torchrun"))


RUN = """
import os
from pathlib import Path
from accel_yolo.engine.callbacks import Callbacks, main_only
from accel_yolo.errors import DataError
from train import run

def note(name):
    with open(name, 'a') as file:
        file.write(os.environ['RANK'])

class Notes(Callbacks):
    def on_epoch_end(self, *, values, state):
        note('epoch_end')

    @main_only
    def on_train_end(self, *, save_dir, state):
        note('train_end')

settings = dict(cfg='yolov5-shapes', imgsz=64, batch_size=8, epochs=1, sync_bn=True, workers=0, noplots=True,
                project='runs', name='exp', exist_ok=True, device='cpu', num_processes=2)
before = dict(os.environ)
for callbacks in (Notes(), None):
    result = run(data='tiny.yaml', callbacks=callbacks, **settings)
assert result.save_dir == Path('runs/exp'), result
assert result.last.exists() and result.best.exists()
assert 0 <= result.metrics['metrics/mAP_0.5'] <= 1
try:
    run(data='empty.yaml', **settings)
except DataError as error:
    print('raised:', error.what)
assert dict(os.environ) == before
"""


@pytest.fixture(scope="module")
def python_api(tmp_path_factory):
    """One script without a main guard: a run with callbacks, one without, and one with a user's error."""
    folder = tmp_path_factory.mktemp("python_api")
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "images").mkdir()
    (folder / "empty.yaml").write_text(f"path: {folder}\ntrain: images\nval: images\nnames: [thing]\n")
    (folder / "script.py").write_text(RUN)
    return folder, run_command([sys.executable, "script.py"], timeout=240, cwd=folder)


def test_run_starts_two_processes_without_a_main_guard_twice_and_returns_metrics_and_paths(python_api, expected_losses):
    folder, finished = python_api
    assert finished.code == 0, finished.output[-6000:]
    assert finished.output.count("2 processes by torchrun") == 2
    _agree(expected_losses, (folder / "runs" / "exp" / "results.csv").read_text().splitlines()[1].split(",")[1:4])


def test_callbacks_defined_in_the_script_run_on_every_rank_and_main_only_ones_on_the_first(python_api):
    folder, _ = python_api
    assert sorted((folder / "epoch_end").read_text()) == ["0", "1"]
    assert (folder / "train_end").read_text() == "0"


def test_a_users_error_in_a_started_process_is_raised_as_its_own_class(python_api):
    _, finished = python_api
    assert "raised: there is no image to train on." in finished.output


EDITED = """
from train import parse_opt, main

opt = parse_opt()
opt.batch_size = 64
opt.sync_bn = True
main(opt)
"""


def test_edited_fields_of_parse_opt_are_honoured_by_main(folder):
    (folder / "script.py").write_text(EDITED)
    flags = [flag for flag in FLAGS if flag != "--sync-bn"]
    finished = run_command([sys.executable, "script.py", *flags], timeout=LIMIT, cwd=folder)
    _check(folder, finished, "plain python", processes="1 process", backend="alone")
    config = yaml.safe_load((folder / "runs" / "exp" / "config.yaml").read_text())
    assert config["data"]["batch_size"] == 64
    assert config["model"]["sync_bn"] is True
