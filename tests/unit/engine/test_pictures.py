"""The pictures of a run are drawn under YOLOv5's names, and a failure costs one warning."""

import logging

import pytest

from accel_yolo.data.dataset import val_loader
from accel_yolo.data.load import load_data
from accel_yolo.data.table import FlatTable
from accel_yolo.engine import pictures as module
from accel_yolo.engine.pictures import RunPictures


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "tiny.yaml"
    path.write_text("source: shapes\nnum_train: 6\nnum_val: 6\nimage_size: 64\nseed: 3\n")
    return load_data(str(path))


def test_labels_and_the_first_three_batches_are_drawn(tmp_path, data):
    pictures = RunPictures(tmp_path, names=data.names, enabled=True)
    pictures.labels(FlatTable(data.splits["train"].table))
    loader = val_loader(data.splits["val"].table, image_size=64, batch_size=1, stride=32)
    assert len(list(pictures.first_batches(loader, wanted=True))) == 6
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["labels.jpg", "labels_correlogram.jpg", *(f"train_batch{n}.jpg" for n in range(3))]


def test_nothing_is_drawn_when_pictures_are_off(tmp_path, data):
    pictures = RunPictures(tmp_path, names=data.names, enabled=False)
    pictures.labels(FlatTable(data.splits["train"].table))
    loader = [1, 2]
    assert pictures.first_batches(loader, wanted=True) is loader
    assert list(tmp_path.iterdir()) == []


def test_a_picture_that_fails_is_a_warning_and_not_the_end(tmp_path, data, monkeypatch, caplog):
    def broken(*_, **__):
        raise RuntimeError("no canvas")

    monkeypatch.setattr(module.plots, "plot_labels", broken)
    with caplog.at_level(logging.WARNING):
        RunPictures(tmp_path, names=data.names, enabled=True).labels(FlatTable(data.splits["train"].table))
    assert "labels.jpg could not be drawn: RuntimeError: no canvas" in caplog.text
