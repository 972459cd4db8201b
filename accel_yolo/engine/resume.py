"""Going on with a run: finds it, and decides which settings may differ from those it was started with."""

from __future__ import annotations

import logging
from pathlib import Path

from accel_yolo.config.load import Resolved
from accel_yolo.config.schema import build_config
from accel_yolo.engine.checkpoint import Checkpoint
from accel_yolo.errors import CheckpointError

logger = logging.getLogger(__name__)

# They change how long, or how it is measured and shown, but not what is learned from which batch.
MAY_CHANGE = frozenset(
    {
        "run.epochs", "run.patience", "run.save_period", "run.noval", "run.nosave", "run.mixed_precision",
        "data.source", "eval.conf_thres", "eval.iou_thres", "eval.max_det",
    }
)  # fmt: skip
# They are about this machine and this call, and are never taken from the saved run.
OF_THIS_CALL = frozenset(
    {
        "run.device", "run.ddp_timeout", "run.watchdog", "run.trackers", "run.noplots", "data.workers",
        "data.index_cache", "run.resume", "run.project", "run.name", "run.exist_ok",
    }
)  # fmt: skip
# Origins that no user chose.
_UNASKED = ("default", "built-in recipe shapes", "the weights file")


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
    """The saved settings, with those of this machine and those that were given explicitly now and may change.

    Raises:
        CheckpointError: for a setting that may not change, with both values.
    """
    folder = checkpoint.folder.parents[1]
    saved = {part: dict(values) for part, values in checkpoint.state["config"].items()}
    # The batch size that was measured then (--batch-size -1) is the one to go on with.
    saved["data"]["batch_size"] = checkpoint.state["batch_size"]
    asked = resolved.config.to_dict()
    origins, refused = {}, []
    for field, origin in resolved.origins.items():
        part, _, name = field.partition(".")
        old, new = saved[part].get(name), asked[part][name]
        origins[field] = f"the resumed run {folder}"
        if field in OF_THIS_CALL:
            saved[part][name], origins[field] = new, origin
        elif origin in _UNASKED or old == new:
            continue
        elif field not in MAY_CHANGE:
            refused.append(f"{field} is {new!r} now ({origin}), was {old!r} when the run was started")
        else:
            saved[part][name], origins[field] = new, origin
            logger.info("resume: %s is now %r, was %r", field, new, old)
    if refused:
        raise CheckpointError(
            "a resumed run cannot change these settings; it would become another run.",
            found="; ".join(refused),
            fix="leave them out, or start a new run with --weights RUN/weights/last.safetensors",
        )
    return Resolved(config=build_config(saved), origins=origins)
