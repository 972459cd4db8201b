"""Data YAMLs as people write them, lists of images, and label rows of every kind."""

import logging
import os
from pathlib import Path

import numpy as np
import pytest

from accel_yolo.data.sources import yolo_txt
from accel_yolo.data.sources.yolo_txt import (
    IMAGE_SUFFIXES,
    find_images,
    image_ids,
    label_path,
    load_yaml,
    parse_labels,
    read_spec,
)
from accel_yolo.errors import ConfigError, DataError


def touch(*paths):
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def spec_of(folder, text):
    file = folder / "data.yaml"
    file.write_text(text)
    return read_spec(file, load_yaml(file))


BASE = "train: images/train\nval: images/val\nnames: [cat, dog]\n"


def test_a_folder_is_searched_to_the_bottom_and_sorted(tmp_path):
    touch(tmp_path / "images/train/b.jpg", tmp_path / "images/train/deep/A.PNG", tmp_path / "images/train/notes.txt")
    spec = spec_of(tmp_path, BASE)
    assert find_images(spec, "train") == [tmp_path / "images/train/b.jpg", tmp_path / "images/train/deep/A.PNG"]


def test_path_is_relative_to_the_yaml_before_the_working_directory(tmp_path, monkeypatch):
    here, there = tmp_path / "cwd", tmp_path / "set"
    touch(here / "data/images/train/cwd.jpg", there / "data/images/train/yaml.jpg")
    monkeypatch.chdir(here)
    text = "path: data\n" + BASE
    assert [path.name for path in find_images(spec_of(there, text), "train")] == ["yaml.jpg"]
    other = tmp_path / "other"
    other.mkdir()
    assert [path.name for path in find_images(spec_of(other, text), "train")] == ["cwd.jpg"]


def test_a_split_may_be_a_list_of_folders(tmp_path):
    touch(tmp_path / "one/a.jpg", tmp_path / "two/b.jpg")
    spec = spec_of(tmp_path, "train: [one, two]\nval: one\nnames: {0: cat}\n")
    assert [path.name for path in find_images(spec, "train")] == ["a.jpg", "b.jpg"]


def test_lines_of_a_list_start_at_the_list_at_path_or_in_the_working_directory(tmp_path, monkeypatch):
    listed, root, here = tmp_path / "set/lists", tmp_path / "set/root", tmp_path / "cwd"
    touch(listed / "near.jpg", root / "images/rooted.jpg", here / "cwd.jpg", tmp_path / "absolute.jpg")
    monkeypatch.chdir(here)
    lines = ["./near.jpg", "images/rooted.jpg", "", "cwd.jpg", str(tmp_path / "absolute.jpg"), "gone.jpg"]
    (listed / "train.txt").write_bytes("\r\n".join(lines).encode())
    spec = spec_of(tmp_path / "set", "path: root\ntrain: ../lists/train.txt\nval: images\nnames: [cat]\n")
    found = set(find_images(spec, "train"))
    assert found == {
        listed / "near.jpg",
        root / "images/rooted.jpg",
        here / "cwd.jpg",
        tmp_path / "absolute.jpg",
        # Not there: the scan reports it.
        root / "gone.jpg",
    }


def test_exports_that_step_out_of_their_own_folder_are_found(tmp_path):
    touch(tmp_path / "train/images/a.jpg")
    spec = spec_of(tmp_path, "train: ../train/images\nval: ../valid/images\nnames: [cat]\nroboflow: {version: 1}\n")
    assert [path.name for path in find_images(spec, "train")] == ["a.jpg"]


def test_a_missing_folder_shows_the_tried_paths_and_the_folders_that_exist(tmp_path, monkeypatch):
    here = tmp_path / "cwd"
    here.mkdir()
    monkeypatch.chdir(here)
    touch(tmp_path / "set/valid/images/a.jpg")
    spec = spec_of(tmp_path / "set", "train: valid/images\nval: val/images\nnames: [cat]\ndownload: curl x | sh\n")
    with pytest.raises(DataError) as caught:
        find_images(spec, "val")
    assert str(tmp_path / "set/val/images") in caught.value.found and str(here / "val/images") in caught.value.found
    assert str(tmp_path / "set/valid/images") in caught.value.fix
    assert "never executed" in caught.value.fix


