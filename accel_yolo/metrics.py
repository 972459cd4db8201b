"""Detections and truths -> precision, recall, average precision, confusion; numpy around one library for COCO's AP.

Two families of numbers stand side by side: COCO's AP, from the library, is *the* mAP (fitness, best model); the
YOLO-style precision, recall, F1, AP and confusion matrix are ours and follow YOLOv5's rules (trapezoid over
interpolated precision, another matching), so that old logs can be compared.

Legend: M detections, N truths (flat over all images), K classes, Q classes that occur among the truths, 10 IoU
thresholds 0.50, 0.55 ... 0.95.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from accel_yolo.structures import Detections

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10).astype(np.float32)
CURVE_POINTS = 1000
# Share of the curve over which the mean F1 is smoothed before its maximum is taken (eval.md section 2).
F1_SMOOTHING = 0.1
CONFUSION_CONFIDENCE = 0.25
CONFUSION_IOU = 0.45
COCO_ENGINES = (
    ("hotcoco", "hotcoco"),
    ("faster_coco_eval", "faster_coco_eval"),
    ("pycocotools.coco", "pycocotools.cocoeval"),
)
# Truths of one class in one image times detections of it, over many images: pairs that are held in memory at once.
PAIRS_AT_ONCE = 2_000_000


@dataclass(frozen=True, slots=True)
class Truth:
    """The objects of one image, as labelled.

    Args:
        boxes: (N, 4) float, xyxy, px of the original image.
        labels: (N,) int in [0, K).
        ignore: (N,) bool: crowds and difficult objects, which are neither to be found nor wrong to find.
    """

    boxes: np.ndarray
    labels: np.ndarray
    ignore: np.ndarray

    def __post_init__(self) -> None:
        if self.boxes.ndim != 2 or self.boxes.shape[1] != 4:
            raise ValueError(f"boxes must be (N, 4), found {self.boxes.shape}")
        if not len(self.boxes) == len(self.labels) == len(self.ignore):
            raise ValueError(
                f"{len(self.boxes)} boxes, {len(self.labels)} labels, {len(self.ignore)} ignore flags of one image"
            )


@dataclass(frozen=True, slots=True)
class ClassResult:
    """One row of the table. Ratios are in [0, 1], and NaN for a class without truths.

    `ap50` and `ap50_95` are COCO's; precision, recall and f1 are read at `EvalResult.best_confidence`.
    """

    label: int
    name: str
    images: int
    instances: int
    precision: float
    recall: float
    f1: float
    ap50: float
    ap50_95: float
    yolo_ap50: float
    yolo_ap50_95: float


@dataclass(frozen=True, slots=True, eq=False)
class Curves:
    """What the pictures of a validation need.

    Args:
        labels: the Q classes that the rows of the curves belong to, ascending.
        confidences: (1000,) from 0 to 1.
        precision: (Q, 1000) at IoU 0.5 over `confidences`.
        recall: (Q, 1000) likewise.
        f1: (Q, 1000) likewise.
        recalls: (1000,) from 0 to 1, the axis of `precision_at_recall`.
        precision_at_recall: (Q, 1000) at IoU 0.5.
        confusion: (K + 1, K + 1) counts, rows predicted, columns true, last index background.
    """

    labels: tuple[int, ...]
    confidences: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    recalls: np.ndarray
    precision_at_recall: np.ndarray
    confusion: np.ndarray


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The outcome of one validation. Means are over the classes with truths; without any truth they are NaN.

    Args:
        precision, recall, f1: means over classes at `best_confidence`, IoU 0.5.
        best_confidence: where the smoothed mean F1 has its maximum; one for all classes.
        map50, map50_95: COCO's AP at IoU 0.5, and over 0.50:0.95.
        yolo_map50, yolo_map50_95: the same by YOLOv5's rules.
        per_class: K rows, classes without truths included.
        losses: validation losses by name.
        images: images seen, those without truths or detections included.
        instances: truths that count, ignored ones left out.
        coco_stats: COCO's twelve numbers in their usual order, -1 where there is nothing to average. Area ranges
            use the area of the box.
        curves: for pictures.
    """

    precision: float
    recall: float
    f1: float
    best_confidence: float
    map50: float
    map50_95: float
    yolo_map50: float
    yolo_map50_95: float
    per_class: tuple[ClassResult, ...]
    losses: dict[str, float]
    images: int
    instances: int
    coco_stats: tuple[float, ...]
    curves: Curves | None = field(default=None, compare=False, repr=False)

    @property
    def fitness(self) -> float:
        """What the best model is chosen by: 0.1 mAP50 + 0.9 mAP50-95; NaN where they are undefined."""
        return 0.1 * self.map50 + 0.9 * self.map50_95

    def to_dict(self) -> dict[str, Any]:
        """Built-in types ready for JSON, without the curves; NaN becomes None, which JSON can say."""
        scalars = ("precision", "recall", "f1", "best_confidence", "map50", "map50_95", "yolo_map50", "yolo_map50_95")
        return {
            **{name: _json_number(getattr(self, name)) for name in (*scalars, "fitness", "images", "instances")},
            "losses": {name: _json_number(value) for name, value in self.losses.items()},
            "coco_stats": list(self.coco_stats),
            "per_class": [
                {name: _json_number(getattr(row, name)) for name in ClassResult.__dataclass_fields__}
                for row in self.per_class
            ],
        }


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def score(
    detections: Sequence[Detections],
    truths: Sequence[Truth],
    *,
    names: Mapping[int, str],
    losses: Mapping[str, float] | None = None,
    with_curves: bool = False,
) -> EvalResult:
    """All numbers of a validation from the boxes of every image.

    Ignored truths (YOLO-style numbers; COCO's follow COCO): they count nowhere. A detection that is not correct at a
    threshold, and of whose own area an ignored truth of its class covers at least that share, is taken out there: it
    is neither right nor wrong.

    Args:
        detections: one per image, px of the original image; anything with `boxes`, `scores` and `labels`.
        truths: one per image, in the same order.
        names: class names by label, 0 to K - 1.
        losses: validation losses to carry along.
        with_curves: whether to make `EvalResult.curves`.

    Raises:
        ValueError: if the lists differ in length, a label is not among the names, or a number is not finite.
    """
    num_classes = len(names)
    found, real = _flatten(detections, truths, num_classes)
    countable = _only(real, ~real.ignore)
    covered = _covered_by_ignored(found, _only(real, real.ignore), num_classes)
    correct = match(found, countable, num_classes)
    yolo = _yolo_scores(found, correct, (covered[:, None] >= IOU_THRESHOLDS) & ~correct, countable, num_classes)
    coco = _coco_scores(found, real, num_images=len(truths), num_classes=num_classes)

    curves = None
    if with_curves:
        curves = Curves(
            labels=tuple(yolo.labels.tolist()),
            confidences=yolo.confidences,
            precision=yolo.precision,
            recall=yolo.recall,
            f1=yolo.f1,
            recalls=yolo.confidences,
            precision_at_recall=yolo.precision_at_recall,
            confusion=_confusion_matrix(found, countable, covered, num_classes),
        )
    rows = _class_rows(yolo, coco, countable, names)
    has_truths = len(yolo.labels) > 0
    return EvalResult(
        precision=_mean([row.precision for row in rows]),
        recall=_mean([row.recall for row in rows]),
        f1=_mean([row.f1 for row in rows]),
        best_confidence=float(yolo.confidences[yolo.best]) if has_truths else math.nan,
        map50=float(coco.stats[1]) if has_truths else math.nan,
        map50_95=float(coco.stats[0]) if has_truths else math.nan,
        yolo_map50=_mean([row.yolo_ap50 for row in rows]),
        yolo_map50_95=_mean([row.yolo_ap50_95 for row in rows]),
        per_class=rows,
        losses=dict(losses or {}),
        images=len(truths),
        instances=len(countable.labels),
        coco_stats=tuple(coco.stats.tolist()),
        curves=curves,
    )


