"""Geometry of boxes: formats, overlap, letterbox mapping and non-maximum suppression.

Legend: N M boxes, B images in a batch, K classes. Boxes are xyxy (two corners) unless the name says cxcywh (centre,
width, height).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

Boxes = TypeVar("Boxes", Tensor, np.ndarray)
IouKind = Literal["iou", "giou", "diou", "ciou"]

# Candidates per image that enter suppression at most (eval.md section 1).
MAX_CANDIDATES = 30000
# Up to 1000 boxes torchvision suppresses all classes in one call; above, on the CPU, it makes one call per class.
FIRST_PREFIX = 1000
PREFIX_GROWTH = 4


def xyxy_to_cxcywh(boxes: Boxes) -> Boxes:
    """Boxes (..., 4) xyxy -> (..., 4) cxcywh of the same kind, type and unit."""
    converted = _copy(boxes)
    converted[..., :2] = (boxes[..., :2] + boxes[..., 2:]) / 2
    converted[..., 2:] = boxes[..., 2:] - boxes[..., :2]
    return converted


def cxcywh_to_xyxy(boxes: Boxes) -> Boxes:
    """Boxes (..., 4) cxcywh -> (..., 4) xyxy of the same kind, type and unit."""
    converted = _copy(boxes)
    half_size = boxes[..., 2:] / 2
    converted[..., :2] = boxes[..., :2] - half_size
    converted[..., 2:] = boxes[..., :2] + half_size
    return converted


def box_area(boxes: Boxes) -> Boxes:
    """Area (...) of boxes (..., 4) xyxy, in squared units; negative for a box with one pair of swapped corners."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def clip_boxes(boxes: Boxes, size_hw: tuple[float, float]) -> Boxes:
    """A copy of boxes (..., 4) xyxy with x in [0, width] and y in [0, height]; a box outside keeps no area."""
    height, width = size_hw
    clipped = _copy(boxes)
    clipped[..., 0::2] = boxes[..., 0::2].clip(0, width)
    clipped[..., 1::2] = boxes[..., 1::2].clip(0, height)
    return clipped


def _copy(boxes: Boxes) -> Boxes:
    return boxes.clone() if isinstance(boxes, Tensor) else boxes.copy()


def box_iou(boxes1: Boxes, boxes2: Boxes, *, eps: float = 1e-7) -> Boxes:
    """Overlap of every box in one set with every box in another.

    Args:
        boxes1: (N, 4) xyxy, any unit; a tensor or an array.
        boxes2: (M, 4) xyxy, the same unit and kind.
        eps: added to the union, so that two boxes without area have an overlap of 0 and not NaN.

    Returns:
        (N, M) in [0, 1].

    Raises:
        ValueError: if a last axis is not 4.
    """
    _check_last_axis(boxes1, boxes2)
    first, second = boxes1[:, None], boxes2[None]
    if isinstance(first, Tensor):
        upper_left, lower_right = first[..., :2].maximum(second[..., :2]), first[..., 2:].minimum(second[..., 2:])
    else:
        upper_left = np.maximum(first[..., :2], second[..., :2])
        lower_right = np.minimum(first[..., 2:], second[..., 2:])
    sides = (lower_right - upper_left).clip(0)
    intersection = sides[..., 0] * sides[..., 1]
    return intersection / (box_area(first) + box_area(second) - intersection + eps)


def paired_iou(boxes1: Tensor, boxes2: Tensor, *, kind: IouKind = "iou", eps: float = 1e-7) -> Tensor:
    """Overlap of each box with its partner, differentiable.

    Args:
        boxes1: (N, 4) cxcywh, any unit.
        boxes2: (N, 4) cxcywh, the same unit.
        kind: "iou"; "giou" subtracts the empty share of the enclosing box; "diou" the squared centre distance over
            the enclosing diagonal; "ciou" also the difference of aspect ratios.
        eps: added to the denominators.

    Returns:
        (N,); "iou" in [0, 1], "giou" and "diou" in [-1, 1], "ciou" may be slightly lower.

    Raises:
        ValueError: if a last axis is not 4.

    Source: Rezatofighi et al. 2019 (arXiv:1902.09630); Zheng et al. 2020 (arXiv:1911.08287), eq. 7 and 10.
    """
    _check_last_axis(boxes1, boxes2)
    centre1, size1 = boxes1[:, :2], boxes1[:, 2:]
    centre2, size2 = boxes2[:, :2], boxes2[:, 2:]
    lower1, upper1 = centre1 - size1 / 2, centre1 + size1 / 2
    lower2, upper2 = centre2 - size2 / 2, centre2 + size2 / 2

    intersection = (upper1.minimum(upper2) - lower1.maximum(lower2)).clamp(min=0).prod(dim=1)
    union = size1.prod(dim=1) + size2.prod(dim=1) - intersection + eps
    iou = intersection / union
    if kind == "iou":
        return iou

    enclosing = upper1.maximum(upper2) - lower1.minimum(lower2)
    if kind == "giou":
        enclosing_area = enclosing.prod(dim=1) + eps
        return iou - (enclosing_area - union) / enclosing_area

    distance = (centre2 - centre1).square().sum(dim=1) / (enclosing.square().sum(dim=1) + eps)
    if kind == "diou":
        return iou - distance

    angle1, angle2 = torch.atan(size1[:, 0] / size1[:, 1]), torch.atan(size2[:, 0] / size2[:, 1])
    aspect = (4 / math.pi**2) * (angle2 - angle1).square()
    with torch.no_grad():
        alpha = aspect / (aspect - iou + 1 + eps)
    return iou - (distance + aspect * alpha)


