"""What happens to pixels and boxes of one sample: decoding, placing, perspective, colour, flips, blending.

Legend: N objects. A *canvas* is the plane on which images are laid out before the random perspective; it exists as
coordinates only. Coordinates are continuous: pixel i covers i to i + 1, so its centre is at i + 0.5. Images are
(H, W, 3) uint8 RGB, boxes (N, 4) float64 xyxy px.
"""

from __future__ import annotations

import errno
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np

from accel_yolo.boxes import clip_boxes, plan_letterbox
from accel_yolo.config.schema import AugmentConfig
from accel_yolo.structures import Letterbox

# What lies outside every image (data.md section 3).
FILL = 114
# A JPEG decoder can deliver a half, a quarter or an eighth of the size for less work.
_JPEG_START, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
# Bytes 4 to 8 of AVIF and its relatives, whose orientation OpenCV ignores.
_ISO_MEDIA_MARK = b"ftyp"
_REDUCED_FLAGS = {2: cv2.IMREAD_REDUCED_COLOR_2, 4: cv2.IMREAD_REDUCED_COLOR_4, 8: cv2.IMREAD_REDUCED_COLOR_8}
# Cropping rounds the source window to whole pixels. Above this enlargement the shift would be seen, so we warp.
_MAX_CROP_SCALE = 1.5
# Points to which the outline of an object is resampled before it is warped (data.md section 5).
_OUTLINE_POINTS = 1000
# Fractional bits of polygon corners given to OpenCV.
_SHIFT = 8


class UnreadableImage(ValueError):
    """An image that no decoder turns into the pixels that the table promises."""


def decode_image(data: np.ndarray, *, reduction: int = 1, lenient: bool = False) -> np.ndarray:
    """Encoded bytes (n,) uint8 -> upright (H, W, 3) uint8 RGB, any bit depth scaled to 8, alpha dropped.

    Args:
        reduction: 1, 2, 4 or 8: decode a JPEG at this fraction of its size; other formats ignore it.
        lenient: give what there is of a truncated JPEG, the rest grey, instead of an error.

    Raises:
        UnreadableImage: if neither OpenCV nor Pillow can decode it.
    """
    if data[4:8].tobytes() == _ISO_MEDIA_MARK:
        return _decode_with_pillow(data)
    is_jpeg = data[:2].tobytes() == _JPEG_START
    if lenient and is_jpeg:
        # Data that stop without an end mark make OpenCV give up; with one, the decoder fills in.
        data = np.append(data, np.frombuffer(_JPEG_END, np.uint8))
    if reduction > 1 and is_jpeg:
        # The reduced flags cannot be combined with IMREAD_COLOR_RGB.
        image = _decode_or_none(data, _REDUCED_FLAGS[reduction])
        if image is not None:
            return cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=image)
    image = _decode_or_none(data, cv2.IMREAD_COLOR_RGB)
    return image if image is not None else _decode_with_pillow(data)


def _decode_or_none(data: np.ndarray, flags: int) -> np.ndarray | None:
    try:
        return cv2.imdecode(data, flags)
    except cv2.error:
        # An empty buffer, or more pixels than OpenCV allows.
        return None


