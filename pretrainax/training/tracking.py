"""Defines the callback that sends the metrics and text samples of a run to trackers."""

from collections.abc import Sequence

from pretrainax.trackers import TrackedRun, Tracker, Trackers, config_values
from pretrainax.training.callbacks import Callback
from pretrainax.training.metrics_writer import number


class Tracking(Callback):
    """Sends a run's metrics and text samples from the primary process to the trackers in its config."""

    part = ""  # trackers run in their own threads

    def __init__(self, trackers: Sequence[Tracker]):
        self._configured_trackers, self._trackers = trackers, Trackers((), TrackedRun(""), print)

    def on_start(self, loop, state, metrics):
        run, trackers = loop.run, self._configured_trackers if loop.run.is_primary else ()
        tracked = TrackedRun(loop.workdir, loop.step, config_values(run.experiment))
        self._trackers = Trackers(trackers, tracked, loop.note)

    def on_log(self, loop, state, metrics):
        self._send(loop.step, "train", metrics)

    def on_evaluate(self, loop, state, metrics):
        self._send(loop.step, "valid", metrics)

    def _send(self, step: int, split: str, metrics) -> None:
        numbers = {name: number(x) for name, x in metrics.items() if not isinstance(x, dict)}
        self._trackers.log_metrics(step, split, {name: x for name, x in numbers.items() if x is not None})

    def on_rollback(self, loop, state, metrics):
        self._trackers.rewind(loop.step)

    def on_text(self, loop, name, text):
        self._trackers.log_text(name, text)

    def on_end(self, loop, state, metrics):
        self._trackers.finish(metrics)

    def close(self):
        self._trackers.close()
