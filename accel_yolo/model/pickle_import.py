"""Reads the tensors, anchors and class names of a YOLOv5 `.pt` file without running anything that is in it.

A `.pt` is a zip archive: raw tensor bytes beside a pickle, and a pickle is a program. Python's unpickler is never
called here: a small machine runs the program's opcodes on values that cannot act. A class becomes its name, an
object of it a record of attributes, a tensor a reference into the archive; no name is ever imported or called. What
a file may cost is bounded by its size on disk.

Legend: L detection levels, A anchors per cell, K classes.
"""

from __future__ import annotations

import io
import math
import pickletools
import re
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_yolo.errors import WeightsError

# The largest released checkpoint with EMA and optimizer state needs about 0.3 M opcodes and 1 MiB.
_MAX_OPCODES = 1_000_000
_MAX_PROGRAM_BYTES = 16 * 2**20
# zipfile turns every 46 bytes of directory into an object of half a kilobyte.
_MAX_DIRECTORY_BYTES = 4 * 2**20
# Modules and their tensors; the largest released network has 1600 of them.
_MAX_PARTS = 100_000
_MAX_DEPTH = 32
_MAX_CLASSES = 100_000
# Beyond it two integers may share a hash, and decimal text takes ages.
_HUGE = 2**60


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """What a YOLOv5 `.pt` holds.

    Args:
        state_dict: tensors by state-dict key (`model.0.conv.weight`), on the CPU, contiguous, floats as float32,
            integers unchanged; `anchor_grid` of old files is left out, it follows from anchors and strides.
        config: the effective model YAML, plain values only. Its `anchors` may be older than `anchors_grid`: AutoAnchor
            changes the network, not the YAML. Empty when the file is a bare state dict.
        names: class names by label, K entries; `class0`, ... where the file has none.
        strides: L px per grid cell; empty when the file is a bare state dict.
        anchors_grid: (L, A, 2) float32, (width, height) in grid units of their level: the network's own buffer.
        num_classes: K, read from the shape of the head's convolutions.
        source_note: which entry of the file was used.
        epoch: last finished epoch; None when the file does not say, or was stripped (-1).
    """

    state_dict: dict[str, Tensor]
    config: dict[str, Any]
    names: dict[int, str]
    strides: list[float]
    anchors_grid: Tensor
    num_classes: int
    source_note: str
    epoch: int | None = None


def read_yolov5_pickle(path: str | Path) -> ImportedModel:
    """Reads a `.pt` of YOLOv5 (v5.0 to v7.0, fine-tunes, stripped or not); safe on files that nobody vouches for.

    The EMA weights are taken when the file has them: they are what YOLOv5 evaluates. A bare state dict, alone or
    under `model`, `ema` or `state_dict`, is read too.

    Args:
        path: a file written by torch.save with torch 1.6 or later (a zip archive).

    Raises:
        WeightsError: if the file is missing, damaged, hostile, or not a YOLOv5 detection model; says what it seems
            to be.
    """
    path = Path(path)
    try:
        with _Archive(path) as archive:
            checkpoint = _InertMachine().run(archive.program)
            return _read_checkpoint(checkpoint, archive)
    except _RefusalError as refusal:
        raise WeightsError(refusal.what, found=f"{refusal.found} in {path}", fix=refusal.fix) from None


class _RefusalError(Exception):
    """A WeightsError whose path is not yet known."""

    def __init__(self, what: str, *, found: str, fix: str) -> None:
        super().__init__(what)
        self.what, self.found, self.fix = what, found, fix


@dataclass(frozen=True, slots=True)
class _Global:
    """A class or function that the pickle names."""

    name: str


@dataclass(eq=False, slots=True)
class _Record:
    """An object of a class that is never imported."""

    kind: str
    attributes: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _StorageReference:
    """Raw numbers in the archive, not yet read."""

    key: str
    dtype: torch.dtype
    numel: int


@dataclass(eq=False, slots=True)
class _TensorReference:
    """A view of a storage. Nothing in it is checked before `_Archive.tensor` reads it."""

    storage: Any
    offset: Any
    size: Any
    stride: Any


_STORAGE_DTYPES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}

