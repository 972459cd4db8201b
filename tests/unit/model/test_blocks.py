"""Blocks: shapes, keys, fusing, activations."""

import pytest
import torch
from torch import nn

from accel_yolo.model import blocks


def _randomised(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.normal_(part.bias)
            nn.init.normal_(part.running_mean)
            nn.init.uniform_(part.running_var, 0.5, 2)
    return module.eval()


@pytest.mark.parametrize(
    ("block", "shape"),
    [
        (blocks.Conv(8, 12, 3, 2), (2, 12, 4, 5)),
        (blocks.Conv(8, 12, (1, 3), (1, 2)), (2, 12, 8, 5)),
        (blocks.Conv(8, 12, 3, 1, None, 2, 2), (2, 12, 8, 10)),
        (blocks.DWConv(8, 12, 3, 2), (2, 12, 4, 5)),
        (blocks.Bottleneck(8, 8), (2, 8, 8, 10)),
        (blocks.C3(8, 12, 2), (2, 12, 8, 10)),
        (blocks.C3x(8, 12, 2), (2, 12, 8, 10)),
        (blocks.C3TR(8, 16, 2), (2, 16, 8, 10)),
        (blocks.C3Ghost(8, 16, 2), (2, 16, 8, 10)),
        (blocks.BottleneckCSP(8, 12, 2), (2, 12, 8, 10)),
        (blocks.CrossConv(8, 8, 3, 2), (2, 8, 4, 5)),
        (blocks.SPP(8, 12), (2, 12, 8, 10)),
        (blocks.SPPF(8, 12), (2, 12, 8, 10)),
        (blocks.GhostConv(8, 12, 3, 2), (2, 12, 4, 5)),
        (blocks.GhostBottleneck(8, 12, 3, 2), (2, 12, 4, 5)),
        (blocks.GhostBottleneck(8, 8), (2, 8, 8, 10)),
        (blocks.TransformerBlock(8, 16, 4, 1), (2, 16, 8, 10)),
        (blocks.Focus(8, 12, 3), (2, 12, 4, 5)),
        (blocks.Contract(2), (2, 32, 4, 5)),
        (blocks.Expand(2), (2, 2, 16, 20)),
        (blocks.MixConv2d(8, 13, (1, 3, 5)), (2, 13, 8, 10)),
    ],
)
def test_every_block_gives_its_shape_and_a_gradient_to_every_parameter(
    block: nn.Module, shape: tuple[int, ...]
) -> None:
    output = block(torch.randn(2, 8, 8, 10))
    assert output.shape == shape
    if parameters := list(block.parameters()):
        output.square().sum().backward()
        assert all(parameter.grad is not None for parameter in parameters)


def test_c3_lists_its_keys_in_the_published_order() -> None:
    keys = list(dict.fromkeys(key.rsplit(".", 2)[0] for key in blocks.C3(8, 8, 2).state_dict()))
    assert keys == ["cv1", "cv2", "cv3", "m.0.cv1", "m.0.cv2", "m.1.cv1", "m.1.cv2"]


def test_c3_puts_the_bottleneck_path_first() -> None:
    block = blocks.C3(4, 4, 1).eval()
    x = torch.randn(1, 4, 3, 3)
    joined = torch.cat((block.m(block.cv1(x)), block.cv2(x)), 1)
    torch.testing.assert_close(block(x), block.cv3(joined))


def test_bottleneck_adds_its_input_only_where_asked_and_possible() -> None:
    assert blocks.Bottleneck(8, 8).has_shortcut
    assert not blocks.Bottleneck(8, 8, shortcut=False).has_shortcut
    assert not blocks.Bottleneck(8, 4).has_shortcut


def test_sppf_is_the_function_of_spp() -> None:
    spp, sppf = blocks.SPP(8, 8).eval(), blocks.SPPF(8, 8).eval()
    sppf.load_state_dict(spp.state_dict())
    x = torch.randn(1, 8, 16, 16)
    assert torch.equal(spp(x), sppf(x))


def test_focus_takes_pixels_in_the_stated_order() -> None:
    focus = blocks.Focus(1, 4, act=False).eval()
    focus.conv.conv.weight.data = torch.eye(4).view(4, 4, 1, 1)
    focus.conv.bn = nn.Identity()
    # Row by row: 0 1 / 2 3.
    x = torch.arange(4.0).view(1, 1, 2, 2)
    assert focus(x).flatten().tolist() == [0, 2, 1, 3]


def test_expand_undoes_contract() -> None:
    x = torch.randn(2, 3, 6, 9)
    assert torch.equal(blocks.Expand(3)(blocks.Contract(3)(x)), x)


@pytest.mark.parametrize("block", [blocks.Conv(6, 8, 3), blocks.DWConv(6, 12, 3), blocks.C3Ghost(6, 8, 1)])
def test_fusing_keeps_the_function_and_drops_the_norms(block: nn.Module) -> None:
    block = _randomised(block)
    x = torch.randn(2, 6, 7, 9)
    before = block(x)
    for _ in range(2):
        for part in block.modules():
            if isinstance(part, blocks.Conv):
                part.fuse()
    torch.testing.assert_close(block(x), before, rtol=1e-4, atol=1e-5)
    assert not [key for key in block.state_dict() if ".bn." in key or "running" in key]


def test_fusing_leaves_free_norms_alone() -> None:
    block = _randomised(blocks.BottleneckCSP(6, 8))
    for part in block.modules():
        if isinstance(part, blocks.Conv):
            part.fuse()
    assert "bn.running_mean" in block.state_dict()


def test_every_conv_has_its_own_copy_of_a_given_activation() -> None:
    given = nn.PReLU()
    block = blocks.C3(8, 8, 1, act=given)
    activations = [part for part in block.modules() if isinstance(part, nn.PReLU)]
    assert len({id(part.weight) for part in activations} | {id(given.weight)}) == 6
    # Later blocks do not inherit it.
    assert isinstance(blocks.Conv(8, 8).act, nn.SiLU)


def test_no_activation_is_identity() -> None:
    assert isinstance(blocks.Conv(8, 8, act=False).act, nn.Identity)


def test_transformer_keeps_rows_and_columns_apart() -> None:
    block = blocks.TransformerBlock(4, 4, 2, 1).eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
    # All maps are zero and the residuals remain: the block must be the identity on a map that is not square.
    x = torch.randn(2, 4, 3, 5)
    assert torch.equal(block(x), x)
