"""Box geometry and non-maximum suppression."""

import numpy as np
import pytest
import torch
from torchvision.ops import nms

from accel_yolo import boxes as boxes_module
from accel_yolo.boxes import (
    box_area,
    box_iou,
    check_image_size,
    clip_boxes,
    cxcywh_to_xyxy,
    non_max_suppression,
    paired_iou,
    plan_letterbox,
    scale_boxes,
    xyxy_to_cxcywh,
)


def test_formats_convert_there_and_back_for_tensors_and_arrays():
    corners = torch.tensor([[10.0, 20.0, 30.0, 60.0]])
    assert xyxy_to_cxcywh(corners).tolist() == [[20.0, 40.0, 20.0, 40.0]]
    assert torch.equal(cxcywh_to_xyxy(xyxy_to_cxcywh(corners)), corners)
    array = corners.numpy().astype(np.float64)
    assert isinstance(xyxy_to_cxcywh(array), np.ndarray)
    np.testing.assert_array_equal(cxcywh_to_xyxy(xyxy_to_cxcywh(array)), array)
    assert corners.tolist() == [[10.0, 20.0, 30.0, 60.0]]


def test_area_and_clipping_know_height_from_width():
    corners = torch.tensor([[-5.0, -5.0, 50.0, 50.0], [60.0, 10.0, 70.0, 20.0]])
    clipped = clip_boxes(corners, (20, 40))
    assert clipped.tolist() == [[0.0, 0.0, 40.0, 20.0], [40.0, 10.0, 40.0, 20.0]]
    assert box_area(clipped).tolist() == [800.0, 0.0]
    assert corners[0, 0] == -5


def test_overlap_is_computed_for_every_pair_and_none_is_an_empty_table():
    first = torch.tensor([[0.0, 0.0, 10.0, 10.0], [5.0, 0.0, 15.0, 10.0]])
    second = torch.tensor([[0.0, 0.0, 10.0, 10.0], [20.0, 20.0, 30.0, 30.0], [3.0, 3.0, 3.0, 3.0]])
    expected = torch.tensor([[1.0, 0.0, 0.0], [1 / 3, 0.0, 0.0]])
    torch.testing.assert_close(box_iou(first, second), expected)
    assert box_iou(first[:0], second).shape == (0, 3)
    assert box_iou(second[2:], second[2:]).item() == 0


def test_overlap_refuses_boxes_without_four_numbers():
    with pytest.raises(ValueError, match=r"\(N, 4\), found \(2, 5\)"):
        box_iou(torch.zeros(2, 5), torch.zeros(1, 4))
    with pytest.raises(ValueError, match=r"\(N, 4\)"):
        paired_iou(torch.zeros(4), torch.zeros(1, 4))


def test_distance_and_aspect_only_lower_the_overlap():
    generator = torch.Generator().manual_seed(0)
    first, second = torch.rand(200, 4, generator=generator) + 0.1, torch.rand(200, 4, generator=generator) + 0.1
    iou, giou, diou, ciou = (paired_iou(first, second, kind=kind) for kind in ("iou", "giou", "diou", "ciou"))
    assert (giou <= iou + 1e-6).all()
    assert (diou <= iou + 1e-6).all()
    assert (ciou <= diou + 1e-6).all()
    same = paired_iou(first, first, kind="ciou")
    torch.testing.assert_close(same, torch.ones(200))


def test_the_weight_of_the_aspect_has_no_gradient():
    # Without overlap and with equal centres only the aspect term varies with a pure change of shape.
    first = torch.tensor([[0.0, 0.0, 2.0, 1.0]], dtype=torch.float64, requires_grad=True)
    second = torch.tensor([[0.0, 0.0, 1.0, 2.0]], dtype=torch.float64)
    difference = paired_iou(first, second, kind="ciou") - paired_iou(first, second, kind="diou")
    (gradient,) = torch.autograd.grad(difference.sum(), first)

    iou = paired_iou(first, second).item()
    angle = np.arctan(0.5) - np.arctan(2.0)
    aspect = 4 / np.pi**2 * angle**2
    alpha = aspect / (aspect - iou + 1 + 1e-7)
    # d aspect / d width = 8/pi^2 * (angle2 - angle1) * -(1/h) / (1 + (w/h)^2)
    expected = -alpha * 8 / np.pi**2 * angle * -1 / (1 + 4)
    assert gradient[0, 2].item() == pytest.approx(expected, rel=1e-9)


def test_letterbox_gives_the_odd_pixel_to_the_bottom_and_keeps_the_exact_half():
    plan = plan_letterbox((101, 200), (200, 200))
    assert plan.inner_size == (101, 200)
    assert plan.pad == (0.0, 49.5)
    assert plan.borders == (49, 50, 0, 0)
    assert plan.output_size == (200, 200)


