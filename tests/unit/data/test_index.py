"""The scan: what each policy makes of damaged images and labels, and when the cached index is used."""

import errno
import json
import multiprocessing
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from accel_yolo.data import index
from accel_yolo.data.index import ScanOptions, check_image, index_split, scan_chunk
from accel_yolo.data.table import FlatTable
from accel_yolo.errors import DataError

NAMES = ("cat", "dog")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "set").mkdir()
    return tmp_path / "set"


def add_image(folder, name, labels=None, size=(40, 20), **options):
    pixels = np.random.default_rng(len(name)).integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)
    Image.fromarray(pixels).save(folder / name, **options)
    if labels is not None:
        (folder / name).with_suffix(".txt").write_text(labels)
    return folder / name


def scan(folder, cache=None, **options):
    settings = {"names": NAMES, **options}
    images = sorted(path for path in folder.iterdir() if path.suffix != ".txt")
    cache = folder.parent / "cache" if cache is None else cache
    return index_split(images, split="train", options=ScanOptions(**settings), cache_folder=cache, slot="x")


def test_good_rows_stay_and_each_bad_one_is_named(folder):
    rows = ["0 0.5 0.5 0.2 0.2", "1 0.5 0.5 0 0.2", "0 0.5 0.5 0.2", "1 0.005 0.5 0.03 0.5", "0 0.5 0.5 3 3"]
    add_image(folder, "a.png", "\n".join([*rows, rows[0]]))
    table, report = scan(folder)
    assert FlatTable(table).labels.tolist() == [0, 1]
    # x from -0.01 to 0.02 of 40 px: 0.4 px outside.
    np.testing.assert_allclose(FlatTable(table).boxes, [[16, 8, 24, 12], [0, 5, 0.8, 15]])
    counts = (report.images, report.boxes, report.rejected, report.clipped, report.duplicates, report.background)
    assert counts == (1, 2, 3, 1, 1, 0)
    assert [(finding.line, finding.verdict) for finding in report.findings] == [
        (2, "rejected"),
        (3, "rejected"),
        (4, "clipped"),
        (5, "rejected"),
        (6, "duplicate"),
    ]
    assert all(finding.file == str(folder / "a.txt") for finding in report.findings)


def test_a_mixed_file_equals_its_boxes_written_by_hand(folder, tmp_path):
    add_image(folder, "a.png", "0 0.5 0.5 0.2 0.2\n1 0.1 0.2 0.5 0.2 0.5 0.9\n")
    mixed = FlatTable(scan(folder).table)
    add_image(folder, "a.png", "0 0.5 0.5 0.2 0.2\n1 0.3 0.55 0.4 0.7\n")
    by_hand = FlatTable(scan(folder).table)
    np.testing.assert_allclose(mixed.boxes, by_hand.boxes)
    assert mixed.labels.tolist() == by_hand.labels.tolist()
    box, polygon = mixed.segments(0)
    assert box is None
    np.testing.assert_allclose(polygon, [[4, 4], [20, 4], [20, 18]], rtol=1e-6)


def test_of_many_clipped_boxes_all_are_counted_and_the_first_are_listed(folder, monkeypatch):
    monkeypatch.setattr(index, "MAX_CLIPPED_FINDINGS", 3)
    rows = [f"0 0.5 {0.02 + number / 1e4:.4f} 0.2 0.05" for number in range(8)]
    add_image(folder, "a.png", "\n".join([*rows, "0 0.5 0.5 0 0"]))
    _, report = scan(folder)
    assert (report.clipped, report.boxes, report.rejected) == (8, 8, 1)
    assert [finding.line for finding in report.findings if finding.verdict == "clipped"] == [1, 2, 3]
    assert [finding.line for finding in report.findings if finding.verdict == "rejected"] == [9]


