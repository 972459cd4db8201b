"""The verb `train`: settings in, an Accelerator, a run; and `run()`, which starts the processes itself."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accel_yolo.config.load import Resolved, config_from_kwargs
from accel_yolo.config.schema import TrainConfig, build_config
from accel_yolo.data.workers import die_with_parent
from accel_yolo.engine.callbacks import Callbacks
from accel_yolo.engine.checkpoint import find_checkpoint
from accel_yolo.engine.distributed import (
    check_batch_size,
    configure_logging,
    finish,
    launched_processes,
    make_accelerator,
    parse_device,
)
from accel_yolo.engine.launch import start_processes
from accel_yolo.engine.resume import find_run, merge_with_saved
from accel_yolo.engine.run_folder import check_writable
from accel_yolo.engine.training import Training, TrainResult, read_start
from accel_yolo.errors import AccelYoloError, LaunchError, error_fields

logger = logging.getLogger(__name__)


def main(resolved: Resolved) -> int:
    """`train` for the command line; the result is in the log."""
    train(resolved)
    return 0


def run(*, callbacks: Callbacks | None = None, **options: Any) -> TrainResult:
    """Train from Python, starting the processes when several devices are named.

    Args:
        callbacks: an object with methods of `Callbacks`; called on every process.
        options: YOLOv5's option names: `data`, `weights`, `imgsz`, `batch_size`, `device="0,1"`, `sync_bn`, ...; and
            `num_processes` for several on the CPU.

    Raises:
        AccelYoloError: for whatever the user can fix.
    """
    resolved = config_from_kwargs(**options)
    wanted = resolved.num_processes or max(len(parse_device(resolved.config.run.device).ids), 1)
    _, _, running, _ = launched_processes()
    if wanted == 1 or running > 1:
        with _environment_left_alone():
            return train(resolved, callbacks=callbacks)
    if not resolved.config.run.resume:
        check_batch_size(resolved.config.data.batch_size, wanted)
    environment = dict(os.environ)
    request = parse_device(resolved.config.run.device)
    if request.kind == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = _visible_devices(request.ids)
    elif request.kind == "cpu":
        environment["ACCELERATE_USE_CPU"] = "true"
    settings = {"config": resolved.config.to_dict(), "origins": resolved.origins}
    settings["config"]["run"]["device"] = "cpu" if request.kind == "cpu" else ""  # type: ignore[index]
    answer = start_processes(__name__, settings, num_processes=wanted, callbacks=callbacks, environment=environment)
    best = Path(answer["best"]) if answer["best"] else None
    return TrainResult(Path(answer["save_dir"]), best, Path(answer["last"]), answer["metrics"])


def train(
    config: TrainConfig | Resolved | str | Path | None = None, *, callbacks: Callbacks | None = None, **options: Any
) -> TrainResult:
    """Train in this process, as one of those that a launcher (or the caller) started.

    Args:
        config: all settings, from `load_config`; or a run file as for `--config`; or None.
        options: YOLOv5's option names, as for `run`; beside a run file or None.
        callbacks: an object with methods of `Callbacks`.

    Raises:
        AccelYoloError: for whatever the user can fix; nothing was written then.
    """
    if isinstance(config, Resolved):
        resolved = config
    elif isinstance(config, TrainConfig):
        if options:
            raise TypeError(f"a TrainConfig is complete; it takes no further options, found {', '.join(options)}")
        asked = {f"{part}.{name}": "the caller" for part, values in config.to_dict().items() for name in values}
        resolved = Resolved(config=config, origins=asked)
    else:
        resolved = config_from_kwargs(config=config, **options)
    return _train(resolved, callbacks)


def _train(resolved: Resolved, callbacks: Callbacks | None) -> TrainResult:
    rank, _, processes, _ = launched_processes()
    configure_logging(rank == 0)
    checkpoint = None
    if resolved.config.run.resume:
        folder = find_run(resolved.config.run.resume, Path(resolved.config.run.project))
        checkpoint = find_checkpoint(folder)
        resolved = merge_with_saved(resolved, checkpoint)
    config = resolved.config
    # Before any data is read or any process waits for another.
    check_batch_size(config.data.batch_size, processes, is_resumed=checkpoint is not None)
    check_writable(checkpoint.folder.parents[1] if checkpoint else Path(config.run.project))
    start = read_start(config, checkpoint)
    if processes > 1:
        # Launchers start their processes in sessions of their own: killing the launcher would leave them alive.
        die_with_parent(os.getppid())
    accelerator, world = make_accelerator(
        device=config.run.device,
        mixed_precision=config.run.mixed_precision,
        timeout_seconds=config.run.ddp_timeout,
        trackers=config.run.trackers,
        logging_dir=config.run.project,
    )
    try:
        return Training(resolved, accelerator, world, checkpoint, start, callbacks).run()
    except (AccelYoloError, KeyboardInterrupt):
        finish(accelerator, world)
        raise


def _visible_devices(ids: tuple[int, ...]) -> str:
    # Process i takes the i-th visible device, and ids count those that are visible now.
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not visible:
        return ",".join(map(str, ids))
    if max(ids) >= len(visible):
        raise LaunchError(
            "insufficient CUDA devices for this launch.",
            found=f"device ids {ids}, CUDA_VISIBLE_DEVICES={','.join(visible)}",
            fix=f"name ids below {len(visible)}, or change CUDA_VISIBLE_DEVICES",
        )
    return ",".join(visible[index] for index in ids)


@contextlib.contextmanager
def _environment_left_alone() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _worker(folder: Path) -> int:
    """One process of `run()`: settings in, and from rank 0 the result out."""
    settings = json.loads((folder / "settings.json").read_text())
    resolved = Resolved(config=build_config(settings["config"]), origins=settings["origins"])
    callbacks = None
    if (folder / "callbacks.pkl").exists():
        import cloudpickle

        # Written a moment ago by the process that started this one.
        callbacks = cloudpickle.loads((folder / "callbacks.pkl").read_bytes())
    is_main = launched_processes()[0] == 0
    try:
        result = train(resolved, callbacks=callbacks)
    except AccelYoloError as error:
        # Each process for itself: the launcher ends the others as soon as one has left.
        (folder / f"error-{launched_processes()[0]}.json").write_text(json.dumps(error_fields(error)))
        return 2
    if is_main:
        answer = {
            "save_dir": str(result.save_dir),
            "best": str(result.best) if result.best else None,
            "last": str(result.last),
            "metrics": result.metrics,
        }
        (folder / "result.json").write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record

    main_worker: Callable[[Path], int] = record(_worker)
    sys.exit(main_worker(Path(sys.argv[1])))
