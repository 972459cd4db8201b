"""What a caller may add to a run: an object whose methods are called at named moments, on every process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accel_yolo.engine.state import TrainState

if TYPE_CHECKING:
    from accel_yolo.metrics import EvalResult
    from accel_yolo.structures import Batch

F = TypeVar("F", bound=Callable[..., Any])


class Callbacks:
    """Override what you need. Every method runs on every process, unless it is marked `main_only`."""

    def on_train_start(self, *, save_dir: Path, state: TrainState) -> None:
        """Before the first epoch."""

    def on_epoch_start(self, *, state: TrainState) -> None:
        """Before an epoch's first batch."""

    def on_batch_end(self, *, batch: Batch, state: TrainState) -> None:
        """After a batch's step; `state.micro_step` has advanced."""

    def on_validation_end(self, *, result: EvalResult, state: TrainState) -> None:
        """After a validation; `result` is the same on every process."""

    def on_epoch_end(self, *, values: dict[str, float], state: TrainState) -> None:
        """After an epoch; `values` has the columns of results.csv."""

    def on_save(self, *, path: Path, state: TrainState) -> None:
        """After weights were written to `path`."""

    def on_train_end(self, *, save_dir: Path, state: TrainState) -> None:
        """After the last epoch and the final validation."""


def main_only(method: F) -> F:
    """Mark a callback method that only the main process should run."""
    method.main_only = True  # type: ignore[attr-defined]
    return method


def call(callbacks: Callbacks | None, name: str, *, is_main_process: bool, **values: Any) -> None:
    """Call one method by name, if there is one, honouring `main_only`. Any object with such methods will do."""
    method = getattr(callbacks, name, None)
    if method is not None and (is_main_process or not getattr(method, "main_only", False)):
        method(**values)
