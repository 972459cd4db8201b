"""Fixtures that every kind of test shares."""

import os
from pathlib import Path

import pytest

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
