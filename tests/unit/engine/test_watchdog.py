"""Who is named when nothing goes on, and what must not end a job; threads and a store of this process, no launcher."""

import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from accel_yolo.engine import watchdog
from accel_yolo.engine.distributed import second_store_connection
from accel_yolo.engine.watchdog import Watchdog

LIMIT = 0.6


class Ended:
    """Takes the place of the process's end."""

    def __init__(self):
        self.event = threading.Event()

    def __call__(self):
        self.event.set()

    def within(self, seconds):
        return self.event.wait(seconds)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(watchdog, "SECONDS_FOR_THE_OTHERS", 0.3)


@pytest.fixture
def pair():
    """`pair(limit=..., ...)`: two watchdogs on one store, started, with what ends them."""
    made = []

    def make(limit=LIMIT, **settings):
        store = dist.HashStore()
        for rank in (0, 1):
            dog = Watchdog(limit, rank=rank, world_size=2, store=store, end=Ended(), **settings)
            made.append(dog.start())
        return made

    yield make
    for dog in made:
        dog.stop()


def keep_alive(dogs, seconds, *, phase="training"):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for dog in dogs:
            dog.progress(phase)
        time.sleep(0.02)


def wait_until(holds, seconds=5.0):
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_process_that_gets_on_is_left_alone(pair, capsys):
    first, second = pair()
    for step in range(60):
        first.progress("training", step)
        second.progress("training", step)
        time.sleep(0.02)
    assert not first._end_process.within(0) and not second._end_process.within(0)
    assert capsys.readouterr().err == ""


def test_without_progress_one_report_names_every_rank_and_each_says_where_it_stands(pair, capsys):
    first, second = pair()
    first.progress("training", 7)
    second.progress("validation", 3)
    assert first._end_process.within(5) and second._end_process.within(5)
    said = capsys.readouterr().err
    assert said.count("Ending the job") == 1
    report = said.partition("accel_yolo watchdog, rank 0")[2]
    assert "rank 0 (pid" in report and "training, step 7" in report
    assert "rank 1 (pid" in report and "validation, step 3" in report
    assert "Where rank 0 on" in said and "Where rank 1 on" in said
    assert "test_without_progress_one_report" in said, "the stack of the thread that started it"


def test_a_warning_comes_before_the_end(pair, capsys):
    first, second = pair(limit=1.5)
    keep_alive([second], 1.1)
    assert not first._end_process.within(0)
    assert capsys.readouterr().err.count("warning: no progress") == 1


def test_a_phase_without_bound_may_take_longer_than_the_limit(pair, capsys):
    first, second = pair()
    for dog in (first, second):
        dog.progress("indexing", unbounded=True)
    assert not first._end_process.within(3 * LIMIT)
    assert not second._end_process.within(0)
    assert capsys.readouterr().err == ""


def test_a_process_that_is_not_heard_of_any_more_is_named_with_its_host(pair, capsys):
    first, second = pair(silence_limit=0.5, limit=30)
    second.progress("training", 4)
    wait_until(lambda: 1 in first._heard and first._heard[1][0].step == 4)
    second.stop(is_clean=False)
    assert first._end_process.within(5)
    said = capsys.readouterr().err
    assert f"rank 1 (pid {second._pid} on {second._host}) has not been heard of" in said
    assert "last in training, step 4" in said


def test_a_lost_process_is_the_reason_also_if_this_one_waits_for_it(pair, capsys):
    first, second = pair(silence_limit=1.5, limit=1.5)
    wait_until(lambda: 1 in first._heard)
    keep_alive([first, second], 0.2)
    second.stop(is_clean=False)
    # Both clocks run out at about the same time.
    assert first._end_process.within(5)
    said = capsys.readouterr().err
    assert "rank 1 (pid" in said and "has not been heard of" in said
    assert "Ending the job" not in said


