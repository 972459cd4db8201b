"""Every setting of a run: its name, its meaning, its range. Built once, checked on construction, never written to.

Hyperparameters keep YOLOv5's names, because they are the field's words and a user's `hyp.yaml` must load unchanged.
The sentence below a field is its help text; `config/load.py` maps flags and YAML keys to fields.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from accel_yolo.errors import ConfigError

OPTIMIZERS = ("SGD", "Adam", "AdamW")
BAD_IMAGE_POLICIES = ("skip", "warn", "error")
PRECISIONS = ("no", "bf16", "fp16")
# Those that Accelerate knows.
TRACKERS = ("tensorboard", "wandb", "trackio", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab")


class _Faults:
    """Collects everything wrong with one part, so that the user sees all of it at once."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.messages: list[str] = []

    def number(self, name: str, value: object, low: float, high: float = math.inf, *, integer: bool = False) -> None:
        """Note a fault unless `value` is a finite number (not a bool) in [low, high]."""
        kind = int if integer else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind):
            word = "an integer" if integer else "a number"
            self.messages.append(f"{self.part}.{name} is {value!r} ({type(value).__name__}), must be {word}")
        elif not math.isfinite(value) or not low <= value <= high:
            span = f"in [{low:g}, {high:g}]" if high != math.inf else f"at least {low:g}"
            self.messages.append(f"{self.part}.{name} is {value!r}, must be {span}")

    def choice(self, name: str, value: object, allowed: tuple[object, ...]) -> None:
        if value not in allowed:
            self.messages.append(f"{self.part}.{name} is {value!r}, must be one of {', '.join(map(repr, allowed))}")

    def flag(self, name: str, value: object) -> None:
        if not isinstance(value, bool):
            self.messages.append(f"{self.part}.{name} is {value!r} ({type(value).__name__}), must be true or false")

    def text(self, name: str, value: object) -> None:
        if not isinstance(value, str):
            self.messages.append(f"{self.part}.{name} is {value!r} ({type(value).__name__}), must be a string")

    def check(self, holds: bool, message: str) -> None:
        if not holds:
            self.messages.append(f"{self.part}.{message}")

    def raise_if_any(self) -> None:
        if self.messages:
            raise _SettingsFault(self.messages)


class _SettingsFault(ConfigError):
    """A ConfigError that remembers its single messages, so that `build_config` can join those of all parts."""

    def __init__(self, messages: list[str]) -> None:
        self.messages = messages
        count = len(messages)
        super().__init__(
            "a setting has a value that cannot be used."
            if count == 1
            else f"{count} settings have values that cannot be used.",
            found="; ".join(messages),
            fix="correct the value in the YAML file or on the command line (`accel-yolo train --help` lists all).",
        )

    def __reduce__(self) -> tuple[object, ...]:
        return _SettingsFault, (self.messages,)


def _setting(default: Any, sentence: str) -> Any:
    return field(default=default, metadata={"help": sentence})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which network, and what it starts from."""

    cfg: str = _setting("yolov5s", "model YAML: a path, or the name of one of ours (yolov5n ... yolov5x6)")
    weights: str = _setting("", "start weights: .safetensors, a run folder, or a YOLOv5 .pt; empty = from scratch")
    anchors: int = _setting(0, "anchors per level, computed from the data; 0 = those of the model YAML")
    autoanchor: bool = _setting(True, "compute better anchors when the model's do not fit the data")
    freeze: tuple[int, ...] = _setting(
        (0,), "layers to freeze: one number N = the first N layers, several = those layers"
    )
    sync_bn: bool = _setting(False, "BatchNorm statistics over all processes (exact on any backend)")
    channels_last: bool = _setting(True, "NHWC memory layout inside the network: faster, same numbers up to rounding")

    def __post_init__(self) -> None:
        faults = _Faults("model")
        faults.text("cfg", self.cfg)
        faults.text("weights", self.weights)
        faults.number("anchors", self.anchors, 0, 100)
        for name in ("autoanchor", "sync_bn", "channels_last"):
            faults.flag(name, getattr(self, name))
        for layer in self.freeze:
            faults.number("freeze", layer, 0, integer=True)
        faults.raise_if_any()

    @property
    def frozen_layers(self) -> tuple[int, ...]:
        """Indices of the layers that do not train."""
        return tuple(self.freeze) if len(self.freeze) > 1 else tuple(range(self.freeze[0] if self.freeze else 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Which images, how large, how many at once."""

    source: str = _setting("shapes", "data set YAML, or `shapes` for the built-in demo set")
    image_size: int = _setting(640, "side of the square network input, px")
    batch_size: int = _setting(16, "images per step over ALL processes; -1 = measured (one process only)")
    workers: int = _setting(8, "most loader processes per rank; never more than the cores allow")
    rect: bool = _setting(False, "rectangular batches of similar aspect ratio; no mosaic, no shuffling")
    single_cls: bool = _setting(False, "treat all classes as one")
    multi_scale: bool = _setting(False, "vary the image size by +/- 50 % from step to step")
    bad_images: str = _setting("skip", "truncated or undecodable images: skip, warn (keep what decodes), error")
    index_cache: str = _setting("", "folder for the data index; empty = the user's cache folder")

    def __post_init__(self) -> None:
        faults = _Faults("data")
        faults.text("source", self.source)
        faults.number("image_size", self.image_size, 32, 16384, integer=True)
        faults.number("workers", self.workers, 0, integer=True)
        if self.batch_size != -1:
            faults.number("batch_size", self.batch_size, 1, integer=True)
        for name in ("rect", "single_cls", "multi_scale"):
            faults.flag(name, getattr(self, name))
        faults.choice("bad_images", self.bad_images, BAD_IMAGE_POLICIES)
        faults.text("index_cache", self.index_cache)
        faults.raise_if_any()