def _check_last_axis(*sets: Tensor | np.ndarray) -> None:
    for boxes in sets:
        if boxes.ndim != 2 or boxes.shape[1] != 4:
            raise ValueError(f"boxes must be (N, 4), found {tuple(boxes.shape)}")


class LetterboxPlan(NamedTuple):
    """How an image is scaled and padded to reach the network's input size."""

    # Input px per original px, before the inner size was rounded.
    ratio: float
    # (left, top) px, exact halves: what boxes are shifted by.
    pad: tuple[float, float]
    # (height, width) px of the scaled image.
    inner_size: tuple[int, int]
    # (top, bottom, left, right) px that are filled; an odd pixel goes to the bottom or the right.
    borders: tuple[int, int, int, int]
    # (height, width) px of the result.
    output_size: tuple[int, int]


def plan_letterbox(
    size_hw: tuple[int, int], target_hw: tuple[int, int], *, auto: bool = False, scale_up: bool = True, stride: int = 32
) -> LetterboxPlan:
    """How to fit an image into a target without changing its shape.

    Args:
        size_hw: (height, width) px of the image.
        target_hw: (height, width) px of the network's input.
        auto: pad only to the next multiple of `stride` (the smallest rectangle) instead of to the target.
        scale_up: whether a small image may be enlarged.
        stride: the network's largest stride, px; used with `auto` alone.
    """
    height, width = size_hw
    target_height, target_width = target_hw
    ratio = min(target_height / height, target_width / width)
    if not scale_up:
        ratio = min(ratio, 1.0)
    # The built-in round goes half to even, which the golden vectors ask for.
    inner_height, inner_width = round(height * ratio), round(width * ratio)
    missing_height, missing_width = target_height - inner_height, target_width - inner_width
    if auto:
        missing_height, missing_width = missing_height % stride, missing_width % stride
    top, bottom = _split_padding(missing_height / 2)
    left, right = _split_padding(missing_width / 2)
    return LetterboxPlan(
        ratio=ratio,
        pad=(missing_width / 2, missing_height / 2),
        inner_size=(inner_height, inner_width),
        borders=(top, bottom, left, right),
        output_size=(inner_height + top + bottom, inner_width + left + right),
    )


def _split_padding(half: float) -> tuple[int, int]:
    return round(half - 0.1), round(half + 0.1)


def scale_boxes(
    boxes: Boxes,
    input_hw: tuple[int, int],
    original_hw: tuple[int, int],
    *,
    ratio_pad: tuple[float, tuple[float, float]] | None = None,
) -> Boxes:
    """Boxes on the network's input -> boxes on the original image, clipped to it.

    Args:
        boxes: (N, 4) xyxy, px of the input.
        input_hw: (height, width) px of the input.
        original_hw: (height, width) px of the original image.
        ratio_pad: (input px per original px, (left, top) px) as stored by the letterbox; None derives both from the
            two sizes, which is right for a centred letterbox.

    Returns:
        (N, 4) xyxy, px of the original image, a copy.
    """
    if ratio_pad is None:
        gain = min(input_hw[0] / original_hw[0], input_hw[1] / original_hw[1])
        left, top = (input_hw[1] - original_hw[1] * gain) / 2, (input_hw[0] - original_hw[0] * gain) / 2
    else:
        gain, (left, top) = ratio_pad
    scaled = _copy(boxes)
    scaled[..., 0::2] = (boxes[..., 0::2] - left) / gain
    scaled[..., 1::2] = (boxes[..., 1::2] - top) / gain
    return clip_boxes(scaled, original_hw)


def make_divisible(value: float, divisor: int) -> int:
    """The smallest multiple of `divisor` that is not below `value`."""
    return math.ceil(value / divisor) * divisor


def check_image_size(size: int, stride: int, floor: int = 0) -> int:
    """Image side, px, rounded up to a multiple of the network's largest stride and to at least `floor`."""
    return max(make_divisible(size, stride), floor)


class Suppressed(NamedTuple):
    """The boxes of one image that survived suppression, best first."""

    # (M, 4) float32 xyxy, in the unit of the predictions.
    boxes: Tensor
    # (M,) float32, objectness times class probability.
    scores: Tensor
    # (M,) int64.
    labels: Tensor


