"""Makes the Accelerator, and holds the few things that processes say to each other.

Nothing else in the package creates process groups, reads launcher variables or calls a collective.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import pickle
import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
)
from torch import Tensor, nn

from accel_yolo.engine.syncbn import convert_sync_batchnorm
from accel_yolo.errors import AccelYoloError, ConfigError, LaunchError, error_fields, rebuilt_error

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DONE = "done"
_calls = itertools.count()
_TRUE = ("1", "t", "true", "y", "yes", "on")

# What an `accelerate config` file may ask for and this trainer cannot do, with the reason.
_REFUSED_PLUGINS = {
    "ACCELERATE_USE_FSDP": ("FSDP", "the EMA and the checkpoints need whole weights on every process"),
    "ACCELERATE_USE_DEEPSPEED": (
        "DeepSpeed",
        "it owns optimiser, accumulation and clipping, which YOLOv5 defines",
    ),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM", "it is made for language models"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("tensor or context parallelism", "a detector has nothing to split that way"),
}


@dataclass(frozen=True, slots=True)
class World:
    """What was made of the launch, beyond what the Accelerator itself tells.

    Args:
        launcher: how the processes were started, in words.
        backend: "nccl", "gloo" or "none".
        owns_group: False if the caller had made the process group; then it is left alone at the end.
        side_group: a second process group for collectives that run while DDP reduces gradients; None if alone.
        timeout_seconds: after which a collective that a process does not reach fails.
        precision_origin: who set the precision, in words.
    """

    launcher: str
    backend: str
    owns_group: bool
    side_group: Any
    timeout_seconds: float
    precision_origin: str


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """A parsed `--device`: "auto", "cpu", "mps" or "cuda" with the ids that were named."""

    kind: str
    ids: tuple[int, ...] = ()


def parse_device(device: str | int | Sequence[int] | None) -> DeviceRequest:
    """Read `''`, `'cpu'`, `'mps'`, `0`, `'0,1'`, `[0, 1]`, `' 2 , 3 '` or `'cuda:0'`.

    Raises:
        ConfigError: if it is none of these, or names an id twice.
    """
    if isinstance(device, (list, tuple)):
        device = ",".join(str(item) for item in device)
    text = "" if device is None else str(device).strip().lower()
    if text in ("", "cpu", "mps"):
        return DeviceRequest(text or "auto")
    parts = [part.strip().removeprefix("cuda:") for part in text.split(",")]
    if text == "cuda":
        return DeviceRequest("cuda", (0,))
    if not all(re.fullmatch(r"[0-9]+", part) for part in parts):
        raise ConfigError(
            "--device cannot be read.",
            found=f"--device {device}",
            fix="give cpu, mps, one id such as 0, or ids with commas such as 0,1",
        )
    ids = tuple(int(part) for part in parts)
    if len(set(ids)) != len(ids):
        raise ConfigError("--device names a device twice.", found=f"--device {device}", fix="name each id once")
    return DeviceRequest("cuda", ids)


def launched_processes(environment: Mapping[str, str] = os.environ) -> tuple[int, int, int, int]:
    """(rank, local rank, processes, processes on this machine) as the launcher or an existing group says."""
    if dist.is_available() and dist.is_initialized():
        world, rank = dist.get_world_size(), dist.get_rank()
    else:
        world, rank = int(environment.get("WORLD_SIZE", "1")), int(environment.get("RANK", "0"))
    local_world = int(environment.get("LOCAL_WORLD_SIZE", str(world)))
    local_rank = int(environment.get("LOCAL_RANK", str(rank % max(local_world, 1))))
    return rank, local_rank, world, local_world


def check_batch_size(batch_size: int, world: int, *, is_resumed: bool = False) -> None:
    """Refuse a global batch that cannot be shared out equally. Needs no data and no process group.

    Args:
        is_resumed: the batch size is that of a saved run and cannot change, the number of processes can.

    Raises:
        ConfigError: that names the nearest sizes that work.
    """
    if world <= 1:
        return
    if batch_size == -1:
        raise ConfigError(
            "--batch-size -1 (measured batch size) works on one process only.",
            found=f"--batch-size -1 on {world} processes, which would each measure another size",
            fix=f"run once with one process and --batch-size -1 to get the number, then pass it times {world}",
        )
    if batch_size % world:
        below, above = batch_size // world * world, (batch_size // world + 1) * world
        sizes = " or ".join(str(size) for size in (below, above) if size > 0)
        fix = f"use --batch-size {sizes}"
        if is_resumed:
            fix = f"resume with a number of processes that divides {batch_size}; a resumed run keeps its batch"
        raise ConfigError(
            f"--batch-size must be multiple of the number of processes ({world}); it is the global batch.",
            found=f"--batch-size {batch_size} on {world} processes",
            fix=fix,
        )


def select_device(device: str | int | Sequence[int] | None = "", batch_size: int | None = None) -> torch.device:
    """The torch device of this process: `--device` checked against the launch, bound to LOCAL_RANK.

    Several ids must be as many as the processes of this machine; one id must be this process's LOCAL_RANK, or any
    device if the process is alone. Without CUDA, ids that equal LOCAL_RANK are accepted for processes that were
    explicitly put on the CPU (ACCELERATE_USE_CPU, or a gloo group made by the caller).

    Args:
        device: see `parse_device`.
        batch_size: if given, also checked against the number of processes.

    Raises:
        ConfigError: if the two do not fit.
        LaunchError: if there are fewer CUDA devices than processes or ids.
    """
    request = parse_device(device)
    _, local_rank, world, local_world = launched_processes()
    if batch_size is not None:
        check_batch_size(batch_size, world)
    if request.kind in ("cpu", "mps"):
        return torch.device(request.kind)
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in _TRUE
    if request.kind == "cuda":
        _check_ids(request.ids, local_rank, local_world)
    if wants_cpu or (available == 0 and (request.kind == "auto" or _caller_chose_gloo())):
        return torch.device("cpu")
    needed = max(local_world, max(request.ids, default=0) + 1)
    if available < needed:
        raise LaunchError(
            "insufficient CUDA devices for this launch.",
            found=f"{available} CUDA device(s); {local_world} process(es) on this machine"
            + (f", --device {','.join(map(str, request.ids))}" if request.ids else ""),
            fix="start fewer processes or name fewer ids; or --device cpu (with ACCELERATE_USE_CPU=true for several)",
        )
    return torch.device("cuda", request.ids[0] if world == 1 and request.ids else local_rank)


def make_accelerator(
    *,
    device: str = "",
    mixed_precision: str = "",
    timeout_seconds: float = 1800.0,
    trackers: Sequence[str] = (),
    logging_dir: str | None = None,
) -> tuple[Accelerator, World]:
    """The one Accelerator of this process, checked against what the launcher asked for.

    Args:
        device: `--device`.
        mixed_precision: "no", "bf16", "fp16", or "" for what `accelerate config` or the launcher says.
        timeout_seconds: limit of every collective, start-up included.
        trackers: names for `accelerator.log`.
        logging_dir: where file-based trackers write.

    Raises:
        ConfigError, LaunchError: if the launch is one that would silently train something else.
    """
    _refuse_unsupported_launches()
    torch_device = select_device(device)
    precision, precision_origin = _precision(mixed_precision, torch_device)
    owns_group = not (dist.is_available() and dist.is_initialized())
    _publish_world(torch_device, owns_group=owns_group)
    # A former run in this process (a notebook, a test) leaves its state behind, and a second Accelerator would
    # silently keep the first one's precision.
    if AcceleratorState._shared_state:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    accelerator = Accelerator(
        cpu=torch_device.type == "cpu",
        mixed_precision=precision,
        log_with=list(trackers) or None,
        project_dir=logging_dir,
        rng_types=[],
        step_scheduler_with_optimizer=False,
        # An explicit plugin, because ACCELERATE_GRADIENT_ACCUMULATION_STEPS overrides the plain argument.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dataloader_config=DataLoaderConfiguration(
            split_batches=True, dispatch_batches=False, even_batches=False, non_blocking=True
        ),
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=_passed_timeout(timeout_seconds), **_backend(torch_device)),
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
        ],
    )
    _check_world(accelerator)
    _check_trackers(accelerator, trackers)
    configure_logging(accelerator.is_main_process)
    distributed = dist.is_available() and dist.is_initialized()
    world = World(
        launcher=_launcher_name(owns_group),
        backend=dist.get_backend() if distributed else "none",
        owns_group=owns_group,
        side_group=dist.new_group(timeout=timedelta(seconds=timeout_seconds)) if distributed else None,
        timeout_seconds=timeout_seconds,
        precision_origin=precision_origin,
    )
    return accelerator, world


def prepare(accelerator: Accelerator, *objects: Any) -> Any:
    """`accelerator.prepare`, without a warning of torch's about what Accelerate passes on and users cannot change."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
        return accelerator.prepare(*objects)


