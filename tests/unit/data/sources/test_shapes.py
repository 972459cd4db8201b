"""The demo set: the same from the same seed, its boxes exact, drawn with a bounded effort."""

import io

import numpy as np
import pytest
from PIL import Image

from accel_yolo.data.sources import shapes
from accel_yolo.data.sources.shapes import NAMES, draw_image, read_shapes
from accel_yolo.data.table import FlatTable, judge
from accel_yolo.data.transforms import decode_image
from accel_yolo.errors import ConfigError


@pytest.fixture(scope="module")
def small():
    return read_shapes({"num_train": 40, "num_val": 10, "image_size": 96})


def test_both_splits_keep_the_contract_and_show_all_classes(small):
    for split, count in (("train", 40), ("val", 10)):
        table, report = small[split]
        assert len(table) == report.images == count
        flat = FlatTable(table)
        counts = np.diff(flat.offsets)
        judgement = judge(flat.boxes, np.repeat(flat.sizes_hw, counts, axis=0))
        assert not judgement.reasons and not judgement.clipped.any()
        assert report.boxes == len(flat.labels) and set(flat.labels.tolist()) == {0, 1, 2}
        assert flat.names == list(NAMES)
        assert counts.min() >= 1 and counts.max() <= 6


def test_images_decode_to_the_stated_size(small):
    flat = FlatTable(small["train"].table)
    assert decode_image(flat.image_bytes(0)).shape == (96, 96, 3)
    assert Image.open(io.BytesIO(flat.image_bytes(3).tobytes())).size == (96, 96)


def test_the_same_seed_draws_the_same_bytes_and_another_does_not(small):
    again = read_shapes({"num_train": 40, "num_val": 10, "image_size": 96})
    other = read_shapes({"num_train": 40, "num_val": 10, "image_size": 96, "seed": 1})
    assert again["val"].table[5] == small["val"].table[5]
    assert other["val"].table[5]["image"]["bytes"] != small["val"].table[5]["image"]["bytes"]
    assert small["train"].table[5]["image"]["bytes"] != small["val"].table[5]["image"]["bytes"]


def test_a_longer_set_starts_with_the_shorter_one(small):
    longer = read_shapes({"num_train": 1, "num_val": 20, "image_size": 96})
    assert longer["val"].table[:10]["image"] == small["val"].table[:10]["image"]


def test_sizes_are_within_their_range(small):
    flat = FlatTable(small["train"].table)
    longest = (flat.boxes[:, 2:] - flat.boxes[:, :2]).max(axis=1) / 96
    assert longest.min() > 0.13 and longest.max() < 0.52


def test_a_box_is_full_of_its_object():
    # The mean colour inside a box differs from that of the frame around it.
    differences = []
    for seed in range(20):
        image, boxes, _ = draw_image(160, np.random.default_rng(seed))
        for left, top, right, bottom in boxes.astype(int):
            middle = image[(top + bottom) // 2, (left + right) // 2].astype(int)
            differences.append(np.abs(middle - np.median(image.reshape(-1, 3), axis=0)).max())
    assert np.mean(np.array(differences) > 25) > 0.9


def test_few_shapes_are_tried_in_vain(monkeypatch):
    tried = []
    outline = shapes._outline
    monkeypatch.setattr(shapes, "_outline", lambda *arguments: tried.append(1) or outline(*arguments))
    drawn = sum(len(draw_image(96, np.random.default_rng(seed))[2]) for seed in range(60))
    assert drawn <= len(tried) <= 6 * drawn


@pytest.mark.parametrize("settings", [{"num_trains": 3}, {"num_train": 0}, {"seed": -1}, {"image_size": "big"}])
def test_wrong_settings_are_told(settings):
    with pytest.raises(ConfigError):
        read_shapes(settings)
