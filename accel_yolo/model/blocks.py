"""The building blocks of the networks; their attribute names are the keys of the state dict.

Every block with a `Conv` inside takes `act`: True for SiLU, False for none, or a module. Each Conv keeps its own copy
of a given module, so that nothing is set for the whole process and no two state-dict entries share memory.

Legend: B images in a batch, C channels, H W cells.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

Act = bool | nn.Module
Size = int | tuple[int, int]


class Conv(nn.Module):
    """Convolution without bias, BatchNorm, activation.

    Args:
        cin: input channels.
        cout: output channels.
        k: kernel side, or (vertical, horizontal).
        s: stride, like `k`.
        p: padding; None keeps the size at stride 1.
        g: groups.
        dilation: spacing of the kernel's points.
        act: see the file's head.
    """

    def __init__(
        self,
        cin: int,
        cout: int,
        k: Size = 1,
        s: Size = 1,
        p: Size | None = None,
        g: int = 1,
        dilation: int = 1,
        act: Act = True,
    ) -> None:
        super().__init__()
        padding = same_padding(k, dilation) if p is None else p
        self.conv = nn.Conv2d(cin, cout, k, s, padding, groups=g, dilation=dilation, bias=False)
        self.bn: nn.Module = nn.BatchNorm2d(cout)
        self.act = make_activation(act)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))

    @torch.no_grad()
    def fuse(self) -> None:
        """Fold the BatchNorm's running statistics into the convolution, in place; a second call does nothing."""
        norm = self.bn
        if not isinstance(norm, nn.BatchNorm2d):
            return
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        self.conv.weight = nn.Parameter(self.conv.weight * scale.view(-1, 1, 1, 1), requires_grad=False)
        self.conv.bias = nn.Parameter(norm.bias - norm.running_mean * scale, requires_grad=False)
        self.bn = nn.Identity()


class DWConv(Conv):
    """Depthwise Conv: as many groups as both channel counts allow."""

    def __init__(self, cin: int, cout: int, k: Size = 1, s: Size = 1, dilation: int = 1, act: Act = True) -> None:
        super().__init__(cin, cout, k, s, g=math.gcd(cin, cout), dilation=dilation, act=act)


class Bottleneck(nn.Module):
    """1x1 Conv to `cout * e` channels, 3x3 Conv back, and the input added where the shape allows."""

    def __init__(self, cin: int, cout: int, shortcut: bool = True, g: int = 1, e: float = 0.5, act: Act = True) -> None:
        super().__init__()
        hidden = int(cout * e)
        self.cv1 = Conv(cin, hidden, 1, 1, act=act)
        self.cv2 = Conv(hidden, cout, 3, 1, g=g, act=act)
        self.has_shortcut = shortcut and cin == cout

    def forward(self, x: Tensor) -> Tensor:
        y = self.cv2(self.cv1(x))
        return x + y if self.has_shortcut else y


class C3(nn.Module):
    """Two paths of `cout * e` channels, one through `n` bottlenecks, joined by a 1x1 Conv."""

    def __init__(
        self, cin: int, cout: int, n: int = 1, shortcut: bool = True, g: int = 1, e: float = 0.5, act: Act = True
    ) -> None:
        super().__init__()
        hidden = int(cout * e)
        self.cv1 = Conv(cin, hidden, 1, 1, act=act)
        self.cv2 = Conv(cin, hidden, 1, 1, act=act)
        self.cv3 = Conv(2 * hidden, cout, 1, act=act)
        self.m = self.make_inner(hidden, n, shortcut, g, act)

    def make_inner(self, hidden: int, n: int, shortcut: bool, g: int, act: Act) -> nn.Module:
        """What the first path goes through; the relatives below differ only here."""
        return nn.Sequential(*(Bottleneck(hidden, hidden, shortcut, g, e=1.0, act=act) for _ in range(n)))

    def forward(self, x: Tensor) -> Tensor:
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


class C3x(C3):
    """C3 with cross convolutions."""

    def make_inner(self, hidden: int, n: int, shortcut: bool, g: int, act: Act) -> nn.Module:
        return nn.Sequential(*(CrossConv(hidden, hidden, 3, 1, g, 1.0, shortcut, act) for _ in range(n)))


class C3TR(C3):
    """C3 with a transformer of four heads and `n` layers."""

    def make_inner(self, hidden: int, n: int, shortcut: bool, g: int, act: Act) -> nn.Module:
        return TransformerBlock(hidden, hidden, 4, n, act)


