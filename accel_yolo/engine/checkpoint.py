"""Saves and restores a run: tensors in safetensors, everything else in JSON, published whole by one rename.

A checkpoint is a folder `checkpoints/step-00001200` with model, ema, optimizer and (without SyncBN, on several
processes) every process's running statistics, and `state.json`, which lists the files with their SHA-256. A folder that
has its final name is whole; `last.json` is replaced after it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from accel_yolo.engine.distributed import gather_payloads, on_main_process
from accel_yolo.engine.state import ModelEma, TrainState
from accel_yolo.errors import CheckpointError

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
# The previous good checkpoint stays until the new one is whole, and one longer.
KEPT_GENERATIONS = 2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint folder and the content of its state.json."""

    folder: Path
    state: dict[str, Any]

    @property
    def train_state(self) -> TrainState:
        return TrainState(**self.state["train_state"])


def save_checkpoint(
    folder: Path,
    *,
    accelerator: Accelerator,
    model: nn.Module,
    ema: ModelEma,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    settings: Mapping[str, Any],
    per_process_statistics: bool,
) -> None:
    """Write the run as it stands to `folder/checkpoints`; every process must call this.

    Args:
        folder: the run folder.
        model: unwrapped.
        optimizer: the raw torch optimiser.
        settings: JSON-ready facts that resuming compares: the configuration, names, number of processes.
        per_process_statistics: True if every process keeps its own BatchNorm statistics.

    Raises:
        CheckpointError: on every process, if the main process could not write; earlier checkpoints are untouched.
    """
    statistics = None
    if per_process_statistics:
        own = {"model": _running_statistics(model), "ema": _running_statistics(ema.module)}
        statistics = gather_payloads(accelerator, own)

    def write() -> None:
        tensors = {
            "model.safetensors": _saved_form(model.state_dict()),
            "ema.safetensors": _saved_form(ema.module.state_dict()),
            "optimizer.safetensors": optimizer_tensors(optimizer, model),
        }
        if statistics is not None:
            tensors["statistics.safetensors"] = {
                f"{rank}/{part}/{name}": value
                for rank, parts in enumerate(statistics)
                for part, values in parts.items()
                for name, value in values.items()
            }
        facts = dict(settings)
        facts["train_state"] = state.to_dict()
        facts["scaler"] = accelerator.scaler.state_dict() if accelerator.scaler is not None else None
        _publish(folder / "checkpoints", f"step-{state.micro_step:08d}", tensors, facts)

    on_main_process(accelerator, write)


def find_checkpoint(folder: Path) -> Checkpoint:
    """The newest whole checkpoint of a run folder; an earlier one, with a warning, if the newest is damaged.

    Raises:
        CheckpointError: if there is none.
    """
    parent = folder / "checkpoints"
    candidates = sorted((path for path in parent.glob("step-*") if path.is_dir()), reverse=True)
    faults = []
    for candidate in candidates:
        try:
            checkpoint = Checkpoint(candidate, _verified_state(candidate))
        except CheckpointError as error:
            faults.append(f"{candidate.name}: {error.found}")
            continue
        if faults:
            logger.warning("resuming from %s, because newer ones are damaged: %s", candidate, "; ".join(faults))
        return checkpoint
    raise CheckpointError(
        "there is no usable checkpoint in this run folder.",
        found="; ".join(faults) if faults else f"no step-* folder in {parent}",
        fix="start again with --weights RUN/weights/last.safetensors, or without --resume",
    )


def restore_checkpoint(
    checkpoint: Checkpoint,
    *,
    accelerator: Accelerator,
    model: nn.Module,
    ema: ModelEma,
    optimizer: torch.optim.Optimizer,
) -> TrainState:
    """Put a checkpoint's tensors into freshly built objects and return its counters.

    On the number of processes that wrote it every process gets its own running statistics back; on another, the
    merged ones that `model.safetensors` holds for all.
    """
    model.load_state_dict(load_file(checkpoint.folder / "model.safetensors"))
    ema.module.load_state_dict(load_file(checkpoint.folder / "ema.safetensors"))
    load_optimizer_tensors(optimizer, model, load_file(checkpoint.folder / "optimizer.safetensors"))
    statistics = checkpoint.folder / "statistics.safetensors"
    if statistics.exists():
        _restore_statistics(load_file(statistics), accelerator, model=model, ema=ema.module)
    if accelerator.scaler is not None and checkpoint.state.get("scaler"):
        accelerator.scaler.load_state_dict(checkpoint.state["scaler"])
    return checkpoint.train_state


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimiser's state as flat tensors, keyed `<parameter name>|<state name>`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}|{key}": torch.as_tensor(value).detach().cpu().contiguous()
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
        if value is not None
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """The reverse of `optimizer_tensors`.

    Raises:
        CheckpointError: if a tensor belongs to no parameter of this model, or has another shape.
    """
    parameters = dict(model.named_parameters())
    for entry, saved in tensors.items():
        name, _, key = entry.rpartition("|")
        parameter = parameters.get(name)
        if parameter is None or (saved.dim() and saved.shape != parameter.shape):
            raise CheckpointError(
                "the checkpoint's optimiser does not fit this model.",
                found=f"{entry} of shape {tuple(saved.shape)}; the model has "
                + ("no such parameter" if parameter is None else f"shape {tuple(parameter.shape)}"),
                fix="resume with the model and data the run was started with",
            )
        # Fused SGD walks parameter and buffer in memory order: with other strides (channels_last) it would silently
        # mix the elements up.
        restored = torch.empty_like(parameter).copy_(saved) if saved.dim() else saved.to(parameter.device)
        optimizer.state[parameter][key] = restored


