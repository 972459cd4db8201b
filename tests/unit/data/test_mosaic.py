"""The fused mosaic against the classic one that builds the canvas, which lives here as the oracle."""

import weakref

import cv2
import numpy as np
import pytest

from accel_yolo.boxes import clip_boxes
from accel_yolo.data.mosaic import Layout, draw_centre, hidden_share, mosaic_placements
from accel_yolo.data.transforms import (
    FILL,
    Geometry,
    UnreadableImage,
    is_candidate,
    perspective_matrix,
    scaled_size,
    warp_boxes,
)

SIZE = 128
SIZES = [(96, 160), (200, 120), (64, 64), (300, 300)]
GEOMETRIES = {
    "neutral": Geometry(),
    "smaller": Geometry(scale=0.6, translate_x=0.45, translate_y=0.58),
    "larger": Geometry(scale=1.45, translate_x=0.55),
    "rotated": Geometry(angle=12, scale=0.9, shear_x=3, shear_y=-2),
    "perspective": Geometry(perspective_x=0.0006, perspective_y=-0.0004, angle=-5),
}


def smooth_image(size_hw, seed):
    coarse = np.random.default_rng(seed).integers(0, 256, size=(3, 3, 3)).astype(np.uint8)
    return cv2.resize(coarse, size_hw[::-1], interpolation=cv2.INTER_LINEAR)


def random_objects(size_hw, count, seed):
    rng = np.random.default_rng(seed)
    height, width = size_hw
    first, second = rng.random((count, 2)), rng.random((count, 2))
    boxes = np.concatenate([np.minimum(first, second), np.maximum(first, second)], axis=1)
    return boxes * [width, height, width, height], np.arange(count), [None] * count


def classic_mosaic(images, objects, centre, size, geometry):
    """Paste four images into a canvas of twice the size, then warp the canvas."""
    canvas = np.full((2 * size, 2 * size, 3), FILL, np.uint8)
    tile = np.zeros((2 * size, 2 * size), np.uint8)
    centre_y, centre_x = centre
    boxes, labels = [], []
    for position, (image, (image_boxes, image_labels, _)) in enumerate(zip(images, objects, strict=True)):
        height, width = scaled_size(image.shape[:2], size)
        resized = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
        left = centre_x if position % 2 else centre_x - width
        top = centre_y if position >= 2 else centre_y - height
        x1, y1, x2, y2 = max(left, 0), max(top, 0), min(left + width, 2 * size), min(top + height, 2 * size)
        canvas[y1:y2, x1:x2] = resized[y1 - top : y2 - top, x1 - left : x2 - left]
        tile[y1:y2, x1:x2] = position + 1
        scale = np.array([width / image.shape[1], height / image.shape[0]] * 2)
        boxes.append(clip_boxes(image_boxes * scale + [left, top, left, top], (2 * size, 2 * size)))
        labels.append(image_labels)
    matrix = perspective_matrix(geometry, (2 * size, 2 * size), (size, size))
    shift = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
    pixels = np.linalg.inv(shift) @ matrix @ shift
    output = cv2.warpPerspective(canvas, pixels, (size, size), borderValue=(FILL, FILL, FILL))
    tile = cv2.warpPerspective(tile, pixels, (size, size), flags=cv2.INTER_NEAREST)
    boxes, labels = np.concatenate(boxes), np.concatenate(labels)
    moved = warp_boxes(boxes, matrix, (size, size))
    kept = is_candidate(boxes * geometry.scale, moved, 0.10)
    return output, moved[kept], labels[kept], tile


def away_from_seams(tile, margin=3):
    """Pixels whose whole neighbourhood shows the same tile."""
    kernel = np.ones((2 * margin + 1, 2 * margin + 1), np.uint8)
    return (cv2.dilate(tile, kernel) == tile) & (cv2.erode(tile, kernel) == tile)


def make_layout(images, objects, centre, size=SIZE):
    placements = mosaic_placements([image.shape[:2] for image in images], centre, size)
    return Layout(placements, objects, lambda position, _: images[position], (2 * size, 2 * size))


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("centre", [(128, 128), (70, 185)])
def test_fused_mosaic_equals_the_classic_canvas(name, centre):
    geometry = GEOMETRIES[name]
    images = [smooth_image(size, seed) for seed, size in enumerate(SIZES)]
    objects = [random_objects(size, 6, seed) for seed, size in enumerate(SIZES)]
    expected, expected_boxes, expected_labels, tile = classic_mosaic(images, objects, centre, SIZE, geometry)
    image, boxes, labels = make_layout(images, objects, centre).show(geometry, (SIZE, SIZE))

    assert np.array_equal(labels, expected_labels)
    np.testing.assert_allclose(boxes, expected_boxes, rtol=0, atol=1e-9)
    interior = away_from_seams(tile)
    assert interior.mean() > 0.5
    difference = np.abs(image.astype(int) - expected)[interior]
    # Half a source pixel of a smooth image, plus the rounding of two interpolations.
    assert difference.max() <= 8
    assert difference.mean() <= 1.5


