"""Completes a run after its last step is saved: runs the last validation and the `on_end` methods of the callbacks.

The parameters are already saved. With one process, if a callback fails, its error is logged and the others still run.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax

from pretrainax.config import RunFailed
from pretrainax.training.callbacks import describe_error, name_of
from pretrainax.training.train_step import TrainState

if TYPE_CHECKING:  # that module imports this module
    from pretrainax.training.loop import Loop


def finish(loop: "Loop", state: TrainState) -> None:
    """Validates the final state, unless the last step was already validated, and calls the callbacks' `on_end`.

    Raises:
      RunFailed: validation failed, or a callback failed in a multi-process run, whose other processes might hang.
    """
    run, metrics = loop.run, loop.last_evaluation
    run.peers.beat(None)
    loop.preemption.answer = "the run is done and saved, skipping its remaining tables and samples"
    if metrics is None:
        try:
            metrics = run.validate(run.validated(state))
        except Exception as error:
            raise RunFailed(f"the run is done and saved, but its validation failed: {describe_error(error)}") from error
    for callback in loop.callbacks.overriding("on_end"):
        with continue_on_error(name_of(callback), loop), loop.callbacks.timed(callback):
            callback.on_end(loop, state, metrics)


@contextlib.contextmanager
def continue_on_error(what: str, loop: "Loop") -> Iterator[None]:
    """Suppresses an exception inside the context and logs it in one line, because the run is already saved.

    Raises:
      RunFailed: an exception was raised, and the run has several processes.
    """
    try:
        yield
    except Exception as error:
        if jax.process_count() > 1:
            raise RunFailed(f"the run is done and saved, but {what} failed: {describe_error(error)}") from error
        loop.note(f"the run is done and saved, but without {what}: {describe_error(error)}")
