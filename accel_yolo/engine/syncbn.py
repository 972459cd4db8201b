"""BatchNorm over the images of all processes, on any backend; torch's own refuses everything but accelerators.

Legend: B images of this process, C channels, H W pixels, W processes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class SyncBatchNorm2d(nn.BatchNorm2d):
    """A `BatchNorm2d` whose training statistics are those of the joined batch of a process group.

    Parameters and buffers have the names of `BatchNorm2d`, so state dicts fit both ways. Exact for unequal numbers of
    elements per process, a process without any included. Every process must call it equally often in training.

    Args:
        plain: the module to replace; its parameters and buffers are taken over, not copied.
        process_group: the group to talk in. One of its own, because DDP's bucket reductions run at the same time and
            collectives of one group must have the same order everywhere.
    """

    def __init__(self, plain: nn.BatchNorm2d, process_group: dist.ProcessGroup) -> None:
        super().__init__(
            plain.num_features,
            eps=plain.eps,
            momentum=plain.momentum,
            affine=plain.affine,
            track_running_stats=plain.track_running_stats,
        )
        self.weight, self.bias = plain.weight, plain.bias
        for name, buffer in plain.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self.train(plain.training)
        self.process_group = process_group

    def forward(self, images: Tensor) -> Tensor:
        """Features (B, C, H, W) -> the same shape and type, normalised per channel."""
        if not self.training:
            return super().forward(images)
        output, mean, variance, count = _SyncedNormalization.apply(
            images, self.weight, self.bias, self.eps, self.process_group
        )
        if self.track_running_stats:
            self._update_running_statistics(mean, variance, count)
        return output

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.BatchNorm2d:
        # A copy (EMA, export) is never trained in step with the other processes, and a process group cannot be copied.
        copied = nn.BatchNorm2d(self.num_features, eps=self.eps, momentum=self.momentum, affine=self.affine)
        copied.to(device=self.weight.device, dtype=self.weight.dtype)
        copied.load_state_dict(self.state_dict())
        return copied.train(self.training)


def convert_sync_batchnorm(module: nn.Module, process_group: dist.ProcessGroup, *, device_type: str) -> nn.Module:
    """Replace every BatchNorm2d in `module` by a synchronised one: torch's on CUDA, ours elsewhere.

    Must run before the optimiser is built and before `prepare()`.
    """
    if device_type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, SyncBatchNorm2d(child, process_group))
        else:
            convert_sync_batchnorm(child, process_group, device_type=device_type)
    return module


class _SyncedNormalization(torch.autograd.Function):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, with mean and var over all processes.

    The passes over the pixels are torch's own fused kernels: their inference form takes given statistics, and its
    backward yields exactly the two sums per channel that must be exchanged.
    """

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, weight: Tensor, bias: Tensor, eps: float, process_group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, variance, count = _joined_statistics(images, eps, process_group, dtype=weight.dtype)
        output = (
            F.batch_norm(images, mean, variance, weight, bias, training=False, eps=eps)
            if images.numel()
            else images.clone()
        )
        ctx.save_for_backward(images, weight, mean, variance, count)
        ctx.eps, ctx.process_group = eps, process_group
        ctx.mark_non_differentiable(mean, variance, count)
        return output, mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, None, None]:
        images, weight, mean, variance, count = ctx.saved_tensors
        if images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous():
            grad_output = grad_output.contiguous(memory_format=torch.channels_last)
        if images.numel():
            grad_input, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
                grad_output, images, weight, mean, variance, None, None, False, ctx.eps, [True, True, True]
            )
        else:
            # The kernel divides by the number of elements.
            grad_input, grad_weight, grad_bias = (
                grad_output.clone(),
                mean.new_zeros(len(mean)),
                mean.new_zeros(len(mean)),
            )
        # Own sums are the own share of the parameters' gradients, which DDP adds up; the input needs those of all.
        sums = torch.stack([grad_weight, grad_bias])
        dist.all_reduce(sums, group=ctx.process_group)
        inverse = torch.rsqrt(variance + ctx.eps)
        slope = -weight * inverse * inverse * sums[0] / count
        offset = -weight * inverse * sums[1] / count - slope * mean
        shape = (1, -1, 1, 1)
        grad_input = grad_input.addcmul_(images, slope.to(images.dtype).view(shape))
        return grad_input.add_(offset.to(images.dtype).view(shape)), grad_weight, grad_bias, None, None


def _joined_statistics(
    images: Tensor, eps: float, process_group: dist.ProcessGroup, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (C,), biased variance (C,) and count () of all processes' elements per channel, of type `dtype`."""
    channels = images.shape[1]
    own_count = images.numel() // channels
    if own_count:
        # torch's training kernel is the fastest way to a channel's mean and variance (six times var_mean's speed).
        _, mean, inverse = torch.native_batch_norm(images, None, None, None, None, True, 0.0, eps)
        variance = inverse.to(dtype).pow(-2) - eps
    else:
        mean = variance = images.new_zeros(channels, dtype=dtype)
    count = torch.full((1,), float(own_count), device=images.device, dtype=dtype)
    own = torch.cat([mean.to(dtype), variance, count])
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(parts, own, group=process_group)
    # Merging means and variances (rather than sums of squares) does not cancel when the mean is large (Chan et al.,
    # "Updating formulae and a pairwise algorithm for computing sample variances", 1979).
    joined = torch.stack(parts).double()
    means, variances, counts = joined[:, :channels], joined[:, channels : 2 * channels], joined[:, -1:]
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    variance = ((variances + (means - mean) ** 2) * counts).sum(0) / total
    return mean.to(dtype), variance.to(dtype), total.to(dtype)
