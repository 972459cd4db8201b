"""Two machines train one run: as two launches on loopback, and as two hosts in network namespaces of their own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from accel_yolo.engine.run_folder import read_results
from tests.processes import REPOSITORY, run_command

pytestmark = pytest.mark.xdist_group("machines")

FLAGS = [
    "--cfg", "yolov5-shapes", "--imgsz", "64", "--batch-size", "8", "--sync-bn", "--workers", "0", "--noplots",
    "--project", "runs", "--name", "exp",
]  # fmt: skip
TRAIN = str(REPOSITORY / "train.py")
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
TWO_NODES = str(REPOSITORY / "configs" / "accelerate" / "two_nodes.yaml")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LIMIT = 150
DDP_TIMEOUT = 20
# Beyond --ddp-timeout: the traceback, the launcher's own end, and a busy test machine.
SECONDS_TO_END = DDP_TIMEOUT + 40


@pytest.fixture(scope="module")
def losses_of_one_process(tmp_path_factory):
    """The losses of the epoch that every launch of several machines must reach too."""
    folder = _folder(tmp_path_factory.mktemp("one"), num_train=16)
    command = [sys.executable, TRAIN, "--data", "tiny.yaml", "--epochs", "1", "--device", "cpu", *FLAGS]
    finished = run_command(command, timeout=LIMIT, cwd=folder)
    assert finished.code == 0, finished.output[-4000:]
    return _losses(folder)


# Says who it is, then is train.py.
WORKER = """
import os, sys
sys.path.insert(0, {repository!r})
from train import main, parse_opt
print(*("%s=%s" % (name, os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")), flush=True)
main(parse_opt())
"""


def test_two_accelerate_launches_train_as_one_process_does_and_only_machine_0_writes(tmp_path, losses_of_one_process):
    folders = [_folder(tmp_path / name, num_train=16) for name in ("first", "second")]
    (tmp_path / "worker.py").write_text(WORKER.format(repository=str(REPOSITORY)))
    machines = ["--multi_gpu", "--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1"]
    machines += ["--main_process_port", _free_port()]
    worker = [str(tmp_path / "worker.py"), "--data", "tiny.yaml", "--epochs", "1", *FLAGS]
    commands = [[*ACCELERATE, *machines, "--machine_rank", str(rank), *worker] for rank in range(2)]
    finished = _together(commands, folders, ACCELERATE_USE_CPU="true")
    for rank, one in enumerate(finished):
        assert one.code == 0, one.output[-4000:]
        assert f"RANK={rank} LOCAL_RANK=0 LOCAL_WORLD_SIZE=1" in one.output
    assert "2 processes by accelerate launch, backend gloo" in finished[0].output
    assert "epoch 1/1" not in finished[1].output, "the second machine is silent"
    assert not (folders[1] / "runs").exists(), "the second machine writes no run"
    assert _losses(folders[0]) == pytest.approx(losses_of_one_process, rel=1e-4)


def test_two_torchruns_that_meet_by_c10d_train_as_one_process_does(tmp_path, losses_of_one_process):
    folders = [_folder(tmp_path / name, num_train=16) for name in ("first", "second")]
    meeting = ["--nnodes", "2", "--nproc-per-node", "1", "--local-addr", "127.0.0.1"]
    meeting += ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"127.0.0.1:{_free_port()}"]
    command = [*TORCHRUN, *meeting, TRAIN, "--data", "tiny.yaml", "--epochs", "1", *FLAGS]
    finished = _together([command, command], folders)
    assert [one.code for one in finished] == [0, 0], finished[0].output[-4000:] + finished[1].output[-4000:]
    # By this rendezvous either machine may become the first.
    written = [folder for folder in folders if (folder / "runs").exists()]
    assert len(written) == 1, "one machine writes the run"
    assert _losses(written[0]) == pytest.approx(losses_of_one_process, rel=1e-4)


@dataclass(frozen=True)
class Host:
    """A network namespace that plays a machine: its own name, address and interfaces, the same files."""

    namespace: str
    name: str
    address: str

    def command(self, command: list[str]) -> list[str]:
        """`command` as it is run on this host."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name, *command]
        return ["ip", "netns", "exec", self.namespace, *named]

    def link(self, state: str) -> None:
        """Plug the cable in ("up") or out ("down")."""
        subprocess.run(["ip", "-n", self.namespace, "link", "set", INTERFACE, state], check=True)

    def processes(self) -> list[int]:
        """The ids of everything that runs on this host."""
        pids = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        return [int(pid) for pid in pids.stdout.split()]

    def kill(self) -> None:
        """End everything that runs on this host at once."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


INTERFACE = "cable"


@pytest.fixture
def hosts():
    """Two hosts with one cable between them; gone after the test."""
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "unshare", "hostname")):
        pytest.skip("needs root, iproute2, unshare and hostname to make network namespaces")
    pair = [Host(f"accel-yolo-{os.getpid()}-{place}", f"host-{place}", f"10.231.0.{place + 1}") for place in range(2)]
    try:
        _connect(pair)
        yield pair
    finally:
        for host in pair:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)


def test_two_hosts_train_as_one_process_does(tmp_path, hosts, losses_of_one_process):
    folders = [_folder(tmp_path / host.name, num_train=16) for host in hosts]
    finished = _together(_launches(hosts, "--data", "tiny.yaml", "--epochs", "1"), folders, **ON_HOSTS)
    assert [one.code for one in finished] == [0, 0], finished[0].output[-4000:] + finished[1].output[-4000:]
    assert not (folders[1] / "runs").exists()
    assert _losses(folders[0]) == pytest.approx(losses_of_one_process, rel=1e-4)


@pytest.mark.parametrize("fate", ["cut off", "killed"])
def test_both_launches_end_when_a_host_is_lost_in_mid_epoch_and_a_relaunch_goes_on(tmp_path, hosts, fate):
    folder = _folder(tmp_path, num_train=64)
    flags = ["--data", "tiny.yaml", "--epochs", "200", "--patience", "0", "--noval"]
    with ThreadPoolExecutor() as pool:
        running = _start(pool, _launches(hosts, *flags), [folder, folder], **ON_HOSTS)
        _wait_for_epoch(folder, running)
        lost_at = time.monotonic()
        if fate == "cut off":
            hosts[1].link("down")
        else:
            hosts[1].kill()
        finished = [one.result() for one in running]
    seconds = time.monotonic() - lost_at
    print(f"host-1 {fate}: both launches ended after {seconds:.0f} s with {[one.code for one in finished]}")
    print("\n".join(finished[0].output.splitlines()[-12:]))
    assert seconds < (SECONDS_TO_END if fate == "cut off" else SECONDS_TO_END - DDP_TIMEOUT)
    assert all(one.code != 0 for one in finished)
    assert [host.processes() for host in hosts] == [[], []], "nothing is left behind"

    hosts[1].link("up")
    done = len(_rows(folder))
    assert 1 <= done < 200
    again = _launches(hosts, *flags, "--resume", "runs/exp", "--epochs", str(done + 1))
    resumed = _together(again, [folder, folder], **ON_HOSTS)
    assert [one.code for one in resumed] == [0, 0], resumed[0].output[-4000:]
    assert [row["epoch"] for row in _rows(folder)] == list(range(done + 1))


# Namespaces have no name server: a host must not look for its address by its name.
ON_HOSTS = {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": INTERFACE}


def _launches(hosts: list[Host], *flags: str) -> list[list[str]]:
    machines = ["--config_file", TWO_NODES, "--num_processes", "2", "--main_process_ip", hosts[0].address]
    worker = [TRAIN, *FLAGS, "--ddp-timeout", str(DDP_TIMEOUT), *flags]
    return [
        host.command([*ACCELERATE, *machines, "--machine_rank", str(rank), *worker]) for rank, host in enumerate(hosts)
    ]


def _connect(pair: list[Host]) -> None:
    for host in pair:
        made = subprocess.run(["ip", "netns", "add", host.namespace], capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"this machine makes no network namespaces: {made.stderr.strip()}")
    first, second = pair
    ends = ["netns", first.namespace, "type", "veth", "peer", "name", INTERFACE, "netns", second.namespace]
    subprocess.run(["ip", "link", "add", INTERFACE, *ends], check=True)
    for host in pair:
        subprocess.run(["ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE], check=True)
        subprocess.run(["ip", "-n", host.namespace, "link", "set", "lo", "up"], check=True)
        host.link("up")


def _together(commands: list[list[str]], folders: list[Path], **extra: str):
    with ThreadPoolExecutor() as pool:
        return [one.result() for one in _start(pool, commands, folders, **extra)]


def _start(pool: ThreadPoolExecutor, commands: list[list[str]], folders: list[Path], **extra: str) -> list[Future]:
    return [
        pool.submit(run_command, command, timeout=LIMIT, cwd=folder, **extra)
        for command, folder in zip(commands, folders, strict=True)
    ]


def _wait_for_epoch(folder: Path, running: list[Future]) -> None:
    """Until one epoch is saved and the next is under way, or a launch has ended."""
    while not any(one.done() for one in running) and not (folder / "runs/exp/checkpoints/last.json").exists():
        time.sleep(0.1)
    time.sleep(0.5)


def _folder(folder: Path, *, num_train: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tiny.yaml").write_text(f"source: shapes\nnum_train: {num_train}\nnum_val: 6\nimage_size: 64\nseed: 0\n")
    return folder


def _rows(folder: Path) -> list[dict]:
    return read_results(folder / "runs" / "exp" / "results.csv")


def _losses(folder: Path) -> list[float]:
    (row,) = _rows(folder)
    return [row[f"train/{name}_loss"] for name in ("box", "obj", "cls")]


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
