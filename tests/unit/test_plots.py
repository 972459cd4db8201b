"""Tests of accel_yolo.plots: pictures show what they should, and no input of a real run makes them fail."""

import sys
import warnings

import cv2
import numpy as np
import pytest

from accel_yolo import plots

NAMES = {0: "circle", 1: "square", 2: "triangle"}
COLUMNS = (
    *("epoch", "train/box_loss", "train/obj_loss", "train/cls_loss"),
    *("metrics/precision", "metrics/recall", "metrics/mAP_0.5", "metrics/mAP_0.5:0.95"),
    *("val/box_loss", "val/obj_loss", "val/cls_loss", "x/lr0", "x/lr1", "x/lr2"),
)


def read(path) -> np.ndarray:
    image = cv2.imread(str(path), cv2.IMREAD_COLOR_RGB)
    assert image is not None, f"{path} is no image"
    return image


def grey(height: int = 200, width: int = 300) -> np.ndarray:
    return np.full((height, width, 3), 114, dtype=np.uint8)


def write_results(path, rows) -> None:
    lines = [",".join(f"{name:>20}" for name in COLUMNS)] + [",".join(f"{cell:>20}" for cell in row) for row in rows]
    path.write_text("\n".join(lines) + "\n")


def test_a_box_is_drawn_in_the_colour_of_its_class_at_its_border():
    image = grey()
    drawn = plots.draw_boxes(image, np.array([[50.0, 60.0, 250.0, 180.0]]), np.array([1]), NAMES)
    assert tuple(drawn[120, 50]) == plots.class_color(1)
    assert tuple(drawn[180, 150]) == plots.class_color(1)
    assert (drawn[100:170, 60:240] == 114).all()
    assert (image == 114).all()


def test_the_best_box_is_on_top():
    boxes = np.array([[50.0, 60, 250, 180], [50.0, 60, 250, 180]])
    for scores, top in ((np.array([0.9, 0.2]), 0), (np.array([0.2, 0.9]), 1)):
        drawn = plots.draw_boxes(grey(), boxes, np.array([0, 1]), NAMES, scores=scores)
        assert tuple(drawn[120, 50]) == plots.class_color(top)


@pytest.mark.parametrize(
    "box",
    [
        [-1e9, -1e9, 1e9, 1e9],
        [np.nan, 0, 10, 10],
        [np.inf, 0, 10, 10],
        [10, 10, 10, 10],
        [50, 50, 20, 20],
        [290, 0, 300, 5],
    ],
)
def test_boxes_of_any_kind_are_drawn_or_left_out(box):
    drawn = plots.draw_boxes(grey(), np.array([box]), np.array([0]), NAMES, scores=np.array([0.5]))
    assert drawn.shape == (200, 300, 3)
    assert (drawn == 114).all() == (not np.isfinite(box).all())


def test_no_boxes_leave_the_image_as_it_is():
    empty = np.zeros((0, 4)), np.zeros(0, dtype=np.int64)
    assert (plots.draw_boxes(grey(), *empty, NAMES, scores=np.zeros(0)) == 114).all()