def _running_statistics(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: value.detach().cpu().clone()
        for name, value in module.state_dict().items()
        if name.endswith(("running_mean", "running_var"))
    }


def _restore_statistics(
    tensors: Mapping[str, Tensor], accelerator: Accelerator, *, model: nn.Module, ema: nn.Module
) -> None:
    saved_processes = 1 + max(int(name.split("/", 1)[0]) for name in tensors)
    for part, module in (("model", model), ("ema", ema)):
        names = _running_statistics(module)
        if saved_processes == accelerator.num_processes:
            rank = accelerator.process_index
            own = {name: tensors[f"{rank}/{part}/{name}"] for name in names}
        else:
            stacks = {
                name: torch.stack([tensors[f"{rank}/{part}/{name}"] for rank in range(saved_processes)])
                for name in names
            }
            own = merge_statistics(stacks)
        module.load_state_dict(own, strict=False)


def merge_statistics(stacks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the running statistics of W processes with equal numbers of images.

    Args:
        stacks: `...running_mean` and `...running_var`, each (W, C).

    Returns:
        The same names, each (C,): the mean of means; the mean of variances plus the variance of means.
    """
    merged = {}
    for name, stack in stacks.items():
        values = stack.double()
        joined = values.mean(0)
        if name.endswith("running_var"):
            joined += stacks[name.removesuffix("running_var") + "running_mean"].double().var(0, correction=0)
        merged[name] = joined.to(stack.dtype)
    return merged


def _saved_form(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # The format stores plain row-major tensors without aliases.
    return {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}


def _publish(parent: Path, name: str, tensors: Mapping[str, Mapping[str, Tensor]], facts: dict[str, Any]) -> None:
    temporary = parent / f".tmp-{name}-{os.getpid()}"
    final = parent / name
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for leftover in parent.glob(".tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir()
        for file_name, values in tensors.items():
            save_file(dict(values), temporary / file_name)
        facts["format_version"] = FORMAT_VERSION
        facts["files"] = {file_name: _fingerprint(temporary / file_name) for file_name in tensors}
        (temporary / "state.json").write_text(json.dumps(facts, indent=1))
        for path in temporary.iterdir():
            _flush(path)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _flush(parent)
        write_text_atomically(parent / "last.json", json.dumps({"checkpoint": name}))
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        needed = sum(value.nbytes for values in tensors.values() for value in values.values())
        raise CheckpointError(
            "the checkpoint could not be written; earlier ones are untouched.",
            found=f"{error} while writing {needed / 1e6:.1f} MB to {final}",
            fix="make room or permit writing there, then go on with --resume",
        ) from error
    for old in sorted(parent.glob("step-*"))[:-KEPT_GENERATIONS]:
        shutil.rmtree(old, ignore_errors=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text` so that a reader, or a crash, sees the old content or the new, never a part."""
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _verified_state(folder: Path) -> dict[str, Any]:
    def damaged(what: str) -> CheckpointError:
        return CheckpointError("this checkpoint is damaged.", found=what, fix="use an earlier one")

    try:
        state = json.loads((folder / "state.json").read_text())
        files = state["files"]
        version = state["format_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(f"state.json cannot be read ({error})") from error
    if version != FORMAT_VERSION:
        raise damaged(f"format version {version}, this program reads {FORMAT_VERSION}")
    for name, wanted in files.items():
        path = folder / name
        if not path.is_file():
            raise damaged(f"{name} is missing")
        if _fingerprint(path) != wanted:
            raise damaged(f"{name} has changed since it was written (size or SHA-256 differs)")
    return state


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
