"""The pictures of a run: boxes on images, curves, matrices and histograms, as files.

cv2 draws on images, matplotlib draws charts (its object interface, never pyplot: no global state, no window).

Legend: H W pixels, N objects in one image, K classes, S samples of a curve.
"""

from __future__ import annotations

import colorsys
import csv
import io
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# By label, or one for each class in label order.
Names = Mapping[int, str] | Sequence[str]

_GREY = 114
_MIN_CELL = 320
_MAX_LEGEND_CLASSES = 16
_MAX_OVERLAID_BOXES = 1000
_INK = "#1f3b57"
_ACCENT = "#c8452f"
# Panels of results.png: title, column of results.csv.
_RESULT_PANELS = (
    ("train box loss", "train/box_loss"),
    ("train objectness loss", "train/obj_loss"),
    ("train class loss", "train/cls_loss"),
    ("precision", "metrics/precision"),
    ("recall", "metrics/recall"),
    ("val box loss", "val/box_loss"),
    ("val objectness loss", "val/obj_loss"),
    ("val class loss", "val/cls_loss"),
    ("mAP 0.5", "metrics/mAP_0.5"),
    ("mAP 0.5:0.95", "metrics/mAP_0.5:0.95"),
)


def draw_boxes(
    image: np.ndarray, boxes: np.ndarray, labels: np.ndarray, names: Names, *, scores: np.ndarray | None = None
) -> np.ndarray:
    """A copy of an image with its boxes, each with its class name and score.

    Args:
        image: (H, W, 3) uint8, RGB.
        boxes: (N, 4) xyxy, px of `image`; what lies outside is clipped, a box that is not finite is left out.
        labels: (N,) integers.
        names: class names.
        scores: (N,) in [0, 1], or None for true boxes.

    Returns:
        (H, W, 3) uint8, RGB.
    """
    canvas = np.ascontiguousarray(image).copy()
    boxes = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    height, width = canvas.shape[:2]
    thickness = max(1, round((height + width) / 700))
    # The best one is drawn last, on top.
    order = np.arange(len(boxes)) if scores is None else np.argsort(np.asarray(scores), kind="stable")
    for index in order:
        if not np.isfinite(boxes[index]).all():
            continue
        left, top, right, bottom = np.clip(boxes[index], 0, [width - 1, height - 1] * 2).round().astype(int).tolist()
        color = class_color(int(labels[index]))
        cv2.rectangle(canvas, (left, top), (right, bottom), color, thickness)
        text = class_name(names, int(labels[index]))
        if scores is not None:
            text += f" {float(scores[index]):.2f}"
        _draw_label(canvas, text, left, top, color=color)
    return canvas


def batch_mosaic(
    images: np.ndarray,
    boxes: Sequence[np.ndarray],
    labels: Sequence[np.ndarray],
    names: Names,
    *,
    scores: Sequence[np.ndarray] | None = None,
    captions: Sequence[str] | None = None,
    max_images: int = 16,
    max_side: int = 1920,
) -> np.ndarray:
    """The images of one batch side by side, with their boxes.

    Args:
        images: (B, H, W, 3) uint8, RGB; the first `max_images` are shown.
        boxes: per image (N, 4) xyxy, px of that image.
        labels: per image (N,) integers.
        names: class names.
        scores: per image (N,), or None for true boxes.
        captions: per image a line of text, such as its file name.
        max_images: at most so many images.
        max_side: the picture is made smaller until neither side is longer, px.

    Returns:
        (H', W', 3) uint8, RGB; one grey cell when there is no image.
    """
    count = min(len(images), max_images)
    columns = max(1, math.ceil(math.sqrt(count)))
    rows = max(1, math.ceil(count / columns))
    height, width = images.shape[1:3]
    # Letters need room: small images are shown larger than they are.
    scale = min(max(1.0, _MIN_CELL / max(height, width)), max_side / max(rows * height, columns * width))
    interpolation = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    cell_height, cell_width = max(1, int(height * scale)), max(1, int(width * scale))
    canvas = np.full((rows * cell_height, columns * cell_width, 3), _GREY, dtype=np.uint8)
    ratio = np.array([cell_width / width, cell_height / height] * 2)
    for index in range(count):
        # Boxes are drawn after the resize: lines and letters stay sharp.
        cell = cv2.resize(images[index], (cell_width, cell_height), interpolation=interpolation)
        scaled = np.asarray(boxes[index], dtype=np.float64).reshape(-1, 4) * ratio
        cell = draw_boxes(cell, scaled, labels[index], names, scores=None if scores is None else scores[index])
        if captions is not None:
            _draw_text(cell, captions[index], 4, 4, scale=_font_scale(cell), color=(255, 255, 255), ground=(40, 40, 40))
        cv2.rectangle(cell, (0, 0), (cell_width - 1, cell_height - 1), (255, 255, 255), 1)
        top, left = index // columns * cell_height, index % columns * cell_width
        canvas[top : top + cell_height, left : left + cell_width] = cell
    return canvas


