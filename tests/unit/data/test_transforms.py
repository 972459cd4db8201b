"""Decoding, placing, colour, flips and blending of single images."""

import io

import cv2
import numpy as np
import pytest
from PIL import Image

from accel_yolo.config.schema import AugmentConfig
from accel_yolo.data.transforms import (
    FILL,
    Geometry,
    Placement,
    UnreadableImage,
    blend,
    decode_image,
    draw_geometry,
    flip,
    is_candidate,
    jitter_hsv,
    letterbox,
    letterbox_placement,
    move_objects,
    paint,
    perspective_matrix,
    scaled_size,
    warp_outline,
)


def encode(image, image_format="PNG", **options):
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, image_format, **options)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def gradient(height, width):
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // width, y * 255 // height, np.full_like(x, 90)], axis=-1).astype(np.uint8)


def test_png_comes_back_exactly_and_in_rgb():
    image = gradient(20, 30)
    np.testing.assert_array_equal(decode_image(encode(image)), image)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_is_applied(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = np.zeros((64, 96, 3), np.uint8)
    image[:32, :32] = [255, 0, 0]
    data = encode(image, "JPEG", quality=95, exif=exif)
    decoded = decode_image(data)
    assert decoded.shape[:2] == ((64, 96) if orientation < 5 else (96, 64))
    with Image.open(io.BytesIO(data.tobytes())) as opened:
        from PIL import ImageOps

        expected = np.asarray(ImageOps.exif_transpose(opened))
    assert np.abs(decoded.astype(int) - expected).max() < 12


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_of_avif_is_applied(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = np.zeros((64, 96, 3), np.uint8)
    image[:32, :32] = [255, 0, 0]
    # How each orientation is undone: the red corner of the stored image comes to lie in this corner of the shown one.
    expected = {1: image, 2: image[:, ::-1], 3: image[::-1, ::-1], 4: image[::-1]}
    expected |= {5: image.transpose(1, 0, 2), 6: np.rot90(image, -1), 8: np.rot90(image)}
    expected[7] = expected[5][::-1, ::-1]
    decoded = decode_image(encode(image, "AVIF", quality=100, exif=exif))
    assert decoded.shape == expected[orientation].shape
    assert np.abs(decoded.astype(int) - expected[orientation]).mean() < 3


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "CMYK", "1"])
def test_every_mode_becomes_three_channels(mode):
    image = Image.fromarray(gradient(40, 40)).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG" if mode == "CMYK" else "PNG")
    assert decode_image(np.frombuffer(buffer.getvalue(), np.uint8)).shape == (40, 40, 3)


def test_sixteen_bits_are_scaled_and_not_clipped():
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(16, axis=0)
    decoded = decode_image(np.frombuffer(cv2.imencode(".png", ramp)[1].tobytes(), np.uint8))
    levels = decoded[0, :, 0].astype(int)
    assert (np.diff(levels) >= 0).all() and len(np.unique(levels)) > 200


def test_a_reduced_jpeg_is_the_same_picture_and_png_ignores_it():
    image = gradient(160, 240)
    reduced = decode_image(encode(image, "JPEG", quality=95), reduction=4)
    assert reduced.shape == (40, 60, 3)
    assert np.abs(reduced.astype(int) - cv2.resize(image, (60, 40), interpolation=cv2.INTER_AREA)).mean() < 4
    assert decode_image(encode(image), reduction=4).shape == image.shape


@pytest.mark.parametrize("data", [b"", b"not an image", b"\0\0\0\x18ftypheic", encode(gradient(20, 20))[:60].tobytes()])
def test_what_is_no_image_is_told(data):
    with pytest.raises(UnreadableImage):
        decode_image(np.frombuffer(data, np.uint8))


def test_what_opencv_cannot_read_goes_to_pillow():
    buffer = io.BytesIO()
    Image.fromarray(np.full((12, 14), 7.0, np.float32)).save(buffer, "TIFF")
    assert decode_image(np.frombuffer(buffer.getvalue(), np.uint8)).shape == (12, 14, 3)


def test_the_long_side_is_exact_in_every_case():
    for height, width in [(333, 1000), (1000, 333), (7, 640), (49, 49), (1023, 767)]:
        assert max(scaled_size((height, width), 640)) == 640
    assert scaled_size((480, 640), 320) == (240, 320)


def test_validation_letterbox_maps_boxes_back_exactly():
    torch = pytest.importorskip("torch")
    image = gradient(333, 500)
    placement = letterbox_placement((333, 500), (256, 352), long_side=320)
    padded, mapping = letterbox(image, placement, (256, 352))
    assert padded.shape == (256, 352, 3) and mapping.input_size == (256, 352)
    # ceil(333 * 320 / 500) = 214 rows; 42 px of padding are shared evenly.
    assert (padded[:21] == FILL).all() and not (padded[21] == FILL).all()
    boxes = np.array([[10.0, 20, 300, 333]])
    back = mapping.to_original(torch.from_numpy(placement.boxes(boxes)))
    np.testing.assert_allclose(back.numpy(), boxes, atol=1e-9)


