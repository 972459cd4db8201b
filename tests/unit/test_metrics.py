"""Precision, recall, AP and confusion: the cases whose answer is known by hand."""

import json
import math
import pickle
import time

import numpy as np
import pytest
import torch

from accel_yolo import metrics
from accel_yolo.metrics import Truth, coco_map, score
from accel_yolo.structures import Detections

NAMES = {0: "circle", 1: "square", 2: "triangle"}
BOX = [10.0, 10.0, 50.0, 50.0]
FAR = [200.0, 200.0, 260.0, 260.0]


def truth(*rows, ignore=()):
    """Rows (label, box); `ignore` holds the positions of ignored ones."""
    boxes = np.array([box for _, box in rows], dtype=np.float64).reshape(-1, 4)
    flags = np.zeros(len(rows), dtype=bool)
    flags[list(ignore)] = True
    return Truth(boxes, np.array([label for label, _ in rows], dtype=np.int64), flags)


def found(*rows):
    """Rows (label, box, score)."""
    boxes = torch.from_numpy(np.array([box for _, box, _ in rows], dtype=np.float32).reshape(-1, 4))
    scores = torch.tensor([value for _, _, value in rows], dtype=torch.float32)
    return Detections(boxes, scores, torch.tensor([label for label, _, _ in rows], dtype=torch.int64))


def test_a_perfect_result_is_one_everywhere():
    result = score([found((0, BOX, 0.9), (1, FAR, 0.8))], [truth((0, BOX), (1, FAR))], names=NAMES)
    assert result.map50 == pytest.approx(1)
    assert result.map50_95 == pytest.approx(1)
    assert result.fitness == pytest.approx(1)
    assert result.precision == pytest.approx(1)
    assert result.recall == pytest.approx(1)
    # YOLO-style AP falls from 1 to 0 within its last hundredth.
    assert result.yolo_map50 == pytest.approx(0.995)
    assert result.images == 1
    assert result.instances == 2


def test_the_table_lists_every_class_and_leaves_absent_ones_out_of_the_means():
    result = score(
        [found((0, BOX, 0.9), (2, FAR, 0.8)), found()],
        [truth((0, BOX), (1, FAR)), truth((1, BOX), (1, FAR))],
        names=NAMES,
    )
    circle, square, triangle = result.per_class
    assert [row.name for row in result.per_class] == list(NAMES.values())
    assert (circle.instances, square.instances, triangle.instances) == (1, 3, 0)
    assert (circle.images, square.images, triangle.images) == (1, 2, 0)
    assert circle.ap50 == pytest.approx(1)
    assert (square.precision, square.recall, square.ap50, square.yolo_ap50) == (0, 0, 0, 0)
    for value in (
        triangle.precision,
        triangle.recall,
        triangle.f1,
        triangle.ap50,
        triangle.ap50_95,
        triangle.yolo_ap50,
    ):
        assert math.isnan(value)
    assert result.map50 == pytest.approx(0.5)


@pytest.mark.parametrize("detections", [[found(), found()], [found((0, BOX, 0.9)), found((1, FAR, 0.8))]])
def test_without_any_truth_the_numbers_are_undefined_and_so_is_the_fitness(detections):
    result = score(detections, [truth(), truth()], names=NAMES, with_curves=True)
    for name in ("precision", "recall", "f1", "best_confidence", "map50", "map50_95", "yolo_map50", "yolo_map50_95"):
        assert math.isnan(getattr(result, name)), name
    assert math.isnan(result.fitness)
    plain = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert plain["fitness"] is None
    assert plain["map50"] is None
    assert set(result.coco_stats) == {-1.0}
    # False positives count all the same.
    assert result.curves.confusion.sum() == sum(len(item) for item in detections)


def test_no_image_at_all_is_no_crash():
    result = score([], [], names=NAMES)
    assert result.images == 0
    assert math.isnan(result.map50)


