"""Fixtures that every kind of test shares, and the table of golden deviations at the end of a run."""

import json
import os
from pathlib import Path

import pytest

Row = tuple[str, str, float, str]

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def test_data_dir() -> Path:
    """The folder of real data sets, or a skip that says how to name one."""
    folder = Path(os.environ.get("ACCEL_YOLO_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("no real data sets here: set ACCEL_YOLO_TEST_DATA to a folder that holds them")
    return folder


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """The folder of numeric fixtures."""
    return REPOSITORY / "tests" / "golden"


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
