"""What a run is about to do, in words; and the start of several processes from Python."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

from accel_yolo.config.schema import TrainConfig
from accel_yolo.engine.distributed import World, gather_payloads
from accel_yolo.engine.optim import Schedule
from accel_yolo.errors import LaunchError, rebuilt_error
from accel_yolo.version import package_version

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

# Below this many images per process, statistics of one process alone are known to cost accuracy.
SMALL_BATCH = 16


def describe_plan(
    config: TrainConfig,
    origins: Mapping[str, str],
    *,
    accelerator: Accelerator,
    world: World,
    schedule: Schedule,
) -> list[str]:
    """The start-up block: what is in force, and who set it. One collective; every process must call this."""
    devices = gather_payloads(accelerator, _device_name(accelerator))
    processes = accelerator.num_processes
    per_process = schedule.batch_size // processes
    accumulate = max(round(config.optim.nominal_batch / schedule.batch_size), 1)

    def by(name: str) -> str:
        origin = origins.get(name, "default")
        return f"({origin})"

    backend = "alone" if world.backend == "none" else f"backend {world.backend}, timeout {world.timeout_seconds:g} s"
    lines = [
        f"accel_yolo {package_version()}, torch {torch.__version__}, accelerate {version('accelerate')},"
        f" Python {platform.python_version()}",
        f"launch     {processes} process{'es' if processes > 1 else ''} by {world.launcher}, {backend}",
        "devices    " + ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(devices)),
        f"batch      {schedule.batch_size} images over all processes {by('data.batch_size')}, {per_process} per process"
        f", {accumulate} step(s) per update after warm-up (nominal {config.optim.nominal_batch})",
        f"precision  {accelerator.mixed_precision} ({world.precision_origin}), "
        + ("channels_last" if config.model.channels_last else "contiguous")
        + f" {by('model.channels_last')}",
        f"BatchNorm  {_batchnorm(config, processes)} {by('model.sync_bn')}",
        f"schedule   {config.run.epochs} epochs {by('run.epochs')} of {schedule.steps_per_epoch} steps,"
        f" warm-up {schedule.warmup_steps} steps, {config.optim.optimizer} lr0 {config.optim.lr0:g},"
        f" seed {config.run.seed} {by('run.seed')}",
    ]
    if processes > 1 and not config.model.sync_bn and per_process < SMALL_BATCH:
        lines.append(
            f"hint       {per_process} images per process are few for BatchNorm: --sync-bn makes the run equal to one"
            " process with the whole batch"
        )
    idle = torch.cuda.device_count() - processes if accelerator.device.type == "cuda" else torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if named and accelerator.device.type == "cpu" and config.run.device != "cpu" and not torch.cuda.is_available():
        lines.append(f"hint       CUDA_VISIBLE_DEVICES is {named}, but torch finds no CUDA device: this is on the CPU")
    if idle > 0 and world.backend in ("none", "nccl"):
        lines.append(f"hint       {idle} more CUDA device(s) visible: accelerate launch --multi_gpu --num_processes N")
    return lines


def start_processes(
    module: str,
    settings: Mapping[str, Any],
    *,
    num_processes: int,
    callbacks: object = None,
    environment: Mapping[str, str],
    before_removal: Callable[[Path], None] | None = None,
) -> dict[str, Any]:
    """Run `python -m module FOLDER` on several processes and return what rank 0 left in `FOLDER/result.json`.

    Settings travel as JSON. Callbacks travel as bytes of cloudpickle in the same temporary folder, which does not
    outlive this call; only processes of our own read them.

    Args:
        environment: of the processes.
        before_removal: called with the folder after success, for what else was left there.

    Raises:
        LaunchError: if a process failed for a reason that is not the user's; its traceback was printed.
        AccelYoloError: the user's error that the processes met.
    """
    with tempfile.TemporaryDirectory(prefix="accel-yolo-") as folder:
        (Path(folder) / "settings.json").write_text(json.dumps(dict(settings)))
        if callbacks is not None:
            (Path(folder) / "callbacks.pkl").write_bytes(cloudpickle.dumps(callbacks))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
        code = _run_to_the_end([*command, "-m", module, folder], environment)
        result = Path(folder) / "result.json"
        for error in sorted(Path(folder).glob("error-*.json")):
            raise rebuilt_error(json.loads(error.read_text()))
        if code or not result.exists():
            raise LaunchError(
                "a training process failed; its traceback is above.",
                found=f"exit code {code} of {num_processes} processes",
                fix="see the last lines above; the same settings with one process often show more",
            )
        if before_removal is not None:
            before_removal(Path(folder))
        return json.loads(result.read_text())


def _run_to_the_end(command: list[str], environment: Mapping[str, str]) -> int:
    with subprocess.Popen(command, env=dict(environment)) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The launcher got Ctrl-C too and is ending the processes it started. Killed now, it would leave them alive.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=60)
            process.kill()
            raise


def log_lines(lines: Sequence[str]) -> None:
    """Say each line; only the main process is heard."""
    for line in lines:
        logger.info("%s", line)


def _device_name(accelerator: Accelerator) -> str:
    device = accelerator.device
    if device.type != "cuda":
        return f"{device.type} ({torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''})"
    return f"{device} {torch.cuda.get_device_name(device)}"


def _batchnorm(config: TrainConfig, processes: int) -> str:
    if processes == 1:
        return "of the whole batch"
    if config.model.sync_bn:
        return "synchronised over all processes"
    return "per process, merged for validation and saving"