def refuse_scandir(monkeypatch, name):
    scandir = os.scandir

    def refusing(folder):
        if os.fspath(folder).endswith(name):
            raise PermissionError(13, "Permission denied", os.fspath(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refusing)


def test_a_forbidden_folder_beside_a_missing_one_is_passed_over(tmp_path, monkeypatch):
    touch(tmp_path / "private/a.jpg", tmp_path / "photos/a.jpg")
    refuse_scandir(monkeypatch, "private")
    with pytest.raises(DataError) as caught:
        find_images(spec_of(tmp_path, BASE), "train")
    assert str(tmp_path / "photos") in caught.value.fix and "private" not in caught.value.fix


def test_folders_are_suggested_from_beside_the_data_file_and_never_from_the_working_directory(tmp_path, monkeypatch):
    home = tmp_path / "home"
    touch(home / "holidays/a.jpg", tmp_path / "set/deep/photos/a.jpg", tmp_path / "set/a/b/too_deep/a.jpg")
    monkeypatch.chdir(home)
    with pytest.raises(DataError) as caught:
        find_images(spec_of(tmp_path / "set", BASE), "train")
    assert str(tmp_path / "set/deep/photos") in caught.value.fix
    assert "holidays" not in caught.value.fix and "too_deep" not in caught.value.fix


def test_the_search_for_folders_to_suggest_ends_early(tmp_path, monkeypatch):
    for number in range(12):
        (tmp_path / f"{number:02d}/sub").mkdir(parents=True)
    listed = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: listed.append(folder) or scandir(folder))
    monkeypatch.setattr(yolo_txt, "_ADVICE_FOLDERS", 15)
    with pytest.raises(DataError, match="not where the data file says"):
        find_images(spec_of(tmp_path, BASE), "train")
    assert len(listed) == 15


def test_a_forbidden_folder_inside_a_split_is_an_error_and_not_a_smaller_split(tmp_path, monkeypatch):
    touch(tmp_path / "images/train/a.jpg", tmp_path / "images/train/private/b.jpg")
    refuse_scandir(monkeypatch, "private")
    with pytest.raises(DataError, match="cannot be read") as caught:
        find_images(spec_of(tmp_path, BASE), "train")
    assert str(tmp_path / "images/train/private") in caught.value.found


def test_a_link_to_a_folder_above_multiplies_no_image(tmp_path):
    train = tmp_path / "images/train"
    touch(train / "a.jpg", train / "deep/b.jpg")
    (train / "deep/up").symlink_to(train)
    assert find_images(spec_of(tmp_path, BASE), "train") == [train / "a.jpg", train / "deep/b.jpg"]


def test_linked_folders_are_followed_and_real_ones_keep_their_own_paths(tmp_path):
    train = tmp_path / "images/train"
    touch(train / "real/a.jpg", tmp_path / "elsewhere/b.jpg")
    (train / "also_real").symlink_to(train / "real")
    (train / "linked").symlink_to(tmp_path / "elsewhere")
    assert find_images(spec_of(tmp_path, BASE), "train") == [train / "linked/b.jpg", train / "real/a.jpg"]


def test_a_name_too_long_for_a_file_is_told_and_not_a_crash(tmp_path):
    with pytest.raises(DataError, match="not where the data file says"):
        find_images(spec_of(tmp_path, f"train: {'x' * 300}\nval: b\nnames: [cat]\n"), "train")


@pytest.mark.parametrize("line", ['{"images": ["' + "x" * 300, "a\0.jpg", "..", "/"])
def test_a_line_of_a_list_that_is_no_path_is_named(tmp_path, line):
    touch(tmp_path / "a.jpg")
    (tmp_path / "train.txt").write_text(f"a.jpg\n{line}\n")
    with pytest.raises(DataError) as caught:
        find_images(spec_of(tmp_path, "train: train.txt\nval: b\nnames: [cat]\n"), "train")
    assert f"{tmp_path / 'train.txt'}:2: " in caught.value.found and len(caught.value.found) < 300


def test_a_list_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    (tmp_path / "train.txt").write_bytes(b"\xff\xfe")
    spec = spec_of(tmp_path, "train: train.txt\nval: b\nnames: [cat]\n")
    with pytest.raises(DataError, match="list of images cannot be read"):
        find_images(spec, "train")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(DataError, match="Permission denied"):
        find_images(spec, "train")


def test_only_formats_that_are_decoded_count_as_images():
    assert ".avif" in IMAGE_SUFFIXES and not IMAGE_SUFFIXES & {".heic", ".heif"}


def test_a_split_that_the_yaml_lacks_is_told(tmp_path):
    with pytest.raises(DataError, match="no `test` images"):
        find_images(spec_of(tmp_path, BASE), "test")


def test_names_may_be_a_list_or_a_mapping_in_any_order(tmp_path):
    assert spec_of(tmp_path, BASE + "nc: 2\n").names == ("cat", "dog")
    assert spec_of(tmp_path, "train: a\nval: b\nnames:\n  1: dog\n  0: 7\n").names == ("7", "dog")


