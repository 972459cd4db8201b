"""Augmentation against numbers of the reference: matrices, boxes, filter, mosaic, colour, copy-paste, batch shapes."""

import json

import numpy as np
import pytest

from accel_yolo.boxes import clip_boxes
from accel_yolo.data.mosaic import Layout, mosaic_placements
from accel_yolo.data.order import batch_shapes
from accel_yolo.data.transforms import (
    Geometry,
    Placement,
    is_candidate,
    jitter_hsv,
    move_objects,
    perspective_matrix,
    warp_points,
)

FIXTURE = "augment.json"


@pytest.fixture(scope="module")
def golden(golden_dir):
    return json.loads((golden_dir / FIXTURE).read_text())


def geometry_of(parameters):
    return Geometry(
        perspective_x=parameters["px"],
        perspective_y=parameters["py"],
        angle=parameters["angle_deg"],
        scale=parameters["scale"],
        shear_x=parameters["shear_x_deg"],
        shear_y=parameters["shear_y_deg"],
        translate_x=parameters["tx_frac"],
        translate_y=parameters["ty_frac"],
    )


def test_perspective_matrices_and_points(golden, record_deviation):
    for case in golden["perspective"]:
        matrix = perspective_matrix(geometry_of(case["params"]), case["input_hw"], case["output_hw"])
        deviation = np.abs(matrix - np.array(case["M"])).max()
        record_deviation(FIXTURE, "perspective matrix", deviation, "1e-9")
        assert deviation <= 1e-9, case["name"]
        points = warp_points(np.array(case["points_in"]), matrix)
        deviation = np.abs(points - np.array(case["points_out"])).max()
        record_deviation(FIXTURE, "perspective points, px", deviation, "1e-3")
        assert deviation <= 1e-3, case["name"]


def test_objects_under_perspective(golden, record_deviation):
    for case in golden["perspective"]:
        matrix = perspective_matrix(geometry_of(case["params"]), case["input_hw"], case["output_hw"])
        labels_in = np.array(case["labels_in"])
        outlines = [np.array(segment) for segment in case["segments_in"]] or [None] * len(labels_in)
        boxes, kept = move_objects(
            labels_in[:, 1:], outlines, matrix, scale=case["params"]["scale"], output_hw=tuple(case["output_hw"])
        )
        deviation = np.abs(boxes - np.array(case["boxes_transformed_clipped"])).max()
        record_deviation(FIXTURE, "boxes after perspective, px", deviation, "1e-3")
        assert deviation <= 1e-3, case["name"]
        assert kept.tolist() == case["keep"], case["name"]
        labels_out = np.array(case["labels_out"]).reshape(-1, 5)
        assert labels_in[kept, 0].tolist() == labels_out[:, 0].tolist()
        assert np.abs(boxes[kept] - labels_out[:, 1:]).max() <= 1e-3


def test_candidate_filter_is_strict(golden):
    case = golden["candidates"]
    before, after = np.array(case["box1"]), np.array(case["box2"])
    assert is_candidate(before, after, 0.10).tolist() == case["keep_area_0_10"]
    assert is_candidate(before, after, 0.01).tolist() == case["keep_area_0_01"]


def solid_image(size_hw, position):
    return np.full((*size_hw, 3), 200 + position, np.uint8)


def mosaic_layout(case):
    sizes = [tuple(size) for size in case["tile_hw"]]
    placements = mosaic_placements(sizes, tuple(case["center_yx"]), case["s"])
    objects = []
    for (height, width), rows in zip(sizes, case["labels_in_cls_xywhn"], strict=True):
        labels = np.array(rows, float).reshape(-1, 5)
        centre, half = labels[:, 1:3], labels[:, 3:] / 2
        boxes = np.concatenate([centre - half, centre + half], axis=1) * [width, height, width, height]
        objects.append((boxes, labels[:, 0].astype(np.int64), [None] * len(labels)))
    canvas = (2 * case["s"], 2 * case["s"])
    layout = Layout(placements, objects, lambda position, _: solid_image(sizes[position], position), canvas)
    return placements, layout


