"""Sizes that the word `auto` leaves open until a tokenizer is there, and the numbers that they become."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Optional

from pretrainax.config.phases import phases_of
from pretrainax.files.errors import UserError

if TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment

AUTO = "auto"
Size = Annotated[int, AUTO]  # a whole number, or the word until `resolve_auto` puts a number in its place
_MULTIPLE = 128  # the width of a TPU's matrix unit, and what the parts of most meshes divide


def resolve_auto(experiment: "Experiment", ids: Optional[int]) -> None:
    """Puts numbers in the place of `auto`: rows of the embedding for all ids, positions for the longest row.

    The rows are rounded up to a multiple of 128, as those of T5 are.

    Args:
      ids: of the tokenizer; None where only the text, or a file, can tell how many there are.

    Raises:
      UserError: they are needed, and not known.
    """
    model = experiment.model
    if model.vocab_size == AUTO:
        if ids is None:
            raise UserError(
                "config.model.vocab_size is 'auto', and how many ids config.tokenizer has is known only once it has "
                "read its text or file, which nothing here does: give a number"
            )
        model.vocab_size = -(-ids // _MULTIPLE) * _MULTIPLE
    if model.position.max_length == AUTO:
        rows = [experiment, *(phase.experiment for phase in phases_of(experiment))]
        asked = [
            (objective, e.data.sequence_length) for e in rows for objective in (e.objective, e.validation_objective)
        ]
        longest = max(objective.places(length) for objective, length in asked)
        model.position = dataclasses.replace(model.position, max_length=longest)