# Packages whose names are met in honest checkpoints. All of them stay names.
_INERT_PACKAGES = {
    *("torch", "collections", "numpy", "models", "utils", "yolov5", "ultralytics"),
    *("pathlib", "argparse", "datetime"),
}
_INERT_BUILTINS = {
    *("set", "frozenset", "dict", "list", "tuple", "slice", "range", "object"),
    *("int", "float", "complex", "bool", "str", "bytes", "bytearray"),
}

_FAMILIES = {
    "ultralytics": "an Ultralytics model (YOLOv8 or later, or one of the anchor-free yolov5*u files)",
    "mmdet": "an MMDetection checkpoint",
    "mmengine": "an MMDetection or MMYOLO checkpoint",
    "mmcv": "an MMDetection checkpoint",
    "mmyolo": "an MMYOLO checkpoint",
    "yolox": "a YOLOX model",
    "yolov6": "a YOLOv6 model",
    "super_gradients": "a YOLO-NAS or other super-gradients model",
    "detectron2": "a Detectron2 model",
    "effdet": "an EfficientDet model",
    "nanodet": "a NanoDet model",
    "torchvision": "a torchvision model",
    "transformers": "a Transformers model",
    "timm": "a timm model",
    "lightning": "a Lightning checkpoint",
    "pytorch_lightning": "a Lightning checkpoint",
}
_HEAD_FAMILIES = {
    "Segment": "a YOLOv5 segmentation model",
    "Classify": "a YOLOv5 classification model",
    "Decoupled_Detect": "a YOLOv5 fork with a decoupled head",
    "IDetect": "a YOLOv7 model",
    "IAuxDetect": "a YOLOv7 model",
    "IBin": "a YOLOv7 model",
    "IKeypoint": "a YOLOv7 pose model",
    "DDetect": "a YOLOv9 model",
    "DualDDetect": "a YOLOv9 model",
    "TripleDDetect": "a YOLOv9 model",
}


