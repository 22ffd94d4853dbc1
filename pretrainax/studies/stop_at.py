"""Pauses a trial after its first part."""

import dataclasses

from pretrainax.training.callbacks import Callback


@dataclasses.dataclass
class StopAt(Callback):
    """Ends a run after `step` updates, with a validation; a run without this callback continues from there."""

    step: int

    part = ""

    def on_step(self, loop, state, metrics):
        if loop.step == self.step:
            loop.request("evaluation")
            loop.stop("the tuning compares the trials of this round")
