"""The contract of the Arrow table that every source of labelled images becomes, and the only judge of its rows.

Legend: R rows (images), M objects of all rows, flat. Boxes are xyxy px of the upright image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, Features, Image, List, Value
from datasets.table import InMemoryTable

from accel_yolo.errors import DataError

# A box may leave its image by this much and is clipped; further out it is a wrong label (design.md, "The table").
MAX_OVERSHOOT_PX = 1.0
# Centre and size written with six decimals round to this share of a side: no finding, but clipped all the same.
ROUNDING = 1e-6
# A tool that rounds coarsely clips boxes by the hundred thousand; they are used, and so many examples say it all.
MAX_CLIPPED_FINDINGS = 1000


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a reader dropped or changed."""

    file: str
    # 1-based line of a label file; None for the file as a whole.
    line: int | None
    reason: str
    # "rejected", "clipped", "duplicate" or "damaged".
    verdict: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.reason}"


@dataclass(slots=True)
class ScanReport:
    """What a split holds and what was wrong with it (design.md, Decision 15).

    Args:
        images: all images, background and damaged ones included.
        boxes: usable boxes, without ignored ones.
        rejected: label rows that were left out.
        ignored: boxes that are neither learned nor counted (COCO iscrowd, VOC difficult).
        background: images of the table without a usable box.
        unlabelled: those among them that have no label file at all.
        clipped: boxes that left their image by at most a pixel.
        duplicates: label rows left out because an equal row stands before them.
        damaged: images that cannot be read whole.
        classes: names in label order.
        findings: every single one, of clipped boxes the first `MAX_CLIPPED_FINDINGS`.
    """

    split: str
    images: int = 0
    boxes: int = 0
    rejected: int = 0
    ignored: int = 0
    background: int = 0
    unlabelled: int = 0
    clipped: int = 0
    duplicates: int = 0
    damaged: int = 0
    classes: tuple[str, ...] = ()
    findings: list[Finding] = field(default_factory=list)

    def summary(self) -> str:
        """One line: images and boxes, and every other count that is not zero."""
        parts = [f"{self.images} images", f"{self.boxes} boxes"]
        for name in ("background", "ignored", "rejected", "clipped", "duplicates", "damaged"):
            if count := getattr(self, name):
                parts.append(f"{count} {name}")
        return f"{self.split}: " + ", ".join(parts)

    def to_dict(self) -> dict[str, object]:
        """Built-in types only, ready for JSON; `from_dict` reads it back."""
        # `asdict` copies recursively, which takes seconds for a large set of bad labels.
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        findings = [
            {"file": finding.file, "line": finding.line, "reason": finding.reason, "verdict": finding.verdict}
            for finding in self.findings
        ]
        return {**values, "classes": list(self.classes), "findings": findings}

    @classmethod
    def from_dict(cls, values: dict) -> ScanReport:
        findings = [Finding(**finding) for finding in values["findings"]]
        return cls(**{**values, "classes": tuple(values["classes"]), "findings": findings})


class SplitTable(NamedTuple):
    """One split: its rows, and what its reader found."""

    table: Dataset
    report: ScanReport


@dataclass(slots=True)
class Rows:
    """What a reader hands over: flat columns, already judged.

    Args:
        paths: R file paths, or names if `contents` is given.
        image_ids: R names.
        sizes_hw: (R, 2) int, height and width px of the upright image.
        offsets: (R + 1,) int64: objects of row r are offsets[r] : offsets[r + 1].
        boxes: (M, 4) float64.
        labels: (M,) int64 in [0, K).
        ignore: (M,) bool; None = none is ignored.
        segments: M entries: polygons (P, 2) px of the object, or an empty list; None when no object has one.
        contents: R encoded images, when they are not files.
    """

    paths: Sequence[str]
    image_ids: Sequence[str]
    sizes_hw: np.ndarray
    offsets: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray
    ignore: np.ndarray | None = None
    segments: list[list[np.ndarray]] | None = None
    contents: Sequence[bytes] | None = None


def table_features(names: Sequence[str], *, has_segments: bool = False) -> Features:
    """The columns of the table and their types."""
    objects = {
        # float64, so that normalised labels come back unchanged.
        "bbox": List(List(Value("float64"), length=4)),
        "label": List(ClassLabel(names=list(names))),
        "ignore": List(Value("bool")),
    }
    if has_segments:
        # An object has several polygons (none if it is a box), each x1 y1 x2 y2 ...
        objects["segments"] = List(List(List(Value("float32"))))
    return Features(
        {
            "image": Image(decode=False),
            "image_id": Value("string"),
            "width": Value("int32"),
            "height": Value("int32"),
            "objects": objects,
        }
    )


