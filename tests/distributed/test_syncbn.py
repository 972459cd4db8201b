"""Our SyncBN on real processes equals a plain BatchNorm on the joined batch, for equal, unequal and empty shares."""

import pytest

CODE = """
import copy, sys
import torch, torch.distributed as dist
from torch import nn
from accel_yolo.engine.syncbn import convert_sync_batchnorm

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
dtype, shares, layout = getattr(torch, {dtype!r}), {shares!r}, getattr(torch, {layout!r})
torch.manual_seed(0)
plain = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, eps=1e-3, momentum=0.03), nn.SiLU(),
                      nn.Conv2d(4, 5, 1), nn.BatchNorm2d(5)).to(dtype).to(memory_format=layout)
synced = convert_sync_batchnorm(copy.deepcopy(plain), dist.new_group(), device_type="cpu")
assert list(plain.state_dict()) == list(synced.state_dict())
plain = plain.double()  # the truth; torch's own float32 kernel on channels_last is further from it than ours
images = torch.randn(sum(shares), 3, 6, 7, dtype=dtype).to(memory_format=layout) * 3 + 100
weight = torch.randn(sum(shares), 5, 6, 7, dtype=dtype)
first = sum(shares[:rank]); part = slice(first, first + shares[rank])
tolerance = {tolerance}
for step in range(3):
    whole_in = images.double().clone().requires_grad_(); own_in = images[part].clone().requires_grad_()
    whole_out = plain(whole_in); own_out = synced(own_in)
    (whole_out * weight.double()).sum().backward(); (own_out * weight[part]).sum().backward()
    def near(name, found, wanted):
        scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
        worst = float((found - wanted).abs().max()) / scale if wanted.numel() else 0.0
        assert worst <= tolerance, (step, name, worst)
    near("output", own_out, whole_out[part]); near("grad", own_in.grad, whole_in.grad[part])
    for (name, a), (_, b) in zip(synced.named_parameters(), plain.named_parameters()):
        total = a.grad.clone(); dist.all_reduce(total)
        near(name, total, b.grad)
    for (name, a), (_, b) in zip(synced.named_buffers(), plain.named_buffers()):
        near(name, a.double(), b.double())
    plain.zero_grad(); synced.zero_grad()
copied = copy.deepcopy(synced)
assert type(copied[1]) is nn.BatchNorm2d
near("copy", copied.eval()(images), plain.eval()(images.double()))
print("rank", rank, "agrees", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])
@pytest.mark.parametrize("shares", [(4, 4), (5, 2), (7, 0)])
def test_statistics_and_gradients_equal_those_of_one_big_batch(spawn, shares, layout):
    code = CODE.format(dtype="float64", shares=shares, layout=layout, tolerance=1e-11)
    assert spawn(code, 2).count("agrees") == 2


def test_three_processes_in_float32(spawn):
    code = CODE.format(dtype="float32", shares=(3, 2, 4), layout="channels_last", tolerance=2e-4)
    assert spawn(code, 3).count("agrees") == 3