def _decode_with_pillow(data: np.ndarray) -> np.ndarray:
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data.tobytes())) as image:
            return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as reason:
        if getattr(reason, "errno", None) in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        raise UnreadableImage(str(reason).partition("<")[0].strip() or type(reason).__name__) from reason


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one image lies on the canvas.

    Args:
        original_size: (height, width) px of the image.
        scale: (vertical, horizontal) canvas px per image px.
        origin: (x, y) canvas px of the image's upper left corner; may be negative.
        window: (x1, y1, x2, y2) canvas px: the part of it that is shown.
    """

    original_size: tuple[int, int]
    scale: tuple[float, float]
    origin: tuple[float, float]
    window: tuple[float, float, float, float]

    def boxes(self, boxes: np.ndarray) -> np.ndarray:
        """Boxes (N, 4) xyxy px of the image -> px of the canvas."""
        return self.points(boxes.reshape(-1, 2)).reshape(-1, 4)

    def points(self, points: np.ndarray) -> np.ndarray:
        """Points (P, 2) px of the image -> px of the canvas."""
        return points * np.array([self.scale[1], self.scale[0]]) + np.array(self.origin)


def letterbox_placement(
    size_hw: tuple[int, int], target_hw: tuple[int, int], *, long_side: int | None = None
) -> Placement:
    """An image centred on a canvas of the target's size.

    Args:
        size_hw: (height, width) px of the image.
        target_hw: (height, width) px of the canvas.
        long_side: first scale the image to this long side, then only shrink it further (validation, data.md
            sections 3 and 4); None fits it to the target, larger or smaller (training).
    """
    scaled_hw = size_hw if long_side is None else scaled_size(size_hw, long_side)
    plan = plan_letterbox(scaled_hw, target_hw, scale_up=long_side is None)
    # A very long image must keep a pixel.
    height, width = max(plan.inner_size[0], 1), max(plan.inner_size[1], 1)
    top, _, left, _ = plan.borders
    return Placement(
        original_size=size_hw,
        scale=(height / size_hw[0], width / size_hw[1]),
        origin=(left, top),
        window=(left, top, left + width, top + height),
    )


def scaled_size(size_hw: tuple[int, int], long_side: int) -> tuple[int, int]:
    """(height, width) px of an image scaled to a long side; the other side rounds up, in exact arithmetic."""
    height, width = size_hw
    longest = max(height, width)
    return -(-height * long_side // longest), -(-width * long_side // longest)


def letterbox(image: np.ndarray, placement: Placement, target_hw: tuple[int, int]) -> tuple[np.ndarray, Letterbox]:
    """The image scaled and padded with grey; shrinks by area, enlarges bilinearly (validation, data.md section 3)."""
    left, top, right, bottom = (int(edge) for edge in placement.window)
    inner_size = (right - left, bottom - top)
    if image.shape[1::-1] != inner_size:
        shrinks = max(placement.scale) < 1
        image = cv2.resize(image, inner_size, interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
    height, width = target_hw
    padded = cv2.copyMakeBorder(
        image, top, height - bottom, left, width - right, cv2.BORDER_CONSTANT, value=(FILL, FILL, FILL)
    )
    return padded, as_letterbox(placement, target_hw)


def as_letterbox(placement: Placement, target_hw: tuple[int, int]) -> Letterbox:
    """How to map boxes of the input back to the image."""
    return Letterbox(placement.original_size, target_hw, placement.scale, placement.origin)


class Geometry(NamedTuple):
    """One draw of the random perspective, in the order in which it is drawn."""

    perspective_x: float = 0.0
    perspective_y: float = 0.0
    # Degrees, counter-clockwise on the screen.
    angle: float = 0.0
    scale: float = 1.0
    # Degrees.
    shear_x: float = 0.0
    shear_y: float = 0.0
    # Fractions of the output size at which the canvas's centre comes to lie.
    translate_x: float = 0.5
    translate_y: float = 0.5


def draw_geometry(augment: AugmentConfig, rng: np.random.Generator) -> Geometry:
    """Eight uniform draws, also where a range is zero, so that one setting does not shift the draws of another."""
    return Geometry(
        perspective_x=rng.uniform(-augment.perspective, augment.perspective),
        perspective_y=rng.uniform(-augment.perspective, augment.perspective),
        angle=rng.uniform(-augment.degrees, augment.degrees),
        scale=rng.uniform(1 - augment.scale, 1 + augment.scale),
        shear_x=rng.uniform(-augment.shear, augment.shear),
        shear_y=rng.uniform(-augment.shear, augment.shear),
        translate_x=rng.uniform(0.5 - augment.translate, 0.5 + augment.translate),
        translate_y=rng.uniform(0.5 - augment.translate, 0.5 + augment.translate),
    )


def perspective_matrix(geometry: Geometry, canvas_hw: tuple[int, int], output_hw: tuple[int, int]) -> np.ndarray:
    """(3, 3) float64, canvas px -> output px: centre, perspective, rotation with scale, shear, translation.

    Source: data.md section 5, "Random perspective".
    """
    centre = np.eye(3)
    centre[:2, 2] = -canvas_hw[1] / 2, -canvas_hw[0] / 2
    perspective = np.eye(3)
    perspective[2, :2] = geometry.perspective_x, geometry.perspective_y
    angle = math.radians(geometry.angle)
    cosine, sine = geometry.scale * math.cos(angle), geometry.scale * math.sin(angle)
    rotation = np.array([[cosine, sine, 0.0], [-sine, cosine, 0.0], [0.0, 0.0, 1.0]])
    shear = np.eye(3)
    shear[0, 1], shear[1, 0] = math.tan(math.radians(geometry.shear_x)), math.tan(math.radians(geometry.shear_y))
    translation = np.eye(3)
    translation[:2, 2] = geometry.translate_x * output_hw[1], geometry.translate_y * output_hw[0]
    return translation @ shear @ rotation @ perspective @ centre


def warp_points(points: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Points (P, 2) moved by a (3, 3) matrix."""
    moved = points @ matrix[:, :2].T + matrix[:, 2]
    return moved[:, :2] / moved[:, 2:]