def build_table(rows: Rows, names: Sequence[str]) -> Dataset:
    """The table of `rows`, built from flat arrays (a hundred times faster than row by row)."""
    has_segments = rows.segments is not None and any(rows.segments)
    schema = table_features(names, has_segments=has_segments).arrow_schema
    offsets = pa.array(rows.offsets, pa.int32())
    boxes = pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(rows.boxes, np.float64).reshape(-1)), 4)
    ignore = np.zeros(len(rows.labels), bool) if rows.ignore is None else rows.ignore
    columns = {
        "bbox": pa.ListArray.from_arrays(offsets, boxes),
        "label": pa.ListArray.from_arrays(offsets, pa.array(rows.labels, pa.int64())),
        "ignore": pa.ListArray.from_arrays(offsets, pa.array(ignore, pa.bool_())),
    }
    if has_segments:
        columns["segments"] = pa.ListArray.from_arrays(offsets, _nested_polygons(rows.segments or []))
    count = len(rows.paths)
    contents = pa.nulls(count, pa.binary()) if rows.contents is None else pa.array(rows.contents, pa.binary())
    image = pa.StructArray.from_arrays([contents, pa.array(rows.paths, pa.string())], names=["bytes", "path"])
    table = pa.table(
        {
            "image": image,
            "image_id": pa.array(rows.image_ids, pa.string()),
            "width": pa.array(rows.sizes_hw[:, 1], pa.int32()),
            "height": pa.array(rows.sizes_hw[:, 0], pa.int32()),
            "objects": pa.StructArray.from_arrays(list(columns.values()), names=list(columns)),
        }
    )
    return Dataset(InMemoryTable(table.cast(schema)))


def _nested_polygons(segments: list[list[np.ndarray]]) -> pa.ListArray:
    polygons = [polygon for parts in segments for polygon in parts]
    parts_offsets = np.concatenate([[0], np.cumsum([len(parts) for parts in segments])])
    point_offsets = np.concatenate([[0], np.cumsum([2 * len(polygon) for polygon in polygons])])
    points = np.concatenate([np.asarray(polygon, np.float32).reshape(-1) for polygon in polygons])
    inner = pa.ListArray.from_arrays(pa.array(point_offsets, pa.int32()), pa.array(points))
    return pa.ListArray.from_arrays(pa.array(parts_offsets, pa.int32()), inner)


class Judgement(NamedTuple):
    """The verdict on M boxes.

    boxes (M, 4) are clipped to their images; `reasons` maps the position of a rejected box to why; `clipped` (M,)
    bool marks those that left their image by more than the rounding of six decimals.
    """

    boxes: np.ndarray
    reasons: dict[int, str]
    clipped: np.ndarray


def judge(boxes: np.ndarray, sizes_hw: np.ndarray) -> Judgement:
    """Decide which boxes are usable: finite, inside the image after clipping by at most a pixel, positive area.

    Args:
        boxes: (M, 4) float64 xyxy px, as labelled.
        sizes_hw: (M, 2) height and width px of each box's image.
    """
    limits = np.asarray(sizes_hw, np.float64)[:, [1, 0, 1, 0]].reshape(-1, 4)
    is_finite = np.isfinite(boxes).all(axis=1)
    outside = np.maximum(-boxes, boxes - limits)
    overshoot = outside.max(axis=1, initial=-np.inf)
    inside = np.clip(boxes, 0, limits)
    has_area = (boxes[:, 2:] > boxes[:, :2]).all(axis=1) & (inside[:, 2:] > inside[:, :2]).all(axis=1)

    reasons: dict[int, str] = {}
    for position in np.flatnonzero(~(is_finite & has_area & (overshoot <= MAX_OVERSHOOT_PX))).tolist():
        if not is_finite[position]:
            reasons[position] = "a coordinate is not finite"
        elif overshoot[position] > MAX_OVERSHOOT_PX:
            reasons[position] = f"the box leaves the image by {overshoot[position]:.4g} px"
        else:
            reasons[position] = "the box has no area"
    clipped = (outside > ROUNDING * limits).any(axis=1)
    clipped[list(reasons)] = False
    return Judgement(inside, reasons, clipped)