def _class_rows(
    yolo: _YoloScores, coco: CocoScores, truths: FlatTruths, names: Mapping[int, str]
) -> tuple[ClassResult, ...]:
    num_classes = len(names)
    instances = np.bincount(truths.labels, minlength=num_classes)
    images = np.bincount(np.unique(truths.image * num_classes + truths.labels) % num_classes, minlength=num_classes)
    yolo_numbers = np.full((num_classes, 5), np.nan)
    at_best = [curve[:, yolo.best] for curve in (yolo.precision, yolo.recall, yolo.f1)]
    yolo_numbers[yolo.labels] = np.column_stack([*at_best, yolo.ap[:, 0], yolo.ap.mean(axis=1)])
    rows = []
    for label in range(num_classes):
        precision, recall, f1, yolo_ap50, yolo_ap50_95 = yolo_numbers[label].tolist()
        rows.append(
            ClassResult(
                label=label,
                name=names[label],
                images=int(images[label]),
                instances=int(instances[label]),
                precision=precision,
                recall=recall,
                f1=f1,
                ap50=float(coco.ap50[label]),
                ap50_95=float(coco.ap50_95[label]),
                yolo_ap50=yolo_ap50,
                yolo_ap50_95=yolo_ap50_95,
            )
        )
    return tuple(rows)