def test_letterbox_can_pad_to_the_stride_and_leave_small_images_alone():
    assert plan_letterbox((480, 640), (640, 640), auto=True, stride=64).output_size == (512, 640)
    assert plan_letterbox((100, 100), (640, 640), scale_up=False).inner_size == (100, 100)


def test_boxes_come_back_from_the_letterbox():
    original_hw, input_hw = (300, 500), (640, 640)
    plan = plan_letterbox(original_hw, input_hw)
    original = torch.tensor([[10.0, 20.0, 200.0, 250.0]])
    left, top = plan.pad
    on_input = original * plan.ratio + torch.tensor([left, top, left, top])
    torch.testing.assert_close(scale_boxes(on_input, input_hw, original_hw), original)
    torch.testing.assert_close(scale_boxes(on_input, input_hw, original_hw, ratio_pad=(plan.ratio, plan.pad)), original)
    assert scale_boxes(on_input - 1000, input_hw, original_hw).tolist() == [[0.0] * 4]


def test_image_sizes_are_rounded_up_to_the_stride_and_to_the_floor():
    assert check_image_size(100, 32) == 128
    assert check_image_size(64, 32) == 64
    assert check_image_size(64, 32, floor=96) == 96


def random_predictions(num_rows, num_classes, *, seed, on_whole_pixels=False):
    generator = torch.Generator().manual_seed(seed)
    predictions = torch.rand(1, num_rows, 5 + num_classes, generator=generator)
    # A few centres for many boxes, so that most are duplicates of others.
    centres = torch.rand(12, 2, generator=generator) * 200
    chosen = centres[torch.randint(12, (num_rows,), generator=generator)]
    predictions[0, :, :2] = chosen + torch.randn(num_rows, 2, generator=generator) * 5
    predictions[0, :, 2:4] = predictions[0, :, 2:4] * 60 + 10
    if on_whole_pixels:
        predictions[0, :, :2] = predictions[0, :, :2].round()
        predictions[0, :, 2:4] = (predictions[0, :, 2:4] / 10).round() * 10
    # Equal scores are common too.
    predictions[0, :, 4:] = (predictions[0, :, 4:] * 100).round() / 100
    return predictions


def plain_suppression(predictions, *, conf_thres, iou_thres, max_det, multi_label):
    """One full greedy pass of torchvision per class over every candidate, best first; nothing is cut short."""
    rows = predictions[0][predictions[0, :, 4] > conf_thres]
    scores = rows[:, 5:] * rows[:, 4:5]
    row, label = (scores > conf_thres).nonzero(as_tuple=True)
    if not multi_label:
        is_best = label == scores.argmax(dim=1)[row]
        row, label = row[is_best], label[is_best]
    score = scores[row, label]
    order = score.sort(descending=True, stable=True).indices
    boxes, label, score = cxcywh_to_xyxy(rows[row[order], :4]), label[order], score[order]
    falling = -torch.arange(len(score), dtype=torch.float32)
    kept = []
    for value in label.unique():
        members = (label == value).nonzero().squeeze(1)
        kept.append(members[nms(boxes[members], falling[members], iou_thres)])
    kept = torch.cat(kept).sort().values[:max_det]
    return boxes[kept], score[kept], label[kept]


@pytest.mark.parametrize("prefix", [1000, 7])
@pytest.mark.parametrize("multi_label", [True, False])
@pytest.mark.parametrize("on_whole_pixels", [True, False])
@pytest.mark.parametrize(("num_rows", "num_classes"), [(1500, 1), (700, 3), (120, 40)])
def test_suppression_in_prefixes_equals_one_full_greedy_pass_per_class(
    monkeypatch, prefix, multi_label, on_whole_pixels, num_rows, num_classes
):
    monkeypatch.setattr(boxes_module, "FIRST_PREFIX", prefix)
    for seed in range(4):
        predictions = random_predictions(num_rows, num_classes, seed=seed, on_whole_pixels=on_whole_pixels)
        settings = {"conf_thres": 0.01, "iou_thres": (0.6, 0.45)[seed % 2], "max_det": 60, "multi_label": multi_label}
        (found,) = non_max_suppression(predictions, **settings)
        boxes, scores, labels = plain_suppression(predictions, **settings)
        assert torch.equal(found.labels, labels)
        assert torch.equal(found.boxes, boxes)
        assert torch.equal(found.scores, scores)