def test_validation_does_not_enlarge_beyond_the_long_side():
    placement = letterbox_placement((100, 100), (672, 672), long_side=640)
    assert placement.scale == (6.4, 6.4) and placement.origin == (16, 16)
    assert letterbox_placement((100, 100), (672, 672)).scale == (6.72, 6.72)


def test_validation_shrinks_by_area():
    image = np.zeros((64, 64, 3), np.uint8)
    image[::4] = 255
    placement = letterbox_placement((64, 64), (16, 16), long_side=16)
    assert (letterbox(image, placement, (16, 16))[0] == 64).all()


def test_an_extremely_long_image_keeps_a_pixel():
    placement = letterbox_placement((2, 5000), (64, 64), long_side=64)
    assert letterbox(np.zeros((2, 5000, 3), np.uint8), placement, (64, 64))[0].shape == (64, 64, 3)


def test_painting_the_letterbox_without_geometry_is_the_letterboxed_image():
    image = cv2.GaussianBlur(gradient(100, 160), (0, 0), 3)
    placement = letterbox_placement((100, 160), (128, 128))
    output = np.full((128, 128, 3), FILL, np.uint8)
    matrix = perspective_matrix(Geometry(), (128, 128), (128, 128))
    paint(output, placement, matrix, lambda _: image)
    expected = cv2.resize(image, (128, 80), interpolation=cv2.INTER_LINEAR)
    assert np.abs(output[24:104].astype(int) - expected).max() <= 1
    assert (output[:24] == FILL).all() and (output[104:] == FILL).all()


def test_a_pixel_lands_where_its_box_lands():
    # A white square on black, far enlarged and shifted: the bright region must fill the moved box.
    image = np.zeros((40, 40, 3), np.uint8)
    image[10:20, 5:25] = 255
    placement = Placement((40, 40), (1.0, 1.0), (0.0, 0.0), (0, 0, 40, 40))
    for geometry in (Geometry(scale=1.4), Geometry(scale=3.7), Geometry(scale=3.0, angle=90), Geometry(scale=0.7)):
        output = np.full((100, 100, 3), FILL, np.uint8)
        matrix = perspective_matrix(geometry, (40, 40), (100, 100))
        paint(output, placement, matrix, lambda _: image)
        boxes, _ = move_objects(
            np.array([[5.0, 10, 25, 20]]), [None], matrix, scale=geometry.scale, output_hw=(100, 100)
        )
        rows, columns = np.nonzero(output[:, :, 0] > 127)
        found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert np.abs(np.array(found) - boxes[0]).max() <= 1, geometry


def test_an_outline_outside_leaves_nothing():
    outline = np.array([[0.0, 0], [10, 0], [10, 10]])
    far = np.array([[1.0, 0, 500], [0, 1, 0], [0, 0, 1]])
    assert warp_outline(outline, far, (100, 100)).tolist() == [0, 0, 0, 0]


def test_objects_with_and_without_outlines_are_each_moved_by_their_own():
    # A thin diagonal rotated by 45 degrees: its outline becomes narrow, its box does not.
    geometry = Geometry(angle=45)
    matrix = perspective_matrix(geometry, (100, 100), (100, 100))
    box = np.array([[30.0, 30, 70, 70]])
    diagonal = np.array([[30.0, 30], [70, 70], [69, 71]])
    moved, _ = move_objects(np.concatenate([box, box]), [None, diagonal], matrix, scale=1, output_hw=(100, 100))
    assert moved[0, 3] - moved[0, 1] > 50
    assert moved[1, 3] - moved[1, 1] < 5


def test_no_objects_pass_the_filter_without_a_fault():
    assert is_candidate(np.zeros((0, 4)), np.zeros((0, 4)), 0.1).shape == (0,)
    moved, kept = move_objects(np.zeros((0, 4)), [], np.eye(3), scale=1, output_hw=(10, 10))
    assert moved.shape == (0, 4) and kept.shape == (0,)


def test_geometry_draws_do_not_depend_on_the_settings_of_others():
    plain = draw_geometry(AugmentConfig(degrees=0.0), np.random.default_rng(0))
    rotated = draw_geometry(AugmentConfig(degrees=10.0), np.random.default_rng(0))
    assert rotated.angle != 0 == plain.angle
    assert rotated._replace(angle=0.0) == plain


def test_flips_mirror_pixels_and_boxes_together():
    image = np.zeros((20, 30, 3), np.uint8)
    image[2:6, 1:9] = 255
    flipped, boxes = flip(image, np.array([[1.0, 2, 9, 6]]), horizontally=True, vertically=True)
    left, top, right, bottom = boxes[0].astype(int)
    assert (left, top, right, bottom) == (21, 14, 29, 18)
    assert (flipped[top:bottom, left:right] == 255).all() and flipped.sum() == image.sum()


def test_no_colour_gain_returns_the_image_untouched():
    image = gradient(8, 8)
    assert jitter_hsv(image, (0.0, 0.0, 0.0), np.ones(3)) is image


def test_blending_truncates():
    first, second = np.full((2, 2, 3), 10, np.uint8), np.full((2, 2, 3), 13, np.uint8)
    assert (blend(first, second, 0.5) == 11).all()