def class_names(table: Dataset) -> list[str]:
    """The class names of a table, in label order.

    Raises:
        DataError: if the table does not keep the contract.
    """
    features = table.features
    missing = [name for name in ("image", "image_id", "width", "height", "objects") if name not in features]
    if missing:
        raise DataError(
            "the table lacks a column.",
            found=f"columns {', '.join(features)}; missing {', '.join(missing)}",
            fix="build the table with accel_yolo.data.table.build_table, or add the column.",
        )
    label = features["objects"].get("label") if isinstance(features["objects"], dict) else None
    if not isinstance(label, List) or not isinstance(label.feature, ClassLabel):
        raise DataError(
            "objects.label has no class names.",
            found=f"objects is {features['objects']}",
            fix="cast the column to List(ClassLabel(names=[...])).",
        )
    return list(label.feature.names)


def merge_classes(table: Dataset, name: str) -> Dataset:
    """The same table with one class: every label is 0."""
    columns = table.with_format("arrow")[:]
    objects = _one_chunk(columns["objects"])
    fields = {field.name: objects.field(field.name) for field in objects.type}
    labels = fields["label"].flatten()
    zeros = pa.array(np.zeros(len(labels), np.int64))
    fields["label"] = pa.ListArray.from_arrays(pa.array(_rebased_offsets(fields["label"]), pa.int32()), zeros)
    merged = pa.StructArray.from_arrays(list(fields.values()), names=list(fields))
    schema = table_features([name], has_segments="segments" in fields).arrow_schema
    return Dataset(
        InMemoryTable(columns.set_column(columns.schema.get_field_index("objects"), "objects", merged).cast(schema))
    )


class FlatTable:
    """Flat arrays over a table's Arrow buffers: cheap to slice, cheap to send to a worker, no object per row.

    Attributes:
        names: class names in label order.
        sizes_hw: (R, 2) int32.
        offsets: (R + 1,) int64.
        boxes: (M, 4) float64.
        labels: (M,) int64.
        ignore: (M,) bool.
    """

    def __init__(self, table: Dataset) -> None:
        self.names = class_names(table)
        columns = table.with_format("arrow")[:]
        self._images = columns["image"]
        self._image_ids = columns["image_id"]
        self.sizes_hw = np.stack([columns["height"].to_numpy(), columns["width"].to_numpy()], axis=1).astype(np.int32)
        objects = columns["objects"]
        bbox = _one_chunk(pc.struct_field(objects, "bbox"))
        self.offsets = _rebased_offsets(bbox)
        self.boxes = bbox.flatten().flatten().to_numpy(zero_copy_only=False).reshape(-1, 4)
        self.labels = _one_chunk(pc.struct_field(objects, "label")).flatten().to_numpy(zero_copy_only=False)
        self.ignore = _one_chunk(pc.struct_field(objects, "ignore")).flatten().to_numpy(zero_copy_only=False)
        self._parts: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        if "segments" in table.features["objects"]:
            parts = _one_chunk(pc.struct_field(objects, "segments")).flatten()
            polygons = parts.flatten()
            points = polygons.flatten().to_numpy(zero_copy_only=False)
            self._parts = (_rebased_offsets(parts), _rebased_offsets(polygons), points)

    def __len__(self) -> int:
        return len(self.sizes_hw)

    def objects(self, row: int) -> slice:
        """Where the objects of a row stand in the flat columns."""
        return slice(int(self.offsets[row]), int(self.offsets[row + 1]))

    def segments(self, row: int) -> list[np.ndarray | None]:
        """For each object of a row its outline (P, 2) px, several parts joined; None for an object without one."""
        span = self.objects(row)
        if self._parts is None:
            return [None] * (span.stop - span.start)
        parts, polygons, points = self._parts
        outlines = (
            points[polygons[parts[position]] : polygons[parts[position + 1]]].reshape(-1, 2)
            for position in range(span.start, span.stop)
        )
        return [outline if len(outline) else None for outline in outlines]

    def name(self, row: int) -> str:
        """The path of a row's image, or its id if the image is not a file."""
        return self._images[row]["path"].as_py() or self._image_ids[row].as_py()

    def image_bytes(self, row: int) -> np.ndarray:
        """(n,) uint8, the encoded image.

        Raises:
            OSError: if the file cannot be read.
        """
        content = self._images[row]["bytes"]
        if content.is_valid:
            return np.frombuffer(content.as_buffer(), np.uint8)
        return np.fromfile(self._images[row]["path"].as_py(), np.uint8)


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _rebased_offsets(lists: pa.ListArray) -> np.ndarray:
    # A slice of an array keeps the offsets of the whole; flatten() does not keep the values before it.
    offsets = lists.offsets.to_numpy().astype(np.int64)
    return offsets - offsets[0] if len(offsets) else np.zeros(1, np.int64)
