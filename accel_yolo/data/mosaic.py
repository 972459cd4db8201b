"""Four images around a point: where each lies on the canvas, and how the canvas is shown without being built.

Legend: s image size px; the canvas is 2s x 2s, the output s x s. N objects of the four images together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from accel_yolo.boxes import box_area, clip_boxes
from accel_yolo.config.schema import AugmentConfig
from accel_yolo.data.transforms import (
    FILL,
    Geometry,
    Placement,
    UnreadableImage,
    draw_geometry,
    move_objects,
    paint,
    perspective_matrix,
    polygon_mask,
    scaled_size,
    warp_points,
)

# A mirrored object may hide this share of any other (data.md section 5, "Copy-paste").
_MAX_HIDDEN_SHARE = 0.30


def draw_centre(image_size: int, rng: np.random.Generator) -> tuple[int, int]:
    """(y, x) px of the point where the four images meet; y is drawn first."""
    return tuple(int(rng.uniform(image_size / 2, 3 * image_size / 2)) for _ in range(2))  # type: ignore[return-value]


def mosaic_placements(
    sizes_hw: Sequence[tuple[int, int]], centre_yx: tuple[int, int], image_size: int
) -> list[Placement]:
    """Where four images lie: upper left, upper right, lower left, lower right of the centre, cut by the canvas."""
    centre_y, centre_x = centre_yx
    side = 2 * image_size
    placements = []
    for position, size_hw in enumerate(sizes_hw):
        height, width = scaled_size(size_hw, image_size)
        left = centre_x if position % 2 else centre_x - width
        top = centre_y if position // 2 else centre_y - height
        placements.append(
            Placement(
                original_size=size_hw,
                scale=(height / size_hw[0], width / size_hw[1]),
                origin=(left, top),
                window=(max(left, 0), max(top, 0), min(left + width, side), min(top + height, side)),
            )
        )
    return placements


class Layout:
    """Placed images with their objects, in canvas coordinates, ready to be shown through a random perspective.

    Args:
        placements: one per image.
        objects: per image its boxes (n, 4) px of the image, labels (n,), and outlines (n entries, each (P, 2) or None).
        load: `load(position, reduction)` gives the pixels of an image; raises UnreadableImage if there are none.
        canvas_hw: height and width px of the canvas.

    Attributes:
        boxes, labels, outlines: the N objects on the canvas, clipped to it.
    """

    def __init__(
        self,
        placements: Sequence[Placement],
        objects: Sequence[tuple[np.ndarray, np.ndarray, list[np.ndarray | None]]],
        load: Callable[[int, int], np.ndarray],
        canvas_hw: tuple[int, int],
    ) -> None:
        self.placements = placements
        self.canvas_hw = canvas_hw
        self._load = load
        self._pixels: dict[tuple[int, int], np.ndarray] = {}
        placed = [placement.boxes(boxes) for placement, (boxes, _, _) in zip(placements, objects, strict=True)]
        self.boxes = clip_boxes(np.concatenate(placed), canvas_hw)
        self.labels = np.concatenate([labels for _, labels, _ in objects])
        self.outlines = [
            None if outline is None else np.clip(placement.points(outline), 0, canvas_hw[::-1])
            for placement, (_, _, outlines) in zip(placements, objects, strict=True)
            for outline in outlines
        ]
        self._image_of = np.repeat(np.arange(len(objects)), [len(labels) for _, labels, _ in objects])
        self._pasted: list[np.ndarray] = []

    def paste_mirrored(self, share: float, rng: np.random.Generator) -> None:
        """Mirror a share of the outlined objects left to right and add those that hide no other (copy-paste)."""
        outlined = [position for position, outline in enumerate(self.outlines) if outline is not None]
        width = self.canvas_hw[1]
        for position in rng.permutation(outlined)[: round(share * len(outlined))].astype(int).tolist():
            outline = self.outlines[position]
            assert outline is not None
            left, top, right, bottom = self.boxes[position]
            box = np.array([width - right, top, width - left, bottom])
            if (hidden_share(box, self.boxes) < _MAX_HIDDEN_SHARE).all():
                mirrored = np.stack([width - outline[:, 0], outline[:, 1]], axis=1)
                self.boxes = np.concatenate([self.boxes, box[None]])
                self.labels = np.append(self.labels, self.labels[position])
                self.outlines.append(mirrored)
                self._image_of = np.append(self._image_of, self._image_of[position])
                self._pasted.append(mirrored)

    def show(self, geometry: Geometry, output_hw: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The output image (H, W, 3) uint8, its boxes (n, 4) float64 px and labels (n,) int64."""
        matrix = perspective_matrix(geometry, self.canvas_hw, output_hw)
        image, unreadable = self._render(matrix, output_hw)
        if self._pasted:
            mirror = np.array([[-1.0, 0, self.canvas_hw[1]], [0, 1, 0], [0, 0, 1]])
            mirrored, _ = self._render(matrix @ mirror, output_hw)
            for outline in self._pasted:
                mask = polygon_mask(warp_points(outline, matrix), output_hw) > 0
                image[mask] = mirrored[mask]
        boxes, kept = move_objects(self.boxes, self.outlines, matrix, scale=geometry.scale, output_hw=output_hw)
        kept &= ~np.isin(self._image_of, list(unreadable))
        return image, boxes[kept], self.labels[kept]

    def _render(self, matrix: np.ndarray, output_hw: tuple[int, int]) -> tuple[np.ndarray, set[int]]:
        output = np.full((*output_hw, 3), FILL, np.uint8)
        unreadable = set()
        for position, placement in enumerate(self.placements):
            try:
                paint(output, placement, matrix, functools.partial(self._image, position))
            except UnreadableImage:
                unreadable.add(position)
        return output, unreadable

    def _image(self, position: int, reduction: int) -> np.ndarray:
        # Only pasting shows an image twice; otherwise four large ones would be alive where one is enough.
        if not self._pasted:
            return self._load(position, reduction)
        if (position, reduction) not in self._pixels:
            self._pixels[position, reduction] = self._load(position, reduction)
        return self._pixels[position, reduction]


def hidden_share(box: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(N,) which share of each of the boxes (N, 4) lies under `box` (4,)."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    return sides.clip(0).prod(axis=1) / (box_area(others) + 1e-16)


def show_random(
    layout: Layout,
    augment: AugmentConfig,
    output_hw: tuple[int, int],
    *,
    rng: np.random.Generator,
    pasting: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Copy-paste, whose objects `pasting` draws, then a random perspective, drawn from `rng`."""
    if augment.copy_paste:
        layout.paste_mirrored(augment.copy_paste, pasting)
    return layout.show(draw_geometry(augment, rng), output_hw)