class _InertMachine:
    """Runs the opcodes of one pickle. Nothing is copied, so memory grows with the number of opcodes alone."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        # Stacks set aside at each MARK, as in the pickle protocol.
        self.suspended: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        try:
            for count, (opcode, argument, _) in enumerate(pickletools.genops(program)):
                if opcode.name == "STOP":
                    return self.stack.pop()
                if count >= _MAX_OPCODES:
                    raise _hostile(f"a pickle of more than {_MAX_OPCODES} opcodes")
                self._step(opcode.name, argument)
        # An empty stack, an unknown memo entry, a cut argument, an operand of the wrong kind.
        except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise _damaged(f"a broken pickle ({type(error).__name__})") from None
        raise _damaged("a pickle without an end")

    def _step(self, opcode: str, argument: Any) -> None:
        stack = self.stack
        match opcode:
            case "PROTO" | "FRAME":
                pass
            case _ if opcode in _CONSTANTS:
                stack.append(_CONSTANTS[opcode])
            case _ if opcode in _LITERALS:
                stack.append(argument)
            case "GLOBAL":
                module, _, name = argument.partition(" ")
                stack.append(_inert_global(module, name))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_inert_global(module, name))
            case "BINPUT" | "LONG_BINPUT" | "PUT":
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET" | "GET":
                stack.append(self.memo[argument])
            case "MARK":
                self.suspended.append(stack)
                self.stack = []
            case "POP":
                stack.pop()
            case "POP_MARK":
                self._pop_mark()
            case "DUP":
                stack.append(stack[-1])
            case "EMPTY_DICT":
                stack.append({})
            # A set is only ever asked for membership; a list spares hashing what a stranger chose.
            case "EMPTY_LIST" | "EMPTY_SET":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                length = int(opcode[-1])
                if len(stack) < length:
                    raise IndexError
                stack[-length:] = [tuple(stack[-length:])]
            case "TUPLE" | "LIST" | "FROZENSET":
                values = self._pop_mark()
                self.stack.append(tuple(values) if opcode == "TUPLE" else values)
            case "DICT":
                values = self._pop_mark()
                self.stack.append({})
                self._set_items(values)
            case "APPEND":
                value = stack.pop()
                self._extend([value])
            case "APPENDS" | "ADDITEMS":
                self._extend(self._pop_mark())
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                self._set_items([key, value])
            case "SETITEMS":
                self._set_items(self._pop_mark())
            case "BINPERSID":
                stack.append(_storage_reference(stack.pop()))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(_reduce(function, arguments))
            case "NEWOBJ":
                stack.pop()
                stack.append(_Record(stack.pop().name))
            case "NEWOBJ_EX":
                del stack[-2:]
                stack.append(_Record(stack.pop().name))
            case "BUILD":
                state, target = stack.pop(), stack[-1]
                if isinstance(target, _Record) and isinstance(state, dict):
                    target.attributes = state
            case _:
                raise _hostile(f"pickle opcode {opcode}")

    def _pop_mark(self) -> list[Any]:
        values, self.stack = self.stack, self.suspended.pop()
        return values

    def _extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif not isinstance(target, _Record):
            raise TypeError

    def _set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, dict):
            for key, value in zip(values[::2], values[1::2], strict=True):
                target[_checked_key(key)] = value
        elif not isinstance(target, _Record):
            raise TypeError


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}


def _inert_global(module: Any, name: Any) -> _Global:
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError
    full_name = f"{module}.{name}"
    package = module.partition(".")[0]
    is_builtin = module in ("builtins", "__builtin__") and name in _INERT_BUILTINS
    is_known = package in _INERT_PACKAGES or is_builtin or full_name == "_codecs.encode"
    if is_known and re.fullmatch(r"[\w.]+", full_name):
        return _Global(full_name)
    if package in _FAMILIES:
        raise _not_yolov5(_FAMILIES[package], found=f"it names {_short(full_name)}")
    raise _hostile(f"the name {_short(full_name)}, which has no place in a YOLOv5 checkpoint,")


def _reduce(function: Any, arguments: Any) -> Any:
    """What a call in the pickle stands for; nothing is called."""
    if not isinstance(arguments, tuple):
        raise TypeError
    match function.name:
        case "torch._utils._rebuild_tensor_v2" | "torch._utils._rebuild_tensor":
            return _TensorReference(*arguments[:4])
        case "torch._utils._rebuild_parameter" | "torch._utils._rebuild_parameter_with_state" | "torch.Size":
            return arguments[0]
        case "collections.OrderedDict" if not arguments:
            return {}
        case "builtins.set" | "__builtin__.set" | "builtins.frozenset" | "__builtin__.frozenset":
            return arguments[0] if arguments else []
    return _Record(function.name)


def _storage_reference(identity: Any) -> _StorageReference:
    tag, kind, key, _, numel = identity[:5]
    if tag != "storage" or not isinstance(key, str) or not isinstance(numel, int):
        raise TypeError
    if kind.name not in _STORAGE_DTYPES:
        raise _damaged(f"a tensor of unknown type {_short(kind.name)}")
    return _StorageReference(key, _STORAGE_DTYPES[kind.name], numel)


def _checked_key(key: Any) -> Any:
    # The hash of a nested tuple and the collisions of huge integers can be made to take hours.
    parts = key if isinstance(key, tuple) else (key,)
    for part in parts:
        is_small_number = isinstance(part, (bool, int, float, type(None))) and abs(part or 0) < _HUGE
        if not is_small_number and not isinstance(part, (str, bytes, _Global, _Record)):
            raise TypeError
    return key


class _SparingFile(io.FileIO):
    """A file that refuses one giant read, whatever the zip headers claim."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            # zipfile reads to the end only for the archive's comment, which has at most 2**16 bytes.
            return super().read(2**17)
        if size > _MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile("a zip directory of absurd size")
        return super().read(size)


