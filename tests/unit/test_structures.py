"""The types that flow check their lengths, move, and map boxes back."""

import numpy as np
import pytest
import torch

from accel_yolo.structures import Batch, Detections, Letterbox, Sample, SampleKey, Targets

KEY = SampleKey(epoch=0, place=3, index=1)


def targets(count: int) -> Targets:
    return Targets(
        image_index=torch.zeros(count, dtype=torch.int64),
        labels=torch.arange(count),
        boxes=torch.full((count, 4), 0.5),
    )


def test_a_sample_with_more_labels_than_boxes_is_refused():
    with pytest.raises(ValueError, match="1 boxes but 2 labels"):
        Sample(KEY, np.zeros((4, 4, 3), np.uint8), np.zeros((1, 4), np.float32), np.zeros(2, np.int64))


def test_a_sample_whose_boxes_have_five_columns_is_refused():
    with pytest.raises(ValueError, match=r"boxes must be \(N, 4\)"):
        Sample(KEY, np.zeros((4, 4, 3), np.uint8), np.zeros((2, 5), np.float32), np.zeros(2, np.int64))


def test_targets_of_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match="2 image indices"):
        Targets(torch.zeros(2), torch.zeros(3), torch.zeros(3, 4))


def test_detections_of_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match="2 boxes, 1 scores"):
        Detections(torch.zeros(2, 4), torch.zeros(1), torch.zeros(2))


def test_keep_selects_the_same_rows_of_all_three():
    detections = Detections(torch.arange(12.0).view(3, 4), torch.tensor([0.9, 0.8, 0.7]), torch.tensor([5, 6, 7]))
    kept = detections.keep(torch.tensor([True, False, True]))
    assert kept.labels.tolist() == [5, 7]
    assert kept.boxes[1].tolist() == [8.0, 9.0, 10.0, 11.0]
    assert len(kept) == 2


def test_boxes_return_to_the_original_image_and_are_clipped_to_it():
    # 100 x 200 px halved to 50 x 100, with 25 px of padding above.
    letterbox = Letterbox(original_size=(100, 200), input_size=(100, 100), scale=(0.5, 0.5), pad=(0.0, 25.0))
    boxes = torch.tensor([[10.0, 35.0, 30.0, 45.0], [-8.0, 0.0, 130.0, 99.0]])
    expected = [[20.0, 20.0, 60.0, 40.0], [0.0, 0.0, 200.0, 100.0]]
    assert letterbox.to_original(boxes).tolist() == expected


def test_no_boxes_return_as_no_boxes():
    letterbox = Letterbox(original_size=(10, 10), input_size=(10, 10), scale=(1.0, 1.0), pad=(0.0, 0.0))
    assert letterbox.to_original(torch.zeros(0, 4)).shape == (0, 4)


def test_a_moved_batch_moves_its_images_and_keeps_its_targets_on_the_cpu():
    batch = Batch(torch.zeros(2, 4, 4, 3, dtype=torch.uint8), targets(3), [KEY, KEY], [None, None])
    moved = batch.to("meta", non_blocking=True)
    assert moved.images.device.type == "meta"
    # Matching needs the number of objects, and reading it from an accelerator would make it wait.
    assert {moved.targets.image_index.device.type, moved.targets.boxes.device.type} == {"cpu"}
    assert moved.keys == batch.keys
    assert len(moved) == 2
    assert len(moved.targets) == 3


def test_two_draws_of_one_row_have_different_keys():
    assert SampleKey(0, 3, 1) != SampleKey(0, 4, 1)


def test_images_become_floats_between_zero_and_one_in_channels_last_memory():
    images = torch.randint(0, 256, (2, 8, 4, 3), dtype=torch.uint8)
    batch = Batch(images, targets(0), [KEY, KEY], [None, None])
    floats = batch.floats()
    assert floats.shape == (2, 3, 8, 4)
    assert floats.is_contiguous(memory_format=torch.channels_last)
    assert batch.floats(channels_last=False).is_contiguous()
    torch.testing.assert_close(floats[1, 2, 5, 3].item(), images[1, 5, 3, 2].item() / 255)
