"""The errors that users read."""

import pickle

import pytest

from accel_yolo.errors import (
    AccelYoloError,
    CheckpointError,
    ConfigError,
    DataError,
    LaunchError,
    did_you_mean,
    error_fields,
    rebuilt_error,
)


def test_an_error_prints_its_kind_what_was_found_and_the_fix_on_three_lines():
    lines = str(ConfigError("wrong.", found="7", fix="write 8.")).splitlines()
    assert lines == ["ConfigError: wrong.", "  found: 7", "  fix:   write 8."]


def test_an_error_cannot_be_made_without_a_fix():
    with pytest.raises(TypeError):
        DataError("wrong.", found="7")


def test_a_private_subclass_prints_the_public_name():
    class _Detail(LaunchError):
        pass

    assert str(_Detail("wrong.", found="7", fix="8.")).startswith("LaunchError: wrong.")


def test_an_error_survives_the_way_between_processes():
    error = CheckpointError("wrong.", found="7", fix="write 8.")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is CheckpointError
    assert str(copy) == str(error)
    assert isinstance(copy, AccelYoloError)


def test_a_near_word_is_suggested():
    assert did_you_mean("epoch", ["epochs", "seed"]) == "did you mean epochs?"


def test_without_a_near_word_all_known_ones_are_listed():
    assert did_you_mean("zzz", ["epochs", "seed"]) == "known are: epochs, seed"


def test_an_error_crosses_to_another_process_as_what_it_was():
    error = DataError("a.", found="b", fix="c")
    assert type(rebuilt_error(error_fields(error))) is DataError
    assert str(rebuilt_error(error_fields(error))) == str(error)
    assert type(rebuilt_error({**error_fields(error), "kind": "Unknown"})) is AccelYoloError