def test_a_wrong_number_of_classes_is_ignored_with_a_warning(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    assert spec_of(tmp_path, "train: a\nval: b\nnc: 3\nnames: [cat, dog]\n").names == ("cat", "dog")
    assert "nc: 3 but has 2 names" in caplog.text and str(tmp_path / "data.yaml") in caplog.text


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("train: a\nval: b\n", "no class names"),
        ("train: a\nval: b\nnames: []\n", "no class names"),
        ("train: a\nval: b\nnames: {1: cat, 2: dog}\n", "not 0, 1, 2"),
        ("train: a\nval: b\nnames: [cat, cat]\n", "same name"),
        ("train: a\nval: b\nnames: [yes, no]\n", "not a word"),
        ("train: {a: b}\nval: b\nnames: [cat]\n", "neither a path"),
        ("path: [a]\ntrain: a\nval: b\nnames: [cat]\n", "not a path"),
        ("- a\n- b\n", "`key: value` lines"),
        ("train: [a\n", "not valid YAML"),
        ("path: C:\\data: x\n", "not valid YAML"),
    ],
)
def test_a_wrong_value_is_a_data_error(tmp_path, text, what):
    with pytest.raises(DataError, match=what):
        spec_of(tmp_path, text)


def test_an_unknown_key_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError) as caught:
        spec_of(tmp_path, BASE + "nams: [cat]\n")
    assert "names" in caught.value.fix


def test_a_keypoint_set_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="keypoints") as caught:
        spec_of(tmp_path, BASE + "kpt_shape: [17, 3]\n")
    assert "kpt_shape" in caught.value.found


def test_the_last_images_folder_becomes_labels():
    assert label_path(Path("/images/set/images/train/a.b.jpg")) == Path("/images/set/labels/train/a.b.txt")
    assert label_path(Path("/set/photos/a.jpg")) == Path("/set/photos/a.txt")
    # A file of that name is not a folder.
    assert label_path(Path("/set/images")) == Path("/set/images.txt")


def test_image_ids_are_stems_unless_two_images_share_one():
    assert image_ids([Path("/a/x.jpg"), Path("/b/y.jpg")]) == ["x", "y"]
    assert image_ids([Path("/s/a/x.jpg"), Path("/s/b/x.jpg")]) == ["a/x", "b/x"]


def test_images_that_differ_by_suffix_alone_have_their_own_ids():
    names = ["a/x.jpg", "a/x.jpg.png", "a/x.png", "b/y.jpg"]
    assert image_ids([Path("/s") / name for name in names]) == names


def test_boxes_and_polygons_are_read_row_by_row():
    parsed = parse_labels(b"0 0.5 0.5 0.2 0.4\n1 0.1 0.1 0.3 0.1 0.2 0.5\n")
    assert parsed.classes.tolist() == [0, 1]
    np.testing.assert_allclose(parsed.boxes, [[0.4, 0.3, 0.6, 0.7], [0.1, 0.1, 0.3, 0.5]])
    assert parsed.polygons[0] is None and parsed.polygons[1].shape == (3, 2)
    assert parsed.problems == []


def test_marks_line_ends_tabs_blanks_and_a_missing_last_line_end_are_fine():
    parsed = parse_labels(b"\xef\xbb\xbf0\t0.5 0.5  0.2 0.4\r\n\r\n 1.0 0.5 0.5 0.1 0.1")
    assert parsed.classes.tolist() == [0, 1] and parsed.lines.tolist() == [1, 3] and not parsed.problems


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("0 0.5 0.5 0.2", "4 columns"),
        ("0 0.5 0.5 0.2 0.2 0.9", "6 columns"),
        ("0 0.1 0.1 0.2 0.2 0.3 0.3 0.4", "8 columns"),
        ("0 nan 0.5 0.2 0.2", "not finite"),
        ("0 0.5 inf 0.2 0.2", "not finite"),
        ("-1 0.5 0.5 0.2 0.2", "negative"),
        ("1.5 0.5 0.5 0.2 0.2", "not a whole number"),
        ("1e20 0.5 0.5 0.2 0.2", "1e20 is too large"),
        ("0 0,5 0.5 0.2 0.2", "decimal comma"),
        ("0,0.5,0.5,0.2,0.2", "separated by spaces"),
        ("cat 0.5 0.5 0.2 0.2", "'cat' is not a number"),
    ],
)
def test_a_bad_row_is_left_out_with_its_line_and_reason(row, reason):
    parsed = parse_labels(f"0 0.5 0.5 0.2 0.2\n{row}\n1 0.5 0.5 0.2 0.2\n".encode())
    assert parsed.classes.tolist() == [0, 1]
    [(line, said, verdict)] = parsed.problems
    assert line == 2 and verdict == "rejected" and reason in said


def test_an_exact_duplicate_is_left_out_and_the_first_keeps_its_place():
    parsed = parse_labels(b"1 .5 .5 .2 .2\n0 .5 .5 .2 .2\n1 0.5 0.50 0.2 0.2\n")
    assert parsed.classes.tolist() == [1, 0]
    assert parsed.problems == [(3, "the same row as line 1", "duplicate")]


def test_an_empty_or_unreadable_file_has_no_rows():
    assert len(parse_labels(b"").classes) == 0
    assert "UTF-8" in parse_labels("0 0.5".encode("utf-16")).problems[0][1]