def warp_boxes(boxes: np.ndarray, matrix: np.ndarray, output_hw: tuple[int, int]) -> np.ndarray:
    """The upright boxes (N, 4) around the moved corners, clipped to the output."""
    corners = warp_points(boxes[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 2), matrix).reshape(-1, 4, 2)
    return clip_boxes(np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1), output_hw)


def warp_outline(outline: np.ndarray, matrix: np.ndarray, output_hw: tuple[int, int]) -> np.ndarray:
    """(4,) the box around the part of a moved outline (P, 2) that is inside the output; zeros if none is."""
    closed = np.concatenate([outline, outline[:1]]).astype(np.float64)
    at = np.linspace(0, len(closed) - 1, _OUTLINE_POINTS)
    index = np.arange(len(closed))
    resampled = np.stack([np.interp(at, index, closed[:, axis]) for axis in range(2)], axis=1)
    moved = warp_points(resampled, matrix)
    height, width = output_hw
    inside = moved[((moved >= 0) & (moved <= [width, height])).all(axis=1)]
    return np.concatenate([inside.min(axis=0), inside.max(axis=0)]) if len(inside) else np.zeros(4)


def is_candidate(before: np.ndarray, after: np.ndarray, min_area_share: float | np.ndarray) -> np.ndarray:
    """(N,) bool: which boxes are still worth learning: over 2 px, enough of the area left, not a sliver.

    Args:
        before: (N, 4) boxes before the perspective, times its scale.
        after: (N, 4) boxes after it, clipped.
        min_area_share: what must be left of the area, exclusive.

    Source: data.md section 5, "Candidate filter".
    """
    size_before, size_after = before[:, 2:] - before[:, :2], after[:, 2:] - after[:, :2]
    share = size_after.prod(axis=1) / (size_before.prod(axis=1) + 1e-16)
    aspect = size_after.max(axis=1) / (size_after.min(axis=1) + 1e-16)
    return (size_after > 2).all(axis=1) & (share > min_area_share) & (aspect < 100)


def move_objects(
    boxes: np.ndarray,
    outlines: list[np.ndarray | None],
    matrix: np.ndarray,
    *,
    scale: float,
    output_hw: tuple[int, int],
) -> tuple[np.ndarray, np.ndarray]:
    """Objects of the canvas -> boxes of the output, and which of them to keep.

    Each object that has an outline is moved by it, each other one by its box: tables may mix the two.

    Args:
        boxes: (N, 4) px of the canvas, clipped to it.
        outlines: N polygons (P, 2) px of the canvas, or None.
        scale: that of the geometry.

    Returns:
        (N, 4) boxes, px of the output, and (N,) bool.
    """
    moved = warp_boxes(boxes, matrix, output_hw)
    has_outline = np.array([outline is not None for outline in outlines], bool)
    for position, outline in enumerate(outlines):
        if outline is not None:
            moved[position] = warp_outline(outline, matrix, output_hw)
    # An outline keeps a tight box even when most of the object is cut off, hence the lower share.
    return moved, is_candidate(boxes * scale, moved, np.where(has_outline, 0.01, 0.10))


