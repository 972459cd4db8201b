"""Shares of several processes become one result, whatever their number; and the merged copy for measuring."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from accel_yolo.config.schema import EvalConfig, LossConfig
from accel_yolo.data.dataset import val_loader
from accel_yolo.data.load import load_data
from accel_yolo.data.table import FlatTable
from accel_yolo.engine import evaluate as module
from accel_yolo.engine.distributed import make_accelerator
from accel_yolo.engine.evaluate import class_table, evaluate, merged_copy
from accel_yolo.model.detector import DetectionModel
from accel_yolo.model.loss import DetectionLoss
from accel_yolo.structures import Detections


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "tiny.yaml"
    path.write_text("source: shapes\nnum_train: 1\nnum_val: 7\nimage_size: 64\nseed: 3\n")
    data = load_data(str(path), splits=("val",))
    torch.manual_seed(0)
    model = DetectionModel("yolov5-shapes").eval()
    loss_fn = DetectionLoss(
        LossConfig(), strides=model.strides, anchors=model.head.anchors, num_classes=3, image_size=64
    )
    return data, model, loss_fn


def _evaluate(parts, *, world, batch_size=4, **options):
    data, model, loss_fn = parts
    table = data.splits["val"].table
    accelerator, _ = make_accelerator(device="cpu")
    config = EvalConfig(conf_thres=0.001)
    results, shares = [], []

    def run(rank):
        loader = val_loader(table, image_size=64, batch_size=batch_size, stride=32, rank=rank, world=world)
        return evaluate(
            model, loader, table=FlatTable(table), names=data.names, config=config, accelerator=accelerator,
            global_batch_size=batch_size, loss_fn=loss_fn, **options,
        )  # fmt: skip

    # Each rank's share is caught where it would be sent; the last call then gets them all.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "gather_payloads", lambda _, share: shares.append(share) or shares)
        patch.setattr(module, "on_main_process", lambda _, work: work() if len(shares) == world else None)
        results = [run(rank) for rank in range(world)]
    return results[-1]


@pytest.mark.parametrize("world", [2, 3, 5])
def test_the_result_does_not_depend_on_the_number_of_processes(parts, world):
    alone, shared = _evaluate(parts, world=1), _evaluate(parts, world=world)
    assert shared.images == alone.images == 7
    assert shared.instances == alone.instances
    assert shared.map50_95 == pytest.approx(alone.map50_95, abs=1e-6)
    for name, value in alone.losses.items():
        assert shared.losses[name] == pytest.approx(value, rel=1e-5), name


def test_losses_are_means_over_global_batches_of_what_the_training_loss_gives(parts):
    data, model, loss_fn = parts
    result = _evaluate(parts, world=2)
    means = []
    for batch in val_loader(data.splits["val"].table, image_size=64, batch_size=4, stride=32):
        images = batch.images.permute(0, 3, 1, 2).float() / 255
        with torch.no_grad():
            maps = model(images)[1]
        losses = loss_fn(maps, loss_fn.assign(batch.targets, batch_size=len(batch), image_hw=images.shape[2:]))
        means.append([losses.box.item(), losses.objectness.item(), losses.classification.item()])
    wanted = np.mean(means, axis=0)
    found = [result.losses[name] for name in ("box", "objectness", "classification")]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_a_row_that_was_seen_twice_or_never_is_an_error():
    share = module._Share()
    nothing = Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    share.add(0, nothing)
    with pytest.raises(RuntimeError, match="1 rows were not validated, the first is 1"):
        module._by_row([share.packed()], 2)
    with pytest.raises(RuntimeError, match="validated twice"):
        module._by_row([share.packed(), share.packed()], 1)


def test_the_merged_copy_leaves_the_average_alone(monkeypatch):
    average = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))
    other = {"1.running_mean": torch.tensor([2.0]), "1.running_var": torch.tensor([3.0])}
    monkeypatch.setattr(module, "gather_payloads", lambda _, own: [own, other])
    copied = merged_copy(average, SimpleNamespace(), per_process_statistics=True)
    assert copied[1].running_mean.item() == 1.0
    # Mean of the variances 1 and 3, plus the variance of the means 0 and 2.
    assert copied[1].running_var.item() == pytest.approx(3.0)
    assert average[1].running_mean.item() == 0.0
    assert not copied.training


def test_the_table_lists_every_class_and_marks_absent_ones(parts):
    result = _evaluate(parts, world=1)
    lines = class_table(result)
    assert [line.split()[0] for line in lines] == ["class", "all", "circle", "square", "triangle"]
    assert lines[1].split()[1:3] == ["7", str(result.instances)]
