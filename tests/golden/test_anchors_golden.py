"""The anchor check and the search for anchors against the golden vectors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from accel_yolo.model.anchors import check_anchors, fit_anchors

SETS = json.loads((Path(__file__).parent / "anchors.json").read_text())
DEFAULT = np.array(
    [
        [[10, 13], [16, 30], [33, 23]],
        [[30, 61], [62, 45], [59, 119]],
        [[116, 90], [156, 198], [373, 326]],
    ],
    dtype=float,
)
Record = Callable[[str, str, float, str], None]


@pytest.mark.parametrize("name", list(SETS))
def test_metrics_of_the_default_anchors_are_the_reference_s(name: str, record_deviation: Record) -> None:
    sizes = np.array(SETS[name]["wh_pixels"])
    for threshold, expected in SETS[name]["default_p5"].items():
        metrics = check_anchors(sizes, DEFAULT, threshold=float(threshold))
        for key in ("bpr", "aat", "fitness"):
            deviation = abs(getattr(metrics, key) - expected[key])
            record_deviation("anchors.json", f"{key} of the default anchors", deviation, "1e-5")
            assert deviation < 1e-5


@pytest.mark.parametrize("name", list(SETS))
def test_metrics_of_evolved_anchors_are_the_reference_s(name: str, record_deviation: Record) -> None:
    sizes = np.array(SETS[name]["wh_pixels"])
    for run in SETS[name]["evolved_runs"]:
        metrics = check_anchors(sizes, np.array(run["anchors"]), threshold=4.0)
        for key in ("bpr", "aat", "fitness"):
            deviation = abs(getattr(metrics, key) - run[key])
            record_deviation("anchors.json", f"{key} of the evolved anchors", deviation, "1e-5")
            assert deviation < 1e-5


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", list(SETS))
def test_search_reaches_what_the_reference_reaches(name: str, seed: int, record_deviation: Record) -> None:
    expected = SETS[name]
    # Placeholders, so that the result of the search is used whatever the default anchors are worth.
    placeholders = np.stack([np.arange(6, dtype=float).reshape(3, 2)] * 3)
    result = fit_anchors(
        np.array(expected["wh_pixels"]),
        anchors=placeholders,
        strides=(8, 16, 32),
        threshold=4.0,
        image_size=expected["imgsz"],
        seed=seed,
    )
    fitness_short = expected["evolved_fitness_range"][0] - result.after.fitness
    bpr_short = expected["evolved_bpr_range"][0] - result.after.bpr
    record_deviation("anchors.json", "search: fitness below the lowest run", max(fitness_short, 0), "0.01")
    record_deviation("anchors.json", "search: BPR below the lowest run", max(bpr_short, 0), "0.01")
    assert fitness_short <= 0.01
    assert bpr_short <= 0.01


def test_default_anchors_are_replaced_where_the_reference_replaces_them() -> None:
    small = SETS["small"]
    result = fit_anchors(
        np.array(small["wh_pixels"]),
        anchors=DEFAULT,
        strides=(8, 16, 32),
        threshold=4.0,
        image_size=640,
        seed=0,
        generations=100,
    )
    assert small["check_replaced"]
    assert result.changed
    assert result.before.bpr == pytest.approx(0.798, abs=5e-4)