def test_a_process_that_has_finished_is_not_missed(pair, capsys):
    first, second = pair(silence_limit=0.5, limit=30)
    wait_until(lambda: 1 in first._heard)
    second.stop()
    assert not first._end_process.within(1.5)
    assert capsys.readouterr().err == ""


def test_a_process_that_was_never_heard_of_is_missed_after_the_limit(capsys):
    ended = Ended()
    dog = Watchdog(LIMIT, rank=0, world_size=2, store=dist.HashStore(), end=ended).start()
    keep_alive([dog], 2 * LIMIT)
    assert ended.within(5)
    dog.stop()
    assert "rank 1 has never been heard of" in capsys.readouterr().err


class HangingStore:
    """A store whose machine is cut off: every question waits for ever."""

    def set(self, key, value):
        time.sleep(60)


def test_a_store_that_does_not_answer_ends_the_process_and_is_named(capsys):
    ended = Ended()
    dog = Watchdog(
        30, rank=1, world_size=2, store=HangingStore(), address="node-a:29500", silence_limit=0.4, end=ended
    ).start()
    assert ended.within(5)
    said = capsys.readouterr().err
    assert "rank 1" in said and "the store at node-a:29500 has not answered" in said
    dog._threads = []


def test_a_process_alone_is_reported_once_and_left_alone(capsys):
    ended = Ended()
    dog = Watchdog(LIMIT, end=ended).start()
    assert not ended.within(3 * LIMIT)
    dog.stop()
    said = capsys.readouterr().err
    assert said.count("The process is left alone") == 1
    assert "test_a_process_alone_is_reported" in said


def test_zero_switches_it_off(capsys):
    before = threading.active_count()
    with Watchdog(0, rank=0, world_size=2, store=dist.HashStore()) as dog:
        assert threading.active_count() == before
        assert list(dog.watch([1, 2], "training")) == [1, 2]


def test_a_pause_of_the_whole_process_counts_for_nobody(pair):
    first, _ = pair(limit=100)
    wait_until(lambda: 1 in first._heard)
    ages = first.beat().age, first._heard[1][1], first._contact
    first._forgive(50.0)
    assert first.beat().age < ages[0]
    assert first._heard[1][1] == ages[1] + 50
    assert first._contact >= ages[2] + 50


@pytest.mark.parametrize(
    ("code", "fate"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by signal 9, most likely because the mach"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "ended by signal 15"),
        ("raise SystemExit(7)", "ended with exit code 7"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_became_of_a_process_of_this_machine_is_told(code, fate):
    process = subprocess.Popen([sys.executable, "-c", code])
    beat = watchdog.Beat(rank=1, host="here", pid=process.pid, memory=2_000_000_000)
    until = time.monotonic() + 10
    # Not waited for, so that it stays a zombie, as below a launcher.
    while not (told := watchdog._fate(beat)) and time.monotonic() < until:
        time.sleep(0.02)
    process.wait()
    assert fate in told
    assert watchdog._fate(beat) == "its process is no more"


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_only_a_tcp_store_is_shared_and_its_connection_is_not_held_up_by_another(tmp_path, kind):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True) if kind == "tcp" else dist.FileStore(str(tmp_path / "store"))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        connection, address = second_store_connection(5.0)
        if kind == "file":
            assert connection is None
            return
        assert address == f"127.0.0.1:{store.port}"
        main = dist.distributed_c10d._get_default_store()
        waiting = threading.Thread(target=lambda: main.wait(["later"]), daemon=True)
        waiting.start()
        time.sleep(0.1)
        started = time.perf_counter()
        connection.set("beat", "1")
        assert connection.get("beat") == b"1"
        assert time.perf_counter() - started < 1
        connection.set("later", "1")
        waiting.join(timeout=5)
        assert not waiting.is_alive(), "both see the same store"
    finally:
        dist.destroy_process_group()


def test_progress_costs_next_to_nothing():
    dog = Watchdog(600)
    started = time.perf_counter()
    for step in range(10_000):
        dog.progress("training", step)
    assert time.perf_counter() - started < 0.5
