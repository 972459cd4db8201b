"""The network: building, strides, head, decoding, freezing, faults in configs."""

import copy
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from accel_yolo.errors import ConfigError, WeightsError
from accel_yolo.model import blocks
from accel_yolo.model.detector import DetectionModel, count_gflops, effective_config, parse_activation

MODELS = Path(__file__).resolve().parents[3] / "configs" / "models"

TINY = {
    "nc": 2,
    "depth_multiple": 1.0,
    "width_multiple": 1.0,
    "anchors": [[10, 13, 16, 30], [30, 61, 62, 45]],
    "backbone": [
        [-1, 1, "Conv", [8, 3, 2]],
        [-1, 1, "Conv", [8, 3, 2]],
        [-1, 1, "C3", [8]],
        [-1, 1, "Conv", [16, 3, 2]],
    ],
    "head": [[[2, 3], 1, "Detect", ["nc", "anchors"]]],
}


def _tiny(**changes: object) -> dict:
    return {**copy.deepcopy(TINY), **changes}


def _with_row(row: list, place: int = 2) -> dict:
    config = _tiny()
    config["backbone"][place] = row
    return config


def test_the_demo_network_is_small_and_has_three_classes() -> None:
    # The other configs are built by tests/golden/test_model_golden.py.
    model = DetectionModel("yolov5-shapes")
    assert model.num_classes == 3
    assert sum(parameter.numel() for parameter in model.parameters()) < 2e6


def test_every_shipped_config_passes_the_checks() -> None:
    paths = sorted(path for path in MODELS.glob("*.yaml") if path.stem != "anchors")
    assert len(paths) == 24
    for path in paths:
        assert effective_config(path)["nc"] == yaml.safe_load(path.read_text())["nc"]


def test_anchor_presets_are_those_of_the_models() -> None:
    presets = yaml.safe_load((MODELS / "anchors.yaml").read_text())
    assert presets["p5_640"] == yaml.safe_load((MODELS / "yolov5s.yaml").read_text())["anchors"]
    assert presets["p6_1280"] == yaml.safe_load((MODELS / "yolov5s6.yaml").read_text())["anchors"]


def test_training_gives_maps_and_eval_gives_decoded_boxes_too() -> None:
    model = DetectionModel(TINY)
    images = torch.rand(2, 3, 32, 48)
    maps = model(images)
    assert [tuple(logits.shape) for logits in maps] == [(2, 2, 8, 12, 7), (2, 2, 4, 6, 7)]
    decoded, raw = model.eval()(images)
    assert decoded.shape == (2, 2 * (8 * 12 + 4 * 6), 7)
    assert [logits.shape for logits in raw] == [logits.shape for logits in maps]


def test_decoding_is_the_published_formula() -> None:
    model = DetectionModel(TINY)
    maps = [torch.randn(1, 2, 3, 5, 7), torch.randn(1, 2, 2, 3, 7)]
    decoded = model.head.decode(maps)[0]
    row = 0
    for level, stride in enumerate((4, 8)):
        for anchor in range(2):
            for y in range(maps[level].shape[2]):
                for x in range(maps[level].shape[3]):
                    s = maps[level][0, anchor, y, x].sigmoid()
                    width, height = TINY["anchors"][level][2 * anchor : 2 * anchor + 2]
                    expected = [
                        (2 * s[0] - 0.5 + x) * stride,
                        (2 * s[1] - 0.5 + y) * stride,
                        (2 * s[2]) ** 2 * width,
                        (2 * s[3]) ** 2 * height,
                        *s[4:],
                    ]
                    torch.testing.assert_close(decoded[row], torch.stack([torch.as_tensor(v) for v in expected]))
                    row += 1
    assert row == len(decoded)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_decoded_in_float32(dtype: torch.dtype) -> None:
    model = DetectionModel(TINY)
    maps = [torch.randn(1, 2, 80, 80, 7, dtype=dtype), torch.randn(1, 2, 40, 40, 7, dtype=dtype)]
    decoded = model.head.decode(maps)
    assert decoded.dtype == torch.float32
    torch.testing.assert_close(decoded, model.head.decode([logits.float() for logits in maps]))