ODD_NAMES = ["ñandú", "日本語", "😀", "a" * 500, "", "a\nb\x1b[31m", "\ud800", "%s {0} $x$", "$\\frac{", "_hidden"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_names_of_any_kind_are_drawn_on_images(name):
    drawn = plots.draw_boxes(grey(), np.array([[20.0, 40, 90, 90]]), np.array([0]), {0: name}, scores=np.array([0.5]))
    assert not (drawn == 114).all()


def test_names_of_any_kind_are_drawn_on_charts(tmp_path):
    curves = np.tile(np.linspace(1, 0, 10), (len(ODD_NAMES), 1))
    matrix = np.eye(len(ODD_NAMES) + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(plots.plot_curve(tmp_path / "curve.png", curves[0], curves, ODD_NAMES, ylabel="F1"))
        read(plots.plot_confusion_matrix(tmp_path / "matrix.png", matrix, ODD_NAMES))


def test_a_label_without_a_name_shows_its_number():
    assert plots.class_name(NAMES, 7) == "7"
    assert plots.class_name(["a"], -1) == "-1"
    assert plots.class_name(["a"], 0) == "a"
    assert len(plots.class_name(["a" * 100], 0)) == 24


def test_colours_of_neighbouring_classes_are_far_apart():
    colors = np.array([plots.class_color(label) for label in range(80)], dtype=float)
    assert len(np.unique(colors, axis=0)) == 80
    assert (np.abs(colors[1:] - colors[:-1]).sum(axis=1) > 100).all()


def test_a_mosaic_shows_every_image_at_its_place():
    images = np.stack([np.full((400, 600, 3), 10 * index, dtype=np.uint8) for index in range(5)])
    boxes = [np.array([[60.0, 80, 540, 320]])] + [np.zeros((0, 4))] * 4
    labels = [np.array([2])] + [np.zeros(0, dtype=np.int64)] * 4
    mosaic = plots.batch_mosaic(images, boxes, labels, NAMES, max_side=900)
    # Three columns of 300 and two rows of 200: half size.
    assert mosaic.shape == (400, 900, 3)
    for index in range(5):
        assert (mosaic[index // 3 * 200 + 100, index % 3 * 300 + 150] == 10 * index).all()
    assert (mosaic[300, 750] == 114).all()
    assert tuple(mosaic[100, 30]) == plots.class_color(2)


def test_a_mosaic_is_limited_in_images_and_size():
    images = np.zeros((20, 64, 64, 3), dtype=np.uint8)
    nothing = [np.zeros((0, 4))] * 20, [np.zeros(0, dtype=np.int64)] * 20
    scores, captions = [np.zeros(0)] * 20, ["image.jpg"] * 20
    mosaic = plots.batch_mosaic(images, *nothing, NAMES, scores=scores, captions=captions, max_images=4)
    # Small images are shown larger, so that their captions can be read.
    assert mosaic.shape == (640, 640, 3)
    assert plots.batch_mosaic(images, *nothing, NAMES, max_side=100).shape == (100, 100, 3)
    assert plots.batch_mosaic(images[:0], [], [], NAMES).shape[2] == 3


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_an_image_comes_back_with_its_colours_and_leaves_nothing_else(tmp_path, suffix):
    image = grey()
    image[:, :150] = (250, 20, 40)
    path = plots.save_image(tmp_path / "new" / f"x{suffix}", image)
    assert np.abs(read(path)[100, 50].astype(int) - (250, 20, 40)).max() < 12
    assert [entry.name for entry in path.parent.iterdir()] == [f"x{suffix}"]


def test_a_failed_write_leaves_the_old_picture(tmp_path, monkeypatch):
    path = plots.save_image(tmp_path / "x.png", grey())

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(type(path), "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        plots.save_image(path, grey(10, 10))
    assert read(path).shape == (200, 300, 3)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("num_boxes", "num_classes"), [(0, 0), (1, 1), (3000, 3), (500, 300)])
def test_labels_are_plotted_for_few_and_many(tmp_path, num_boxes, num_classes):
    rng = np.random.default_rng(0)
    boxes = rng.random((num_boxes, 4))
    labels = rng.integers(0, max(num_classes, 1), num_boxes)
    names = [f"class {index}" for index in range(num_classes)]
    assert read(plots.plot_labels(tmp_path / "labels.jpg", boxes, labels, names)).shape[0] > 800
    if num_boxes in (0, 3000):
        assert read(plots.plot_labels_correlogram(tmp_path / "labels_correlogram.jpg", boxes)).shape[0] > 800


def test_boxes_that_are_not_finite_are_left_out_of_the_label_plots(tmp_path):
    boxes = np.array([[0.5, 0.5, np.nan, 0.1], [0.5, 0.5, 0.2, 0.1]])
    with_nan = plots.plot_labels(tmp_path / "a.png", boxes, np.array([1, 0]), NAMES)
    without = plots.plot_labels(tmp_path / "b.png", boxes[1:], np.array([0]), NAMES)
    assert (read(with_nan) == read(without)).all()


@pytest.mark.parametrize("num_classes", [0, 1, 5, 80])
def test_curves_are_plotted_for_any_number_of_classes(tmp_path, num_classes):
    confidences = np.linspace(0, 1, 1000)
    curves = np.tile(1 - confidences, (num_classes, 1))
    curves[num_classes // 2 :] = np.nan
    names = ["_hidden"] * num_classes
    average_precisions = np.full(num_classes, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(plots.plot_curve(tmp_path / "F1_curve.png", confidences, curves, names, ylabel="F1"))
        read(
            plots.plot_pr_curve(
                tmp_path / "PR_curve.png", confidences, curves, names, average_precisions=average_precisions
            )
        )


def test_the_line_of_all_classes_may_be_given(tmp_path):
    samples = np.linspace(0, 1, 100)
    own = plots.plot_curve(tmp_path / "own.png", samples, samples[None], ["a"], ylabel="F1")
    same = plots.plot_curve(tmp_path / "same.png", samples, samples[None], ["a"], ylabel="F1", mean=samples)
    other = plots.plot_curve(tmp_path / "other.png", samples, samples[None], ["a"], ylabel="F1", mean=1 - samples)
    assert (read(own) == read(same)).all()
    assert (read(own) != read(other)).any()


def test_a_confusion_matrix_is_dark_where_objects_are(tmp_path):
    # Predicted is the row: the true class 1 (column 1) was found as class 0 (row 0), above the diagonal.
    matrix = np.zeros((3, 3))
    matrix[0, 1] = 5
    image = read(plots.plot_confusion_matrix(tmp_path / "confusion_matrix.png", matrix, ["a", "b"])).astype(int)
    is_dark = (image[..., 2] - image[..., 0] > 50) & (image[..., 0] < 40)
    # The colour bar, at the right, is dark too.
    rows, columns = np.nonzero(is_dark[:, : int(image.shape[1] * 0.85)])
    assert rows.mean() < image.shape[0] * 0.35
    assert 0.4 < columns.mean() / (image.shape[1] * 0.85) < 0.7


@pytest.mark.parametrize("num_classes", [0, 1, 80])
def test_a_confusion_matrix_may_be_empty_or_large(tmp_path, num_classes):
    matrix = np.full((num_classes + 1, num_classes + 1), np.nan)
    names = [f"class {index}" for index in range(num_classes)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(plots.plot_confusion_matrix(tmp_path / "a.png", matrix, names))


@pytest.mark.parametrize("num_epochs", [1, 60])
def test_results_are_plotted_for_any_number_of_epochs(tmp_path, num_epochs):
    write_results(
        tmp_path / "results.csv", [[epoch, *(0.1 * epoch for _ in COLUMNS[1:])] for epoch in range(num_epochs)]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(plots.plot_results(tmp_path / "results.csv", tmp_path / "results.png"))


@pytest.mark.parametrize(("column", "place"), [(1, (0.25, 0.1)), (7, (0.75, 0.9))])
def test_padded_names_are_found_and_each_column_has_its_panel(tmp_path, column, place):
    quiet = [[epoch, *(["0"] * 13)] for epoch in range(6)]
    rising = [[*row[:column], row[0] / 100, *row[column + 1 :]] for row in quiet]
    pictures = []
    for rows in (quiet, rising):
        write_results(tmp_path / "results.csv", rows)
        pictures.append(read(plots.plot_results(tmp_path / "results.csv", tmp_path / "results.png")))
    rows, columns = np.nonzero((pictures[0] != pictures[1]).any(axis=2))
    height, width = pictures[0].shape[:2]
    assert np.allclose((np.median(rows) / height, np.median(columns) / width), place, atol=0.15)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "epoch\n0\n1\n",
        "epoch,metrics/precision,time/epoch\n0,,\n1,0.5\n2,nan,3\n3,inf,1,2,3\n",
        "epoch,train/box_loss\n0,words\n,0.5\n\n2,0.25\n",
    ],
)
def test_results_with_gaps_are_plotted(tmp_path, text):
    (tmp_path / "results.csv").write_text(text)
    read(plots.plot_results(tmp_path / "results.csv", tmp_path / "results.png"))


def test_charts_never_touch_pyplot(tmp_path, monkeypatch):
    # Another test of the same process may have imported it.
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    plots.plot_curve(tmp_path / "x.png", np.linspace(0, 1, 10), np.zeros((1, 10)), ["a"], ylabel="F1")
    assert "matplotlib.pyplot" not in sys.modules
