"""The start-up block says who set what; and errors and results of started processes come back."""

from types import SimpleNamespace

import pytest
import torch

from accel_yolo.config.load import config_from_kwargs
from accel_yolo.engine import launch
from accel_yolo.engine.distributed import World
from accel_yolo.engine.launch import describe_plan, start_processes
from accel_yolo.engine.optim import Schedule
from accel_yolo.errors import DataError, LaunchError, error_fields


def _plan(monkeypatch, *, processes=1, **options):
    resolved = config_from_kwargs(data="d.yaml", **options)
    accelerator = SimpleNamespace(num_processes=processes, mixed_precision="no", device=torch.device("cpu"))
    world = World("plain python", "none", True, None, 1800.0, "default")
    monkeypatch.setattr(launch, "gather_payloads", lambda _, name: [name] * processes)
    if processes > 1:
        world = World("torchrun", "gloo", True, None, 1800.0, "default")
    schedule = Schedule(resolved.config.optim, 100, 10, resolved.config.data.batch_size)
    return "\n".join(
        describe_plan(resolved.config, resolved.origins, accelerator=accelerator, world=world, schedule=schedule)
    )


def test_one_process_is_described_with_the_origin_of_each_value(monkeypatch):
    plan = _plan(monkeypatch, batch_size=32)
    for part in (f"torch {torch.__version__}", "1 process by", "32 images over all processes (batch_size=)",
                 "32 per process, 2 step(s) per update", "precision  no (default)", "rank 0: cpu"):  # fmt: skip
        assert part in plan
    assert "hint" not in plan


def test_few_images_per_process_without_syncbn_get_a_hint(monkeypatch):
    plan = _plan(monkeypatch, processes=4, batch_size=16)
    assert "4 processes by torchrun, backend gloo, timeout 1800 s" in plan
    assert "BatchNorm  per process, merged for validation and saving (default)" in plan
    assert "hint       4 images per process" in plan
    assert "hint" not in _plan(monkeypatch, processes=4, batch_size=16, sync_bn=True)


def _module(tmp_path, monkeypatch, code):
    (tmp_path / "stand_in.py").write_text(code)
    return {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}


def test_settings_go_in_and_the_result_of_rank_zero_comes_out(tmp_path, monkeypatch):
    environment = _module(
        tmp_path, monkeypatch,
        "import json, os, pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "settings = json.loads((folder / 'settings.json').read_text())\n"
        "if os.environ['RANK'] == '0':\n"
        "    (folder / 'result.json').write_text(json.dumps({'world': os.environ['WORLD_SIZE'], **settings}))\n",
    )  # fmt: skip
    answer = start_processes("stand_in", {"a": 1}, num_processes=2, environment=environment)
    assert answer == {"world": "2", "a": 1}


def test_a_crash_is_told_and_a_users_error_is_raised(tmp_path, monkeypatch):
    environment = _module(tmp_path, monkeypatch, "raise SystemExit(3)\n")
    with pytest.raises(LaunchError, match="its traceback is above"):
        start_processes("stand_in", {}, num_processes=1, environment=environment)
    fields = error_fields(DataError("no images.", found="b", fix="c"))
    code = f"import json, pathlib, sys\n(pathlib.Path(sys.argv[1]) / 'error-1.json').write_text(json.dumps({fields}))\n"
    with pytest.raises(DataError, match="no images"):
        start_processes("stand_in", {}, num_processes=1, environment=_module(tmp_path, monkeypatch, code))