def test_decoding_follows_the_dtype_and_the_size_of_each_call() -> None:
    model = DetectionModel(TINY).eval()
    for size, dtype in (((32, 32), torch.float32), ((64, 32), torch.float64), ((32, 32), torch.float32)):
        decoded, _ = model.to(dtype)(torch.rand(1, 3, *size, dtype=dtype))
        assert decoded.dtype == dtype
        assert decoded.shape[1] == 2 * (size[0] * size[1] // 16 + size[0] * size[1] // 64)


def test_channels_last_and_bf16_autocast_train() -> None:
    model = DetectionModel(TINY).to(memory_format=torch.channels_last)
    images = torch.rand(2, 3, 32, 32).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        maps = model(images)
    assert maps[0].dtype == torch.bfloat16
    sum(logits.float().square().sum() for logits in maps).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_channels_last_gives_the_same_numbers() -> None:
    model = DetectionModel(TINY).eval()
    images = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        expected, _ = model(images)
        found, _ = model.to(memory_format=torch.channels_last)(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_fresh_model_has_the_statistics_of_one_image_of_zeros() -> None:
    norms = [module for module in DetectionModel("yolov5n").modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    for norm in norms:
        assert (norm.eps, norm.momentum) == (1e-3, 0.03)
        assert norm.num_batches_tracked == 1
        assert (norm.running_mean == 0).all()
        torch.testing.assert_close(norm.running_var, torch.full_like(norm.running_var, 0.9))


def test_biases_start_from_the_stated_priors() -> None:
    torch.manual_seed(0)
    model = DetectionModel("yolov5n")
    torch.manual_seed(0)
    plain = DetectionModel("yolov5n")
    for conv in plain.head.m:
        # Built without the priors: what the library would have drawn.
        conv.bias.data.zero_()
    plain.head.add_prior_to_biases()
    for conv, objectness in zip(plain.head.m, (-6.685, -5.298, -3.912), strict=True):
        bias = conv.bias.view(3, 85)
        torch.testing.assert_close(bias[:, 4], torch.full((3,), objectness), atol=1e-3, rtol=0)
        torch.testing.assert_close(bias[:, 5:], torch.full((3, 80), -4.8803), atol=1e-3, rtol=0)
        assert (bias[:, :4] == 0).all()
    # Added, not assigned: they differ from each other by the library's draw.
    assert model.head.m[0].bias.view(3, 85)[:, 4].unique().numel() == 3


def test_the_class_prior_of_a_single_class_is_plus_eleven() -> None:
    head = DetectionModel("yolov5n", num_classes=1).head
    assert head.m[0].bias.view(3, 6)[:, 5].mean().item() == pytest.approx(11.0, abs=0.3)


def test_initial_weights_are_a_function_of_the_seed_and_of_nothing_else() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(7)
        states.append(DetectionModel(TINY).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_levels_out_of_order_get_their_anchors_reversed() -> None:
    config = _tiny(head=[[[3, 2], 1, "Detect", ["nc", "anchors"]]])
    head = DetectionModel(config).head
    assert head.strides == (8, 4)
    assert (head.anchors[0] * 8).flatten().tolist() == TINY["anchors"][1]
    assert DetectionModel(config).max_stride == 8


def test_an_anchor_count_gives_placeholders() -> None:
    model = DetectionModel(TINY, anchors=4)
    assert model.config["anchors"] == 4
    assert model.has_placeholder_anchors
    assert (model.head.anchors[0] * 4).flatten().tolist() == list(range(8))


def test_overrides_change_neither_the_given_config_nor_the_file() -> None:
    given = _tiny()
    model = DetectionModel(given, num_classes=5, anchors=3)
    assert given == TINY
    assert model.num_classes == model.config["nc"] == 5
    assert model.names == {0: "0", 1: "1", 2: "2", 3: "3", 4: "4"}


def test_a_block_with_as_many_channels_as_an_output_is_scaled_all_the_same() -> None:
    # 2 anchors * (nc + 5) = 16 channels before scaling.
    model = DetectionModel(_tiny(nc=3, width_multiple=0.5))
    assert model.model[3].conv.out_channels == 8


def test_repeats_of_a_block_continue_with_its_output_channels() -> None:
    model = DetectionModel(_with_row([-1, 3, "Conv", [24, 3, 1]]))
    assert [layer.conv.in_channels for layer in model.model[2]] == [8, 24, 24]


def test_depth_scales_repeats_above_one_with_rounding_to_even() -> None:
    config = _tiny(depth_multiple=0.5)
    config["backbone"][2] = [-1, 5, "C3", [8]]
    assert len(DetectionModel(config).model[2].m) == 2
    config["backbone"][2] = [-1, 1, "C3", [8]]
    assert len(DetectionModel(config).model[2].m) == 1


def test_an_activation_belongs_to_its_model_alone() -> None:
    model = DetectionModel(_tiny(activation="nn.LeakyReLU(0.1)"))
    activations = [module.act for module in model.modules() if isinstance(module, blocks.Conv)]
    assert all(isinstance(act, nn.LeakyReLU) and act.negative_slope == 0.1 for act in activations)
    assert isinstance(DetectionModel(TINY).model[0].act, nn.SiLU)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("nn.ReLU()", nn.ReLU), ("torch.nn.SiLU(inplace=True)", nn.SiLU), ("LeakyReLU(negative_slope=0.2)", nn.LeakyReLU)],
)
def test_activations_are_read_from_calls(text: str, kind: type) -> None:
    assert isinstance(parse_activation(text), kind)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch owned')",
        "nn.Module()",
        "nn.ReLU",
        "nn.LeakyReLU(open('x'))",
        "nn.ReLU(nonsense=1)",
        "nn.functional.relu()",
        "(lambda: 1)()",
        "",
        "3",
    ],
)
def test_anything_but_a_known_activation_is_refused_and_not_run(text: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WeightsError, match="activation"):
        parse_activation(text)
    assert not list(tmp_path.iterdir())