def test_mosaic_places_tiles_and_labels_on_the_canvas(golden, record_deviation):
    for case in golden["mosaic"]:
        placements, layout = mosaic_layout(case)
        assert [list(placement.window) for placement in placements] == case["tile_rects_xyxy_on_canvas"]
        expected = np.array(case["labels_canvas_cls_xyxy"])
        assert layout.labels.tolist() == expected[:, 0].tolist()
        deviation = np.abs(layout.boxes - expected[:, 1:]).max()
        record_deviation(FIXTURE, "mosaic boxes on the canvas, px", deviation, "1e-3")
        assert deviation <= 1e-3, case["name"]


def test_mosaic_shows_the_right_part_of_each_tile(golden, record_deviation):
    for case in golden["mosaic"]:
        _, layout = mosaic_layout(case)
        image, boxes, labels = layout.show(Geometry(), tuple(case["output_hw"]))
        for position, rectangle in enumerate(case["tile_rects_after_neutral_perspective"]):
            rows, columns = np.nonzero(image[:, :, 0] == 200 + position)
            if rectangle is None:
                assert not len(rows)
            else:
                found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                assert found == rectangle, case["name"]
        expected = np.array(case["labels_out_cls_xyxy"])
        assert labels.tolist() == expected[:, 0].tolist()
        deviation = np.abs(boxes - expected[:, 1:]).max()
        record_deviation(FIXTURE, "mosaic boxes in the output, px", deviation, "1e-3")
        assert deviation <= 1e-3, case["name"]


def test_hsv_lookup_tables(golden, record_deviation):
    for case in golden["hsv"]:
        image = np.array(case["bgr_in"], np.uint8)[:, :, ::-1].copy()
        expected = np.array(case["bgr_out"], int)[:, :, ::-1]
        changed = jitter_hsv(image, tuple(case["gains"]), np.array(case["u"]))
        deviation = np.abs(changed.astype(int) - expected).max()
        record_deviation(FIXTURE, "HSV, levels", deviation, "0 (1 with another OpenCV)")
        assert deviation <= 1


def test_copy_paste_mirrors_objects_and_pixels(golden):
    for case in golden["copy_paste"]:
        height, width = case["hw"]
        labels_in = np.array(case["labels_in"])
        image = np.zeros((height, width, 3), np.uint8)
        outlines = []
        for left, top, right, bottom in labels_in[:, 1:]:
            image[int(top) : int(bottom) + 1, int(left) : int(right) + 1] = 255
            outlines.append(np.array([[left, top], [right, top], [right, bottom], [left, bottom]]))
        whole = Placement((height, width), (1.0, 1.0), (0.0, 0.0), (0, 0, width, height))
        objects = [(labels_in[:, 1:], labels_in[:, 0].astype(np.int64), outlines)]
        layout = Layout([whole], objects, lambda *_, image=image: image, (height, width))
        layout.paste_mirrored(case["p"], np.random.default_rng(0))
        found = np.concatenate([layout.labels[:, None], layout.boxes], axis=1)
        assert sorted(found.tolist()) == sorted(case["labels_out_as_set"])
        assert sum(outline is not None for outline in layout.outlines) == case["n_segments_out"]

        shown, boxes, _ = layout.show(Geometry(), (height, width))
        assert len(boxes) == 4
        rows, columns = np.nonzero((shown != image).any(axis=2))
        expected = clip_boxes(np.array(case["changed_pixels_bbox"]), (height, width))
        # Whether the pixel under the outline itself belongs to it is the drawing library's choice.
        changed = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert np.abs(np.array(changed) - expected).max() <= 1


def test_shapes_of_rectangular_batches(golden):
    for case in golden["rect_batch_shapes"]:
        shapes = batch_shapes(
            np.array(case["h_over_w"]),
            batch_size=case["batch"],
            image_size=case["imgsz"],
            stride=case["stride"],
            pad=case["pad"],
        )
        assert shapes.tolist() == case["shapes_hw"]
