"""Finishes a run whose last step is saved: runs the last validation and the `on_end` methods of the callbacks.

The trained parameters are safe at this point. With one process, a failed callback is logged and the next ones run.
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
    """Validates the state, unless it was validated after the last step, and calls `on_end` of the callbacks.

    Raises:
      RunFailed: the validation failed; or a callback failed in one of several processes: the others would wait for it.
    """
    run, metrics = loop.run, loop.last_evaluation
    run.peers.beat(None)
    loop.preemption.answer = "the run is done and saved, skipping its remaining tables and samples"
    if metrics is None:
        try:
            metrics = run.validate(run.validated(state))
        except Exception as error:
            raise RunFailed(f"the run is done and saved, but its validation failed: {describe_error(error)}") from error
    for each in loop.callbacks.overriding("on_end"):
        with continue_on_error(name_of(each), loop), loop.callbacks.timed(each):
            each.on_end(loop, state, metrics)


@contextlib.contextmanager
def continue_on_error(what: str, loop: "Loop") -> Iterator[None]:
    """Returns a context that logs an exception in one line instead of raising it, because the run is already saved.

    Raises:
      RunFailed: an exception was raised, and the run has several processes.
    """
    try:
        yield
    except Exception as error:
        if jax.process_count() > 1:
            raise RunFailed(f"the run is done and saved, but {what} failed: {describe_error(error)}") from error
        loop.note(f"the run is done and saved, but without {what}: {describe_error(error)}")
