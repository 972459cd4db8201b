"""The verb `verify-ddp`: trains the same few steps on one process and on several, and measures how far apart they end.

With SyncBN the distance is rounding; a trainer whose result depends on the number of processes fails by orders of
magnitude. Warm-up is off, every step updates, and the rate is a low one: at the recipe's rate the first steps of
a network with BatchNorm are chaotic (any difference grows twentyfold a step, on one process too), and the comparison
would measure that instead.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from accel_yolo.config.load import Resolved
from accel_yolo.config.schema import build_config
from accel_yolo.data.workers import die_with_parent
from accel_yolo.engine.checkpoint import write_text_atomically
from accel_yolo.engine.distributed import (
    check_batch_size,
    configure_logging,
    finish,
    launched_processes,
    make_accelerator,
    sum_over_processes,
)
from accel_yolo.engine.fit import train_step
from accel_yolo.engine.launch import log_lines, start_processes
from accel_yolo.engine.training import Training, read_start
from accel_yolo.errors import AccelYoloError, ConfigError, error_fields
from accel_yolo.metrics import EvalResult
from accel_yolo.version import package_version

logger = logging.getLogger(__name__)

PASSED, FAILED = 0, 3
# Measured in float32: above it differences grow from step to step, below it steps drown in the weights' rounding.
LEARNING_RATE = 1e-5
# What two runs may differ by, per type: weights as a part of the way travelled, the rest relative.
TOLERANCES = {
    # A fresh network with BatchNorm magnifies rounding some hundredfold; a real difference is of the order of 1.
    torch.float32: {"weights": 2e-2, "gradient": 1e-4, "loss": 1e-4, "statistics": 1e-3},
    torch.float64: {"weights": 1e-10, "gradient": 1e-10, "loss": 1e-10, "statistics": 1e-10},
}
# mAP counts boxes, and one that flips at a threshold is no rounding; what it may cost is small all the same.
METRIC_TOLERANCE = 0.01


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far a run on several processes is from the one on one.

    Args:
        processes: how many.
        gradient: of the first step: |g_N - g_1| / |g_1|.
        loss: largest relative difference of any step's box, objectness or class loss.
        statistics: BatchNorm's: largest difference, relative to the largest value of its kind in the layer.
        weights: |w_N - w_1| / |w_1 - w_0| after the last step.
        metric: difference of mAP50-95 after the last step.
    """

    processes: int
    gradient: float
    loss: float
    statistics: float
    weights: float
    metric: float

    def exceeded(self, tolerances: Mapping[str, float]) -> list[str]:
        """The quantities beyond their tolerance; a number that is not finite is beyond any."""
        limits = {**tolerances, "metric": METRIC_TOLERANCE}
        return [name for name, limit in limits.items() if not getattr(self, name) <= limit]


def main(
    resolved: Resolved,
    *,
    processes: Sequence[int],
    steps: int,
    double: bool,
    rate: float | None,
    output: str,
    tolerance: float | None,
) -> int:
    """Print the table, write the certificate; 0 if every run is within the tolerance, else 3."""
    configure_logging(True)
    dtype = torch.float64 if double else torch.float32
    tolerances = dict(TOLERANCES[dtype])
    if tolerance is not None:
        tolerances["weights"] = tolerance
    rate = LEARNING_RATE if rate is None else rate
    comparisons = verify(resolved, processes=processes, steps=steps, dtype=dtype, rate=rate)
    log_lines(table(comparisons, tolerances))
    exceeded = {item.processes: names for item in comparisons if (names := item.exceeded(tolerances))}
    certificate = {
        "accel_yolo": package_version(),
        "torch": torch.__version__,
        "steps": steps,
        "learning_rate": rate,
        "dtype": str(dtype).removeprefix("torch."),
        "settings": resolved.config.to_dict(),
        "tolerances": {**tolerances, "metric": METRIC_TOLERANCE},
        "comparisons": [
            {name: getattr(item, name) for name in ("processes", "gradient", "loss", "statistics", "weights", "metric")}
            for item in comparisons
        ],
        "passed": not exceeded,
    }
    write_text_atomically(Path(output), json.dumps(certificate, indent=1) + "\n")
    for count, names in exceeded.items():
        logger.info("%d processes: beyond the tolerance in %s", count, ", ".join(names))
    logger.info("%s; certificate in %s", "FAILED" if exceeded else "passed", output)
    return FAILED if exceeded else PASSED