def _mean(values: list[float]) -> float:
    defined = [value for value in values if not math.isnan(value)]
    return float(np.mean(defined)) if defined else math.nan


class FlatDetections(NamedTuple):
    """The detections of all images, sorted by image and, within one, by falling score."""

    # (M,) int64, position of the image; (M, 4) float64 xyxy; (M,) float64; (M,) int64.
    image: np.ndarray
    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray


class FlatTruths(NamedTuple):
    """The truths of all images, sorted by image."""

    # (N,) int64, position of the image; (N, 4) float64 xyxy; (N,) int64; (N,) bool.
    image: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray
    ignore: np.ndarray


Flat = TypeVar("Flat", FlatDetections, FlatTruths)


def _only(flat: Flat, mask: np.ndarray) -> Flat:
    return type(flat)(*(column[mask] for column in flat))


def _flatten(
    detections: Sequence[Detections], truths: Sequence[Truth], num_classes: int
) -> tuple[FlatDetections, FlatTruths]:
    if len(detections) != len(truths):
        raise ValueError(f"detections of {len(detections)} images but truths of {len(truths)}")
    scores = _joined([item.scores for item in detections], np.float64)
    image = np.repeat(np.arange(len(detections)), [len(item.scores) for item in detections])
    order = np.lexsort((-scores, image))
    found = FlatDetections(
        image=image[order],
        boxes=_joined([item.boxes for item in detections], np.float64, (4,))[order],
        scores=scores[order],
        labels=_joined([item.labels for item in detections], np.int64)[order],
    )
    real = FlatTruths(
        image=np.repeat(np.arange(len(truths)), [len(item.labels) for item in truths]),
        boxes=_joined([item.boxes for item in truths], np.float64, (4,)),
        labels=_joined([item.labels for item in truths], np.int64),
        ignore=_joined([item.ignore for item in truths], np.bool_),
    )
    _check("detection", found.image, found.labels, np.column_stack([found.boxes, found.scores]), num_classes)
    _check("truth", real.image, real.labels, real.boxes, num_classes)
    return found, real


def _check(kind: str, image: np.ndarray, labels: np.ndarray, numbers: np.ndarray, num_classes: int) -> None:
    outside = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(outside):
        first = outside[0]
        raise ValueError(f"class {labels[first]} of a {kind} in image {image[first]} is outside [0, {num_classes})")
    broken = np.flatnonzero(~np.isfinite(numbers).all(axis=1))
    if len(broken):
        raise ValueError(f"a {kind} in image {image[broken[0]]} has a number that is not finite")


def _joined(parts: list[Any], dtype: type, shape: tuple[int, ...] = ()) -> np.ndarray:
    arrays = [part.detach().cpu().numpy() if isinstance(part, Tensor) else np.asarray(part) for part in parts]
    return np.concatenate([np.empty((0, *shape), dtype), *(array.astype(dtype, copy=False) for array in arrays)])


def match(found: FlatDetections, truths: FlatTruths, num_classes: int) -> np.ndarray:
    """Which detections are correct, by YOLOv5's rule.

    A detection is bound to the truth of its class and image that it overlaps most. Of several bound to one truth, the
    one with the highest score is correct, if its overlap reaches the threshold; the others are not given another.

    Returns:
        (M, 10) bool, one column per IoU threshold.
    """
    detection, truth, iou = _pairs(found, truths, num_classes, least_iou=float(IOU_THRESHOLDS[0]))
    # Of equal overlaps the last truth wins, as in the reference.
    detection, truth, iou = _best_of_each(detection, truth, iou)

    correct = np.zeros((len(found.scores), len(IOU_THRESHOLDS)), dtype=bool)
    for column, threshold in enumerate(IOU_THRESHOLDS):
        reaches = np.flatnonzero(iou >= threshold)
        # Detections of an image are sorted by score, so the first that claims a truth is its best.
        _, first = np.unique(truth[reaches], return_index=True)
        correct[detection[reaches[first]], column] = True
    return correct


