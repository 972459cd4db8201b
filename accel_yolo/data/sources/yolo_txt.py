"""Data sets in YOLO's layout: a YAML that names folders or lists of images, and a label file per image."""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NamedTuple, NoReturn

import numpy as np

from accel_yolo.config.load import read_yaml
from accel_yolo.errors import ConfigError, DataError, did_you_mean

logger = logging.getLogger(__name__)

IMAGE_SUFFIXES = frozenset(
    {
        *(".bmp", ".dng", ".jpeg", ".jpg", ".mpo", ".png", ".tif", ".tiff", ".webp", ".pfm"),
        # Beyond the reference's list.
        *(".avif", ".gif", ".jp2", ".ppm", ".pgm"),
    }
)
SPLITS = ("train", "val", "test")
_KEYS = (*SPLITS, "path", "names", "nc", "download", "roboflow")
# What exporters write beside them, and what changes nothing for us.
_HARMLESS_KEYS = ("minival", "license", "licence", "author", "description", "version", "date", "url", "info", "task",
                  "colors", "channels", "copyright", "homepage", "created", "dataset", "yaml_file",
                  "source")  # fmt: skip
# Keys that announce labels of another kind; reading them as boxes would be wrong without a word.
_OTHER_TASKS = {
    "kpt_shape": "keypoints",
    "flip_idx": "keypoints",
    "kpt_names": "keypoints",
    "obb": "rotated boxes",
}
_BOX_COLUMNS = 5
# Larger ones are no class numbers, and the largest fit no integer column.
_MAX_CLASS = 2**31 - 1
# File systems allow no longer name; a line with one is no path.
_MAX_NAME_BYTES = 255
# How much is looked at to say which folders hold images.
_ADVICE_FOLDERS = 200
_ADVICE_ENTRIES = 1000


@dataclass(frozen=True, slots=True)
class YoloSpec:
    """A data YAML, read and checked; nothing but the YAML has been touched.

    Args:
        file: the YAML.
        roots: folders that `path` may mean, the likeliest first.
        names: class names in label order.
        splits: items of each split that the YAML has.
        download: whether the YAML asks for something to be fetched, which we never do.
    """

    file: Path
    roots: tuple[Path, ...]
    names: tuple[str, ...]
    splits: dict[str, tuple[str, ...]]
    download: bool


def load_yaml(path: Path) -> dict[object, object]:
    """The top level of a data YAML.

    Raises:
        DataError: if the file cannot be read, is not YAML, or is not a mapping.
    """
    return read_yaml(path, error=DataError)


def read_spec(path: Path, values: Mapping[object, object]) -> YoloSpec:
    """Check the top level of a data YAML; an `nc` that disagrees with the names is ignored, with a warning.

    Raises:
        ConfigError: for an unknown key.
        DataError: for a value that cannot be used.
    """
    for key in values:
        if key in _OTHER_TASKS:
            raise ConfigError(
                f"the data set is one of {_OTHER_TASKS[str(key)]}, not of boxes.",
                found=f"{key!r} in {path}",
                fix="export it as a detection data set, or remove the key if its labels are boxes.",
            )
        if key not in _KEYS and key not in _HARMLESS_KEYS:
            raise ConfigError(
                "the data file has an unknown key.",
                found=f"{key!r} in {path}",
                fix=did_you_mean(str(key), _KEYS),
            )
    names = _names(path, values)
    splits = {split: _items(path, split, values[split]) for split in SPLITS if values.get(split)}
    return YoloSpec(path, _roots(path, values.get("path")), names, splits, bool(values.get("download")))


