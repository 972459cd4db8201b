"""Samples and batches: functions of their key, in whatever process they are made."""

import io
import shutil

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from accel_yolo.config.schema import AugmentConfig
from accel_yolo.data.dataset import DetectionDataset, collate, train_loader, val_loader
from accel_yolo.data.index import ScanOptions, index_split
from accel_yolo.data.table import Rows, build_table
from accel_yolo.structures import Sample, SampleKey

SIZES = [(60, 80), (80, 60), (64, 64), (50, 100), (90, 45)]
STILL = AugmentConfig(hsv_h=0.0, hsv_s=0.0, hsv_v=0.0, translate=0.0, scale=0.0, fliplr=0.0, mosaic=0.0)
WILD = AugmentConfig(degrees=5.0, mixup=0.5, flipud=0.5, shear=1.0)


def make_table(folder, sizes=SIZES, ignore=None, outlined=False):
    paths, boxes, labels = [], [], []
    for number, (height, width) in enumerate(sizes):
        pixels = np.random.default_rng(number).integers(0, 256, (6, 6, 3)).astype(np.uint8)
        path = folder / f"{number}.png"
        Image.fromarray(pixels).resize((width, height)).save(path)
        paths.append(str(path))
        boxes += [[5, 5, 25, 30], [10, 20, 40, 44]]
        labels += [number % 3, 2]
    rows = Rows(
        paths=paths,
        image_ids=[str(number) for number in range(len(sizes))],
        sizes_hw=np.array(sizes),
        offsets=np.arange(0, 2 * len(sizes) + 1, 2),
        boxes=np.array(boxes, float),
        labels=np.array(labels),
        ignore=ignore,
        segments=[[np.array([[x1, y1], [x2, y1], [x2, y2]])] for x1, y1, x2, y2 in boxes] if outlined else None,
    )
    return build_table(rows, ["a", "b", "c"])


@pytest.fixture
def table(tmp_path):
    return make_table(tmp_path)


def loader(table, workers=0, start_method=None, **settings):
    values = {"image_size": 64, "batch_size": 4, "stride": 32, "augment": WILD, "seed": 1, **settings}
    return train_loader(table, workers=workers, start_method=start_method, **values)


def contents(batches):
    return [
        (
            batch.images.numpy().tobytes(),
            batch.targets.boxes.numpy().tobytes(),
            batch.targets.labels.tolist(),
            batch.keys,
        )
        for batch in batches
    ]


def test_samples_are_the_same_bytes_without_and_with_workers(table):
    assert contents(loader(table, workers=2)) == contents(loader(table)) == contents(loader(table))


def test_spawned_workers_make_the_same_bytes(table):
    assert contents(loader(table, workers=1, start_method="spawn")) == contents(loader(table))


def test_persistent_workers_learn_the_epoch_from_the_keys(table):
    persistent, plain = loader(table, workers=1), loader(table)
    for epoch in range(2):
        persistent.sampler.set_epoch(epoch)
        plain.sampler.set_epoch(epoch)
        assert contents(persistent) == contents(plain)


def test_two_draws_of_one_image_differ_by_place_and_by_epoch(table):
    dataset = DetectionDataset(table, image_size=64, augment=WILD, seed=0)
    images = [dataset[key].image.tobytes() for key in (SampleKey(0, 0, 2), SampleKey(0, 1, 2), SampleKey(1, 0, 2))]
    assert len(set(images)) == 3
    assert dataset[SampleKey(0, 0, 2)].image.tobytes() == images[0]


def test_the_seed_of_the_run_matters(table):
    first, second = (DetectionDataset(table, image_size=64, augment=WILD, seed=seed) for seed in (0, 1))
    assert not np.array_equal(first[SampleKey(0, 0, 0)].image, second[SampleKey(0, 0, 0)].image)


def test_without_chance_training_is_the_letterboxed_image(table):
    training = DetectionDataset(table, image_size=128, augment=STILL)[SampleKey(0, 0, 0)]
    assert training.image.shape == (128, 128, 3)
    np.testing.assert_allclose(
        training.boxes, np.array([[5, 5, 25, 30], [10, 20, 40, 44]]) * 1.6 + [0, 16, 0, 16], rtol=1e-6
    )
    assert (training.image[:16] == 114).all()


def test_switching_colour_on_leaves_the_geometry_alone(table):
    plain = AugmentConfig(hsv_h=0.0, hsv_s=0.0, hsv_v=0.0, mixup=0.0)
    coloured = AugmentConfig(mixup=0.0)
    first, second = (
        DetectionDataset(table, image_size=64, augment=augment)[SampleKey(0, 3, 1)] for augment in (plain, coloured)
    )
    np.testing.assert_array_equal(first.boxes, second.boxes)
    assert not np.array_equal(first.image, second.image)