@dataclass(frozen=True, kw_only=True, slots=True)
class AugmentConfig:
    """How training images are changed. Defaults are those of hyp.scratch-low."""

    hsv_h: float = _setting(0.015, "hue gain, fraction of the circle")
    hsv_s: float = _setting(0.7, "saturation gain, fraction")
    hsv_v: float = _setting(0.4, "value (brightness) gain, fraction")
    degrees: float = _setting(0.0, "rotation, +/- degrees")
    translate: float = _setting(0.1, "translation, +/- fraction of the output size")
    scale: float = _setting(0.5, "scale gain, +/- fraction")
    shear: float = _setting(0.0, "shear, +/- degrees")
    perspective: float = _setting(0.0, "perspective, +/- fraction per px, 0 to 0.001")
    flipud: float = _setting(0.0, "probability of a vertical flip")
    fliplr: float = _setting(0.5, "probability of a horizontal flip")
    mosaic: float = _setting(1.0, "probability of a mosaic of four images")
    mixup: float = _setting(0.0, "probability of blending in a second mosaic (only with mosaic)")
    copy_paste: float = _setting(0.0, "share of segmented objects pasted again, mirrored (only with polygons)")

    def __post_init__(self) -> None:
        faults = _Faults("augment")
        for name in ("hsv_h", "hsv_s", "hsv_v", "translate", "flipud", "fliplr", "mosaic", "mixup", "copy_paste"):
            faults.number(name, getattr(self, name), 0, 1)
        # At 1 the scale could reach zero and the affine matrix would be singular.
        faults.number("scale", self.scale, 0, 0.99)
        faults.number("degrees", self.degrees, 0, 180)
        faults.number("shear", self.shear, 0, 89)
        faults.number("perspective", self.perspective, 0, 0.01)
        faults.raise_if_any()


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """The loss, before its gains are scaled by levels, classes and image size. Defaults: hyp.scratch-low."""

    box: float = _setting(0.05, "gain of the box loss")
    cls: float = _setting(0.5, "gain of the class loss (for 80 classes)")
    cls_pw: float = _setting(1.0, "positive weight of the class loss")
    obj: float = _setting(1.0, "gain of the objectness loss (at 640 px)")
    obj_pw: float = _setting(1.0, "positive weight of the objectness loss")
    iou_t: float = _setting(0.20, "accepted for old files; the assignment does not use it")
    anchor_t: float = _setting(4.0, "largest side ratio between an object and an anchor that matches it")
    fl_gamma: float = _setting(0.0, "focal loss gamma; 0 = off")
    label_smoothing: float = _setting(0.0, "epsilon of the class targets")

    def __post_init__(self) -> None:
        faults = _Faults("loss")
        for name in ("box", "cls", "cls_pw", "obj", "obj_pw", "iou_t", "fl_gamma"):
            faults.number(name, getattr(self, name), 0)
        faults.number("anchor_t", self.anchor_t, 1)
        faults.number("label_smoothing", self.label_smoothing, 0, 1)
        faults.raise_if_any()


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """Optimiser, schedule and warm-up. Defaults: hyp.scratch-low."""

    optimizer: str = _setting("SGD", "SGD, Adam or AdamW")
    lr0: float = _setting(0.01, "learning rate after warm-up")
    lrf: float = _setting(0.01, "last learning rate as a fraction of lr0")
    momentum: float = _setting(0.937, "SGD momentum, or Adam's beta1")
    weight_decay: float = _setting(0.0005, "weight decay at the nominal batch")
    warmup_epochs: float = _setting(3.0, "length of the warm-up, epochs")
    warmup_momentum: float = _setting(0.8, "momentum at its start")
    warmup_bias_lr: float = _setting(0.1, "learning rate of biases at its start")
    warmup_min_steps: int = _setting(100, "shortest warm-up, steps (YOLOv5: 100)")
    nominal_batch: int = _setting(64, "images per weight update that smaller batches are accumulated to (YOLOv5: 64)")
    cos_lr: bool = _setting(False, "cosine instead of linear decay")
    ema_decay: float = _setting(0.9999, "decay of the weight average in the long run")
    ema_tau: float = _setting(2000.0, "updates over which that decay is approached")

    def __post_init__(self) -> None:
        faults = _Faults("optim")
        faults.choice("optimizer", self.optimizer, OPTIMIZERS)
        for name in ("lr0", "lrf", "weight_decay", "warmup_epochs", "warmup_bias_lr"):
            faults.number(name, getattr(self, name), 0)
        for name in ("momentum", "warmup_momentum", "ema_decay"):
            faults.number(name, getattr(self, name), 0, 1)
        faults.number("warmup_min_steps", self.warmup_min_steps, 0, integer=True)
        faults.number("nominal_batch", self.nominal_batch, 1, integer=True)
        faults.number("ema_tau", self.ema_tau, 1)
        faults.flag("cos_lr", self.cos_lr)
        faults.raise_if_any()


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """How detections are made and counted in validation."""

    conf_thres: float = _setting(0.001, "lowest score that is kept")
    iou_thres: float = _setting(0.6, "overlap above which the weaker of two boxes is suppressed")
    max_det: int = _setting(300, "most detections per image")

    def __post_init__(self) -> None:
        faults = _Faults("eval")
        faults.number("conf_thres", self.conf_thres, 0, 1)
        faults.number("iou_thres", self.iou_thres, 0, 1)
        faults.number("max_det", self.max_det, 1, integer=True)
        faults.raise_if_any()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How long, where to, and on what."""

    project: str = _setting("runs/train", "folder of all runs")
    name: str = _setting("exp", "name of this run; a number is appended if it exists")
    exist_ok: bool = _setting(False, "write into an existing run folder")
    epochs: int = _setting(100, "passes over the data")
    patience: int = _setting(100, "stop after this many epochs without improvement; 0 = never")
    save_period: int = _setting(-1, "also keep weights/epochN.safetensors every so many epochs; -1 = off")
    resume: str = _setting("", "run folder or checkpoint to go on with; `last` = the newest run")
    noval: bool = _setting(False, "validate after the last epoch only")
    nosave: bool = _setting(False, "save after the last epoch only")
    noplots: bool = _setting(False, "draw no pictures")
    seed: int = _setting(0, "seed of weights, order and augmentation")
    device: str = _setting("", "'' = what the launcher gives, `cpu`, `0`, or `0,1` for as many processes")
    mixed_precision: str = _setting("", "no, bf16 or fp16; '' = what `accelerate config` says, else no")
    ddp_timeout: float = _setting(1800.0, "seconds after which a collective that a rank does not reach fails")
    watchdog: float = _setting(600.0, "seconds without progress after which the job is ended with a report; 0 = never")
    trackers: tuple[str, ...] = _setting((), "experiment trackers besides results.csv: tensorboard, wandb, ...")

    def __post_init__(self) -> None:
        faults = _Faults("run")
        for name in ("project", "name", "resume", "device"):
            faults.text(name, getattr(self, name))
        for name in ("exist_ok", "noval", "nosave", "noplots"):
            faults.flag(name, getattr(self, name))
        faults.number("epochs", self.epochs, 1, integer=True)
        faults.number("patience", self.patience, 0, integer=True)
        faults.number("save_period", self.save_period, -1, integer=True)
        faults.number("seed", self.seed, 0, 2**32 - 1, integer=True)
        faults.number("ddp_timeout", self.ddp_timeout, 1)
        faults.number("watchdog", self.watchdog, 0)
        for tracker in self.trackers:
            faults.choice("trackers", tracker, TRACKERS)
        if self.mixed_precision != "":
            faults.choice("mixed_precision", self.mixed_precision, PRECISIONS)
        faults.raise_if_any()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """All settings of one training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        faults = _Faults("settings")
        faults.check(bool(self.model.cfg or self.model.weights), "model: one of model.cfg and model.weights is needed")
        faults.raise_if_any()

    def to_dict(self) -> dict[str, dict[str, object]]:
        """Plain nested dict of built-in types, ready for YAML and JSON; `build_config` reads it back."""
        nested: dict[str, dict[str, object]] = {}
        for part in dataclasses.fields(self):
            values = getattr(self, part.name)
            nested[part.name] = {
                item.name: list(value) if isinstance(value := getattr(values, item.name), tuple) else value
                for item in dataclasses.fields(values)
            }
        return nested


