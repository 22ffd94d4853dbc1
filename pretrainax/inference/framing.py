"""Puts around a text what stands there in training, so that a model is asked about what it knows."""

from typing import NamedTuple, Optional, TypeVar

import numpy as np

from pretrainax.config import UserError
from pretrainax.data.batch import Example
from pretrainax.data.objectives import Denoising, Objective
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.prompts import before_text

Kind = TypeVar("Kind", bound=Objective)


class Frame(NamedTuple):
    """The special tokens before and after a text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def frame_of(loaded: LoadedModel) -> Frame:
    """Returns what stands around a text that `loaded` reads: [CLS] and [SEP], the </s> of an encoder's text, what a
    decoder's prompts begin with."""
    vocabulary, family = loaded.tokenizer.vocabulary, loaded.experiment.model.family
    if family == "decoder":
        objective = loaded.experiment.objective.components()[0][1]
        before = before_text(loaded.experiment, objective, vocabulary, is_empty=False)
        return Frame(tuple(before.tolist()))
    bart = family == "encoder_decoder" and trained_by(loaded, Denoising)
    ids = {"encoder": (vocabulary.cls, vocabulary.sep)}.get(family, (vocabulary.bos if bart else None, vocabulary.eos))
    before, after = (() if i is None else (i,) for i in ids)
    return Frame(before, after)


def trained_by(loaded: LoadedModel, kind: type[Kind]) -> Optional[Kind]:
    """Returns the objective of this kind that the model was trained by, alone or in a mixture; None without one."""
    parts = (part for _, part in loaded.experiment.objective.components())
    return next((part for part in parts if isinstance(part, kind)), None)


def longest(loaded: LoadedModel) -> Optional[int]:
    """Returns how many tokens the model reads, special ones included; None where its positions set no limit."""
    return loaded.experiment.model.position.max_length


def check_length(
    loaded: LoadedModel, tokens: int, what: str, remedy: str = "shorten it", special: Optional[int] = None
) -> None:
    """Raises UserError where `what` has more tokens than the model reads, `special` ones included; None: its frame."""
    most = longest(loaded)
    if most is not None and tokens > most:
        special = sum(map(len, frame_of(loaded))) if special is None else special
        raise UserError(
            f"{what} is {tokens - special:,} tokens, {loaded.origin} reads at most {most - special:,}"
            + (f" and {special} special ones" if special else "")
            + f": {remedy}"
        )


def read_example(loaded: LoadedModel, tokens: np.ndarray) -> Example:
    """Returns the example of a row [n] that the model reads, or of two stacks its encoder."""
    side = "encoder_" if loaded.experiment.model.family == "encoder_decoder" else ""
    example = {
        f"{side}tokens": tokens.astype(np.int32),
        f"{side}segment_ids": np.ones(len(tokens), np.int32),
        f"{side}positions": np.arange(len(tokens), dtype=np.int32),
    }
    if loaded.experiment.model.num_token_types:
        example["token_types"] = np.zeros(len(tokens), np.int32)
    return example
