"""`--batch-size -1`: the largest batch that fits, found by measuring the memory of a few small ones."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

logger = logging.getLogger(__name__)

FALLBACK = 16
PROBED_SIZES = (1, 2, 4, 8, 16)
MEMORY_SHARE = 0.8


def measured_batch_size(model: nn.Module, *, image_size: int, device: torch.device) -> int:
    """A batch size that uses about 80 % of a CUDA device's free memory; 16 on any other device.

    Source: training.md 11 of the specification.
    """
    if device.type != "cuda":
        logger.info("--batch-size -1: nothing to measure on %s, using %d", device.type, FALLBACK)
        return FALLBACK
    free, _ = torch.cuda.mem_get_info(device)
    probe = copy.deepcopy(model).train().to(device)
    size = choose_batch_size(lambda batch: _peak_bytes(probe, batch, image_size, device), free_bytes=free)
    logger.info("--batch-size -1: using %d, for %.0f %% of %.1f GB free", size, MEMORY_SHARE * 100, free / 1e9)
    return size


def choose_batch_size(peak_bytes: Callable[[int], float | None], *, free_bytes: float) -> int:
    """The size that the memory's growth over the probed sizes leads to.

    Args:
        peak_bytes: bytes that one training step with that many images needs; None if it does not fit.
        free_bytes: bytes to share out.

    Returns:
        At least 1 and at most 1024, below the first size that did not fit; 16 if nothing could be concluded.
    """
    sizes, peaks, too_large = [], [], None
    for size in PROBED_SIZES:
        peak = peak_bytes(size)
        if peak is None:
            too_large = size
            break
        sizes.append(size)
        peaks.append(peak)
    if not sizes:
        return FALLBACK
    if len(sizes) == 1:
        return sizes[0]
    slope, intercept = np.polyfit(sizes, peaks, 1)
    if slope <= 0:
        return FALLBACK
    chosen = int((MEMORY_SHARE * free_bytes - intercept) / slope)
    if too_large is not None and chosen >= too_large:
        chosen = sizes[-1]
    return chosen if 1 <= chosen <= 1024 else FALLBACK


def _peak_bytes(model: nn.Module, batch_size: int, image_size: int, device: torch.device) -> float | None:
    try:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        maps = model(torch.zeros(batch_size, 3, image_size, image_size, device=device))
        sum(level.float().mean() for level in maps).backward()
        return torch.cuda.max_memory_allocated(device) - before
    except torch.OutOfMemoryError:
        return None
    finally:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
