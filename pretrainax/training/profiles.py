"""The profiles of a run: who asks for them beside its config, and who reads them."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, Optional

from pretrainax.runtime.profile_request import ProfileRequest
from pretrainax.runtime.recorder import Recorder
from pretrainax.training.metrics_writer import MetricsWriter
from pretrainax.training.setup import Run


class Profiling(NamedTuple):
    """Says who asks for profiles beside the config, and who reads them."""

    request: ProfileRequest
    report: Callable[[Run, str], str]  # (run, path of a trace) -> what it says


@contextlib.contextmanager
def recorder_of(run: Run, writer: MetricsWriter, first: int, profiling: Optional[Profiling]) -> Iterator[Recorder]:
    """Yields what writes the profiles of a start; closes it.

    Args:
      first: step of the start.
      profiling: None: the config alone asks for profiles, and nobody reads them.
    """
    train = run.experiment.train
    request, report = profiling or (ProfileRequest(), None)
    report = report and functools.partial(report, run)
    recorder = Recorder(writer.workdir, train.profiled, first, train.steps, request, report, writer.note)
    try:
        yield recorder
    finally:
        recorder.close()
