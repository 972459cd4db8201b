"""Scans the images and labels of a split once and keeps the table in the user's cache folder.

The entry's name is a hash of everything that it was made from: any edit of a file, however small, makes another one.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset

from accel_yolo.data.sources.yolo_txt import image_ids, label_path, parse_labels
from accel_yolo.data.table import MAX_CLIPPED_FINDINGS, Finding, Rows, ScanReport, SplitTable, build_table, judge
from accel_yolo.data.workers import start_worker, usable_cores
from accel_yolo.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger(__name__)

# Raise it whenever the same files would give another table or report.
READER_VERSION = 2
# Starting processes costs more than it saves below this many files.
_MIN_FILES_FOR_POOL = 500
_CHUNK = 64
# Entries of one split that are kept, the newest: an edit and its undoing need no new scan.
_KEPT_ENTRIES = 3
_MIN_SIDE_PX = 10
_TAIL_BYTES = 16
_MACHINE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)
_EXIF_ORIENTATION = 0x0112
_PNG_EXIF_KEYS = {"exif", "Raw profile type exif"}


@dataclass(frozen=True, slots=True)
class ScanOptions:
    """What, besides the files, decides about the table.

    Args:
        names: class names in label order.
        bad_images: "skip" leaves damaged images out, "warn" keeps those that give pixels, "error" stops.
        single_cls: every class becomes 0, and any class number is allowed.
    """

    names: tuple[str, ...]
    bad_images: str = "skip"
    single_cls: bool = False


def index_split(
    images: Sequence[Path], *, split: str, options: ScanOptions, cache_folder: Path, slot: str
) -> SplitTable:
    """The table of a split, from the cache if nothing changed since.

    Args:
        images: image files, in the order of the rows.
        cache_folder: where entries are kept; if it cannot be written the table stays in memory, with a warning.
        slot: names the data set, so that old entries of the same one are cleared.

    Raises:
        DataError: for a class without a name, for damaged images under "error", or if no image exists at all.
    """
    labels = [label_path(image) for image in images]
    stamps = [(_stamp(image), _stamp(label)) for image, label in zip(images, labels, strict=True)]
    _check_some_exist(images, stamps, split)
    folder = cache_folder / _digest([slot, split])[:16]
    entry = folder / _digest(
        [READER_VERSION, options.names, options.bad_images, options.single_cls, list(map(str, images)), stamps]
    )
    if (known := _read_entry(entry)) is not None:
        return known
    table, report = _scan(images, labels, split=split, options=options)
    try:
        _write_entry(entry, table, report)
        _clear_old_entries(folder)
    except OSError as reason:
        logger.warning("the data index cannot be kept in %s (%s): it is made anew at every start", folder, reason)
    return _read_entry(entry) or SplitTable(table, report)


def default_cache_folder() -> Path:
    """The user's cache folder for data indexes."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "accel_yolo" / "index"


def _stamp(path: Path) -> tuple[int, int] | None:
    """Size and time of the last change, None if there is no such file or it cannot be asked."""
    try:
        status = os.stat(path)  # noqa: PTH116 - half the cost of Path.stat, for every file of a data set
    except OSError as reason:
        if reason.errno in _MACHINE_ERRORS:
            raise
        return None
    return status.st_size, status.st_mtime_ns


def _check_some_exist(images: Sequence[Path], stamps: Sequence[tuple], split: str) -> None:
    if images and all(image is None for image, _ in stamps):
        raise DataError(
            f"none of the {len(images)} images of `{split}` exists or may be looked at.",
            found=f"first: {images[0]}",
            fix="correct the list: lines start at `path`, at the list's folder (`./`), or in the working directory.",
        )


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _read_entry(entry: Path) -> SplitTable | None:
    """A cached table, memory-mapped, if it is there and whole."""
    try:
        description = json.loads((entry / "report.json").read_text(encoding="utf-8"))
        if _file_digest(entry / "table.arrow") != description["digest"]:
            return None
        table = Dataset.from_file(str(entry / "table.arrow"))
        return SplitTable(table, ScanReport.from_dict(description["report"]))
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return None