def _pairs(
    found: FlatDetections, truths: FlatTruths, num_classes: int, *, least_iou: float, any_class: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Detection, truth and IoU of all pairs of one image, and one class, that overlap by `least_iou` or more."""
    found_areas, truth_areas = _areas(found), _areas(truths)
    parts = []
    for detection, truth, intersection in _intersections(found, truths, 1 if any_class else num_classes):
        union = found_areas[detection] + truth_areas[truth] - intersection
        iou = intersection / (union + np.float32(1e-7))
        keep = iou >= np.float32(least_iou)
        parts.append((detection[keep], truth[keep], iou[keep]))
    detections, partners, overlaps = zip(*parts, strict=True)
    return np.concatenate(detections), np.concatenate(partners), np.concatenate(overlaps)


def _covered_by_ignored(found: FlatDetections, ignored: FlatTruths, num_classes: int) -> np.ndarray:
    """(M,) the largest share of each detection's own area that one ignored truth of its class covers."""
    areas = _areas(found)
    covered = np.zeros(len(areas), dtype=np.float32)
    for detection, _, intersection in _intersections(found, ignored, num_classes):
        share = intersection / (areas[detection] + np.float32(1e-7))
        np.maximum.at(covered, detection, share)
    return covered


def _intersections(
    found: FlatDetections, truths: FlatTruths, num_classes: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    # Pairs of one group (image and class; with one class the labels fall away), as many at once as memory allows.
    found_boxes, truth_boxes = _in_single_precision(found), _in_single_precision(truths)
    found_group = found.image * num_classes + found.labels % num_classes
    truth_group = truths.image * num_classes + truths.labels % num_classes
    by_group = np.argsort(truth_group, kind="stable")
    sorted_groups = truth_group[by_group]
    start = np.searchsorted(sorted_groups, found_group, side="left")
    count = np.searchsorted(sorted_groups, found_group, side="right") - start
    partners = np.cumsum(count)
    chunk = partners // PAIRS_AT_ONCE
    for rows in np.split(np.arange(len(count)), np.flatnonzero(np.diff(chunk)) + 1):
        repeats = count[rows]
        detection = np.repeat(rows, repeats)
        within = np.arange(len(detection)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        truth = by_group[np.repeat(start[rows], repeats) + within]
        upper_left = np.maximum(found_boxes[detection, :2], truth_boxes[truth, :2])
        lower_right = np.minimum(found_boxes[detection, 2:], truth_boxes[truth, 2:])
        yield detection, truth, (lower_right - upper_left).clip(0).prod(axis=1)


def _areas(flat: FlatDetections | FlatTruths) -> np.ndarray:
    boxes = _in_single_precision(flat)
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def _in_single_precision(flat: FlatDetections | FlatTruths) -> np.ndarray:
    # As in the reference: it decides whether an overlap reaches a threshold that it equals, like 3/5 and 0.6.
    return flat.boxes.astype(np.float32)


def _best_of_each(key: np.ndarray, partner: np.ndarray, iou: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pair of largest IoU of every key, keys ascending; of equal IoUs the one with the last partner."""
    order = np.lexsort((partner, iou, key))
    key, partner, iou = key[order], partner[order], iou[order]
    is_last = np.append(key[1:] != key[:-1], True)[: len(key)]
    return key[is_last], partner[is_last], iou[is_last]


class _YoloScores(NamedTuple):
    # (Q,), (1000,), three of (Q, 1000), (Q, 1000), (Q, 10), and the index of the best confidence.
    labels: np.ndarray
    confidences: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    precision_at_recall: np.ndarray
    ap: np.ndarray
    best: int


def _yolo_scores(
    found: FlatDetections, correct: np.ndarray, left_out: np.ndarray, truths: FlatTruths, num_classes: int
) -> _YoloScores:
    """Curves and AP of the classes that occur among the truths.

    `correct` and `left_out` are (M, 10): right at a threshold, and neither right nor wrong at it.
    """
    instances = np.bincount(truths.labels, minlength=num_classes)
    labels = np.flatnonzero(instances)
    axis = np.linspace(0, 1, CURVE_POINTS)
    precision, recall, precision_at_recall = (np.zeros((len(labels), CURVE_POINTS)) for _ in range(3))
    ap = np.zeros((len(labels), len(IOU_THRESHOLDS)))

    order = np.lexsort((-found.scores, found.labels))
    bounds = np.searchsorted(found.labels[order], np.arange(num_classes + 1))
    for row, label in enumerate(labels):
        members = order[bounds[label] : bounds[label + 1]]
        for column in range(len(IOU_THRESHOLDS)):
            counted = members[~left_out[members, column]]
            # Without detections everything stays zero.
            if not len(counted):
                continue
            hits = np.cumsum(correct[counted, column])
            recalls = hits / (instances[label] + 1e-16)
            precisions = hits / np.arange(1, len(counted) + 1)
            ap[row, column], envelope = _average_precision(recalls, precisions)
            if column == 0:
                precision_at_recall[row] = np.interp(axis, *envelope)
                # interp wants rising positions: scores fall, so both are negated. Above the highest score nothing
                # is found, and nothing is wrong.
                recall[row] = np.interp(-axis, -found.scores[counted], recalls, left=0)
                precision[row] = np.interp(-axis, -found.scores[counted], precisions, left=1)
    f1 = 2 * precision * recall / (precision + recall + 1e-16)
    best = int(_smooth(f1.mean(axis=0)).argmax()) if len(labels) else 0
    return _YoloScores(labels, axis, precision, recall, f1, precision_at_recall, ap, best)


def _average_precision(recalls: np.ndarray, precisions: np.ndarray) -> tuple[float, tuple[np.ndarray, np.ndarray]]:
    """Trapezoid over 101 samples of the precision envelope, and the envelope (recalls, precisions) itself."""
    extended_recalls = np.concatenate([[0.0], recalls, [1.0]])
    extended_precisions = np.concatenate([[1.0], precisions, [0.0]])
    envelope = np.maximum.accumulate(extended_precisions[::-1])[::-1]
    samples = np.linspace(0, 1, 101)
    area = np.trapezoid(np.interp(samples, extended_recalls, envelope), samples)
    return float(area), (extended_recalls, envelope)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Box filter whose edges repeat the first and the last value."""
    width = round(len(values) * F1_SMOOTHING * 2) // 2 + 1
    padding = width // 2
    padded = np.concatenate([np.full(padding, values[0]), values, np.full(padding, values[-1])])
    return np.convolve(padded, np.ones(width) / width, mode="valid")


def _confusion_matrix(found: FlatDetections, truths: FlatTruths, covered: np.ndarray, num_classes: int) -> np.ndarray:
    """(K + 1, K + 1) counts, rows predicted, columns true, last index background.

    Every confident detection counts, in images without truths or matches as well (the reference leaves those out).
    Detections that an ignored truth of their class covers count only where they match.
    """
    confident = found.scores > CONFUSION_CONFIDENCE
    sure = _only(found, confident)
    detection, truth, iou = _pairs(sure, truths, num_classes, least_iou=CONFUSION_IOU, any_class=True)
    above = iou > np.float32(CONFUSION_IOU)
    detection, truth, iou = detection[above], truth[above], iou[above]
    # Each detection keeps the truth that it overlaps most, then each truth the detection that overlaps it most.
    detection, truth, iou = _best_of_each(detection, truth, iou)
    truth, detection, _ = _best_of_each(truth, detection, iou)

    matrix = np.zeros((num_classes + 1, num_classes + 1), dtype=np.int64)
    np.add.at(matrix, (sure.labels[detection], truths.labels[truth]), 1)
    is_missed = np.ones(len(truths.labels), dtype=bool)
    is_missed[truth] = False
    matrix[num_classes, :num_classes] = np.bincount(truths.labels[is_missed], minlength=num_classes)
    is_false = covered[confident] <= CONFUSION_IOU
    is_false[detection] = False
    matrix[:num_classes, num_classes] = np.bincount(sure.labels[is_false], minlength=num_classes)
    return matrix


class CocoScores(NamedTuple):
    """COCO's numbers from the library."""

    # (12,) float64: AP, AP50, AP75, AP small, medium, large, AR 1, 10, 100, AR small, medium, large; -1 is COCO's way
    # of saying that there was nothing to average.
    stats: np.ndarray
    # (K,) float64 each, NaN for classes without truths.
    ap50: np.ndarray
    ap50_95: np.ndarray


def coco_map(detections: Sequence[Detections], truths: Sequence[Truth], num_classes: int) -> CocoScores:
    """COCO's twelve numbers and the AP of each class, equal to pycocotools to the last bit.

    Args:
        detections: one per image, px of the original image; anything with `boxes`, `scores` and `labels`.
        truths: one per image, in the same order; `ignore` is COCO's `iscrowd`.
        num_classes: K.

    Raises:
        ValueError: if the lists differ in length, a label is out of range, or a number is not finite.
        ImportError: if no engine is installed.
    """
    found, real = _flatten(detections, truths, num_classes)
    return _coco_scores(found, real, num_images=len(truths), num_classes=num_classes)


def _coco_scores(found: FlatDetections, truths: FlatTruths, *, num_images: int, num_classes: int) -> CocoScores:
    # The engines disagree about, or stay silent on, what `_flatten` has refused.
    if not len(found.scores):
        is_present = np.bincount(truths.labels[~truths.ignore], minlength=num_classes) > 0
        per_class = np.where(is_present, 0.0, np.nan)
        return CocoScores(np.full(12, 0.0 if is_present.any() else -1.0), per_class, per_class)

    rows = np.column_stack([found.image + 1, _corner_and_sides(found.boxes), found.scores, found.labels])
    data_class, evaluator_class = _coco_engine()
    # They report on stdout, which belongs to the caller.
    with contextlib.redirect_stdout(io.StringIO()):
        annotated = data_class()
        annotated.dataset = _coco_dataset(truths, num_images, num_classes)
        annotated.createIndex()
        evaluator = evaluator_class(annotated, annotated.loadRes(rows), "bbox")
        evaluator.params.maxDets = [1, 10, 100]
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    seen = len(evaluator.params.imgIds)
    assert seen == num_images, f"the COCO engine saw {seen} images of {num_images}"
    # (10 thresholds, 101 recalls, K); area "all" and 100 detections; -1 for classes without truths.
    precision = np.asarray(evaluator.eval["precision"])[:, :, :, 0, 2]
    is_absent = (precision < 0).all(axis=(0, 1))
    return CocoScores(
        stats=np.asarray(evaluator.stats, dtype=np.float64),
        ap50=np.where(is_absent, np.nan, precision[0].mean(axis=0)),
        ap50_95=np.where(is_absent, np.nan, precision.mean(axis=(0, 1))),
    )


def _coco_engine() -> tuple[Any, Any]:
    """The classes COCO and COCOeval of the fastest engine that is installed."""
    for data_module, evaluator_module in COCO_ENGINES:
        try:
            data, evaluator = importlib.import_module(data_module), importlib.import_module(evaluator_module)
        except ImportError:
            continue
        kind = "COCOeval_faster" if data_module == "faster_coco_eval" else "COCOeval"
        return data.COCO, getattr(evaluator, kind)
    raise ImportError("no COCO engine is installed: pip install hotcoco (or faster-coco-eval, or pycocotools)")


def _coco_dataset(truths: FlatTruths, num_images: int, num_classes: int) -> dict[str, Any]:
    # Image and annotation ids start at 1: the engines take an annotation with id 0 for no match. Sizes are unused.
    boxes = _corner_and_sides(truths.boxes).tolist()
    columns = zip((truths.image + 1).tolist(), boxes, truths.labels.tolist(), truths.ignore.tolist(), strict=True)
    return {
        "info": {},
        "images": [
            {"id": image, "file_name": str(image), "width": 1, "height": 1} for image in range(1, num_images + 1)
        ],
        "annotations": [
            {
                "id": number,
                "image_id": image,
                "category_id": label,
                "bbox": box,
                "area": box[2] * box[3],
                "iscrowd": int(ignore),
            }
            for number, (image, box, label, ignore) in enumerate(columns, start=1)
        ],
        "categories": [{"id": label, "name": str(label)} for label in range(num_classes)],
    }


def _corner_and_sides(boxes: np.ndarray) -> np.ndarray:
    return np.column_stack([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]])
