"""The teacher of a run with `config.distill`: found by its name, held against the student, its tokenizer too."""

import os
from typing import Optional, cast

from pretrainax.config import Experiment, ModelConfig, UserError
from pretrainax.distill import Distillation
from pretrainax.interop.architectures import read_config_json
from pretrainax.interop.origin import Origin, find_origin
from pretrainax.interop.start import experiment_of, model_at
from pretrainax.interop.weights import label_names
from pretrainax.tokenization.base import Tokenizer, load_tokenizer
from pretrainax.tokenization.huggingface import read_tokenizer


def find_teacher(distillation: Distillation) -> Origin:
    """Returns what `config.distill.teacher` stands for; UserError where nothing is there that can be used."""
    try:
        return find_origin(os.path.expanduser(distillation.teacher))
    except UserError as e:
        raise UserError(f"config.distill.teacher: {e}") from e


def teacher_of(experiment: Experiment) -> Optional[ModelConfig]:
    """Returns the model of the teacher; no number of it is read. None: there is no teacher.

    Raises:
      UserError: it is not there, or the model of the config cannot learn from it.
    """
    if experiment.distill is None:
        return None
    distillation = cast(Distillation, experiment.distill)
    origin = find_teacher(distillation)
    teacher = model_at(origin)
    problems = list(distillation.teacher_problems(experiment.model, teacher))
    theirs, ours = _labels_of(origin), tuple(getattr(experiment.objective, "labels", ()))
    if not problems and distillation.soft and theirs and ours and theirs != ours:
        problems = [
            f"the teacher {origin.description} has the labels {theirs}, config.objective.labels is {ours}: set it"
        ]
    if problems:
        raise UserError("; ".join(problems))
    return teacher


def _labels_of(origin: Origin) -> tuple[str, ...]:
    """Returns the names of the answers of a task in their order; () where nobody has named them."""
    if origin.steps:
        return tuple(getattr(experiment_of(origin).objective, "labels", ()))
    names = label_names(read_config_json(origin.directory))
    return () if all(name == f"LABEL_{i}" for i, name in enumerate(names)) else names


def check_tokenizer_of(teacher: Origin, ours: Tokenizer) -> None:
    """Raises a UserError unless the ids of a student mean the same to its teacher."""
    folder = os.path.join(teacher.directory, "tokenizer") if teacher.steps else teacher.directory
    theirs = load_tokenizer(folder) if teacher.steps else read_tokenizer(folder)
    if theirs.fingerprint == ours.fingerprint:
        return
    if (theirs.vocabulary, theirs.spellings()) != (ours.vocabulary, ours.spellings()):
        raise UserError(
            f"the teacher {teacher.description} has another tokenizer ({theirs.vocabulary.size:,} ids, here "
            f"{ours.vocabulary.size:,}; the same id is to mean the same to both): set "
            f"config.tokenizer=\"PretrainedTokenizer(path='{folder}')\""
        )
