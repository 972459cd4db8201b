"""One validation pass over a table that all processes share; every process gets the same result.

Legend: N images of the table, M detections of this process, L detection levels, K classes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from accel_yolo.boxes import non_max_suppression
from accel_yolo.config.schema import EvalConfig
from accel_yolo.data.table import FlatTable
from accel_yolo.engine.checkpoint import merge_statistics
from accel_yolo.engine.distributed import gather_payloads, on_main_process
from accel_yolo.metrics import EvalResult, Truth, score
from accel_yolo.model.detector import DetectionModel
from accel_yolo.model.loss import DetectionLoss
from accel_yolo.structures import Batch, Detections

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(slots=True)
class _Share:
    """What one process found: everything that travels, in the one exchange of a validation.

    Args:
        rows: rows of the table, in the order of the process's loader.
        lengths: number of detections of each.
        boxes: (M, 4) float32 xyxy px of the original images.
        scores: (M,) float32.
        labels: (M,) int64.
        losses: global batch -> (loss sums (L, 3), counts (L, 2)) of this process's part of it.
    """

    rows: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    boxes: Any = field(default_factory=list)
    scores: Any = field(default_factory=list)
    labels: Any = field(default_factory=list)
    losses: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def add(self, row: int, found: Detections) -> None:
        self.rows.append(row)
        self.lengths.append(len(found))
        self.boxes.append(found.boxes.cpu().numpy())
        self.scores.append(found.scores.cpu().numpy())
        self.labels.append(found.labels.cpu().numpy())

    def packed(self) -> _Share:
        """The same with one array instead of one per image: a tenth of the time to send."""
        return _Share(
            self.rows,
            self.lengths,
            np.concatenate([np.zeros((0, 4), np.float32), *self.boxes]),
            np.concatenate([np.zeros(0, np.float32), *self.scores]),
            np.concatenate([np.zeros(0, np.int64), *self.labels]),
            self.losses,
        )


def evaluate(
    model: DetectionModel,
    loader: Iterable[Batch],
    *,
    table: FlatTable,
    names: Mapping[int, str],
    config: EvalConfig,
    accelerator: Accelerator,
    global_batch_size: int,
    loss_fn: DetectionLoss | None = None,
    augment: bool = False,
    single_cls: bool = False,
    with_curves: bool = False,
) -> EvalResult:
    """Measure `model` on all images of `table`; every process must call this.

    There is no collective inside the loop: processes may have different numbers of batches, or none.

    Args:
        model: in eval mode and not wrapped (a wrapped forward would wait for the other processes).
        loader: this process's part of every global batch (`data.dataset.val_loader`).
        names: class names by label.
        global_batch_size: of the loader's sampler; losses are means over global batches.
        loss_fn: None leaves the losses out; so does `augment`.
        augment: test-time augmentation.
        single_cls: suppress boxes across classes, and count all as class 0.
        with_curves: also what pictures of curves and confusions need.

    Returns:
        The same on every process, whatever their number.
    """
    share = _Share()
    with torch.inference_mode():
        for batch in loader:
            _add_batch(
                share,
                batch.to(accelerator.device, non_blocking=True),
                model,
                config=config,
                accelerator=accelerator,
                global_batch_size=global_batch_size,
                loss_fn=None if augment else loss_fn,
                augment=augment,
                single_cls=single_cls,
            )
    shares = gather_payloads(accelerator, share.packed())

    def result() -> EvalResult:
        losses = _mean_losses(shares, loss_fn) if loss_fn is not None and not augment else {}
        found, truths = _by_row(shares, len(table)), _truths(table)
        return score(found, truths, names=names, losses=losses, with_curves=with_curves)

    return on_main_process(accelerator, result)


def merged_copy(average: DetectionModel, accelerator: Accelerator, *, per_process_statistics: bool) -> DetectionModel:
    """A copy of the weight average that is the same on every process: what is saved and measured.

    The live model and average are left as they are. Every process must call this if `per_process_statistics`.
    """
    copied = copy.deepcopy(average).eval()
    if per_process_statistics:
        own = {
            name: value.cpu()
            for name, value in average.state_dict().items()
            if name.endswith(("running_mean", "running_var"))
        }
        parts = gather_payloads(accelerator, own)
        copied.load_state_dict(
            merge_statistics({name: torch.stack([part[name] for part in parts]) for name in own}), strict=False
        )
    return copied


def class_table(result: EvalResult, *, verbose: bool = False) -> list[str]:
    """The table that a validation ends with: all classes together, then each of them (50 or more only if `verbose`)."""
    lines = [f"{'class':>20} {'images':>8} {'objects':>8} {'P':>8} {'R':>8} {'mAP50':>8} {'mAP50-95':>9}"]

    def line(name: str, images: int, objects: int, *values: float) -> str:
        cells = ["n/a" if math.isnan(value) else f"{value:.3f}" for value in values]
        return f"{name[:20]:>20} {images:>8} {objects:>8} {cells[0]:>8} {cells[1]:>8} {cells[2]:>8} {cells[3]:>9}"

    lines.append(
        line("all", result.images, result.instances, result.precision, result.recall, result.map50, result.map50_95)
    )
    if len(result.per_class) > 1 and (verbose or len(result.per_class) < 50):
        lines += [
            line(item.name, item.images, item.instances, item.precision, item.recall, item.ap50, item.ap50_95)
            for item in result.per_class
        ]
    return lines


def _add_batch(
    share: _Share,
    batch: Batch,
    model: DetectionModel,
    *,
    config: EvalConfig,
    accelerator: Accelerator,
    global_batch_size: int,
    loss_fn: DetectionLoss | None,
    augment: bool,
    single_cls: bool,
) -> None:
    images = batch.floats(dtype=next(model.parameters()).dtype)
    with accelerator.autocast():
        decoded, maps = (model.forward_augmented(images), None) if augment else model(images)
    if loss_fn is not None and maps is not None:
        assignment = loss_fn.assign(batch.targets, batch_size=len(batch), image_hw=(images.shape[2], images.shape[3]))
        global_batch = batch.keys[0].place // global_batch_size
        sums = loss_fn.level_sums(maps, assignment)
        share.losses[global_batch] = sums.cpu().numpy(), assignment.counts.cpu().numpy()
    found = non_max_suppression(
        decoded,
        conf_thres=config.conf_thres,
        iou_thres=config.iou_thres,
        multi_label=True,
        agnostic=single_cls,
        max_det=config.max_det,
    )
    for key, letterbox, kept in zip(batch.keys, batch.letterboxes, found, strict=True):
        assert letterbox is not None
        labels = torch.zeros_like(kept.labels) if single_cls else kept.labels
        share.add(key.index, Detections(letterbox.to_original(kept.boxes), kept.scores, labels))


def _mean_losses(shares: list[_Share], loss_fn: DetectionLoss) -> dict[str, float]:
    """Mean over global batches of the losses, each divided by its batch's counts over all processes."""
    batches = sorted({batch for share in shares for batch in share.losses})
    if not batches:
        return {}
    means = []
    for batch in batches:
        parts = [share.losses[batch] for share in shares if batch in share.losses]
        sums, counts = (np.sum([part[index] for part in parts], axis=0) for index in (0, 1))
        means.append(loss_fn.means(torch.from_numpy(sums), torch.from_numpy(counts)))
    box, objectness, classification = torch.stack(means).mean(0).tolist()
    return {"box": box, "objectness": objectness, "classification": classification}


def _by_row(shares: list[_Share], num_rows: int) -> list[Detections]:
    """Detections of all images in table order, so that the same ones give the same bits for any number of processes."""
    found: list[Detections | None] = [None] * num_rows
    for share in shares:
        ends = np.cumsum(share.lengths)
        for row, length, end in zip(share.rows, share.lengths, ends, strict=True):
            if found[row] is not None:
                raise RuntimeError(f"row {row} was validated twice")
            part = slice(int(end) - length, int(end))
            found[row] = Detections(*(_tensor(column[part]) for column in (share.boxes, share.scores, share.labels)))
    missing = [row for row, detections in enumerate(found) if detections is None]
    if missing:
        raise RuntimeError(f"{len(missing)} rows were not validated, the first is {missing[0]}")
    return [detections for detections in found if detections is not None]


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def _truths(table: FlatTable) -> list[Truth]:
    spans = [table.objects(row) for row in range(len(table))]
    return [Truth(boxes=table.boxes[span], labels=table.labels[span], ignore=table.ignore[span]) for span in spans]
