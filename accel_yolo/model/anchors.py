"""Do the anchors fit the boxes of a data set, and which would fit better?

Legend: N boxes, A anchors per cell, L detection levels. Sizes are (width, height) in px of the network's input.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from accel_yolo.errors import WeightsError
from accel_yolo.model.detector import DetectionModel, order_levels

logger = logging.getLogger(__name__)

GOOD_RECALL = 0.98
GENERATIONS = 1000
KMEANS_RESTARTS = 30
# Boxes with both sides below this carry no shape; no anchor side is made smaller either.
SMALLEST_SIDE = 2.0
# The search looks at no more than a sample of this size; what it finds is judged by all boxes.
SEARCH_BOXES = 50_000
# Compared with the anchors at once; it bounds the memory.
BOXES_AT_ONCE = 50_000


@dataclass(frozen=True, slots=True)
class AnchorMetrics:
    """How well anchors fit boxes.

    Args:
        bpr: best possible recall: share of boxes that some anchor matches, in [0, 1].
        aat: matching anchors per box, over all levels.
        fitness: mean over boxes of the best agreement, counted only where it matches, in [0, 1].
    """

    bpr: float
    aat: float
    fitness: float


@dataclass(frozen=True, slots=True)
class AnchorResult:
    """What `fit_anchors` decided.

    Args:
        anchors: (L, A, 2) float64 px, the level of the finest stride in the place where `strides` has it.
        before: metrics of the anchors that were given.
        after: metrics of `anchors`; equal to `before` unless `changed`.
        changed: whether `anchors` differ from those given.
    """

    anchors: np.ndarray
    before: AnchorMetrics
    after: AnchorMetrics
    changed: bool


def check_anchors(label_sizes: np.ndarray, anchors: np.ndarray, *, threshold: float) -> AnchorMetrics:
    """How well `anchors` fit.

    Args:
        label_sizes: (N, 2) px; zero boxes give zeros.
        anchors: (..., 2) px.
        threshold: largest ratio of a side of a box to that of a matching anchor (`anchor_t`), above 1.

    Source: training.md section 10.
    """
    if len(label_sizes) == 0:
        return AnchorMetrics(0.0, 0.0, 0.0)
    matched = pairs = fitness = 0.0
    for start in range(0, len(label_sizes), BOXES_AT_ONCE):
        agreement = _agreement(label_sizes[start : start + BOXES_AT_ONCE], anchors)
        best = agreement.max(axis=0)
        is_match = best > 1 / threshold
        matched += is_match.sum()
        pairs += (agreement > 1 / threshold).sum()
        fitness += (best * is_match).sum()
    number = len(label_sizes)
    return AnchorMetrics(bpr=float(matched / number), aat=float(pairs / number), fitness=float(fitness / number))


def fit_anchors(
    label_sizes: np.ndarray,
    *,
    anchors: np.ndarray,
    strides: Sequence[float],
    threshold: float,
    image_size: int,
    seed: int | Sequence[int],
    generations: int = GENERATIONS,
) -> AnchorResult:
    """Keep anchors that fit; else search for better ones, and use them only if more boxes find an anchor.

    All boxes are asked whether anchors fit; of more than 50 000, the search sees a random sample of that size.

    Args:
        label_sizes: (N, 2) px, see `scale_label_sizes`.
        anchors: (L, A, 2) px, those of the model; placeholders (a side of 0) are always replaced.
        strides: L strides, px.
        threshold: `anchor_t`, above 1.
        image_size: side of the network's input, px.
        seed: of the search; the same seed gives the same anchors.
        generations: rounds of the genetic refinement.

    Source: training.md section 10.
    """
    anchors = np.asarray(anchors, dtype=np.float64)
    before = check_anchors(label_sizes, anchors, threshold=threshold)
    is_placeholder = bool((anchors <= 0).any())
    if len(label_sizes) == 0 or (before.bpr > GOOD_RECALL and not is_placeholder):
        return AnchorResult(anchors, before, before, changed=False)

    rng = np.random.default_rng(seed)
    usable = label_sizes[(label_sizes >= SMALLEST_SIDE).any(axis=1)]
    if len(usable) == 0:
        usable = label_sizes
    if len(usable) > SEARCH_BOXES:
        usable = rng.choice(usable, SEARCH_BOXES, replace=False, shuffle=False)
    flat = cluster_anchors(usable, num_anchors=anchors.shape[0] * anchors.shape[1], image_size=image_size, rng=rng)
    flat = refine_anchors(usable, flat, threshold=threshold, generations=generations, rng=rng)
    candidate = order_levels(flat.reshape(anchors.shape), strides)
    after = check_anchors(label_sizes, candidate, threshold=threshold)
    if after.bpr > before.bpr or is_placeholder:
        return AnchorResult(candidate, before, after, changed=True)
    return AnchorResult(anchors, before, before, changed=False)


def apply_anchors(model: DetectionModel, anchors: np.ndarray) -> None:
    """Give `anchors` (L, A, 2) px to a model, in the level order of its strides."""
    head = model.head
    if anchors.shape != tuple(head.anchors.shape) or not (np.isfinite(anchors) & (anchors > 0)).all():
        raise WeightsError(
            "these anchors do not suit the model.",
            found=f"shape {anchors.shape} with sides from {anchors.min():g} to {anchors.max():g} px",
            fix=f"give positive sizes, {tuple(head.anchors.shape)}: levels, anchors per level, (width, height).",
        )
    ordered = order_levels(anchors, head.strides)
    in_cells = ordered / np.asarray(head.strides).reshape(-1, 1, 1)
    with torch.no_grad():
        head.anchors.copy_(torch.from_numpy(in_cells))
    model.config["anchors"] = [[float(side) for side in level.ravel()] for level in ordered]


def refuse_placeholder_anchors(model: DetectionModel) -> None:
    """Raise WeightsError if the model's anchors are placeholders: nothing could be learned from them."""
    if model.has_placeholder_anchors:
        raise WeightsError(
            "the model has no anchors yet, only their number.",
            found=f"anchors: {model.config['anchors']}",
            fix="let them be computed from the data (leave out --noautoanchor), or list sizes in the model YAML.",
        )


