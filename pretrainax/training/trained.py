"""The model of a run as it is trained: plain, under a tuning, or beside a teacher."""

import dataclasses
from typing import Optional, cast

from pretrainax import adapt, models
from pretrainax.config import Experiment, ModelConfig, TrainConfig
from pretrainax.distill import Distillation, Distilled
from pretrainax.interop.teacher import teacher_of
from pretrainax.layers.compute import compute_for


def trained_model(experiment: Experiment, train: TrainConfig, teacher: Optional[ModelConfig] = None) -> models.AnyModel:
    """Returns the model of a run as it is trained: plain, under a tuning, or beside a teacher.

    Args:
      train: as `for_this_machine` returns it.
      teacher: None: as `config.distill` names it.

    Raises:
      UserError: there is no such teacher, or one that this model cannot learn from.
    """
    compute = compute_for(train)
    if experiment.distill is None:
        return adapt.adapted(models.build(experiment.model, compute), experiment)
    distillation, teacher = cast(Distillation, experiment.distill), teacher or teacher_of(experiment)
    assert teacher is not None  # of a distillation there is one
    if distillation.attention:  # the logits are there in no other kernel
        compute = dataclasses.replace(compute, attention="xla")
    student, other = (cast(models.Model, models.build(model, compute)) for model in (experiment.model, teacher))
    return cast(models.AnyModel, Distilled(student, other, distillation, train.loss_chunk))


def plain(model: models.AnyModel) -> models.AnyModel:
    """Returns the model without its tuning or its teacher."""
    return cast(models.AnyModel, model.student) if isinstance(model, Distilled) else adapt.plain(model)
