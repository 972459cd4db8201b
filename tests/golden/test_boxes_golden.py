"""Box geometry and suppression against the golden vectors."""

import csv
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from accel_yolo.boxes import (
    box_iou,
    check_image_size,
    clip_boxes,
    cxcywh_to_xyxy,
    make_divisible,
    non_max_suppression,
    paired_iou,
    plan_letterbox,
    scale_boxes,
    xyxy_to_cxcywh,
)


def _rows(path):
    with path.open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


@pytest.mark.parametrize("kind", ["iou", "giou", "diou", "ciou"])
def test_overlaps_of_pairs_equal_the_reference(golden_dir, record_deviation, kind):
    golden = json.loads((golden_dir / "ciou.json").read_text())
    boxes1, boxes2 = torch.tensor(golden["box1_xywh"]), torch.tensor(golden["box2_xywh"])
    deviation = (paired_iou(boxes1, boxes2, kind=kind) - torch.tensor(golden[kind])).abs().max().item()
    record_deviation("ciou.json", kind, deviation, "1e-5")
    assert deviation <= 1e-5


def test_the_gradient_of_ciou_equals_the_reference(golden_dir, record_deviation):
    golden = json.loads((golden_dir / "ciou.json").read_text())
    boxes1 = torch.tensor(golden["box1_xywh"], requires_grad=True)
    (1 - paired_iou(boxes1, torch.tensor(golden["box2_xywh"]), kind="ciou")).sum().backward()
    expected = torch.tensor(golden["grad_of_sum_1_minus_ciou_wrt_box1"])
    deviation = ((boxes1.grad - expected).abs() / (1 + expected.abs())).max().item()
    record_deviation("ciou.json", "gradient of 1 - CIoU", deviation, "1e-5 relative")
    assert deviation <= 1e-5


def test_pairwise_overlaps_equal_the_reference(golden_dir, record_deviation):
    golden = json.loads((golden_dir / "ciou.json").read_text())
    boxes1 = cxcywh_to_xyxy(torch.tensor(golden["box1_xywh"])[:8])
    boxes2 = cxcywh_to_xyxy(torch.tensor(golden["box2_xywh"])[:8])
    expected = torch.tensor(golden["pairwise_iou_first8"])
    deviation = (box_iou(boxes1, boxes2) - expected).abs().max().item()
    record_deviation("ciou.json", "pairwise IoU", deviation, "1e-5")
    assert deviation <= 1e-5
    arrays = box_iou(boxes1.numpy(), boxes2.numpy())
    np.testing.assert_allclose(arrays, expected.numpy(), atol=1e-5)


def test_letterbox_plans_equal_the_reference(golden_dir, record_deviation):
    rows = _rows(golden_dir / "letterbox.csv")
    assert len(rows) == 312
    ratio_deviation = 0.0
    for row in rows:
        plan = plan_letterbox(
            (int(row["in_h"]), int(row["in_w"])),
            (int(row["new_h"]), int(row["new_w"])),
            auto=bool(row["auto"]),
            scale_up=bool(row["scaleup"]),
            stride=int(row["stride"]),
        )
        ratio_deviation = max(ratio_deviation, abs(plan.ratio - row["ratio_w"]), abs(plan.ratio - row["ratio_h"]))
        assert plan.pad == (row["dw"], row["dh"]), row
        assert plan.output_size == (row["out_h"], row["out_w"]), row
        assert plan.borders == tuple(row[side] for side in ("top", "bottom", "left", "right")), row
    record_deviation("letterbox.csv", "ratio (sizes, pads and borders are exact)", ratio_deviation, "1e-9")
    assert ratio_deviation <= 1e-9


def test_boxes_scaled_back_equal_the_reference(golden_dir, record_deviation):
    deviation = 0.0
    for row in _rows(golden_dir / "scale_boxes.csv"):
        boxes = torch.tensor([[row[name] for name in ("x1", "y1", "x2", "y2")]])
        stored = (row["gain"], (row["pad_w"], row["pad_h"])) if row["given_ratio_pad"] else None
        scaled = scale_boxes(
            boxes,
            (int(row["net_h"]), int(row["net_w"])),
            (int(row["orig_h"]), int(row["orig_w"])),
            ratio_pad=stored,
        )
        expected = torch.tensor([[row[name] for name in ("out_x1", "out_y1", "out_x2", "out_y2")]])
        deviation = max(deviation, (scaled - expected).abs().max().item())
    record_deviation("scale_boxes.csv", "px", deviation, "1e-3")
    assert deviation <= 1e-3