class _Archive:
    """The zip around a pickle and its storages. Everything in it is stored, not compressed: no bomb can be packed."""

    def __init__(self, path: Path) -> None:
        _check_kind_of_file(path)
        self.size = path.stat().st_size
        self.file = _SparingFile(path)
        try:
            try:
                self.zip = zipfile.ZipFile(self.file)
            except _ZIP_ERRORS:
                raise _damaged("a zip archive without a readable directory: cut off or overwritten") from None
            self.entries = self._checked_entries()
            self.prefix = self._find_prefix()
            if (order := self.entries.get(f"{self.prefix}byteorder")) and self._read(order) != b"little":
                raise _unreadable("big-endian tensors", fix="save it again on a little-endian machine")
            program = self.entries[f"{self.prefix}data.pkl"]
            if program.file_size > _MAX_PROGRAM_BYTES:
                raise _hostile(f"a pickle of {program.file_size} bytes")
            self.program = bytes(self._read(program))
        except BaseException:
            self.file.close()
            raise
        self.loaded: dict[_StorageReference, Tensor] = {}
        # Every stored number is at least a byte, so honest tensors hold no more numbers than the file has bytes.
        self.numbers_left = self.size

    def __enter__(self) -> _Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def tensor(self, reference: _TensorReference) -> Tensor:
        """Reads one tensor: contiguous, with memory of its own, floats as float32."""
        storage, offset, size, stride = reference.storage, reference.offset, reference.size, reference.stride
        if not isinstance(storage, _StorageReference) or not _is_view(offset, size, stride, numel=storage.numel):
            raise _hostile("a tensor that reaches outside its storage")
        self.numbers_left -= math.prod(size)
        if self.numbers_left < 0:
            raise _hostile("tensors that hold more numbers than the file has bytes")
        # A dimension of one has a stride without meaning, possibly beyond 64 bits.
        strides = [step if length > 1 else 1 for length, step in zip(size, stride, strict=True)]
        view = self._storage(storage).as_strided(size, strides, offset if math.prod(size) else 0)
        dtype = torch.float32 if storage.dtype.is_floating_point else storage.dtype
        return view.to(dtype, copy=True, memory_format=torch.contiguous_format)

    def _storage(self, reference: _StorageReference) -> Tensor:
        if reference not in self.loaded:
            entry = self.entries.get(f"{self.prefix}data/{reference.key}")
            if entry is None:
                raise _damaged(f"no bytes for storage {_short(reference.key)}")
            needed = reference.numel * reference.dtype.itemsize
            if not 0 <= needed <= entry.file_size:
                raise _hostile(f"storage {_short(reference.key)} of {entry.file_size} bytes that claims {needed}")
            data = self._read(entry)
            # frombuffer refuses an empty buffer.
            self.loaded[reference] = (
                torch.frombuffer(data, dtype=reference.dtype, count=reference.numel)
                if reference.numel
                else torch.empty(0, dtype=reference.dtype)
            )
        return self.loaded[reference]

    def _checked_entries(self) -> dict[str, zipfile.ZipInfo]:
        entries = {info.filename: info for info in self.zip.infolist()}
        if any(name.endswith("/constants.pkl") for name in entries):
            raise _not_yolov5("a TorchScript export", found="compiled code, not weights,")
        if len(entries) != len(self.zip.infolist()):
            raise _hostile("a zip archive with two entries of one name")
        for name, info in entries.items():
            if name.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", name):
                raise _hostile(f"zip entry {_short(name)}, whose name leaves the archive,")
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise _unreadable(
                    f"zip entry {_short(name)}, which is compressed or encrypted,",
                    fix="torch.save never compresses: take the original file, or load and save it again with torch",
                )
            if info.file_size != info.compress_size or info.header_offset + info.file_size > self.size:
                raise _hostile(f"zip entry {_short(name)}, whose declared size is not true,")
        if sum(info.file_size for info in entries.values()) > self.size:
            raise _hostile("zip entries that overlap")
        return entries

    def _find_prefix(self) -> str:
        pickles = [name for name in self.entries if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise _not_yolov5("a zip archive of something else", found=f"{len(pickles)} entries called data.pkl")
        return pickles[0].removesuffix("data.pkl")

    def _read(self, entry: zipfile.ZipInfo) -> bytearray:
        data = bytearray(entry.file_size)
        view = memoryview(data)
        position = 0
        try:
            with self.zip.open(entry) as stream:
                # In small pieces, as _SparingFile allows; zipfile compares the checksum at the end.
                while chunk := stream.read(2**20):
                    view[position : position + len(chunk)] = chunk
                    position += len(chunk)
        except _ZIP_ERRORS:
            raise _damaged(f"zip entry {_short(entry.filename)}, whose header or checksum is wrong,") from None
        if position != len(data):
            raise _damaged(f"zip entry {_short(entry.filename)}, which is cut off,")
        return data


# Everything that zipfile raises on a directory or a header of garbage.
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, OverflowError),
    *(EOFError, OSError, struct.error, LookupError),
)


