"""Callbacks are called by name, on every process unless marked."""

from accel_yolo.engine.callbacks import Callbacks, call, main_only


class _Noting(Callbacks):
    def __init__(self):
        self.calls = []

    def on_epoch_start(self, **values):
        self.calls.append(("on_epoch_start", values))

    @main_only
    def on_save(self, **values):
        self.calls.append(("on_save", values))


def test_methods_run_everywhere_and_marked_ones_on_the_main_process_only():
    callbacks = _Noting()
    call(callbacks, "on_epoch_start", is_main_process=False, state=1)
    call(callbacks, "on_save", is_main_process=False, path="a")
    call(callbacks, "on_save", is_main_process=True, path="b")
    assert callbacks.calls == [("on_epoch_start", {"state": 1}), ("on_save", {"path": "b"})]


def test_no_callbacks_and_objects_without_the_method_are_fine():
    call(None, "on_save", is_main_process=True, path="a")
    call(object(), "on_save", is_main_process=True, path="a")