PARTS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "augment": AugmentConfig,
    "loss": LossConfig,
    "optim": OptimConfig,
    "eval": EvalConfig,
    "run": RunConfig,
}


def build_config(nested: dict[str, dict[str, object]]) -> TrainConfig:
    """A `TrainConfig` from known part and field names; missing ones take their defaults.

    Raises:
        ConfigError: with the faults of all parts together.
    """
    messages: list[str] = []
    parts: dict[str, object] = {}
    for part, kind in PARTS.items():
        values = {
            name: tuple(value) if isinstance(value, list) else _exact_number(kind, name, value)
            for name, value in nested.get(part, {}).items()
        }
        try:
            parts[part] = kind(**values)
        except _SettingsFault as fault:
            messages += fault.messages
    if messages:
        raise _SettingsFault(messages)
    return TrainConfig(**parts)  # type: ignore[arg-type]


def _exact_number(kind: type, name: str, value: object) -> object:
    # YAML reads `warmup_epochs: 3` as an int and `anchors: 3.412` as a float: both are what YOLOv5 users write.
    default = kind.__dataclass_fields__[name].default  # type: ignore[attr-defined]
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if name == "anchors" and isinstance(value, float) and math.isfinite(value):
        return round(value)
    return value


VAL_TASKS = ("val", "train", "test")


