"""Going on with a run: finds it, and decides which settings may differ from those it was started with."""

from __future__ import annotations

import logging
from pathlib import Path

from accel_yolo.config.load import Resolved
from accel_yolo.config.schema import build_config
from accel_yolo.engine.checkpoint import Checkpoint
from accel_yolo.errors import CheckpointError

logger = logging.getLogger(__name__)

# They change how long, where on, or how it is shown, but not what is learned from which batch.
MAY_CHANGE = frozenset(
    {
        "run.epochs", "run.patience", "run.save_period", "run.noval", "run.nosave", "run.noplots", "run.device",
        "run.mixed_precision", "run.ddp_timeout", "run.trackers", "data.workers", "data.index_cache", "data.source",
        "eval.conf_thres", "eval.iou_thres", "eval.max_det",
    }
)  # fmt: skip


def find_run(resume: str, project: Path) -> Path:
    """The run folder that `--resume` means: "last", a run folder, or any file or folder inside one.

    Raises:
        CheckpointError: if there is none, with the places that were searched.
    """
    if resume == "last":
        pointers = sorted(project.glob("*/checkpoints/last.json"), key=lambda path: path.stat().st_mtime)
        if not pointers:
            raise CheckpointError(
                "there is no run to resume.",
                found=f"no checkpoints below {project}",
                fix="name the run folder: --resume runs/train/exp, or its parent: --project",
            )
        return pointers[-1].parents[1]
    path = Path(resume)
    for folder in (path, *path.parents[:3]):
        if (folder / "checkpoints").is_dir():
            return folder
    raise CheckpointError(
        "this is not a run that can be resumed.",
        found=f"{resume} " + ("has no checkpoints folder" if path.exists() else "does not exist"),
        fix="name a run folder (it holds `checkpoints`), or start from weights with --weights",
    )


def merge_with_saved(resolved: Resolved, checkpoint: Checkpoint) -> Resolved:
    """The saved settings with those that were given explicitly now, if they may change.

    Raises:
        CheckpointError: for a setting that may not change, with both values.
    """
    saved = {part: dict(values) for part, values in checkpoint.state["config"].items()}
    asked = resolved.config.to_dict()
    origins = {
        f"{part}.{name}": f"the resumed run {checkpoint.folder.parents[1]}"
        for part, values in saved.items()
        for name in values
    }
    refused = []
    for field, origin in resolved.origins.items():
        part, _, name = field.partition(".")
        if not origin.startswith("--") or field == "run.resume":
            continue
        old, new = saved[part].get(name), asked[part][name]
        if old == new:
            continue
        if field not in MAY_CHANGE:
            refused.append(f"{origin}: {new!r} now, {old!r} when it was started")
            continue
        saved[part][name] = new
        origins[field] = origin
        logger.info("resume: %s is now %r, was %r", field, new, old)
    if refused:
        raise CheckpointError(
            "a resumed run cannot change these settings; it would become another run.",
            found="; ".join(refused),
            fix="leave them out, or start a new run with --weights RUN/weights/last.safetensors",
        )
    saved["run"]["resume"] = ""
    return Resolved(config=build_config(saved), origins=origins)
