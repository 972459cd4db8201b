"""The networks against the golden vectors: sizes of every shipped config, and outputs of five of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from accel_yolo.model.detector import DetectionModel, count_gflops

FOLDER = Path(__file__).parent
PARAMS = json.loads((FOLDER / "params.json").read_text())
NETWORKS = sorted(path.name for path in FOLDER.glob("model_*.safetensors"))
Record = Callable[[str, str, float, str], None]


@pytest.mark.parametrize("name", list(PARAMS))
def test_a_shipped_config_has_the_reference_size(name: str, record_deviation: Record) -> None:
    expected = PARAMS[name]
    with torch.device("meta"):
        model = DetectionModel(name)
    gflops = count_gflops(model.eval())

    placed = model.head.anchors.shape
    assert (model.num_classes, len(model.head.strides), placed[1], model.head.num_outputs) == (
        expected["nc"],
        expected["nl"],
        expected["na"],
        expected["no"],
    )
    assert _num_parameters(model) == expected["params"]
    assert sum(buffer.numel() for buffer in model.buffers()) == expected["buffers"]
    assert len(model.state_dict()) == expected["n_state_dict"]
    assert list(model.head.strides) == expected["strides"]
    assert sorted({source for row in model.rows for source in row.kept_sources}) == sorted(set(expected["save"]))
    per_layer = [
        {"i": row.index, "f": row.source, "type": row.kind.removeprefix("nn."), "np": _num_parameters(layer)}
        for row, layer in zip(model.rows, model.model, strict=True)
    ]
    assert per_layer == expected["per_layer"]

    difference = abs(gflops / expected["gflops_640"] - 1)
    record_deviation("params.json", "GFLOPs", difference, "1 % relative")
    assert difference < 0.01
    assert _num_parameters(model.fuse()) == expected["params_fused"]
    if "gflops_640_fused" in expected:
        difference = abs(count_gflops(model) / expected["gflops_640_fused"] - 1)
        record_deviation("params.json", "GFLOPs, fused", difference, "1 % relative")
        assert difference < 0.01
    record_deviation("params.json", "parameters, strides, kept layers, keys", 0, "exact")


@pytest.mark.parametrize("name", [name for name in PARAMS if "state_dict" in PARAMS[name]])
def test_state_dict_has_the_reference_keys_in_order(name: str) -> None:
    with torch.device("meta"):
        state = DetectionModel(name).state_dict()
    ours = [[key, list(value.shape), str(value.dtype).removeprefix("torch.")] for key, value in state.items()]
    assert ours == PARAMS[name]["state_dict"]


@pytest.mark.parametrize("name", ["yolov5n", "yolov5n6", "yolov3-tiny", "yolov5-p34"])
def test_anchors_in_px_are_the_reference_s(name: str, record_deviation: Record) -> None:
    model = DetectionModel(name)
    anchors_px = model.head.anchors * model.strides.view(-1, 1, 1)
    deviation = (anchors_px - torch.tensor(PARAMS[name]["anchors_px"])).abs().max().item()
    record_deviation("params.json", "anchors, px", deviation, "1e-4")
    assert deviation < 1e-4


@pytest.mark.parametrize("file", NETWORKS)
def test_eval_outputs_are_the_reference_s(file: str, record_deviation: Record) -> None:
    golden, model, images = _load(file)
    with torch.no_grad():
        decoded, maps = model.eval()(images)
        for level, logits in enumerate(maps):
            _compare(file, f"eval_raw.{level}", logits, golden, record_deviation)
        _compare_decoded(file, "eval_out", decoded, golden, record_deviation)
        _compare_decoded(file, "tta_out", model.forward_augmented(images), golden, record_deviation)

        model.fuse()
        for key in ("weight", "bias"):
            fused = model.state_dict()[f"model.0.conv.{key}"]
            _compare(file, f"fused.model.0.conv.{key}", fused, golden, record_deviation)
        _compare_decoded(file, "fused_eval_out", model(images)[0], golden, record_deviation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("file", NETWORKS)
def test_train_outputs_and_running_statistics_are_the_reference_s(
    file: str, dtype: torch.dtype, record_deviation: Record
) -> None:
    golden, model, images = _load(file)
    with torch.no_grad():
        maps = model.to(dtype).train()(images.to(dtype))
    # BatchNorm over as few as six values multiplies rounding, so that single logits of the reference itself are off
    # its float64 result by more than 1e-4 of their size: the tolerance is relative to the largest logit.
    largest = max(golden[f"train_out.{level}"].abs().max().item() for level in range(len(maps)))
    for level, logits in enumerate(maps):
        expected = golden[f"train_out.{level}"]
        assert logits.shape == expected.shape
        deviation = (logits - expected).abs().max().item() / largest
        name = str(dtype).removeprefix("torch.")
        record_deviation(file, f"train_out, ours in {name}, / largest logit", deviation, "1e-4")
        assert deviation < 1e-4
    state = model.state_dict()
    for key in ("running_mean", "running_var", "num_batches_tracked"):
        _compare(file, f"after_train.model.0.bn.{key}", state[f"model.0.bn.{key}"], golden, record_deviation)


def _load(file: str) -> tuple[dict[str, Tensor], DetectionModel, Tensor]:
    with safe_open(FOLDER / file, "pt") as archive:
        config = json.loads(archive.metadata()["cfg"])
        golden = {key: archive.get_tensor(key) for key in archive.keys()}  # noqa: SIM118
    model = DetectionModel(config)
    model.load_state_dict({key.removeprefix("w."): value for key, value in golden.items() if key.startswith("w.")})
    return golden, model, golden["input"].float()


def _compare(file: str, quantity: str, ours: Tensor, golden: dict[str, Tensor], record: Record) -> None:
    expected = golden[quantity]
    assert ours.shape == expected.shape
    deviation = (ours - expected).abs()
    record(file, quantity, deviation.max().item(), "1e-5 + 1e-4 * |reference|")
    assert (deviation <= 1e-5 + 1e-4 * expected.abs()).all()


def _compare_decoded(file: str, quantity: str, ours: Tensor, golden: dict[str, Tensor], record: Record) -> None:
    expected = golden[quantity]
    assert ours.shape == expected.shape
    boxes = (ours - expected)[..., :4].abs().max().item()
    record(file, f"{quantity}: boxes", boxes, "1e-2 px")
    scores = (ours - expected)[..., 4:].abs()
    record(file, f"{quantity}: scores", scores.max().item(), "1e-5 + 1e-4 * |reference|")
    assert boxes < 1e-2
    assert (scores <= 1e-5 + 1e-4 * expected[..., 4:].abs()).all()


def _num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