def _write_entry(entry: Path, table: Dataset, report: ScanReport) -> None:
    """Write beside the final place and rename: an entry that has its name is whole."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix="writing-", dir=entry.parent))
    try:
        file = temporary / "table.arrow"
        columns = table.with_format("arrow")[:]
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, columns.schema) as writer:
            writer.write_table(columns)
        description = {"digest": _file_digest(file), "report": report.to_dict()}
        (temporary / "report.json").write_text(json.dumps(description), encoding="utf-8")
        if _read_entry(entry) is None:
            # Broken, or not there.
            shutil.rmtree(entry, ignore_errors=True)
            temporary.rename(entry)
    except OSError:
        # Another process that made the same entry was faster.
        if _read_entry(entry) is None:
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _clear_old_entries(folder: Path) -> None:
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith("writing-")]
    entries.sort(key=lambda entry: entry.stat().st_mtime_ns, reverse=True)
    for entry in entries[_KEPT_ENTRIES:]:
        shutil.rmtree(entry, ignore_errors=True)


def _scan(
    images: Sequence[Path], labels: Sequence[Path], *, split: str, options: ScanOptions
) -> tuple[Dataset, ScanReport]:
    report = ScanReport(split, images=len(images), classes=options.names)
    scans = list(_scan_files(images, labels, keep_damaged=options.bad_images == "warn"))
    for image, scan in zip(images, scans, strict=True):
        if scan.damage:
            report.damaged += 1
            report.findings.append(Finding(str(image), None, scan.damage, "damaged"))
    if report.damaged and options.bad_images == "error":
        raise _damage_error(report)
    kept = [position for position, scan in enumerate(scans) if scan.size_hw is not None]
    report.unlabelled = sum(not scans[position].has_label_file for position in kept)
    rows = _judged_rows(
        [images[position] for position in kept],
        [labels[position] for position in kept],
        [scans[position] for position in kept],
        options=options,
        report=report,
    )
    report.boxes = len(rows.labels)
    report.background = int((np.diff(rows.offsets) == 0).sum())
    report.findings.sort(key=lambda finding: (finding.file, finding.line or 0))
    return build_table(rows, options.names), report


def _damage_error(report: ScanReport) -> DataError:
    return DataError(
        f"{report.damaged} of {report.images} images of `{report.split}` cannot be read whole.",
        found="; ".join(map(str, report.findings[:3])),
        fix="replace or remove them, or leave them out with `--bad-images skip`.",
    )


def _judged_rows(
    images: list[Path], labels: list[Path], scans: list[Scan], *, options: ScanOptions, report: ScanReport
) -> Rows:
    """Flat columns of the usable boxes; what is not usable goes into the report."""
    sizes_hw = np.array([scan.size_hw for scan in scans], np.int64).reshape(-1, 2)
    row_of_box = np.repeat(np.arange(len(scans)), [len(scan.classes) for scan in scans])
    classes = _joined([scan.classes for scan in scans], np.int64)
    lines = _joined([scan.lines for scan in scans], np.int64)
    normalised = _joined([scan.boxes for scan in scans], np.float64).reshape(-1, 4)
    polygons = [polygon for scan in scans for polygon in scan.polygons]

    for label, scan in zip(labels, scans, strict=True):
        for line, reason, verdict in scan.problems:
            report.findings.append(Finding(str(label), line, reason, verdict))
    _check_classes(classes, lines, row_of_box, labels, options)

    sizes_of_boxes = sizes_hw[row_of_box]
    # What overflows is judged as not finite.
    with np.errstate(over="ignore"):
        boxes = normalised * sizes_of_boxes[:, [1, 0, 1, 0]]
    judgement = judge(boxes, sizes_of_boxes)
    for position, reason in judgement.reasons.items():
        report.findings.append(Finding(str(labels[row_of_box[position]]), int(lines[position]), reason, "rejected"))
    for position in np.flatnonzero(judgement.clipped)[:MAX_CLIPPED_FINDINGS].tolist():
        reason = "the box leaves the image by up to a pixel"
        report.findings.append(Finding(str(labels[row_of_box[position]]), int(lines[position]), reason, "clipped"))
    report.rejected = sum(finding.verdict == "rejected" for finding in report.findings)
    report.duplicates = sum(finding.verdict == "duplicate" for finding in report.findings)
    report.clipped = int(judgement.clipped.sum())

    is_usable = np.ones(len(classes), bool)
    is_usable[list(judgement.reasons)] = False
    usable = np.flatnonzero(is_usable)
    return Rows(
        paths=[str(image) for image in images],
        image_ids=image_ids(images),
        sizes_hw=sizes_hw,
        offsets=np.concatenate([[0], np.cumsum(np.bincount(row_of_box[usable], minlength=len(scans)))]),
        boxes=judgement.boxes[usable],
        labels=np.zeros(len(usable), np.int64) if options.single_cls else classes[usable],
        segments=[_in_pixels(polygons[position], sizes_of_boxes[position]) for position in usable.tolist()],
    )


def _joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _in_pixels(polygon: np.ndarray | None, size_hw: np.ndarray) -> list[np.ndarray]:
    return [] if polygon is None else [np.clip(polygon, 0, 1) * size_hw[::-1]]


def _check_classes(
    classes: np.ndarray, lines: np.ndarray, row_of_box: np.ndarray, labels: list[Path], options: ScanOptions
) -> None:
    wrong = np.flatnonzero(classes >= len(options.names))
    if options.single_cls or not len(wrong):
        return
    numbers, counts = np.unique(classes[wrong], return_counts=True)
    listed = ", ".join(
        f"{number} ({count} times)" for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
    )
    # The first place in each of three files.
    _, firsts = np.unique(row_of_box[wrong], return_index=True)
    places = [f"{labels[row_of_box[at]]} line {lines[at]}" for at in wrong[firsts[:3]].tolist()]
    raise DataError(
        "label files have classes outside the data set's names.",
        found=f"class {listed}, but names has {len(options.names)} entries; in {', '.join(places)}",
        fix="add the missing names to the data file, or correct the labels (classes count from 0).",
    )


class Scan(NamedTuple):
    """What one image and its label file hold; the fields after `damage` are those of `LabelFile`."""

    # None if the image is not used.
    size_hw: tuple[int, int] | None
    has_label_file: bool
    # Why the image cannot be read whole; empty if it can.
    damage: str
    classes: np.ndarray
    boxes: np.ndarray
    polygons: list[np.ndarray | None]
    lines: np.ndarray
    problems: list[tuple[int | None, str, str]]


def _scan_files(images: Sequence[Path], labels: Sequence[Path], *, keep_damaged: bool) -> Iterator[Scan]:
    paths = [(str(image), str(label)) for image, label in zip(images, labels, strict=True)]
    scan = functools.partial(scan_chunk, keep_damaged=keep_damaged)
    workers = min(usable_cores(), len(paths) // _CHUNK)
    chunks = [paths[start : start + _CHUNK] for start in range(0, len(paths), _CHUNK)]
    if len(paths) < _MIN_FILES_FOR_POOL or workers < 2:
        for chunk in chunks:
            yield from scan(chunk)
        return
    logger.info("scanning %d images", len(paths))
    # A forked child needs no main guard in the user's script, and our children touch neither torch nor its threads.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with ProcessPoolExecutor(
        workers, multiprocessing.get_context(method), initializer=start_worker, initargs=(os.getpid(),)
    ) as pool:
        for results in pool.map(scan, chunks):
            yield from results


def scan_chunk(paths: Sequence[tuple[str, str]], *, keep_damaged: bool) -> list[Scan]:
    """Scan pairs of image and label files; runs in a worker process."""
    with warnings.catch_warnings():
        # Pillow warns about large and odd images, of which the report tells what matters.
        warnings.simplefilter("ignore")
        return [_scan_pair(image, label, keep_damaged=keep_damaged) for image, label in paths]


def _scan_pair(image: str, label: str, *, keep_damaged: bool) -> Scan:
    size_hw, damage = check_image(image)
    if damage:
        size_hw = _decodable_size(image) if keep_damaged else None
    try:
        data = Path(label).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return Scan(size_hw, False, damage, *parse_labels(b""))
    except OSError as reason:
        if reason.errno in _MACHINE_ERRORS:
            raise
        labels = parse_labels(b"")
        labels.problems.append((None, f"the label file cannot be read: {reason.strerror}", "rejected"))
        return Scan(size_hw, True, damage, *labels)
    return Scan(size_hw, True, damage, *parse_labels(data))


def check_image(path: str) -> tuple[tuple[int, int] | None, str]:
    """(height, width) px of the upright image, and why it cannot be read whole ("" if it can).

    Headers and ends of files are looked at; an image whose end is not what its format asks for, or whose format has
    no such mark, is decoded by a strict decoder.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            width, height = image.size
            if _is_turned(image):
                width, height = height, width
            if not _ends_well(path, image.format):
                image.load()
            elif image.format == "PNG":
                # Checks the sums of all chunks without decoding.
                image.verify()
    except Image.DecompressionBombError:
        return None, f"larger than {2 * (Image.MAX_IMAGE_PIXELS or 0) / 1e6:.0f} megapixels, Pillow's limit"
    except FileNotFoundError:
        return None, "there is no such file"
    except (OSError, SyntaxError, ValueError, EOFError) as reason:
        # Too many open files and the like say nothing about the image.
        if isinstance(reason, OSError) and reason.errno in _MACHINE_ERRORS:
            raise
        return None, _short(reason)
    if min(width, height) < _MIN_SIDE_PX:
        return (height, width), f"{width} x {height} px: a side is shorter than {_MIN_SIDE_PX} px"
    return (height, width), ""