@pytest.mark.parametrize("mixup", [0.0, 1.0])
def test_switching_pasting_on_adds_objects_and_leaves_the_geometry_alone(tmp_path, mixup):
    table = make_table(tmp_path, outlined=True)
    added = 0
    for place in range(8):
        alone, pasted = (
            DetectionDataset(table, image_size=64, augment=AugmentConfig(mixup=mixup, copy_paste=share))[
                SampleKey(0, place, place % 5)
            ]
            for share in (0.0, 1.0)
        )
        added += len(pasted.boxes) - len(alone.boxes)
        found = {tuple(box) for box in pasted.boxes.tolist()}
        assert all(tuple(box) in found for box in alone.boxes.tolist())
    assert added > 0


def test_mixup_keeps_the_objects_of_both_mosaics(table):
    alone = AugmentConfig(mixup=0.0, fliplr=0.0)
    mixed = AugmentConfig(mixup=1.0, fliplr=0.0)
    for place in range(5):
        key = SampleKey(0, place, place)
        first, both = (DetectionDataset(table, image_size=64, augment=augment)[key] for augment in (alone, mixed))
        count = len(first.labels)
        np.testing.assert_array_equal(both.boxes[:count], first.boxes)
        np.testing.assert_array_equal(both.labels[:count], first.labels)
    totals = [
        len(DetectionDataset(table, image_size=64, augment=augment)[SampleKey(0, 1, 1)].labels)
        for augment in (alone, mixed)
    ]
    assert totals[1] > totals[0]


def test_without_mosaic_there_is_no_mixup(table):
    augment = AugmentConfig(mosaic=0.0, mixup=1.0)
    plain = AugmentConfig(mosaic=0.0, mixup=0.0)
    first, second = (
        DetectionDataset(table, image_size=64, augment=value)[SampleKey(0, 0, 0)] for value in (augment, plain)
    )
    np.testing.assert_array_equal(first.image, second.image)


def test_mosaic_partners_are_any_images_of_the_table(table):
    dataset = DetectionDataset(table, image_size=64, augment=AugmentConfig(), seed=0)
    asked = []
    load = dataset._load
    dataset._load = lambda row, reduction=1: asked.append(row) or load(row, reduction)
    for place in range(60):
        dataset[SampleKey(0, place, 0)]
    assert set(asked) == set(range(len(SIZES)))


def test_ignored_objects_are_not_learned(tmp_path):
    ignore = np.zeros(10, bool)
    ignore[0] = True
    dataset = DetectionDataset(make_table(tmp_path, ignore=ignore), image_size=64)
    assert dataset[SampleKey(0, 0, 0)].labels.tolist() == [2]


def test_validation_maps_back_to_the_original_boxes(table):
    dataset = DetectionDataset(table, image_size=64)
    for row, input_size in ((0, (64, 96)), (1, (96, 64)), (4, None)):
        sample = dataset[SampleKey(0, 0, row, input_size)]
        assert sample.image.shape[:2] == (input_size or (64, 64))
        back = sample.letterbox.to_original(torch.from_numpy(sample.boxes).double())
        np.testing.assert_allclose(back.numpy(), [[5, 5, 25, 30], [10, 20, 40, 44]], atol=1e-4)


@pytest.mark.parametrize("augment", [None, STILL, AugmentConfig()])
def test_a_file_that_broke_after_the_scan_is_grey_without_labels_and_told_once(tmp_path, caplog, augment):
    table = make_table(tmp_path, sizes=[(60, 80)])
    (tmp_path / "0.png").write_bytes(b"gone bad")
    dataset = DetectionDataset(table, image_size=64, augment=augment)
    for place in range(3):
        sample = dataset[SampleKey(0, place, 0)]
        assert len(sample.labels) == 0 and len(np.unique(sample.image)) == 1
    assert len(caplog.records) == 1 and "0.png" in caplog.text


def test_a_file_that_vanished_or_changed_its_size_is_grey(tmp_path, caplog):
    table = make_table(tmp_path)
    (tmp_path / "0.png").unlink()
    shutil.copy(tmp_path / "2.png", tmp_path / "1.png")
    dataset = DetectionDataset(table, image_size=64)
    assert all((dataset[SampleKey(0, row, row)].image == 114).all() for row in (0, 1))
    assert "64 x 64 px, was 60 x 80" in caplog.text


def test_truncated_images_are_shown_as_far_as_they_go_if_asked_for(tmp_path):
    pixels = np.random.default_rng(0).integers(100, 256, (64, 64, 3)).astype(np.uint8)
    path = tmp_path / "a.jpg"
    Image.fromarray(pixels).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    rows = Rows(
        paths=[str(path)],
        image_ids=["a"],
        sizes_hw=np.array([[64, 64]]),
        offsets=np.array([0, 1]),
        boxes=np.array([[0.0, 0, 30, 30]]),
        labels=np.array([0]),
    )
    strict, lenient = (
        DetectionDataset(build_table(rows, ["a"]), image_size=64, lenient=lenient)[SampleKey(0, 0, 0)]
        for lenient in (False, True)
    )
    assert len(strict.labels) == 0 and len(lenient.labels) == 1
    assert lenient.image[:16].std() > 10 and (strict.image == 114).all()