def finish(accelerator: Accelerator, world: World) -> None:
    """Close trackers and, if we made it, the process group."""
    if world.owns_group:
        accelerator.end_training()
    else:
        # `end_training` would destroy the caller's group.
        for tracker in accelerator.trackers:
            tracker.finish()


def second_store_connection(timeout_seconds: float) -> tuple[Any, str]:
    """A connection of one's own to the process group's store, and the store's address; None where there is no such.

    Only a TCP store is shared so: a file store would grow with everything that is written to it.

    Args:
        timeout_seconds: of each question to the store.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None, ""
    store = base = dist.distributed_c10d._get_default_store()
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if not isinstance(base, dist.TCPStore):
        return None, ""
    try:
        connection = store.clone()
    except RuntimeError:
        return None, ""
    connection.set_timeout(timedelta(seconds=timeout_seconds))
    return connection, f"{base.host}:{base.port}"


def synchronise_batchnorm(model: nn.Module, accelerator: Accelerator, world: World) -> None:
    """Let the BatchNorms of `model` work over all processes; one that is alone then computes what several would."""
    convert_sync_batchnorm(model, world.side_group, device_type=accelerator.device.type)


class PendingSum:
    """A sum over all processes that is under way on `device`; `result()` waits for it."""

    def __init__(self, tensor: Tensor, world: World, *, device: torch.device) -> None:
        self._tensor = tensor
        self._work = None
        if world.side_group is not None:
            self._tensor = tensor.to(device)
            self._work = dist.all_reduce(self._tensor, group=world.side_group, async_op=True)

    def result(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._tensor


def sum_over_processes(tensor: Tensor, world: World, *, device: torch.device) -> Tensor:
    """The element-wise sum of every process's `tensor`, which may be changed in place."""
    return PendingSum(tensor, world, device=device).result()