def _names(path: Path, values: Mapping[object, object]) -> tuple[str, ...]:
    given = values.get("names")
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list | dict) or not given:
        raise DataError(
            "the data file has no class names.",
            found=f"names: {given!r} in {path}",
            fix="list them in label order: `names: [cat, dog]`.",
        )
    if isinstance(given, dict):
        given = _names_by_number(path, given)
    if wrong := [name for name in given if isinstance(name, bool | list | dict) or name is None]:
        raise DataError(
            "a class name is not a word.",
            found=f"{wrong[0]!r} in {path}",
            fix="put the name in quotes; YAML reads words such as yes, no, on and off as true or false.",
        )
    names = tuple(str(name) for name in given)
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(
            "two classes have the same name.", found=f"{', '.join(repeated)} in {path}", fix="make the names differ."
        )
    stated = values.get("nc")
    if stated is not None and stated != len(names):
        logger.warning("%s says nc: %s but has %d names: nc is ignored", path, stated, len(names))
    return names


def _names_by_number(path: Path, given: dict) -> list[object]:
    try:
        by_number = {int(number): name for number, name in given.items()}
    except (TypeError, ValueError):
        by_number = {}
    if sorted(by_number) != list(range(len(given))):
        raise DataError(
            "class numbers are not 0, 1, 2, ...",
            found=f"names has the keys {', '.join(map(str, given))} in {path}",
            fix="number the classes from 0 without a gap, as the label files do.",
        )
    return [by_number[number] for number in range(len(by_number))]


def _items(path: Path, split: str, value: object) -> tuple[str, ...]:
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str) and item for item in items):
        raise DataError(
            "a split is neither a path nor a list of paths.",
            found=f"{split}: {value!r} in {path}",
            fix=f"write `{split}: images/{split}`, a text file, or a list of them.",
        )
    return tuple(items)


def _roots(path: Path, stated: object) -> tuple[Path, ...]:
    """Where relative paths may start: beside the YAML, then in the working directory."""
    bases = (path.resolve().parent, Path.cwd())
    if stated is None or stated == "":
        return tuple(dict.fromkeys(bases))
    if not isinstance(stated, str):
        raise DataError("`path` is not a path.", found=f"path: {stated!r} in {path}", fix="write `path: folder`.")
    folder = Path(stated).expanduser()
    return tuple(dict.fromkeys(Path(os.path.normpath(base / folder)) for base in bases))


def find_images(spec: YoloSpec, split: str) -> list[Path]:
    """All images of a split, sorted as strings; what a list names is not looked at.

    Raises:
        DataError: if the split, a folder or a list does not exist; shows every path that was tried.
    """
    if split not in spec.splits:
        raise DataError(
            f"the data file has no `{split}` images.",
            found=f"{spec.file} has {', '.join(spec.splits) or 'no split'}",
            fix=f"add `{split}: images/{split}`, a path relative to the file or to its `path`.",
        )
    images: list[str] = []
    for item in spec.splits[split]:
        place = _locate(spec, split, item)
        images += _images_below(place) if place.is_dir() else _images_in_list(place, spec.roots)
    return [Path(image) for image in sorted(images)]


def _locate(spec: YoloSpec, split: str, item: str) -> Path:
    tried = []
    for root in spec.roots:
        # Exports with the file inside the data set write `../train/images` (data.md section 1).
        for variant in dict.fromkeys((item, item.removeprefix("../"))):
            place = Path(os.path.normpath(root / Path(variant).expanduser()))
            # Answers no where Path.exists raises: a forbidden folder, a name that is too long.
            if os.path.exists(place):  # noqa: PTH110
                return place
            tried.append(place)
    raise DataError(
        f"the images of `{split}` are not where the data file says.",
        found=f"{split}: {item} in {spec.file}; tried {', '.join(map(str, dict.fromkeys(tried)))}",
        fix=_locating_advice(spec, split),
    )


def _locating_advice(spec: YoloSpec, split: str) -> str:
    advice = []
    # Not below the working directory, which may be anything, a home folder for example.
    if folders := list(map(str, _image_folders(spec.roots[0]))):
        advice.append(f"folders with images are {', '.join(folders[:6])}: name one of them as `{split}`")
    if spec.download:
        advice.append("`download:` is never executed: fetch and unpack the data yourself")
    if not advice:
        advice.append(f"correct `path` or `{split}`; relative paths start at the data file")
    return "; ".join(advice) + "."


