"""The types that flow from the data to the network and back.

Legend: B images in a batch, H W pixels, N objects in one image, T objects in one batch, K classes, A anchors per
cell, L detection levels, M detections kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor


class SampleKey(NamedTuple):
    """The whole identity of one draw; the sampler yields these, so the epoch reaches workers with the index."""

    epoch: int
    # Position in the epoch's global order, the completed last batch included: two draws of one row never share it.
    place: int
    # Row of the table.
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    # (height, width) fed to the network when batches are rectangular; None means the square image size.
    input_size: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Letterbox:
    """How one image was scaled and padded.

    Args:
        original_size: (height, width) px of the upright file.
        input_size: (height, width) px fed to the network.
        scale: (vertical, horizontal) input px per original px; exact per axis.
        pad: (left, top) px of the input before the image's first pixel.
    """

    original_size: tuple[int, int]
    input_size: tuple[int, int]
    scale: tuple[float, float]
    pad: tuple[float, float]

    def to_original(self, boxes: Tensor) -> Tensor:
        """Boxes (N, 4) xyxy in px of the input -> xyxy px of the original image, clipped to it."""
        height, width = self.original_size
        scale_y, scale_x = self.scale
        left, top = self.pad
        shifted = boxes - boxes.new_tensor([left, top, left, top])
        scaled = shifted / boxes.new_tensor([scale_x, scale_y, scale_x, scale_y])
        # min/max with a tensor clips x and y together; NaN stays NaN.
        return scaled.clamp(min=0).minimum(scaled.new_tensor([width, height, width, height]))


@dataclass(slots=True)
class Sample:
    """One image with its objects, before batching.

    Args:
        key: which draw this is.
        image: (H, W, 3) uint8, RGB.
        boxes: (N, 4) float32, xyxy, px of `image`.
        labels: (N,) int64 in [0, K).
        letterbox: None once several images were mixed.
    """

    key: SampleKey
    image: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray
    letterbox: Letterbox | None = None

    def __post_init__(self) -> None:
        if self.boxes.ndim != 2 or self.boxes.shape[1] != 4:
            raise ValueError(f"boxes must be (N, 4), found {self.boxes.shape}")
        if len(self.boxes) != len(self.labels):
            raise ValueError(f"{len(self.boxes)} boxes but {len(self.labels)} labels")


@dataclass(slots=True)
class Targets:
    """All objects of a batch, flat.

    Args:
        image_index: (T,) int64, position of the image in this rank's batch.
        labels: (T,) int64.
        boxes: (T, 4) float32, cxcywh, each in [0, 1] of the network's input.
    """

    image_index: Tensor
    labels: Tensor
    boxes: Tensor

    def __post_init__(self) -> None:
        if self.boxes.ndim != 2 or self.boxes.shape[1] != 4:
            raise ValueError(f"boxes must be (T, 4), found {tuple(self.boxes.shape)}")
        if not len(self.image_index) == len(self.labels) == len(self.boxes):
            raise ValueError(
                f"{len(self.boxes)} boxes, {len(self.labels)} labels, {len(self.image_index)} image indices"
            )

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(slots=True)
class Batch:
    """This rank's part of one global batch.

    Args:
        images: (B, H, W, 3) uint8, RGB: the layout that is cheapest to collate and to copy; see `floats`.
        targets: objects of these images.
        keys: B keys.
        letterboxes: B entries, None for mixed images.
    """

    images: Tensor
    targets: Targets
    keys: list[SampleKey]
    letterboxes: list[Letterbox | None]

    def __len__(self) -> int:
        return len(self.keys)

    def floats(self, *, channels_last: bool = True, dtype: torch.dtype | None = None) -> Tensor:
        """The images as (B, 3, H, W) in [0, 1], float32 unless `dtype` says else; the network keeps their layout."""
        # The permuted view of NHWC memory is what torch calls channels_last.
        images = self.images.permute(0, 3, 1, 2)
        images = (images.float() if dtype is None else images.to(dtype)).div_(255)
        return images if channels_last else images.contiguous()

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """The batch with its images on `device`; Accelerate's loaders call this.

        Targets stay on the CPU: objects are matched to anchors there, because the number of matches is data, and
        reading a number from an accelerator makes it wait.
        """
        return Batch(self.images.to(device, non_blocking=non_blocking), self.targets, self.keys, self.letterboxes)

    def pin_memory(self) -> Batch:
        return Batch(self.images.pin_memory(), self.targets, self.keys, self.letterboxes)


@dataclass(slots=True)
class Detections:
    """What was found in one image, best first.

    Args:
        boxes: (M, 4) float32, xyxy, px of the ORIGINAL image.
        scores: (M,) float32, objectness times class probability.
        labels: (M,) int64.
    """

    boxes: Tensor
    scores: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.boxes.ndim != 2 or self.boxes.shape[1] != 4:
            raise ValueError(f"boxes must be (M, 4), found {tuple(self.boxes.shape)}")
        if not len(self.boxes) == len(self.scores) == len(self.labels):
            raise ValueError(f"{len(self.boxes)} boxes, {len(self.scores)} scores, {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.scores)

    def keep(self, mask: Tensor) -> Detections:
        """The detections where `mask` (M,) bool holds, in the same order."""
        return Detections(self.boxes[mask], self.scores[mask], self.labels[mask])