def _is_turned(image: Image.Image) -> bool:
    """Whether the orientation in the header swaps width and height."""
    if image.format == "TIFF":
        # Pillow has turned it already.
        return False
    if image.format == "PNG" and not _PNG_EXIF_KEYS & image.info.keys():
        # Pillow would decode the whole image to look for the tag behind it.
        return False
    return image.getexif().get(_EXIF_ORIENTATION, 1) >= 5


def _short(reason: BaseException) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(reason, UnidentifiedImageError):
        return "not an image, or of an unknown format"
    return (getattr(reason, "strerror", None) or str(reason) or type(reason).__name__).strip()


def _ends_well(path: str, image_format: str | None) -> bool:
    ends = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
    end = ends.get(image_format or "")
    if end is None:
        return False
    with Path(path).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        return file.read().endswith(end)


def _decodable_size(path: str) -> tuple[int, int] | None:
    """(height, width) of what a lenient decoder makes of a damaged image, None if nothing."""
    # Wanted for damaged images alone, and brings torch along.
    from accel_yolo.data.transforms import UnreadableImage, decode_image

    try:
        image = decode_image(np.fromfile(path, np.uint8), lenient=True)
    except (OSError, UnreadableImage) as reason:
        if getattr(reason, "errno", None) in _MACHINE_ERRORS:
            raise
        return None
    return image.shape[0], image.shape[1]
