"""A YOLOv5 trainer on Hugging Face Accelerate. What is promised is in `__all__`; each name is loaded on first use."""

from __future__ import annotations

import importlib
import os

from accel_yolo.version import package_version

# Public name -> the module and the name in it. Loading here would make `accel-yolo --help` wait for torch.
_HOMES = {
    "AccelYoloError": ("accel_yolo.errors", "AccelYoloError"),
    "Batch": ("accel_yolo.structures", "Batch"),
    "Detections": ("accel_yolo.structures", "Detections"),
    "EvalResult": ("accel_yolo.metrics", "EvalResult"),
    "Sample": ("accel_yolo.structures", "Sample"),
    "TrainConfig": ("accel_yolo.config.schema", "TrainConfig"),
    "load_config": ("accel_yolo.config.load", "load_config"),
    "load_dataset": ("accel_yolo.data.load", "load_data"),
    "load_model": ("accel_yolo.model.weights", "load_model"),
    "run": ("accel_yolo.commands.train", "run"),
    "select_device": ("accel_yolo.engine.distributed", "select_device"),
    "train": ("accel_yolo.commands.train", "train"),
    "validate": ("accel_yolo.commands.val", "validate"),
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604, RUF100


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = package_version()
    elif name in _HOMES:
        module, attribute = _HOMES[name]
        # OpenCV changes LD_LIBRARY_PATH when it is imported; whoever imports us keeps the environment they had.
        environment = dict(os.environ)
        value = getattr(importlib.import_module(module), attribute)
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
