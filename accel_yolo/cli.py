"""The one door: `accel-yolo VERB ...`, its exit codes, and everything that is printed rather than logged."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

from accel_yolo.config.load import TRAIN, VAL, parse_train_args, parse_val_args, resolve, resolve_val
from accel_yolo.errors import AccelYoloError, ConfigError, LaunchError, did_you_mean

DONE, USER_ERROR, INTERRUPTED = 0, 2, 130
SECONDS_FOR_THE_MAIN_PROCESS = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        argv: words after the program's name; None = those of this process.

    Returns:
        0 done; 2 the user can fix it; 130 interrupted at the keyboard. Any other
        exception is a bug of ours and passes through.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        _say(_usage())
        return DONE
    if words[0] == "--version":
        from accel_yolo import __version__

        _say(f"accel-yolo {__version__}")
        return DONE
    return _with_exit_code(lambda: _dispatch(words[0], words[1:]))


def train_main(argv: Sequence[str] | None = None) -> int:
    """`main` for the verb `train` alone: what `python train.py` and `accelerate launch train.py` run."""
    words = sys.argv[1:] if argv is None else argv
    return main(["train", *words])


def train_options(options: argparse.Namespace) -> int:
    """Train with parsed options; errors pass through, because a caller from Python wants the exception.

    Raises:
        AccelYoloError: for whatever the user can fix.
    """
    resolved = resolve(options)
    if getattr(options, "print_config", None):
        _say(resolved.describe())
        return DONE
    _check_process_count(resolved.num_processes)
    from accel_yolo.commands.train import main as run_train

    return run_train(resolved)


def _train(argv: Sequence[str]) -> int:
    return train_options(parse_train_args(argv))


def _val(argv: Sequence[str]) -> int:
    config = resolve_val(parse_val_args(argv))
    from accel_yolo.commands.val import main as run_val

    return run_val(config)


def _verify_ddp(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="accel-yolo verify-ddp",
        description="Train a few steps on one process and on several, and measure how far apart they end. Takes every"
        " flag of `accel-yolo train` too (--data, --cfg, --imgsz, --batch-size, --device, ...).",
        epilog="Exit code 0: within the tolerance; 3: not; 2: bad input.",
        allow_abbrev=False,
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[2], metavar="N", help="numbers to compare with 1")
    parser.add_argument("--steps", type=int, default=20, help="training steps (default 20)")
    parser.add_argument("--float64", action="store_true", help="in double precision: what is left is no rounding")
    parser.add_argument(
        "--rate", type=float, help="learning rate of these steps; default 1e-5, where nothing is chaotic"
    )
    parser.add_argument("--no-sync-bn", action="store_true", help="each process its own BatchNorm: should fail")
    parser.add_argument("--tolerance", type=float, help="for the weights; default 2e-2, with --float64 1e-10")
    parser.add_argument("--output", default="verify-ddp.json", help="the certificate (default verify-ddp.json)")
    own, rest = parser.parse_known_args(argv)
    if own.steps < 1 or any(count < 2 for count in own.processes):
        raise ConfigError(
            "verify-ddp needs at least one step and numbers of processes above one.",
            found=f"--steps {own.steps} --processes {' '.join(map(str, own.processes))}",
            fix="for example --steps 20 --processes 2 4",
        )
    options = parse_train_args(rest)
    options.sync_bn = not own.no_sync_bn
    resolved = resolve(options)
    from accel_yolo.commands.verify_ddp import main as run_verify

    return run_verify(
        resolved,
        processes=own.processes,
        steps=own.steps,
        double=own.float64,
        rate=own.rate,
        output=own.output,
        tolerance=own.tolerance,
    )


# Verb -> what it does, and the function that takes the words after it. Torch is imported inside the function.
VERBS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    TRAIN.verb: ("train a model; without --data on the built-in shapes", _train),
    VAL.verb: ("measure weights on a split of a data set", _val),
    "verify-ddp": ("prove that several processes train what one does", _verify_ddp),
}


def _usage() -> str:
    lines = ["usage: accel-yolo VERB [flags]", "", "verbs:"]
    lines += [f"  {verb:<12}{summary}" for verb, (summary, _) in VERBS.items()]
    lines += ["", "`accel-yolo VERB --help` lists the flags of a verb; `accel-yolo --version` prints the version."]
    return "\n".join(lines)


def _dispatch(verb: str, words: Sequence[str]) -> int:
    if verb not in VERBS:
        raise ConfigError("the first word must be a verb.", found=repr(verb), fix=did_you_mean(verb, list(VERBS)))
    return VERBS[verb][1](words)


def _check_process_count(asked: int | None) -> None:
    # A number that nobody acts on would leave the user with one busy device and the belief in several.
    running = int(os.environ.get("WORLD_SIZE", "1"))
    if asked is not None and asked != running:
        raise LaunchError(
            "on the command line the launcher decides how many processes there are.",
            found=f"--num-processes {asked}, but {running} started",
            fix=f"start it by `torchrun --standalone --nproc_per_node {asked} -m accel_yolo train ...`.",
        )


def _with_exit_code(command: Callable[[], int]) -> int:
    def guarded() -> int:
        try:
            return command()
        except AccelYoloError as error:
            if _is_main_process():
                print(error, file=sys.stderr)
            else:
                _leave_the_word_to_the_main_process(error)
            return USER_ERROR
        except KeyboardInterrupt:
            if _is_main_process():
                print("interrupted; a training run goes on from its last saved epoch with --resume", file=sys.stderr)
            return INTERRUPTED

    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return guarded()
    # Started by torch's launcher: for a bug it then shows the traceback of the rank that failed first.
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(guarded)() or DONE


def _leave_the_word_to_the_main_process(error: AccelYoloError) -> None:
    # Most errors meet every rank at once. The launcher ends all ranks when the first one leaves, and this one must not
    # leave before the main process has printed; if the error is this rank's alone, the launcher shows what we record.
    time.sleep(SECONDS_FOR_THE_MAIN_PROCESS)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def _say(text: str) -> None:
    if _is_main_process():
        print(text)


def _is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"
