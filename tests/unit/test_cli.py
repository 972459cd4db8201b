"""The door: verbs, exit codes, who prints what."""

import subprocess
import sys
import types
from pathlib import Path

import pytest

from accel_yolo import cli
from accel_yolo.errors import DataError

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def single_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def calls(monkeypatch):
    """What reached the commands; `calls.outcome` is what they return or raise."""
    seen = types.SimpleNamespace(train=[], val=[], outcome=0)

    def command(record):
        def run(settings):
            record.append(settings)
            if isinstance(seen.outcome, BaseException):
                raise seen.outcome
            return seen.outcome

        return types.SimpleNamespace(main=run)

    monkeypatch.setitem(sys.modules, "accel_yolo.commands.train", command(seen.train))
    monkeypatch.setitem(sys.modules, "accel_yolo.commands.val", command(seen.val))
    return seen


def test_train_hands_over_the_resolved_settings(calls):
    assert cli.main(["train", "--data", "my.yaml", "--img", "320"]) == 0
    assert calls.train[0].config.data.image_size == 320
    assert calls.train[0].origins["data.image_size"] == "--imgsz"


def test_val_hands_over_its_settings(calls):
    assert cli.main(["val", "--weights", "best.safetensors"]) == 0
    assert calls.val[0].weights == "best.safetensors"


def test_the_code_of_the_command_is_the_exit_code(calls):
    calls.outcome = 75
    assert cli.main(["train"]) == 75


def test_an_error_of_the_user_is_three_lines_and_code_2(calls, capsys):
    calls.outcome = DataError("bad row.", found="line 4", fix="correct it.")
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err.splitlines() == ["DataError: bad row.", "  found: line 4", "  fix:   correct it."]


def test_other_ranks_wait_for_the_main_process_and_exit_2_in_silence(calls, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    calls.outcome = DataError("bad row.", found="line 4", fix="correct it.")
    assert cli.main(["train"]) == 2
    assert capsys.readouterr() == ("", "")
    assert waits == [cli.SECONDS_FOR_THE_MAIN_PROCESS]


def test_an_error_of_another_rank_alone_reaches_torchs_launcher(calls, monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    calls.outcome = DataError("bad row.", found="line 4", fix="correct it.")
    assert cli.main(["train"]) == 2
    assert "bad row." in (tmp_path / "error.json").read_text()


def test_a_bug_passes_through(calls):
    calls.outcome = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        cli.main(["train"])


def test_the_keyboard_ends_with_130(calls):
    calls.outcome = KeyboardInterrupt()
    assert cli.main(["train"]) == 130


def test_under_torchs_launcher_codes_are_the_same_and_a_bug_is_recorded(calls, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    calls.outcome = DataError("bad row.", found="line 4", fix="correct it.")
    assert cli.main(["train"]) == 2
    assert not (tmp_path / "error.json").exists()
    calls.outcome = ZeroDivisionError("by zero")
    with pytest.raises(ZeroDivisionError):
        cli.main(["train"])
    assert "by zero" in (tmp_path / "error.json").read_text()


def test_an_unknown_verb_names_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    assert "did you mean train?" in capsys.readouterr().err


def test_an_unknown_flag_names_the_nearest(capsys):
    assert cli.main(["train", "--epoch", "3"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[1:] == ["  found: --epoch", "  fix:   did you mean --epochs?"]


def test_print_config_prints_and_does_not_train(calls, capsys):
    assert cli.main(["train", "--epochs", "7", "--print-config"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("epochs:"))
    assert line.split() == ["epochs:", "7", "#", "--epochs"]
    assert calls.train == []


def test_more_processes_than_the_launcher_started_are_an_error(calls, capsys, monkeypatch):
    assert cli.main(["train", "--num-processes", "2"]) == 2
    assert "--num-processes 2, but 1 started" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", "--num-processes", "2"]) == 0


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["train", "--help"], ["val", "--help"]])
def test_help_and_version_answer_without_torch(words):
    code = (
        "import sys\nfrom accel_yolo.cli import main\n"
        f"try:\n    code = main({words!r})\nexcept SystemExit as stop:\n    code = stop.code or 0\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert "accel-yolo" in done.stdout


def test_the_three_ways_to_start_are_one_program(tmp_path):
    starts = [["-m", "accel_yolo", "train"], [str(REPOSITORY / "train.py")]]
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": ""}
    outputs = [
        subprocess.run(
            [sys.executable, *start, "--data", "x.yaml", "--img", "320", "--print-config"],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
            env=environment,
        ).stdout
        for start in starts
    ]
    assert outputs[0] == outputs[1]
    assert "image_size: 320" in outputs[0]


def test_options_edited_after_parsing_reach_the_command(calls):
    from accel_yolo.config.load import parse_train_args

    options = parse_train_args(["--data", "my.yaml"])
    options.batch_size, options.sync_bn, options.device = 64, True, "0"
    assert cli.train_options(options) == 0
    config = calls.train[0].config
    assert (config.data.batch_size, config.model.sync_bn, config.run.device) == (64, True, "0")
