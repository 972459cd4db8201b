"""`python train.py`, `accelerate launch train.py` and `accel-yolo train` are one program; this is its thin face."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from accel_yolo import cli
from accel_yolo.config.load import parse_train_args


def parse_opt(argv: Sequence[str] | None = None, known: bool = False) -> argparse.Namespace:
    """The options of the command line; attributes (`opt.batch_size = 64`) may be changed before `main(opt)`."""
    return parse_train_args(argv, known=known)


def main(opt: argparse.Namespace) -> int:
    """Train in this process, as one rank of those that the launcher (or the caller) started."""
    return cli.train_options(opt)


def run(**kwargs: Any) -> object:
    """Train from Python: `run(data="coco128.yaml", imgsz=320, device="0,1")` starts one process a device."""
    import accel_yolo

    return accel_yolo.run(**kwargs)


if __name__ == "__main__":
    sys.exit(cli.train_main())
