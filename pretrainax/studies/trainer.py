"""Trains the runs of a study one after the other in one process, with shared compiled programs."""

import copy

from pretrainax.config import Experiment
from pretrainax.config.validation import validate
from pretrainax.interop.run_start import TrainedStart
from pretrainax.planning.current_devices import ResolveRemat
from pretrainax.runs.answer_writer import AnswerWriter
from pretrainax.runs.health import Health
from pretrainax.runs.save_check import SaveCheck
from pretrainax.runs.validation_errors import ValidationErrors
from pretrainax.runtime import host
from pretrainax.runtime.shared_programs import Programs, sharing
from pretrainax.training.train import train


class Trainer:
    """Trains runs one after the other in this process.

    Runs share compiled programs if they differ only in data, seeds, lengths, schedules and the fields in
    `Optimizer.arguments`. The runs have no header, final table, plots and samples. Apart from times, metrics.jsonl and
    the checkpoints are bit-identical to the files of `pretrainax.main`, which may also resume a run of this class.
    """

    def __init__(self) -> None:
        host.tune_malloc()
        self._programs: Programs = Programs()

    def train(self, experiment: Experiment, workdir: str) -> int:
        """Starts or resumes a run, and returns the exit code: 0 at the end, 75 after a signal.

        After an exception, the next run can start in this process.

        Raises:
          UserError: the config or an input is invalid.
          RunFailed: the run failed, for example because its loss is not finite.
        """
        experiment, write = copy.deepcopy(experiment), AnswerWriter()  # the run completes its config
        validate(experiment)
        host.start_jax(experiment)
        callbacks = [ResolveRemat(), write, SaveCheck(), Health(), ValidationErrors()]
        with sharing(self._programs):
            return train(experiment, workdir, callbacks=callbacks, start=TrainedStart(), write=write)
