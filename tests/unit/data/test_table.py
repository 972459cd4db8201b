"""The table's contract: what goes in comes out, and a row that breaks it is named."""

import json

import numpy as np
import pytest
from datasets import Dataset, concatenate_datasets

from accel_yolo.data.table import (
    Finding,
    FlatTable,
    Rows,
    ScanReport,
    build_table,
    class_names,
    judge,
    merge_classes,
)
from accel_yolo.errors import DataError

NAMES = ("cat", "dog")


def make_rows(**changes):
    values = {
        "paths": ["a.jpg", "b.jpg", "c.jpg"],
        "image_ids": ["a", "b", "c"],
        "sizes_hw": np.array([[100, 200], [50, 50], [300, 400]]),
        "offsets": np.array([0, 2, 2, 3]),
        "boxes": np.array([[0.1, 0.2, 10, 20], [5, 5, 100, 90], [0, 0, 400, 300]]),
        "labels": np.array([0, 1, 1]),
        "ignore": np.array([False, True, False]),
    }
    return Rows(**{**values, **changes})


def test_columns_come_back_unchanged():
    rows = make_rows()
    table = build_table(rows, NAMES)
    assert table.column_names == ["image", "image_id", "width", "height", "objects"]
    assert table[0]["objects"]["bbox"][0] == [0.1, 0.2, 10, 20]
    assert (table[2]["width"], table[2]["height"]) == (400, 300)
    flat = FlatTable(table)
    np.testing.assert_array_equal(flat.boxes, rows.boxes)
    np.testing.assert_array_equal(flat.labels, rows.labels)
    np.testing.assert_array_equal(flat.ignore, rows.ignore)
    np.testing.assert_array_equal(flat.sizes_hw, rows.sizes_hw)
    assert flat.offsets.tolist() == [0, 2, 2, 3]
    assert flat.name(1) == "b.jpg" and len(flat) == 3


def test_polygons_of_some_objects_are_kept():
    triangle, square = np.array([[0, 0], [4, 0], [2, 3]]), np.array([[0, 0], [1, 0], [1, 1], [0, 1]])
    flat = FlatTable(build_table(make_rows(segments=[[triangle], [], [triangle, square]]), NAMES))
    first, second = flat.segments(0)
    np.testing.assert_array_equal(first, triangle)
    assert second is None
    assert flat.segments(1) == []
    np.testing.assert_array_equal(flat.segments(2)[0], np.concatenate([triangle, square]))


def test_a_table_without_polygons_has_no_column_for_them():
    table = build_table(make_rows(segments=[[], [], []]), NAMES)
    assert "segments" not in table.features["objects"]
    assert FlatTable(table).segments(0) == [None, None]


@pytest.mark.parametrize("change", ["select", "concatenate"])
def test_selected_and_chunked_tables_read_the_same(change):
    table = build_table(make_rows(segments=[[np.ones((3, 2))], [], [np.zeros((4, 2))]]), NAMES)
    if change == "select":
        flat, row = FlatTable(table.select([2, 0])), 0
    else:
        flat, row = FlatTable(concatenate_datasets([table, table])), 5
    assert flat.name(row) == "c.jpg"
    assert flat.boxes[flat.objects(row)].tolist() == [[0, 0, 400, 300]]
    assert flat.segments(row)[0].shape == (4, 2)


def test_contents_are_read_from_the_table(tmp_path):
    flat = FlatTable(build_table(make_rows(contents=[b"one", b"two", b"three"]), NAMES))
    assert flat.image_bytes(2).tobytes() == b"three"


def test_boxes_are_judged_by_their_image():
    boxes = np.array(
        [
            [0.0, 0, 10, 10],
            [-0.5, 0, 10, 10],
            [-1.5, 0, 10, 10],
            [5, 5, 5, 10],
            [7, 5, 6, 10],
            [np.nan, 0, 1, 1],
            [0, 0, 100 + 5e-5, 50],
            [100, 0, 100.5, 10],
        ]
    )
    boxes_before = boxes.copy()
    judgement = judge(boxes, np.full((len(boxes), 2), [50, 100]))
    assert sorted(judgement.reasons) == [2, 3, 4, 5, 7]
    assert "1.5 px" in judgement.reasons[2]
    assert "no area" in judgement.reasons[3] and "finite" in judgement.reasons[5]
    # The rounding of six decimals is cut off without being a finding.
    assert np.flatnonzero(judgement.clipped).tolist() == [1]
    assert judgement.boxes[1, 0] == 0 and judgement.boxes[6, 2] == 100
    np.testing.assert_array_equal(boxes, boxes_before)


def test_judging_nothing_finds_nothing():
    judgement = judge(np.zeros((0, 4)), np.zeros((0, 2)))
    assert judgement.boxes.shape == (0, 4) and not judgement.reasons


def test_a_table_without_class_names_is_refused():
    with pytest.raises(DataError, match="lacks a column"):
        class_names(Dataset.from_dict({"image": [1]}))


def test_merging_classes_changes_labels_alone():
    table = build_table(make_rows(segments=[[np.ones((3, 2))], [], []]), NAMES)
    merged = merge_classes(table, "item")
    assert class_names(merged) == ["item"]
    assert FlatTable(merged).labels.tolist() == [0, 0, 0]
    assert merged[0]["objects"]["bbox"] == table[0]["objects"]["bbox"]
    assert merged[0]["objects"]["segments"] == table[0]["objects"]["segments"]


def test_a_report_survives_json_and_sums_up_in_one_line():
    report = ScanReport(
        "train", images=3, boxes=2, rejected=1, classes=NAMES, findings=[Finding("a.txt", 4, "bad", "rejected")]
    )
    assert ScanReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    [finding] = report.to_dict()["findings"]
    assert finding == {"file": "a.txt", "line": 4, "reason": "bad", "verdict": "rejected"}
    assert report.summary() == "train: 3 images, 2 boxes, 1 rejected"
    assert str(report.findings[0]) == "a.txt:4: bad"
