"""Weights in and out: safetensors with the model's config and class names inside, and transfer to another model."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from accel_yolo.errors import WeightsError
from accel_yolo.model.detector import OPTIONAL_KEYS, REQUIRED_KEYS, DetectionModel
from accel_yolo.model.pickle_import import read_yolov5_pickle

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
METADATA_KEY = "accel_yolo"
# What DDP, torch.compile and averaged models put before the names of a bare model, in any order.
WRAPPER_PREFIXES = ("module.", "_orig_mod.", "ema.")
RUN_FILES = ("weights/best.safetensors", "weights/last.safetensors")


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What a weights file holds.

    Args:
        state_dict: float32 (counters int64), without prefixes of wrappers.
        config: the model's effective config; None in a file of another program.
        names: class names by label; empty if the file does not say.
        metadata: everything that was saved beside the tensors: format_version, dtype, stride, image_size, ...
        path: the file that was read.
    """

    state_dict: dict[str, Tensor]
    config: dict[str, Any] | None
    names: dict[int, str]
    metadata: dict[str, Any]
    path: Path


@dataclass(frozen=True, slots=True)
class TransferReport:
    """Which entries of a model came from a file.

    Args:
        taken: copied.
        mismatched: (key, shape in the file, shape in the model): in both, but not of one shape; left as they were.
        missing: in the model alone; left as they were.
        skipped: in both, but not wanted.
        unused: in the file alone.
    """

    taken: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    missing: tuple[str, ...]
    skipped: tuple[str, ...]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        total = len(self.taken) + len(self.mismatched) + len(self.missing) + len(self.skipped)
        lines = [f"{len(self.taken)} of {total} entries taken"]
        if self.mismatched:
            shapes = ", ".join(f"{key} {list(found)} -> {list(wanted)}" for key, found, wanted in self.mismatched)
            lines.append(f"{len(self.mismatched)} of another shape, newly initialised: {shapes}")
        for title, keys in (("not in the file", self.missing), ("not wanted", self.skipped), ("unused", self.unused)):
            if keys:
                lines.append(f"{len(keys)} {title}: {_shortened(keys)}")
        return "; ".join(lines)


def save_weights(
    path: str | Path,
    model: DetectionModel | Mapping[str, Tensor],
    metadata: Mapping[str, Any] | None = None,
    *,
    half: bool = False,
) -> None:
    """Write a weights file that is either whole or absent.

    The tensors are copied; the live model is not changed.

    Args:
        path: the file; its folder is made.
        model: a model, from which config, names and stride are taken, or a state dict, for which `metadata` names
            them.
        metadata: more to keep, JSON types; wins over what the model says.
        half: float16 instead of float32, except anchors and tensors with values beyond float16.

    Raises:
        WeightsError: if the file cannot be written, or if the model's BatchNorms are folded.
    """
    path = Path(path)
    described: dict[str, Any] = {"format_version": FORMAT_VERSION, "dtype": "float16" if half else "float32"}
    state: Mapping[str, Tensor]
    if isinstance(model, DetectionModel):
        described |= _describe(model, path)
        state = model.state_dict()
    else:
        state = model
    described |= dict(metadata or {})
    tensors = {key: _storable(key, value, half=half) for key, value in strip_prefixes(state).items()}
    _write_atomically(path, save(tensors, {METADATA_KEY: json.dumps(described)}))


def load_weights(path: str | Path) -> LoadedWeights:
    """Read a weights file, or the best (else the last) weights of a run folder.

    Raises:
        WeightsError: if there is no such file, or it is damaged, or not in a format that we read.
    """
    file = _find_file(Path(path).expanduser())
    if file.suffix.lower() in (".pt", ".pth") or _looks_like_a_pickle(file):
        return _read_pickle(file)
    try:
        with safe_open(file, framework="pt") as archive:
            header = archive.metadata() or {}
            stored = {key: archive.get_tensor(key) for key in archive.keys()}  # noqa: SIM118
    # A foreign header can make the reader fail in many ways.
    except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
        raise WeightsError(
            "a weights file cannot be read; it is damaged, or not in the safetensors format.",
            found=f"{file} ({file.stat().st_size} bytes): {error}",
            fix="copy or download the file again, or give another one (safetensors, or a run folder).",
        ) from error
    metadata = _parse_metadata(header, file)
    state = {key: value.float() if value.is_floating_point() else value for key, value in stored.items()}
    names = {int(label): str(name) for label, name in metadata.get("names", {}).items()}
    return LoadedWeights(strip_prefixes(state), metadata.get("config"), names, metadata, file)


