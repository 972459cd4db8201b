"""Assignment, losses and gradients against the golden vectors."""

import json

import pytest
import torch
from safetensors.torch import load_file

from accel_yolo.config.schema import LossConfig
from accel_yolo.model.loss import DetectionLoss
from accel_yolo.structures import Targets

CASES = (
    "normal",
    "no_targets",
    "crowded",
    "label_smoothing",
    "focal",
    "single_class",
    "pos_weights",
    "p6_4level",
    "autobalance",
    "focal_smooth_pw",
    "one_target",
    "unmatched",
)


@pytest.fixture(scope="module")
def golden(golden_dir):
    return json.loads((golden_dir / "loss.json").read_text()), load_file(golden_dir / "loss.safetensors")


def _build(case, tensors, name):
    # The fixture's gains are scaled already; the class scales them itself, so they are scaled back here.
    levels = len(case["strides"])
    settings = dict(case["hyp_effective"])
    settings["box"] *= levels / 3
    settings["obj"] *= levels / 3
    settings["cls"] *= 80 / case["nc"] * levels / 3
    loss = DetectionLoss(
        LossConfig(**settings),
        strides=torch.tensor(case["strides"]),
        anchors=torch.tensor(case["anchors_grid"]),
        num_classes=case["nc"],
        image_size=640,
        autobalance=case["autobalance"],
    )
    rows = tensors[f"{name}.targets"]
    targets = Targets(rows[:, 0].long(), rows[:, 1].long(), rows[:, 2:])
    return loss, loss.assign(targets, batch_size=case["batch"], image_hw=tuple(case["input_hw"]))


def test_every_case_of_the_fixture_is_used(golden):
    assert set(golden[0]) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_the_reference(golden, record_deviation, name):
    cases, tensors = golden
    case = cases[name]
    loss, assignment = _build(case, tensors, name)
    for step, expected in enumerate(case["steps"]):
        prefix = f"{name}.step{step}" if case["autobalance"] else name
        maps = [tensors[f"{prefix}.pred.{level}"].clone().requires_grad_() for level in range(len(case["strides"]))]
        losses = loss(maps, assignment)
        losses.total.backward()

        total = abs(losses.total.item() / expected["total"] - 1)
        terms = max(
            abs(losses.box.item() - expected["box"]),
            abs(losses.objectness.item() - expected["obj"]),
            abs(losses.classification.item() - expected["cls"]),
        )
        gradient = max((m.grad - tensors[f"{prefix}.grad.{i}"]).abs().max().item() for i, m in enumerate(maps))
        balance = max(abs(a - b) for a, b in zip(loss.balance, expected["balance_after"], strict=False))
        record_deviation("loss.json", f"{name} total", total, "1e-5 relative")
        record_deviation("loss.json", f"{name} box, obj, cls", terms, "1e-5")
        record_deviation("loss.json", f"{name} balance", balance, "1e-5")
        record_deviation("loss.safetensors", f"{name} gradient", gradient, "1e-7")
        assert total <= 1e-5
        assert terms <= 1e-5
        assert balance <= 1e-5
        assert gradient <= 1e-7


@pytest.mark.parametrize("name", ["normal", "crowded", "p6_4level", "one_target"])
def test_assigned_rows_equal_the_reference_in_its_order(golden, record_deviation, name):
    cases, tensors = golden
    _, assignment = _build(cases[name], tensors, name)
    assert [len(level.labels) for level in assignment.levels] == cases[name]["n_pos"]
    for index, level in enumerate(assignment.levels):
        prefix = f"{name}.assign.{index}"
        cells = torch.stack([level.image, level.anchor, level.gy, level.gx], dim=1)
        assert torch.equal(cells, tensors[f"{prefix}.idx_b_a_gy_gx"].long())
        assert torch.equal(level.labels, tensors[f"{prefix}.cls"].long())
        assert torch.equal(level.anchor_sizes, tensors[f"{prefix}.anchor"])
        deviation = (level.boxes - tensors[f"{prefix}.box"]).abs().amax().item() if len(level.labels) else 0.0
        record_deviation("loss.safetensors", f"{name} assigned boxes, cells", deviation, "1e-5")
        assert deviation <= 1e-5


def test_gains_of_the_default_recipe_are_scaled_as_in_the_reference(golden):
    for name, image_size in (("normal", 640), ("single_class", 640), ("p6_4level", 1280)):
        case = golden[0][name]
        loss = DetectionLoss(
            LossConfig(),
            strides=torch.tensor(case["strides"]),
            anchors=torch.tensor(case["anchors_grid"]),
            num_classes=case["nc"],
            image_size=image_size,
        )
        effective = case["hyp_effective"]
        assert loss.box_gain == pytest.approx(effective["box"], rel=1e-12)
        assert loss.class_gain == pytest.approx(effective["cls"], rel=1e-12)
        assert loss.objectness_gain == pytest.approx(effective["obj"], rel=1e-12)