def test_the_last_numbers_before_infinity_cost_their_line_without_a_warning_of_numpy(folder, recwarn):
    add_image(folder, "a.png", "0 0.5 0.5 1e308 0.2\n0 0.5 0.5 0.2 0.2")
    _, report = scan(folder)
    assert (report.boxes, report.rejected) == (1, 1)
    assert not [warning for warning in recwarn if warning.category is RuntimeWarning]


@pytest.mark.parametrize("orientation", [1, 6, 8])
def test_an_avif_image_is_as_large_as_it_is_shown(folder, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    add_image(folder, "a.avif", "0 0.5 0.25 1 0.5", exif=exif)
    table, report = scan(folder)
    width, height = (40, 20) if orientation == 1 else (20, 40)
    assert (table[0]["width"], table[0]["height"], report.damaged) == (width, height, 0)
    assert table[0]["objects"]["bbox"] == [[0, 0, width, height / 2]]


def test_a_label_file_that_no_one_can_open_costs_its_rows_and_not_the_run(folder, monkeypatch):
    add_image(folder, "a.png", "0 0.5 0.5 0.2 0.2")
    add_image(folder, "b.png", "0 0.5 0.5 0.2 0.2")
    read = Path.read_bytes

    def refuse(path):
        if path.name == "a.txt":
            raise OSError(errno.ELOOP, "Too many levels of symbolic links")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    _, report = scan(folder)
    assert (report.boxes, report.rejected) == (1, 1)
    assert "Too many levels" in report.findings[0].reason and report.findings[0].file == str(folder / "a.txt")


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENAMETOOLONG, errno.ELOOP])
def test_an_image_that_cannot_even_be_looked_at_is_damaged(folder, monkeypatch, number):
    images = [add_image(folder, name, "0 0.5 0.5 0.2 0.2") for name in ("a.png", "b.png")]
    stat, opened = os.stat, Image.open

    def refuse(ask):
        def asking(path, *arguments, **keywords):
            if str(path) == str(images[0]):
                raise OSError(number, os.strerror(number), str(path))
            return ask(path, *arguments, **keywords)

        return asking

    monkeypatch.setattr(os, "stat", refuse(stat))
    monkeypatch.setattr(Image, "open", refuse(opened))
    options, cache = ScanOptions(names=NAMES), folder.parent / "cache"
    table, report = index_split(images, split="train", options=options, cache_folder=cache, slot="x")
    assert table["image_id"][:] == ["b"] and report.findings[0].reason == os.strerror(number)


def test_images_without_labels_are_background_and_kept(folder):
    add_image(folder, "a.png")
    add_image(folder, "b.png", "")
    add_image(folder, "c.png", "0 0.5 0.5 0.2 0.2")
    table, report = scan(folder)
    assert len(table) == 3 and report.background == 2 and report.unlabelled == 1


def test_sizes_are_those_of_the_upright_image(folder):
    exif = Image.Exif()
    exif[0x0112] = 6
    add_image(folder, "a.jpg", "0 0.5 0.5 1 1", exif=exif)
    add_image(folder, "b.tif", "0 0.5 0.5 1 1", exif=exif)
    table = scan(folder).table
    assert [(row["width"], row["height"]) for row in table] == [(20, 40), (20, 40)]
    assert table[0]["objects"]["bbox"] == [[0, 0, 20, 40]]


def test_a_class_without_a_name_stops_with_counts_and_three_files(folder):
    for number in range(4):
        add_image(folder, f"{number}.png", "0 0.5 0.5 0.2 0.2\n7 0.5 0.5 0.2 0.2\n")
    add_image(folder, "9.png", "2 0.5 0.5 0.2 0.2\n")
    with pytest.raises(DataError) as caught:
        scan(folder)
    assert "2 (1 times), 7 (4 times)" in caught.value.found and "2 entries" in caught.value.found
    assert caught.value.found.count(".txt line 2") == 3
    assert FlatTable(scan(folder, single_cls=True, names=("item",)).table).labels.tolist() == [0] * 9