def gather_payloads(accelerator: Accelerator, payload: T) -> list[T]:
    """Every process's `payload`, in rank order, on every process. One collective whatever the payloads hold."""
    return list(gather_object([payload]))


def broadcast_from_main(accelerator: Accelerator, value: T) -> T:
    """The main process's `value` on every process."""
    return broadcast_object_list([value])[0] if accelerator.num_processes > 1 else value


def on_main_process(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """Run `work` on the main process; every process returns its result or raises its error.

    Meanwhile the others poll a key, so `work` may take longer than the group's timeout.
    """
    result: Any = None
    error: BaseException | None = None
    if accelerator.is_main_process:
        try:
            result = work()
        except Exception as caught:
            # Handed on below, to all processes alike; the others must not wait for a result that never comes.
            error = caught
    _wait_for(accelerator, f"accel_yolo/main/{next(_calls)}", is_done=accelerator.is_main_process)
    result, error = broadcast_from_main(accelerator, (result, _sendable(error)))
    if error is not None:
        raise error
    return result


def local_main_first(accelerator: Accelerator, work: Callable[[], T], *, name: str) -> T:
    """Run `work` on one process of each machine, then on its others, which can use what it left behind (a cache).

    The others poll a key instead of waiting in a collective, so `work` may take longer than the group's timeout.

    Raises:
        AccelYoloError: if `work` does, on every process of the machine.
    """
    if accelerator.num_processes == 1:
        return work()
    store = dist.distributed_c10d._get_default_store()
    machine = accelerator.process_index - accelerator.local_process_index
    # Every process counts its calls alike, so a second run in the same group does not find the first one's answer.
    key = f"accel_yolo/{name}/{machine}/{next(_calls)}"
    if accelerator.is_local_main_process:
        try:
            result = work()
        except AccelYoloError as error:
            store.set(key, json.dumps(error_fields(error)))
            raise
        # A bug is not told to the others: this process dies of it, and the launcher ends them.
        store.set(key, _DONE)
        return result
    _poll(store, key)
    answer = store.get(key).decode()
    if answer != _DONE:
        raise rebuilt_error(json.loads(answer))
    return work()


def _wait_for(accelerator: Accelerator, key: str, *, is_done: bool) -> None:
    """Return on every process once one of them has called this with `is_done`, without a collective held open."""
    if accelerator.num_processes == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    if is_done:
        store.set(key, _DONE)
    else:
        _poll(store, key)


def _poll(store: Any, key: str) -> None:
    # No limit of its own, because the work may take any time. A main process that dies ends it all the same: the
    # launcher ends the others, and where there is none, the store was the main process's and stops to answer.
    while not store.check([key]):
        time.sleep(0.02)


def configure_logging(is_main_process: bool) -> None:
    """Let the package's messages through on the main process, and only there; a host's own handlers win."""
    package = logging.getLogger("accel_yolo")
    package.setLevel(logging.INFO if is_main_process else logging.ERROR)
    # Each process reads its own part of the images: a file that broke must be told by whoever met it.
    logging.getLogger("accel_yolo.data.dataset").setLevel(logging.WARNING)
    if not package.handlers and not logging.getLogger().handlers:
        handler = _CurrentStdout()
        handler.setFormatter(_PlainFormatter())
        package.addHandler(handler)
        package.propagate = False


class _CurrentStdout(logging.StreamHandler):
    """Writes to whatever `sys.stdout` is at that moment: notebooks and tests replace it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stdout

    @stream.setter
    def stream(self, value: Any) -> None:
        pass


class _PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        return message if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {message}"


def _backend(device: torch.device) -> dict[str, str]:
    # Accelerate takes NCCL for CUDA whether it is there or not (Windows, some builds); gloo can do it too, slowly.
    return {"backend": "gloo"} if device.type == "cuda" and not dist.is_nccl_available() else {}


def _passed_timeout(seconds: float) -> timedelta:
    # Accelerate drops a value that equals its own default, and then torch's default, which is another, is in force.
    timeout = timedelta(seconds=seconds)
    return timeout if timeout != InitProcessGroupKwargs().timeout else timeout + timedelta(milliseconds=1)


def _refuse_unsupported_launches() -> None:
    environment = os.environ
    for variable, (name, reason) in _REFUSED_PLUGINS.items():
        if environment.get(variable, "").lower() in _TRUE:
            raise LaunchError(
                f"the accelerate configuration asks for {name}, which this trainer does not support: {reason}.",
                found=f"{variable}={environment[variable]}",
                fix="run `accelerate config` again without it, or launch with --config_file accelerate_config.yaml",
            )
    compiler = environment.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if compiler.lower() not in ("", "no"):
        raise LaunchError(
            "the accelerate configuration asks for torch.compile, which this trainer does not support yet.",
            found=f"ACCELERATE_DYNAMO_BACKEND={compiler}",
            fix="answer no to the dynamo question of `accelerate config`, or launch with --dynamo_backend no",
        )
    alone = "WORLD_SIZE" not in environment and not (dist.is_available() and dist.is_initialized())
    if alone and "MASTER_PORT" in environment and environment.get("ACCELERATE_USE_CPU", "").lower() in _TRUE:
        raise LaunchError(
            "several CPU processes were asked for, but the launcher started only one.",
            found="MASTER_PORT and ACCELERATE_USE_CPU are set, WORLD_SIZE is not (`accelerate launch --cpu` with"
            " --num_processes, or a multi-CPU file, without mpirun)",
            fix="ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 train.py ..."
            " (or: torchrun --standalone --nproc_per_node 2 train.py ... --device cpu)",
        )


def _precision(asked: str, device: torch.device) -> tuple[str, str]:
    from_environment = os.environ.get("ACCELERATE_MIXED_PRECISION", "")
    precision = asked or from_environment or "no"
    origin = "--mixed-precision" if asked else ("accelerate config" if from_environment else "default")
    if precision not in ("no", "bf16", "fp16"):
        raise ConfigError(
            "this mixed precision is not supported.",
            found=f"{precision} (set by {origin})",
            fix="use no, bf16 or fp16",
        )
    if precision == "fp16" and device.type != "cuda":
        raise ConfigError(
            "fp16 needs a CUDA device: elsewhere Accelerate accepts it and silently does nothing.",
            found=f"mixed precision fp16 (set by {origin}) on {device.type}",
            fix="use --mixed-precision bf16, or no",
        )
    return precision, origin


def _check_ids(ids: tuple[int, ...], local_rank: int, local_world: int) -> None:
    if len(ids) > 1 and len(ids) != local_world:
        raise ConfigError(
            "--device names another number of devices than there are processes on this machine.",
            found=f"--device with {len(ids)} ids, {local_world} process(es)",
            fix=f"accelerate launch --multi_gpu --num_processes {len(ids)} train.py ..., or name {local_world} id(s)",
        )
    if len(ids) == 1 and ids[0] != local_rank and (local_world > 1 or "LOCAL_RANK" in os.environ):
        raise ConfigError(
            "--device names one device for several processes, and it is not this process's.",
            found=f"--device {ids[0]} on local rank {local_rank} of {local_world}",
            fix="leave --device out (each process takes its LOCAL_RANK), or name one id per process",
        )
    if len(ids) > 1 and ids != tuple(range(local_world)):
        raise ConfigError(
            "--device names other devices than the processes use: process i uses the i-th visible device.",
            found=f"--device {','.join(map(str, ids))} with {local_world} processes",
            fix=f"CUDA_VISIBLE_DEVICES={','.join(map(str, ids))} before the command, and no --device",
        )


def _caller_chose_gloo() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo"


def _publish_world(device: torch.device, *, owns_group: bool) -> None:
    """Fill in the launcher variables that hand-written spawns forget; Accelerate reads nothing else."""
    environment = os.environ
    if not owns_group:
        environment.setdefault("RANK", str(dist.get_rank()))
        environment.setdefault("WORLD_SIZE", str(dist.get_world_size()))
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return
    world = int(environment["WORLD_SIZE"])
    per_machine = world if device.type == "cpu" else max(torch.cuda.device_count(), 1)
    environment.setdefault("LOCAL_WORLD_SIZE", str(min(per_machine, world)))
    environment.setdefault("LOCAL_RANK", str(int(environment["RANK"]) % per_machine))
    environment.setdefault("MASTER_ADDR", "127.0.0.1")
    environment.setdefault("MASTER_PORT", "29500")


def _check_world(accelerator: Accelerator) -> None:
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    supported = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    if accelerator.distributed_type not in supported:
        raise LaunchError(
            f"the distribution type {accelerator.distributed_type} is not supported.",
            found=f"distributed_type {accelerator.distributed_type}",
            fix="use one process, several CUDA devices, or several CPU processes",
        )
    grouped = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if not accelerator.num_processes == asked == grouped:
        raise LaunchError(
            "the launcher, the process group and Accelerate see different numbers of processes.",
            found=f"WORLD_SIZE {asked}, process group {grouped}, Accelerate {accelerator.num_processes}",
            fix="start with `accelerate launch` or `torchrun`; or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and"
            " MASTER_PORT",
        )


def _check_trackers(accelerator: Accelerator, asked: Sequence[str]) -> None:
    # Accelerate drops a tracker that is not installed with a warning that scrolls away.
    found = {str(getattr(tracker, "value", tracker)) for tracker in accelerator.log_with}
    if missing := [name for name in asked if name not in found]:
        raise ConfigError(
            "a tracker is not installed.",
            found=f"--trackers {' '.join(asked)}; missing: {', '.join(missing)}",
            fix=f"pip install {' '.join(missing)}, or leave it out (results.csv is always written)",
        )


def _launcher_name(owns_group: bool) -> str:
    environment = os.environ
    if not owns_group:
        return "the caller's process group"
    if "ACCELERATE_MIXED_PRECISION" in environment:
        return "accelerate launch"
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    if "WORLD_SIZE" in environment:
        return "RANK and WORLD_SIZE in the environment"
    return "plain python"


def _sendable(error: BaseException | None) -> BaseException | None:
    """The error itself if it survives a process border, else one with its text."""
    if error is None:
        return None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        # Any class may fail here in any way; its text still helps.
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
