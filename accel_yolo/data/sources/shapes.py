"""The built-in demo set: circles, squares and triangles on noisy backgrounds, drawn from a seed, never a file."""

from __future__ import annotations

import math
from collections.abc import Mapping

import cv2
import numpy as np

from accel_yolo.data.table import Rows, ScanReport, SplitTable, build_table
from accel_yolo.errors import ConfigError, did_you_mean

NAMES = ("circle", "square", "triangle")
_CORNERS = (48, 4, 3)
DEFAULTS = {"num_train": 400, "num_val": 100, "image_size": 160, "seed": 0}
_SPLITS = ("train", "val")
_MAX_OBJECTS = 6
# Longest extent of a shape as a share of the image's side.
_EXTENT = (0.15, 0.50)
# An object may cover this share of another one's box.
_MAX_COVER = 0.10
_PLACING_TRIES = 12
# Least distance of a shape's colour from the background's, in levels summed over the channels.
_MIN_CONTRAST = 150
# Largest change of a level by noise.
_NOISE = 10
_JPEG_QUALITY = 95


def read_shapes(settings: Mapping[str, object]) -> dict[str, SplitTable]:
    """Draw the splits "train" and "val".

    Args:
        settings: any of `num_train`, `num_val` (images), `image_size` (side px) and `seed`; others are an error.
    """
    values = _checked(settings)
    counts = {"train": values["num_train"], "val": values["num_val"]}
    return {split: _draw_split(split, counts[split], values["image_size"], values["seed"]) for split in _SPLITS}


def _checked(settings: Mapping[str, object]) -> dict[str, int]:
    values = dict(DEFAULTS)
    for name, value in settings.items():
        if name not in DEFAULTS:
            raise ConfigError(
                "the shapes data set has no such setting.",
                found=repr(name),
                fix=did_you_mean(str(name), list(DEFAULTS)),
            )
        lowest = {"image_size": 32, "seed": 0}.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            raise ConfigError(
                "a setting of the shapes data set cannot be used.",
                found=f"{name}: {value!r}",
                fix=f"give a whole number, {lowest} or more.",
            )
        values[name] = value
    return values


def _draw_split(split: str, count: int, size: int, seed: int) -> SplitTable:
    contents, boxes, labels = [], [], []
    for number in range(count):
        rng = np.random.default_rng([seed, _SPLITS.index(split), number, size])
        image, image_boxes, image_labels = draw_image(size, rng)
        contents.append(cv2.imencode(".jpg", image[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])[1].tobytes())
        boxes.append(image_boxes)
        labels.append(image_labels)
    image_ids = [f"{split}-{number:05d}" for number in range(count)]
    rows = Rows(
        paths=[f"{image_id}.jpg" for image_id in image_ids],
        image_ids=image_ids,
        sizes_hw=np.full((count, 2), size),
        offsets=np.concatenate([[0], np.cumsum([len(image_labels) for image_labels in labels])]),
        boxes=np.concatenate(boxes),
        labels=np.concatenate(labels),
        contents=contents,
    )
    report = ScanReport(split, images=count, boxes=len(rows.boxes), classes=NAMES)
    return SplitTable(build_table(rows, NAMES), report)


def draw_image(size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One image (size, size, 3) uint8 RGB with 1 to 6 objects, their boxes (N, 4) xyxy px and labels (N,).

    A box is exactly that of the pixels of its object that can be seen.
    """
    background = rng.integers(40, 216, size=3)
    image = _background(size, background, rng)
    # Which object each pixel shows, counted from 1.
    owner = np.zeros((size, size), np.uint8)
    labels: list[int] = []
    taken = np.zeros((0, 4))
    for _ in range(rng.integers(1, _MAX_OBJECTS + 1)):
        for _ in range(_PLACING_TRIES):
            label = int(rng.integers(len(NAMES)))
            outline = _outline(label, size, rng)
            box = np.concatenate([outline.min(axis=0), outline.max(axis=0)])
            if not len(taken) or (_cover(box, taken) <= _MAX_COVER).all():
                taken = np.concatenate([taken, box[None]])
                labels.append(label)
                points = np.round(outline).astype(np.int32)
                cv2.fillPoly(image, [points], _colour(background, rng))
                cv2.fillPoly(owner, [points], len(labels))
                break
    noise = rng.integers(0, 2 * _NOISE + 1, size=image.shape, dtype=np.uint8)
    noisy = cv2.subtract(cv2.add(image, noise), np.full_like(noise, _NOISE))
    return noisy, _visible_boxes(owner, len(labels)), np.array(labels, np.int64)


def _background(size: int, colour: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A colour with soft blotches and thin lines: something to be told apart from objects."""
    blotches = (colour + rng.integers(-25, 26, size=(5, 5, 3))).astype(np.uint8)
    image = cv2.resize(blotches, (size, size), interpolation=cv2.INTER_CUBIC)
    for _ in range(rng.integers(0, 5)):
        start, end = rng.integers(0, size, size=(2, 2)).tolist()
        cv2.line(image, start, end, rng.integers(0, 256, size=3).tolist(), thickness=int(rng.integers(1, 3)))
    return image


def _outline(label: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """(P, 2) px: a shape of random size, place and rotation, whole inside the image."""
    corners = _CORNERS[label]
    angles = rng.uniform(0, 2 * math.pi) + np.arange(corners) * (2 * math.pi / corners)
    points = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    low = points.min(axis=0)
    extent = points.max(axis=0) - low
    scale = rng.uniform(*_EXTENT) * size / extent.max()
    return (points - low) * scale + rng.random(2) * (size - 1 - extent * scale)


def _cover(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(N,) intersection with each of the boxes (N, 4), as a share of the smaller of the two."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    areas = (others[:, 2:] - others[:, :2]).prod(axis=1)
    return sides.clip(0).prod(axis=1) / np.minimum(areas, (box[2:] - box[:2]).prod())


def _colour(background: np.ndarray, rng: np.random.Generator) -> list[int]:
    """Any colour far enough from the background, whatever the class."""
    while True:
        colour = rng.integers(0, 256, size=3)
        if np.abs(colour - background).sum() >= _MIN_CONTRAST:
            return colour.tolist()


def _visible_boxes(owner: np.ndarray, count: int) -> np.ndarray:
    boxes = np.zeros((count, 4))
    for number in range(count):
        shown = owner == number + 1
        columns, rows = np.flatnonzero(shown.any(axis=0)), np.flatnonzero(shown.any(axis=1))
        boxes[number] = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
    return boxes