def non_max_suppression(
    predictions: Tensor,
    *,
    conf_thres: float,
    iou_thres: float,
    multi_label: bool = False,
    agnostic: bool = False,
    max_det: int = 300,
    classes: Sequence[int] | None = None,
) -> list[Suppressed]:
    """Greedy non-maximum suppression of decoded predictions, image by image.

    The result is that of plain greedy suppression over the best 30000 candidates, however it is reached: suppression
    runs on the best 1000, and on more only while fewer than `max_det` survive (what survives among the best k is the
    beginning of what survives among all). Equal scores are ordered by row, then class. There is no time limit.

    Args:
        predictions: (B, N, 5 + K) cxcywh in px, objectness and K class probabilities; any float type.
        conf_thres: objectness and score must be above it.
        iou_thres: of two boxes of one class that overlap more than this, the weaker is dropped.
        multi_label: one candidate for every class above the threshold instead of the best class alone.
        agnostic: boxes of different classes suppress each other as well.
        max_det: most boxes kept per image.
        classes: keep these labels only; None keeps all.

    Returns:
        B results on the device of `predictions`; one without detections has shapes (0, 4), (0,), (0,).

    Raises:
        ValueError: if a threshold is outside [0, 1] or the last axis has no class.
    """
    for name, threshold in (("conf_thres", conf_thres), ("iou_thres", iou_thres)):
        if not 0 <= threshold <= 1:
            raise ValueError(f"{name} must be in [0, 1], found {threshold}")
    if predictions.ndim != 3 or predictions.shape[2] < 6:
        raise ValueError(f"predictions must be (B, N, 5 + K), found {tuple(predictions.shape)}")

    results = []
    for image_predictions in predictions.detach():
        rows = image_predictions[image_predictions[:, 4] > conf_thres].float()
        scores = _class_scores(rows, multi_label=multi_label, classes=classes)
        results.append(_suppress(rows[:, :4], scores, conf_thres, iou_thres, agnostic=agnostic, max_det=max_det))
    return results


def _class_scores(rows: Tensor, *, multi_label: bool, classes: Sequence[int] | None) -> Tensor:
    # (N, K); what is no candidate is 0, which is never above a threshold.
    scores = rows[:, 5:] * rows[:, 4:5]
    if not multi_label and scores.shape[1] > 1:
        best = scores.max(dim=1, keepdim=True)
        scores = torch.zeros_like(scores).scatter_(1, best.indices, best.values)
    if classes is not None:
        wanted = [label for label in classes if 0 <= label < scores.shape[1]]
        is_wanted = torch.zeros(scores.shape[1], device=scores.device)
        is_wanted[wanted] = 1
        scores = scores * is_wanted
    return scores


def _suppress(
    boxes_cxcywh: Tensor, scores: Tensor, conf_thres: float, iou_thres: float, *, agnostic: bool, max_det: int
) -> Suppressed:
    # torchvision costs seconds of start-up that `--help` must not pay.
    from torchvision.ops import batched_nms

    num_classes = scores.shape[1]
    flat_scores = scores.flatten()
    candidates = (flat_scores > conf_thres).nonzero().squeeze(1)
    candidate_scores = flat_scores[candidates]
    threshold = _float32_threshold(iou_thres)
    for limit in _prefixes(len(candidates)):
        best = _best_first(candidate_scores, limit)
        boxes = cxcywh_to_xyxy(boxes_cxcywh[candidates[best] // num_classes])
        labels = candidates[best] % num_classes
        # The position stands for the score: any falling sequence without ties does.
        falling = torch.arange(limit, 0, -1, dtype=torch.float64, device=boxes.device)
        kept = batched_nms(_apart_exactly(boxes), falling, labels * (not agnostic), threshold)[:max_det]
        if len(kept) == max_det:
            break
    return Suppressed(boxes[kept], candidate_scores[best[kept]], labels[kept])


def _prefixes(num_candidates: int) -> Iterator[int]:
    last = min(num_candidates, MAX_CANDIDATES)
    limit = FIRST_PREFIX
    while limit < last:
        yield limit
        limit *= PREFIX_GROWTH
    yield last


def _best_first(scores: Tensor, limit: int) -> Tensor:
    # topk alone picks arbitrarily among equal scores, so it only tells the lowest score that can still take part.
    if limit < len(scores):
        lowest = scores.topk(limit, sorted=False).values.min()
        contenders = (scores >= lowest).nonzero().squeeze(1)
        return contenders[scores[contenders].sort(descending=True, stable=True).indices[:limit]]
    return scores.sort(descending=True, stable=True).indices


def _apart_exactly(boxes: Tensor) -> Tensor:
    # torchvision keeps classes apart by shifting each by label * (largest coordinate + 1). In float32 that rounds
    # coordinates and changes what survives, and below zero the shifted classes would still touch.
    if not len(boxes):
        return boxes.double()
    return boxes.double() - boxes.min().double()


def _float32_threshold(iou_thres: float) -> float:
    # An overlap that equals the threshold is common among boxes on whole pixels. Elsewhere it is computed in float32,
    # where 3/5 is above 0.6; rounding the threshold to where float32 rounds makes float64 decide alike.
    above = np.float32(iou_thres)
    if float(above) <= iou_thres:
        above = np.nextafter(above, np.float32(np.inf))
    below = np.nextafter(above, np.float32(-np.inf))
    return (float(above) + float(below)) / 2
