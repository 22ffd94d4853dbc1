"""Stops a run before its last update: a trial after its first part, and the run of an untrained arm at step 0."""

import dataclasses

from pretrainax.training.callbacks import Callback


@dataclasses.dataclass
class StopAt(Callback):
    """Ends a run after `step` updates, with a validation; a run without this callback continues from there.

    At step 0, config.checkpoint.keep_at must have 0, so that there is a checkpoint.
    """

    step: int  # number of updates after which the run ends

    part = ""

    def on_start(self, loop, state, metrics):
        if loop.step >= self.step:  # also if a killed run had saved its last checkpoint
            self._stop(loop)

    def on_step(self, loop, state, metrics):
        if loop.step == self.step:
            self._stop(loop)

    def _stop(self, loop) -> None:
        loop.stop("the study needs no further updates of this run now")
