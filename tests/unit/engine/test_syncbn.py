"""What of SyncBN needs no second process; its statistics are proven in tests/distributed."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_yolo.engine.syncbn import SyncBatchNorm2d, convert_sync_batchnorm


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def _plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, eps=1e-3, momentum=0.03), nn.ReLU(), nn.BatchNorm2d(4))


def test_conversion_keeps_keys_parameters_settings_and_mode(group):
    plain = _plain().eval()
    weight = plain[1].weight
    synced = convert_sync_batchnorm(plain, group, device_type="cpu")
    assert [type(layer) for layer in synced] == [nn.Conv2d, SyncBatchNorm2d, nn.ReLU, SyncBatchNorm2d]
    assert synced[1].weight is weight
    assert (synced[1].eps, synced[1].momentum, synced[1].training) == (1e-3, 0.03, False)
    assert list(synced.state_dict()) == list(_plain().state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_process_alone_equals_plain_batchnorm(group, dtype):
    plain, images = _plain(), torch.randn(2, 3, 5, 5)
    synced = convert_sync_batchnorm(copy.deepcopy(plain), group, device_type="cpu")
    if dtype == torch.float64:
        plain, synced, images = plain.double(), synced.double(), images.double()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        wanted, found = plain(images), synced(images)
    assert found.dtype == wanted.dtype
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(synced[1].running_var, plain[1].running_var)
    found.float().square().sum().backward()
    assert synced[1].weight.grad is not None and synced[0].weight.grad.isfinite().all()


def test_a_copy_is_plain_so_that_it_never_waits_for_others(group):
    synced = convert_sync_batchnorm(_plain(), group, device_type="cpu")
    copied = copy.deepcopy(synced)
    assert type(copied[1]) is nn.BatchNorm2d
    assert torch.equal(copied[1].running_var, synced[1].running_var)
