"""Look into a run while it trains: an object whose methods are called at named moments, on every process."""

from accel_yolo import run
from accel_yolo.engine.callbacks import Callbacks, main_only
from accel_yolo.engine.state import TrainState


class EpochPrinter(Callbacks):
    """Prints the best epoch so far; `main_only` keeps the other processes of a run silent."""

    @main_only
    def on_epoch_end(self, *, values: dict[str, float], state: TrainState) -> None:
        # `values` has the columns of results.csv. Epochs count from 0, and the metrics are absent under --noval.
        found = values.get("metrics/mAP_0.5:0.95", float("nan"))
        print(f"epoch {values['epoch']}: mAP50-95 {found:.3f}, best epoch {state.best_epoch}")


if __name__ == "__main__":
    run(epochs=3, name="callbacks", noplots=True, callbacks=EpochPrinter())
