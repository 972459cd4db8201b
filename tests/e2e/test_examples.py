"""The examples for clusters: the Slurm script runs with stand-ins for Slurm, the manifests give torchrun its flags."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import config_from_args, get_args_parser

from accel_yolo.engine.run_folder import read_results
from tests.processes import REPOSITORY, run_command

EXAMPLES = REPOSITORY / "examples"
SBATCH = EXAMPLES / "slurm" / "train.sbatch"
JOB = EXAMPLES / "kubernetes" / "job.yaml"
TRAIN_JOB = EXAMPLES / "kubernetes" / "trainjob.yaml"
TINY = "source: shapes\nnum_train: 16\nnum_val: 6\nimage_size: 64\nseed: 0\n"
FLAGS = [
    "--data", "tiny.yaml", "--cfg", "yolov5-shapes", "--imgsz", "64", "--batch-size", "8", "--epochs", "1",
    "--sync-bn", "--workers", "0", "--noplots",
]  # fmt: skip

# Slurm sets these for the batch script and for each task; of several machines the script runs on number 0.
SLURM = {
    "SLURM_JOB_ID": str(20000 + os.getpid() % 10000), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2",
    "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_CPUS_PER_TASK": "1", "SLURM_GPUS_ON_NODE": "1",
}  # fmt: skip
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames node[1-2]" ] || exit 1
echo 127.0.0.1
echo 127.0.0.2
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for task in 0 1; do
    SLURM_NODEID=$task SLURM_PROCID=$task "$@" > task$task.log 2>&1 &
    tasks[task]=$!
done
code=0
for task in 0 1; do wait ${tasks[task]} || code=$?; done
exit $code
"""
# Writes its arguments, one a line, to a file that is named after the machine.
RECORDING_TORCHRUN = """#!/bin/bash
printf '%s\\n' "$@" > "torchrun.${SLURM_NODEID:-${JOB_COMPLETION_INDEX:-$PET_NODE_RANK}}"
"""


@pytest.fixture
def cluster(tmp_path):
    """`cluster(torchrun=...)` makes the data and the stand-ins, and returns the PATH that finds them first."""

    def make(*, torchrun: str | None = None) -> dict[str, str]:
        (tmp_path / "tiny.yaml").write_text(TINY)
        commands = tmp_path / "bin"
        commands.mkdir()
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "torchrun": torchrun}.items():
            if text:
                (commands / name).write_text(text)
                (commands / name).chmod(0o755)
        return {"PATH": os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])}

    return make


def _launch_config(arguments: list[str]):
    """(what torchrun would start, the module's arguments); its own parser ends the test at an unknown flag."""
    parsed = get_args_parser().parse_args(arguments)
    config, _, _ = config_from_args(parsed)
    return config, parsed.module, [parsed.training_script, *parsed.training_script_args]


