"""Ends a job that does not get on: every process tells the others what it does, and watches them and itself.

Two daemon threads: one exchanges beats through a store connection of its own, one judges. A training thread that waits
in a collective, and a store that does not answer, stop neither. Nothing here is a collective.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import DistError

from accel_yolo.errors import AccelYoloError

T = TypeVar("T")

# A process that answers nothing for so long is taken for lost, if `limit` is not shorter.
SILENCE_LIMIT = 60.0
WARN_AFTER = 60.0
INTERVAL = 2.0
FINISHED = "finished"
# For the launcher, which ends the others as soon as one has left: they want to be read first.
SECONDS_FOR_THE_OTHERS = 5.0
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(frozen=True, slots=True)
class Beat:
    """What a process last said of itself.

    Args:
        phase: what it does: "set-up", "indexing", "training", "validation", "scoring", "saving", "finished".
        step: batches of the epoch, or of the validation, until now.
        age: seconds since its last progress, when this was said.
        unbounded: the phase may take as long as it needs.
        stalled: it has given up and is about to end.
        memory: resident, bytes; 0 where it cannot be told.
        count: beats until now.
    """

    rank: int
    host: str
    pid: int
    phase: str = "set-up"
    step: int = 0
    age: float = 0.0
    unbounded: bool = False
    stalled: bool = False
    memory: int = 0
    count: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


class Watchdog:
    """Watches this process's progress and, through `store`, the other processes' lives.

    Several processes: one that makes no progress for `limit` seconds, or whose peer is silent, prints a report and
    ends with code 1, so that the launcher ends the job. One process: it prints the report and is left alone, because
    it may be somebody's notebook.

    Args:
        limit: seconds without progress; 0 switches everything off.
        rank, world_size: of this process.
        store: a connection that no other thread uses; None = watch this process only.
        address: where the store is, for the message that it does not answer.
        silence_limit: seconds after which a process, or the store, that does not answer is lost; None = 60, or
            `limit` if that is shorter.
        end: ends the process; a test's own.
    """

    def __init__(
        self,
        limit: float,
        *,
        rank: int = 0,
        world_size: int = 1,
        store: Any = None,
        address: str = "",
        silence_limit: float | None = None,
        end: Callable[[], None] | None = None,
    ) -> None:
        self.limit, self.rank, self.world_size = limit, rank, world_size
        self.silence_limit = min(limit, SILENCE_LIMIT) if silence_limit is None else silence_limit
        self.interval = min(INTERVAL, self.silence_limit / 5)
        self._store, self._address, self._end_process = store, address, end or _exit
        self._host, self._pid, self._count = socket.gethostname(), os.getpid(), 0
        self._thread_id = threading.get_ident()
        self._state = ("set-up", 0, False, time.monotonic())
        self._watches_others = store is not None and world_size > 1
        self._stalled, self._is_clean = False, True
        self._is_over, self._has_news = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        # Others' last beats and when each was new; written by the exchanging thread only.
        self._heard: dict[int, tuple[Beat, float]] = {}
        self._contact = self._started = time.monotonic()

    def start(self) -> Watchdog:
        """Begin to watch the calling thread."""
        self._thread_id = threading.get_ident()
        self._contact = self._started = time.monotonic()
        self.progress("set-up")
        works = [self._judge, self._exchange] if self._watches_others else [self._judge]
        if self.limit > 0:
            self._threads = [threading.Thread(target=work, daemon=True, name="watchdog") for work in works]
        for thread in self._threads:
            thread.start()
        return self

    def __enter__(self) -> Watchdog:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, AccelYoloError):
            self._tell_failure(error)
        self.stop(is_clean=error is None)

    def stop(self, *, is_clean: bool = True) -> None:
        """Watch no more. Must come before the process group ends.

        Args:
            is_clean: also tell the others that this process is done, so that they do not miss it.
        """
        self._is_clean = is_clean
        self._is_over.set()
        self._has_news.set()
        for thread in self._threads:
            # A store that does not answer must not hold up the end.
            thread.join(timeout=2.0)
        self._threads = []

    def progress(self, phase: str, step: int = 0, *, unbounded: bool = False) -> None:
        """This process got on. Cheap, for every step.

        Args:
            unbounded: what follows may take as long as it needs; only silence counts until the next call.
        """
        is_new = phase != self._state[0]
        self._state = (phase, step, unbounded, time.monotonic())
        if is_new:
            self._has_news.set()

    def watch(self, batches: Iterable[T], phase: str) -> Iterator[T]:
        """`batches`, each of which counts as progress in `phase`."""
        self.progress(phase)
        for step, batch in enumerate(batches, start=1):
            self.progress(phase, step)
            yield batch

    def beat(self) -> Beat:
        """What this process would say of itself now."""
        phase, step, unbounded, since = self._state
        age = time.monotonic() - since
        identity = (self.rank, self._host, self._pid)
        return Beat(*identity, phase, step, age, unbounded, self._stalled, resident_bytes(), self._count)

    def _tell_failure(self, error: Exception) -> None:
        """Let the launcher show the error that ends this process; one that another process caused comes second."""
        if self._watches_others and _is_of_communication(error):
            # A process that has just died is not yet gone.
            until = time.monotonic() + 1.0
            while not (dead := any(_fate(beat) for beat in self._here())) and time.monotonic() < until:
                time.sleep(0.05)
            _say(self._table("the connection to another process failed", "The process that failed first says why."))
            if dead:
                time.sleep(SECONDS_FOR_THE_OTHERS)
        record_for_launcher(error)

    def _here(self) -> list[Beat]:
        """Last beats of the other processes of this machine."""
        return [beat for beat, _ in list(self._heard.values()) if beat.host == self._host]

    # ---- the exchanging thread

    def _exchange(self) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(RuntimeError):
                self._exchange_once(self.beat())
                self._contact = time.monotonic()
            self._has_news.wait(self.interval)
            self._has_news.clear()
        if not self._is_clean:
            return
        with contextlib.suppress(RuntimeError):
            _, step, _, since = self._state
            self._state = (FINISHED, step, False, since)
            self._publish(self.beat())

    def _exchange_once(self, own: Beat) -> None:
        self._publish(own)
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        # Asking for a key that is not there would block.
        known = [rank for rank in others if rank in self._heard or self._store.check([_key(rank)])]
        texts = self._store.multi_get([_key(rank) for rank in known]) if known else []
        now = time.monotonic()
        for rank, text in zip(known, texts, strict=True):
            beat = Beat(**json.loads(text))
            if rank not in self._heard or self._heard[rank][0].count != beat.count:
                self._heard[rank] = (beat, now)

    def _publish(self, own: Beat) -> None:
        self._count += 1
        self._store.set(_key(self.rank), json.dumps(asdict(own)))

    # ---- the judging thread

    def _judge(self) -> None:
        ticked, warned_of = time.monotonic(), 0.0
        while not self._is_over.wait(self.interval):
            now = time.monotonic()
            if now - ticked > 5 * self.interval:
                # This process was stopped for a while (Ctrl-Z, a sleeping laptop); nobody is to blame for that time.
                self._forgive(now - ticked)
            ticked = now
            progress_at = self._state[3]
            if (found := self._verdict(now)) is not None:
                if self.world_size > 1:
                    self._end(found)
                    return
                if warned_of != progress_at:
                    _say(found + self._stack())
                warned_of = progress_at
            elif self._deserves_warning(now) and warned_of != progress_at:
                warned_of = progress_at
                _say(self._table("warning: no progress", f"The job is ended after {self.limit:g} s (--watchdog)."))

    def _forgive(self, seconds: float) -> None:
        phase, step, unbounded, since = self._state
        self._state = (phase, step, unbounded, since + seconds)
        self._contact += seconds
        self._started += seconds
        self._heard = {rank: (beat, at + seconds) for rank, (beat, at) in list(self._heard.items())}

    def _verdict(self, now: float) -> str | None:
        """Why the job must end, or None."""
        _, _, unbounded, since = self._state
        others = list(self._heard.values())
        if any(beat.stalled for beat, _ in others):
            # Another one tells the story; this one adds where it stands itself.
            return ""
        if self._watches_others and not any(beat.phase == FINISHED for beat, _ in others):
            if self._store_is_lost(now):
                return self._store_message(now)
            if lost := self._silent(others):
                return self._silence_message(lost)
            if any(now - heard_at > 4 * self.interval for _, heard_at in others):
                # Who waits for one that is lost gets nowhere too. Soon it is known whether that is so.
                return None
        if now - since > self.limit and not unbounded:
            self._stalled = True
            self._has_news.set()
            # Who else has given up is known two beats later; the lowest of them speaks.
            self._is_over.wait(2 * self.interval if self._watches_others else 0)
            if any(beat.stalled and beat.rank < self.rank for beat, _ in list(self._heard.values())):
                return ""
            ending = "Ending the job." if self.world_size > 1 else "The process is left alone."
            return self._table(f"no progress for {now - since:.0f} s", f"{ending} The limit is --watchdog.")
        return None

    def _deserves_warning(self, now: float) -> bool:
        after = min(WARN_AFTER, self.limit / 2)
        if self._state[2] or now - self._state[3] < after or self.world_size == 1:
            return False
        lower = [beat for beat, _ in list(self._heard.values()) if beat.rank < self.rank]
        return not any(beat.age > after and not beat.unbounded for beat in lower)

    def _store_is_lost(self, now: float) -> bool:
        return now - self._contact > self.silence_limit

    def _silent(self, others: list[tuple[Beat, float]]) -> list[tuple[Beat | None, int, float]]:
        """The ranks that have not been heard of for too long, each with its last beat and the seconds since."""
        # Counted until the last contact with the store: without one nobody could be heard.
        lost: list[tuple[Beat | None, int, float]] = []
        for beat, heard_at in others:
            # One that is in a long call of another language may hold the interpreter and be well.
            allowed = max(self.silence_limit, self.limit) if beat.unbounded else self.silence_limit
            if self._contact - heard_at > allowed:
                lost.append((beat, beat.rank, self._contact - heard_at))
        if self._contact - self._started > max(self.limit, self.silence_limit):
            never = set(range(self.world_size)) - {beat.rank for beat, _ in others} - {self.rank}
            lost += [(None, rank, self._contact - self._started) for rank in sorted(never)]
        return lost

    # ---- what is said

    def _silence_message(self, lost: list[tuple[Beat | None, int, float]]) -> str:
        lines = []
        for beat, rank, seconds in lost:
            if beat is None:
                lines.append(
                    f"rank {rank} has never been heard of in {seconds:.0f} s: it did not get as far as this one."
                )
                continue
            fate = (_fate(beat) if beat.host == self._host else "") or "its machine is cut off, or the process hangs"
            last = f"last in {beat.phase}, step {beat.step}"
            lines.append(f"{beat} has not been heard of for {seconds:.0f} s ({last}): {fate}.")
        return (
            "\n".join([f"rank {self.rank} on {self._host} ends the job, because a process is missing:", *lines]) + "\n"
        )

    def _store_message(self, now: float) -> str:
        first = self._heard.get(0)
        where = f" at {self._address}" if self._address else ""
        host = f"rank 0 on {first[0].host}" if first else "rank 0"
        return (
            f"rank {self.rank} on {self._host} ends the job, because the store{where} has not answered for"
            f" {now - self._contact:.0f} s: it belongs to the launcher of {host}, whose machine is cut off or down.\n"
        )

    def _table(self, what: str, ending: str) -> str:
        now = time.monotonic()
        heard = dict(self._heard)
        lines = [f"accel_yolo watchdog, rank {self.rank} on {self._host}: {what}."]
        for rank in range(self.world_size):
            if rank == self.rank:
                beat, silent = self.beat(), 0.0
            elif rank in heard:
                beat, silent = heard[rank][0], now - heard[rank][1]
            else:
                lines.append(
                    f"  rank {rank}: never heard of" if self._watches_others else f"  rank {rank}: not watched"
                )
                continue
            line = f"  {beat}: {beat.phase}, step {beat.step}, {beat.age + silent:.0f} s since progress"
            line += f", silent for {silent:.0f} s" if silent > 3 * self.interval else ""
            lines.append(line + (f"; {fate}" if rank != self.rank and (fate := self._local_fate(beat)) else ""))
        return "\n".join([*lines, ending]) + "\n"

    def _local_fate(self, beat: Beat) -> str:
        return _fate(beat) if beat.host == self._host else ""

    def _stack(self) -> str:
        """Where the watched thread stands, and one line for each other thread."""
        frames = sys._current_frames()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [f"Where rank {self.rank} on {self._host} stands:\n"]
        for ident, frame in frames.items():
            if ident != self._thread_id and names.get(ident) != "watchdog":
                place = f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
                lines.append(f"  thread {names.get(ident, ident)}: {place}\n")
        if self._thread_id in frames:
            lines += traceback.format_stack(frames[self._thread_id])
        return "".join(lines)

    def _end(self, reason: str) -> None:
        # Whatever blocks from here on (a full pipe, a lock), the process ends.
        guard = threading.Timer(3 * SECONDS_FOR_THE_OTHERS, self._end_process)
        guard.daemon = True
        guard.start()
        text = reason + self._stack()
        _say(text)
        if reason:
            try:
                raise JobEnded(text)
            except JobEnded as error:
                record_for_launcher(error)
            # The others say where they stand before the launcher ends them.
            time.sleep(2 * self.interval)
        else:
            time.sleep(SECONDS_FOR_THE_OTHERS)
        guard.cancel()
        # A stopped process would keep the launcher waiting until it kills it; going on, it obeys the launcher.
        for beat in self._here():
            if _is_stopped(beat.pid):
                with contextlib.suppress(OSError):
                    os.kill(beat.pid, signal.SIGCONT)
        self._end_process()


class JobEnded(RuntimeError):
    """The watchdog has ended this process; the text is its report."""


def record_for_launcher(error: BaseException) -> None:
    """Let torch's launcher, if it started this process, show this error as the one that ended the job."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    except (OSError, ValueError, IndexError):
        return 0


