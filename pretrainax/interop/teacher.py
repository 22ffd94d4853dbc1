"""Finds the teacher of a run with `config.distill`, and checks that the student can learn from this teacher."""

import os
from typing import Optional, cast

from pretrainax.config import Experiment, ModelConfig, UserError
from pretrainax.distill import Distillation
from pretrainax.interop.origin import Origin, find_origin
from pretrainax.interop.start import labels_of, model_at


def find_teacher(distillation: Distillation) -> Origin:
    """Resolves `config.distill.teacher` to the location of its parameters; raises UserError if it does not exist."""
    try:
        return find_origin(os.path.expanduser(distillation.teacher))
    except UserError as e:
        raise type(e)(f"config.distill.teacher: {e}") from e


def teacher_of(experiment: Experiment) -> Optional[ModelConfig]:
    """Returns the model config of the teacher, without reading its parameters, or None if `config.distill` is None.

    Raises:
      UserError: the teacher does not exist, or the student cannot learn from it.
    """
    if experiment.distill is None:
        return None
    distillation = cast(Distillation, experiment.distill)
    origin = find_teacher(distillation)
    teacher = model_at(origin)
    problems = list(distillation.teacher_problems(experiment.model, teacher))
    theirs, ours = labels_of(origin), tuple(getattr(experiment.objective, "labels", ()))
    if not problems and distillation.soft and theirs and ours and theirs != ours:
        problems = [
            f"the teacher {origin.description} has the labels {theirs}, config.objective.labels is {ours}: set it"
        ]
    if problems:
        raise UserError("; ".join(problems))
    return teacher
