"""What the launch asked for against what can be had: devices, batch sizes, precisions, plugins."""

import logging
import pickle

import pytest
import torch

from accel_yolo.engine import distributed
from accel_yolo.engine.distributed import (
    DeviceRequest,
    PendingSum,
    World,
    check_batch_size,
    configure_logging,
    launched_processes,
    local_main_first,
    make_accelerator,
    on_main_process,
    parse_device,
    select_device,
)
from accel_yolo.errors import ConfigError, DataError, LaunchError

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*LAUNCHER, "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


def _cuda(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def _ranks(monkeypatch, rank, world):
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", world)):
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("", DeviceRequest("auto")),
        (None, DeviceRequest("auto")),
        ("cpu", DeviceRequest("cpu")),
        ("CPU", DeviceRequest("cpu")),
        ("mps", DeviceRequest("mps")),
        (2, DeviceRequest("cuda", (2,))),
        ("0", DeviceRequest("cuda", (0,))),
        ("cuda:1", DeviceRequest("cuda", (1,))),
        ("0,1", DeviceRequest("cuda", (0, 1))),
        ([0, 1], DeviceRequest("cuda", (0, 1))),
        (" 2 , 3 ", DeviceRequest("cuda", (2, 3))),
        ("10,11", DeviceRequest("cuda", (10, 11))),
    ],
)
def test_devices_are_read_in_every_spelling(text, request_):
    assert parse_device(text) == request_


@pytest.mark.parametrize("text", ["0;1", "gpu", "0\uff0c1", "-1", "0,,1", "1.5"])
def test_other_device_texts_are_refused(text):
    with pytest.raises(ConfigError, match="--device"):
        parse_device(text)


def test_a_device_named_twice_is_refused():
    with pytest.raises(ConfigError, match="twice"):
        parse_device("0,1,0")


@pytest.mark.parametrize(("batch", "world", "sizes"), [(63, 4, "60 or 64"), (2, 4, "4"), (17, 2, "16 or 18")])
def test_a_batch_that_cannot_be_shared_names_the_nearest_sizes(batch, world, sizes):
    with pytest.raises(ConfigError, match="--batch-size must be multiple of") as caught:
        check_batch_size(batch, world)
    assert caught.value.fix.endswith(f"--batch-size {sizes}")


def test_a_measured_batch_size_needs_one_process():
    check_batch_size(-1, 1)
    check_batch_size(64, 4)
    with pytest.raises(ConfigError, match="one process") as caught:
        check_batch_size(-1, 2)
    assert "times 2" in caught.value.fix


def test_without_cuda_the_cpu_is_taken_and_named_ids_are_refused(monkeypatch):
    _cuda(monkeypatch, 0)
    assert select_device("") == torch.device("cpu")
    assert select_device("cpu") == torch.device("cpu")
    with pytest.raises(LaunchError, match="insufficient CUDA devices"):
        select_device("0")


def test_more_processes_than_cuda_devices_are_refused(monkeypatch):
    _cuda(monkeypatch, 2)
    _ranks(monkeypatch, 0, 4)
    with pytest.raises(LaunchError, match="insufficient CUDA devices") as caught:
        select_device("")
    assert "2 CUDA device(s); 4 process(es)" in caught.value.found


def test_each_process_takes_the_device_of_its_local_rank(monkeypatch):
    _cuda(monkeypatch, 4)
    _ranks(monkeypatch, 3, 4)
    assert select_device("") == torch.device("cuda", 3)
    assert select_device("0,1,2,3") == torch.device("cuda", 3)
    assert select_device("3") == torch.device("cuda", 3)
    assert select_device("", batch_size=64) == torch.device("cuda", 3)
    with pytest.raises(ConfigError, match="must be multiple of"):
        select_device("", batch_size=63)


def test_ids_that_do_not_fit_the_processes_are_never_ignored(monkeypatch):
    _cuda(monkeypatch, 4)
    with pytest.raises(ConfigError, match="another number of devices") as caught:
        select_device("0,1")
    assert "2 ids, 1 process" in caught.value.found
    _ranks(monkeypatch, 1, 2)
    with pytest.raises(ConfigError, match="not this process's"):
        select_device("0")
    with pytest.raises(ConfigError, match="other devices"):
        select_device("2,3")