def load_model(path: str | Path) -> DetectionModel:
    """The network of a weights file or run folder, float32, on the CPU, in eval mode, with its class names.

    torch's global generator is as before.

    Raises:
        WeightsError: as `load_weights`; also if the file has no config, or its tensors are not those of the config.
    """
    return build_model(load_weights(path))


def build_model(loaded: LoadedWeights) -> DetectionModel:
    """`load_model` for weights that were already read."""
    if loaded.config is None:
        raise WeightsError(
            "a weights file does not say which network it belongs to.",
            found=f"{loaded.path} without metadata of accel_yolo",
            fix="give a file that accel-yolo wrote; or train with --cfg and these --weights.",
        )
    with torch.random.fork_rng(devices=[]):
        model = DetectionModel(loaded.config)
    report = transfer(model, loaded.state_dict)
    has_all_names = not loaded.names or sorted(loaded.names) == list(range(model.num_classes))
    if report.mismatched or report.missing or not has_all_names:
        raise WeightsError(
            "the tensors or class names of a weights file are not those of its own config.",
            found=f"{loaded.path}: {len(loaded.names)} names for {model.num_classes} classes; {report}",
            fix="give the file as accel-yolo wrote it (a damaged or edited one cannot be used).",
        )
    model.names = loaded.names or model.names
    return model.eval()


def transfer(model: nn.Module, state_dict: Mapping[str, Tensor], *, skip: Sequence[str] = ()) -> TransferReport:
    """Copy the entries whose key and shape are the model's; the others stay as they are.

    Args:
        model: the bare module.
        state_dict: any device and dtype; prefixes of wrappers and `anchor_grid` are ignored.
        skip: leave out keys that contain one of these, such as "anchor".

    Raises:
        WeightsError: if no weight at all fits; the model is then unchanged.
    """
    offered = strip_prefixes(state_dict)
    own = model.state_dict()
    skipped = [key for key in own if key in offered and any(part in key for part in skip)]
    common = [key for key in own if key in offered and key not in skipped]
    taken = [key for key in common if offered[key].shape == own[key].shape]
    report = TransferReport(
        taken=tuple(taken),
        mismatched=tuple(
            (key, tuple(offered[key].shape), tuple(own[key].shape))
            for key in common
            if offered[key].shape != own[key].shape
        ),
        missing=tuple(key for key in own if key not in offered),
        skipped=tuple(skipped),
        unused=tuple(key for key in offered if key not in own),
    )
    # Counters fit every network; one that shares nothing else is another network.
    if not any(own[key].is_floating_point() and own[key].ndim > 0 for key in taken):
        raise WeightsError(
            "none of the weights fit this model.",
            found=f"{report}; the model's first keys: {_shortened(list(own))}",
            fix="give weights of the same architecture and size as --cfg, or leave out --weights.",
        )
    with torch.no_grad():
        for key in taken:
            own[key].copy_(offered[key])
    return report