def test_upright_pixels_meet_upright_sizes(tmp_path):
    # Stored lying, shown standing: the white corner must be where the box of the upright image is.
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.zeros((40, 80, 3), np.uint8)
    pixels[:20, :40] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    rows = Rows(
        paths=[str(tmp_path / "a.png")],
        image_ids=["a"],
        sizes_hw=np.array([[80, 40]]),
        offsets=np.array([0, 1]),
        boxes=np.array([[20.0, 0, 40, 40]]),
        labels=np.array([0]),
    )
    sample = DetectionDataset(build_table(rows, ["a"]), image_size=80)[SampleKey(0, 0, 0)]
    left, top, right, bottom = sample.boxes[0].astype(int)
    inside = sample.image[top + 1 : bottom - 1, left + 1 : right - 1]
    assert (inside == 255).all() and (sample.image == 255).sum() == 20 * 40 * 3


def test_images_in_the_table_are_read_from_it():
    buffer = io.BytesIO()
    Image.fromarray(np.full((20, 30, 3), 7, np.uint8)).save(buffer, "PNG")
    rows = Rows(
        ["a"],
        ["a"],
        np.array([[20, 30]]),
        np.array([0, 0]),
        np.zeros((0, 4)),
        np.zeros(0, int),
        contents=[buffer.getvalue()],
    )
    sample = DetectionDataset(build_table(rows, ["a"]), image_size=30)[SampleKey(0, 0, 0)]
    assert (sample.image[5:25] == 7).all() and sample.boxes.shape == (0, 4)


@pytest.mark.parametrize("orientation", [1, 6])
def test_boxes_of_an_avif_photograph_lie_on_its_objects(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = np.zeros((40, 80, 3), np.uint8)
    pixels[:20, :40] = 255
    Image.fromarray(pixels).save(tmp_path / "a.avif", quality=100, exif=exif)
    # The white corner is the upper left one, or the upper right one of the image turned clockwise.
    box = "0 0.25 0.25 0.5 0.5" if orientation == 1 else "0 0.75 0.25 0.5 0.5"
    (tmp_path / "a.txt").write_text(box)
    table, _ = index_split(
        [tmp_path / "a.avif"],
        split="train",
        options=ScanOptions(names=("a",)),
        cache_folder=tmp_path / "cache",
        slot="x",
    )
    sample = DetectionDataset(table, image_size=80)[SampleKey(0, 0, 0)]
    left, top, right, bottom = sample.boxes[0].astype(int)
    assert (right - left) * (bottom - top) == 20 * 40
    assert (sample.image[top + 2 : bottom - 2, left + 2 : right - 2] > 245).all()
    assert (sample.image > 245).sum() <= 3 * (20 + 2) * (40 + 2)


@pytest.mark.parametrize("pin_memory", [False, True])
def test_memory_is_pinned_for_whoever_asks_and_not_because_a_gpu_is_there(table, monkeypatch, pin_memory):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = {"pin_memory": True} if pin_memory else {}
    assert loader(table, **asked).pin_memory is pin_memory
    assert val_loader(table, image_size=64, batch_size=2, stride=32, **asked).pin_memory is pin_memory


@pytest.mark.parametrize("workers", [0, 1])
def test_without_workers_this_process_decodes_with_one_thread(table, workers):
    before = cv2.getNumThreads()
    try:
        cv2.setNumThreads(2)
        loader(table, workers=workers)
        assert cv2.getNumThreads() == (2 if workers else 1)
    finally:
        cv2.setNumThreads(before)


def test_collating_normalises_and_stays_inside():
    image = np.zeros((32, 64, 3), np.uint8)
    first = Sample(SampleKey(0, 0, 5), image, np.array([[0, 0, 64, 32]], np.float32), np.array([1]))
    empty = Sample(SampleKey(0, 1, 6), image, np.zeros((0, 4), np.float32), np.zeros(0, np.int64))
    third = Sample(SampleKey(0, 2, 7), image, np.array([[16, 8, 48, 24]], np.float32), np.array([2]))
    batch = collate([first, empty, third])
    assert batch.images.shape == (3, 32, 64, 3) and batch.images.dtype == torch.uint8
    assert batch.targets.image_index.tolist() == [0, 2] and batch.targets.labels.tolist() == [1, 2]
    assert batch.targets.boxes[1].tolist() == [0.5, 0.5, 0.5, 0.5]
    assert batch.targets.boxes[0, 2:].tolist() == pytest.approx([1 - 0.001 / 64, 1 - 0.001 / 32])
    assert [key.index for key in batch.keys] == [5, 6, 7]
    assert len(collate([empty]).targets) == 0


def test_validation_batches_share_one_shape_and_show_each_image_once(table):
    batches = [
        batch
        for rank in range(2)
        for batch in val_loader(table, image_size=64, batch_size=2, stride=32, rank=rank, world=2)
    ]
    assert sorted(key.index for batch in batches for key in batch.keys) == list(range(5))
    assert all(batch.images.shape[1:3] == batch.keys[0].input_size for batch in batches)


def test_rectangular_training_batches_have_their_own_shape(table):
    shapes = [tuple(batch.images.shape) for batch in loader(table, batch_size=2, rect=True)]
    assert shapes[0] == (2, 64, 64, 3) or shapes[0][1] < shapes[0][2]
    assert len(shapes) == 3