def _check_kind_of_file(path: Path) -> None:
    if not path.is_file():
        found = "a folder, not a file," if path.is_dir() else "no file at this path:"
        raise _unreadable(found, fix="give the path of a .pt or .safetensors file")
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except OSError as error:
        raise _unreadable(f"{error.strerror}", fix="make the file readable") from None
    if start.startswith(b"PK"):
        return
    if start.startswith(b"version https://git-lfs"):
        raise _unreadable("a Git LFS pointer, not the weights themselves,", fix="run `git lfs pull` in that repository")
    if start.lstrip()[:1] == b"<":
        raise _unreadable("a web page, not weights,", fix="download the file itself, not the page that shows it")
    if start.startswith(b"\x80") or start[257:262] == b"ustar":
        raise _unreadable(
            "a bare pickle, as torch wrote them before version 1.6,",
            fix="if you trust it, load it with the code that made it and torch.save it again with torch 1.6 or later",
        )
    if start[8:9] == b"{":
        raise _unreadable("safetensors content", fix="rename the file so that it ends in .safetensors")
    raise _unreadable(
        "an empty file" if not start else f"an unknown kind of file that starts with {start[:8]!r}",
        fix="give a .pt of YOLOv5, or a .safetensors file of this project",
    )


def _is_view(offset: Any, size: Any, stride: Any, *, numel: int) -> bool:
    """Whether a view of a storage of `numel` numbers stays inside it and repeats none by a zero stride."""
    if not isinstance(size, tuple) or not isinstance(stride, tuple) or len(size) != len(stride) or len(size) > 16:
        return False
    if not all(type(number) is int and number >= 0 for number in (offset, *size, *stride)):
        return False
    if 0 in size:
        return math.prod(length or 1 for length in size) < 2**31
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    return last < numel and math.prod(size) <= numel


def _read_checkpoint(checkpoint: Any, archive: _Archive) -> ImportedModel:
    source, model = _find_model(checkpoint)
    extras = checkpoint if isinstance(checkpoint, dict) else {}
    if isinstance(model, _Record):
        head = _find_head(model)
        tensors = dict(_walk(model))
        config, names = model.attributes.get("yaml"), model.attributes.get("names")
        stride = head.attributes.get("stride", model.attributes.get("stride"))
    else:
        tensors = {key: value for key, value in model.items() if isinstance(value, _TensorReference)}
        config, names, stride = extras.get("yaml"), extras.get("names"), extras.get("stride")
    tensors = _without_prefix(tensors)
    # Before anything is read: the file may be a large one of another kind.
    head_prefix = _find_head_prefix(tensors)
    state_dict = {key: archive.tensor(value) for key, value in tensors.items() if not key.endswith(".anchor_grid")}
    anchors, num_classes = _read_head(state_dict, head_prefix)
    epoch = extras.get("epoch")
    return ImportedModel(
        state_dict=state_dict,
        config=_plain(config, _Budget()) if isinstance(config, dict) else {},
        names=_class_names(names, num_classes=num_classes),
        strides=_read_strides(stride, archive, num_levels=len(anchors)),
        anchors_grid=anchors.clone(),
        num_classes=num_classes,
        source_note=source,
        epoch=epoch if isinstance(epoch, int) and 0 <= epoch < _HUGE else None,
    )


def _find_model(checkpoint: Any) -> tuple[str, _Record | dict[Any, Any]]:
    """The module or the state dict in a checkpoint, and which entry it was."""
    if isinstance(checkpoint, _Record):
        return "the file's one module", _unwrapped(checkpoint)
    if not isinstance(checkpoint, dict):
        raise _not_yolov5("a pickle of something else", found=f"a {type(checkpoint).__name__.strip('_').lower()}")
    for entry in ("ema", "model", "state_dict"):
        value = checkpoint.get(entry)
        # Some versions of 2021 saved EMA weights with their update count.
        if isinstance(value, (tuple, list)) and value:
            value = value[0]
        if isinstance(value, _Record):
            return entry, _unwrapped(value)
        if isinstance(value, dict) and any(isinstance(tensor, _TensorReference) for tensor in value.values()):
            return entry, value
    if any(isinstance(tensor, _TensorReference) for tensor in checkpoint.values()):
        return "the file's state dict", checkpoint
    keys = ", ".join(_short(key) for key in list(checkpoint)[:8] if isinstance(key, str))
    raise _not_yolov5("a dictionary without a model", found=f"the keys {keys or '(none)'}")


