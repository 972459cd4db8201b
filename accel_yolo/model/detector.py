"""A model YAML becomes a `DetectionModel`: the layers, the `Detect` head, decoding, test-time augmentation, fusing.

Legend: B images in a batch, H W pixels, H_l W_l cells of level l, K classes, A anchors per cell, L detection levels,
N predictions of an image (all levels together).
"""

from __future__ import annotations

import ast
import copy
import inspect
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from accel_yolo.boxes import make_divisible
from accel_yolo.config.load import find_config, read_yaml
from accel_yolo.errors import ConfigError, WeightsError, did_you_mean
from accel_yolo.model import blocks

logger = logging.getLogger(__name__)

REQUIRED_KEYS = ("nc", "depth_multiple", "width_multiple", "anchors", "backbone", "head")
OPTIONAL_KEYS = ("activation", "ch", "inplace", "channel_multiple", "names")
BATCHNORM_EPS = 1e-3
BATCHNORM_MOMENTUM = 0.03
# Grey of the padding in test-time augmentation, the mean of ImageNet.
TTA_PADDING = 0.447
TTA_SCALES_AND_FLIPS = ((1.0, False), (0.83, True), (0.67, False))
# Side of the image of zeros that shows the strides.
PROBE_SIZE = 256


class DetectionModel(nn.Module):
    """A detection network of the YOLOv5 family.

    State-dict keys are `model.<row>.<block's attributes>`. Initial weights depend on torch's global generator alone.

    Args:
        config: a model YAML as a dict, its path, or the name of one of ours such as `yolov5n`.
        num_classes: replaces the config's `nc`.
        anchors: replaces the config's `anchors` by this many per level, to be computed from the data.

    Attributes:
        config: the effective config, built-in types only.
        num_classes: K.
        names: class names by label; `"0"`, `"1"`, ... until the caller sets them.
        head: the `Detect` module; `head.anchors` is (L, A, 2), in cells of its level.
        rows: where every layer takes its input from.

    Raises:
        WeightsError: if the config does not describe a network.
        ConfigError: if there is no config of that name.

    Source: model.md.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | str | Path,
        *,
        num_classes: int | None = None,
        anchors: int | None = None,
    ) -> None:
        super().__init__()
        self.config = effective_config(config, num_classes=num_classes, anchors=anchors)
        self.num_classes: int = self.config["nc"]
        self.names = {label: str(label) for label in range(self.num_classes)}
        self.model, self.rows = build_layers(self.config)
        self.frozen_layers: tuple[int, ...] = ()
        self._kept = {source for row in self.rows for source in row.kept_sources}
        _prepare_batch_norms(self)
        self.head.set_strides(_measure_strides(self))
        self.head.add_prior_to_biases()

    @property
    def head(self) -> Detect:
        return self.model[-1]

    @property
    def strides(self) -> Tensor:
        """(L,) float, input px per cell, on the model's device."""
        return torch.tensor(self.head.strides, device=self.head.anchors.device)

    @property
    def max_stride(self) -> int:
        """The input's sides must be multiples of this."""
        return int(max(self.head.strides))

    @property
    def has_placeholder_anchors(self) -> bool:
        """True while the anchors are only counted, not computed."""
        return bool((self.head.anchors <= 0).any())

    def forward(self, images: Tensor) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Predictions of a batch.

        Args:
            images: (B, 3, H, W) float in [0, 1], RGB; H and W multiples of `max_stride`.

        Returns:
            In training mode L maps (B, A, H_l, W_l, 5 + K) of raw logits: x, y, w, h, objectness, classes.
            In eval mode (decoded, maps), decoded as `Detect.decode` gives it.
        """
        maps = self._maps(images)
        return maps if self.training else (self.head.decode(maps), maps)

    def forward_augmented(self, images: Tensor) -> Tensor:
        """Decoded predictions (B, N', 5 + K) of three passes in eval mode: as it is, mirrored at 0.83, and at 0.67.

        The coarsest level of the first pass and the finest of the last are left out.

        Source: eval.md section 5.
        """
        width = images.shape[3]
        passes = []
        for scale, is_mirrored in TTA_SCALES_AND_FLIPS:
            view = images.flip(3) if is_mirrored else images
            decoded = self.head.decode(self._maps(_rescale(view, scale, self.max_stride)))
            x, y, size, scores = decoded.split((1, 1, 2, decoded.shape[2] - 4), 2)
            x, y, size = x / scale, y / scale, size / scale
            passes.append(torch.cat((width - x if is_mirrored else x, y, size, scores), 2))
        num_levels = len(self.head.strides)
        share = sum(4**level for level in range(num_levels))
        first, last = passes[0].shape[1] // share, passes[-1].shape[1] // share * 4 ** (num_levels - 1)
        return torch.cat((passes[0][:, : passes[0].shape[1] - first], *passes[1:-1], passes[-1][:, last:]), 1)

    def fuse(self) -> DetectionModel:
        """Fold every Conv's BatchNorm into its convolution, in place, for inference; returns self."""
        for module in self.modules():
            if isinstance(module, blocks.Conv):
                module.fuse()
        return self

    def freeze(self, layers: Iterable[int]) -> DetectionModel:
        """Stop the training of these rows: neither their parameters nor their BatchNorm statistics move; returns self.

        Raises:
            ConfigError: if a row does not exist.
        """
        self.frozen_layers = tuple(layers)
        unknown = [layer for layer in self.frozen_layers if not 0 <= layer < len(self.model)]
        if unknown:
            raise ConfigError(
                "layers to freeze do not exist.",
                found=f"{unknown} in a network of {len(self.model)} layers",
                fix=f"--freeze takes numbers up to {len(self.model)} (a count) or {len(self.model) - 1} (a list).",
            )
        for layer in self.frozen_layers:
            self.model[layer].requires_grad_(False)
        return self.train(self.training)

    def train(self, mode: bool = True) -> DetectionModel:
        super().train(mode)
        for layer in self.frozen_layers:
            self.model[layer].eval()
        return self

    def _maps(self, images: Tensor) -> list[Tensor]:
        kept: dict[int, Tensor] = {}
        x = images
        for row, layer in zip(self.rows, self.model, strict=True):
            inputs = [x if source == row.index - 1 else kept[source] for source in row.sources]
            x = layer(inputs) if row.takes_list else layer(inputs[0])
            if row.index in self._kept:
                kept[row.index] = x
        return x


class Detect(nn.Module):
    """One 1x1 convolution per level, and the reading of its numbers as boxes.

    Args:
        num_classes: K.
        anchors: (L, A, 2) px.
        channels: input channels of the L levels.

    Attributes:
        anchors: buffer (L, A, 2) float32, in cells of the level once `set_strides` was called.
        strides: L floats, px per cell; plain numbers, so that they follow every device and dtype.
    """

    anchors: Tensor

    def __init__(self, num_classes: int, anchors: np.ndarray, channels: Sequence[int]) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.num_outputs = num_classes + 5
        self.num_anchors = anchors.shape[1]
        self.strides: tuple[float, ...] = ()
        self._anchors_px = anchors
        self.register_buffer("anchors", torch.tensor(anchors, dtype=torch.float32))
        self.m = nn.ModuleList(nn.Conv2d(c, self.num_outputs * self.num_anchors, 1) for c in channels)

    def set_strides(self, strides: Sequence[float]) -> None:
        """Fix the strides and turn the anchors from px into cells, their levels in the strides' order."""
        self.strides = tuple(strides)
        in_cells = order_levels(self._anchors_px, self.strides) / np.asarray(self.strides).reshape(-1, 1, 1)
        self.anchors.copy_(torch.tensor(in_cells, dtype=torch.float32))

    @torch.no_grad()
    def add_prior_to_biases(self) -> None:
        """Start with about 8 objects per 640 px image and with evenly rare classes. Source: model.md section 6."""
        for conv, stride in zip(self.m, self.strides, strict=True):
            bias = conv.bias.view(self.num_anchors, self.num_outputs)
            bias[:, 4] += math.log(8 / (640 / stride) ** 2)
            bias[:, 5:] += math.log(0.6 / (self.num_classes - 0.99999))

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        """L inputs (B, C_l, H_l, W_l) -> L maps (B, A, H_l, W_l, 5 + K) of raw logits."""
        return [
            conv(x).unflatten(1, (self.num_anchors, self.num_outputs)).permute(0, 1, 3, 4, 2)
            for conv, x in zip(self.m, inputs, strict=True)
        ]

    def decode(self, maps: list[Tensor]) -> Tensor:
        """Logits as boxes and probabilities.

        Args:
            maps: L of (B, A, H_l, W_l, 5 + K).

        Returns:
            (B, N, 5 + K): cxcywh in px of the input, objectness, class probabilities (not multiplied); rows by level,
            anchor, row, column. At least float32: 8 bits of a bfloat16 would place a box only to some px.
        """
        decoded = []
        for logits, anchors, stride in zip(maps, self.anchors, self.strides, strict=True):
            dtype = torch.promote_types(logits.dtype, torch.float32)
            height, width = logits.shape[2:4]
            # Made afresh: a few hundred numbers, which then fit this device, dtype and size by construction.
            columns = torch.arange(width, device=logits.device, dtype=dtype)
            rows = torch.arange(height, device=logits.device, dtype=dtype)
            grid = torch.stack((columns.expand(height, width), rows[:, None].expand(height, width)), 2)
            anchors_px = anchors.to(dtype).view(-1, 1, 1, 2) * stride
            centre, size, scores = logits.to(dtype).sigmoid().split((2, 2, self.num_classes + 1), 4)
            centre = (2 * centre - 0.5 + grid) * stride
            size = (2 * size) ** 2 * anchors_px
            decoded.append(torch.cat((centre, size, scores), 4).flatten(1, 3))
        return torch.cat(decoded, 1)


class LayerRow(NamedTuple):
    """One row of a model YAML, checked."""

    index: int
    # As written: an int or a list of ints.
    source: int | list[int]
    # Absolute layer indices; -1 is the image.
    sources: tuple[int, ...]
    kind: str

    @property
    def takes_list(self) -> bool:
        return self.kind in ("Concat", "Detect")

    @property
    def kept_sources(self) -> tuple[int, ...]:
        """Layers whose output must outlive the next row."""
        written = self.source if isinstance(self.source, list) else [self.source]
        return tuple(source for value, source in zip(written, self.sources, strict=True) if value != -1)


def effective_config(
    config: Mapping[str, Any] | str | Path, *, num_classes: int | None = None, anchors: int | None = None
) -> dict[str, Any]:
    """A checked copy of a model config with the overrides applied.

    Raises:
        WeightsError: for a missing key or a value that cannot be used.
    """
    loaded = (
        copy.deepcopy(dict(config))
        if isinstance(config, Mapping)
        else read_yaml(find_config(str(config), "models"), error=WeightsError)
    )
    if num_classes is not None:
        if loaded.get("nc", num_classes) != num_classes:
            logger.info("the model gets %d classes instead of its file's %s", num_classes, loaded["nc"])
        loaded["nc"] = num_classes
    if anchors:
        loaded["anchors"] = anchors
    missing = [key for key in REQUIRED_KEYS if key not in loaded]
    if missing:
        raise WeightsError(
            "a model configuration lacks keys.",
            found=f"no {', '.join(missing)}; there are: {', '.join(map(str, loaded)) or 'none'}",
            fix="add them, as in configs/models/yolov5s.yaml.",
        )
    for key in loaded.keys() - {*REQUIRED_KEYS, *OPTIONAL_KEYS}:
        hint = did_you_mean(str(key), (*REQUIRED_KEYS, *OPTIONAL_KEYS))
        logger.warning("the model configuration's key %r is not used; %s", key, hint)
    loaded.setdefault("ch", 3)
    loaded.setdefault("channel_multiple", 8)
    _check_values(loaded)
    return loaded


def build_layers(config: dict[str, Any]) -> tuple[nn.Sequential, tuple[LayerRow, ...]]:
    """All layers of an effective config, and where each takes its input from."""
    act: blocks.Act = parse_activation(config["activation"]) if config.get("activation") else True
    written = [*config["backbone"], *config["head"]]
    channels = [config["ch"]]
    layers: list[nn.Module] = []
    rows: list[LayerRow] = []
    for index, values in enumerate(written):
        row, repeats, args = _read_row(index, values, is_last=index == len(written) - 1)
        if repeats > 1:
            repeats = max(round(repeats * config["depth_multiple"]), 1)
        # channels[0] is the image, so that source -1 is found at index 0.
        cin = [channels[source + 1] for source in row.sources]
        try:
            layer, cout = _build_layer(row.kind, repeats, _resolve(args, config), cin, config, act)
        except (TypeError, ValueError, RuntimeError, IndexError, ZeroDivisionError) as error:
            raise _row_fault(index, f"{row.kind} cannot be built with these arguments", f"{values}: {error}") from error
        layers.append(layer)
        rows.append(row)
        channels.append(cout)
    return nn.Sequential(*layers), tuple(rows)


def count_gflops(model: DetectionModel, *, image_size: int = 640) -> float:
    """Billions of operations for one square image: two per multiply-add, eight per BatchNorm element.

    Args:
        model: on any device; it is not run.
        image_size: px, a multiple of the largest stride.
    """
    operations = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        nonlocal operations
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            over = output if isinstance(module, nn.Conv2d) else inputs[0]
            operations += 2 * over.numel() * module.weight[0].numel()
        elif isinstance(module, nn.BatchNorm2d):
            operations += 8 * output.numel()
        elif isinstance(module, nn.Linear):
            operations += 2 * output.numel() * module.in_features
        elif isinstance(module, nn.MultiheadAttention):
            # Four projections; then every cell's product with every cell, twice.
            length, width = output[0].shape[0], module.embed_dim
            operations += 2 * output[0].numel() * (4 * width + 2 * length)

    hooks = [module.register_forward_hook(count) for module in model.modules()]
    try:
        _run_on_meta(model, image_size)
    finally:
        for hook in hooks:
            hook.remove()
    return operations / 1e9


def order_levels(anchors: np.ndarray, strides: Sequence[float]) -> np.ndarray:
    """`anchors` (L, A, 2) px with the order of the levels reversed if their areas run against the strides."""
    areas = anchors.prod(axis=2).mean(axis=1)
    growth = areas[-1] - areas[0]
    if growth != 0 and np.sign(growth) != np.sign(strides[-1] - strides[0]):
        return anchors[::-1].copy()
    return anchors


def parse_activation(text: str) -> nn.Module:
    """The module that a call such as `nn.LeakyReLU(0.1)` describes; read, never evaluated.

    Raises:
        WeightsError: for anything but one of the known activations with plain numbers.
    """
    try:
        call = ast.parse(str(text).strip(), mode="eval").body
        if isinstance(call, ast.Call):
            name = ast.unparse(call.func).removeprefix("torch.").removeprefix("nn.")
            arguments = [ast.literal_eval(value) for value in call.args]
            options = {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
            if name in ACTIVATIONS:
                return getattr(nn, name)(*arguments, **options)
    except (SyntaxError, ValueError, TypeError) as error:
        logger.debug("activation %r: %s", text, error)
    raise WeightsError(
        "a model configuration names an activation that cannot be used.",
        found=f"activation: {text!r}",
        fix=f"write it as a call, such as nn.LeakyReLU(0.1); known are {', '.join(ACTIVATIONS)}.",
    )


ACTIVATIONS = (
    "SiLU", "ReLU", "ReLU6", "LeakyReLU", "PReLU", "ELU", "CELU", "SELU", "GELU", "Mish", "Hardswish", "Hardsigmoid",
    "Hardtanh", "Sigmoid", "Tanh", "Softplus", "Identity",
)  # fmt: skip

# First argument: the output channels before scaling.
CHANNEL_BLOCKS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (
        blocks.Conv, blocks.DWConv, blocks.GhostConv, blocks.Bottleneck, blocks.GhostBottleneck, blocks.SPP,
        blocks.SPPF, blocks.MixConv2d, blocks.Focus, blocks.CrossConv, blocks.BottleneckCSP, blocks.C3, blocks.C3TR,
        blocks.C3Ghost, blocks.C3x,
    )
} | {"nn.Conv2d": nn.Conv2d, "nn.ConvTranspose2d": nn.ConvTranspose2d}  # fmt: skip
# These take the number of repeats themselves, as their third argument.
REPEATING_BLOCKS = ("C3", "C3TR", "C3Ghost", "C3x", "BottleneckCSP")
OTHER_BLOCKS = ("Concat", "Contract", "Expand", "Detect")


def _build_layer(
    kind: str, repeats: int, args: list[Any], cin: list[int], config: dict[str, Any], act: blocks.Act
) -> tuple[nn.Module, int]:
    # -> the layer and its output channels
    if kind == "Detect":
        return _build_detect(args, cin, config), 0
    if kind == "Concat":
        return blocks.Concat(*args), sum(cin)
    first = cin[0]
    if kind in CHANNEL_BLOCKS:
        cout = _scale_channels(kind, args[0], config)
        arguments = [cout, *args[1:]]
        if kind in REPEATING_BLOCKS:
            return _build_block(kind, [first, cout, repeats, *args[1:]], act), cout
        # The first copy changes the channel count, the others keep it.
        return _repeat(
            [_build_block(kind, [first if copy_index == 0 else cout, *arguments], act) for copy_index in range(repeats)]
        ), cout
    if kind in ("Contract", "Expand"):
        layer = getattr(blocks, kind)(*args)
        return layer, first * layer.gain**2 if kind == "Contract" else first // layer.gain**2
    build = getattr(nn, kind.removeprefix("nn."))
    arguments = [first] if build is nn.BatchNorm2d else args
    return _repeat([build(*arguments) for _ in range(repeats)]), first


def _build_block(kind: str, arguments: list[Any], act: blocks.Act) -> nn.Module:
    build = CHANNEL_BLOCKS[kind]
    signature = inspect.signature(build)
    # An activation among the row's own arguments wins.
    is_open = "act" in signature.parameters and "act" not in signature.bind_partial(*arguments).arguments
    return build(*arguments, act=act) if is_open else build(*arguments)


def _repeat(copies: list[nn.Module]) -> nn.Module:
    return copies[0] if len(copies) == 1 else nn.Sequential(*copies)


def _scale_channels(kind: str, channels: Any, config: dict[str, Any]) -> int:
    if isinstance(channels, bool) or not isinstance(channels, int) or channels < 1:
        raise ValueError(f"{channels!r} is no number of output channels")
    anchors = config["anchors"]
    per_level = anchors if isinstance(anchors, int) else np.asarray(anchors[0]).size // 2
    # Only a bare convolution can be an output layer; a Conv that happens to have this many channels is scaled.
    if kind == "nn.Conv2d" and channels == per_level * (config["nc"] + 5):
        return channels
    return make_divisible(channels * config["width_multiple"], config["channel_multiple"])


def _build_detect(args: list[Any], cin: list[int], config: dict[str, Any]) -> Detect:
    if len(args) < 2 or args[0] != config["nc"] or args[1] != config["anchors"]:
        raise ValueError("Detect takes [nc, anchors]")
    anchors = config["anchors"]
    if isinstance(anchors, int):
        # Sizes that no box matches, until `anchors.apply_anchors` replaces them.
        level = np.arange(2 * anchors, dtype=np.float64).reshape(anchors, 2)
        return Detect(config["nc"], np.stack([level] * len(cin)), cin)
    if len(anchors) != len(cin):
        raise ValueError(f"there are anchors for {len(anchors)} levels but {len(cin)} inputs")
    return Detect(config["nc"], np.asarray(anchors, dtype=np.float64).reshape(len(cin), -1, 2), cin)


def _read_row(index: int, values: Any, *, is_last: bool) -> tuple[LayerRow, int, list[Any]]:
    # -> the row, its repeats before scaling, its arguments before resolving
    if not isinstance(values, list | tuple) or len(values) != 4:
        raise _row_fault(index, "a row is not [from, number, module, args]", repr(values))
    source, repeats, kind, args = values
    written = list(source) if isinstance(source, list | tuple) else [source]
    if not written or any(isinstance(value, bool) or not isinstance(value, int) for value in written):
        raise _row_fault(index, "`from` is neither an integer nor a list of integers", repr(source))
    sources = tuple(index + value if value < 0 else value for value in written)
    is_image = index == 0 and written == [-1]
    if not is_image and not all(0 <= value < index for value in sources):
        raise _row_fault(index, "`from` does not name an earlier row", repr(source))
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise _row_fault(index, "`number` is not a positive integer", repr(repeats))
    if not isinstance(args, list | tuple):
        raise _row_fault(index, "`args` is not a list", repr(args))
    if not isinstance(kind, str) or not _is_known(kind):
        known = [*CHANNEL_BLOCKS, *OTHER_BLOCKS]
        raise _row_fault(index, "there is no such module", repr(kind), did_you_mean(str(kind), known))
    row = LayerRow(index, source if isinstance(source, int) else written, sources, kind)
    if len(sources) > 1 and not row.takes_list:
        raise _row_fault(index, f"{kind} takes one input", f"from {source}")
    if (kind == "Detect") != is_last:
        raise _row_fault(index, "Detect must be the last row, and only there", kind)
    return row, repeats, list(args)


def _is_known(kind: str) -> bool:
    if kind in CHANNEL_BLOCKS or kind in OTHER_BLOCKS:
        return True
    found = getattr(nn, kind.removeprefix("nn."), None) if kind.startswith("nn.") else None
    return isinstance(found, type) and issubclass(found, nn.Module)


def _resolve(args: list[Any], config: dict[str, Any]) -> list[Any]:
    return [_resolve_one(value, config) for value in args]


def _resolve_one(value: Any, config: dict[str, Any]) -> Any:
    if not isinstance(value, str):
        return value
    if value in ("nc", "anchors"):
        return config[value]
    if value.startswith(("nn.", "torch.nn.")):
        return parse_activation(value)
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        # A word such as `nearest` is meant as it stands.
        return value


def _row_fault(index: int, what: str, found: str, hint: str = "") -> WeightsError:
    return WeightsError(
        f"row {index} of a model configuration cannot be used: {what}.",
        found=found,
        fix=hint or "correct this row (rows are counted from 0 through backbone and head).",
    )


def _check_values(config: dict[str, Any]) -> None:
    faults = [
        f"{key} is {config[key]!r}, must be a positive integer"
        for key in ("nc", "ch", "channel_multiple")
        if isinstance(config[key], bool) or not isinstance(config[key], int) or config[key] < 1
    ]
    faults += [
        f"{key} is {config[key]!r}, must be a positive number"
        for key in ("depth_multiple", "width_multiple")
        if isinstance(config[key], bool) or not isinstance(config[key], int | float) or not 0 < config[key] < math.inf
    ]
    faults += [
        f"{key} is {type(config[key]).__name__}, must be a list of rows"
        for key in ("backbone", "head")
        if not isinstance(config[key], list | tuple)
    ]
    if not _are_anchors(config["anchors"]):
        faults.append(f"anchors is {config['anchors']!r}, must be a count, or one equally long list of sizes per level")
    if faults:
        raise WeightsError(
            "a model configuration has values that cannot be used.",
            found="; ".join(faults),
            fix="correct them, as in configs/models/yolov5s.yaml.",
        )


def _are_anchors(anchors: Any) -> bool:
    if isinstance(anchors, int):
        return not isinstance(anchors, bool) and anchors >= 1
    try:
        sizes = np.asarray(anchors, dtype=np.float64)
    except (ValueError, TypeError):
        return False
    return (
        sizes.ndim >= 2 and sizes.size > 0 and sizes[0].size % 2 == 0 and bool((np.isfinite(sizes) & (sizes > 0)).all())
    )


def _prepare_batch_norms(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps, module.momentum = BATCHNORM_EPS, BATCHNORM_MOMENTUM
            # YOLOv5 measures strides with one image of zeros in training mode at momentum 0.1; a fresh network
            # starts from the statistics which that leaves.
            module.running_var.fill_(0.9)
            module.num_batches_tracked.fill_(1)


@torch.no_grad()
def _measure_strides(model: DetectionModel) -> tuple[float, ...]:
    reached: list[int] = []
    hooks = [
        layer.register_forward_pre_hook(lambda *_, index=index: reached.append(index))
        for index, layer in enumerate(model.model)
    ]
    probe = model.head.anchors.new_zeros(1, model.config["ch"], PROBE_SIZE, PROBE_SIZE)
    try:
        # Eval mode: BatchNorm leaves its statistics alone and accepts a map of one cell.
        maps = model.eval()._maps(probe)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise _row_fault(reached[-1], "its input does not fit", str(error)) from error
    finally:
        model.train()
        for hook in hooks:
            hook.remove()
    strides = tuple(PROBE_SIZE / logits.shape[2] for logits in maps)
    # A map of one cell would look the same at any larger stride.
    if any(not stride.is_integer() or stride >= PROBE_SIZE for stride in strides):
        raise WeightsError(
            "the levels of a model configuration have strides that cannot be used.",
            found=f"about {', '.join(f'{stride:g}' for stride in strides)} px",
            fix=f"let every level's stride be a power of two, at most {PROBE_SIZE // 2} px.",
        )
    return strides


def _run_on_meta(model: DetectionModel, image_size: int) -> None:
    # Shapes alone: on the meta device nothing is computed, stored or drawn, and the model's own tensors stay as is.
    shapes = {name: value.detach().to("meta") for name, value in (*model.named_parameters(), *model.named_buffers())}
    images = torch.zeros(1, model.config["ch"], image_size, image_size, device="meta")
    torch.func.functional_call(model, shapes, (images,))


def _rescale(images: Tensor, scale: float, stride: int) -> Tensor:
    # (B, 3, H, W) -> smaller by `scale`, padded at the right and the bottom to multiples of `stride`.
    if scale == 1:
        return images
    height, width = images.shape[2:]
    inner = int(height * scale), int(width * scale)
    outer = [math.ceil(side * scale / stride) * stride for side in (height, width)]
    smaller = nn.functional.interpolate(images, size=inner, mode="bilinear", align_corners=False)
    return nn.functional.pad(smaller, (0, outer[1] - inner[1], 0, outer[0] - inner[0]), value=TTA_PADDING)
