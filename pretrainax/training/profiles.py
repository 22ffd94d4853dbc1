"""Defines the callback that records a profile when the config or a signal requests it."""

import functools
from collections.abc import Callable
from typing import Optional

import jax

from pretrainax.runtime.profile_request import ProfileRequest
from pretrainax.runtime.recorder import Recorder
from pretrainax.training.callbacks import Callback
from pretrainax.training.run import Run


class Profiles(Callback):
    """Records a profile of the steps in `config.train.profile_steps`, and one whenever the process receives SIGUSR1."""

    part = ""  # `Loop.paused` counts the time in the row "profiling" of the goodput table

    def __init__(self, request: Optional[ProfileRequest] = None, report: Optional[Callable[[Run, str], str]] = None):
        """Stores the handler of profile requests and the function that summarizes traces.

        Args:
          request: the handler of SIGUSR1. If None, profiles can be requested only in the config.
          report: returns a summary, given the run and the path of a trace. If None, traces are not summarized.
        """
        self._request, self._report = request or ProfileRequest(), report
        self._recorder: Optional[Recorder] = None

    def on_start(self, loop, state, metrics):
        train, report = loop.run.experiment.train, self._report and functools.partial(self._report, loop.run)
        steps = loop.step + 1, train.steps
        self._recorder = Recorder(loop.workdir, train.profiled, *steps, self._request, report, loop.note)

    def before_step(self, loop, state, metrics):
        step = loop.step + 1
        assert self._recorder is not None  # on_start
        if self._recorder.begins_at(step):
            jax.block_until_ready(state)  # a device may still run the previous step, even if its metrics are ready
            with loop.paused("profiling"):
                self._recorder.begin(step)
        self._recorder.set_step(step)

    def on_step(self, loop, state, metrics):
        assert self._recorder is not None  # on_start
        if self._recorder.ends_at(loop.step):
            jax.block_until_ready(state)
            with loop.paused("profiling"):
                self._recorder.end()

    def close(self):
        if self._recorder is not None:
            self._recorder.close()
