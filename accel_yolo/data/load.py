"""From the name of a data set to its tables: picks the reader and keeps what it found."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from accel_yolo.config.load import find_config
from accel_yolo.data.index import ScanOptions, default_cache_folder, index_split
from accel_yolo.data.sources.shapes import NAMES as SHAPE_NAMES
from accel_yolo.data.sources.shapes import read_shapes
from accel_yolo.data.sources.yolo_txt import SPLITS, YoloSpec, find_images, label_path, load_yaml, read_spec
from accel_yolo.data.table import ScanReport, SplitTable, merge_classes
from accel_yolo.errors import ConfigError, DataError, did_you_mean

logger = logging.getLogger(__name__)

_SOURCES = ("shapes",)


@dataclass(frozen=True, slots=True)
class DataSets:
    """The splits of one data set.

    Args:
        splits: table and report of each split that was asked for.
        names: class number -> name.
        path: the YAML.
    """

    splits: dict[str, SplitTable]
    names: dict[int, str]
    path: Path

    @property
    def reports(self) -> dict[str, ScanReport]:
        """The report of each split."""
        return {split: table.report for split, table in self.splits.items()}


def load_data(
    source: str,
    *,
    splits: tuple[str, ...] | None = ("train", "val"),
    single_cls: bool = False,
    bad_images: str = "skip",
    index_cache: str = "",
) -> DataSets:
    """Read a data set.

    Args:
        source: a data YAML, or the name of one of ours; "shapes" is the built-in demo set.
        splits: which ones to read; None = all that the YAML has.
        single_cls: all classes become one, named "item" unless the data set has one name anyway.
        bad_images: "skip", "warn" or "error" (design.md, Decision 16).
        index_cache: folder for the index; empty = the user's cache folder.

    Raises:
        ConfigError: for a data file that does not exist or has an unknown key.
        DataError: for anything in it that cannot be used, a training split without images or boxes among them.
    """
    path = find_config(source, "data")
    values = load_yaml(path)
    # Exporters write a `source` beside these keys to say where a data set came from.
    if "source" in values and not values.keys() & {"train", "val", "names"}:
        tables, names = _drawn(path, values, splits, single_cls=single_cls)
    else:
        spec = read_spec(path, values)
        names = _merged_names(spec.names) if single_cls else spec.names
        options = ScanOptions(names=names, bad_images=bad_images, single_cls=single_cls)
        cache = Path(index_cache).expanduser() if index_cache else default_cache_folder()
        wanted = [split for split in SPLITS if split in spec.splits] if splits is None else splits
        tables = {split: _indexed(spec, split, options, cache) for split in wanted}
    for table in tables.values():
        logger.info("%s", table.report.summary())
        _warn(table.report, bad_images)
    if "train" in tables:
        _check_trainable(tables["train"], path)
    return DataSets(tables, dict(enumerate(names)), path)


def _indexed(spec: YoloSpec, split: str, options: ScanOptions, cache: Path) -> SplitTable:
    images = find_images(spec, split)
    return index_split(images, split=split, options=options, cache_folder=cache, slot=str(spec.file.resolve()))


def _merged_names(names: tuple[str, ...]) -> tuple[str, ...]:
    return names if len(names) == 1 else ("item",)


def _drawn(
    path: Path, values: dict[object, object], splits: tuple[str, ...] | None, *, single_cls: bool
) -> tuple[dict[str, SplitTable], tuple[str, ...]]:
    settings = {str(name): value for name, value in values.items()}
    source = settings.pop("source")
    if source not in _SOURCES:
        raise ConfigError(
            "the data file names an unknown source.",
            found=f"source: {source!r} in {path}",
            fix=did_you_mean(str(source), _SOURCES),
        )
    drawn = read_shapes(settings)
    if missing := [split for split in splits or () if split not in drawn]:
        raise DataError(
            f"the built-in shapes have no `{missing[0]}` split.", found=str(path), fix="use `train` or `val`."
        )
    tables = {split: table for split, table in drawn.items() if splits is None or split in splits}
    if not single_cls:
        return tables, SHAPE_NAMES
    names = _merged_names(SHAPE_NAMES)
    return {
        split: SplitTable(merge_classes(table.table, names[0]), replace(table.report, classes=names))
        for split, table in tables.items()
    }, names


def _warn(report: ScanReport, bad_images: str) -> None:
    """One warning of what was left out, and one of a split that measures nothing."""
    if report.rejected or report.duplicates or report.damaged:
        fate = "used as far as they give pixels" if bad_images == "warn" else "left out"
        counts = {
            "rejected label rows": report.rejected,
            "duplicate label rows": report.duplicates,
            f"damaged images ({fate})": report.damaged,
        }
        first = [str(finding) for finding in report.findings if finding.verdict != "clipped"][:3]
        logger.warning(
            "%s: %s. First: %s. The whole list is in data.json of the run folder.",
            report.split,
            ", ".join(f"{what}: {count}" for what, count in counts.items() if count),
            "; ".join(first),
        )
    if report.split != "train" and not report.boxes:
        logger.warning("%s: no image has a usable box, so nothing can be measured on it", report.split)


def _check_trainable(table: SplitTable, path: Path) -> None:
    report = table.report
    if not len(table.table):
        raise DataError(
            "there is no image to train on.",
            found=f"{report.summary()} in {path}",
            fix="correct `train` in the data file; it names a folder of images or a text file with one image a line.",
        )
    if not report.boxes:
        first = f"; first finding: {report.findings[0]}" if report.findings else ""
        image = table.table[0]["image"]["path"]
        raise DataError(
            "no training image has a usable box.",
            found=f"{report.summary()}, {report.unlabelled} images without a label file{first}",
            fix=f"put the labels where they are looked for: those of {image} at {label_path(Path(image))}.",
        )