def _unwrapped(record: _Record) -> _Record:
    """The network inside DistributedDataParallel, DataParallel, or what torch.hub puts around it."""
    for _ in range(_MAX_DEPTH):
        children = _dict_attribute(record, "_modules")
        child = children.get("module", children.get("model"))
        # The network's own `model` is a Sequential, whose children have numbers.
        if not isinstance(child, _Record) or not {"model", "module"} & _dict_attribute(child, "_modules").keys():
            break
        record = child
    return record


def _find_head(model: _Record) -> _Record:
    layers = _dict_attribute(model, "_modules").get("model")
    children = list(_dict_attribute(layers, "_modules").values()) if isinstance(layers, _Record) else []
    head = children[-1] if children else None
    package = model.kind.partition(".")[0]
    if package in _FAMILIES:
        raise _not_yolov5(_FAMILIES[package], found=f"an object of {_short(model.kind)}")
    if not isinstance(head, _Record):
        raise _not_yolov5(
            "another network", found=f"an object of {_short(model.kind)}, without layers in `model.model`,"
        )
    module, _, name = head.kind.rpartition(".")
    if name != "Detect" or not module.endswith("models.yolo"):
        family = _HEAD_FAMILIES.get(name, "another network")
        raise _not_yolov5(family, found=f"an object of {_short(model.kind)} that ends in {_short(head.kind)}")
    return head


def _walk(model: _Record) -> Iterator[tuple[str, _TensorReference]]:
    """Tensors by state-dict key, in the order of torch's state_dict."""
    budget = _Budget()

    def visit(module: _Record, prefix: str, depth: int) -> Iterator[tuple[str, _TensorReference]]:
        transient = module.attributes.get("_non_persistent_buffers_set")
        transient = transient[:_MAX_DEPTH] if isinstance(transient, list) else []
        groups = [_dict_attribute(module, name) for name in ("_parameters", "_buffers", "_modules")]
        budget.spend(1 + sum(len(group) for group in groups), depth=depth)
        parameters, buffers, children = groups
        for name, value in [*parameters.items(), *buffers.items()]:
            if isinstance(value, _TensorReference) and name not in transient:
                yield f"{prefix}{name}", value
        for name, child in children.items():
            if isinstance(child, _Record):
                yield from visit(child, f"{prefix}{name}.", depth + 1)

    yield from visit(model, "", 0)


def _dict_attribute(record: _Record, name: str) -> dict[str, Any]:
    value = record.attributes.get(name, {})
    if not isinstance(value, dict) or len(value) > _MAX_PARTS:
        raise _damaged(f"a module of {_short(record.kind)} with unreadable {name}")
    if not all(isinstance(key, str) and len(key) < 200 for key in value):
        raise _damaged(f"a module of {_short(record.kind)} whose {name} have no names")
    return value


class _Budget:
    """Counts visits, so that parts that contain themselves, or each other many times, come to an end."""

    def __init__(self) -> None:
        self.left = _MAX_PARTS

    def spend(self, parts: int, *, depth: int) -> None:
        self.left -= parts
        if self.left < 0 or depth > _MAX_DEPTH:
            raise _hostile("parts that contain each other without end")


def _without_prefix(tensors: dict[Any, _TensorReference]) -> dict[str, _TensorReference]:
    """State-dict keys without what DistributedDataParallel or torch.hub puts before them."""
    if not all(isinstance(key, str) and len(key) < 1000 for key in tensors):
        raise _damaged("a state dict whose keys are not names")
    for _ in range(_MAX_DEPTH):
        if not all(key.startswith("module.") for key in tensors) and not all(
            key.startswith("model.model.") for key in tensors
        ):
            break
        tensors = {key.partition(".")[2]: value for key, value in tensors.items()}
    return tensors


def _find_head_prefix(tensors: dict[str, _TensorReference]) -> str:
    """`model.24.` or the like."""
    heads = [key for key in tensors if re.fullmatch(r"model\.\d+\.anchors", key)]
    if len(heads) != 1:
        shown = ", ".join(_short(key) for key in list(tensors)[:4])
        raise _not_yolov5("another network", found=f"a state dict without `model.<n>.anchors` ({shown or 'empty'})")
    return heads[0].removesuffix("anchors")


