"""The batch size that a memory curve leads to."""

import torch
from torch import nn

from accel_yolo.engine.autobatch import FALLBACK, choose_batch_size, measured_batch_size


def test_the_line_through_the_probes_is_followed_to_the_share_of_memory():
    # 100 bytes fixed and 10 per image; 80 % of 1000 bytes hold 70 images.
    assert choose_batch_size(lambda size: 100 + 10 * size, free_bytes=1000) == 70


def test_a_size_that_failed_is_never_chosen():
    assert choose_batch_size(lambda size: None if size >= 8 else 10 * size, free_bytes=1000) == 4


def test_nothing_to_conclude_gives_the_default():
    assert choose_batch_size(lambda size: None, free_bytes=1000) == FALLBACK
    assert choose_batch_size(lambda size: 5.0, free_bytes=1000) == FALLBACK
    assert choose_batch_size(lambda size: size * 1e-9, free_bytes=1000) == FALLBACK


def test_a_cpu_gets_the_default():
    assert measured_batch_size(nn.Conv2d(3, 3, 1), image_size=64, device=torch.device("cpu")) == FALLBACK
