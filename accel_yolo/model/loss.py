"""Target assignment and the three losses: box, objectness and class.

Legend: B images of this rank, T objects, K classes, L levels, A anchors per cell, H W cells of a level, P matched rows
(object, anchor, cell) of a level, U different cells among them, C = 5 + K channels.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_yolo.boxes import paired_iou
from accel_yolo.config.schema import LossConfig
from accel_yolo.structures import Targets

OBJECTNESS = 4
# Weight of each level's objectness, finest level first, by position and not by stride (loss.md section 3).
BALANCE_OF_THREE = (4.0, 1.0, 0.4)
BALANCE = (4.0, 1.0, 0.25, 0.06, 0.02)
AUTOBALANCE_RATE = 0.0001
FOCAL_ALPHA = 0.25
# The own cell, then the neighbours left, up, right and down: what is taken off a centre before it is truncated.
NEIGHBOUR_SHIFTS = ((0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (-0.5, 0.0), (0.0, -0.5))


@dataclass(slots=True)
class Losses:
    """Scalars of one micro-step, float32.

    `box`, `objectness` and `classification` are weighted by their gains and divided by global counts: their sums over
    the ranks are the global means. `total` is what a rank differentiates.
    """

    box: Tensor
    objectness: Tensor
    classification: Tensor
    total: Tensor

    def detach(self) -> Losses:
        return Losses(self.box.detach(), self.objectness.detach(), self.classification.detach(), self.total.detach())


@dataclass(slots=True)
class LevelAssignment:
    """The matched rows of one level, in the order of loss.md section 1.

    Args:
        grid_hw: (H, W).
        image: (P,) int64, position in this rank's batch.
        anchor: (P,) int64 in [0, A).
        gy: (P,) int64 in [0, H).
        gx: (P,) int64 in [0, W).
        labels: (P,) int64 in [0, K).
        boxes: (P, 4) float32 cxcywh in cells, the centre relative to the row's cell.
        anchor_sizes: (P, 2) float32 width and height in cells.
        by_cell: (P,) int64, the rows sorted by cell, rows of one cell in order.
        rows_of_cell: (U,) int64, how many rows each cell has.
        last_of_cell: (U,) int64, the last row of each cell.
    """

    grid_hw: tuple[int, int]
    image: Tensor
    anchor: Tensor
    gy: Tensor
    gx: Tensor
    labels: Tensor
    boxes: Tensor
    anchor_sizes: Tensor
    by_cell: Tensor
    rows_of_cell: Tensor
    last_of_cell: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> LevelAssignment:
        moved = {
            field.name: getattr(self, field.name).to(device, non_blocking=non_blocking)
            for field in dataclasses.fields(self)
            if field.name != "grid_hw"
        }
        return LevelAssignment(grid_hw=self.grid_hw, **moved)


@dataclass(slots=True)
class Assignment:
    """Which cells of which level answer for which object.

    Args:
        levels: L assignments, finest level first.
        counts: (L, 2) float64 on the CPU: matched rows and cells of this rank, to be summed over ranks.
    """

    levels: list[LevelAssignment]
    counts: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Assignment:
        return Assignment(
            [level.to(device, non_blocking) for level in self.levels],
            self.counts.to(device, non_blocking=non_blocking),
        )


class DetectionLoss:
    """The loss of YOLOv5, divided by global counts, so that it does not depend on the number of processes.

    Args:
        config: gains before scaling, and the options. It is not changed.
        strides: (L,) px per cell.
        anchors: (L, A, 2) width and height in cells of their level.
        num_classes: K; with one class there is no class loss.
        image_size: side of the network input that the objectness gain is scaled for, px.
        autobalance: adapt the levels' objectness weights while training; for one process, and it needs a level of
            stride 16.

    Raises:
        ValueError: for more levels than there are objectness weights, or autobalance without a stride of 16.
    """

    def __init__(
        self,
        config: LossConfig,
        *,
        strides: Tensor,
        anchors: Tensor,
        num_classes: int,
        image_size: int,
        autobalance: bool = False,
    ) -> None:
        num_levels = len(anchors)
        if num_levels > len(BALANCE):
            raise ValueError(f"at most {len(BALANCE)} levels have an objectness weight, found {num_levels}")
        self.config = config
        self.num_classes = num_classes
        self.strides = [float(stride) for stride in strides]
        self.anchors = anchors.detach().float().cpu()
        self.balance = list(BALANCE_OF_THREE if num_levels == 3 else BALANCE[:num_levels])
        self.autobalance = autobalance
        if autobalance and 16.0 not in self.strides:
            raise ValueError(f"autobalance needs a level of stride 16, found {self.strides}")

        # Gains of the recipes hold for three levels, 80 classes and 640 px (loss.md section 6).
        self.box_gain = config.box * 3 / num_levels
        self.class_gain = config.cls * num_classes / 80 * 3 / num_levels
        self.objectness_gain = config.obj * (image_size / 640) ** 2 * 3 / num_levels

    def assign(self, targets: Targets, *, batch_size: int, image_hw: tuple[int, int]) -> Assignment:
        """Match objects to anchors and cells, from the targets and the grid sizes alone.

        Cheapest on the CPU, before anything is moved: the number of rows is data, and on a GPU every such number is a
        wait. `__call__` moves the result.

        Args:
            targets: objects of this rank's images.
            batch_size: B, images of this rank; may be 0.
            image_hw: (height, width) px of the network's input.

        Raises:
            ValueError: if a label or an image index is out of range (looked at on the CPU only).
        """
        self._check(targets, batch_size)
        levels = []
        counts = torch.zeros(len(self.strides), 2, dtype=torch.float64)
        for index, (stride, anchors) in enumerate(zip(self.strides, self.anchors, strict=True)):
            grid_hw = math.ceil(image_hw[0] / stride), math.ceil(image_hw[1] / stride)
            level = _assign_level(targets, anchors.to(targets.boxes.device), grid_hw, self.config.anchor_t)
            counts[index, 0] = len(level.labels)
            counts[index, 1] = batch_size * len(anchors) * grid_hw[0] * grid_hw[1]
            levels.append(level)
        return Assignment(levels, counts)

    def __call__(
        self,
        maps: list[Tensor],
        assignment: Assignment,
        *,
        counts: Tensor | None = None,
        batch_size: int | None = None,
        num_processes: int = 1,
    ) -> Losses:
        """The losses of one micro-step.

        Every rank builds the same graph whatever it was assigned, and every channel of every map gets a gradient,
        zero where nothing depends on it.

        Args:
            maps: L raw maps (B, A, H, W, 5 + K), any float type and memory layout.
            assignment: of this rank's targets.
            counts: (L, 2) `Assignment.counts` summed over ranks; None for this rank's own.
            batch_size: images of the micro-step over all ranks; None for this rank's own.
            num_processes: ranks over which DDP will average the gradients.

        Raises:
            ValueError: if a map's grid is not the assignment's, or autobalance meets several processes.
        """
        if self.autobalance and num_processes > 1:
            raise ValueError("autobalance works with one process: a rank sees its own share of a level's loss alone")
        counts = (assignment.counts if counts is None else counts).to(maps[0].device)
        batch_size = len(maps[0]) if batch_size is None else batch_size
        sums = self.level_sums(maps, assignment)
        box, objectness, classification = self.means(sums, counts).unbind()
        if self.autobalance and torch.is_grad_enabled():
            self._rebalance((sums[:, 1].detach() / counts[:, 1]).tolist())
        total = (box + objectness + classification) * (batch_size * num_processes)
        return Losses(box, objectness, classification, total)

    def level_sums(self, maps: list[Tensor], assignment: Assignment) -> Tensor:
        """(L, 3) sums of this rank's box, objectness and class loss, before any gain or division; see `means`.

        Raises:
            ValueError: if a map's grid is not the assignment's.
        """
        assignment = assignment.to(maps[0].device)
        sums = []
        for index, (level_map, level) in enumerate(zip(maps, assignment.levels, strict=True)):
            if tuple(level_map.shape[2:4]) != level.grid_hw:
                raise ValueError(f"level {index} has grid {tuple(level_map.shape[2:4])}, assigned was {level.grid_hw}")
            sums.append(torch.stack(self._level_sums(level_map, level)))
        return torch.stack(sums)

    def means(self, sums: Tensor, counts: Tensor) -> Tensor:
        """(3,) box, objectness and class loss, weighted by their gains.

        Args:
            sums: (L, 3) `level_sums`, of one rank or summed over ranks.
            counts: (L, 2) `Assignment.counts`, summed over ranks.
        """
        # A level that no rank matched has a sum of zero; any divisor but zero will do.
        rows, cells = counts.to(sums.dtype).clamp(min=1).unbind(1)
        box = (sums[:, 0] / rows).sum() * self.box_gain
        objectness = (sums[:, 1] / cells * sums.new_tensor(self.balance)).sum() * self.objectness_gain
        classification = (sums[:, 2] / (rows * self.num_classes)).sum() * self.class_gain
        return torch.stack([box, objectness, classification])

    def _check(self, targets: Targets, batch_size: int) -> None:
        if not len(targets) or targets.labels.device.type != "cpu":
            return
        for name, values, limit in (
            ("class", targets.labels, self.num_classes),
            ("image index", targets.image_index, batch_size),
        ):
            outside = values[(values < 0) | (values >= limit)]
            if len(outside):
                raise ValueError(f"{name} {int(outside[0])} is outside [0, {limit})")

    def _level_sums(self, level_map: Tensor, level: LevelAssignment) -> tuple[Tensor, Tensor, Tensor]:
        # Sums over this rank's rows, cells and rows x classes.
        logits, rows = _ObjectnessAndRows.apply(level_map, level)

        centres = rows[:, 0:2].sigmoid() * 2 - 0.5
        sizes = (rows[:, 2:4].sigmoid() * 2).square() * level.anchor_sizes
        ciou = paired_iou(torch.cat([centres, sizes], dim=1), level.boxes, kind="ciou")

        # Written once per cell, by its last row: the same on every device.
        last = level.last_of_cell
        target = torch.zeros_like(logits)
        target[level.image[last], level.anchor[last], level.gy[last], level.gx[last]] = ciou.detach()[last].clamp(min=0)
        objectness_sum = self._binary_loss(logits, target, self.config.obj_pw)

        if self.num_classes == 1:
            return (1 - ciou).sum(), objectness_sum, torch.zeros_like(objectness_sum)
        half_smoothing = self.config.label_smoothing / 2
        class_target = torch.full_like(rows[:, 5:], half_smoothing)
        class_target.scatter_(1, level.labels[:, None], 1 - half_smoothing)
        return (1 - ciou).sum(), objectness_sum, self._binary_loss(rows[:, 5:], class_target, self.config.cls_pw)

    def _binary_loss(self, logits: Tensor, target: Tensor, positive_weight: float) -> Tensor:
        # A weight of one is left out, it would cost another pass over all cells.
        weight = None if positive_weight == 1 else logits.new_tensor(positive_weight)
        gamma = self.config.fl_gamma
        if gamma == 0:
            return F.binary_cross_entropy_with_logits(logits, target, pos_weight=weight, reduction="sum")
        # Source: Lin et al. 2017, "Focal Loss for Dense Object Detection" (arXiv:1708.02002), eq. 5.
        element = F.binary_cross_entropy_with_logits(logits, target, pos_weight=weight, reduction="none")
        probability = logits.sigmoid()
        of_truth = target * probability + (1 - target) * (1 - probability)
        alpha = target * FOCAL_ALPHA + (1 - target) * (1 - FOCAL_ALPHA)
        return (element * alpha * (1 - of_truth) ** gamma).sum()

    def _rebalance(self, level_objectness: list[float]) -> None:
        for index, loss in enumerate(level_objectness):
            # A loss of exactly zero would make the weight infinite.
            inverse = 1 / max(loss, 1e-6)
            self.balance[index] = self.balance[index] * (1 - AUTOBALANCE_RATE) + AUTOBALANCE_RATE * inverse
        reference = self.balance[self.strides.index(16.0)]
        self.balance = [weight / reference for weight in self.balance]


def _assign_level(targets: Targets, anchors: Tensor, grid_hw: tuple[int, int], anchor_t: float) -> LevelAssignment:
    height, width = grid_hw
    grid_wh = targets.boxes.new_tensor([width, height])
    centres, sizes = targets.boxes[:, :2] * grid_wh, targets.boxes[:, 2:] * grid_wh

    ratio = sizes[None] / anchors[:, None]
    # (A, T): anchor-major, as the order of rows asks.
    matches = torch.maximum(ratio, 1 / ratio).amax(dim=2) < anchor_t
    anchor, target = matches.nonzero(as_tuple=True)

    centre = centres[target]
    from_end = grid_wh - centre
    near_start = (centre % 1 < 0.5) & (centre > 1)
    near_end = (from_end % 1 < 0.5) & (from_end > 1)
    own = torch.ones_like(near_start[:, 0])
    shift, match = torch.stack([own, *near_start.T, *near_end.T]).nonzero(as_tuple=True)

    anchor, target, centre = anchor[match], target[match], centre[match]
    cell = (centre - centre.new_tensor(NEIGHBOUR_SHIFTS)[shift]).long()
    gx, gy = cell[:, 0].clamp(0, width - 1), cell[:, 1].clamp(0, height - 1)
    image = targets.image_index[target]

    flat_cell = ((image * len(anchors) + anchor) * height + gy) * width + gx
    sorted_cells, by_cell = flat_cell.sort(stable=True)
    _, rows_of_cell = sorted_cells.unique_consecutive(return_counts=True)
    return LevelAssignment(
        grid_hw=grid_hw,
        image=image,
        anchor=anchor,
        gy=gy,
        gx=gx,
        labels=targets.labels[target],
        boxes=torch.cat([centre - torch.stack([gx, gy], dim=1), sizes[target]], dim=1),
        anchor_sizes=anchors[anchor],
        by_cell=by_cell,
        rows_of_cell=rows_of_cell,
        last_of_cell=by_cell[rows_of_cell.cumsum(0) - 1],
    )


def _precise(values: Tensor) -> Tensor:
    # At least float32: half types would lose small boxes; float64 stays, for proofs.
    return values.to(torch.promote_types(values.dtype, torch.float32))


class _ObjectnessAndRows(torch.autograd.Function):
    """(B, A, H, W, C) map -> (B, A, H, W) objectness of all cells and (P, C) matched rows, both logits in float32.

    Indexing twice would let autograd fill two gradients as large as the map and add them; here it is filled once.
    """

    @staticmethod
    def forward(ctx: Any, level_map: Tensor, level: LevelAssignment) -> tuple[Tensor, Tensor]:
        ctx.level = level
        # Its values are not needed again, only its layout: keeping the map itself would keep the memory.
        ctx.layout = level_map.shape, level_map.stride(), level_map.dtype, level_map.device
        rows = level_map[level.image, level.anchor, level.gy, level.gx]
        return _precise(level_map[..., OBJECTNESS]), _precise(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_objectness: Tensor, of_rows: Tensor) -> tuple[Tensor, None]:
        level = ctx.level
        shape, stride, dtype, device = ctx.layout
        # The map's own memory layout spares the network a transposition of the whole gradient.
        gradient = torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
        last = level.last_of_cell
        if len(last):
            # Rows that share a cell are added in order first; adding into the map would leave the order to chance.
            of_cells = torch.segment_reduce(of_rows[level.by_cell], "sum", lengths=level.rows_of_cell, unsafe=True)
            gradient[level.image[last], level.anchor[last], level.gy[last], level.gx[last]] = of_cells.to(dtype)
        gradient[..., OBJECTNESS] += of_objectness
        return gradient, None