def test_torch_modules_and_words_in_arguments_are_resolved() -> None:
    config = _tiny()
    config["backbone"][2:3] = [
        [-1, 1, "nn.BatchNorm2d", []],
        [-1, 1, "nn.ConvTranspose2d", [8, 2, 2]],
        [-1, 1, "nn.MaxPool2d", ["2", 2, 0]],
        [-1, 1, "Conv", [8, 3, 1, "None", 1, 1, "nn.ReLU()"]],
        [-1, 1, "Contract", [2]],
        [-1, 1, "Expand", [2]],
        [-1, 1, "nn.Upsample", ["None", 2, "nearest"]],
        [-1, 1, "nn.AvgPool2d", [2]],
    ]
    config["head"] = [[[5, 10], 1, "Detect", ["nc", "anchors"]]]
    model = DetectionModel(config)
    assert isinstance(model.model[5].act, nn.ReLU)
    assert model.model[6].gain == 2
    assert model.head.m[0].in_channels == 8
    assert model.model[2].eps == 1e-3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "lacks keys"),
        ({key: value for key, value in TINY.items() if key != "anchors"}, "no anchors"),
        (_tiny(nc=0), "nc is 0"),
        (_tiny(nc=True), "nc is True"),
        (_tiny(width_multiple="wide"), "width_multiple"),
        (_tiny(depth_multiple=-1.0), "depth_multiple"),
        (_tiny(backbone="Conv"), "backbone is str"),
        (_tiny(anchors=[[1, 2], [3, 4, 5, 6]]), "anchors"),
        (_tiny(anchors=[[1, 2, 3], [4, 5, 6]]), "anchors"),
        (_tiny(anchors=[[0, 2], [4, 5]]), "anchors"),
        (_tiny(anchors=[[10, 13, 16, 30]]), "1 levels but 2 inputs"),
        (_tiny(activation="exit()"), "activation"),
        (_with_row([-1, 1, "Conw", [8]]), "did you mean Conv"),
        (_with_row([-1, 1, "nn.Nothing", [8]]), "no such module"),
        (_with_row([-1, 1, "nn.init", [8]]), "no such module"),
        (_with_row([-1, 1, "Segment", [8]]), "no such module"),
        (_with_row([7, 1, "C3", [8]]), "row 2 .* earlier row"),
        (_with_row([-3, 1, "C3", [8]]), "earlier row"),
        (_with_row([-2, 1, "Conv", [8, 3, 2]], place=0), "row 0 .* earlier row"),
        (_with_row([0, 1, "Conv", [8, 3, 2]], place=0), "row 0 .* earlier row"),
        (_with_row(["x", 1, "C3", [8]]), "neither an integer"),
        (_with_row([[], 1, "C3", [8]]), "neither an integer"),
        (_with_row([-1, 0, "C3", [8]]), "positive integer"),
        (_with_row([-1, 1, "C3", 8]), "not a list"),
        (_with_row([-1, 1, "C3"]), "number, module, args"),
        (_with_row([-1, 1, "C3", []]), "cannot be built"),
        (_with_row([-1, 1, "C3", ["wide"]]), "cannot be built"),
        (_with_row([-1, 1, "Conv", [8, 3, 1, 1, 1, 1, True, 9]]), "cannot be built"),
        (_with_row([[0, 1], 1, "C3", [8]]), "takes one input"),
        (_with_row([[0, 1], 1, "Concat", [1]]), "row 2 .* does not fit"),
        (_with_row([-1, 1, "Detect", ["nc", "anchors"]]), "last row"),
        (_tiny(head=[[-1, 1, "C3", [8]]]), "last row"),
        (_tiny(head=[[[2, 3], 1, "Detect", [80, "anchors"]]]), "Detect takes"),
    ],
)
def test_a_faulty_config_is_refused_with_its_place(config: dict, message: str) -> None:
    with pytest.raises(WeightsError, match=f"(?s){message}"):
        DetectionModel(config)