def _fate(beat: Beat) -> str:
    """What became of a process of this machine; "" if it runs or cannot be told."""
    try:
        fields = _process_fields(beat.pid)
    except FileNotFoundError:
        return "its process is no more" if Path("/proc/self/stat").exists() else ""
    except OSError:
        return ""
    state, exit_status = fields[0], int(fields[49])
    if state in "Tt":
        return "its process is stopped (SIGSTOP, Ctrl-Z or a debugger)"
    if state not in "ZX":
        return ""
    if exit_status & 0x7F == 9:
        memory = f" (it had {beat.memory / 1e9:.1f} GB in memory when last heard of)" if beat.memory else ""
        return f"was killed by signal 9, most likely because the machine ran out of memory{memory}"
    if exit_status & 0x7F:
        return f"was ended by signal {exit_status & 0x7F}"
    return f"has ended with exit code {exit_status >> 8}"


def _is_stopped(pid: int) -> bool:
    try:
        return _process_fields(pid)[0] == "T"
    except OSError:
        return False


def _process_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; the name before it may hold blanks and brackets."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _is_of_communication(error: Exception) -> bool:
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _key(rank: int) -> str:
    return f"accel_yolo/beat/{rank}"


def _say(text: str) -> None:
    # Not through logging: the thread that hangs may hold a handler's lock.
    sys.stderr.write("\n" + text)
    sys.stderr.flush()


def _exit() -> None:
    os._exit(1)