def paint(output: np.ndarray, placement: Placement, matrix: np.ndarray, load: Callable[[int], np.ndarray]) -> None:
    """Draw one placed image straight from its decoded pixels into the output: no canvas, one interpolation.

    The region is computed first; an image that is not visible is never loaded.

    Args:
        output: (H, W, 3), changed.
        matrix: canvas px -> output px.
        load: gives the pixels, at full size or reduced by the factor 2, 4 or 8 that it is called with.
    """
    corners = warp_points(_corners(placement.window), matrix)
    is_upright = matrix[0, 1] == matrix[1, 0] == matrix[2, 0] == matrix[2, 1] == 0
    is_affine = matrix[2, 0] == matrix[2, 1] == 0
    if is_affine:
        # Pixels whose centre is inside; neighbours share an edge and no pixel.
        left, top = np.ceil(corners.min(axis=0) - 0.5).astype(int).clip(0)
        right, bottom = np.minimum(np.ceil(corners.max(axis=0) - 0.5).astype(int), output.shape[1::-1])
    else:
        left, top, right, bottom = 0, 0, output.shape[1], output.shape[0]
    if right <= left or bottom <= top:
        return
    image_to_output = matrix @ np.array(
        [[placement.scale[1], 0, placement.origin[0]], [0, placement.scale[0], placement.origin[1]], [0, 0, 1.0]]
    )
    scale = float(np.linalg.norm(image_to_output[:2, :2], 2)) if is_affine else 1.0
    image = load(_reduction(scale))
    image_to_output = image_to_output @ _full_size(image, placement.original_size)
    view = output[top:bottom, left:right]
    is_mirrored = image_to_output[0, 0] < 0
    if is_upright and not is_mirrored and scale <= _MAX_CROP_SCALE:
        cv2.resize(_crop(image, image_to_output, (left, top, right, bottom)), view.shape[1::-1], dst=view)
        return
    to_view = np.array([[1, 0, -left], [0, 1, -top], [0, 0, 1.0]])
    patch = _warp(image, to_view @ image_to_output, view.shape[:2])
    if is_upright:
        view[:] = patch
    elif is_affine:
        cv2.copyTo(patch, polygon_mask(corners - (left, top), view.shape[:2]), dst=view)
    else:
        cv2.copyTo(patch, _inside_mask(placement.window, matrix, view.shape[:2]), dst=view)


def _corners(window: tuple[float, float, float, float]) -> np.ndarray:
    left, top, right, bottom = window
    return np.array([[left, top], [right, top], [right, bottom], [left, bottom]], np.float64)


def _reduction(scale: float) -> int:
    """The largest reduction in the decoder after which the image still has to shrink, not grow."""
    return next((factor for factor in (8, 4, 2) if factor * scale <= 1), 1)


def _full_size(image: np.ndarray, original_size: tuple[int, int]) -> np.ndarray:
    """(3, 3), px of the decoded image -> px of the original."""
    factors = []
    for decoded, original in zip(image.shape[:2], original_size, strict=True):
        # A JPEG decoder rounds a reduced size up and its last pixel is a partial one.
        whole = round(original / decoded)
        factors.append(float(whole) if math.ceil(original / whole) == decoded else original / decoded)
    return np.diag([factors[1], factors[0], 1.0])


def _crop(image: np.ndarray, image_to_output: np.ndarray, region: tuple[int, int, int, int]) -> np.ndarray:
    """The whole pixels of the image that fill a region of the output."""
    height, width = image.shape[:2]
    left, top, right, bottom = region
    x1, x2 = (round((edge - image_to_output[0, 2]) / image_to_output[0, 0]) for edge in (left, right))
    y1, y2 = (round((edge - image_to_output[1, 2]) / image_to_output[1, 1]) for edge in (top, bottom))
    x1, y1 = min(max(x1, 0), width - 1), min(max(y1, 0), height - 1)
    return image[y1 : min(max(y2, y1 + 1), height), x1 : min(max(x2, x1 + 1), width)]