def test_truths_without_any_detection_score_zero():
    result = score([found()], [truth((0, BOX))], names=NAMES, with_curves=True)
    assert (result.map50, result.map50_95, result.yolo_map50, result.precision, result.recall) == (0, 0, 0, 0, 0)
    assert result.coco_stats == (0.0,) * 12
    assert result.curves.confusion[3, 0] == 1


def test_a_detection_is_bound_to_its_best_truth_and_the_higher_score_wins_it():
    near = [12.0, 10.0, 52.0, 50.0]
    # The first has the higher score, the second the higher overlap with the only truth.
    detections, real = metrics._flatten([found((0, near, 0.9), (0, BOX, 0.8))], [truth((0, BOX))], 3)
    correct = metrics.match(detections, real, 3)
    assert correct[:, 0].tolist() == [True, False]
    # Where the first does not reach the threshold, the second gets the truth.
    assert correct[:, -1].tolist() == [False, True]


def test_a_detection_that_lost_its_truth_is_not_given_another():
    left, right = [0.0, 0.0, 100.0, 100.0], [30.0, 0.0, 130.0, 100.0]
    detections, real = metrics._flatten(
        [found((0, left, 0.9), (0, [5.0, 0.0, 105.0, 100.0], 0.8))], [truth((0, left), (0, right))], 3
    )
    assert metrics.match(detections, real, 3)[:, 0].tolist() == [True, False]


def test_images_and_classes_are_never_mixed_up():
    detections, real = metrics._flatten(
        [found((0, BOX, 0.9)), found((1, BOX, 0.9)), found((0, BOX, 0.9))],
        [truth(), truth((0, BOX)), truth((0, BOX))],
        3,
    )
    assert metrics.match(detections, real, 3).any(axis=1).tolist() == [False, False, True]


def test_pairs_in_small_portions_give_the_same_matches(monkeypatch):
    rng = np.random.default_rng(0)
    boxes = rng.uniform(0, 50, (40, 2))
    boxes = np.concatenate([boxes, boxes + 30], axis=1)
    truths = [truth(*[(int(label), box) for label, box in zip(rng.integers(0, 3, 40), boxes, strict=True)])] * 3
    detections = [
        found(*[(int(rng.integers(0, 3)), box + rng.normal(0, 3, 4), float(rng.random())) for box in boxes])
        for _ in range(3)
    ]
    whole = score(detections, truths, names=NAMES, with_curves=True)
    monkeypatch.setattr(metrics, "PAIRS_AT_ONCE", 50)
    parts = score(detections, truths, names=NAMES, with_curves=True)
    assert parts.to_dict() == whole.to_dict()
    np.testing.assert_array_equal(parts.curves.confusion, whole.curves.confusion)


def test_the_order_of_detections_within_an_image_does_not_matter():
    rows = [(0, BOX, 0.3), (0, FAR, 0.9), (1, BOX, 0.6)]
    truths = [truth((0, BOX), (1, BOX))]
    forwards, backwards = (score([found(*order)], truths, names=NAMES) for order in (rows, rows[::-1]))
    assert forwards.to_dict() == backwards.to_dict()


def test_ignored_truths_neither_help_nor_harm():
    plain = score([found((0, BOX, 0.9))], [truth((0, BOX))], names=NAMES, with_curves=True)
    # Two detections inside an ignored region that is far larger, one of them with the highest score of all.
    region = [150.0, 150.0, 400.0, 400.0]
    rows = [(0, FAR, 0.95), (0, BOX, 0.9), (0, [300.0, 300.0, 330.0, 330.0], 0.5)]
    crowded = score([found(*rows)], [truth((0, BOX), (0, region), ignore=[1])], names=NAMES, with_curves=True)
    for name in ("precision", "recall", "map50", "map50_95", "yolo_map50", "yolo_map50_95", "instances"):
        assert getattr(crowded, name) == pytest.approx(getattr(plain, name)), name
    np.testing.assert_array_equal(crowded.curves.confusion, plain.curves.confusion)
    # Of another class the region forgives nothing.
    other = score([found(*rows)], [truth((0, BOX), (1, region), ignore=[1])], names=NAMES, with_curves=True)
    assert other.yolo_map50 < plain.yolo_map50
    assert other.map50 < plain.map50
    assert other.curves.confusion[0, 3] == 2


