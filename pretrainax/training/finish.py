"""The end of a run that is trained and saved: its last validation, and what callbacks do in the end.

Nothing here can lose the run. What fails is said in a line, and what comes after it is done all the same.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax

from pretrainax.config import RunFailed
from pretrainax.training.callbacks import name_of, one_line
from pretrainax.training.train_step import TrainState

if TYPE_CHECKING:  # which imports this module
    from pretrainax.training.loop import Loop


def finish(loop: "Loop", state: TrainState) -> None:
    """Validates the state, unless that is done, and calls the callbacks.

    Raises:
      RunFailed: no validation; or in one of several processes anything else: the others would wait for it.
    """
    run, metrics = loop.run, loop.last_evaluation
    run.peers.beat(None)
    loop.preemption.answer = "the run is done and saved, leaving out what is left of its tables and samples"
    if metrics is None:
        try:
            metrics = run.validate(run.validated(state))
        except Exception as error:
            raise RunFailed(f"the run is done and saved, but its validation failed: {one_line(error)}") from error
    for each in loop.callbacks.having("on_end"):
        with or_without(name_of(each), loop), loop.callbacks.timed(each):
            each.on_end(loop, state, metrics)


@contextlib.contextmanager
def or_without(what: str, loop: "Loop") -> Iterator[None]:
    """Says in a line what went wrong inside, and goes on: the run is saved.

    Raises:
      RunFailed: in one of several processes.
    """
    try:
        yield
    except Exception as error:
        if jax.process_count() > 1:
            raise RunFailed(f"the run is done and saved, but {what} failed: {one_line(error)}") from error
        loop.note(f"the run is done and saved, but without {what}: {one_line(error)}")