def _warp(image: np.ndarray, matrix: np.ndarray, size_hw: tuple[int, int]) -> np.ndarray:
    # OpenCV counts from the first pixel's centre, we from its edge.
    to_edge = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
    to_centre = np.array([[1, 0, -0.5], [0, 1, -0.5], [0, 0, 1]])
    # Replicating the edge avoids a dark seam; what lies outside the image is masked by the caller.
    return cv2.warpPerspective(
        image, to_centre @ matrix @ to_edge, size_hw[::-1], flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE
    )


def polygon_mask(polygon: np.ndarray, size_hw: tuple[int, int]) -> np.ndarray:
    """(H, W) uint8, 255 inside a polygon (P, 2), its border included."""
    mask = np.zeros(size_hw, np.uint8)
    points = np.round((polygon - 0.5) * (1 << _SHIFT)).astype(np.int32)
    return cv2.fillPoly(mask, [points], 255, shift=_SHIFT)


def _inside_mask(window: tuple[float, float, float, float], matrix: np.ndarray, size_hw: tuple[int, int]) -> np.ndarray:
    """(H, W) uint8, 255 where a pixel shows the window; under perspective a polygon of corners may be inside out."""
    height, width = size_hw
    inverse = np.linalg.inv(matrix)
    x, y = np.arange(width) + 0.5, (np.arange(height) + 0.5)[:, None]
    depth = inverse[2, 0] * x + inverse[2, 1] * y + inverse[2, 2]
    canvas_x = (inverse[0, 0] * x + inverse[0, 1] * y + inverse[0, 2]) / depth
    canvas_y = (inverse[1, 0] * x + inverse[1, 1] * y + inverse[1, 2]) / depth
    left, top, right, bottom = window
    inside = (depth > 0) & (canvas_x >= left) & (canvas_x < right) & (canvas_y >= top) & (canvas_y < bottom)
    return inside.astype(np.uint8) * 255


def jitter_hsv(image: np.ndarray, gains: tuple[float, float, float], draws: np.ndarray) -> np.ndarray:
    """Multiply hue, saturation and value by 1 + draw * gain, through 8-bit lookup tables.

    Args:
        gains: of hue, saturation and value; the image is returned as it is if all are 0.
        draws: (3,) in [-1, 1].

    Source: data.md section 5, "HSV".
    """
    if not any(gains):
        return image
    factors = 1 + np.asarray(draws) * np.asarray(gains)
    levels = np.arange(256)
    tables = (
        (levels * factors[0]) % 180,
        np.clip(levels * factors[1], 0, 255),
        np.clip(levels * factors[2], 0, 255),
    )
    converted = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
    # A table per channel is faster than one table of three.
    channels = zip(cv2.split(converted), tables, strict=True)
    cv2.merge([cv2.LUT(channel, table.astype(np.uint8)) for channel, table in channels], dst=converted)
    return cv2.cvtColor(converted, cv2.COLOR_HSV2RGB, dst=converted)


def flip(
    image: np.ndarray, boxes: np.ndarray, *, horizontally: bool, vertically: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Mirror an image and its boxes left to right, upside down, or both."""
    if not (horizontally or vertically):
        return image, boxes
    height, width = image.shape[:2]
    boxes = boxes.copy()
    if horizontally:
        boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
    if vertically:
        boxes[:, [1, 3]] = height - boxes[:, [3, 1]]
    code = -1 if horizontally and vertically else 1 if horizontally else 0
    return cv2.flip(image, code), boxes


def blend(first: np.ndarray, second: np.ndarray, share: float) -> np.ndarray:
    """share * first + (1 - share) * second, truncated to uint8 (MixUp)."""
    return cv2.addWeighted(first, share, second, 1 - share, 0, dtype=cv2.CV_32F).astype(np.uint8)