def _image_folders(root: Path) -> list[Path]:
    """Folders at most two levels below the root that hold an image, found with a bounded effort."""
    found, level, left = [], [root], _ADVICE_FOLDERS
    for depth in range(3):
        below = []
        for folder in level[:left]:
            try:
                with os.scandir(folder) as listing:
                    entries = list(itertools.islice(listing, _ADVICE_ENTRIES))
                below += sorted(folder / entry.name for entry in entries if entry.is_dir())
            except OSError:
                # Not there, or not ours to read.
                continue
            if depth and any(_is_image(entry.name) for entry in entries):
                found.append(folder)
        left -= len(level[:left])
        level = below
    return found


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES  # noqa: PTH122 - called for every file of a data set


def _images_below(folder: Path) -> list[str]:
    """Images in a folder and all below it; a folder that several links lead to counts once."""
    found: list[str] = []
    visited: set[str] = set()
    pending = [str(folder)]
    while pending:
        # Links come after all real folders, so that those keep their own paths, by which labels are found.
        for parent, folders, files in os.walk(pending.pop(0), onerror=_refuse_folder):
            if (real := os.path.realpath(parent)) in visited:
                folders.clear()
                continue
            visited.add(real)
            places = (os.path.join(parent, name) for name in sorted(folders))  # noqa: PTH118 - as above
            pending += filter(os.path.islink, places)
            found += [os.path.join(parent, name) for name in files if _is_image(name)]  # noqa: PTH118
    return found


def _refuse_folder(reason: OSError) -> NoReturn:
    raise DataError(
        "a folder of images cannot be read.",
        found=f"{reason.filename}: {reason.strerror}",
        fix="allow reading it, move it elsewhere, or name the folders beside it one by one.",
    ) from reason