def test_the_slurm_script_is_a_valid_shell_script():
    checked = subprocess.run(["bash", "-n", str(SBATCH)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_slurm_script_gives_torchrun_one_rank_for_each_machine(tmp_path, cluster):
    variables = cluster(torchrun=RECORDING_TORCHRUN)
    finished = run_command(["bash", str(SBATCH), *FLAGS], timeout=30, cwd=tmp_path, **SLURM | variables)
    assert finished.code == 0, finished.output
    for rank in range(2):
        config, is_module, flags = _launch_config((tmp_path / f"torchrun.{rank}").read_text().splitlines())
        assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 1)
        assert config.rdzv_configs["rank"] == rank
        assert config.rdzv_endpoint.startswith("127.0.0.1:")
        assert is_module
        assert flags[:2] == ["accel_yolo", "train"]
        assert flags[-len(FLAGS) :] == FLAGS


@pytest.mark.xdist_group("machines")
def test_the_slurm_script_trains_on_two_machines_and_a_requeued_job_resumes(tmp_path, cluster):
    variables = SLURM | cluster()
    finished = run_command(["bash", str(SBATCH), *FLAGS], timeout=150, cwd=tmp_path, **variables)
    logs = [(tmp_path / f"task{rank}.log").read_text() for rank in range(2)]
    assert finished.code == 0, "\n".join([finished.output, *logs])
    assert "2 processes by torchrun, backend gloo" in logs[0]
    run = tmp_path / "runs" / "train" / f"slurm-{SLURM['SLURM_JOB_ID']}"
    assert [row["epoch"] for row in read_results(run / "results.csv")] == [0]

    again = run_command(["bash", str(SBATCH), *FLAGS, "--epochs", "2"], timeout=150, cwd=tmp_path, **variables)
    assert again.code == 0, (tmp_path / "task0.log").read_text()
    assert [row["epoch"] for row in read_results(run / "results.csv")] == [0, 1]
    assert [path.name for path in run.parent.iterdir()] == [run.name]


def test_the_indexed_job_gives_torchrun_one_rank_for_each_pod(tmp_path, cluster):
    service, job = _documents(JOB)
    container = _container(job["spec"]["template"])
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert environment["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(environment["MACHINES"])

    # `gpu` would count the GPUs of this machine.
    one_process = RECORDING_TORCHRUN.replace('"$@"', '"${@/#gpu/1}"')
    variables = environment | cluster(torchrun=one_process)
    for rank in range(2):
        arguments = _run_container(container, tmp_path, variables | {"JOB_COMPLETION_INDEX": str(rank)}, rank)
        config, is_module, flags = _launch_config(arguments)
        assert (config.min_nodes, config.nproc_per_node, config.rdzv_configs["rank"]) == (2, 1, rank)
        assert config.rdzv_endpoint == "accel-yolo-0.accel-yolo:29500"
        assert is_module
        assert flags == ["accel_yolo", "train", *_new_run("accel-yolo"), *container["args"]]


def test_the_train_job_leaves_the_machines_to_the_variables_of_kubeflow(tmp_path, cluster, monkeypatch):
    runtime, job = _documents(TRAIN_JOB)
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    trainer = job["spec"]["trainer"]
    environment = {entry["name"]: entry["value"] for entry in trainer["env"]}
    pet = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1"}
    pet |= {"PET_MASTER_ADDR": "accel-yolo-node-0-0.accel-yolo", "PET_MASTER_PORT": "29400"}
    variables = environment | pet | cluster(torchrun=RECORDING_TORCHRUN)
    arguments = _run_container(trainer, tmp_path, variables, 1)
    for name, value in pet.items():
        monkeypatch.setenv(name, value)
    config, is_module, flags = _launch_config(arguments)
    assert (config.min_nodes, config.nproc_per_node, config.rdzv_configs["rank"]) == (2, 4, 1)
    assert config.rdzv_endpoint == "accel-yolo-node-0-0.accel-yolo:29400"
    assert is_module
    assert flags == ["accel_yolo", "train", *_new_run("accel-yolo"), *trainer["args"]]


@pytest.mark.parametrize("manifest", [JOB, TRAIN_JOB], ids=lambda path: path.stem)
def test_a_pod_that_is_started_anew_resumes(tmp_path, cluster, manifest):
    last = _documents(manifest)[-1]["spec"]
    container = last["trainer"] if "trainer" in last else _container(last["template"])
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    (tmp_path / "runs" / "train" / environment["RUN"] / "checkpoints").mkdir(parents=True)
    variables = environment | {"JOB_COMPLETION_INDEX": "0", "PET_NODE_RANK": "0"}
    arguments = _run_container(container, tmp_path, variables | cluster(torchrun=RECORDING_TORCHRUN), 0)
    started = arguments[arguments.index("train") + 1 :]
    assert started == ["--resume", f"runs/train/{environment['RUN']}", *container["args"]]


def test_every_pod_has_the_shared_memory_that_loaders_need():
    runtime = _documents(TRAIN_JOB)[0]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    for pods in (_documents(JOB)[1]["spec"]["template"], runtime["template"]):
        mounts = {mount["mountPath"]: mount["name"] for mount in _container(pods)["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pods["spec"]["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert set(mounts.values()) == set(volumes)


def _documents(manifest: Path) -> list[dict]:
    return list(yaml.safe_load_all(manifest.read_text(encoding="utf-8")))


def _container(pods: dict) -> dict:
    (container,) = pods["spec"]["containers"]
    return container


def _new_run(name: str) -> list[str]:
    return ["--project", "runs/train", "--name", name, "--exist-ok"]


def _run_container(container: dict, folder: Path, variables: dict[str, str], rank: int) -> list[str]:
    """What the container's command hands to torchrun."""
    command = [shutil.which(container["command"][0]), *container["command"][1:], *container["args"]]
    finished = run_command(command, timeout=30, cwd=folder, **variables)
    assert finished.code == 0, finished.output
    return (folder / f"torchrun.{rank}").read_text().splitlines()