def test_a_single_process_may_take_any_device(monkeypatch):
    _cuda(monkeypatch, 4)
    assert select_device("2") == torch.device("cuda", 2)


def test_accelerates_cpu_switch_wins_over_visible_cuda(monkeypatch):
    _cuda(monkeypatch, 2)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert select_device("") == torch.device("cpu")


def test_half_precision_without_cuda_is_refused_instead_of_silently_ignored(monkeypatch):
    _cuda(monkeypatch, 0)
    with pytest.raises(ConfigError, match="fp16 needs a CUDA device"):
        make_accelerator(mixed_precision="fp16")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ConfigError, match="fp16") as caught:
        make_accelerator()
    assert "accelerate config" in caught.value.found
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ConfigError, match="not supported"):
        make_accelerator()


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"])
def test_unsupported_plugins_are_refused_by_name(monkeypatch, name):
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(LaunchError, match="does not support") as caught:
        make_accelerator()
    assert f"ACCELERATE_USE_{name}" in caught.value.found


def test_compilation_is_refused_and_its_off_switch_is_not(monkeypatch):
    _cuda(monkeypatch, 0)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    make_accelerator()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    with pytest.raises(LaunchError, match=r"torch\.compile"):
        make_accelerator()


def test_cuda_without_nccl_talks_through_gloo(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert distributed._backend(torch.device("cuda")) == {"backend": "gloo"}
    assert distributed._backend(torch.device("cpu")) == {}
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert distributed._backend(torch.device("cuda")) == {}


def test_a_resumed_batch_asks_for_another_number_of_processes():
    with pytest.raises(ConfigError, match="must be multiple of") as caught:
        check_batch_size(16, 3, is_resumed=True)
    assert "divides 16" in caught.value.fix


def test_accumulation_from_the_environment_does_not_divide_our_gradients(monkeypatch):
    _cuda(monkeypatch, 0)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    accelerator, world = make_accelerator()
    assert accelerator.gradient_accumulation_steps == 1
    assert (world.backend, world.launcher, accelerator.num_processes) == ("none", "plain python", 1)


def test_a_second_run_in_one_process_may_have_another_precision(monkeypatch):
    _cuda(monkeypatch, 0)
    assert make_accelerator(mixed_precision="bf16")[0].mixed_precision == "bf16"
    assert make_accelerator(mixed_precision="no")[0].mixed_precision == "no"


def test_the_timeout_is_passed_on_even_where_it_equals_accelerates_default():
    default = distributed.InitProcessGroupKwargs().timeout
    kwargs = distributed.InitProcessGroupKwargs(timeout=distributed._passed_timeout(default.total_seconds()))
    assert "timeout" in kwargs.to_kwargs()


def test_alone_every_exchange_is_the_value_itself():
    accelerator, _ = make_accelerator(device="cpu")
    world = World("test", "none", True, None, 1.0, "default")
    assert torch.equal(PendingSum(torch.ones(3), world, device=accelerator.device).result(), torch.ones(3))
    assert on_main_process(accelerator, lambda: 7) == 7
    assert local_main_first(accelerator, lambda: 8, name="x") == 8
    with pytest.raises(DataError, match="bad"):
        on_main_process(accelerator, lambda: (_ for _ in ()).throw(DataError("bad.", found="a", fix="b")))


def test_ranks_come_from_the_environment(monkeypatch):
    assert launched_processes() == (0, 0, 1, 1)
    _ranks(monkeypatch, 1, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert launched_processes() == (1, 0, 2, 1)


def test_only_the_main_process_speaks(capsys):
    logger = logging.getLogger("accel_yolo")
    before = logger.handlers[:], logger.propagate, logging.getLogger().handlers[:], logger.level
    logger.handlers.clear()
    logging.getLogger().handlers.clear()
    try:
        configure_logging(True)
        logging.getLogger("accel_yolo.engine").info("heard")
        configure_logging(False)
        logging.getLogger("accel_yolo.engine").warning("silent")
        assert capsys.readouterr().out == "heard\n"
    finally:
        logger.handlers[:], logger.propagate, logging.getLogger().handlers[:], logger.level = before


def test_errors_survive_the_way_to_another_process():
    class Local(Exception):
        pass

    error = DataError("a.", found="b", fix="c")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert distributed._sendable(error) is error
    assert "Local: x" in str(distributed._sendable(Local("x")))