def test_an_invisible_tile_is_never_decoded():
    asked = []

    def load(position, reduction):
        asked.append(position)
        return smooth_image(SIZES[position], position)

    placements = mosaic_placements(SIZES, (SIZE // 2, SIZE // 2), SIZE)
    layout = Layout(placements, [random_objects(size, 1, 0) for size in SIZES], load, (2 * SIZE, 2 * SIZE))
    layout.show(Geometry(), (SIZE, SIZE))
    # With the centre in the output's corner only the lower right image is seen.
    assert asked == [3]


def test_large_images_are_asked_for_reduced():
    asked = []

    def load(position, reduction):
        asked.append(reduction)
        size = (1200 // reduction, 1600 // reduction)
        return smooth_image(size, position)

    placements = mosaic_placements([(1200, 1600)] * 4, (SIZE, SIZE), SIZE)
    layout = Layout(placements, [random_objects((1200, 1600), 1, 0)] * 4, load, (2 * SIZE, 2 * SIZE))
    layout.show(Geometry(scale=1.5), (SIZE, SIZE))
    # 128 px of 1600 at scale 1.5 is 0.12: an eighth leaves 0.96.
    assert asked == [8] * 4


def test_mosaic_keeps_the_union_of_all_boxes():
    # Four images of the canvas's quarter size around the middle, shown whole: nothing is cut off.
    objects = []
    for label in range(4):
        objects.append((np.array([[10.0, 10, 50, 40], [20, 30, 60, 60]]), np.array([label, 9]), [None, None]))
    images = [smooth_image((SIZE, SIZE), seed) for seed in range(4)]
    layout = make_layout(images, objects, (SIZE, SIZE))
    _, boxes, labels = layout.show(Geometry(), (2 * SIZE, 2 * SIZE))
    assert sorted(labels.tolist()) == [0, 1, 2, 3, 9, 9, 9, 9]
    for position, (image_boxes, _, _) in enumerate(objects):
        offset = np.array([position % 2, position // 2] * 2) * SIZE
        np.testing.assert_allclose(boxes[2 * position : 2 * position + 2], image_boxes + offset)


def test_a_tile_that_cannot_be_read_stays_grey_and_loses_its_labels():
    images = [smooth_image((SIZE, SIZE), seed) for seed in range(4)]
    objects = [(np.array([[10.0, 10, 60, 60]]), np.array([label]), [None]) for label in range(4)]

    def load(position, _):
        if position == 2:
            raise UnreadableImage("broken")
        return images[position]

    placements = mosaic_placements([(SIZE, SIZE)] * 4, (SIZE, SIZE), SIZE)
    layout = Layout(placements, objects, load, (2 * SIZE, 2 * SIZE))
    image, _, labels = layout.show(Geometry(), (2 * SIZE, 2 * SIZE))
    assert labels.tolist() == [0, 1, 3]
    assert (image[SIZE:, :SIZE] == FILL).all()
    assert not (image[SIZE:, SIZE:] == FILL).all()


def test_the_centre_is_in_the_middle_half_of_the_canvas():
    centres = np.array([draw_centre(SIZE, np.random.default_rng(seed)) for seed in range(300)])
    assert centres.min() >= SIZE // 2 and centres.max() < 3 * SIZE // 2
    assert centres.std() > SIZE / 5


def test_pasting_refuses_to_hide_other_objects():
    size = (100, 100)
    outline = np.array([[10.0, 10], [40, 10], [40, 40], [10, 40]])
    # Its mirror image would cover the second box.
    boxes = np.array([[10.0, 10, 40, 40], [60, 10, 90, 40]])
    images = [smooth_image(size, 0)]
    placements = mosaic_placements([size], (100, 100), 100)
    layout = Layout(placements, [(boxes, np.array([0, 1]), [outline, None])], lambda *_: images[0], (100, 100))
    layout.boxes, layout.outlines = boxes, [outline, None]
    layout.paste_mirrored(1.0, np.random.default_rng(0))
    assert len(layout.boxes) == 2


@pytest.mark.parametrize("pastes", [False, True])
def test_a_decoded_image_is_kept_only_if_pasting_shows_it_again(pastes):
    alive, asked = [], []

    def load(position, _):
        asked.append((position, sum(reference() is not None for reference in alive)))
        image = smooth_image((SIZE, SIZE), position)
        alive.append(weakref.ref(image))
        return image

    outline = np.array([[10.0, 10], [40, 10], [40, 40], [10, 40]])
    objects = [(np.array([[10.0, 10, 40, 40]]), np.array([0]), [outline])] * 4
    layout = Layout(mosaic_placements([(SIZE, SIZE)] * 4, (SIZE, SIZE), SIZE), objects, load, (2 * SIZE, 2 * SIZE))
    if pastes:
        layout.paste_mirrored(0.25, np.random.default_rng(0))
        assert len(layout.boxes) == 5
    layout.show(Geometry(scale=0.9), (SIZE * 2, SIZE * 2))
    assert asked == ([(0, 0), (1, 1), (2, 2), (3, 3)] if pastes else [(0, 0), (1, 0), (2, 0), (3, 0)])


def test_hidden_share_is_of_the_other_box():
    assert hidden_share(np.array([0.0, 0, 10, 10]), np.array([[5.0, 0, 25, 10], [5, 5, 7, 7]])).tolist() == [0.25, 1.0]
