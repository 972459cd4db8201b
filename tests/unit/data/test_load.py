"""From the name of a data set to its splits."""

import logging

import numpy as np
import pytest
from PIL import Image

from accel_yolo.data.load import load_data
from accel_yolo.data.table import FlatTable, class_names, judge
from accel_yolo.errors import AccelYoloError, ConfigError, DataError


@pytest.fixture
def make_set(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(text="names: [cat, dog]\n", train=("0 0.5 0.5 0.2 0.2", "1 0.5 0.5 0.2 0.2"), val=("",)):
        for split, labels in (("train", train), ("val", val)):
            for number, rows in enumerate(labels):
                image = tmp_path / "images" / split / f"{number}.png"
                label = tmp_path / "labels" / split / f"{number}.txt"
                for path in (image, label):
                    path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(image)
                label.write_text(rows)
        path = tmp_path / "data.yaml"
        path.write_text("train: images/train\nval: images/val\n" + text)
        return str(path)

    return make


def test_a_yaml_becomes_its_splits(make_set, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    data = load_data(make_set())
    assert list(data.splits) == ["train", "val"] and data.names == {0: "cat", 1: "dog"}
    assert len(data.splits["train"].table) == 2 and data.reports["val"].background == 1
    assert "train: 2 images, 2 boxes" in caplog.text
    assert (tmp_path / "cache" / "accel_yolo" / "index").is_dir()


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("start", ["first", "cached"])
def test_what_was_left_out_is_one_warning_a_split_with_counts_and_places(make_set, tmp_path, caplog, start):
    good = "0 0.5 0.5 0.2 0.2"
    path = make_set(
        train=(f"{good}\n0 0.5\n{good}\n0 0.5 0.5 0 0\n-1 0.5 0.5 0.2 0.2", good, good), val=(good, "1.5 1 1 1 1")
    )
    (tmp_path / "images/train/2.png").write_bytes(b"broken")
    if start == "cached":
        load_data(path)
        caplog.clear()
    load_data(path)
    told = warnings(caplog)
    assert len(told) == 2
    assert told[0].startswith("train: rejected label rows: 3, duplicate label rows: 1, damaged images (left out): 1. F")
    labels = tmp_path / "labels/train/0.txt"
    image = tmp_path / "images/train/2.png"
    assert f"First: {image}: not an image, or of an unknown format; {labels}:2: 2 columns" in told[0]
    assert f"{labels}:3: the same row as line 1. The whole list" in told[0]
    assert "data.json of the run folder" in told[0]
    assert told[1].startswith("val: rejected label rows: 1. First: ")


def test_clipped_boxes_alone_are_no_warning(make_set, caplog):
    caplog.set_level(logging.INFO)
    load_data(make_set(val=("0 0.01 0.5 0.03 0.2",)))
    assert warnings(caplog) == [] and "val: 1 images, 1 boxes, 1 clipped" in caplog.text


def test_a_validation_split_that_measures_nothing_is_one_warning(make_set, tmp_path, caplog):
    load_data(make_set(val=("",)))
    assert warnings(caplog) == ["val: no image has a usable box, so nothing can be measured on it"]
    caplog.clear()
    (tmp_path / "images/val/0.png").unlink()
    load_data(make_set(val=()), splits=("val",))
    assert warnings(caplog) == ["val: no image has a usable box, so nothing can be measured on it"]


def test_a_source_beside_the_usual_keys_only_says_where_a_set_came_from(make_set):
    assert load_data(make_set("names: [cat, dog]\nsource: https://example.org\n")).names == {0: "cat", 1: "dog"}


def test_a_data_file_that_cannot_be_read_is_told(tmp_path):
    for name, content in (("bytes.yaml", b"\xff\xfe\x00"), ("date.yaml", b"train: a\ndate: 2024-13-45\n")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match="cannot be read") as caught:
            load_data(str(tmp_path / name))
        assert name in caught.value.found


def test_only_what_was_asked_for_is_read(make_set):
    path = make_set("names: [cat, dog]\ntest: gone\n")
    assert list(load_data(path).splits) == ["train", "val"]
    assert list(load_data(path, splits=("val",)).splits) == ["val"]
    with pytest.raises(DataError, match="not where the data file says"):
        load_data(path, splits=None)


def test_the_index_folder_can_be_chosen(make_set, tmp_path):
    load_data(make_set(), index_cache=str(tmp_path / "chosen"))
    assert (tmp_path / "chosen").is_dir() and not (tmp_path / "cache").exists()


def test_one_class_is_called_item_unless_there_is_but_one(make_set):
    merged = load_data(make_set(), single_cls=True)
    assert merged.names == {0: "item"} and FlatTable(merged.splits["train"].table).labels.tolist() == [0, 0]
    assert load_data(make_set("names: [cell]\n"), single_cls=True).names == {0: "cell"}


def test_training_needs_an_image_and_a_box(make_set, tmp_path):
    with pytest.raises(DataError, match="no training image has a usable box") as caught:
        load_data(make_set(train=("", "0 0.5 0.5 0 0")))
    assert "labels/train/0.txt" in caught.value.fix
    empty = tmp_path / "empty.yaml"
    (tmp_path / "nothing").mkdir()
    empty.write_text("train: nothing\nval: nothing\nnames: [cat]\n")
    with pytest.raises(DataError, match="no image to train on"):
        load_data(str(empty))


def test_the_shapes_need_no_files():
    data = load_data("shapes")
    assert data.names == {0: "circle", 1: "square", 2: "triangle"}
    assert (len(data.splits["train"].table), len(data.splits["val"].table)) == (400, 100)
    assert data.splits["val"].table[0]["width"] == 160


def test_the_shapes_can_be_one_class(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("source: shapes\nnum_train: 4\nnum_val: 2\nimage_size: 64\n")
    data = load_data(str(path), single_cls=True)
    assert data.names == {0: "item"} and class_names(data.splits["val"].table) == ["item"]
    assert data.reports["val"].classes == ("item",)
    with pytest.raises(DataError, match="no `test` split"):
        load_data(str(path), splits=("test",))


def test_an_unknown_source_or_file_is_told(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("source: circles\n")
    with pytest.raises(ConfigError, match="unknown source"):
        load_data(str(path))
    with pytest.raises(AccelYoloError):
        load_data("no-such-set.yaml")


def test_blood_cells_are_364_images_and_4886_boxes(test_data_dir, tmp_path):
    data = load_data(str(test_data_dir / "bccd" / "data.yaml"), splits=None, index_cache=str(tmp_path))
    found = {split: (report.images, report.boxes, report.rejected) for split, report in data.reports.items()}
    assert found == {"train": (205, 2804, 1), "val": (87, 1137, 1), "test": (72, 945, 0)}
    assert all("no area" in finding.reason for report in data.reports.values() for finding in report.findings)


def test_real_sets_keep_the_contract(test_data_dir, tmp_path):
    for name, boxes in (("coco_sample", (465, 377)), ("coco8", (13, 17))):
        data = load_data(str(test_data_dir / name / "data.yaml"), index_cache=str(tmp_path))
        assert tuple(report.boxes for report in data.reports.values()) == boxes
        for table, _ in data.splits.values():
            flat = FlatTable(table)
            judgement = judge(flat.boxes, np.repeat(flat.sizes_hw, np.diff(flat.offsets), axis=0))
            assert not judgement.reasons and not judgement.clipped.any()


def test_polygons_of_real_images_enclose_the_same_objects(test_data_dir, tmp_path):
    source = test_data_dir / "coco_sample"
    for kind in ("labels", "labels_segments"):
        root = tmp_path / kind
        (root / "images").mkdir(parents=True)
        (root / "labels").mkdir()
        (root / "images" / "val2017").symlink_to(source / "images" / "val2017")
        (root / "labels" / "val2017").symlink_to(source / kind / "val2017")
        (root / "data.yaml").write_text(f"val: images/val2017\nnames: {[f'c{number}' for number in range(80)]}\n")
    boxes, outlines = (
        FlatTable(
            load_data(str(tmp_path / kind / "data.yaml"), splits=("val",), index_cache=str(tmp_path))
            .splits["val"]
            .table
        )
        for kind in ("labels", "labels_segments")
    )
    assert any(outline is not None for row in range(len(outlines)) for outline in outlines.segments(row))
    assert not any(outline is not None for row in range(len(boxes)) for outline in boxes.segments(row))
    assert sorted(boxes.labels.tolist()) == sorted(outlines.labels.tolist())


def test_rotated_photographs_have_their_upright_size(test_data_dir, tmp_path):
    path = tmp_path / "data.yaml"
    path.write_text(f"val: {test_data_dir / 'exif_rotated'}\nnames: [thing]\n")
    table = load_data(str(path), splits=("val",), index_cache=str(tmp_path)).splits["val"].table
    sizes = {row["image_id"]: (row["width"], row["height"]) for row in table}
    assert sizes == {"Landscape_3": (1800, 1200), "Landscape_6": (1800, 1200), "Portrait_8": (1200, 1800)}
