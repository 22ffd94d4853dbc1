"""Trains or opens a run with all features of the commands: header, samples, generated answers and export check."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Optional

from pretrainax.config import Experiment
from pretrainax.data.preparation.prepare import Prepared, prepare
from pretrainax.interop.run_start import TrainedStart
from pretrainax.runs import header
from pretrainax.runs.answer_writer import AnswerWriter, check_answers
from pretrainax.runs.export_check import ExportCheck
from pretrainax.runs.final_report import FinalReport
from pretrainax.runs.health import Health
from pretrainax.runs.samples import Samples
from pretrainax.runs.save_check import SaveCheck
from pretrainax.runs.task_evaluation import TaskEvaluation
from pretrainax.runs.validation_errors import ValidationErrors
from pretrainax.training import run
from pretrainax.training import train as training
from pretrainax.training.callbacks import Callback
from pretrainax.training.run import Run
from pretrainax.training.start import Start


def train(
    experiment: Experiment,
    workdir: str,
    process_age: float = 0.0,
    paper: header.Paper = header.UNKNOWN,
    extend: bool = False,
    callbacks: Sequence[Callback] = (),
    start: Optional[Start] = None,
) -> int:
    """Trains until the run ends or a signal arrives, and returns the exit code.

    The other arguments are as in `training.train.train`.

    Args:
      paper: information about the paper that the config reproduces, for the header.
      callbacks: additional callbacks, besides the callbacks of this module and of the config.
      start: builds and initializes the model. If None, `TrainedStart` does so as the config specifies.
    """
    write = AnswerWriter()
    called = [header.Header(paper), write, ExportCheck(), SaveCheck(), Health(), ValidationErrors()]
    called += [TaskEvaluation()] if experiment.evaluate.tasks else []
    called += [*callbacks, FinalReport(), Samples()]
    return training.train(experiment, workdir, process_age, extend, called, start or TrainedStart(), write)


@contextlib.contextmanager
def open_run(
    experiment: Experiment,
    prepare_data: Callable[[Experiment], Prepared] = prepare,
    start: Optional[Start] = None,
) -> Iterator[Run]:
    """Opens a run to give access to its data, model and validation.

    Args:
      prepare_data: prepares a config's data, as `prepare` does.
      start: builds and initializes the model. If None, `TrainedStart` does so as the config specifies.
    """
    check_answers(experiment)
    with run.open_run(experiment, prepare_data, start=start or TrainedStart(), write=AnswerWriter()) as opened:
        yield opened
