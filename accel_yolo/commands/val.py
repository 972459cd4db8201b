"""The verb `val`: measures weights on one split of a data set, on one process or several."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from tqdm.auto import tqdm

from accel_yolo.boxes import check_image_size
from accel_yolo.config.load import resolve_val
from accel_yolo.config.schema import EvalConfig, ValConfig
from accel_yolo.data.dataset import choose_workers, val_loader
from accel_yolo.data.load import DataSets, load_data
from accel_yolo.data.table import FlatTable
from accel_yolo.engine.distributed import (
    configure_logging,
    finish,
    launched_processes,
    local_main_first,
    make_accelerator,
    on_main_process,
)
from accel_yolo.engine.evaluate import class_table, evaluate
from accel_yolo.engine.launch import log_lines
from accel_yolo.engine.pictures import RunPictures
from accel_yolo.engine.run_folder import check_writable, create_run_folder, write_settings
from accel_yolo.errors import DataError
from accel_yolo.metrics import EvalResult
from accel_yolo.model.weights import build_model, load_weights

logger = logging.getLogger(__name__)


def main(config: ValConfig) -> int:
    """`val` for the command line; the result is in the log."""
    _validate(config)
    return 0


def validate(config: ValConfig | None = None, **options: object) -> EvalResult:
    """Measure weights in this process, as one of those that a launcher started; the same result on every process.

    Args:
        config: all settings; or
        options: the flags of `accel-yolo val` as keywords: `weights`, `data`, `imgsz`, `task`, ...

    Raises:
        AccelYoloError: for whatever the user can fix.
    """
    return _validate(config if config is not None else resolve_val(options))


def _validate(config: ValConfig) -> EvalResult:
    configure_logging(launched_processes()[0] == 0)
    check_writable(Path(config.project))
    loaded = load_weights(config.weights)
    accelerator, world = make_accelerator(device=config.device, mixed_precision="fp16" if config.half else "no")
    split = config.task

    def load() -> DataSets:
        return load_data(
            config.data,
            splits=(split,),
            single_cls=config.single_cls,
            bad_images=config.bad_images,
            index_cache=config.index_cache,
        )

    data = local_main_first(accelerator, load, name=f"data-{split}")
    table = FlatTable(data.splits[split].table)
    model = build_model(loaded)
    names = data.names
    if model.num_classes != len(names) and not config.single_cls:
        raise DataError(
            "the weights know another number of classes than the data set.",
            found=f"{model.num_classes} in {config.weights}, {len(names)} in {config.data}",
            fix="measure on the data set they were trained on, or on one with the same classes",
        )
    placeholders = {label: str(label) for label in model.names}
    if model.num_classes == len(names) and model.names not in (names, placeholders):
        logger.warning("the weights' class names are not the data set's: %s and %s", model.names, names)
    stride = max(model.max_stride, 32)
    image_size = check_image_size(config.image_size, stride, floor=2 * stride)
    if image_size != config.image_size:
        logger.info("--imgsz %d is no multiple of the stride %d: using %d", config.image_size, stride, image_size)
    loader = val_loader(
        data.splits[split].table,
        image_size=image_size,
        batch_size=config.batch_size,
        stride=model.max_stride,
        rank=accelerator.process_index,
        world=accelerator.num_processes,
        workers=choose_workers(config.workers, launched_processes()[3]),
        lenient=config.bad_images == "warn",
        pin_memory=accelerator.device.type == "cuda",
    )
    model = model.to(accelerator.device).to(memory_format=torch.channels_last).fuse()
    settings = EvalConfig(conf_thres=config.conf_thres, iou_thres=config.iou_thres, max_det=config.max_det)
    result = evaluate(
        model,
        tqdm(loader, desc=split, unit="batch", leave=False, disable=None if accelerator.is_main_process else True),
        table=table,
        names=names,
        config=settings,
        accelerator=accelerator,
        global_batch_size=config.batch_size,
        augment=config.augment,
        single_cls=config.single_cls,
        with_curves=True,
    )
    log_lines(class_table(result, verbose=config.verbose))
    logger.info(
        "mAP50 %.4f, mAP50-95 %.4f (COCO); %.4f, %.4f (YOLO-style); conf %g, IoU %g, max %d per image, multi-label%s",
        result.map50,
        result.map50_95,
        result.yolo_map50,
        result.yolo_map50_95,
        config.conf_thres,
        config.iou_thres,
        config.max_det,
        ", class-agnostic" if config.single_cls else "",
    )

    def write() -> Path:
        folder = create_run_folder(Path(config.project), config.name, exist_ok=config.exist_ok, subfolders=())
        write_settings(
            folder,
            {
                "val.yaml": config.to_dict(),
                "metrics.json": result.to_dict(),
                "data.json": {name: report.to_dict() for name, report in data.reports.items()},
            },
        )
        return folder

    folder = on_main_process(accelerator, write)
    pictures = RunPictures(folder, names=names, enabled=accelerator.is_main_process and not config.noplots)
    if pictures.enabled:
        pictures.validation(result, folder / "results.csv")
        pictures.val_batches(model, loader, accelerator, settings)
    logger.info("results in %s", folder)
    finish(accelerator, world)
    return result
