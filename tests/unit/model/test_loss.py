"""Assignment and loss: global divisors, duplicates, and gradients that always exist."""

import pytest
import torch

from accel_yolo.config.schema import LossConfig
from accel_yolo.model.loss import DetectionLoss
from accel_yolo.structures import Targets

STRIDES = torch.tensor([8.0, 16.0, 32.0])
ANCHORS = torch.tensor(
    [
        [[1.25, 1.6], [2.0, 3.75], [4.1, 2.9]],
        [[1.9, 3.8], [3.9, 2.8], [3.7, 7.4]],
        [[3.6, 2.8], [4.9, 6.2], [11.7, 10.2]],
    ]
)
IMAGE_HW = (64, 96)


def make_loss(num_classes=3, *, autobalance=False, **settings):
    return DetectionLoss(
        LossConfig(**settings),
        strides=STRIDES,
        anchors=ANCHORS,
        num_classes=num_classes,
        image_size=640,
        autobalance=autobalance,
    )


def make_maps(batch_size, num_classes=3, *, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(
            batch_size, 3, IMAGE_HW[0] // stride, IMAGE_HW[1] // stride, 5 + num_classes, generator=generator
        ).to(dtype)
        for stride in (8, 16, 32)
    ]


def make_targets(images, num_classes=3, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    count = len(images)
    boxes = torch.rand(count, 4, generator=generator) * 0.6 + 0.2
    labels = torch.randint(num_classes, (count,), generator=generator)
    return Targets(torch.tensor(images, dtype=torch.int64), labels, boxes)


def no_targets():
    return make_targets([])


def rows_of(targets, images):
    """The targets of these images, renumbered from 0."""
    keep = torch.isin(targets.image_index, torch.tensor(images))
    return Targets(targets.image_index[keep] - images[0], targets.labels[keep], targets.boxes[keep])


@pytest.mark.parametrize("ranks", [[[0, 1], [2, 3, 4, 5]], [[0, 1, 2], [3], [4, 5]]])
@pytest.mark.parametrize("settings", [{}, {"fl_gamma": 1.5, "label_smoothing": 0.1, "obj_pw": 1.3, "cls_pw": 0.7}])
def test_ranks_together_have_the_losses_and_gradients_of_one_process(ranks, settings):
    # Image 3 has no object: as a rank of its own it has nothing to match.
    targets = make_targets([0, 0, 0, 1, 2, 2, 4, 5, 5, 5])
    maps = [level.requires_grad_() for level in make_maps(6)]
    loss = make_loss(**settings)
    whole = loss(maps, loss.assign(targets, batch_size=6, image_hw=IMAGE_HW))
    expected = torch.autograd.grad(whole.total, maps)

    assignments = [loss.assign(rows_of(targets, images), batch_size=len(images), image_hw=IMAGE_HW) for images in ranks]
    counts = sum(assignment.counts for assignment in assignments)
    parts = [
        loss([level[images] for level in maps], assignment, counts=counts, batch_size=6, num_processes=len(ranks))
        for images, assignment in zip(ranks, assignments, strict=True)
    ]
    # What DDP does with the gradients of the ranks.
    averaged = torch.autograd.grad(sum(part.total for part in parts) / len(ranks), maps)

    for name in ("box", "objectness", "classification"):
        together = sum(getattr(part, name) for part in parts)
        torch.testing.assert_close(together, getattr(whole, name), rtol=1e-6, atol=1e-6)
    for ours, wanted in zip(averaged, expected, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)


def test_sums_and_counts_of_ranks_give_the_losses_of_one_process():
    targets = make_targets([0, 0, 2, 2])
    maps = make_maps(3)
    loss = make_loss()
    whole = loss(maps, loss.assign(targets, batch_size=3, image_hw=IMAGE_HW))
    sums, counts = 0, 0
    for images in ([0], [1], [2]):
        assignment = loss.assign(rows_of(targets, images), batch_size=1, image_hw=IMAGE_HW)
        sums = sums + loss.level_sums([level[images] for level in maps], assignment).double()
        counts = counts + assignment.counts
    expected = torch.stack([whole.box, whole.objectness, whole.classification]).double()
    torch.testing.assert_close(loss.means(sums, counts), expected, rtol=1e-6, atol=1e-6)


def test_counts_are_known_without_the_maps_and_name_rows_and_cells():
    loss = make_loss()
    assignment = loss.assign(make_targets([0, 1, 1]), batch_size=2, image_hw=IMAGE_HW)
    assert assignment.counts.dtype == torch.float64
    assert assignment.counts[:, 0].tolist() == [len(level.labels) for level in assignment.levels]
    assert assignment.counts[:, 1].tolist() == [2 * 3 * 8 * 12, 2 * 3 * 4 * 6, 2 * 3 * 2 * 3]
    assert loss.assign(no_targets(), batch_size=0, image_hw=IMAGE_HW).counts.sum() == 0


def test_a_target_takes_its_cell_and_the_two_nearest_neighbours():
    # Centre (5.3, 3.8) on the stride 8 grid, sized like the first anchor: left and down are near.
    boxes = torch.tensor([[5.3 / 12, 3.8 / 8, 1.25 / 12, 1.6 / 8]])
    level = (
        make_loss(anchor_t=1.01)
        .assign(Targets(torch.tensor([0]), torch.tensor([2]), boxes), batch_size=1, image_hw=IMAGE_HW)
        .levels[0]
    )
    assert list(zip(level.gx.tolist(), level.gy.tolist(), strict=True)) == [(5, 3), (4, 3), (5, 4)]
    assert level.anchor.tolist() == [0, 0, 0]
    assert level.labels.tolist() == [2, 2, 2]
    torch.testing.assert_close(level.boxes[:, :2], torch.tensor([[0.3, 0.8], [1.3, 0.8], [0.3, -0.2]]))


def test_boxes_without_size_are_never_matched():
    boxes = torch.tensor([[0.5, 0.5, 0.0, 0.2], [0.5, 0.5, 0.2, 0.0]])
    targets = Targets(torch.tensor([0, 0]), torch.tensor([0, 0]), boxes)
    assert make_loss().assign(targets, batch_size=1, image_hw=IMAGE_HW).counts[:, 0].sum() == 0


def test_the_last_row_of_a_cell_sets_its_objectness_target():
    # Two targets in one cell; one is matched badly by the prediction, the other exactly.
    size = [1.25 / 12, 1.6 / 8]
    good, bad = [5.5 / 12, 3.5 / 8, *size], [5.5 / 12, 3.5 / 8, size[0] * 2.5, size[1] * 2.5]
    loss = make_loss(cls=0.0, box=0.0)
    maps = [torch.zeros_like(level) for level in make_maps(1)]

    def objectness(boxes):
        targets = Targets(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), torch.tensor(boxes))
        assignment = loss.assign(targets, batch_size=1, image_hw=IMAGE_HW)
        maps[0][..., 4] = 3.0
        return loss(maps, assignment).objectness.item()

    # A high logit costs less where the target is higher.
    assert objectness([bad, good]) < objectness([good, bad])


