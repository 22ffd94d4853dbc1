"""The profiles of a run as one of its callbacks: who asks for them beside its config, and who reads them."""

import functools
from collections.abc import Callable
from typing import Optional

import jax

from pretrainax.runtime.profile_request import ProfileRequest
from pretrainax.runtime.recorder import Recorder
from pretrainax.training.callbacks import Callback
from pretrainax.training.run import Run


class Profiles(Callback):
    """Writes the profiles that `config.train.profile_steps` and a signal ask for."""

    part = ""  # `Loop.paused` says which

    def __init__(self, request: Optional[ProfileRequest] = None, report: Optional[Callable[[Run, str], str]] = None):
        """
        Args:
          request: hears the signal; None: the config alone asks for profiles.
          report: (run, path of a trace) -> what it says; None: nobody reads it.
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
            jax.block_until_ready(state)  # a device may still run the step before, although its metrics are there
            with loop.paused("profiling"):
                self._recorder.begin(step)
        self._recorder.seen(step)

    def on_step(self, loop, state, metrics):
        assert self._recorder is not None  # on_start
        if self._recorder.ends_at(loop.step):
            jax.block_until_ready(state)
            with loop.paused("profiling"):
                self._recorder.end()

    def close(self):
        if self._recorder is not None:
            self._recorder.close()
