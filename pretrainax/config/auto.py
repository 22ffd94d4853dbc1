"""Resolves the `auto` sizes in a config to numbers, after the tokenizer has been loaded."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Optional

from pretrainax.config.phases import phases_of
from pretrainax.files.errors import UserError

if TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment

AUTO = "auto"
Size = Annotated[int, AUTO]  # an integer, or 'auto' until `resolve_auto` replaces it
_MULTIPLE = 128  # width of the matrix unit of a TPU; most mesh sizes divide it


def follow_budget(experiment: "Experiment") -> None:
    """Lets the steps, the warmup and the intervals of validations and checkpoints follow from `config.train.budget`.

    `data.epochs.resolve_steps` computes them from epochs once the data is prepared, and `training.budget` from FLOPs or
    time once the model is built.
    """
    experiment.train.steps = experiment.evaluate.every = experiment.checkpoint.every = 0
    experiment.schedule.warmup_steps = AUTO  # pyright: ignore[reportAttributeAccessIssue]


def resolve_auto(experiment: "Experiment", ids: Optional[int]) -> None:
    """Sets the `auto` sizes of a config: the model's vocabulary size and the position encoding's `max_length`.

    The vocabulary size is the tokenizer's size, rounded up to a multiple of 128 as in T5. `max_length` is the length of
    the longest row in any phase or in validation.

    Args:
      experiment: the config; modified in place.
      ids: number of token ids in the tokenizer's vocabulary, or None if the tokenizer is not loaded.

    Raises:
      UserError: the model's vocabulary size is `auto`, but `ids` is None.
    """
    model = experiment.model
    if model.vocab_size == AUTO:
        if ids is None:
            raise UserError(
                "config.model.vocab_size is 'auto', which needs the vocabulary of config.tokenizer, and this command "
                "does not load it: give a number"
            )
        model.vocab_size = -(-ids // _MULTIPLE) * _MULTIPLE
    if model.position.max_length == AUTO:
        configs = [experiment, *(phase.experiment for phase in phases_of(experiment))]
        examples = [
            (objective, e.data.sequence_length) for e in configs for objective in (e.objective, e.validation_objective)
        ]
        longest = max(objective.max_positions(length) for objective, length in examples)
        model.position = dataclasses.replace(model.position, max_length=longest)
