"""The folder of a run: its name, its settings, and `results.csv` with one row per epoch in YOLOv5's columns."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from accel_yolo.engine.checkpoint import write_text_atomically
from accel_yolo.errors import CheckpointError

# YOLOv5's fourteen, in its order; people's plotting scripts count on it.
REFERENCE_COLUMNS = (
    "epoch",
    "train/box_loss",
    "train/obj_loss",
    "train/cls_loss",
    "metrics/precision",
    "metrics/recall",
    "metrics/mAP_0.5",
    "metrics/mAP_0.5:0.95",
    "val/box_loss",
    "val/obj_loss",
    "val/cls_loss",
    "x/lr0",
    "x/lr1",
    "x/lr2",
)
OWN_COLUMNS = ("yolo/mAP_0.5", "yolo/mAP_0.5:0.95", "time/train", "time/val", "time/images_per_second")
COLUMNS = REFERENCE_COLUMNS + OWN_COLUMNS


def check_writable(project: Path) -> None:
    """Fail early, before any work, if runs could not be written below `project`. Creates nothing.

    Raises:
        CheckpointError: that names the folder which refuses.
    """
    existing = project.absolute()
    # `Path.exists` raises where a parent may not be searched.
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise CheckpointError(
            "the run folder cannot be written.",
            found=f"{existing} is " + ("not writable by this user" if existing.is_dir() else "not a folder"),
            fix="choose another place with --project",
        )


def create_run_folder(project: Path, name: str, *, exist_ok: bool, subfolders: tuple[str, ...] = ("weights",)) -> Path:
    """`project/name`, or the first free of name2, name3, ...; made together with its subfolders.

    Raises:
        CheckpointError: if it cannot be made.
    """
    folder = project / name
    number = 2
    with _explained(project):
        while True:
            try:
                folder.mkdir(parents=True, exist_ok=exist_ok)
                break
            except FileExistsError:
                folder = project / f"{name}{number}"
                number += 1
        for subfolder in subfolders:
            (folder / subfolder).mkdir(exist_ok=True)
    return folder


def clear_former_run(folder: Path) -> None:
    """Remove weights and checkpoints of a run that a new one replaces (`--exist-ok`), so that they cannot be mixed."""
    with _explained(folder):
        if (folder / "checkpoints").exists():
            shutil.rmtree(folder / "checkpoints")
        for path in (folder / "weights").glob("*.safetensors"):
            path.unlink()


def write_settings(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write each mapping to its file name in the run folder, as YAML, or as JSON where the name says so.

    Raises:
        CheckpointError: if the folder cannot be written.
    """
    with _explained(folder):
        for name, content in files.items():
            is_json = name.endswith(".json")
            text = json.dumps(content, indent=1) if is_json else yaml.safe_dump(dict(content), sort_keys=False)
            write_text_atomically(folder / name, text)


def append_result(path: Path, row: Mapping[str, float]) -> None:
    """Add one epoch to results.csv; a row of the same or a later epoch (of a killed run) is replaced.

    Cells without a value stay empty. Cells are 20 wide and have five significant digits, as YOLOv5 writes them.
    """
    kept = [old for old in read_results(path) if old["epoch"] < row["epoch"]] if path.exists() else []
    lines = [",".join(f"{column:>20}" for column in COLUMNS)]
    lines += [",".join(_cell(column, values) for column in COLUMNS) for values in [*kept, dict(row)]]
    with _explained(path.parent):
        write_text_atomically(path, "\n".join(lines) + "\n")


def read_results(path: Path) -> list[dict[str, float]]:
    """The rows of a results.csv; empty cells are left out."""
    reader = csv.DictReader(io.StringIO(path.read_text()))
    return [
        {name.strip(): float(cell) for name, cell in row.items() if name is not None and cell and cell.strip()}
        for row in reader
    ]


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            "the run folder cannot be written.",
            found=f"{error} in {folder}",
            fix="make room or permit writing there, or choose another place with --project",
        ) from error


def _cell(column: str, values: Mapping[str, float]) -> str:
    value = values.get(column)
    if value is None or not math.isfinite(value):
        return " " * 20
    return f"{int(value):>20d}" if column == "epoch" else f"{value:>20.5g}"