def test_divisible_sizes_equal_the_reference(golden_dir):
    golden = json.loads((golden_dir / "box_misc.json").read_text())
    for value, divisor, expected in golden["make_divisible"]:
        assert make_divisible(value, divisor) == expected
    for size, stride, floor, expected in golden["check_img_size"]:
        # One side, or (height, width).
        sides = [check_image_size(int(side), stride, floor) for side in np.ravel(size)]
        assert sides == np.ravel(expected).tolist()


def test_normalised_boxes_equal_the_reference(golden_dir, record_deviation):
    golden = json.loads((golden_dir / "box_misc.json").read_text())
    case = golden["xyxy_to_xywhn_clipped"]
    size = np.array([case["w"], case["h"]] * 2, dtype=np.float64)
    clipped = clip_boxes(np.array(case["inp"], dtype=np.float64), (case["h"] - case["eps"], case["w"] - case["eps"]))
    deviation = np.abs(xyxy_to_cxcywh(clipped) / size - case["out"]).max()

    case = golden["xywhn_to_xyxy"]
    size, shift = np.array([case["w"], case["h"]] * 2), np.array([case["padw"], case["padh"]] * 2)
    pixels = cxcywh_to_xyxy(np.array(case["inp"]) * size) + shift
    deviation = max(deviation, np.abs(pixels - case["out"]).max())
    record_deviation("box_misc.json", "normalised boxes", deviation, "1e-9")
    assert deviation <= 1e-9


def _nms_cases(golden_dir):
    tensors = load_file(golden_dir / "nms.safetensors")
    for name, case in json.loads((golden_dir / "nms.json").read_text()).items():
        source = case["input"].split()[0]
        images = list(tensors[source])
        if name == "none_left":
            images.append(torch.zeros_like(images[0]))
        if name == "hybrid":
            # Labels enter as predictions that are certain of themselves.
            labels = tensors["hybrid_labels.0"]
            certain = torch.zeros(len(labels), images[0].shape[1])
            certain[:, :4] = labels[:, 1:]
            certain[:, 4] = 1
            certain[torch.arange(len(labels)), 5 + labels[:, 0].long()] = 1
            images[0] = torch.cat([images[0], certain])
        yield name, case, images, [tensors[f"{name}.out.{index}"] for index in range(len(images))]


def _settle_equal_scores(rows):
    # The reference's sort is unstable: the two certain labels of the hybrid case, both with score 1, may swap.
    return rows[np.lexsort((rows[:, 5].numpy(), -rows[:, 4].numpy()))]


def test_suppression_equals_the_reference_box_by_box(golden_dir, record_deviation):
    for name, case, images, expected in _nms_cases(golden_dir):
        box_deviation = score_deviation = 0.0
        for predictions, wanted in zip(images, expected, strict=True):
            (found,) = non_max_suppression(predictions[None], **case["args"])
            rows = torch.cat([found.boxes, found.scores[:, None], found.labels[:, None].float()], dim=1)
            assert rows.shape == wanted.shape, name
            rows, wanted = _settle_equal_scores(rows), _settle_equal_scores(wanted)
            assert torch.equal(rows[:, 5], wanted[:, 5]), name
            if len(wanted):
                box_deviation = max(box_deviation, (rows[:, :4] - wanted[:, :4]).abs().max().item())
                score_deviation = max(score_deviation, (rows[:, 4] - wanted[:, 4]).abs().max().item())
        record_deviation("nms.safetensors", f"{name} boxes, px", box_deviation, "1e-3")
        record_deviation("nms.safetensors", f"{name} scores", score_deviation, "1e-6")
        assert box_deviation <= 1e-3, name
        assert score_deviation <= 1e-6, name