def test_a_box_left_of_and_above_the_image_does_not_meet_another_class():
    # Shifted by one class, (-41 .. -1) would lie exactly on (60 .. 100), the largest coordinate being 100.
    predictions = torch.tensor([[[80.0, 80, 40, 40, 0.9, 1, 0], [-21.0, -21, 40, 40, 0.8, 0, 1]]])
    (found,) = non_max_suppression(predictions, conf_thres=0.1, iou_thres=0.5)
    assert found.labels.tolist() == [0, 1]


def test_only_the_best_30000_candidates_enter(monkeypatch):
    monkeypatch.setattr(boxes_module, "MAX_CANDIDATES", 5)
    predictions = torch.zeros(1, 9, 6)
    predictions[0, :, 0] = torch.arange(9) * 100
    predictions[0, :, 2:4] = 10
    predictions[0, :, 4] = torch.linspace(0.9, 0.1, 9)
    predictions[0, :, 5] = 1
    (found,) = non_max_suppression(predictions, conf_thres=0.01, iou_thres=0.5)
    assert len(found.scores) == 5


def test_agnostic_suppression_crosses_classes():
    predictions = torch.tensor([[[50.0, 50, 20, 20, 0.9, 1, 0], [51.0, 50, 20, 20, 0.8, 0, 1]]])
    apart = non_max_suppression(predictions, conf_thres=0.1, iou_thres=0.5)[0]
    together = non_max_suppression(predictions, conf_thres=0.1, iou_thres=0.5, agnostic=True)[0]
    assert apart.labels.tolist() == [0, 1]
    assert together.labels.tolist() == [0]


def test_a_class_filter_keeps_the_named_classes_and_ignores_unknown_ones():
    predictions = torch.tensor([[[50.0, 50, 20, 20, 1.0, 0.9, 0.5, 0.4]]])
    settings = {"conf_thres": 0.1, "iou_thres": 0.5, "classes": [1, 2, 99]}
    assert non_max_suppression(predictions, multi_label=True, **settings)[0].labels.tolist() == [1, 2]
    # The best class alone is 0, which is not wanted.
    assert len(non_max_suppression(predictions, **settings)[0].labels) == 0


def test_thresholds_are_strict():
    predictions = torch.tensor([[[50.0, 50, 20, 20, 0.5, 1.0], [90.0, 50, 20, 20, 1.0, 0.5]]])
    assert len(non_max_suppression(predictions, conf_thres=0.5, iou_thres=0.5)[0].scores) == 0
    assert len(non_max_suppression(predictions, conf_thres=0.499, iou_thres=0.5)[0].scores) == 2


def test_equal_scores_keep_the_order_of_the_rows():
    predictions = torch.zeros(1, 3000, 6)
    predictions[0, :, 0] = torch.arange(3000) * 30
    predictions[0, :, 2:4] = 10
    predictions[0, :, 4:] = 0.5
    (found,) = non_max_suppression(predictions, conf_thres=0.01, iou_thres=0.5, max_det=50)
    assert found.boxes[:, 0].tolist() == [30.0 * row - 5 for row in range(50)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_predictions_are_handled_in_float32(dtype):
    predictions = random_predictions(200, 3, seed=0).to(dtype)
    (found,) = non_max_suppression(predictions, conf_thres=0.01, iou_thres=0.6, multi_label=True)
    (expected,) = non_max_suppression(predictions.float(), conf_thres=0.01, iou_thres=0.6, multi_label=True)
    assert found.boxes.dtype == found.scores.dtype == torch.float32
    assert torch.equal(found.boxes, expected.boxes)
    assert torch.equal(found.scores, expected.scores)


@pytest.mark.parametrize("num_rows", [0, 4])
def test_nothing_found_is_an_empty_result_per_image(num_rows):
    results = non_max_suppression(torch.zeros(2, num_rows, 8), conf_thres=0.0, iou_thres=0.5)
    assert [tuple(part.shape for part in result) for result in results] == [((0, 4), (0,), (0,))] * 2
    assert results[0].labels.dtype == torch.int64


def test_impossible_thresholds_and_shapes_are_refused():
    with pytest.raises(ValueError, match=r"iou_thres must be in \[0, 1\], found 1.5"):
        non_max_suppression(torch.zeros(1, 1, 6), conf_thres=0.1, iou_thres=1.5)
    with pytest.raises(ValueError, match=r"conf_thres must be in \[0, 1\]"):
        non_max_suppression(torch.zeros(1, 1, 6), conf_thres=-0.1, iou_thres=0.5)
    with pytest.raises(ValueError, match=r"\(B, N, 5 \+ K\), found \(1, 5\)"):
        non_max_suppression(torch.zeros(1, 5), conf_thres=0.1, iou_thres=0.5)
