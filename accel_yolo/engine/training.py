"""One training run: its parts, assembled around one Accelerator in the order in which they depend on each other."""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from tqdm.auto import tqdm

from accel_yolo.boxes import check_image_size
from accel_yolo.config.load import Resolved, find_config, hyp_values, opt_values
from accel_yolo.config.schema import TrainConfig
from accel_yolo.data.dataset import choose_workers, train_loader, val_loader
from accel_yolo.data.load import DataSets, load_data
from accel_yolo.data.table import FlatTable
from accel_yolo.engine.autobatch import measured_batch_size
from accel_yolo.engine.callbacks import Callbacks, call
from accel_yolo.engine.checkpoint import Checkpoint, restore_checkpoint, save_checkpoint
from accel_yolo.engine.distributed import (
    World,
    finish,
    launched_processes,
    local_main_first,
    on_main_process,
    prepare,
    second_store_connection,
    synchronise_batchnorm,
)
from accel_yolo.engine.evaluate import class_table, evaluate, merged_copy
from accel_yolo.engine.fit import Story, Trainee, fit, metric_columns
from accel_yolo.engine.launch import describe_plan, log_lines
from accel_yolo.engine.optim import Schedule, build_optimizer
from accel_yolo.engine.pictures import RunPictures
from accel_yolo.engine.run_folder import (
    append_result,
    clear_former_run,
    create_run_folder,
    write_settings,
)
from accel_yolo.engine.state import EarlyStopper, ModelEma, TrainState
from accel_yolo.engine.watchdog import Watchdog
from accel_yolo.errors import (
    CheckpointError,
    ConfigError,
    WeightsError,
)
from accel_yolo.metrics import EvalResult
from accel_yolo.model.anchors import (
    AnchorResult,
    apply_anchors,
    fit_anchors,
    refuse_placeholder_anchors,
    scale_label_sizes,
)
from accel_yolo.model.detector import DetectionModel
from accel_yolo.model.loss import DetectionLoss
from accel_yolo.model.weights import LoadedWeights, build_model, load_weights, save_weights, transfer
from accel_yolo.structures import Batch

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Where a run left its files and what its best weights reach.

    Args:
        save_dir: the run folder.
        best: best weights, None if nothing was ever validated.
        last: last weights.
        metrics: of the best weights, keyed as in results.csv.
    """

    save_dir: Path
    best: Path | None
    last: Path
    metrics: dict[str, float]


class Training:
    """One run: its parts, made in the order in which they depend on each other."""

    def __init__(
        self,
        resolved: Resolved,
        accelerator: Accelerator,
        world: World,
        checkpoint: Checkpoint | None,
        start: LoadedWeights | None,
        callbacks: Callbacks | None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config, self.origins = resolved.config, resolved.origins
        self.accelerator, self.world = accelerator, world
        self.checkpoint, self.start, self.callbacks = checkpoint, start, callbacks
        self.dtype = dtype
        # Without SyncBN each process keeps its own running statistics.
        self.own_statistics = accelerator.num_processes > 1 and not self.config.model.sync_bn
        # The weight average that was last measured or saved, and the updates it had then.
        self.merged: tuple[int, DetectionModel] | None = None
        store, address = second_store_connection(self.config.run.ddp_timeout)
        self.watchdog = Watchdog(
            self.config.run.watchdog,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            store=store,
            address=address,
        )

    def assemble(self) -> TrainState:
        """Make everything that training needs; nothing is written yet."""
        config = self.config
        self.data = self._load_data()
        self.model = self._build_model()
        self.image_size = self._checked_image_size()
        self._fit_anchors()
        self.batch_size = self._batch_size()
        self.ema = ModelEma(self.model, decay=config.optim.ema_decay, tau=config.optim.ema_tau)
        self._prepare()
        self.state = self._restore()
        return self.state

    def run(self) -> TrainResult:
        """Train from the start, or from the checkpoint, to the end."""
        with self.watchdog:
            result = self._run()
        finish(self.accelerator, self.world)
        return result

    def _run(self) -> TrainResult:
        accelerator, state = self.accelerator, self.assemble()
        self.folder = self._make_folder()
        self.pictures = RunPictures(self.folder, names=self.data.names, enabled=self._draws_pictures())
        self._announce(state)

        fit(self.trainee, self.loader, state, self._story())

        metrics = self._measure_best()
        last, best = (self.folder / "weights" / f"{name}.safetensors" for name in ("last", "best"))
        call(
            self.callbacks,
            "on_train_end",
            is_main_process=accelerator.is_main_process,
            save_dir=self.folder,
            state=state,
        )
        self._conclude(metrics)
        return TrainResult(self.folder, best if metrics else None, last, metrics)

    def _load_data(self) -> DataSets:
        settings = self.config.data

        def load() -> DataSets:
            return load_data(
                settings.source,
                single_cls=settings.single_cls,
                bad_images=settings.bad_images,
                index_cache=settings.index_cache,
            )

        self.watchdog.progress("indexing", unbounded=True)
        data = local_main_first(self.accelerator, load, name="data")
        self.watchdog.progress("set-up")
        if self.checkpoint is not None:
            saved = {int(label): name for label, name in self.checkpoint.state["names"].items()}
            if saved != data.names:
                raise CheckpointError(
                    "the data set's classes are not those the run was started with.",
                    found=f"{data.names} now, {saved} in {self.checkpoint.folder}",
                    fix="resume with the same data, or start a new run with --weights",
                )
        return data

    def _build_model(self) -> DetectionModel:
        model_config = self.config.model
        torch.manual_seed(self.config.run.seed)
        names, anchors = self.data.names, model_config.anchors or None
        if self.checkpoint is not None:
            # The saved architecture holds the anchors that were computed then.
            model = DetectionModel(self.checkpoint.state["model_config"])
        elif self.start is None:
            model = DetectionModel(model_config.cfg, num_classes=len(names), anchors=anchors)
        else:
            architecture = model_config.cfg or self.start.config
            # `read_start` has refused weights without a configuration.
            assert architecture is not None
            model = DetectionModel(architecture, num_classes=len(names), anchors=anchors)
            # Anchors that were asked for must not be replaced by those of the weights.
            skip = ("anchor",) if model_config.cfg or anchors else ()
            report = transfer(model, self.start.state_dict, skip=skip)
            logger.info("weights    %s: %s", self.start.path, report)
        model = model.to(self.dtype)
        model.names = dict(names)
        model.freeze(model_config.frozen_layers)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(
                "every layer is frozen; there is nothing left to train.",
                found=f"--freeze {' '.join(map(str, model_config.freeze))} in a network of {len(model.model)} layers",
                fix="freeze fewer layers",
            )
        if model_config.channels_last:
            model = model.to(memory_format=torch.channels_last)
        return model

    def _checked_image_size(self) -> int:
        asked = self.config.data.image_size
        stride = max(self.model.max_stride, 32)
        size = check_image_size(asked, stride, floor=2 * stride)
        if size != asked:
            logger.info("--imgsz %d is no multiple of the stride %d: using %d", asked, stride, size)
        return size

    def _fit_anchors(self) -> None:
        """Check the anchors against the boxes and compute better ones if they do not fit; the same on all processes."""
        if self.checkpoint is not None:
            return
        if not self.config.model.autoanchor:
            refuse_placeholder_anchors(self.model)
            return
        model = self.model
        anchors_px = model.head.anchors.double().cpu().numpy() * np.reshape(model.head.strides, (-1, 1, 1))

        def search() -> AnchorResult:
            table = FlatTable(self.data.splits["train"].table)
            return fit_anchors(
                label_sizes(table, image_size=self.image_size, seed=self.config.run.seed),
                anchors=anchors_px,
                strides=model.head.strides,
                threshold=self.config.loss.anchor_t,
                image_size=self.image_size,
                seed=self.config.run.seed,
            )

        found = on_main_process(self.accelerator, search)
        if found.changed:
            apply_anchors(model, found.anchors)
            logger.info(
                "anchors    computed from the data: best possible recall %.4f, was %.4f",
                found.after.bpr,
                found.before.bpr,
            )
        else:
            refuse_placeholder_anchors(model)
            logger.info("anchors    kept: best possible recall %.4f", found.before.bpr)

    def _batch_size(self) -> int:
        asked = self.config.data.batch_size
        if asked != -1:
            return asked
        return measured_batch_size(self.model, image_size=self.image_size, device=self.accelerator.device)

    def _prepare(self) -> None:
        config, accelerator, model = self.config, self.accelerator, self.model
        workers = choose_workers(config.data.workers, launched_processes()[3])
        loader = train_loader(
            self.data.splits["train"].table,
            image_size=self.image_size,
            batch_size=self.batch_size,
            stride=model.max_stride,
            augment=config.augment,
            seed=config.run.seed,
            rect=config.data.rect,
            workers=workers,
            lenient=config.data.bad_images == "warn",
            pin_memory=accelerator.device.type == "cuda",
        )
        schedule = Schedule(config.optim, config.run.epochs, len(loader), self.batch_size)
        self.val_batch_size = 2 * self.batch_size
        self.val_loader = val_loader(
            self.data.splits["val"].table,
            image_size=self.image_size,
            batch_size=self.val_batch_size,
            stride=model.max_stride,
            rank=accelerator.process_index,
            world=accelerator.num_processes,
            workers=workers,
            lenient=config.data.bad_images == "warn",
            pin_memory=accelerator.device.type == "cuda",
        )
        self.val_table = FlatTable(self.data.splits["val"].table)
        if config.model.sync_bn:
            synchronise_batchnorm(model, accelerator, self.world)
        uses_scaler = accelerator.mixed_precision == "fp16"
        optimizer = build_optimizer(model, config.optim, batch_size=self.batch_size, uses_scaler=uses_scaler)
        prepared, optimizer, self.loader = prepare(accelerator, model, optimizer, loader)
        self.ema.module.to(accelerator.device)
        if accelerator.num_processes > 1:
            # DDP has just given every process rank 0's weights; the average must start from the same ones.
            self.ema.module.load_state_dict(accelerator.unwrap_model(prepared).state_dict())
        self.trainee = Trainee(
            model=prepared,
            ema=self.ema,
            optimizer=optimizer,
            loss_fn=self._loss(),
            schedule=schedule,
            accelerator=accelerator,
            world=self.world,
            batch_size=self.batch_size,
            image_size=self.image_size,
            stride=model.max_stride,
            seed=config.run.seed,
            multi_scale=config.data.multi_scale,
            channels_last=config.model.channels_last,
            dtype=self.dtype,
        )

    def _loss(self) -> DetectionLoss:
        return DetectionLoss(
            self.config.loss,
            strides=self.model.strides,
            anchors=self.model.head.anchors,
            num_classes=self.model.num_classes,
            image_size=self.image_size,
        )

    def _restore(self) -> TrainState:
        if self.checkpoint is None:
            return TrainState()
        state = restore_checkpoint(
            self.checkpoint,
            accelerator=self.accelerator,
            model=self.accelerator.unwrap_model(self.trainee.model),
            ema=self.ema,
            optimizer=self.trainee.optimizer.optimizer,
        )
        # The configuration has the anchors rounded, the restored buffer has them as they were trained with.
        self.trainee.loss_fn = self._loss()
        steps = self.trainee.schedule.steps_per_epoch
        if state.micro_step != state.epoch * steps:
            logger.warning(
                "the data has another size than when the run was started (%d steps an epoch now): the schedule shifts",
                steps,
            )
        return state

    def _make_folder(self) -> Path:
        config = self.config

        def make() -> Path:
            if self.checkpoint is not None:
                folder = self.checkpoint.folder.parents[1]
            else:
                # `--name cfg` is YOLOv5's way to name a run after its model.
                name = Path(config.model.cfg).stem if config.run.name == "cfg" else config.run.name
                folder = create_run_folder(Path(config.run.project), name, exist_ok=config.run.exist_ok)
                clear_former_run(folder)
            write_settings(
                folder,
                {
                    "opt.yaml": opt_values(config),
                    "hyp.yaml": hyp_values(config),
                    "config.yaml": config.to_dict(),
                    "data.json": {split: report.to_dict() for split, report in self.data.reports.items()},
                },
            )
            return folder

        return on_main_process(self.accelerator, make)

    def _draws_pictures(self) -> bool:
        return self.accelerator.is_main_process and not self.config.run.noplots

    def _announce(self, state: TrainState) -> None:
        accelerator, config = self.accelerator, self.config
        plan = describe_plan(
            config, self.origins, accelerator=accelerator, world=self.world, schedule=self.trainee.schedule
        )
        parameters = sum(parameter.numel() for parameter in self.ema.module.parameters())
        source = config.model.weights or "from scratch (pretrained: --weights FILE)"
        log_lines(
            [
                *plan,
                f"model      {config.model.cfg or 'of the weights'}, {source}, {parameters:,} parameters,"
                f" {self.image_size} px",
                f"data       {self.data.path}: {len(self.data.names)} classes ({', '.join(self.data.names.values())})",
                f"run folder {self.folder}" + (f", resumed at epoch {state.epoch}" if self.checkpoint else ""),
            ]
        )
        if config.run.trackers:
            accelerator.project_configuration.logging_dir = str(self.folder)
            accelerator.init_trackers("accel_yolo", config=_flat(config))
        if state.epoch >= config.run.epochs:
            logger.info(
                "nothing left to train: %d of %d epochs are done; more with --epochs", state.epoch, config.run.epochs
            )
        self.pictures.labels(FlatTable(self.data.splits["train"].table))
        call(
            self.callbacks,
            "on_train_start",
            is_main_process=accelerator.is_main_process,
            save_dir=self.folder,
            state=state,
        )

    def _story(self) -> Story:
        config = self.config
        return Story(
            evaluate=self.evaluate_average,
            save=self._save,
            record=self._record,
            progress=self._progress,
            epochs=config.run.epochs,
            stopper=EarlyStopper(config.run.patience),
            validate_every_epoch=not config.run.noval,
            save_every_epoch=not config.run.nosave,
            callbacks=self.callbacks,
        )

    def _average(self) -> DetectionModel:
        """The weight average as it stands, the same on every process; made once between two updates."""
        updates = self.state.updates
        if self.merged is None or self.merged[0] != updates:
            average = cast(DetectionModel, self.ema.module)
            copied = merged_copy(average, self.accelerator, per_process_statistics=self.own_statistics)
            self.merged = (updates, copied)
        return self.merged[1]

    def evaluate_average(self) -> EvalResult:
        self.watchdog.progress("validation")
        return self._evaluate(copy.deepcopy(self._average()).fuse())

    def _evaluate(self, model: DetectionModel, *, with_curves: bool = False) -> EvalResult:
        result = evaluate(
            model,
            self._validation_batches(),
            table=self.val_table,
            names=self.data.names,
            config=self.config.eval,
            accelerator=self.accelerator,
            global_batch_size=self.val_batch_size,
            loss_fn=self.trainee.loss_fn,
            single_cls=self.config.data.single_cls,
            with_curves=with_curves,
        )
        self.watchdog.progress("validation")
        return result

    def _validation_batches(self) -> Iterator[Batch]:
        yield from self.watchdog.watch(self.val_loader, "validation")
        # One process counts for all, as long as it takes.
        self.watchdog.progress("scoring", unbounded=True)

    def _save(self, state: TrainState, is_best: bool, is_last: bool) -> None:
        folder, accelerator = self.folder, self.accelerator
        self.watchdog.progress("saving")
        average = self._average()
        epoch = state.epoch - 1
        names = ["last"]
        # Under --nosave, or without a defined fitness, nothing better than the last epoch was ever written.
        if is_best or (is_last and (self.config.run.nosave or state.best_epoch < 0)):
            names.append("best")
        if self.config.run.save_period > 0 and epoch % self.config.run.save_period == 0:
            names.append(f"epoch{epoch}")
        facts = {"epoch": epoch, "image_size": self.image_size}

        def write() -> None:
            for name in names:
                save_weights(folder / "weights" / f"{name}.safetensors", average, facts)

        on_main_process(accelerator, write)
        save_checkpoint(
            folder,
            accelerator=accelerator,
            model=accelerator.unwrap_model(self.trainee.model),
            ema=self.ema,
            optimizer=self.trainee.optimizer.optimizer,
            state=state,
            settings={
                "config": self.config.to_dict(),
                "model_config": average.config,
                "names": self.data.names,
                "num_processes": accelerator.num_processes,
                "batch_size": self.batch_size,
            },
            per_process_statistics=self.own_statistics,
        )
        for name in names:
            call(
                self.callbacks,
                "on_save",
                is_main_process=accelerator.is_main_process,
                path=folder / "weights" / f"{name}.safetensors",
                state=state,
            )

    def _record(self, row: dict[str, float]) -> None:
        on_main_process(self.accelerator, lambda: append_result(self.folder / "results.csv", row))
        logger.info("%s", epoch_line(row, self.config.run.epochs))
        if self.config.run.trackers:
            values = {name: value for name, value in row.items() if name != "epoch" and math.isfinite(value)}
            self.accelerator.log(values, step=int(row["epoch"]))

    def _progress(self, loader: Any, state: TrainState) -> Any:
        bar = tqdm(
            self.watchdog.watch(loader, "training"),
            total=len(loader),
            desc=f"epoch {state.epoch + 1}/{self.config.run.epochs}",
            unit="step",
            leave=False,
            dynamic_ncols=True,
            disable=not self.accelerator.is_main_process or not sys.stderr.isatty(),
        )
        return self.pictures.first_batches(bar, wanted=state.epoch == 0)

    def _measure_best(self) -> dict[str, float]:
        """Measure the saved best weights as a fresh process would, and draw what was found."""
        path = self.folder / "weights" / "best.safetensors"
        # Read by the main process: the run folder may be on a disk that other machines do not share.
        loaded = on_main_process(self.accelerator, lambda: load_weights(path) if path.exists() else None)
        if loaded is None:
            return {}
        self.best_epoch = int(loaded.metadata.get("epoch", -1))
        model = build_model(loaded).to(self.accelerator.device)
        if self.config.model.channels_last:
            model = model.to(memory_format=torch.channels_last)
        model.fuse()
        measured = self._evaluate(model, with_curves=True)
        log_lines(class_table(measured))
        if self._draws_pictures():
            self.pictures.validation(measured, self.folder / "results.csv")
            self.pictures.val_batches(model, self.val_loader, self.accelerator, self.config.eval)
        return metric_columns(measured)

    def _conclude(self, metrics: dict[str, float]) -> None:
        if metrics and math.isnan(metrics["metrics/mAP_0.5"]):
            logger.info("nothing could be measured: the validation split has no boxes; the best weights are the last")
        elif metrics:
            logger.info(
                "best weights, of epoch %d: mAP50 %.3f, mAP50-95 %.3f (COCO); %.3f, %.3f (YOLO-style); conf %g, IoU %g,"
                " max %d per image",
                self.best_epoch + 1,
                metrics["metrics/mAP_0.5"],
                metrics["metrics/mAP_0.5:0.95"],
                metrics["yolo/mAP_0.5"],
                metrics["yolo/mAP_0.5:0.95"],
                self.config.eval.conf_thres,
                self.config.eval.iou_thres,
                self.config.eval.max_det,
            )
        logger.info("results in %s", self.folder)


def read_start(config: TrainConfig, checkpoint: Checkpoint | None) -> LoadedWeights | None:
    """The weights to start from, read and checked together with the model's name before the data is."""
    if checkpoint is not None:
        return None
    if config.model.cfg:
        find_config(config.model.cfg, "models")
    if not config.model.weights:
        return None
    loaded = load_weights(config.model.weights)
    if not config.model.cfg and loaded.config is None:
        raise WeightsError(
            "the weights file does not say which network it belongs to.",
            found=f"{loaded.path} without a model configuration",
            fix="name the model too: --cfg yolov5n (or another YAML)",
        )
    return loaded