@dataclass(frozen=True, kw_only=True, slots=True)
class ValConfig:
    """All settings of one measurement of weights on a split."""

    weights: str = _setting("", "weights to measure: .safetensors, a run folder, or a YOLOv5 .pt")
    data: str = _setting("shapes", "data set YAML, or `shapes` for the built-in demo set")
    batch_size: int = _setting(32, "images per step over ALL processes")
    image_size: int = _setting(640, "long side of the network input, px")
    conf_thres: float = _setting(0.001, "lowest score that is kept")
    iou_thres: float = _setting(0.6, "overlap above which the weaker of two boxes is suppressed")
    max_det: int = _setting(300, "most detections per image")
    task: str = _setting("val", "the split to measure on: val, train or test")
    device: str = _setting("", "'' = what the launcher gives, `cpu`, `0`, or `0,1` for as many processes")
    workers: int = _setting(8, "most loader processes per rank; never more than the cores allow")
    single_cls: bool = _setting(False, "treat all classes as one")
    bad_images: str = _setting("skip", "truncated or undecodable images: skip, warn (keep what decodes), error")
    index_cache: str = _setting("", "folder for the data index; empty = the user's cache folder")
    augment: bool = _setting(False, "test-time augmentation: three scales, one of them mirrored")
    verbose: bool = _setting(False, "one line per class")
    half: bool = _setting(False, "fp16 on a GPU")
    project: str = _setting("runs/val", "folder of all measurements")
    name: str = _setting("exp", "name of this one; a number is appended if it exists")
    exist_ok: bool = _setting(False, "write into an existing folder")
    noplots: bool = _setting(False, "draw no pictures")

    def __post_init__(self) -> None:
        faults = _Faults("val")
        for name in ("weights", "data", "device", "project", "name", "index_cache"):
            faults.text(name, getattr(self, name))
        faults.choice("bad_images", self.bad_images, BAD_IMAGE_POLICIES)
        for name in ("single_cls", "augment", "verbose", "half", "exist_ok", "noplots"):
            faults.flag(name, getattr(self, name))
        faults.check(self.weights != "", "weights is empty, must name the weights to measure")
        faults.choice("task", self.task, VAL_TASKS)
        faults.number("batch_size", self.batch_size, 1, integer=True)
        faults.number("image_size", self.image_size, 32, 16384, integer=True)
        faults.number("conf_thres", self.conf_thres, 0, 1)
        faults.number("iou_thres", self.iou_thres, 0, 1)
        faults.number("max_det", self.max_det, 1, integer=True)
        faults.number("workers", self.workers, 0, integer=True)
        faults.check(not (self.half and self.device == "cpu"), "half is true, must be false on device cpu")
        faults.raise_if_any()

    def to_dict(self) -> dict[str, object]:
        """Plain dict of built-in types, ready for YAML and JSON."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
