"""Weights files: round trips, prefixes, damage, transfer."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from accel_yolo.errors import WeightsError
from accel_yolo.model import weights
from accel_yolo.model.anchors import apply_anchors
from accel_yolo.model.detector import DetectionModel
from accel_yolo.model.weights import load_model, load_weights, save_weights, strip_prefixes, transfer

TINY = {
    "nc": 2,
    "depth_multiple": 1.0,
    "width_multiple": 1.0,
    "anchors": [[10, 13, 16, 30], [30, 61, 62, 45]],
    "backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "C3", [8]], [-1, 1, "Conv", [16, 3, 2]]],
    "head": [[[1, 2], 1, "Detect", ["nc", "anchors"]]],
}


@pytest.fixture
def model() -> DetectionModel:
    model = DetectionModel(TINY)
    model.names = {0: "cat", 1: "dog"}
    return model


@pytest.fixture
def saved(model: DetectionModel, tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    save_weights(path, model, {"image_size": 320})
    return path


def test_a_saved_model_comes_back_equal(model: DetectionModel, saved: Path) -> None:
    loaded = load_model(saved)
    assert not loaded.training
    assert loaded.names == {0: "cat", 1: "dog"}
    assert loaded.config["nc"] == 2
    state = model.state_dict()
    assert list(loaded.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in loaded.state_dict().items())
    assert loaded.state_dict()["model.0.bn.num_batches_tracked"].shape == ()


def test_metadata_say_what_the_file_is(saved: Path) -> None:
    loaded = load_weights(saved)
    assert loaded.metadata["format_version"] == 1
    assert loaded.metadata["dtype"] == "float32"
    assert loaded.metadata["stride"] == [2, 4]
    assert loaded.metadata["image_size"] == 320
    assert loaded.path == saved


def test_loading_a_model_draws_nothing_from_the_global_generator(saved: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    load_model(saved)
    assert torch.equal(torch.rand(1), expected)


def test_half_files_load_as_float32_and_leave_the_live_model_alone(model: DetectionModel, tmp_path: Path) -> None:
    with torch.no_grad():
        # Beyond float16: this tensor alone stays as it is.
        model.model[0].bn.running_var.fill_(1e6)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    path = tmp_path / "half.safetensors"
    save_weights(path, model, half=True)
    after = model.state_dict()
    assert all(after[key].dtype == value.dtype and torch.equal(after[key], value) for key, value in before.items())
    loaded = load_weights(path)
    assert loaded.metadata["dtype"] == "float16"
    assert {value.dtype for value in loaded.state_dict.values()} == {torch.float32, torch.int64}
    assert torch.equal(loaded.state_dict["model.0.bn.running_var"], before["model.0.bn.running_var"])
    assert torch.equal(loaded.state_dict["model.3.anchors"], before["model.3.anchors"])
    kernel = "model.0.conv.weight"
    assert torch.equal(loaded.state_dict[kernel], before[kernel].half().float())
    full = tmp_path / "full.safetensors"
    save_weights(full, model)
    assert path.stat().st_size < full.stat().st_size


def test_a_half_model_is_saved_as_float32(model: DetectionModel, tmp_path: Path) -> None:
    save_weights(tmp_path / "a.safetensors", model.half())
    assert load_model(tmp_path / "a.safetensors").head.anchors.dtype == torch.float32


def test_channels_last_views_and_shared_tensors_survive(model: DetectionModel, tmp_path: Path) -> None:
    state = dict(model.to(memory_format=torch.channels_last).state_dict())
    state["view"] = torch.arange(12.0).view(3, 4)[:, 1]
    state["alias"] = state["view"]
    save_weights(tmp_path / "a.safetensors", state, {"config": TINY})
    loaded = load_weights(tmp_path / "a.safetensors").state_dict
    assert all(torch.equal(loaded[key], value) for key, value in state.items())


def test_computed_anchors_are_in_the_saved_config(tmp_path: Path) -> None:
    model = DetectionModel(TINY, anchors=2)
    save_weights(tmp_path / "counted.safetensors", model)
    assert load_weights(tmp_path / "counted.safetensors").config["anchors"] == 2
    apply_anchors(model, torch.tensor(TINY["anchors"]).double().view(2, 2, 2).numpy())
    save_weights(tmp_path / "computed.safetensors", model)
    assert load_weights(tmp_path / "computed.safetensors").config["anchors"] == TINY["anchors"]
    assert torch.equal(load_model(tmp_path / "computed.safetensors").head.anchors, model.head.anchors)


def test_a_run_folder_stands_for_its_best_else_its_last_weights(model: DetectionModel, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="holds no weights"):
        load_weights(tmp_path)
    save_weights(tmp_path / "weights" / "last.safetensors", model)
    assert load_weights(tmp_path).path.name == "last.safetensors"
    save_weights(tmp_path / "weights" / "best.safetensors", model)
    assert load_weights(tmp_path).path.name == "best.safetensors"


@pytest.mark.parametrize(
    "stack", ["module.", "_orig_mod.", "ema.", "module._orig_mod.", "ema.module._orig_mod.module."]
)
def test_any_stack_of_wrapper_prefixes_is_accepted(stack: str, model: DetectionModel, tmp_path: Path) -> None:
    wrapped = {stack + key: value for key, value in model.state_dict().items()}
    save_file(wrapped, tmp_path / "wrapped.safetensors")
    assert list(load_weights(tmp_path / "wrapped.safetensors").state_dict) == sorted(model.state_dict())
    fresh = DetectionModel(TINY)
    report = transfer(fresh, wrapped)
    assert len(report.taken) == len(wrapped)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in fresh.state_dict().items())


def test_saving_a_wrapped_state_dict_gives_bare_names(model: DetectionModel, tmp_path: Path) -> None:
    wrapped = {f"module.{key}": value for key, value in model.state_dict().items()}
    save_weights(tmp_path / "a.safetensors", wrapped, {"config": model.config, "names": {"0": "a", "1": "b"}})
    assert load_model(tmp_path / "a.safetensors").names == {0: "a", 1: "b"}


def test_two_entries_of_one_name_are_refused() -> None:
    with pytest.raises(WeightsError, match="one name"):
        strip_prefixes({"model.0.weight": torch.zeros(1), "ema.model.0.weight": torch.zeros(1)})


def test_anchor_grids_of_old_files_are_ignored(model: DetectionModel) -> None:
    old = {**model.state_dict(), "model.3.anchor_grid": torch.zeros(2, 1, 2, 1, 1, 2)}
    assert transfer(model, old).unused == ()


def test_another_class_count_leaves_only_the_head_fresh_and_says_so(model: DetectionModel) -> None:
    other = DetectionModel(TINY, num_classes=7)
    fresh = other.head.m[0].weight.clone()
    report = transfer(other, model.state_dict())
    assert [key for key, _, _ in report.mismatched] == [
        "model.3.m.0.weight",
        "model.3.m.0.bias",
        "model.3.m.1.weight",
        "model.3.m.1.bias",
    ]
    assert "model.3.m.0.weight [14, 8, 1, 1] -> [24, 8, 1, 1]" in str(report)
    assert torch.equal(other.head.m[0].weight, fresh)
    assert torch.equal(other.model[0].conv.weight, model.model[0].conv.weight)
    assert torch.equal(other.head.anchors, model.head.anchors)


def test_entries_can_be_left_out_by_a_part_of_their_name(model: DetectionModel) -> None:
    other = DetectionModel({**TINY, "anchors": [[1, 2, 3, 4], [5, 6, 7, 8]]})
    before = other.head.anchors.clone()
    report = transfer(other, model.state_dict(), skip=("anchor",))
    assert report.skipped == ("model.3.anchors",)
    assert torch.equal(other.head.anchors, before)


def test_weights_of_which_nothing_fits_are_an_error_and_change_nothing(model: DetectionModel) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    # A counter alone fits every network.
    foreign = {"features.0.weight": torch.zeros(3), "model.0.bn.num_batches_tracked": torch.tensor(99)}
    with pytest.raises(WeightsError, match="none of the weights fit"):
        transfer(model, foreign)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_transfer_keeps_the_model_s_dtype_and_memory_layout(model: DetectionModel) -> None:
    other = DetectionModel(TINY).double().to(memory_format=torch.channels_last)
    strides = other.model[0].conv.weight.stride()
    transfer(other, model.state_dict())
    assert other.model[0].conv.weight.dtype == torch.float64
    assert other.model[0].conv.weight.stride() == strides


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        b"not a tensor file at all, just text",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 10**9) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 7) + b'{"a":1}',
        b"\x00" * 4096,
    ],
)
def test_a_damaged_file_is_refused_with_its_path(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=r"damaged\.safetensors"):
        load_weights(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
def test_a_truncated_file_is_refused(share: float, saved: Path) -> None:
    content = saved.read_bytes()
    saved.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(WeightsError, match="cannot be read"):
        load_weights(saved)


@pytest.mark.parametrize(
    "metadata",
    [
        "{",
        "[]",
        "3",
        "{}",
        '{"format_version": 1, "config": 3}',
        '{"format_version": 1, "names": ["cat"]}',
        '{"format_version": 1, "names": {"cat": "0"}}',
        '{"format_version": "new"}',
    ],
)
def test_metadata_that_make_no_sense_are_refused(metadata: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    save_file({"a": torch.zeros(1)}, path, {"accel_yolo": metadata})
    with pytest.raises(WeightsError, match="metadata"):
        load_weights(path)


def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "new.safetensors"
    save_file({"a": torch.zeros(1)}, path, {"accel_yolo": json.dumps({"format_version": 2})})
    with pytest.raises(WeightsError, match="newer version"):
        load_weights(path)


def test_a_foreign_file_gives_tensors_but_no_model(model: DetectionModel, tmp_path: Path) -> None:
    path = tmp_path / "foreign.safetensors"
    save_file(dict(model.state_dict()), path)
    loaded = load_weights(path)
    assert (loaded.config, loaded.names) == (None, {})
    with pytest.raises(WeightsError, match="which network"):
        load_model(path)


def test_a_file_whose_tensors_are_not_those_of_its_config_is_refused(model: DetectionModel, tmp_path: Path) -> None:
    state = model.state_dict()
    del state["model.0.conv.weight"]
    save_weights(tmp_path / "a.safetensors", state, {"config": TINY, "names": {}})
    with pytest.raises(WeightsError, match=r"model\.0\.conv\.weight"):
        load_model(tmp_path / "a.safetensors")
    save_weights(tmp_path / "b.safetensors", model, {"names": {"0": "only one"}})
    with pytest.raises(WeightsError, match="1 names for 2 classes"):
        load_model(tmp_path / "b.safetensors")


def test_a_missing_file_is_refused_without_a_download(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="never downloaded"):
        load_weights(tmp_path / "yolov5s.safetensors")


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.safetensors"])
def test_a_pickle_that_is_no_network_is_refused_whatever_its_name(name: str, tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(WeightsError, match="YOLOv5"):
        load_weights(tmp_path / name)


def test_a_real_pickle_becomes_the_network_with_its_own_anchors_and_names(test_data_dir: Path) -> None:
    loaded = load_model(test_data_dir / "weights" / "other" / "yolov5n_pvdefect_nc5_autoanchor_v7.0.pt")
    assert loaded.num_classes == len(loaded.names) == 5
    # AutoAnchor changed them after the YAML inside the file was written.
    torch.testing.assert_close(loaded.head.anchors[0, 0] * 8, torch.tensor([11.5, 51.0]), atol=0.1, rtol=0)


def test_a_failed_save_leaves_the_old_file_and_no_rest(
    saved: Path, model: DetectionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights.os, "fsync", fail)
    with pytest.raises(WeightsError, match="No space left"):
        save_weights(saved, model)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_a_fused_model_is_not_saved(model: DetectionModel, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="folded"):
        save_weights(tmp_path / "a.safetensors", model.fuse())
    assert not list(tmp_path.iterdir())