class C3Ghost(C3):
    """C3 with ghost bottlenecks, which have their own shortcut rule."""

    def make_inner(self, hidden: int, n: int, shortcut: bool, g: int, act: Act) -> nn.Module:
        return nn.Sequential(*(GhostBottleneck(hidden, hidden, act=act) for _ in range(n)))


class BottleneckCSP(nn.Module):
    """The older cross-stage block: plain convolutions end both paths, then a common BatchNorm and SiLU."""

    def __init__(
        self, cin: int, cout: int, n: int = 1, shortcut: bool = True, g: int = 1, e: float = 0.5, act: Act = True
    ) -> None:
        super().__init__()
        hidden = int(cout * e)
        self.cv1 = Conv(cin, hidden, 1, 1, act=act)
        self.cv2 = nn.Conv2d(cin, hidden, 1, 1, bias=False)
        self.cv3 = nn.Conv2d(hidden, hidden, 1, 1, bias=False)
        self.cv4 = Conv(2 * hidden, cout, 1, 1, act=act)
        self.bn = nn.BatchNorm2d(2 * hidden)
        self.act = nn.SiLU()
        self.m = nn.Sequential(*(Bottleneck(hidden, hidden, shortcut, g, e=1.0, act=act) for _ in range(n)))

    def forward(self, x: Tensor) -> Tensor:
        paths = torch.cat((self.cv3(self.m(self.cv1(x))), self.cv2(x)), 1)
        return self.cv4(self.act(self.bn(paths)))


class CrossConv(nn.Module):
    """A kernel row, then a kernel column."""

    def __init__(
        self,
        cin: int,
        cout: int,
        k: int = 3,
        s: int = 1,
        g: int = 1,
        e: float = 1.0,
        shortcut: bool = False,
        act: Act = True,
    ) -> None:
        super().__init__()
        hidden = int(cout * e)
        self.cv1 = Conv(cin, hidden, (1, k), (1, s), act=act)
        self.cv2 = Conv(hidden, cout, (k, 1), (s, 1), g=g, act=act)
        self.has_shortcut = shortcut and cin == cout

    def forward(self, x: Tensor) -> Tensor:
        y = self.cv2(self.cv1(x))
        return x + y if self.has_shortcut else y


