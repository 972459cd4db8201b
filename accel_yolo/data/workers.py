"""How many loader processes to start, and how each of them behaves: one thread, and it ends when its parent ends."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1


def choose_workers(requested: int, num_local_processes: int = 1) -> int:
    """Loader processes per rank: what was asked for, but never more than this rank's share of the usable cores."""
    if requested <= 0:
        return 0
    return max(1, min(requested, usable_cores() // max(1, num_local_processes)))


def usable_cores() -> int:
    """Cores that this process may use: its affinity mask, further limited by a container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _container_quota()
    return max(1, min(allowed, math.ceil(quota))) if quota else max(1, allowed)


def _container_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores that the control group grants, or None if it sets no limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if quota == "max" or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def start_loader_worker(worker_id: int, *, parent: int) -> None:
    """Prepare a loader process; `functools.partial(start_loader_worker, parent=os.getpid())` is its worker_init_fn."""
    # The scan's workers import this module too and need neither library.
    import cv2
    import torch

    start_worker(parent)
    cv2.setNumThreads(0)
    torch.set_num_threads(1)


def start_worker(parent: int) -> None:
    """Tie this process to `parent`, and leave signals meant for the whole job to the parent."""
    die_with_parent(parent)
    # Ctrl-C and a scheduler's SIGTERM reach the whole group. The parent saves and stops; a worker that dies first
    # makes torch raise in the middle of that. Only the parent's own SIGTERM ends a worker.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_when_told_by, args=(parent,), daemon=True).start()


def _exit_when_told_by(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def die_with_parent(parent: int) -> None:
    """End this process when `parent` ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have ended before the request was made.
        if not _is_running(parent):
            os._exit(1)
    else:
        threading.Thread(target=_exit_without, args=(parent,), daemon=True).start()


def _exit_without(parent: int) -> None:
    while _is_running(parent):
        time.sleep(1)
    os._exit(1)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
