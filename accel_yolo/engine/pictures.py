"""The pictures of a run folder; a picture that cannot be drawn costs one warning and never the run."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from accel_yolo import plots
from accel_yolo.boxes import cxcywh_to_xyxy, non_max_suppression
from accel_yolo.config.schema import EvalConfig
from accel_yolo.data.table import FlatTable
from accel_yolo.metrics import EvalResult
from accel_yolo.model.detector import DetectionModel
from accel_yolo.structures import Batch

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

BATCHES_DRAWN = 3
# Weaker detections would cover the picture.
DRAWN_CONFIDENCE = 0.25


class RunPictures:
    """Draws into a run folder, under the names that YOLOv5 users know.

    Args:
        folder: the run folder.
        names: class names by label.
        enabled: False draws nothing: `--noplots`, or not the main process.
    """

    def __init__(self, folder: Path, *, names: Mapping[int, str], enabled: bool) -> None:
        self.folder, self.names, self.enabled = folder, names, enabled

    def labels(self, table: FlatTable) -> None:
        """labels.jpg and labels_correlogram.jpg, of the training split."""
        if not self.enabled:
            return
        with self._attempt("labels.jpg"):
            kept = ~table.ignore
            rows = np.repeat(np.arange(len(table)), np.diff(table.offsets))[kept]
            scale = table.sizes_hw[rows][:, [1, 0, 1, 0]]
            boxes = table.boxes[kept] / scale
            centred = np.concatenate([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], axis=1)
            plots.plot_labels(self.folder / "labels.jpg", centred, table.labels[kept], self.names)
            plots.plot_labels_correlogram(self.folder / "labels_correlogram.jpg", centred)

    def first_batches(self, batches: Any, *, wanted: bool) -> Any:
        """`batches`, with the first three drawn as train_batch0..2.jpg on their way."""
        return _Drawn(batches, self) if self.enabled and wanted else batches

    def batch(self, name: str, batch: Batch) -> None:
        """One batch with its true boxes."""
        with self._attempt(name):
            height, width = batch.images.shape[1:3]
            scale = torch.tensor([width, height, width, height])
            boxes = (cxcywh_to_xyxy(batch.targets.boxes) * scale).numpy()
            index, labels = batch.targets.image_index.numpy(), batch.targets.labels.numpy()
            images = range(len(batch))
            picture = plots.batch_mosaic(
                batch.images.cpu().numpy(),
                [boxes[index == image] for image in images],
                [labels[index == image] for image in images],
                self.names,
            )
            plots.save_image(self.folder / name, picture)

    def validation(self, result: EvalResult, results_csv: Path) -> None:
        """Curves, confusion matrix and, where there is a table of epochs, results.png."""
        folder, curves = self.folder, result.curves
        if curves is not None and len(curves.labels):
            names = [self.names[int(label)] for label in curves.labels]
            average = np.array([result.per_class[int(label)].yolo_ap50 for label in curves.labels])
            with self._attempt("the curves"):
                for letter, values, title in (
                    ("P", curves.precision, "precision"),
                    ("R", curves.recall, "recall"),
                    ("F1", curves.f1, "F1"),
                ):
                    plots.plot_curve(folder / f"{letter}_curve.png", curves.confidences, values, names, ylabel=title)
                plots.plot_pr_curve(
                    folder / "PR_curve.png",
                    curves.recalls,
                    curves.precision_at_recall,
                    names,
                    average_precisions=average,
                )
        if curves is not None:
            with self._attempt("confusion_matrix.png"):
                plots.plot_confusion_matrix(folder / "confusion_matrix.png", curves.confusion, self.names)
        if results_csv.exists():
            with self._attempt("results.png"):
                plots.plot_results(results_csv, folder / "results.png")

    def val_batches(
        self, model: DetectionModel, loader: Iterable[Batch], accelerator: Accelerator, config: EvalConfig
    ) -> None:
        """val_batch0..2_labels.jpg and _pred.jpg, of this process's part of the first batches."""
        if not self.enabled:
            return
        for number, batch in enumerate(itertools.islice(loader, BATCHES_DRAWN)):
            self.batch(f"val_batch{number}_labels.jpg", batch)
            with self._attempt(f"val_batch{number}_pred.jpg"), torch.inference_mode(), accelerator.autocast():
                found = non_max_suppression(
                    model(batch.to(accelerator.device).floats())[0],
                    conf_thres=max(DRAWN_CONFIDENCE, config.conf_thres),
                    iou_thres=config.iou_thres,
                    max_det=config.max_det,
                )
                picture = plots.batch_mosaic(
                    batch.images.numpy(),
                    [item.boxes.cpu().numpy() for item in found],
                    [item.labels.cpu().numpy() for item in found],
                    self.names,
                    scores=[item.scores.cpu().numpy() for item in found],
                )
                plots.save_image(self.folder / f"val_batch{number}_pred.jpg", picture)

    @contextlib.contextmanager
    def _attempt(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Whatever a drawing library raises, the run is worth more than its picture.
            logger.warning("%s could not be drawn: %s: %s", what, type(error).__name__, error)


class _Drawn:
    """An iterable that draws the first batches which pass through it; everything else is the inner one's."""

    def __init__(self, inner: Any, pictures: RunPictures) -> None:
        self._inner, self._pictures = inner, pictures

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self._inner):
            if number < BATCHES_DRAWN:
                self._pictures.batch(f"train_batch{number}.jpg", batch)
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
