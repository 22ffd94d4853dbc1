"""Stops a run at the step after a failed write of a checkpoint, instead of at the next checkpoint."""

from pretrainax.training.callbacks import Callback


class SaveCheck(Callback):
    """Callback that raises RunFailed if a background save has failed, for example because the disk is full."""

    part = ""  # takes no time

    def on_step(self, loop, state, metrics):
        loop.checkpoints.check()
