"""A table and a key become a `Sample`, samples become a `Batch`; and the loaders that do it in worker processes.

Legend: B images of a batch, T objects of a batch.
"""

from __future__ import annotations

import errno
import functools
import logging
import math
import os
from collections.abc import Sequence

import cv2
import numpy as np
import torch
from datasets import Dataset as Table
from torch.utils.data import DataLoader, Dataset

from accel_yolo.boxes import clip_boxes, xyxy_to_cxcywh
from accel_yolo.config.schema import AugmentConfig
from accel_yolo.data.mosaic import Layout, draw_centre, mosaic_placements, show_random
from accel_yolo.data.order import EpochSampler, ValBatchSampler, generator
from accel_yolo.data.table import FlatTable
from accel_yolo.data.transforms import (
    FILL,
    UnreadableImage,
    as_letterbox,
    blend,
    decode_image,
    draw_geometry,
    flip,
    jitter_hsv,
    letterbox,
    letterbox_placement,
)
from accel_yolo.data.workers import choose_workers, start_loader_worker
from accel_yolo.structures import Batch, Letterbox, Sample, SampleKey, Targets

logger = logging.getLogger(__name__)

# Streams of a sample's chance. Each draws everything it may need, in the order written in the function that uses it,
# so that one setting does not change what another one draws.
GEOMETRY, MIXUP, COLOUR, PASTING, MIXUP_PASTING = range(5)
# Objects end this far inside the image, so that normalised values stay below 1 (data.md section 5).
_EDGE_MARGIN = 0.001
# Failures of the machine, not of the file: hiding them would turn every image grey.
_MACHINE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class DetectionDataset(Dataset[Sample]):
    """Samples of a table; `dataset[key]` depends on the key and the seed alone.

    Args:
        table: rows that keep the contract of `data/table.py`.
        image_size: side px of the square input, and long side of images before a rectangular letterbox.
        augment: how images are changed for training; None = validation.
        seed: of the run.
        lenient: use what there is of truncated images (the policy "warn"); otherwise they become grey.
    """

    def __init__(
        self,
        table: Table,
        *,
        image_size: int,
        augment: AugmentConfig | None = None,
        seed: int = 0,
        lenient: bool = False,
    ) -> None:
        self.flat = FlatTable(table)
        self.image_size = image_size
        self.augment = augment
        self.seed = seed
        self.lenient = lenient
        self._warned: set[int] = set()

    def __len__(self) -> int:
        return len(self.flat)

    def __getitem__(self, key: SampleKey) -> Sample:
        return self._evaluation_sample(key) if self.augment is None else self._training_sample(key, self.augment)

    def _evaluation_sample(self, key: SampleKey) -> Sample:
        target_hw = key.input_size or (self.image_size, self.image_size)
        boxes, labels, _ = self._objects(key.index)
        placement = letterbox_placement(self._size(key.index), target_hw, long_side=self.image_size)
        try:
            image, mapping = letterbox(self._load(key.index), placement, target_hw)
        except UnreadableImage:
            image, mapping = np.full((*target_hw, 3), FILL, np.uint8), as_letterbox(placement, target_hw)
            boxes, labels = boxes[:0], labels[:0]
        return _sample(key, image, placement.boxes(boxes), labels, mapping)

    def _training_sample(self, key: SampleKey, augment: AugmentConfig) -> Sample:
        """Geometry, then MixUp, then colour and flips, each from its own stream."""
        rng = generator(self.seed, key, GEOMETRY)
        # Drawn also for rectangular batches, which have no mosaic.
        is_mosaic = rng.random() < augment.mosaic and key.input_size is None
        if is_mosaic:
            image, boxes, labels = self._mosaic(key.index, augment, rng, generator(self.seed, key, PASTING))
            image, boxes, labels = self._mixup(image, boxes, labels, key, augment)
        else:
            image, boxes, labels = self._single(key, augment, rng)
        image, boxes = _recolour_and_flip(image, boxes, augment, generator(self.seed, key, COLOUR))
        return _sample(key, image, boxes, labels, None)

    def _mosaic(
        self, index: int, augment: AugmentConfig, rng: np.random.Generator, pasting: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draws three partners from all rows, the order of the four, the centre; then `show_random`."""
        rows = rng.permutation([index, *rng.integers(len(self), size=3)]).tolist()
        centre = draw_centre(self.image_size, rng)
        layout = Layout(
            mosaic_placements([self._size(row) for row in rows], centre, self.image_size),
            [self._objects(row) for row in rows],
            lambda position, reduction: self._load(rows[position], reduction),
            (2 * self.image_size, 2 * self.image_size),
        )
        return show_random(layout, augment, (self.image_size, self.image_size), rng=rng, pasting=pasting)

    def _mixup(
        self, image: np.ndarray, boxes: np.ndarray, labels: np.ndarray, key: SampleKey, augment: AugmentConfig
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draws whether, the share, the row; then a second mosaic."""
        rng = generator(self.seed, key, MIXUP)
        if rng.random() >= augment.mixup:
            return image, boxes, labels
        share, row = rng.beta(32.0, 32.0), int(rng.integers(len(self)))
        pasting = generator(self.seed, key, MIXUP_PASTING)
        other_image, other_boxes, other_labels = self._mosaic(row, augment, rng, pasting)
        return (
            blend(image, other_image, share),
            np.concatenate([boxes, other_boxes]),
            np.concatenate([labels, other_labels]),
        )

    def _single(
        self, key: SampleKey, augment: AugmentConfig, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One letterboxed image through a random perspective, which draws its geometry."""
        target_hw = key.input_size or (self.image_size, self.image_size)
        placement = letterbox_placement(self._size(key.index), target_hw)
        layout = Layout(
            [placement], [self._objects(key.index)], lambda _, reduction: self._load(key.index, reduction), target_hw
        )
        return layout.show(draw_geometry(augment, rng), target_hw)

    def _size(self, row: int) -> tuple[int, int]:
        height, width = self.flat.sizes_hw[row].tolist()
        return height, width

    def _objects(self, row: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray | None]]:
        span = self.flat.objects(row)
        boxes, labels, outlines = self.flat.boxes[span], self.flat.labels[span], self.flat.segments(row)
        ignore = self.flat.ignore[span]
        if ignore.any():
            boxes, labels = boxes[~ignore], labels[~ignore]
            outlines = [outline for outline, is_ignored in zip(outlines, ignore, strict=True) if not is_ignored]
        return boxes, labels, outlines

    def _load(self, row: int, reduction: int = 1) -> np.ndarray:
        """The pixels of a row; a file that broke after the scan is told once and becomes a grey area."""
        try:
            image = decode_image(self.flat.image_bytes(row), reduction=reduction, lenient=self.lenient)
            expected = self._size(row)
            reduced = tuple(math.ceil(side / reduction) for side in expected)
            if image.shape[:2] not in (expected, reduced):
                raise UnreadableImage(
                    f"it is {image.shape[1]} x {image.shape[0]} px, was {expected[1]} x {expected[0]}"
                )
        except (OSError, UnreadableImage) as reason:
            if isinstance(reason, OSError) and reason.errno in _MACHINE_ERRORS:
                raise
            if row not in self._warned:
                self._warned.add(row)
                logger.warning(
                    "%s cannot be read any more (%s): a grey image without labels takes its place",
                    self.flat.name(row),
                    reason,
                )
            raise UnreadableImage(str(reason)) from reason
        return image


def _recolour_and_flip(
    image: np.ndarray, boxes: np.ndarray, augment: AugmentConfig, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draws hue, saturation, value, then the vertical and the horizontal flip."""
    draws = rng.uniform(-1, 1, size=3)
    vertically, horizontally = rng.random(2) < (augment.flipud, augment.fliplr)
    image = jitter_hsv(image, (augment.hsv_h, augment.hsv_s, augment.hsv_v), draws)
    return flip(image, boxes, horizontally=bool(horizontally), vertically=bool(vertically))


def _sample(
    key: SampleKey, image: np.ndarray, boxes: np.ndarray, labels: np.ndarray, mapping: Letterbox | None
) -> Sample:
    return Sample(key, image, boxes.astype(np.float32), labels.astype(np.int64), mapping)


def collate(samples: Sequence[Sample]) -> Batch:
    """Stack samples of one size; targets become normalised centre form, clipped just inside the image."""
    images = torch.stack([torch.from_numpy(sample.image) for sample in samples])
    height, width = images.shape[1:3]
    boxes = np.concatenate([sample.boxes for sample in samples])
    inside = clip_boxes(boxes.astype(np.float64), (height - _EDGE_MARGIN, width - _EDGE_MARGIN))
    normalised = xyxy_to_cxcywh(inside) / [width, height, width, height]
    counts = [len(sample.labels) for sample in samples]
    targets = Targets(
        image_index=torch.from_numpy(np.repeat(np.arange(len(samples)), counts)),
        labels=torch.from_numpy(np.concatenate([sample.labels for sample in samples])),
        boxes=torch.from_numpy(normalised.astype(np.float32)),
    )
    return Batch(images, targets, [sample.key for sample in samples], [sample.letterbox for sample in samples])


def train_loader(
    table: Table,
    *,
    image_size: int,
    batch_size: int,
    stride: int,
    augment: AugmentConfig,
    seed: int,
    rect: bool = False,
    lenient: bool = False,
    workers: int = 0,
    start_method: str | None = None,
    pin_memory: bool = False,
) -> DataLoader:
    """Global training batches for `accelerator.prepare` with `split_batches=True`.

    `loader.sampler` is the `EpochSampler`: its `resume_at` must be called before the loader is prepared.

    Args:
        batch_size: images of a global batch.
        stride: the network's largest, px.
        rect: batches of similar shape; no mosaic, no shuffling.
        lenient: use what there is of truncated images: `bad_images == "warn"`.
        workers: loader processes of this rank, already limited by `choose_workers`.
        start_method: of these processes; None = the platform's.
        pin_memory: copy batches to page-locked memory, for a CUDA device; makes a CUDA context.
    """
    dataset = DetectionDataset(table, image_size=image_size, augment=augment, seed=seed, lenient=lenient)
    sampler = EpochSampler(
        dataset.flat.sizes_hw, batch_size=batch_size, seed=seed, image_size=image_size, stride=stride, rect=rect
    )
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=True,
        **_loader_options(workers, start_method, pin_memory),
    )


def val_loader(
    table: Table,
    *,
    image_size: int,
    batch_size: int,
    stride: int,
    rank: int = 0,
    world: int = 1,
    pad: float = 0.5,
    rect: bool = True,
    lenient: bool = False,
    workers: int = 0,
    start_method: str | None = None,
    pin_memory: bool = False,
) -> DataLoader:
    """This rank's part of every global validation batch; not to be prepared, it is already sliced.

    `loader.batch_sampler` is the `ValBatchSampler`. For the arguments see there and `train_loader`.
    """
    dataset = DetectionDataset(table, image_size=image_size, lenient=lenient)
    sampler = ValBatchSampler(
        dataset.flat.sizes_hw,
        batch_size,
        rank=rank,
        world=world,
        image_size=image_size,
        stride=stride,
        pad=pad,
        rect=rect,
    )
    return DataLoader(dataset, batch_sampler=sampler, **_loader_options(workers, start_method, pin_memory))


def _loader_options(workers: int, start_method: str | None, pin_memory: bool) -> dict:
    if not workers:
        # Images are made in this process, by one thread as in a worker.
        cv2.setNumThreads(0)
    return {
        "num_workers": workers,
        "collate_fn": collate,
        "pin_memory": pin_memory,
        "persistent_workers": workers > 0,
        "worker_init_fn": functools.partial(start_loader_worker, parent=os.getpid()),
        "multiprocessing_context": start_method if workers > 0 else None,
    }


__all__ = ["DetectionDataset", "choose_workers", "collate", "train_loader", "val_loader"]