def _read_head(state_dict: dict[str, Tensor], prefix: str) -> tuple[Tensor, int]:
    """Anchors (L, A, 2) in grid units and the number of classes; refuses what is not a YOLOv5 Detect head."""
    anchors = state_dict[f"{prefix}anchors"]
    if anchors.ndim != 3 or anchors.shape[2] != 2 or 0 in anchors.shape or not anchors.is_floating_point():
        raise _not_yolov5("another network", found=f"anchors of shape {tuple(anchors.shape)} instead of (L, A, 2)")
    if not bool((anchors > 0).all() and anchors.isfinite().all()):
        raise _damaged("anchors that are not positive numbers")
    num_levels, num_anchors, _ = anchors.shape
    expected = {f"{prefix}anchors"} | {
        f"{prefix}m.{i}.{kind}" for i in range(num_levels) for kind in ("weight", "bias")
    }
    actual = {key for key in state_dict if key.startswith(prefix)}
    if actual != expected:
        odd = ", ".join(_short(key) for key in sorted(actual ^ expected)[:4])
        raise _not_yolov5("a YOLO of another kind", found=f"a head with other tensors than Detect's ({odd})")
    channels = {state_dict[f"{prefix}m.{i}.bias"].numel() for i in range(num_levels)}
    num_classes, rest = divmod(max(channels), num_anchors)
    num_classes -= 5
    if len(channels) != 1 or rest or not 0 < num_classes <= _MAX_CLASSES:
        raise _not_yolov5("a YOLO of another kind", found=f"head channels {sorted(channels)} at {num_anchors} anchors")
    return anchors, num_classes


def _class_names(names: Any, *, num_classes: int) -> dict[int, str]:
    """Names from a list or a dict with integer keys; what is missing gets a name of its own."""
    entries = names if isinstance(names, dict) else dict(enumerate(names)) if isinstance(names, (list, tuple)) else {}
    return {label: _printable(entries.get(label), default=f"class{label}") for label in range(num_classes)}


def _printable(name: Any, *, default: str) -> str:
    # YAML reads a class called 1 or no as a number or a bool.
    if isinstance(name, str):
        # A name reaches terminals and pictures: no escape sequences, no lone surrogates.
        return "".join(character if character.isprintable() else "?" for character in name[:200])
    return str(name) if isinstance(name, (int, float)) and abs(name) < _HUGE else default


def _read_strides(stride: Any, archive: _Archive, *, num_levels: int) -> list[float]:
    if not isinstance(stride, _TensorReference):
        return []
    strides = [float(value) for value in archive.tensor(stride).flatten().tolist()]
    if len(strides) != num_levels or not all(math.isfinite(value) and value > 0 for value in strides):
        raise _damaged(f"{len(strides)} strides for {num_levels} detection levels")
    return strides


def _plain(value: Any, budget: _Budget, depth: int = 0) -> Any:
    """A copy of settings made of dicts, lists and scalars; anything else becomes None."""
    budget.spend(1, depth=depth)
    if isinstance(value, dict):
        return {key: _plain(item, budget, depth + 1) for key, item in value.items() if isinstance(key, (str, int))}
    if isinstance(value, (list, tuple)):
        return [_plain(item, budget, depth + 1) for item in value]
    is_number = isinstance(value, (int, float)) and abs(value) < _HUGE
    return value if is_number or isinstance(value, str) else None


def _hostile(found: str) -> _RefusalError:
    return _RefusalError(
        "a weights file does what no YOLOv5 checkpoint does; nothing in it was run.",
        found=found,
        fix="do not load it with other tools either; take the weights from a source that you trust",
    )


def _damaged(found: str) -> _RefusalError:
    return _RefusalError(
        "a weights file is damaged.", found=found, fix="copy or download it again and compare its size with the source"
    )


def _unreadable(found: str, *, fix: str) -> _RefusalError:
    return _RefusalError("a weights file cannot be read.", found=found, fix=fix)


def _not_yolov5(family: str, *, found: str) -> _RefusalError:
    return _RefusalError(
        f"a weights file is not a YOLOv5 detection model; it seems to be {family}.",
        found=found,
        fix="give a detection .pt of YOLOv5 v5.0 to v7.0, or a .safetensors file of this project",
    )


def _short(text: str) -> str:
    """A stranger's text, made fit to print."""
    return ascii(text[:80]).strip("'\"")
