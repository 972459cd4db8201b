"""From YAML files, flags and keyword arguments to settings; finds the files of `configs/`.

A value comes from the last of these that names it: the defaults of `config/schema.py`, the recipe of the demo set when
no data is named, the run file (`--config`), the hyperparameter file (`--hyp`), flags, `--set part.field=value`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import yaml

from accel_yolo.config.schema import PARTS, TrainConfig, ValConfig, build_config
from accel_yolo.errors import AccelYoloError, ConfigError, did_you_mean

_PACKAGE = Path(__file__).resolve().parents[1]
_YAML_SUFFIXES = (".yaml", ".yml")

_DEFAULT = "default"
_RECIPE = "built-in recipe shapes"


@dataclass(frozen=True, slots=True)
class Flag:
    """One command-line flag, which is a keyword argument of `run()` as well.

    Args:
        names: its spellings with dashes, blank between them; the first is the attribute (`--batch-size`: `batch_size`).
        field: the setting that it sets; empty for the few flags that say how settings are found.
        help: a sentence; empty = that of the field.
        switch: takes no value. Fields that are true or false have switches anyway.
        inverted: the flag turns the field off.
        optional: what the flag alone, without a value, means.
        several: takes one or more values. Fields that are tuples do anyway.
        repeatable: may be given more than once.
        refused: why we do not support it; empty = we do.
        instead: what to do instead of a refused flag.
        harmless: values of a refused flag that ask for nothing (YOLOv5's own default).
    """

    names: str
    field: str = ""
    help: str = ""
    switch: bool = False
    inverted: bool = False
    optional: str = ""
    several: bool = False
    repeatable: bool = False
    refused: str = ""
    instead: str = ""
    harmless: tuple[object, ...] = ()

    @property
    def spellings(self) -> tuple[str, ...]:
        return tuple(self.names.split())

    @property
    def attribute(self) -> str:
        return _attribute(self.spellings[0])


@dataclass(frozen=True, slots=True)
class FlagTable:
    """The flags of one verb.

    Args:
        verb: the word after `accel-yolo`.
        flags: in the order of the help text.
        fields: every setting of the verb by its name.
    """

    verb: str
    flags: tuple[Flag, ...]
    fields: Mapping[str, dataclasses.Field[object]]

    @property
    def by_attribute(self) -> dict[str, Flag]:
        """Every spelling as an attribute (`imgsz`, `img`, `img_size`) -> its flag."""
        return {_attribute(spelling): flag for flag in self.flags for spelling in flag.spellings}


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings of one training run, and who set each.

    Args:
        config: the settings.
        origins: for every `part.field`, where its value comes from: "default", "--epochs", "hyp file ...", ...
        num_processes: how many processes `run()` is asked to start; None = as many as devices.
    """

    config: TrainConfig
    origins: dict[str, str]
    num_processes: int | None = None

    def describe(self) -> str:
        """The settings as a YAML run file that `--config` reads, with the origin of each value as a comment."""
        lines = []
        for part, values in self.config.to_dict().items():
            lines.append(f"{part}:")
            for name, value in values.items():
                lines.append(f"  {name}: {json.dumps(value)}".ljust(44) + f"  # {self.origins[f'{part}.{name}']}")
        return "\n".join(lines)


_SEE_EVOLVE = "leave it out: it belongs to --evolve, which is refused as well."
_SEE_TRACKER = (
    "name the tracker with `--trackers wandb`; its own environment variables (WANDB_ENTITY, ...) do the rest."
)

TRAIN = FlagTable(
    verb="train",
    fields={f"{part}.{item.name}": item for part, kind in PARTS.items() for item in dataclasses.fields(kind)},
    flags=(
        Flag("--config", help="run file: YAML with the parts that --print-config shows"),
        Flag("--weights", "model.weights"),
        Flag("--cfg", "model.cfg"),
        Flag("--data", "data.source"),
        Flag("--hyp", help="hyperparameter file in YOLOv5's format, or the name of one of ours (hyp.scratch-low)"),
        Flag("--epochs", "run.epochs"),
        Flag("--batch-size --batch", "data.batch_size"),
        Flag("--imgsz --img --img-size", "data.image_size"),
        Flag("--rect", "data.rect"),
        Flag("--resume", "run.resume", optional="last"),
        Flag("--nosave", "run.nosave"),
        Flag("--noval", "run.noval"),
        Flag("--noautoanchor", "model.autoanchor", "keep the anchors even if they do not fit the data", inverted=True),
        Flag("--noplots", "run.noplots"),
        Flag("--device", "run.device"),
        Flag("--multi-scale", "data.multi_scale"),
        Flag("--single-cls", "data.single_cls"),
        Flag("--optimizer", "optim.optimizer"),
        Flag("--sync-bn", "model.sync_bn"),
        Flag("--workers", "data.workers"),
        Flag("--project", "run.project"),
        Flag("--name", "run.name"),
        Flag("--exist-ok", "run.exist_ok"),
        Flag("--cos-lr", "optim.cos_lr"),
        Flag("--label-smoothing", "loss.label_smoothing"),
        Flag("--patience", "run.patience"),
        Flag("--freeze", "model.freeze"),
        Flag("--save-period", "run.save_period"),
        Flag("--seed", "run.seed"),
        Flag("--local-rank", help="accepted from old launchers and ignored: the environment's LOCAL_RANK counts"),
        Flag("--mixed-precision", "run.mixed_precision"),
        Flag("--ddp-timeout", "run.ddp_timeout"),
        Flag("--watchdog", "run.watchdog"),
        Flag("--bad-images", "data.bad_images"),
        Flag("--trackers", "run.trackers"),
        Flag("--index-cache", "data.index_cache"),
        Flag("--no-channels-last", "model.channels_last", "use NCHW inside the network", inverted=True),
        Flag("--num-processes", help="processes that run() starts; on the command line the launcher starts them"),
        Flag("--set", help="part.field=value: any setting by its own name; may be repeated", repeatable=True),
        Flag("--print-config", help="print every setting with its origin, and stop", switch=True),
        Flag(
            "--evolve",
            refused="hyperparameter evolution is not supported.",
            instead="choose a hyperparameter file with --hyp, or vary one value with `--set optim.lr0=0.02`.",
        ),
        Flag(
            "--evolve-population",
            refused="hyperparameter evolution is not supported.",
            instead=_SEE_EVOLVE,
            harmless=("data/hyps",),
        ),
        Flag("--resume-evolve", refused="hyperparameter evolution is not supported.", instead=_SEE_EVOLVE),
        Flag("--bucket", refused="cloud buckets for hyperparameter evolution are not supported.", instead=_SEE_EVOLVE),
        Flag(
            "--cache",
            refused="keeping decoded images in memory or on disk is not supported.",
            instead="leave it out; if loading is the bottleneck, raise --workers.",
        ),
        Flag(
            "--image-weights",
            refused="drawing images by the weakness of their classes is not supported.",
            instead="leave it out: every image is drawn once an epoch.",
        ),
        Flag(
            "--quad",
            refused="the quad loader is not supported.",
            instead="leave it out and train at a larger size: `--imgsz 1280` with a quarter of the batch.",
        ),
        Flag("--entity", refused="this is an option of one tracker.", instead=_SEE_TRACKER),
        Flag("--upload-dataset", refused="uploading the data set to a tracker is not supported.", instead=_SEE_TRACKER),
        Flag(
            "--bbox-interval",
            refused="this is an option of one tracker.",
            instead=_SEE_TRACKER,
            harmless=(-1, "-1"),
        ),
        Flag(
            "--artifact-alias",
            refused="this is an option of one tracker.",
            instead=_SEE_TRACKER,
            harmless=("latest",),
        ),
    ),
)

_PREDICTION_FILES = "writing predictions to files is not supported."
_NUMBERS_WITHOUT = "leave it out; the measured numbers are the same without it."

VAL = FlagTable(
    verb="val",
    fields={item.name: item for item in dataclasses.fields(ValConfig)},
    flags=(
        Flag("--data", "data"),
        Flag("--weights", "weights", several=True),
        Flag("--batch-size --batch", "batch_size"),
        Flag("--imgsz --img --img-size", "image_size"),
        Flag("--conf-thres", "conf_thres"),
        Flag("--iou-thres", "iou_thres"),
        Flag("--max-det", "max_det"),
        Flag("--task", "task"),
        Flag("--device", "device"),
        Flag("--workers", "workers"),
        Flag("--single-cls", "single_cls"),
        Flag("--bad-images", "bad_images"),
        Flag("--index-cache", "index_cache"),
        Flag("--augment", "augment"),
        Flag("--verbose", "verbose"),
        Flag("--half", "half"),
        Flag("--project", "project"),
        Flag("--name", "name"),
        Flag("--exist-ok", "exist_ok"),
        Flag("--noplots", "noplots"),
        Flag("--local-rank", help="accepted from old launchers and ignored: the environment's LOCAL_RANK counts"),
        Flag("--save-txt", switch=True, refused=_PREDICTION_FILES, instead=_NUMBERS_WITHOUT),
        Flag("--save-conf", switch=True, refused=_PREDICTION_FILES, instead=_NUMBERS_WITHOUT),
        Flag(
            "--save-json",
            switch=True,
            refused=_PREDICTION_FILES,
            instead="leave it out; the mAP that is printed follows COCO's rule already.",
        ),
        Flag(
            "--save-hybrid",
            switch=True,
            refused="labels mixed into the predictions make every number meaningless.",
            instead="leave it out.",
        ),
        Flag(
            "--dnn",
            switch=True,
            refused="ONNX files through OpenCV are not supported.",
            instead="leave it out and give --weights a .safetensors or a YOLOv5 .pt file.",
        ),
    ),
)

# The speed and study tasks of YOLOv5's val: what to run instead of them.
_REFUSED_TASKS = {
    "speed": "time one run: `accel-yolo val --task val --conf-thres 0.25 --iou-thres 0.45`.",
    "study": "run `accel-yolo val --imgsz N` once for each size.",
}

# Keys of a hyperparameter file -> settings. All numbers of three parts, and one of the model's.
HYP_FIELDS: dict[str, str] = {
    name.partition(".")[2]: name
    for name, item in TRAIN.fields.items()
    if name == "model.anchors"
    or (name.startswith(("optim.", "loss.", "augment.")) and not isinstance(item.default, (str, bool)))
}


def load_config(cfg: str | None = None, **options: object) -> TrainConfig:
    """The settings of a training run from keyword arguments named as YOLOv5's options.

    Args:
        cfg: model YAML, or the name of one of ours; None = what the other options imply.
        options: `data`, `weights`, `imgsz`, `batch_size`, `epochs`, `hyp` (a file or a dict), `set`
            (a dict `{"optim.lr0": 0.02}`), ...: every flag of `accel-yolo train`.

    Raises:
        ConfigError: for an unknown option or a value out of range.
    """
    return config_from_kwargs(cfg=cfg, **options).config


def config_from_kwargs(**options: object) -> Resolved:
    """`load_config` with the origin of every value; None means "not given"."""
    return resolve(options)


def parse_train_args(argv: Sequence[str] | None = None, *, known: bool = False) -> argparse.Namespace:
    """The options of `train` under YOLOv5's attribute names (`imgsz`, `batch_size`, ...); None where not given.

    Args:
        argv: words after the program's name; None = those of this process.
        known: ignore unknown words instead of refusing them.

    Raises:
        ConfigError: for an unknown flag, with the nearest known one.
    """
    return _parse(TRAIN, argv, known=known)


def parse_val_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of `val`; see `parse_train_args`."""
    return _parse(VAL, argv, known=False)


def resolve(options: argparse.Namespace | Mapping[str, object]) -> Resolved:
    """Settings from parsed flags (attributes may have been changed since) or from keyword arguments.

    Raises:
        ConfigError: for an unknown or refused option, an unreadable file, an unknown key, a value out of range.
    """
    given = _known_options(TRAIN, options)
    assigned = {name: (value, "--set") for name, value in _assignments(given.get("set", ())).items()}
    flags = _flag_layer(TRAIN, given, as_flags=isinstance(options, argparse.Namespace))

    layers: dict[str, tuple[object, str]] = {name: (item.default, _DEFAULT) for name, item in TRAIN.fields.items()}
    layers |= _base_layer(given.get("config"), explicit=flags | assigned)
    layers |= _hyp_layer(given["hyp"]) if "hyp" in given else {}
    layers |= flags | assigned
    # Weights know their architecture; a default must not contradict them.
    if layers["model.weights"][0] and layers["model.cfg"][1] in (_DEFAULT, _RECIPE):
        layers["model.cfg"] = ("", "the weights file")

    origins = {name: origin for name, (_, origin) in layers.items()}
    nested: dict[str, dict[str, object]] = {part: {} for part in PARTS}
    for name, (value, _) in layers.items():
        part, _, field = name.partition(".")
        nested[part][field] = value
    try:
        config = build_config(nested)
    except ConfigError as fault:
        raise _with_origins(fault, origins, verb="train") from None
    return Resolved(config=config, origins=origins, num_processes=_process_count(given.get("num_processes")))


def resolve_val(options: argparse.Namespace | Mapping[str, object]) -> ValConfig:
    """The settings of `val` from parsed flags or from keyword arguments; raises as `resolve` does."""
    given = _known_options(VAL, options)
    if (task := given.get("task")) in _REFUSED_TASKS:
        raise ConfigError("this task is not supported.", found=f"--task {task}", fix=_REFUSED_TASKS[str(task)])
    weights = given.get("weights")
    if isinstance(weights, (list, tuple)) and len(weights) > 1:
        raise ConfigError(
            "several weights at once (an ensemble) are not supported.",
            found=f"--weights {' '.join(map(str, weights))}",
            fix="measure one weights file at a time.",
        )
    layer = _flag_layer(VAL, given, as_flags=isinstance(options, argparse.Namespace))
    try:
        return ValConfig(**{name: value for name, (value, _) in layer.items()})  # type: ignore[arg-type]
    except ConfigError as fault:
        origins = {f"val.{name}": origin for name, (_, origin) in layer.items()}
        raise _with_origins(fault, origins, verb="val") from None


def opt_values(config: TrainConfig) -> dict[str, object]:
    """The settings that have a flag, under YOLOv5's option names: the content of `opt.yaml`."""
    nested = config.to_dict()
    values: dict[str, object] = {}
    for flag in TRAIN.flags:
        if flag.field:
            part, _, field = flag.field.partition(".")
            values[flag.attribute] = not nested[part][field] if flag.inverted else nested[part][field]
    return values


def hyp_values(config: TrainConfig) -> dict[str, object]:
    """The hyperparameters in the flat format of YOLOv5: the content of `hyp.yaml`."""
    nested = config.to_dict()
    values = {key: nested[name.partition(".")[0]][key] for key, name in HYP_FIELDS.items()}
    # In YOLOv5's files the key is absent unless anchors are to be computed.
    if not values["anchors"]:
        del values["anchors"]
    return values


def find_config(name: str, kind: str) -> Path:
    """The YAML file that a user means by `name`.

    Args:
        name: a path; or the file name of one of ours, `.yaml` optional. A relative path that does not exist, such as
            `data/coco128.yaml` or `models/yolov5s.yaml`, is looked up by its file name among ours.
        kind: folder of `configs/`: "models", "hyps", "data", "accelerate" or "recipes".

    Raises:
        ConfigError: if there is no such file; names the nearest of ours, or the files of the folder that was named.
    """
    given = Path(name).expanduser()
    # os.path answers no where pathlib raises, as for a name that is too long.
    if os.path.isfile(given):  # noqa: PTH113
        return given
    is_folder = os.path.isdir(given)  # noqa: PTH112
    stem = given.stem if given.suffix.lower() in _YAML_SUFFIXES else given.name
    # Who writes an absolute path, or that of a folder, means that very one: it must not silently become one of ours.
    if stem and not given.is_absolute() and not (is_folder and given.name != name):
        for suffix in _YAML_SUFFIXES:
            if os.path.isfile(path := _config_folder() / kind / f"{stem}{suffix}"):  # noqa: PTH113
                return path
    if is_folder:
        found = sorted(path.name for path in given.glob("*") if path.suffix.lower() in _YAML_SUFFIXES)
        raise ConfigError(
            "a YAML file is needed, and this is a folder.",
            found=f"{given}, which holds {', '.join(found[:10]) or 'no *.yaml or *.yml file'}",
            fix=f"name the file: {given / found[0]}." if found else "give the path of a YAML file.",
        )
    ours = sorted({path.stem for path in (_config_folder() / kind).glob("*.y*ml")})
    raise ConfigError(
        f"there is no such file, and none of that name in configs/{kind}.",
        found=repr(str(name)),
        fix=did_you_mean(stem, ours) if ours else "give the path of an existing YAML file.",
    )


def _config_folder() -> Path:
    """A wheel carries the folder inside the package; a checkout has it beside the package."""
    packed, checkout = _PACKAGE / "configs", _PACKAGE.parent
    # Without the second condition an installed package would read whatever `configs` lies in site-packages.
    if not packed.is_dir() and (checkout / "pyproject.toml").is_file():
        return checkout / "configs"
    return packed


def read_yaml(path: Path, *, error: type[AccelYoloError] = ConfigError) -> dict[object, object]:
    """The keys and values of a YAML file.

    Args:
        error: the class of the errors.

    Raises:
        AccelYoloError: `error`, if the file cannot be read, is not YAML, or is not a mapping.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except yaml.YAMLError as fault:
        mark = getattr(fault, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise error(
            "a file is not valid YAML.",
            found=f"{path}{line}: {getattr(fault, 'problem', None) or ' '.join(str(fault).split())}",
            fix="correct that line: YAML indents with blanks, wants a blank after the colon, and quotes around a text "
            "with a colon or a backslash in it.",
        ) from fault
    # A date such as 2024-13-45 is a ValueError; so is a text in another encoding.
    except (OSError, ValueError) as fault:
        raise error(
            "a YAML file cannot be read.",
            found=f"{path}: {fault}",
            fix="make it a UTF-8 text that you may read; put dates in quotes.",
        ) from fault
    if not isinstance(content, dict):
        raise error(
            "a YAML file holds no `key: value` lines.",
            found=f"{path} holds {'nothing' if content is None else type(content).__name__}",
            fix="compare it with the files of that kind in configs/.",
        )
    return content


# ---- parsing


class _Parser(argparse.ArgumentParser):
    """argparse that reports through our error, so that every complaint has the same three lines."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError("the command line cannot be read.", found=message, fix=f"see `{self.prog} --help`.")


def _parse(table: FlagTable, argv: Sequence[str] | None, *, known: bool) -> argparse.Namespace:
    words = list(sys.argv[1:] if argv is None else argv)
    options, unknown = _parser(table).parse_known_args([_dashed(word) for word in words])
    if unknown and not known:
        first = next((word for word in words if _dashed(word) == unknown[0]), unknown[0])
        raise _unknown_flag(table, first)
    return options


def _parser(table: FlagTable) -> _Parser:
    # Abbreviations would turn a typing error into another flag.
    parser = _Parser(prog=f"accel-yolo {table.verb}", allow_abbrev=False)
    refused = parser.add_argument_group("YOLOv5 flags that are refused, with the reason")
    for flag in table.flags:
        default = table.fields[flag.field].default if flag.field else None
        keywords: dict[str, object] = {"dest": flag.attribute, "default": None}
        if flag.switch or isinstance(default, bool):
            keywords |= {"action": "store_true"}
        elif flag.repeatable:
            keywords |= {"action": "append", "metavar": "VALUE"}
        else:
            several = flag.several or isinstance(default, tuple)
            optional = bool(flag.optional or flag.refused)
            keywords |= {"nargs": "+" if several else "?" if optional else None, "metavar": "VALUE"}
            keywords |= {"const": flag.optional or True} if optional else {}
            # Not `int`: a text that is no number goes on to the schema, which names the setting and its range.
            is_number = isinstance(default, (int, float)) or (several and bool(default))
            keywords |= {"type": _number} if is_number else {}
        keywords["help"] = _help_text(flag, table).replace("%", "%%")
        (refused if flag.refused else parser).add_argument(*flag.spellings, **keywords)  # type: ignore[arg-type]
    return parser


def _help_text(flag: Flag, table: FlagTable) -> str:
    if flag.refused:
        return flag.refused
    if not flag.field:
        return flag.help
    item = table.fields[flag.field]
    sentence = flag.help or item.metadata["help"]
    return sentence if isinstance(item.default, bool) else f"{sentence} (default: {item.default!r})"


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _attribute(spelling: str) -> str:
    return spelling.lstrip("-").replace("-", "_")


def _unknown_flag(table: FlagTable, word: str) -> ConfigError:
    name = _dashed(word).partition("=")[0]
    if not name.startswith("-"):
        fix = "put the name of its flag before it (a value with blanks needs quotes)."
        return ConfigError("a word on the command line belongs to no flag.", found=repr(word), fix=fix)
    return ConfigError("this flag is unknown.", found=word, fix=_nearest_option(table, _attribute(name), prefix="--"))


# ---- options -> layers of (value, origin) by field


def _known_options(table: FlagTable, options: argparse.Namespace | Mapping[str, object]) -> dict[str, object]:
    """The options that were given, by the attribute of their flag."""
    flags = table.by_attribute
    given: dict[str, object] = {}
    for name, value in (vars(options) if isinstance(options, argparse.Namespace) else options).items():
        if name not in flags:
            raise ConfigError("this option is unknown.", found=repr(name), fix=_nearest_option(table, name))
        if value is None:
            continue
        flag = flags[name]
        if flag.attribute in given:
            raise ConfigError(
                "one option is given twice under different names.",
                found=f"{name!r} and {flag.attribute!r} mean the same",
                fix=f"keep {flag.attribute!r} only.",
            )
        if flag.refused and value not in (False, "", *flag.harmless):
            raise ConfigError(f"{flag.spellings[0]}: {flag.refused}", found=f"{name} = {value!r}", fix=flag.instead)
        given[flag.attribute] = value
    return given


def _nearest_option(table: FlagTable, name: str, *, prefix: str = "") -> str:
    name = name.replace("-", "_")
    if table is TRAIN and name in HYP_FIELDS:
        return f"it is a hyperparameter: write `--set {HYP_FIELDS[name]}=...`, or put it into the file of --hyp."
    known = [attribute for attribute, flag in table.by_attribute.items() if not flag.refused]
    sentence = did_you_mean(name, known)
    if not prefix:
        return sentence
    if sentence.startswith("known"):
        return f"`accel-yolo {table.verb} --help` lists the flags."
    words = [prefix + word.replace("_", "-") if word in known else word for word in sentence.rstrip("?").split()]
    return " ".join(words) + "?"


def _flag_layer(table: FlagTable, given: Mapping[str, object], *, as_flags: bool) -> dict[str, tuple[object, str]]:
    layer = {}
    for attribute, value in given.items():
        flag = table.by_attribute[attribute]
        if not flag.field:
            continue
        if isinstance(value, bool) and flag.inverted:
            value = not value
        elif isinstance(value, bool) and flag.optional:
            value = flag.optional if value else ""
        elif flag.several and isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        origin = flag.spellings[0] if as_flags else f"{attribute}="
        layer[flag.field] = (_converted(table.fields[flag.field], value), origin)
    return layer


def _assignments(value: object) -> dict[str, object]:
    """`--set` as a list of `part.field=value`, or as a dict from Python -> values by field."""
    if isinstance(value, Mapping):
        pairs = [(str(name), item) for name, item in value.items()]
    else:
        pairs = []
        for text in [value] if isinstance(value, str) else value:  # type: ignore[attr-defined]
            name, equals, item = text.partition("=")
            if not equals:
                raise ConfigError(
                    "--set needs part.field=value.", found=repr(text), fix="write `--set optim.lr0=0.02`."
                )
            pairs.append((name.strip(), item))
    for name, _ in pairs:
        if name not in TRAIN.fields:
            raise ConfigError("--set names an unknown setting.", found=repr(name), fix=_nearest_field(name))
    return {name: _converted(TRAIN.fields[name], item) for name, item in pairs}


def _nearest_field(name: str) -> str:
    same_word = [field for field in TRAIN.fields if field.partition(".")[2] == name]
    if same_word:
        return f"did you mean {same_word[0]}?"
    near = did_you_mean(name, list(TRAIN.fields))
    return "`--print-config` lists all settings." if near.startswith("known") else near


def _base_layer(config: object, *, explicit: Mapping[str, tuple[object, str]]) -> dict[str, tuple[object, str]]:
    """What a run starts from: the run file, on the demo's recipe if nothing says which data or which run."""
    layer: dict[str, tuple[object, str]] = {}
    if config is not None:
        path = find_config(str(config), "recipes")
        layer = _run_file_layer(path, origin=f"run file {path}")
    named = {**layer, **explicit}
    if "data.source" in named or named.get("run.resume", ("", ""))[0]:
        return layer
    return _run_file_layer(find_config("shapes", "recipes"), origin=_RECIPE) | layer


def _run_file_layer(path: Path, *, origin: str) -> dict[str, tuple[object, str]]:
    layer = {}
    for part, values in read_yaml(path).items():
        if part not in PARTS:
            raise _unknown_key(str(part), path, list(PARTS))
        if not isinstance(values, dict):
            raise ConfigError(
                "a part of the run file is not a list of `field: value` lines.",
                found=f"{part}: {values!r} in {path}",
                fix="indent its fields below it, as `accel-yolo train --print-config` shows.",
            )
        for field, value in values.items():
            name = f"{part}.{field}"
            if name not in TRAIN.fields:
                names = [item.partition(".")[2] for item in TRAIN.fields if item.startswith(f"{part}.")]
                raise _unknown_key(str(field), path, names)
            layer[name] = (_converted(TRAIN.fields[name], value), origin)
    return layer


def _hyp_layer(hyp: object) -> dict[str, tuple[object, str]]:
    """Hyperparameters in YOLOv5's flat format. A key that the file lacks keeps the value of hyp.scratch-low."""
    if isinstance(hyp, Mapping):
        path, origin, values = Path("hyp"), "hyp=", dict(hyp)
    else:
        path = find_config(str(hyp), "hyps")
        origin, values = f"hyp file {path}", read_yaml(path)
    layer = {}
    for key, value in values.items():
        if key not in HYP_FIELDS:
            raise _unknown_key(str(key), path, list(HYP_FIELDS))
        name = HYP_FIELDS[key]
        layer[name] = (_converted(TRAIN.fields[name], value), origin)
    return layer


def _unknown_key(key: str, path: Path, known: list[str]) -> ConfigError:
    return ConfigError("a settings file has an unknown key.", found=f"{key!r} in {path}", fix=did_you_mean(key, known))


def _converted(item: dataclasses.Field[object], value: object) -> object:
    """`value` in the type of the setting where nothing is lost; otherwise unchanged, and the schema refuses it."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    default = item.default
    if isinstance(default, tuple):
        # Flags give ["0", "1"], Python gives 10 or [0, 1], YAML gives either, --set gives "0,1".
        words = list(value) if isinstance(value, (list, tuple, range)) else [value]
        pieces = [piece for word in words for piece in (word.split(",") if isinstance(word, str) else [word])]
        wanted = [piece for piece in pieces if piece != ""]
        return tuple(_number(piece) for piece in wanted) if default else tuple(wanted)
    if item.name == "device" and not isinstance(value, (str, bool)):
        return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    if isinstance(value, str) and isinstance(default, bool):
        return {"true": True, "false": False}.get(value.lower(), value)
    if isinstance(default, (int, float)):
        return _number(value)
    return value


def _number(value: object) -> object:
    # YAML 1.1 reads `1e-3` as a text, and flags are texts.
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return value


def _with_origins(fault: ConfigError, origins: Mapping[str, str], *, verb: str) -> ConfigError:
    """The same fault, each message with the file or flag that its value came from."""
    messages = []
    for message in fault.found.split("; "):
        origin = origins.get(message.partition(" ")[0], _DEFAULT)
        messages.append(message if origin == _DEFAULT else f"{message} (from {origin})")
    return ConfigError(fault.what, found="; ".join(messages), fix=f"correct it; `accel-yolo {verb} --help` lists all.")


def _process_count(value: object) -> int | None:
    count = _number(value)
    if count is None or (isinstance(count, int) and not isinstance(count, bool) and count >= 1):
        return count
    raise ConfigError("the number of processes is not a whole number from 1.", found=repr(value), fix="write e.g. 2.")
