"""Writes profiles of a run: a trace of a few steps for xprof and Perfetto, and the device memory for pprof.

A profile is a folder below WORKDIR/profiles/plugins/profile, where xprof and TensorBoard search for profiles. The name
of the folder contains the number of the first step of the profile, "step_1000". Each recorded process writes three
files into this folder:

    process_0.xplane.pb       the trace, with the compiled programs (xprof; pretrainax.profile)
    process_0.trace.json.gz   the trace for ui.perfetto.dev
    process_0.memory.prof     the device arrays at the end of the profile, and the code that allocated them (pprof)

`config.train.profile_steps` requests a profile from all processes. SIGUSR1 requests a profile only
from the process that receives the signal.
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
from pretrainax.storage.places import with_urls

STEP = "train_step"  # name of a training step in a trace
FOLDER = os.path.join("profiles", "plugins", "profile")  # folder of all profiles, below the workdir
ON_REQUEST = 3  # number of steps in a profile that a signal requests


class Files(NamedTuple):
    """Paths of the files that one process writes for a profile."""

    trace: str
    perfetto: str
    memory: str


def files_of(directory: str, process: int) -> Files:
    """Returns the paths of the files that process `process` writes into the profile folder `directory`."""
    return Files(
        *(os.path.join(directory, f"process_{process}.{end}") for end in ("xplane.pb", "trace.json.gz", "memory.prof"))
    )


class Recorder:
    """Starts and stops the profiles of a run between steps, when the devices are idle.

    A process's first step includes compilation, so it is never profiled.
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
        """Stores the settings, and logs which of the configured steps cannot be profiled.

        Args:
          steps: the steps in `train.profile_steps`, which may be empty.
          first, last: the first and last steps that this process trains.
          request: the handler of SIGUSR1.
          report: returns a summary, given the path of a trace file. If None, traces are not summarized.
          note: logs a line.
        """
        self._workdir, self._first, self._last, self._request = workdir, first, last, request
        self._report, self._note = report, note
        self._configured = range(max(steps.start, first + 1), steps.stop)
        self._end = 0  # last step of the current profile; 0: no profile is active
        self._start, self._current = 0, 0  # first step of the current profile; newest step of the run
        self._traces = ""  # temporary folder of the profiler
        if steps and not self._configured:
            note(f"no profile of steps {_span(steps)}: this start runs steps {first} to {last}")
        elif len(self._configured) < len(steps):
            note(f"profile limited to steps {_span(self._configured)}: the first step of this start, {first}, compiles")

    def begins_at(self, step: int) -> bool:
        """Returns True if a profile must begin before the next step, `step`."""
        if self._end or step == self._first:
            return False
        return self._request.requested or bool(self._configured) and step == self._configured[0]

    def begin(self, step: int) -> None:
        """Begins a profile whose first step is `step`."""
        is_configured = bool(self._configured) and step == self._configured[0]
        end = self._configured[-1] if is_configured else min(step + ON_REQUEST - 1, self._last)
        self._configured = range(0) if is_configured else self._configured  # a rollback must not repeat the profile
        with self._log_errors("begun"):
            os.makedirs(parent := os.path.join(self._workdir, FOLDER), exist_ok=True)
            profiles = os.path.dirname(os.path.dirname(parent))
            self._traces = tempfile.mkdtemp(prefix=".tracing", dir=profiles)  # files with this prefix are not uploaded
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # Python calls would be most of the trace and of its cost
            options.host_tracer_level = 1  # XLA only; on a CPU it includes the kernels
            jax.profiler.start_trace(self._traces, create_perfetto_trace=True, profiler_options=options)
            self._start, self._end = step, end
            self._request.refusal = f"the profile of steps {_span(range(step, end + 1))} is being written"
        self._request.requested = False

    def set_step(self, step: int) -> None:
        """Records the newest step, which the log line about an unfinished profile names."""
        self._current = step

    def ends_at(self, step: int) -> bool:
        """Returns True if a profile is active and must end now, after the finished step `step`."""
        return bool(self._end) and step >= self._end

    def end(self, report: bool = True) -> None:
        """Stops the active profile and writes its files.

        report: whether process 0 also logs a summary of the trace.
        """
        span, self._end, self._request.refusal = range(self._start, self._current + 1), 0, ""
        with self._log_errors("written"):
            jax.profiler.stop_trace()
            directory = os.path.join(self._workdir, FOLDER, f"step_{self._start}")
            files = files_of(directory, jax.process_index())
            os.makedirs(directory, exist_ok=True)
            for pattern, target in (("*.xplane.pb", files.trace), ("perfetto_trace.json.gz", files.perfetto)):
                (source,) = glob.glob(os.path.join(glob.escape(self._traces), "plugins", "profile", "*", pattern))
                os.replace(source, target)
            jax.profiler.save_device_memory_profile(files.memory)
            self._note(
                f"profile of steps {_span(span)}: {with_urls(directory)} (to open it, see docs/how-to/profile.md)"
            )
            if report and self._report is not None and jax.process_index() == 0:
                self._note(self._report(files.trace))
        shutil.rmtree(self._traces, ignore_errors=True)

    def close(self) -> None:
        """Ends an unfinished profile; logs any pending SIGUSR1 request as too late."""
        if self._end:
            self.end(report=False)
        if self._request.requested:
            self._note("SIGUSR1: no profile, the run has no more steps")
        self._request.requested, self._request.refusal = False, "no profile, the run has no more steps"

    @contextlib.contextmanager
    def _log_errors(self, what: str):
        """Suppresses errors inside the context and logs them in one line; a failed profile never ends the run.

        what: what failed, for the log line: "begun" or "written".
        """
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:
            self._note(f"no profile was {what}: {' '.join(f'{type(error).__name__}: {error}'.split())}")


def _span(steps: range) -> str:
    return f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else f"{steps[0]}"