def test_rows_that_share_a_cell_add_their_gradients():
    targets = make_targets([0, 0])
    targets.boxes[1] = targets.boxes[0]
    twice = Targets(targets.image_index, torch.tensor([1, 1]), targets.boxes)
    once = Targets(targets.image_index[:1], torch.tensor([1]), targets.boxes[:1])
    loss = make_loss()
    gradients = []
    for chosen in (once, twice):
        maps = [level.requires_grad_() for level in make_maps(1)]
        loss(maps, loss.assign(chosen, batch_size=1, image_hw=IMAGE_HW)).total.backward()
        gradients.append([level.grad for level in maps])
    # The mean over two equal rows is that of one.
    for ours, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("layout", ["as the head gives it", "channels_last"])
def test_the_gradient_is_that_of_plain_indexing_and_has_the_maps_layout(layout):
    loss = make_loss()
    assignment = loss.assign(make_targets([0, 0, 1]), batch_size=2, image_hw=IMAGE_HW)
    plain = [level.requires_grad_() for level in make_maps(2)]
    loss(plain, assignment).total.backward()
    for index, source in enumerate(plain):
        outputs = source.detach().permute(0, 1, 4, 2, 3).flatten(1, 2)
        if layout == "channels_last":
            outputs = outputs.to(memory_format=torch.channels_last)
        view = outputs.unflatten(1, (3, 8)).permute(0, 1, 3, 4, 2).requires_grad_()
        maps = [level.detach() for level in plain]
        maps[index] = view
        (gradient,) = torch.autograd.grad(loss(maps, assignment).total, view)
        assert gradient.stride() == view.stride()
        torch.testing.assert_close(gradient, source.grad, rtol=1e-5, atol=1e-7)


def test_gradients_agree_with_finite_differences():
    loss = make_loss(label_smoothing=0.1)
    assignment = loss.assign(make_targets([0, 0, 1]), batch_size=2, image_hw=IMAGE_HW)
    maps = [level.requires_grad_() for level in make_maps(2)]
    loss(maps, assignment).total.backward()
    level = assignment.levels[1]
    place = (level.image[0], level.anchor[0], level.gy[0], level.gx[0])
    for channel in (5, 6, 7):
        totals = []
        for step in (0.05, -0.05):
            moved = [item.detach().clone() for item in maps]
            moved[1][(*place, channel)] += step
            totals.append(loss(moved, assignment).total.item())
        slope = (totals[0] - totals[1]) / 0.1
        assert maps[1].grad[(*place, channel)].item() == pytest.approx(slope, rel=0.02, abs=2e-4)