def _images_in_list(file: Path, roots: Sequence[Path]) -> list[str]:
    """Paths of a list: `./` means beside the list; others start at `path`, beside the list, or in the cwd."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as reason:
        raise DataError(
            "a list of images cannot be read.",
            found=f"{file}: {reason}",
            fix="name a folder, or a UTF-8 text file with one path a line.",
        ) from reason
    bases = [*roots, file.parent, Path.cwd()]
    images = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if line and not _can_be_a_file(line):
            raise DataError(
                "a line in a list of images is not the path of a file.",
                found=f"{file}:{number}: {line[:80]!r}{' and so on' if len(line) > 80 else ''}",
                fix="write one path a line, or name a folder.",
            )
        if line.startswith("./"):
            images.append(os.path.normpath(file.parent / line))
        elif line:
            base = next((base for base in bases if os.path.exists(base / line)), bases[0])  # noqa: PTH110 - as above
            images.append(os.path.normpath(base / line))
    return images


def _can_be_a_file(line: str) -> bool:
    names = line.split("/")
    return "\0" not in line and bool(line.strip("./")) and max(len(name.encode()) for name in names) <= _MAX_NAME_BYTES


def label_path(image: Path) -> Path:
    """The label file of an image: the last folder `images` becomes `labels`, else beside the image."""
    parts = list(image.parts)
    for position in range(len(parts) - 2, -1, -1):
        if parts[position] == "images":
            parts[position] = "labels"
            break
    return Path(*parts).with_suffix(".txt")


def image_ids(images: Iterable[PurePath]) -> list[str]:
    """Stable names: the stem where it names one image alone, else as much of the path as tells them apart."""
    paths = list(images)
    stems = [path.stem for path in paths]
    if len(set(stems)) == len(stems):
        return stems
    common = os.path.commonpath([str(path.parent) for path in paths])
    names = [path.relative_to(common) for path in paths]
    short = [name.with_suffix("").as_posix() for name in names]
    # With a.jpg beside a.png only the suffix tells them apart.
    return short if len(set(short)) == len(set(paths)) else [name.as_posix() for name in names]


class LabelFile(NamedTuple):
    """The rows of one label file that could be read.

    Args:
        classes: (n,) int64.
        boxes: (n, 4) float64 xyxy, normalised.
        polygons: n entries, (P, 2) float64 normalised, None for a row that is a box.
        lines: (n,) int64, 1-based.
        problems: (line, reason, verdict) of the rows that were left out.
    """

    classes: np.ndarray
    boxes: np.ndarray
    polygons: list[np.ndarray | None]
    lines: np.ndarray
    problems: list[tuple[int | None, str, str]]


def parse_labels(data: bytes) -> LabelFile:
    """Read a label file row by row: 5 columns are a box, an odd number from 7 on is a polygon.

    A byte order mark, CRLF, tabs and blank lines are fine. Whether a box fits its image is judged later.
    """
    classes: list[int] = []
    boxes: list[tuple[float, float, float, float]] = []
    polygons: list[np.ndarray | None] = []
    lines: list[int] = []
    problems: list[tuple[int | None, str, str]] = []
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        problems.append((None, "the label file is not UTF-8 text", "rejected"))
        text = ""
    seen: dict[tuple[float, ...], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        tokens = line.split()
        if not tokens:
            continue
        values = _numbers(tokens)
        if isinstance(values, str):
            problems.append((number, values, "rejected"))
        elif values in seen:
            problems.append((number, f"the same row as line {seen[values]}", "duplicate"))
        else:
            seen[values] = number
            classes.append(int(values[0]))
            polygon = None if len(values) == _BOX_COLUMNS else np.array(values[1:]).reshape(-1, 2)
            polygons.append(polygon)
            boxes.append(_enclosing(values) if polygon is None else (*polygon.min(axis=0), *polygon.max(axis=0)))
            lines.append(number)
    return LabelFile(
        np.array(classes, np.int64),
        np.array(boxes, np.float64).reshape(-1, 4),
        polygons,
        np.array(lines, np.int64),
        problems,
    )


def _numbers(tokens: list[str]) -> tuple[float, ...] | str:
    """The numbers of a row, or what is wrong with it."""
    try:
        values = tuple(map(float, tokens))
    except ValueError:
        return _not_a_number(tokens)
    if not all(map(math.isfinite, values)):
        return "a value is not finite"
    count = len(values)
    if count < _BOX_COLUMNS:
        return f"{count} columns, a box has 5: class, centre x, centre y, width, height"
    if count == _BOX_COLUMNS + 1:
        return "6 columns: a box has 5 (was the file saved with confidences?), a polygon an odd number from 7 on"
    if count % 2 == 0:
        return f"{count} columns: a polygon has a class and pairs of x and y, an odd number"
    if values[0] != int(values[0]):
        return f"class {tokens[0]} is not a whole number"
    if values[0] < 0:
        return f"class {tokens[0]} is negative"
    if values[0] > _MAX_CLASS:
        return f"class {tokens[0]} is too large for a class number"
    return values


def _not_a_number(tokens: list[str]) -> str:
    for token in tokens:
        try:
            float(token)
        except ValueError:
            if token.count(",") == 1 and _is_number(token.replace(",", ".")):
                return f"{token!r} has a decimal comma, write {token.replace(',', '.')}"
            if "," in token:
                return f"{token!r}: columns are separated by spaces, not commas"
            return f"{token!r} is not a number"
    raise AssertionError("called for a row of numbers")


def _is_number(token: str) -> bool:
    try:
        float(token)
    except ValueError:
        return False
    return True


def _enclosing(values: tuple[float, ...]) -> tuple[float, float, float, float]:
    _, x, y, width, height = values
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2