def test_classes_are_checked_against_the_names_of_today_also_with_a_cache(folder):
    add_image(folder, "a.png", "1 0.5 0.5 0.2 0.2")
    scan(folder)
    with pytest.raises(DataError, match="outside the data set's names"):
        scan(folder, names=("cat",))


def damage_folder(folder):
    add_image(folder, "good.jpg", "0 0.5 0.5 0.2 0.2")
    add_image(folder, "half.jpg", "0 0.5 0.5 0.2 0.2", size=(200, 200))
    (folder / "half.jpg").write_bytes((folder / "half.jpg").read_bytes()[:4000])
    add_image(folder, "sum.png", "0 0.5 0.5 0.2 0.2")
    data = bytearray((folder / "sum.png").read_bytes())
    data[60] ^= 1
    (folder / "sum.png").write_bytes(data)
    (folder / "text.jpg").write_text("no image")
    (folder / "void.png").write_bytes(b"")
    add_image(folder, "tiny.png", size=(8, 40))


def test_damaged_images_are_left_out_counted_and_listed_and_whoever_loads_them_warns(folder, caplog):
    damage_folder(folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    table, report = scan(folder)
    assert [row["image_id"] for row in table] == ["good"]
    assert (report.images, report.damaged, report.boxes) == (6, 5, 1)
    reasons = {finding.file.rsplit("/", 1)[1]: finding.reason for finding in report.findings}
    assert set(reasons) == {"half.jpg", "sum.png", "text.jpg", "void.png", "tiny.png"}
    assert "truncated" in reasons["half.jpg"] and "not an image" in reasons["text.jpg"]
    assert not caplog.records
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_the_policy_warn_keeps_what_gives_pixels(folder):
    damage_folder(folder)
    table, report = scan(folder, bad_images="warn")
    assert {"good", "half", "tiny"} <= {row["image_id"] for row in table}
    assert "text" not in table["image_id"] and report.damaged == 5


def test_the_policy_error_stops(folder):
    damage_folder(folder)
    with pytest.raises(DataError, match="5 of 6 images") as caught:
        scan(folder, bad_images="error")
    assert "half.jpg" in caught.value.found


def test_a_jpeg_with_bytes_after_its_end_is_whole(folder):
    path = add_image(folder, "a.jpg")
    path.write_bytes(path.read_bytes() + b"trailing bytes")
    assert check_image(str(path)) == ((20, 40), "")


def test_a_jpeg_that_lost_only_its_end_mark_is_damaged(folder):
    path = add_image(folder, "a.jpg", size=(200, 200))
    path.write_bytes(path.read_bytes()[:-2])
    assert check_image(str(path))[1]


def test_too_many_open_files_is_not_a_damaged_image(folder, monkeypatch):
    path = add_image(folder, "a.jpg")

    def refuse(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Image, "open", refuse)
    with pytest.raises(OSError, match="Too many"):
        check_image(str(path))


def test_a_listed_image_that_does_not_exist_is_reported_and_none_at_all_stops(folder):
    options = ScanOptions(names=NAMES)
    image = add_image(folder, "a.png")
    arguments = {"split": "train", "options": options, "cache_folder": folder.parent / "cache", "slot": "x"}
    table, report = index_split([image, folder / "gone.png"], **arguments)
    assert len(table) == 1 and report.damaged == 1 and "no such file" in report.findings[0].reason
    with pytest.raises(DataError, match="none of the 1 images"):
        index_split([folder / "gone.png"], **arguments)


@pytest.fixture
def count_scans(monkeypatch):
    scans = []

    def counting(*arguments, **keywords):
        scans.append(arguments)
        return scan_chunk(*arguments, **keywords)

    monkeypatch.setattr(index, "scan_chunk", counting)
    return scans


def test_the_second_start_scans_nothing_and_is_memory_mapped(folder, count_scans):
    add_image(folder, "a.png", "0 0.5 0.5 0.2 0.2\n0 0.5 0.5 0 0")
    first, second = scan(folder), scan(folder)
    assert len(count_scans) == 1
    assert second.report == first.report and second.table[:] == first.table[:]
    assert second.table.features == first.table.features
    assert len(pickle.dumps(second.table)) < 10_000


def test_two_splits_in_one_folder_keep_their_own_entries(folder, count_scans):
    images = [add_image(folder, name, "0 0.5 0.5 0.2 0.2") for name in ("a.png", "b.png")]
    cache = folder.parent / "cache"
    for _ in range(2):
        for split, image in zip(("train", "val"), images, strict=True):
            table, _ = index_split([image], split=split, options=ScanOptions(names=NAMES), cache_folder=cache, slot="x")
            assert table["image_id"][0] == image.stem
    assert len(count_scans) == 2


@pytest.mark.parametrize("edit", ["same size", "new label file", "no label file", "image", "touch"])
def test_any_edit_is_noticed(folder, count_scans, edit):
    image = add_image(folder, "a.png", "0 0.5 0.5 0.2 0.2")
    add_image(folder, "b.png")
    scan(folder)
    if edit == "same size":
        status = (folder / "a.txt").stat()
        (folder / "a.txt").write_text("1 0.5 0.5 0.2 0.2")
        os.utime(folder / "a.txt", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    elif edit == "new label file":
        (folder / "b.txt").write_text("1 0.5 0.5 0.2 0.2")
    elif edit == "no label file":
        (folder / "a.txt").unlink()
    elif edit == "image":
        add_image(folder, "a.png", size=(60, 60))
    else:
        os.utime(image, ns=(0, 0))
    scan(folder)
    assert len(count_scans) == 2


@pytest.mark.parametrize("break_it", ["table", "report", "missing"])
def test_a_broken_entry_is_made_anew(folder, count_scans, break_it):
    add_image(folder, "a.png", "0 0.5 0.5 0.2 0.2")
    expected = scan(folder).table[:]
    [entry] = (folder.parent / "cache").glob("*/*")
    if break_it == "table":
        data = bytearray((entry / "table.arrow").read_bytes())
        data[-40] ^= 1
        (entry / "table.arrow").write_bytes(data)
    elif break_it == "report":
        (entry / "report.json").write_text("{")
    else:
        (entry / "table.arrow").unlink()
    assert scan(folder).table[:] == expected
    assert len(count_scans) == 2
    scan(folder)
    assert len(count_scans) == 2


def test_old_entries_are_cleared_and_nothing_half_written_stays(folder):
    image = add_image(folder, "a.png")
    for stamp in range(6):
        os.utime(image, ns=(stamp, stamp))
        scan(folder)
    [slot] = (folder.parent / "cache").iterdir()
    assert len(list(slot.iterdir())) == 3
    assert all(json.loads((entry / "report.json").read_text()) for entry in slot.iterdir())


def test_a_cache_that_cannot_be_written_costs_one_warning(folder, tmp_path, caplog):
    add_image(folder, "a.png", "0 0.5 0.5 0.2 0.2")
    (tmp_path / "file").write_text("")
    table, _ = scan(folder, cache=tmp_path / "file")
    assert len(table) == 1 and len(caplog.records) == 1
    assert not any(path.suffix not in (".png", ".txt") for path in folder.iterdir())


def test_two_starts_on_a_cold_cache_both_succeed(folder):
    for number in range(20):
        add_image(folder, f"{number}.png", "0 0.5 0.5 0.2 0.2")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=scan, args=(folder,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list((folder.parent / "cache").glob("*/*"))) == 1


def test_worker_processes_find_the_same(folder, monkeypatch):
    damage_folder(folder)
    expected = scan(folder, cache=folder.parent / "one")
    monkeypatch.setattr(index, "_MIN_FILES_FOR_POOL", 1)
    monkeypatch.setattr(index, "_CHUNK", 2)
    monkeypatch.setattr(index, "usable_cores", lambda: 2)
    found = scan(folder, cache=folder.parent / "two")
    assert found.report == expected.report and found.table[:] == expected.table[:]