@pytest.mark.parametrize("num_classes", [1, 3])
@pytest.mark.parametrize("images", [[], [0, 0, 1]])
def test_every_parameter_gets_a_gradient_also_on_a_background_batch(num_classes, images):
    heads = [torch.nn.Conv2d(4, 3 * (5 + num_classes), 1) for _ in STRIDES]
    maps = [
        head(torch.randn(2, 4, *level.shape[2:4])).unflatten(1, (3, 5 + num_classes)).permute(0, 1, 3, 4, 2)
        for head, level in zip(heads, make_maps(2, num_classes), strict=True)
    ]
    loss = make_loss(num_classes)
    losses = loss(maps, loss.assign(make_targets(images, num_classes), batch_size=2, image_hw=IMAGE_HW))
    losses.total.backward()
    for head in heads:
        by_channel = head.bias.grad.view(3, 5 + num_classes)
        assert head.weight.grad is not None
        assert (by_channel[:, 4] != 0).all()
        if num_classes == 1:
            assert (by_channel[:, 5] == 0).all()
        if not images:
            assert (by_channel[:, :4] == 0).all() and (by_channel[:, 5:] == 0).all()
    if not images:
        assert losses.box == losses.classification == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_loss_is_float32_whatever_the_maps_are(dtype):
    loss = make_loss()
    assignment = loss.assign(make_targets([0, 1]), batch_size=2, image_hw=IMAGE_HW)
    maps = [level.requires_grad_() for level in make_maps(2, dtype=dtype)]
    losses = loss(maps, assignment)
    expected = loss([level.detach().float() for level in maps], assignment)
    assert losses.total.dtype == torch.float32
    assert losses.total == expected.total
    losses.total.backward()
    assert all(level.grad.dtype == dtype for level in maps)


def test_the_loss_is_the_same_bits_every_time():
    loss = make_loss()
    results = []
    for _ in range(3):
        maps = [level.requires_grad_() for level in make_maps(2)]
        assignment = loss.assign(make_targets([0] * 30 + [1] * 30), batch_size=2, image_hw=IMAGE_HW)
        loss(maps, assignment).total.backward()
        results.append([level.grad for level in maps])
    for again in results[1:]:
        assert all(torch.equal(ours, first) for ours, first in zip(again, results[0], strict=True))


@pytest.mark.parametrize(("label", "message"), [(3, r"class 3 is outside \[0, 3\)"), (-1, r"class -1 is outside")])
def test_a_class_outside_the_names_is_named(label, message):
    targets = make_targets([0])
    targets.labels[0] = label
    with pytest.raises(ValueError, match=message):
        make_loss().assign(targets, batch_size=1, image_hw=IMAGE_HW)


def test_an_image_outside_the_batch_is_named():
    with pytest.raises(ValueError, match=r"image index 2 is outside \[0, 2\)"):
        make_loss().assign(make_targets([0, 2]), batch_size=2, image_hw=IMAGE_HW)


def test_maps_of_another_size_than_assigned_are_refused():
    loss = make_loss()
    assignment = loss.assign(no_targets(), batch_size=2, image_hw=(96, 64))
    with pytest.raises(ValueError, match=r"level 0 has grid \(8, 12\), assigned was \(12, 8\)"):
        loss(make_maps(2), assignment)


def test_building_the_loss_twice_scales_the_gains_once():
    config = LossConfig()
    settings = {"strides": STRIDES[:2], "anchors": ANCHORS[:2], "num_classes": 2, "image_size": 320}
    first, second = (DetectionLoss(config, **settings) for _ in range(2))
    assert first.box_gain == second.box_gain == pytest.approx(0.05 * 1.5)
    assert first.class_gain == second.class_gain == pytest.approx(0.5 * 2 / 80 * 1.5)
    assert first.objectness_gain == second.objectness_gain == pytest.approx(0.25 * 1.5)
    assert first.balance == [4.0, 1.0]


def test_autobalance_leaves_the_weights_alone_in_validation_and_refuses_what_it_cannot_do():
    loss = make_loss(autobalance=True)
    maps, assignment = make_maps(1), loss.assign(no_targets(), batch_size=1, image_hw=IMAGE_HW)
    with torch.no_grad():
        loss(maps, assignment)
    assert loss.balance == [4.0, 1.0, 0.4]
    loss(maps, assignment)
    assert loss.balance != [4.0, 1.0, 0.4]
    with pytest.raises(ValueError, match="one process"):
        loss(maps, assignment, num_processes=2)
    with pytest.raises(ValueError, match="stride 16"):
        DetectionLoss(
            LossConfig(), strides=STRIDES[:1], anchors=ANCHORS[:1], num_classes=1, image_size=64, autobalance=True
        )


def test_detached_losses_hold_no_graph():
    loss = make_loss()
    maps = [level.requires_grad_() for level in make_maps(1)]
    losses = loss(maps, loss.assign(no_targets(), batch_size=1, image_hw=IMAGE_HW)).detach()
    assert not any(
        value.requires_grad for value in (losses.box, losses.objectness, losses.classification, losses.total)
    )