def label_sizes(table: FlatTable, *, image_size: int, seed: int) -> np.ndarray:
    """(N, 2) width and height px of all objects that train, in images whose longer side is `image_size`."""
    rows = np.repeat(np.arange(len(table)), np.diff(table.offsets))
    kept = ~table.ignore
    sides = table.boxes[kept, 2:] - table.boxes[kept, :2]
    return scale_label_sizes(sides, table.sizes_hw[:, ::-1], rows[kept], image_size=image_size, seed=seed)


def epoch_line(row: dict[str, float], epochs: int) -> str:
    """The one line that an epoch leaves in the log."""
    line = (
        f"epoch {int(row['epoch']) + 1}/{epochs}  box {row['train/box_loss']:.4f}  obj {row['train/obj_loss']:.4f}"
        f"  cls {row['train/cls_loss']:.4f}"
    )
    if "metrics/mAP_0.5" in row:
        line += (
            f"  P {row['metrics/precision']:.3f}  R {row['metrics/recall']:.3f}  mAP50 {row['metrics/mAP_0.5']:.3f}"
            f"  mAP50-95 {row['metrics/mAP_0.5:0.95']:.3f}"
        )
    return line + f"  {row['time/train']:.1f} + {row['time/val']:.1f} s, {row['time/images_per_second']:.0f} images/s"


def _flat(config: TrainConfig) -> dict[str, Any]:
    return {
        f"{part}.{name}": value if isinstance(value, (int, float, str, bool)) else str(value)
        for part, values in config.to_dict().items()
        for name, value in values.items()
    }
