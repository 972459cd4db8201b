"""How far our numbers are from the golden vectors: tests record it here, `tests/conftest.py` shows the table."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def record_deviation(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str, float, str], None]]:
    """`record_deviation(fixture, quantity, deviation, tolerance)`: keeps the largest deviation of each quantity."""
    largest: dict[tuple[str, str], tuple[float, str]] = {}

    def record(fixture: str, quantity: str, deviation: float, tolerance: str) -> None:
        known, _ = largest.get((fixture, quantity), (-1.0, ""))
        # `not <=` so that a NaN is shown and stays.
        if not float(deviation) <= known:
            largest[fixture, quantity] = (float(deviation), tolerance)

    yield record
    rows = [[fixture, quantity, *rest] for (fixture, quantity), rest in sorted(largest.items())]
    folder = _report_folder(request.config)
    folder.mkdir(parents=True, exist_ok=True)
    name = os.environ.get("PYTEST_XDIST_WORKER", "main")
    (folder / f"{name}.json").write_text(json.dumps(rows, indent=1))


def _report_folder(config: pytest.Config) -> Path:
    return config.rootpath / ".pytest_cache" / "golden_report"