def strip_prefixes(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of the bare model: wrappers' prefixes and the derived `anchor_grid` are gone.

    Raises:
        WeightsError: if two entries end up with one name.
    """
    bare: dict[str, Tensor] = {}
    for key, value in state_dict.items():
        name = key
        while name.startswith(WRAPPER_PREFIXES):
            name = name.split(".", 1)[1]
        if name.endswith("anchor_grid"):
            continue
        if name in bare:
            raise WeightsError(
                "two entries of a weights file have one name.",
                found=f"{name!r} once more as {key!r}",
                fix="save the model or its average, not both, in one file.",
            )
        bare[name] = value
    return bare


def _read_pickle(path: Path) -> LoadedWeights:
    imported = read_yolov5_pickle(path)
    metadata: dict[str, Any] = {"source": imported.source_note}
    config = None
    if imported.config and imported.strides:
        # Files carry keys that are not about the network; and AutoAnchor changed the network, not its YAML.
        config = {key: imported.config[key] for key in (*REQUIRED_KEYS, *OPTIONAL_KEYS) if key in imported.config}
        anchors_px = imported.anchors_grid.double() * torch.tensor(imported.strides).double().view(-1, 1, 1)
        config["anchors"] = anchors_px.flatten(1).tolist()
        config["nc"] = imported.num_classes
        metadata["stride"] = imported.strides
    return LoadedWeights(strip_prefixes(imported.state_dict), config, imported.names, metadata, path)


def _describe(model: DetectionModel, path: Path) -> dict[str, Any]:
    if not any(key.endswith(".bn.weight") for key in model.state_dict()):
        raise WeightsError(
            "a model whose BatchNorms are folded cannot be saved as weights.",
            found=f"a fused model, for {path}",
            fix="save the model before fuse().",
        )
    config = dict(model.config)
    if not model.has_placeholder_anchors:
        anchors_px = model.head.anchors.double().cpu() * model.strides.double().cpu().view(-1, 1, 1)
        config["anchors"] = [[round(side, 4) for side in level] for level in anchors_px.flatten(1).tolist()]
    return {
        "config": config,
        "names": {str(label): name for label, name in model.names.items()},
        "stride": list(model.head.strides),
    }


def _storable(key: str, value: Tensor, *, half: bool) -> Tensor:
    # A copy of its own, so that views, channels_last and entries that share memory all survive the format.
    value = value.detach().cpu()
    if value.is_floating_point():
        value = value.float()
        if half and "anchor" not in key and bool((value.half().isfinite() | ~value.isfinite()).all()):
            value = value.half()
    return value.clone(memory_format=torch.contiguous_format)


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise WeightsError(
            "a weights file cannot be written.",
            found=f"{path}: {error}",
            fix="free space on the disk, or choose a folder that can be written to.",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    # The new name must survive a power cut as well as the content. Not every system can open a folder.
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _find_file(path: Path) -> Path:
    if path.is_dir():
        for name in RUN_FILES:
            if (path / name).is_file():
                return path / name
        raise WeightsError(
            "a run folder holds no weights.",
            found=f"{path} without {' and '.join(RUN_FILES)}",
            fix="give the folder of a run that saved weights, or a weights file.",
        )
    if not path.is_file():
        raise WeightsError(
            "there is no such weights file.",
            found=f"{path} in {Path.cwd()}",
            fix="give the path of an existing file or run folder; weights are never downloaded.",
        )
    return path


def _looks_like_a_pickle(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError:
        return False
    # A zip archive, or a bare pickle. A safetensors file has eight bytes of length, then the JSON of its header.
    return start.startswith(b"PK\x03\x04") or (start.startswith(b"\x80") and start[8:] != b"{")


def _parse_metadata(header: Mapping[str, str], path: Path) -> dict[str, Any]:
    if METADATA_KEY not in header:
        return {}
    try:
        metadata = json.loads(header[METADATA_KEY])
        is_usable = (
            isinstance(metadata, dict)
            and isinstance(metadata.get("config", {}), dict)
            and all(str(label).isdecimal() for label in dict(metadata.get("names", {})))
            and isinstance(metadata["format_version"], int)
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        is_usable = False
    if not is_usable:
        raise WeightsError(
            "the metadata of a weights file cannot be understood.",
            found=f"{path}: {header[METADATA_KEY][:200]}",
            fix="give the file as accel-yolo wrote it (a damaged or edited one cannot be used).",
        )
    if metadata["format_version"] > FORMAT_VERSION:
        raise WeightsError(
            "a weights file was written by a newer version of accel-yolo.",
            found=f"{path}: format {metadata['format_version']}, this version reads up to {FORMAT_VERSION}",
            fix="upgrade accel-yolo.",
        )
    return metadata


def _shortened(keys: Iterable[str], limit: int = 4) -> str:
    keys = list(keys)
    return ", ".join(keys[:limit]) + (f" and {len(keys) - limit} more" if len(keys) > limit else "")
