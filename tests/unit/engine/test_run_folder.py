"""Names of run folders and the rows of results.csv."""

import pytest

from accel_yolo.engine.run_folder import COLUMNS, append_result, check_writable, create_run_folder, read_results
from accel_yolo.errors import CheckpointError


def test_a_taken_name_gets_the_first_free_number(tmp_path):
    names = [create_run_folder(tmp_path, "exp", exist_ok=False).name for _ in range(3)]
    assert names == ["exp", "exp2", "exp3"]
    assert create_run_folder(tmp_path, "exp", exist_ok=True) == tmp_path / "exp"
    assert (tmp_path / "exp2" / "weights").is_dir()


def test_results_have_the_references_columns_first_and_empty_cells_without_validation(tmp_path):
    path = tmp_path / "results.csv"
    append_result(path, {"epoch": 0, "train/box_loss": 0.123456789})
    header, row = path.read_text().splitlines()
    assert [name.strip() for name in header.split(",")] == list(COLUMNS)
    assert header.split(",")[4] == "   metrics/precision"
    assert all(len(cell) == 20 for cell in row.split(","))
    assert row.split(",")[1].strip() == "0.12346"
    assert read_results(path) == [{"epoch": 0.0, "train/box_loss": 0.12346}]


def test_an_epoch_that_is_run_again_replaces_its_row_and_later_ones(tmp_path):
    path = tmp_path / "results.csv"
    for epoch in range(4):
        append_result(path, {"epoch": epoch, "x/lr0": 1.0})
    append_result(path, {"epoch": 2, "x/lr0": 2.0})
    assert [(row["epoch"], row["x/lr0"]) for row in read_results(path)] == [(0, 1), (1, 1), (2, 2)]


def test_not_a_number_is_an_empty_cell(tmp_path):
    append_result(tmp_path / "results.csv", {"epoch": 0, "metrics/recall": float("nan")})
    assert read_results(tmp_path / "results.csv") == [{"epoch": 0.0}]


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(CheckpointError) as caught:
        check_writable(tmp_path / "runs" / "train")
    assert str(tmp_path / "runs") in caught.value.found
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