def verify(
    resolved: Resolved, *, processes: Sequence[int], steps: int, dtype: torch.dtype, rate: float = LEARNING_RATE
) -> list[Comparison]:
    """Train `steps` steps at learning rate `rate` on one process and on each of the given numbers.

    Raises:
        AccelYoloError: for settings that cannot be trained with.
    """
    if resolved.config.data.batch_size == -1:
        raise ConfigError(
            "the batch must be the same for every number of processes.",
            found="--batch-size -1",
            fix="name a batch size that all of them divide",
        )
    for count in processes:
        check_batch_size(resolved.config.data.batch_size, count)
    settings = {
        "config": _without_warm_up(resolved, rate),
        "origins": resolved.origins,
        "steps": steps,
        "dtype": str(dtype).removeprefix("torch."),
    }
    runs = {count: _trained(settings, count) for count in (1, *processes)}
    return [compare(runs[1], runs[count], processes=count) for count in processes]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one run left: tensors by `start|gradient|end/<name>`, losses (steps, 3), mAP50-95."""

    tensors: dict[str, Tensor]
    losses: Tensor
    map50_95: float


def compare(one: Recorded, several: Recorded, *, processes: int) -> Comparison:
    """The distances of two runs of the same steps."""
    losses = ((several.losses - one.losses).abs() / one.losses.abs().clamp(min=1e-12)).max()
    return Comparison(
        processes=processes,
        gradient=_norm(_difference(several, one, "gradient/")) / max(_norm(_part(one, "gradient/")), 1e-30),
        loss=float(losses),
        statistics=_statistics_distance(one, several),
        weights=_norm(_difference(several, one, "end/"))
        / max(_norm([end - one.tensors[f"start/{name}"] for name, end in _named(one, "end/")]), 1e-30),
        metric=abs(several.map50_95 - one.map50_95),
    )


def table(comparisons: Sequence[Comparison], tolerances: Mapping[str, float]) -> list[str]:
    """One line per number of processes, and the tolerances below."""
    names = ("gradient", "loss", "statistics", "weights", "metric")
    lines = [f"{'processes':>10}" + "".join(f"{name:>12}" for name in names)]
    for item in comparisons:
        lines.append(f"{item.processes:>10}" + "".join(f"{getattr(item, name):>12.2e}" for name in names))
    limits = {**tolerances, "metric": METRIC_TOLERANCE}
    return [*lines, f"{'tolerance':>10}" + "".join(f"{limits[name]:>12.0e}" for name in names)]


def _trained(settings: dict[str, Any], processes: int) -> Recorded:
    environment = dict(os.environ)
    if settings["config"]["run"]["device"] == "cpu" or not torch.cuda.is_available():
        environment["ACCELERATE_USE_CPU"] = "true"
        # As many threads for one process as for several: the number changes roundings.
        environment.setdefault("OMP_NUM_THREADS", "1")
    logger.info("training %d steps on %d process%s", settings["steps"], processes, "es" if processes > 1 else "")
    tensors: dict[str, Tensor] = {}

    def collect(folder: Path) -> None:
        tensors.update(load_file(folder / "tensors.safetensors"))

    answer = start_processes(
        __name__, settings, num_processes=processes, environment=environment, before_removal=collect
    )
    return Recorded(tensors, torch.tensor(answer["losses"], dtype=torch.float64), float(answer["map50_95"]))


def _without_warm_up(resolved: Resolved, rate: float) -> dict[str, Any]:
    nested: dict[str, Any] = resolved.config.to_dict()
    nested["optim"] |= {
        "warmup_epochs": 0.0,
        "warmup_min_steps": 0,
        "nominal_batch": resolved.config.data.batch_size,
        "lr0": rate,
    }
    nested["run"] |= {"resume": "", "mixed_precision": "no", "trackers": [], "noplots": True}
    return nested


def _named(run: Recorded, prefix: str) -> list[tuple[str, Tensor]]:
    return [(name.removeprefix(prefix), value) for name, value in run.tensors.items() if name.startswith(prefix)]


def _part(run: Recorded, prefix: str) -> list[Tensor]:
    return [value for _, value in _named(run, prefix)]


def _difference(left: Recorded, right: Recorded, prefix: str) -> list[Tensor]:
    return [left.tensors[prefix + name] - value for name, value in _named(right, prefix)]


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in tensors))


def _statistics_distance(one: Recorded, several: Recorded) -> float:
    worst = 0.0
    for name, value in _named(one, "statistics/"):
        scale = max(float(value.abs().max()), 1e-12)
        worst = max(worst, float((several.tensors[f"statistics/{name}"] - value).abs().max()) / scale)
    return worst


def _record(folder: Path) -> int:
    """One process of one run."""
    settings = json.loads((folder / "settings.json").read_text())
    rank, _, processes, _ = launched_processes()
    if processes > 1:
        die_with_parent(os.getppid())
    resolved = Resolved(config=build_config(settings["config"]), origins=settings["origins"])
    try:
        recorded = _record_steps(resolved, steps=settings["steps"], dtype=getattr(torch, settings["dtype"]))
    except AccelYoloError as error:
        (folder / f"error-{rank}.json").write_text(json.dumps(error_fields(error)))
        return 2
    if rank == 0:
        save_file(recorded.tensors, folder / "tensors.safetensors")
        answer = {"losses": recorded.losses.tolist(), "map50_95": recorded.map50_95}
        (folder / "result.json").write_text(json.dumps(answer))
    return 0


def _record_steps(resolved: Resolved, *, steps: int, dtype: torch.dtype) -> Recorded:
    config = resolved.config
    start = read_start(config, None)
    accelerator, world = make_accelerator(device=config.run.device, mixed_precision="no")
    # Only the parent speaks.
    logging.getLogger("accel_yolo").setLevel(logging.ERROR)
    training = Training(resolved, accelerator, world, None, start, None, dtype=dtype)
    state = training.assemble()
    model = accelerator.unwrap_model(training.trainee.model)
    tensors = _copies("start/", dict(model.named_parameters()))
    optimizer = training.trainee.optimizer.optimizer

    def keep_first_gradient(*_: Any) -> None:
        if state.updates == 0:
            gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
            tensors.update(_copies("gradient/", gradients))

    handle = optimizer.register_step_pre_hook(keep_first_gradient)
    losses: list[Tensor] = []
    training.trainee.model.train()
    while len(losses) < steps:
        training.loader.set_epoch(state.epoch)
        for batch in training.loader:
            parts = train_step(batch, training.trainee, state)
            own = torch.stack([parts.box, parts.objectness, parts.classification]).double()
            losses.append(sum_over_processes(own, world, device=accelerator.device).cpu())
            if len(losses) == steps:
                break
        state.epoch += 1
    handle.remove()
    tensors |= _copies("end/", dict(model.named_parameters()))
    result: EvalResult = training.evaluate_average()
    statistics = {name: value for name, value in model.named_buffers() if "running" in name}
    tensors |= _copies("statistics/", statistics)
    finish(accelerator, world)
    return Recorded(tensors, torch.stack(losses), result.map50_95)


def _copies(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record

    sys.exit(record(_record)(Path(sys.argv[1])))
