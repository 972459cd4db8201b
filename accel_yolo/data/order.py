"""Everything about order and chance in an epoch, as functions of (seed, epoch, place).

Legend: R rows of the table, W processes. A global batch is the batch of all processes together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
from torch.utils.data import Sampler

from accel_yolo.structures import SampleKey

Item = TypeVar("Item")

# A short entropy list is padded with zeros by numpy, so these must be numbers that no place ever reaches.
_ORDER_TAG = 0x6F72_6465
_SCALE_TAG = 0x7363_616C


def generator(seed: int, key: SampleKey, stream: int = 0) -> np.random.Generator:
    """The generator of one draw: the same for whoever asks, however often, in whichever process.

    Args:
        stream: separates purposes, so that switching one augmentation on does not change the others.
    """
    return np.random.default_rng([seed, key.epoch, key.place, stream])


def epoch_order(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """(R,) int64, a uniform permutation of the rows."""
    return np.random.default_rng([seed, epoch, _ORDER_TAG]).permutation(num_rows)


def complete(order: np.ndarray, batch_size: int) -> np.ndarray:
    """The order, followed by rows from its own start until whole batches are full (design.md, Decision 2)."""
    return np.resize(order, math.ceil(len(order) / batch_size) * batch_size)


def multi_scale_size(seed: int, step: int, image_size: int, stride: int) -> int:
    """The image size of a training step, px: uniform from half to one and a half times, a multiple of the stride.

    Source: training.md, `--multi-scale`.
    """
    low, high = int(0.5 * image_size), int(1.5 * image_size) + stride
    drawn = int(np.random.default_rng([seed, step, _SCALE_TAG]).integers(low, high))
    return max(stride, drawn // stride * stride)


def rank_slice(batch: Sequence[Item], rank: int, world: int) -> Sequence[Item]:
    """The contiguous part of a global batch that belongs to a rank; sizes differ by one at most, and may be zero."""
    return batch[len(batch) * rank // world : len(batch) * (rank + 1) // world]


def aspect_order(sizes_hw: np.ndarray) -> np.ndarray:
    """(R,) int64: rows by height over width, lowest first, equal ones in table order."""
    return np.argsort(sizes_hw[:, 0] / sizes_hw[:, 1], kind="stable")


def batch_shapes(ratios: np.ndarray, *, batch_size: int, image_size: int, stride: int, pad: float) -> np.ndarray:
    """The smallest input size that fits each batch of images of similar shape.

    Args:
        ratios: (R,) height over width, in the order of the batches.
        image_size: long side px.
        pad: part of a stride that is added before rounding up.

    Returns:
        (number of batches, 2) int, height and width px, multiples of the stride.

    Source: data.md section 4.
    """
    starts = np.arange(0, len(ratios), batch_size)
    lowest, highest = np.minimum.reduceat(ratios, starts), np.maximum.reduceat(ratios, starts)
    factors = np.ones((len(starts), 2))
    factors[:, 0] = np.where(highest < 1, highest, 1)
    factors[:, 1] = np.where(lowest > 1, 1 / lowest, 1)
    return np.ceil(factors * image_size / stride + pad).astype(int) * stride


class EpochSampler(Sampler[SampleKey]):
    """The global order of an epoch, as keys; a DataLoader cuts it into global batches, Accelerate into slices.

    Args:
        sizes_hw: (R, 2) height and width px of the rows.
        batch_size: images of a global batch.
        rect: batches of similar shape in a fixed order instead of a random one; keys then carry their input size.
    """

    def __init__(
        self, sizes_hw: np.ndarray, *, batch_size: int, seed: int, image_size: int, stride: int, rect: bool = False
    ) -> None:
        if not len(sizes_hw):
            raise ValueError("a sampler needs at least one row")
        self.num_rows = len(sizes_hw)
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0
        self._resumed: tuple[int, int] = (-1, 0)
        self._rect_order: np.ndarray | None = None
        self._rect_shapes: np.ndarray | None = None
        if rect:
            self._rect_order = complete(aspect_order(sizes_hw), batch_size)
            ordered = sizes_hw[self._rect_order]
            self._rect_shapes = batch_shapes(
                ordered[:, 0] / ordered[:, 1], batch_size=batch_size, image_size=image_size, stride=stride, pad=0.0
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next pass draws; Accelerate calls this with its loader's count."""
        self.epoch = int(epoch)

    def resume_at(self, epoch: int, samples_seen: int) -> None:
        """Let passes of `epoch`, and of no other, begin after `samples_seen` samples of all ranks.

        Raises:
            ValueError: if that is not a whole number of batches within the epoch.
        """
        if samples_seen % self.batch_size or not 0 <= samples_seen <= self.epoch_samples:
            raise ValueError(
                f"cannot resume after {samples_seen} samples: the epoch has {self.epoch_samples} in batches of "
                f"{self.batch_size}"
            )
        self._resumed = (int(epoch), int(samples_seen))

    @property
    def epoch_samples(self) -> int:
        """Samples of a whole epoch, the completed last batch included."""
        return math.ceil(self.num_rows / self.batch_size) * self.batch_size

    @property
    def start(self) -> int:
        """The place at which the next pass begins."""
        epoch, samples_seen = self._resumed
        return samples_seen if epoch == self.epoch else 0

    def __len__(self) -> int:
        return self.epoch_samples - self.start

    def __iter__(self) -> Iterator[SampleKey]:
        epoch = self.epoch
        order = self._rect_order
        if order is None:
            order = complete(epoch_order(self.seed, epoch, self.num_rows), self.batch_size)
        for place in range(self.start, len(order)):
            yield SampleKey(epoch, place, int(order[place]), self._input_size(place))

    def _input_size(self, place: int) -> tuple[int, int] | None:
        if self._rect_shapes is None:
            return None
        height, width = self._rect_shapes[place // self.batch_size].tolist()
        return height, width


class ValBatchSampler(Sampler[list[SampleKey]]):
    """This rank's part of every global validation batch; each row once over all ranks.

    The global batch of a key is `key.place // batch_size`, for whoever averages over global batches. A batch of
    which this rank has no image is left out.

    Args:
        sizes_hw: (R, 2) height and width px of the rows.
        batch_size: images of a global batch.
        pad: part of a stride added to each side of a rectangular batch (data.md section 4).
        rect: batches of similar shape; otherwise table order and the square image size.
    """

    def __init__(
        self,
        sizes_hw: np.ndarray,
        batch_size: int,
        *,
        rank: int = 0,
        world: int = 1,
        image_size: int,
        stride: int,
        pad: float = 0.5,
        rect: bool = True,
    ) -> None:
        self.batch_size = batch_size
        self.rank, self.world = rank, world
        if rect and len(sizes_hw):
            self._order = aspect_order(sizes_hw)
            ordered = sizes_hw[self._order]
            self._shapes = batch_shapes(
                ordered[:, 0] / ordered[:, 1], batch_size=batch_size, image_size=image_size, stride=stride, pad=pad
            )
        else:
            self._order = np.arange(len(sizes_hw))
            self._shapes = np.full((self.num_global_batches, 2), image_size)

    @property
    def num_global_batches(self) -> int:
        return math.ceil(len(self._order) / self.batch_size)

    def __len__(self) -> int:
        return sum(len(self._places(batch)) > 0 for batch in range(self.num_global_batches))

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for batch in range(self.num_global_batches):
            height, width = self._shapes[batch].tolist()
            places = self._places(batch)
            if places:
                yield [SampleKey(0, place, int(self._order[place]), (height, width)) for place in places]

    def _places(self, batch: int) -> Sequence[int]:
        start = batch * self.batch_size
        places = range(start, min(start + self.batch_size, len(self._order)))
        return rank_slice(places, self.rank, self.world)