def scale_label_sizes(
    label_sizes: np.ndarray,
    image_sizes: np.ndarray,
    image_index: np.ndarray,
    *,
    image_size: int,
    seed: int | Sequence[int] | None = None,
) -> np.ndarray:
    """Sizes of boxes once the longer side of their image is `image_size`.

    Args:
        label_sizes: (N, 2) px of the original images.
        image_sizes: (number of images, 2) width, height px.
        image_index: (N,) row of `image_sizes` of every box.
        image_size: px.
        seed: with a seed, one factor from [0.9, 1.1) per image stands for the augmentation's scale.

    Returns:
        (N, 2) float64 px.
    """
    scale = image_size / image_sizes.max(axis=1)
    if seed is not None:
        scale = scale * np.random.default_rng(seed).uniform(0.9, 1.1, len(scale))
    return label_sizes * scale[image_index, None]


def cluster_anchors(
    label_sizes: np.ndarray, *, num_anchors: int, image_size: int, rng: np.random.Generator
) -> np.ndarray:
    """(num_anchors, 2) px: k-means centres by ascending area; random ones if the boxes form too few clusters."""
    # scipy costs a quarter of a second of start-up and is needed only when anchors do not fit.
    from scipy.cluster.vq import kmeans

    spread = label_sizes.std(axis=0)
    centres = np.empty((0, 2))
    if len(label_sizes) > num_anchors and (spread > 0).all():
        centres = kmeans(label_sizes / spread, num_anchors, iter=KMEANS_RESTARTS, rng=rng)[0] * spread
    if len(centres) != num_anchors:
        logger.warning(
            "%d boxes form fewer than %d clusters: anchors start from random sizes", len(label_sizes), num_anchors
        )
        centres = np.sort(rng.random(num_anchors * 2)).reshape(num_anchors, 2) * image_size
    return _by_area(centres)


def refine_anchors(
    label_sizes: np.ndarray, anchors: np.ndarray, *, threshold: float, generations: int, rng: np.random.Generator
) -> np.ndarray:
    """Random changes of (number, 2) px anchors, each kept if the fitness grows; the result is sorted by area."""
    fitness = check_anchors(label_sizes, anchors, threshold=threshold).fitness
    for _ in range(generations):
        factors = np.ones(anchors.shape)
        while (factors == 1).all():
            chosen = rng.random(anchors.shape) < 0.9
            factors = chosen * rng.random() * rng.standard_normal(anchors.shape) * 0.1 + 1
            factors = factors.clip(0.3, 3.0)
        candidate = np.maximum(anchors * factors, SMALLEST_SIDE)
        candidate_fitness = check_anchors(label_sizes, candidate, threshold=threshold).fitness
        if candidate_fitness > fitness:
            anchors, fitness = candidate, candidate_fitness
    return _by_area(anchors)


def _agreement(label_sizes: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    # (anchors, N): the smaller over both sides of min(box / anchor, anchor / box). A placeholder's side of 0 gives 0.
    boxes = np.asarray(label_sizes, dtype=np.float64).T
    sizes = np.asarray(anchors, dtype=np.float64).reshape(-1, 2)
    with np.errstate(divide="ignore"):
        widths = boxes[0] / sizes[:, :1]
        heights = boxes[1] / sizes[:, 1:]
        return np.minimum(np.minimum(widths, 1 / widths), np.minimum(heights, 1 / heights))


def _by_area(anchors: np.ndarray) -> np.ndarray:
    return anchors[np.argsort(anchors.prod(axis=1), kind="stable")]
