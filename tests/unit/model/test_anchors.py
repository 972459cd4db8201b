"""Anchors: metrics, search, order of levels, placeholders."""

import numpy as np
import pytest
import torch

from accel_yolo.errors import WeightsError
from accel_yolo.model import anchors as anchors_module
from accel_yolo.model.anchors import (
    apply_anchors,
    check_anchors,
    cluster_anchors,
    fit_anchors,
    refuse_placeholder_anchors,
    scale_label_sizes,
)
from accel_yolo.model.detector import DetectionModel, order_levels

ANCHORS = np.array([[[10, 13], [16, 30], [33, 23]], [[30, 61], [62, 45], [59, 119]]], dtype=float)
PLACEHOLDERS = np.stack([np.arange(6, dtype=float).reshape(3, 2)] * 2)


def _sizes(number: int = 200, scale: float = 200, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.2, 1, (number, 2)) * scale


def _fit(sizes: np.ndarray, anchors: np.ndarray = ANCHORS, seed: int = 0, generations: int = 60):
    return fit_anchors(
        sizes, anchors=anchors, strides=(8, 16), threshold=4.0, image_size=640, seed=seed, generations=generations
    )


def test_metrics_of_boxes_known_by_hand() -> None:
    anchors = np.array([[[10.0, 10.0], [40.0, 40.0]]])
    sizes = np.array([[10.0, 10.0], [20.0, 20.0], [1.0, 10.0]])
    metrics = check_anchors(sizes, anchors, threshold=4.0)
    # Agreements: (1, 1/4), (1/2, 1/2), (1/10, 1/40); a match is strictly above 1/4.
    assert metrics.bpr == pytest.approx(2 / 3)
    assert metrics.aat == pytest.approx(1.0)
    assert metrics.fitness == pytest.approx(1.5 / 3)


def test_anchors_that_fit_are_kept_without_a_search() -> None:
    result = _fit(ANCHORS.reshape(-1, 2).repeat(5, axis=0))
    assert not result.changed
    assert result.after == result.before
    assert np.array_equal(result.anchors, ANCHORS)


def test_anchors_that_do_not_fit_are_replaced_by_better_ones() -> None:
    result = _fit(_sizes(scale=600) + 300)
    assert result.changed
    assert result.after.bpr > result.before.bpr
    assert result.anchors.shape == ANCHORS.shape
    areas = result.anchors.prod(axis=2).ravel()
    assert (np.diff(areas) >= 0).all()


def test_metrics_in_portions_equal_those_of_all_boxes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = _sizes(50)
    whole = check_anchors(sizes, ANCHORS, threshold=4.0)
    monkeypatch.setattr(anchors_module, "BOXES_AT_ONCE", 7)
    portions = check_anchors(sizes, ANCHORS, threshold=4.0)
    assert (portions.bpr, portions.aat) == (whole.bpr, whole.aat)
    assert portions.fitness == pytest.approx(whole.fitness, rel=1e-12)


def test_a_search_over_many_boxes_looks_at_a_sample_and_is_judged_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = _sizes(300_000, scale=600) + 300
    agreement, cluster = anchors_module._agreement, anchors_module.cluster_anchors
    compared, clustered = [], []

    def spy_on_agreement(label_sizes: np.ndarray, anchors: np.ndarray) -> np.ndarray:
        compared.append(len(label_sizes))
        return agreement(label_sizes, anchors)

    def spy_on_clusters(label_sizes: np.ndarray, **options: object) -> np.ndarray:
        clustered.append(label_sizes)
        return cluster(label_sizes, **options)

    monkeypatch.setattr(anchors_module, "KMEANS_RESTARTS", 1)
    monkeypatch.setattr(anchors_module, "_agreement", spy_on_agreement)
    monkeypatch.setattr(anchors_module, "cluster_anchors", spy_on_clusters)
    result = _fit(sizes, generations=4)
    # Six portions before and after, and a sample for the clusters and each generation.
    assert compared == [50_000] * (6 + 1 + 4 + 6)
    (sample,) = clustered
    assert len(np.unique(sample, axis=0)) == 50_000
    assert np.isin(sample[:, 0], sizes[:, 0]).all()
    assert result.changed
    assert result.after == check_anchors(sizes, result.anchors, threshold=4.0)
    assert np.array_equal(_fit(sizes, generations=4).anchors, result.anchors)


def test_the_same_seed_gives_the_same_anchors_and_another_seed_others() -> None:
    sizes = _sizes(scale=600) + 300
    assert np.array_equal(_fit(sizes, seed=3).anchors, _fit(sizes, seed=3).anchors)
    assert not np.array_equal(_fit(sizes, seed=3).anchors, _fit(sizes, seed=4).anchors)