def test_strides_that_the_probe_cannot_show_are_refused() -> None:
    config = _tiny()
    config["backbone"][3] = [-1, 1, "Conv", [16, 3, 3]]
    with pytest.raises(WeightsError, match="strides"):
        DetectionModel(config)
    config["backbone"][3] = [-1, 1, "Conv", [16, 3, 64]]
    with pytest.raises(WeightsError, match="strides"):
        DetectionModel(config)


def test_an_unknown_name_and_a_broken_file_are_users_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        DetectionModel("yolov5q")
    broken = tmp_path / "broken.yaml"
    for content in ("nc: [", "- 1", ""):
        broken.write_text(content)
        with pytest.raises(WeightsError):
            DetectionModel(broken)


def test_an_unused_key_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        DetectionModel(_tiny(activaton="nn.ReLU()"))
    assert "did you mean activation" in caplog.text


def test_frozen_layers_move_neither_parameters_nor_statistics() -> None:
    model = DetectionModel(TINY).freeze([0, 1]).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sum(logits.square().sum() for logits in model(torch.rand(2, 3, 32, 32))).backward()
    # Every parameter has a gradient but for the frozen ones.
    without = {name.split(".")[1] for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {"0", "1"}
    optimizer.step()
    changed = {key.split(".")[1] for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {"2", "3", "4"}


def test_a_frozen_head_still_gives_maps_in_training() -> None:
    model = DetectionModel(TINY).freeze(range(5))
    assert isinstance(model(torch.rand(2, 3, 32, 32)), list)


def test_layers_that_do_not_exist_cannot_be_frozen() -> None:
    with pytest.raises(ConfigError, match="5 layers"):
        DetectionModel(TINY).freeze([9])


def test_a_fused_model_gives_the_same_boxes_with_fewer_parameters() -> None:
    model = DetectionModel(TINY).eval()
    images = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        expected, _ = model(images)
        size = len(list(model.parameters()))
        found, _ = model.fuse()(images)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert len(list(model.parameters())) < size


def test_augmented_boxes_come_back_to_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    model = DetectionModel(TINY).eval()
    monkeypatch.setattr("accel_yolo.model.detector.TTA_SCALES_AND_FLIPS", ((1.0, False), (1.0, True)))
    images = torch.rand(1, 3, 32, 48)
    with torch.no_grad():
        plain, _ = model(images)
        mirrored, _ = model(images.flip(3))
        found = model.forward_augmented(images)
    # Five parts of the first pass without its coarse one; of the last pass the finest level is left out.
    kept = plain.shape[1] - plain.shape[1] // 5
    assert torch.equal(found[:, :kept], plain[:, :kept])
    expected = mirrored[:, plain.shape[1] // 5 * 4 :].clone()
    expected[..., 0] = 48 - expected[..., 0]
    torch.testing.assert_close(found[:, kept:], expected)


def test_no_two_entries_of_a_state_dict_share_memory() -> None:
    for config in (TINY, _tiny(activation="nn.PReLU()")):
        state = DetectionModel(config).state_dict()
        places = [value.untyped_storage().data_ptr() for value in state.values()]
        assert len(set(places)) == len(places)


def test_counting_operations_leaves_the_model_alone() -> None:
    model = DetectionModel(TINY)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert count_gflops(model, image_size=64) > 0
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.training


def test_a_copy_of_the_model_is_independent() -> None:
    model = DetectionModel(TINY).eval()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.head.m[0].weight.zero_()
    assert not (model.head.m[0].weight == 0).all()
    assert twin.head.strides == model.head.strides