def test_a_class_with_ignored_truths_alone_is_absent():
    result = score([found((0, BOX, 0.9))], [truth((0, BOX), (1, FAR), ignore=[1])], names=NAMES)
    assert result.per_class[1].instances == 0
    assert math.isnan(result.per_class[1].ap50)
    assert result.map50 == pytest.approx(1)


def test_the_confusion_matrix_counts_every_confident_detection_and_every_truth():
    detections = [found((1, BOX, 0.9), (0, FAR, 0.5), (0, FAR, 0.2)), found((2, BOX, 0.8)), found()]
    truths = [truth((0, BOX)), truth(), truth((1, BOX))]
    expected = np.zeros((4, 4), dtype=int)
    expected[1, 0] = 1  # square where a circle is
    expected[0, 3] = 1  # a circle where nothing is
    expected[2, 3] = 1  # a triangle in an image without labels
    expected[3, 1] = 1  # a missed square
    result = score(detections, truths, names=NAMES, with_curves=True)
    np.testing.assert_array_equal(result.curves.confusion, expected)


def test_one_confidence_serves_all_classes_and_the_curves_belong_to_it():
    result = score(
        [found((0, BOX, 0.9), (1, FAR, 0.4)), found((0, FAR, 0.2))],
        [truth((0, BOX), (1, FAR)), truth()],
        names=NAMES,
        with_curves=True,
    )
    curves = result.curves
    index = int(np.flatnonzero(curves.confidences == result.best_confidence)[0])
    assert curves.labels == (0, 1)
    assert curves.precision.shape == curves.recall.shape == curves.f1.shape == (2, 1000)
    assert curves.precision_at_recall.shape == (2, 1000)
    assert [row.precision for row in result.per_class[:2]] == curves.precision[:, index].tolist()
    # Above the highest score nothing is found.
    assert curves.recall[1, -1] == 0
    assert curves.precision[1, -1] == 1


def test_losses_travel_along():
    assert score([found()], [truth((0, BOX))], names=NAMES, losses={"box": 0.1}).losses == {"box": 0.1}


def test_without_curves_no_confusion_is_counted_and_the_numbers_are_the_same(monkeypatch):
    arguments = [found((0, BOX, 0.9), (0, FAR, 0.4))], [truth((0, BOX), (1, FAR))]
    complete = score(*arguments, names=NAMES, with_curves=True)
    monkeypatch.delattr(metrics, "_confusion_matrix")
    plain = score(*arguments, names=NAMES)
    assert plain.curves is None
    assert plain.to_dict() == complete.to_dict()


def test_boxes_are_joined_and_checked_once(monkeypatch):
    flatten, calls = metrics._flatten, []
    monkeypatch.setattr(metrics, "_flatten", lambda *arguments: calls.append(arguments) or flatten(*arguments))
    score([found((0, BOX, 0.9))], [truth((0, BOX))], names=NAMES)
    assert len(calls) == 1


def test_coco_numbers_see_boxes_in_the_precision_that_they_are_given_in():
    # An overlap of 0.75 - 4e-9 in float64; in float32 both boxes are the same as those of 0.75.
    exact, short = [0.0, 0.0, 4.0, 100.0], [0.0, 0.0, 4.0, 75.0 - 4e-7]
    assert coco_map([found((0, exact, 0.9))], [truth((0, short))], 1).ap50_95[0] == pytest.approx(0.5)
    assert coco_map([found((0, exact, 0.9))], [truth((0, [0.0, 0.0, 4.0, 75.0]))], 1).ap50_95[0] == pytest.approx(0.6)