class SPP(nn.Module):
    """Max pools of several sizes side by side."""

    def __init__(self, cin: int, cout: int, k: Sequence[int] = (5, 9, 13), act: Act = True) -> None:
        super().__init__()
        hidden = cin // 2
        self.cv1 = Conv(cin, hidden, 1, 1, act=act)
        self.cv2 = Conv(hidden * (len(k) + 1), cout, 1, 1, act=act)
        self.m = nn.ModuleList(nn.MaxPool2d(side, 1, side // 2) for side in k)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cv1(x)
        return self.cv2(torch.cat([x, *(pool(x) for pool in self.m)], 1))


class SPPF(nn.Module):
    """The function of SPP(5, 9, 13) from three small pools in a row."""

    def __init__(self, cin: int, cout: int, k: int = 5, act: Act = True) -> None:
        super().__init__()
        hidden = cin // 2
        self.cv1 = Conv(cin, hidden, 1, 1, act=act)
        self.cv2 = Conv(hidden * 4, cout, 1, 1, act=act)
        self.m = nn.MaxPool2d(k, 1, k // 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cv1(x)
        once = self.m(x)
        twice = self.m(once)
        return self.cv2(torch.cat((x, once, twice, self.m(twice)), 1))


class Concat(nn.Module):
    """Joins its inputs in the given order."""

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, inputs: list[Tensor]) -> Tensor:
        return torch.cat(inputs, self.dim)


class GhostConv(nn.Module):
    """Half of the output by a Conv, the other half by a cheap 5x5 depthwise Conv of the first."""

    def __init__(self, cin: int, cout: int, k: Size = 1, s: Size = 1, g: int = 1, act: Act = True) -> None:
        super().__init__()
        hidden = cout // 2
        self.cv1 = Conv(cin, hidden, k, s, g=g, act=act)
        self.cv2 = Conv(hidden, hidden, 5, 1, g=hidden, act=act)

    def forward(self, x: Tensor) -> Tensor:
        y = self.cv1(x)
        return torch.cat((y, self.cv2(y)), 1)


class GhostBottleneck(nn.Module):
    """Two ghost convolutions around an optional depthwise stride, plus a shortcut."""

    def __init__(self, cin: int, cout: int, k: int = 3, s: int = 1, act: Act = True) -> None:
        super().__init__()
        hidden = cout // 2
        is_strided = s == 2
        self.conv = nn.Sequential(
            GhostConv(cin, hidden, act=act),
            DWConv(hidden, hidden, k, s, act=False) if is_strided else nn.Identity(),
            GhostConv(hidden, cout, act=False),
        )
        self.shortcut = (
            nn.Sequential(DWConv(cin, cin, k, s, act=False), Conv(cin, cout, 1, 1, act=False))
            if is_strided
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + self.shortcut(x)


class TransformerLayer(nn.Module):
    """Attention and two linear maps, each with a residual; no normalisation and no activation."""

    def __init__(self, c: int, num_heads: int) -> None:
        super().__init__()
        self.q = nn.Linear(c, c, bias=False)
        self.k = nn.Linear(c, c, bias=False)
        self.v = nn.Linear(c, c, bias=False)
        self.ma = nn.MultiheadAttention(embed_dim=c, num_heads=num_heads)
        self.fc1 = nn.Linear(c, c, bias=False)
        self.fc2 = nn.Linear(c, c, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(HW, B, C) -> (HW, B, C)."""
        attended, _ = self.ma(self.q(x), self.k(x), self.v(x), need_weights=False)
        x = attended + x
        return self.fc2(self.fc1(x)) + x


class TransformerBlock(nn.Module):
    """Transformer layers over the cells of a map, with a learned position term."""

    def __init__(self, cin: int, cout: int, num_heads: int, num_layers: int, act: Act = True) -> None:
        super().__init__()
        self.conv = Conv(cin, cout, act=act) if cin != cout else nn.Identity()
        self.linear = nn.Linear(cout, cout)
        self.tr = nn.Sequential(*(TransformerLayer(cout, num_heads) for _ in range(num_layers)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        cells = x.flatten(2).permute(2, 0, 1)
        cells = self.tr(cells + self.linear(cells))
        return cells.permute(1, 2, 0).reshape(x.shape)


class Focus(nn.Module):
    """Every second row and column into the channels, then a Conv."""

    def __init__(
        self, cin: int, cout: int, k: Size = 1, s: Size = 1, p: Size | None = None, g: int = 1, act: Act = True
    ) -> None:
        super().__init__()
        self.conv = Conv(4 * cin, cout, k, s, p, g, act=act)

    def forward(self, x: Tensor) -> Tensor:
        even, odd = x[..., ::2, :], x[..., 1::2, :]
        return self.conv(torch.cat((even[..., ::2], odd[..., ::2], even[..., 1::2], odd[..., 1::2]), 1))


class Contract(nn.Module):
    """(B, C, H, W) -> (B, C * gain**2, H / gain, W / gain); the place inside a tile is the slower channel index."""

    def __init__(self, gain: int = 2) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        tiles = x.unflatten(3, (-1, self.gain)).unflatten(2, (-1, self.gain))
        return tiles.permute(0, 3, 5, 1, 2, 4).flatten(1, 3)


class Expand(nn.Module):
    """The inverse of Contract."""

    def __init__(self, gain: int = 2) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        tiles = x.unflatten(1, (self.gain, self.gain, -1))
        return tiles.permute(0, 3, 4, 1, 5, 2).flatten(4, 5).flatten(2, 3)


class MixConv2d(nn.Module):
    """Parallel convolutions of several kernel sizes that share the output channels, then BatchNorm and SiLU."""

    def __init__(self, cin: int, cout: int, k: Sequence[int] = (1, 3), s: int = 1) -> None:
        super().__init__()
        shares = [cout // len(k) + (index < cout % len(k)) for index in range(len(k))]
        self.m = nn.ModuleList(
            nn.Conv2d(cin, share, side, s, side // 2, bias=False) for side, share in zip(k, shares, strict=True)
        )
        self.bn = nn.BatchNorm2d(cout)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(torch.cat([conv(x) for conv in self.m], 1)))


def make_activation(act: Act) -> nn.Module:
    """A fresh activation module: SiLU for True, identity for False, else a copy of the given one."""
    if isinstance(act, nn.Module):
        return copy.deepcopy(act)
    return nn.SiLU() if act else nn.Identity()


def same_padding(kernel: Size, dilation: int = 1) -> Size:
    """The padding that keeps the size of a map at stride 1 and an odd kernel."""
    if isinstance(kernel, int):
        return (dilation * (kernel - 1) + 1) // 2
    vertical, horizontal = kernel
    return (dilation * (vertical - 1) + 1) // 2, (dilation * (horizontal - 1) + 1) // 2
