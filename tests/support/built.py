"""Builds runs on prepared data, as the commands do."""

from pretrainax.interop.run_start import TrainedStart
from pretrainax.runs.answer_writer import AnswerWriter, check_answers
from pretrainax.training import run


def build_run(experiment, prepared, mesh, peers):
    check_answers(experiment)
    return run.build_run(experiment, prepared, mesh, peers, TrainedStart(), AnswerWriter())
