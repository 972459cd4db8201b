"""How far our numbers are from the golden vectors: tests record it, and the end of the run shows the table."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Row = tuple[str, str, float, str]


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


def pytest_configure(config: pytest.Config) -> None:
    # Rows of an earlier run, perhaps with other workers, must not appear in this one's table.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        for path in _report_folder(config).glob("*.json"):
            path.unlink(missing_ok=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = _merged_rows(_report_folder(config))
    if not rows:
        return
    terminalreporter.section("distance from the golden vectors")
    lines = [("fixture file", "quantity", "largest deviation", "tolerance")]
    lines += [(fixture, quantity, f"{deviation:.3g}", tolerance) for fixture, quantity, deviation, tolerance in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        terminalreporter.write_line(" | ".join(cells).rstrip())


def _report_folder(config: pytest.Config) -> Path:
    return config.rootpath / ".pytest_cache" / "golden_report"


def _merged_rows(folder: Path) -> list[Row]:
    largest: dict[tuple[str, str], tuple[float, str]] = {}
    for path in sorted(folder.glob("*.json")):
        for fixture, quantity, deviation, tolerance in json.loads(path.read_text()):
            known, _ = largest.get((fixture, quantity), (-1.0, ""))
            if not deviation <= known:
                largest[fixture, quantity] = (deviation, tolerance)
    return [(fixture, quantity, *rest) for (fixture, quantity), rest in sorted(largest.items())]
