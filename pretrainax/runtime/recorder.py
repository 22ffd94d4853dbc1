"""Writes profiles of a run: what it does in a few steps, for xprof and Perfetto, and what memory holds, for pprof.

A profile is a folder below WORKDIR/profiles/plugins/profile, where xprof and TensorBoard look for it, named by its
first step. Each process that writes one has three files there:

    process_0.xplane.pb       the trace, with the compiled programs (xprof; pretrainax.profile)
    process_0.trace.json.gz   the same for ui.perfetto.dev
    process_0.memory.prof     the arrays on the devices when it ended, and who made them (pprof)

`config.train.profile_steps` asks all processes for one. SIGUSR1 asks the process that gets it, which needs none of the
others for that.
"""

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import NamedTuple, Optional

import jax

from pretrainax.runtime.profile_request import ProfileRequest
from pretrainax.storage.places import named

STEP = "train_step"  # what a trace calls a step
FOLDER = os.path.join("profiles", "plugins", "profile")  # in the workdir
ON_REQUEST = 3  # steps of a profile that a signal asks for


class Files(NamedTuple):
    """Names the files that a process writes of one profile."""

    trace: str
    perfetto: str
    memory: str


def files_of(directory: str, process: int) -> Files:
    """Returns the paths in the folder of a profile."""
    return Files(
        *(os.path.join(directory, f"process_{process}.{end}") for end in ("xplane.pb", "trace.json.gz", "memory.prof"))
    )


class Recorder:
    """Begins and ends the profiles of a start, between steps, when the devices have nothing to do.

    The step that a start begins with is compiled in it, and is in no profile.
    """

    def __init__(
        self,
        workdir: str,
        steps: range,
        first: int,
        last: int,
        request: ProfileRequest,
        report: Optional[Callable[[str], str]],
        note: Callable[[str], None],
    ):
        """
        Args:
          steps: that `train.profile_steps` asks for, empty for none.
          first, last: step of this start.
          report: tells what a trace, which is a file, says; None: nobody does.
          note: says a line for all processes.
        """
        self._workdir, self._first, self._last, self._request = workdir, first, last, request
        self._report, self._note = report, note
        self._asked = range(max(steps.start, first + 1), steps.stop)
        self._end = 0  # last step of the profile that is being written; 0: none is
        self._begun, self._seen = 0, 0  # its first step; the last one that was made
        self._traces = ""  # folder that the profiler writes to
        if steps and not self._asked:
            note(f"no profile of steps {_span(steps)}: this start makes steps {first} to {last}")
        elif len(self._asked) < len(steps):
            note(f"the profile is of steps {_span(self._asked)}: a start compiles in its first step, which is {first}")

    def begins_at(self, step: int) -> bool:
        """Returns True if a profile begins with the step that comes now."""
        if self._end or step == self._first:
            return False
        return self._request.requested or bool(self._asked) and step == self._asked[0]

    def begin(self, step: int) -> None:
        """Begins the profile of this step and those after it."""
        asked = bool(self._asked) and step == self._asked[0]
        end = self._asked[-1] if asked else min(step + ON_REQUEST - 1, self._last)
        self._asked = range(0) if asked else self._asked  # a rollback asks for no other
        with self._or_without("begun"):
            os.makedirs(parent := os.path.join(self._workdir, FOLDER), exist_ok=True)
            profiles = os.path.dirname(os.path.dirname(parent))
            self._traces = tempfile.mkdtemp(prefix=".tracing", dir=profiles)  # a name that no store is sent
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # each call of Python: most of a trace, and of its cost
            options.host_tracer_level = 1  # of XLA alone, which on a CPU has the kernels
            jax.profiler.start_trace(self._traces, create_perfetto_trace=True, profiler_options=options)
            self._begun, self._end = step, end
            self._request.refusal = f"the profile of steps {_span(range(step, end + 1))} is being written"
        self._request.requested = False

    def seen(self, step: int) -> None:
        """Takes note of the step that comes now."""
        self._seen = step

    def ends_at(self, step: int) -> bool:
        """Returns True if the profile that is being written ends with the step that was made."""
        return bool(self._end) and step >= self._end

    def end(self, report: bool = True) -> None:
        """Writes the files; process 0 says what they are, and what the trace says."""
        span, self._end, self._request.refusal = range(self._begun, self._seen + 1), 0, ""
        with self._or_without("written"):
            jax.profiler.stop_trace()
            directory = os.path.join(self._workdir, FOLDER, f"step_{self._begun}")
            files = files_of(directory, jax.process_index())
            os.makedirs(directory, exist_ok=True)
            for pattern, to in (("*.xplane.pb", files.trace), ("perfetto_trace.json.gz", files.perfetto)):
                (made,) = glob.glob(os.path.join(glob.escape(self._traces), "plugins", "profile", "*", pattern))
                os.replace(made, to)
            jax.profiler.save_device_memory_profile(files.memory)
            self._note(f"profile of steps {_span(span)}: {named(directory)} (docs/profiling.md says what opens it)")
            if report and self._report is not None and jax.process_index() == 0:
                self._note(self._report(files.trace))
        shutil.rmtree(self._traces, ignore_errors=True)

    def close(self) -> None:
        """Ends a profile that the run has left before its end; says that one was asked for too late."""
        if self._end:
            self.end(report=False)
        if self._request.requested:
            self._note("SIGUSR1: no step was left to write a profile of")
        self._request.requested, self._request.refusal = False, "the steps of the run are over, there is no profile"

    @contextlib.contextmanager
    def _or_without(self, what: str):
        """Says in a line what went wrong inside: a run does not end for its profile."""
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:
            self._note(f"no profile was {what}: {' '.join(f'{type(error).__name__}: {error}'.split())}")


def _span(steps: range) -> str:
    return f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else f"{steps[0]}"