def test_the_search_draws_nothing_from_the_global_generators() -> None:
    np.random.seed(0)
    torch.manual_seed(0)
    expected = np.random.random(), torch.rand(1).item()
    np.random.seed(0)
    torch.manual_seed(0)
    _fit(_sizes(scale=600) + 300)
    assert (np.random.random(), torch.rand(1).item()) == expected


def test_anchors_are_kept_if_the_search_finds_none_that_more_boxes_match() -> None:
    # Boxes are so different that six anchors reach few; the given ones already sit on the best six.
    sizes = np.array([[4.0**k, 4.0**-k * 1e4] for k in range(2, 6) for _ in range(1)] * 3)
    anchors = np.concatenate([sizes[:3], sizes[:3]]).reshape(2, 3, 2)
    result = _fit(sizes, anchors=anchors, generations=5)
    assert result.after.bpr >= result.before.bpr
    assert result.changed == (result.after.bpr > result.before.bpr)


def test_placeholders_are_always_replaced() -> None:
    result = _fit(_sizes(), anchors=PLACEHOLDERS)
    assert result.changed
    assert (result.anchors >= 2).all()


def test_fewer_boxes_than_anchors_still_give_that_many_anchors() -> None:
    result = _fit(np.array([[50.0, 40.0], [100.0, 90.0]]), anchors=PLACEHOLDERS)
    assert result.anchors.shape == PLACEHOLDERS.shape
    assert (result.anchors > 0).all()


@pytest.mark.parametrize("sizes", [np.ones((30, 2)), np.full((30, 2), 50.0), np.full((30, 2), 0.5)])
def test_boxes_of_one_size_give_finite_anchors(sizes: np.ndarray) -> None:
    result = _fit(sizes, anchors=PLACEHOLDERS)
    assert np.isfinite(result.anchors).all()


def test_no_boxes_change_nothing() -> None:
    result = _fit(np.empty((0, 2)))
    assert not result.changed
    assert result.before.bpr == 0


def test_clusters_are_sorted_by_area() -> None:
    centres = cluster_anchors(_sizes(), num_anchors=9, image_size=640, rng=np.random.default_rng(0))
    assert centres.shape == (9, 2)
    assert (np.diff(centres.prod(axis=1)) >= 0).all()


def test_levels_are_reversed_if_they_run_against_the_strides() -> None:
    assert np.array_equal(order_levels(ANCHORS, (8, 16)), ANCHORS)
    assert np.array_equal(order_levels(ANCHORS, (16, 8)), ANCHORS[::-1])
    assert np.array_equal(order_levels(PLACEHOLDERS, (16, 8)), PLACEHOLDERS)


def test_label_sizes_follow_the_longer_side_of_their_image() -> None:
    sizes = np.array([[10.0, 20.0], [10.0, 20.0]])
    images = np.array([[320, 160], [200, 400]])
    scaled = scale_label_sizes(sizes, images, np.array([0, 1]), image_size=640)
    assert scaled.tolist() == [[20.0, 40.0], [16.0, 32.0]]
    varied = scale_label_sizes(sizes, images, np.array([0, 1]), image_size=640, seed=0)
    ratio = varied / scaled
    assert (ratio >= 0.9).all() and (ratio <= 1.1).all()
    assert ratio[0, 0] == pytest.approx(ratio[0, 1])
    assert ratio[0, 0] != pytest.approx(ratio[1, 0])


def test_applied_anchors_are_in_cells_and_in_the_config() -> None:
    model = DetectionModel("yolov5-p34", num_classes=2)
    assert model.has_placeholder_anchors
    apply_anchors(model, ANCHORS[::-1])
    assert not model.has_placeholder_anchors
    torch.testing.assert_close(model.head.anchors * model.strides.view(-1, 1, 1), torch.tensor(ANCHORS).float())
    assert model.config["anchors"] == [[10, 13, 16, 30, 33, 23], [30, 61, 62, 45, 59, 119]]
    rebuilt = DetectionModel(model.config)
    assert torch.equal(rebuilt.head.anchors, model.head.anchors)


@pytest.mark.parametrize("anchors", [PLACEHOLDERS, ANCHORS[:1], ANCHORS * np.nan])
def test_unsuitable_anchors_are_refused(anchors: np.ndarray) -> None:
    with pytest.raises(WeightsError, match="do not suit"):
        apply_anchors(DetectionModel("yolov5-p34", num_classes=2), anchors)


def test_placeholders_are_refused_by_name() -> None:
    model = DetectionModel("yolov5-p34", num_classes=2)
    with pytest.raises(WeightsError, match="only their number"):
        refuse_placeholder_anchors(model)
    apply_anchors(model, ANCHORS)
    refuse_placeholder_anchors(model)
