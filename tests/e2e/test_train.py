"""The main job from the command line: what it writes, that it learns, and that it goes on where it was."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

import accel_yolo
from accel_yolo.config.load import config_from_kwargs
from accel_yolo.engine.callbacks import Callbacks
from accel_yolo.engine.run_folder import COLUMNS, read_results

SMALL = {"cfg": "yolov5-shapes", "imgsz": 64, "batch_size": 8, "workers": 0, "noplots": True, "device": "cpu"}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _train(data, project, *, callbacks=None, **options):
    resolved = config_from_kwargs(data=str(data), project=str(project), **(SMALL | options))
    return accel_yolo.train(resolved, callbacks=callbacks)


def test_a_run_leaves_the_files_that_yolo_users_know(train, tmp_path, tiny):
    flags = ["--data", "tiny.yaml", "--cfg", "yolov5-shapes", "--imgsz", "70", "--batch-size", "8", "--epochs", "2"]
    finished = train(*flags, "--save-period", "1", "--workers", "1")
    assert finished.code == 0, finished.output[-4000:]
    assert "--imgsz 70 is no multiple of the stride 32: using 96" in finished.output
    assert finished.output.count("--imgsz 70") == 1
    run = tmp_path / "runs" / "train" / "exp"
    names = {path.name for path in run.iterdir()}
    assert names >= {
        "results.csv", "opt.yaml", "hyp.yaml", "config.yaml", "results.png", "labels.jpg", "labels_correlogram.jpg",
        "confusion_matrix.png", "F1_curve.png", "P_curve.png", "R_curve.png", "PR_curve.png", "train_batch0.jpg",
        "val_batch0_labels.jpg", "val_batch0_pred.jpg", "weights", "checkpoints",
    }  # fmt: skip
    weights = {path.name for path in (run / "weights").iterdir()}
    assert weights == {"best.safetensors", "last.safetensors", "epoch0.safetensors", "epoch1.safetensors"}
    assert [row["epoch"] for row in read_results(run / "results.csv")] == [0, 1]
    assert (run / "results.csv").read_text().splitlines()[0].replace(" ", "").split(",") == list(COLUMNS)
    assert not any("pt" in path.suffix or "pkl" in path.suffix for path in run.rglob("*"))
    assert str(run.relative_to(tmp_path)) in finished.output.splitlines()[-1]

    stored = train_and_measure_again(run, tmp_path)
    last = read_results(run / "results.csv")
    best = max(last, key=lambda row: 0.1 * row["metrics/mAP_0.5"] + 0.9 * row["metrics/mAP_0.5:0.95"])
    assert stored == pytest.approx(best["metrics/mAP_0.5:0.95"], abs=1e-6, rel=1e-4)


def train_and_measure_again(run, tmp_path) -> float:
    """mAP50-95 of the saved best weights, measured by `val` in this process."""
    result = accel_yolo.validate(
        weights=str(run), data=str(tmp_path / "tiny.yaml"), imgsz=96, batch_size=16, workers=0, noplots=True,
        project=str(tmp_path / "val"), device="cpu",
    )  # fmt: skip
    metrics = json.loads((tmp_path / "val" / "exp" / "metrics.json").read_text())
    assert metrics["map50_95"] == pytest.approx(result.map50_95)
    return result.map50_95


@pytest.mark.timeout(600)
def test_the_built_in_shapes_are_learnt_in_a_third_of_the_recipes_epochs(train, tmp_path):
    finished = train("--epochs", "12", "--noplots", timeout=550)
    assert finished.code == 0, finished.output[-4000:]
    rows = read_results(tmp_path / "runs" / "train" / "exp" / "results.csv")
    assert max(row["metrics/mAP_0.5"] for row in rows) >= 0.6, finished.output[-2000:]


class _StopAfter(Callbacks):
    """Ends the run the hard way once an epoch was saved."""

    def __init__(self, epochs):
        self.epochs = epochs

    def on_epoch_end(self, *, values, state):
        if values["epoch"] == self.epochs:
            raise KeyboardInterrupt


@pytest.mark.parametrize("options", [{}, {"optimizer": "AdamW", "mixed_precision": "bf16", "freeze": [2]}])
def test_a_resumed_run_ends_with_the_very_weights_of_one_that_was_never_stopped(tmp_path, tiny, options):
    straight = _train(tiny, tmp_path / "a", epochs=3, **options)
    with pytest.raises(KeyboardInterrupt):
        _train(tiny, tmp_path / "b", epochs=3, callbacks=_StopAfter(1), **options)
    resumed = accel_yolo.train(config_from_kwargs(resume=str(tmp_path / "b" / "exp")))
    for name in ("last", "best"):
        left, right = (load_file(result.save_dir / "weights" / f"{name}.safetensors") for result in (straight, resumed))
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert torch.equal(value, right[key]), (name, key)
    assert resumed.metrics == straight.metrics
    rows = [read_results(result.save_dir / "results.csv") for result in (straight, resumed)]
    for left, right in zip(*rows, strict=True):
        assert {k: v for k, v in left.items() if "time" not in k} == {k: v for k, v in right.items() if "time" not in k}


def test_a_finished_run_can_be_extended_and_has_nothing_to_do_otherwise(tmp_path, tiny):
    first = _train(tiny, tmp_path, epochs=1)
    again = accel_yolo.train(config_from_kwargs(resume=str(first.save_dir)))
    assert again.metrics == first.metrics and len(read_results(first.save_dir / "results.csv")) == 1


def test_frozen_layers_keep_weights_and_statistics_bit_by_bit(tmp_path, tiny):
    # Weights 1 are the start of run 2, in which the first five layers are frozen.
    first = _train(tiny, tmp_path, epochs=1)
    second = _train(tiny, tmp_path, epochs=1, weights=str(first.last), cfg=None, freeze=[5])
    before, after = load_file(first.last), load_file(second.last)
    frozen = [key for key in before if int(key.split(".")[1]) < 5]
    assert all(torch.equal(before[key], after[key]) for key in frozen)
    assert not torch.equal(before["model.24.m.0.weight"], after["model.24.m.0.weight"])


def test_without_validation_and_saving_only_the_last_epoch_leaves_something(tmp_path, tiny):
    saves = []

    class Noting(Callbacks):
        def on_save(self, *, path, state):
            saves.append((path.name, state.epoch))

    result = _train(tiny, tmp_path, epochs=3, noval=True, nosave=True, callbacks=Noting())
    assert {epoch for _, epoch in saves} == {3}
    rows = read_results(result.save_dir / "results.csv")
    assert ["metrics/mAP_0.5" in row for row in rows] == [False, False, True]


def test_single_class_rectangular_multi_scale_and_cosine_train_to_the_end(tmp_path, tiny):
    result = _train(
        tiny, tmp_path, epochs=1, single_cls=True, rect=True, multi_scale=True, cos_lr=True, label_smoothing=0.1
    )
    assert math.isfinite(result.metrics["val/box_loss"])
    assert load_file(result.last)["model.24.m.0.bias"].shape == (3 * (5 + 1),)