def save_image(path: str | Path, image: np.ndarray) -> Path:
    """Writes (H, W, 3) uint8 RGB as the kind of file that the suffix says; a reader never sees half a file."""
    path = Path(path)
    is_encoded, encoded = cv2.imencode(path.suffix, cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
    if not is_encoded:
        raise ValueError(f"cannot encode an image as {path.suffix!r}")
    return _write_atomically(path, encoded.tobytes())


def plot_labels(path: str | Path, boxes_cxcywh: np.ndarray, labels: np.ndarray, names: Names) -> Path:
    """labels.jpg: objects per class, all boxes laid over each other, and where and how large they are.

    Args:
        path: the picture, JPEG or PNG.
        boxes_cxcywh: (N, 4) in [0, 1] of their image.
        labels: (N,) integers.
        names: class names; classes without an object are shown too.
    """
    boxes, labels = _finite_boxes(boxes_cxcywh, labels)
    figure = _new_figure(11, 10)
    axes = figure.subplots(2, 2)
    _class_histogram(axes[0, 0], labels, names)
    _box_overlay(axes[0, 1], boxes, labels)
    for axis, first, second in ((axes[1, 0], 0, 1), (axes[1, 1], 2, 3)):
        _density(axis, boxes[:, first], boxes[:, second])
        axis.set_xlabel(_BOX_QUANTITIES[first])
        axis.set_ylabel(_BOX_QUANTITIES[second])
        # Only the grid of positions is an image, whose rows count downwards.
        if second == 1:
            axis.invert_yaxis()
    axes[1, 0].set_title("where objects are")
    axes[1, 1].set_title("how large objects are")
    return _save_figure(path, figure)


_BOX_QUANTITIES = ("centre x", "centre y", "width", "height")


def plot_labels_correlogram(path: str | Path, boxes_cxcywh: np.ndarray) -> Path:
    """labels_correlogram.jpg: each of x, y, width and height against each other. Arguments as in `plot_labels`."""
    boxes, _ = _finite_boxes(boxes_cxcywh, None)
    figure = _new_figure(10, 10)
    axes = figure.subplots(4, 4)
    for row in range(4):
        for column in range(4):
            axis = axes[row, column]
            if column > row:
                axis.set_axis_off()
                continue
            if column == row:
                axis.hist(boxes[:, row], bins=50, range=(0, 1), color=_INK)
                axis.set_xlim(0, 1)
                axis.set_yticks([])
            else:
                _density(axis, boxes[:, column], boxes[:, row])
            if row == 3:
                axis.set_xlabel(_BOX_QUANTITIES[column])
            if column == 0:
                axis.set_ylabel(_BOX_QUANTITIES[row])
    figure.suptitle(f"{len(boxes)} boxes, in parts of their image")
    return _save_figure(path, figure)


def plot_curve(
    path: str | Path,
    confidences: np.ndarray,
    curves: np.ndarray,
    names: Names,
    *,
    ylabel: str,
    title: str | None = None,
    mean: np.ndarray | None = None,
) -> Path:
    """P_curve.png, R_curve.png, F1_curve.png: a quantity of every class over the confidence threshold.

    Args:
        path: the picture.
        confidences: (S,) in [0, 1].
        curves: (K, S) in [0, 1]; NaN where there is no value.
        names: of the K rows, by row number.
        ylabel: what the curves are.
        title: None for "<ylabel> over confidence".
        mean: (S,) the line of all classes; None for the mean of `curves`.
    """
    curves = _rows(curves, confidences)
    mean = _mean(curves) if mean is None else np.asarray(mean, dtype=np.float64)
    caption = "all classes"
    if np.isfinite(mean).any():
        best = int(np.nanargmax(mean))
        caption += f" {mean[best]:.2f} at {confidences[best]:.3f}"
    figure, axis = _unit_axes("confidence", ylabel, title or f"{ylabel} over confidence")
    _class_lines(axis, confidences, curves, [class_name(names, row) for row in range(len(curves))])
    axis.plot(confidences, mean, color=_INK, linewidth=3, label=caption)
    _legend(axis)
    return _save_figure(path, figure)


def plot_pr_curve(
    path: str | Path, recalls: np.ndarray, precisions: np.ndarray, names: Names, *, average_precisions: np.ndarray
) -> Path:
    """PR_curve.png: precision over recall of every class, at an IoU of 0.5.

    Args:
        path: the picture.
        recalls: (S,) in [0, 1].
        precisions: (K, S) in [0, 1].
        names: of the K rows, by row number.
        average_precisions: (K,) in [0, 1], shown in the legend.
    """
    curves = _rows(precisions, recalls)
    values = np.asarray(average_precisions, dtype=np.float64).reshape(-1)
    figure, axis = _unit_axes("recall", "precision", "precision over recall, IoU 0.5")
    labels = [f"{class_name(names, row)} {values[row]:.3f}" for row in range(len(curves))]
    _class_lines(axis, recalls, curves, labels)
    caption = f"all classes {_mean(values[:, None])[0]:.3f} mAP@0.5"
    axis.plot(recalls, _mean(curves), color=_INK, linewidth=3, label=caption)
    _legend(axis)
    return _save_figure(path, figure)


def plot_confusion_matrix(path: str | Path, matrix: np.ndarray, names: Names) -> Path:
    """confusion_matrix.png: of the objects of a true class (column), which part was found as what (row).

    Args:
        path: the picture.
        matrix: (K + 1, K + 1) counts, rows predicted, columns true, background last.
        names: K class names.
    """
    counts = np.nan_to_num(np.asarray(matrix, dtype=np.float64))
    parts = counts / np.maximum(counts.sum(axis=0, keepdims=True), 1e-9)
    size = len(parts)
    side = min(6 + 0.11 * size, 40)
    figure = _new_figure(side + 1, side)
    axis = figure.subplots()
    # Below half a percent a cell stays white: the eye finds what matters.
    shown = np.where(parts < 0.005, np.nan, parts)
    picture = axis.imshow(shown, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(picture, ax=axis, fraction=0.03, pad=0.02, shrink=0.8, label="part of the true class")
    # About half a cell, in points.
    font_size = float(np.clip(0.55 * 72 * side / size, 3, 10))
    if size <= 31:
        for row, column in np.argwhere(np.isfinite(shown)):
            color = "white" if shown[row, column] > 0.55 else "black"
            text = f"{shown[row, column]:.2f}"
            axis.text(column, row, text, ha="center", va="center", fontsize=font_size * 0.9, color=color)
    ticks = [_chart_text(class_name(names, label)) for label in range(size - 1)] + ["background"]
    axis.set_xticks(range(size), ticks, rotation=90, fontsize=font_size)
    axis.set_yticks(range(size), ticks, fontsize=font_size)
    axis.tick_params(length=0)
    axis.set_xticks(np.arange(size + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(size + 1) - 0.5, minor=True)
    axis.grid(which="minor", color="#e4e8ec", linewidth=0.5)
    axis.tick_params(which="minor", length=0)
    axis.set_xlabel("true")
    axis.set_ylabel("predicted")
    axis.set_title("confusion matrix")
    return _save_figure(path, figure)


def plot_results(csv_path: str | Path, png_path: str | Path) -> Path:
    """results.png: losses and metrics of a run over its epochs.

    Args:
        csv_path: the run's results.csv, ours or YOLOv5's; names may be padded, cells empty, columns missing.
        png_path: the picture.
    """
    columns = _read_columns(Path(csv_path))
    figure = _new_figure(16, 7)
    axes = figure.subplots(2, 5)
    for axis, (title, column) in zip(axes.flat, _RESULT_PANELS, strict=True):
        if "epoch" in columns and column in columns:
            _epoch_panel(axis, columns["epoch"], columns[column])
        else:
            _epoch_panel(axis, np.empty(0), np.empty(0))
        axis.set_title(title)
    for axis in axes[1]:
        axis.set_xlabel("epoch")
    if axes[0, 0].lines:
        axes[0, 0].legend(frameon=False)
    return _save_figure(png_path, figure)


def class_color(label: int) -> tuple[int, int, int]:
    """RGB in [0, 255] of a class: the same in every picture, neighbours far apart."""
    # Steps of the golden ratio never come near an earlier hue soon.
    hue = (0.58 + label * 0.61803398875) % 1
    saturation, value = ((0.85, 0.95), (0.65, 0.8), (0.95, 0.7))[label % 3]
    red, green, blue = colorsys.hsv_to_rgb(hue, saturation, value)
    return round(red * 255), round(green * 255), round(blue * 255)


def class_name(names: Names, label: int) -> str:
    """The name of a class, or its number when it has none; long ones are cut, what cannot be printed becomes `?`."""
    has_name = label in names if isinstance(names, Mapping) else 0 <= label < len(names)
    text = str(names[label]) if has_name else str(label)
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= 24 else text[:22] + ".."


def _font_scale(image: np.ndarray) -> float:
    return float(np.clip(min(image.shape[:2]) / 1200, 0.36, 1.5))


def _draw_label(canvas: np.ndarray, text: str, left: int, top: int, *, color: tuple[int, int, int]) -> None:
    luminance = (0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]) / 255
    ink = (0, 0, 0) if luminance > 0.55 else (255, 255, 255)
    scale = _font_scale(canvas)
    _, height = _text_size(text, scale)
    # Above the box, or inside it at the upper border.
    _draw_text(canvas, text, left, top - height if top >= height else top, scale=scale, color=ink, ground=color)


def _draw_text(
    canvas: np.ndarray,
    text: str,
    left: int,
    top: int,
    *,
    scale: float,
    color: tuple[int, int, int],
    ground: tuple[int, int, int],
) -> None:
    text = _ascii(text)
    width, height = _text_size(text, scale)
    left = max(0, min(left, canvas.shape[1] - width))
    cv2.rectangle(canvas, (left, top), (left + width, top + height), ground, cv2.FILLED)
    base = (left + 2, top + round(height * 0.72))
    cv2.putText(canvas, text, base, cv2.FONT_HERSHEY_SIMPLEX, scale, color, _text_thickness(scale), cv2.LINE_AA)


def _text_size(text: str, scale: float) -> tuple[int, int]:
    """(width, height) px of the text's ground."""
    (width, height), baseline = cv2.getTextSize(_ascii(text), cv2.FONT_HERSHEY_SIMPLEX, scale, _text_thickness(scale))
    return width + 4, height + baseline + 2


def _text_thickness(scale: float) -> int:
    return max(1, round(scale * 1.6))


def _ascii(text: str) -> str:
    # The vector fonts of cv2 know nothing else.
    return "".join(character if " " <= character <= "~" else "?" for character in text)


def _write_atomically(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _new_figure(width: float, height: float) -> Figure:
    """A figure without a window, inches."""
    # matplotlib costs 0.3 s of start-up and is wanted only when a chart is.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save_figure(path: str | Path, figure: Figure) -> Path:
    path = Path(path)
    stream = io.BytesIO()
    with warnings.catch_warnings():
        # A letter that the font lacks is shown as a box; a warning for each would drown the log.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*")
        figure.savefig(stream, format=path.suffix.lstrip("."), dpi=130)
    return _write_atomically(path, stream.getvalue())


def _chart_text(text: str) -> str:
    # Between two dollar signs matplotlib reads formulas, and a legend drops what begins with an underscore.
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _finite_boxes(boxes: np.ndarray, labels: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    boxes = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
    labels = np.zeros(len(boxes), dtype=np.int64) if labels is None else np.asarray(labels).reshape(-1)
    is_finite = np.isfinite(boxes).all(axis=1)
    return boxes[is_finite], labels[is_finite].astype(np.int64)


def _class_histogram(axis: Axes, labels: np.ndarray, names: Names) -> None:
    num_classes = max(len(names), int(labels.max(initial=-1)) + 1, 1)
    counts = np.bincount(labels, minlength=num_classes)
    colors = [tuple(channel / 255 for channel in class_color(label)) for label in range(num_classes)]
    axis.bar(range(num_classes), counts, color=colors, width=0.85)
    axis.set_ylabel("objects")
    axis.set_title(f"{len(labels)} objects of {num_classes} class{'es' if num_classes != 1 else ''}")
    if num_classes <= 100:
        ticks = [_chart_text(class_name(names, label)) for label in range(num_classes)]
        axis.set_xticks(range(num_classes), ticks, rotation=90, fontsize=float(np.clip(300 / num_classes, 4, 9)))
    else:
        axis.set_xlabel("class")
    axis.set_xlim(-0.6, num_classes - 0.4)
    axis.set_ylim(0, max(1.0, counts.max() * 1.05))


def _box_overlay(axis: Axes, boxes: np.ndarray, labels: np.ndarray) -> None:
    from matplotlib.collections import LineCollection

    # Evenly through the data set, so that every part of it is seen.
    chosen = np.linspace(0, len(boxes) - 1, min(len(boxes), _MAX_OVERLAID_BOXES)).astype(int)
    half_width, half_height = boxes[chosen, 2] / 2, boxes[chosen, 3] / 2
    corners = [(-1, -1), (1, -1), (1, 1), (-1, 1), (-1, -1)]
    outlines = np.stack([np.stack([x * half_width, y * half_height], axis=1) for x, y in corners], axis=1)
    colors = [tuple(channel / 255 for channel in class_color(int(label))) for label in labels[chosen]]
    axis.add_collection(LineCollection(list(outlines), colors=colors, linewidths=0.6, alpha=0.5))
    axis.set_xlim(-0.52, 0.52)
    axis.set_ylim(0.52, -0.52)
    axis.set_aspect("equal")
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_title(f"{len(chosen)} boxes, centred" if len(chosen) else "no boxes")


def _density(axis: Axes, first: np.ndarray, second: np.ndarray) -> None:
    from matplotlib.colors import LogNorm

    counts, _, _ = np.histogram2d(first, second, bins=50, range=((0, 1), (0, 1)))
    shown = np.where(counts > 0, counts, np.nan).T
    # Logarithmic: one crowded corner does not make the rest invisible.
    norm = LogNorm(vmin=0.5, vmax=max(2.0, counts.max()))
    axis.pcolormesh(np.linspace(0, 1, 51), np.linspace(0, 1, 51), shown, cmap="Blues", norm=norm)
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1)


def _unit_axes(xlabel: str, ylabel: str, title: str) -> tuple[Figure, Axes]:
    figure = _new_figure(10, 6)
    axis = figure.subplots()
    axis.set_xlim(0, 1)
    axis.set_ylim(0, 1.02)
    axis.set_xlabel(_chart_text(xlabel))
    axis.set_ylabel(_chart_text(ylabel))
    axis.set_title(_chart_text(title))
    axis.grid(color="#e4e8ec")
    axis.set_axisbelow(True)
    return figure, axis


def _rows(curves: np.ndarray, samples: np.ndarray) -> np.ndarray:
    return np.asarray(curves, dtype=np.float64).reshape(-1, len(samples))


def _mean(curves: np.ndarray) -> np.ndarray:
    """Mean over rows without NaN; NaN where there is no value at all."""
    is_finite = np.isfinite(curves)
    counts = is_finite.sum(axis=0)
    sums = np.where(is_finite, curves, 0).sum(axis=0)
    return np.divide(sums, counts, out=np.full(curves.shape[1], np.nan), where=counts > 0)


def _class_lines(axis: Axes, samples: np.ndarray, curves: np.ndarray, labels: list[str]) -> None:
    is_listed = len(curves) <= _MAX_LEGEND_CLASSES
    for row, curve in enumerate(curves):
        color = tuple(channel / 255 for channel in class_color(row)) if is_listed else "#9fb0c0"
        label = _chart_text(labels[row]) if is_listed else None
        axis.plot(samples, curve, color=color, linewidth=1.2 if is_listed else 0.6, label=label)


def _legend(axis: Axes) -> None:
    axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, frameon=False)


def _read_columns(path: Path) -> dict[str, np.ndarray]:
    """Columns of results.csv by stripped name; NaN where a cell is empty, missing or no number."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
    header, body = (rows[0], [row for row in rows[1:] if any(row)]) if rows else ([], [])
    return {
        name: np.array([_number(row[column]) if column < len(row) else math.nan for row in body])
        for column, name in enumerate(header)
    }


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _epoch_panel(axis: Axes, epochs: np.ndarray, values: np.ndarray) -> None:
    from matplotlib.ticker import MaxNLocator

    is_known = np.isfinite(values) & np.isfinite(epochs)
    axis.grid(color="#e4e8ec")
    axis.set_axisbelow(True)
    if not is_known.any():
        axis.text(0.5, 0.5, "no values", ha="center", va="center", transform=axis.transAxes, color="#7a8794")
        axis.set_xticks([])
        axis.set_yticks([])
        return
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    epochs, values = epochs[is_known], values[is_known]
    if len(values) == 1:
        # Around a single point matplotlib would zoom in to hundredths of an epoch.
        axis.set_xlim(epochs[0] - 1, epochs[0] + 1)
    marker = "o" if len(values) <= 40 else None
    axis.plot(epochs, values, color=_INK, linewidth=1.4, marker=marker, markersize=4, alpha=0.6, label="value")
    if len(values) >= 5:
        axis.plot(epochs, _smoothed(values), color=_ACCENT, linewidth=1.8, label="smoothed")


def _smoothed(values: np.ndarray) -> np.ndarray:
    """A running mean over a tenth of the run, with ends repeated."""
    half = max(1, len(values) // 20)
    padded = np.pad(values, half, mode="edge")
    return np.convolve(padded, np.ones(2 * half + 1) / (2 * half + 1), mode="valid")
