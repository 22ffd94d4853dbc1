"""Shared code of the masking tests: a tokenizer of numbers, and examples of it."""

import numpy as np
import pytest

from pretrainax.data.objectives import NGrams, ObjectiveInput, Spans, Tokens, WholeWords
from pretrainax.tokenization.base import Vocabulary

PAD, UNK, CLS, SEP, MASK = range(5)
SPECIAL = {PAD, UNK, CLS, SEP, MASK}
VOCABULARY = Vocabulary(size=1000, pad=PAD, unk=UNK, cls=CLS, sep=SEP, mask=MASK)
UNITS = [Tokens(), WholeWords(), NGrams(), Spans()]
of_each_unit = pytest.mark.parametrize("unit", UNITS, ids=lambda unit: type(unit).__name__)


class Numbers:
    """A tokenizer whose tokens are numbers; a multiple of 3 continues the word of the number before it."""

    vocabulary = VOCABULARY
    _ids = np.arange(VOCABULARY.size)
    word_edges = (_ids % 3 > 0) | (_ids < len(SPECIAL)), _ids < len(SPECIAL)


def text_of(tokens, progress=1.0):
    tokens = np.asarray(tokens, np.int32)
    return ObjectiveInput(tokens, np.ones(len(tokens), np.int32), progress=progress)


def example(objective, tokens, seed=0, progress=1.0):
    """Returns an example of an objective that reads word boundaries from `Numbers`."""
    return objective.bind(Numbers).example(text_of(tokens, progress), np.random.default_rng(seed), VOCABULARY)


def windows(count, length=510):
    return np.random.default_rng(7).integers(len(SPECIAL), VOCABULARY.size, (count, length), dtype=np.int32)


def examples(objective, rows):
    return [example(objective, row, seed) for seed, row in enumerate(rows)]


def statistics(objective, found):
    return {s.name: s for s in objective.bind(Numbers).statistics(found, VOCABULARY)}


def first_with(objective, tokens, places, tokenizer=Numbers, vocabulary=VOCABULARY):
    """Yields the examples, over many seeds, that predict exactly these positions of the row."""
    bound, text = objective.bind(tokenizer), text_of(tokens)
    found = (bound.example(text, np.random.default_rng(seed), vocabulary) for seed in range(20_000))
    return (row for row in found if row["masked_positions"].tolist() == places)