def test_a_result_survives_pickle_and_json():
    losses = {"box": 0.1, "obj": math.nan}
    result = score([found((0, BOX, 0.9))], [truth((0, BOX))], names=NAMES, losses=losses, with_curves=True)
    again = pickle.loads(pickle.dumps(result))
    assert again.map50 == result.map50
    assert again.per_class[0] == result.per_class[0]
    np.testing.assert_array_equal(again.curves.confusion, result.curves.confusion)
    plain = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert plain["map50"] == result.map50
    assert plain["fitness"] == result.fitness
    assert plain["losses"] == {"box": 0.1, "obj": None}
    assert plain["per_class"][2]["ap50"] is None
    assert "curves" not in plain


def test_what_the_engines_would_pass_over_in_silence_is_refused():
    with pytest.raises(ValueError, match="detections of 1 images but truths of 2"):
        score([found()], [truth(), truth()], names=NAMES)
    with pytest.raises(ValueError, match="class 3 of a detection in image 1"):
        score([found(), found((3, BOX, 0.5))], [truth(), truth()], names=NAMES)
    with pytest.raises(ValueError, match="class -1 of a truth in image 0"):
        score([found()], [truth((-1, BOX))], names=NAMES)
    with pytest.raises(ValueError, match="a detection in image 0 has a number that is not finite"):
        coco_map([found((0, BOX, math.nan))], [truth((0, BOX))], 3)
    with pytest.raises(ValueError, match="a truth in image 0 has a number that is not finite"):
        coco_map([found()], [truth((0, [0.0, 0.0, math.inf, 1.0]))], 3)
    with pytest.raises(ValueError, match="2 boxes, 1 labels"):
        Truth(np.zeros((2, 4)), np.zeros(1, dtype=int), np.zeros(2, dtype=bool))


def test_coco_evaluation_says_nothing_on_stdout(capfd):
    score([found((0, BOX, 0.9))], [truth((0, BOX))], names=NAMES)
    assert capfd.readouterr().out == ""


def test_another_engine_steps_in_where_the_first_is_missing(monkeypatch, capfd):
    pytest.importorskip("pycocotools.cocoeval")
    detections = [found((0, BOX, 0.9), (1, FAR, 0.7), (1, BOX, 0.6)), found()]
    truths = [truth((0, BOX), (1, FAR), (2, BOX), ignore=[2]), truth((1, BOX))]
    expected = coco_map(detections, truths, 3)
    monkeypatch.setattr(metrics, "COCO_ENGINES", (("no_such_engine", "no_such_engine"), *metrics.COCO_ENGINES[2:]))
    replaced = coco_map(detections, truths, 3)
    assert metrics._coco_engine()[0].__module__ == "pycocotools.coco"
    assert replaced.stats.tolist() == expected.stats.tolist()
    np.testing.assert_allclose(replaced.ap50, expected.ap50, rtol=1e-12)
    assert capfd.readouterr().out == ""
    monkeypatch.setattr(metrics, "COCO_ENGINES", (("no_such_engine", "no_such_engine"),))
    with pytest.raises(ImportError, match="pip install hotcoco"):
        coco_map(detections, truths, 3)


def test_a_large_set_is_scored_without_a_loop_over_detections():
    rng = np.random.default_rng(0)
    detections, truths = [], []
    for _ in range(500):
        corners = rng.uniform(0, 500, (7, 2))
        boxes = np.concatenate([corners, corners + rng.uniform(10, 150, (7, 2))], axis=1)
        labels = rng.integers(0, 80, 7)
        chosen = rng.integers(0, 7, 100)
        moved = torch.from_numpy((boxes[chosen] + rng.normal(0, 8, (100, 4))).astype(np.float32))
        scores = torch.from_numpy(rng.random(100).astype(np.float32))
        truths.append(Truth(boxes, labels, np.zeros(7, dtype=bool)))
        detections.append(Detections(moved, scores, torch.from_numpy(labels[chosen])))
    started_at = time.process_time()
    result = score(detections, truths, names={label: str(label) for label in range(80)})
    assert result.instances == 3500
    # About 0.3 CPU seconds; a loop over 50 000 detections takes several.
    assert time.process_time() - started_at < 3
