"""Builds the shapes of a run's batches, and random batches, from synthetic documents: no corpus and no tokenizer."""

import itertools
from typing import Optional

import jax
import numpy as np

from pretrainax.config import Experiment
from pretrainax.data.batch import Example, HostBatch, Lengths
from pretrainax.data.collate import collate
from pretrainax.data.objectives import Objective, ObjectiveInput
from pretrainax.data.row_stream import text_lengths
from pretrainax.data.text_counts import TextCounter
from pretrainax.data.token_inputs import token_inputs, with_token_inputs
from pretrainax.tasks import Task
from pretrainax.tokenization.base import Tokenizer, Vocabulary
from pretrainax.training.train_step import global_shapes

_SPECIAL_TOKENS = ("pad", "bos", "eos", "unk", "cls", "sep", "mask")
_TEXT_TOKENS = 256  # one per byte


def batch_shapes(experiment: Experiment) -> dict[str, jax.ShapeDtypeStruct]:
    """Computes the shapes and dtypes of the arrays in a global batch, {name: [B, …]}.

    With length buckets, the shapes are those of the longest sequences. Names, dtypes and lengths come from one example
    per objective in `config.data.source`, which the objective builds from a document that fills a sequence. In a
    mixture, every sequence has the arrays of all objectives.
    """
    return global_shapes(_batch(experiment, 1)[0], experiment.train.global_batch_size)


def random_batches(experiment: Experiment, count: int, seed: int = 0) -> tuple[list[HostBatch], int]:
    """Builds batches of random documents, whose token frequencies follow Zipf's law, as in text.

    Returns:
      The batches, and the size of their vocabulary.
    """
    rng, rows = np.random.default_rng(seed), experiment.train.global_batch_size
    batches, sizes = zip(*(_batch(experiment, rows, rng) for _ in range(count)), strict=True)
    return list(batches), sizes[0]


def _batch(
    experiment: Experiment, rows: int, rng: Optional[np.random.Generator] = None
) -> tuple[dict[str, np.ndarray], int]:
    """Builds a batch and returns it with the size of the vocabulary; if `rng` is None, all its tokens are equal."""
    length = experiment.data.sequence_length
    tokenizer = _ByteTokenizer(sentinels=length)  # an example has fewer spans than tokens
    bound_objective = experiment.objective.adapted(experiment).bind(tokenizer)
    objectives = [
        component
        for source in experiment.data.source.components()
        for _, component in bound_objective.components(source.pairs)
    ]
    max_lengths = Lengths(*np.max([objective.lengths(length) for objective in objectives], axis=0).tolist())
    counter = TextCounter(
        tokenizer.text_table, 1.0, tokenizer.vocabulary, with_target_bytes=experiment.objective.is_likelihood
    )
    inputs = token_inputs(experiment.model, tokenizer)
    raw_examples = (
        _example(objective, objective.lengths(length), tokenizer.vocabulary, counter, rng)
        for objective in itertools.islice(itertools.cycle(objectives), max(rows, len(objectives)))
    )
    examples = [with_token_inputs(example, inputs) for example in raw_examples]
    template = {name: array for example in examples for name, array in example.items()}
    template |= text_lengths(objectives, experiment.data.packing, template)
    batch = collate([[example] for example in examples[:rows]], max_lengths, tokenizer.vocabulary.pad, template)
    return batch, tokenizer.vocabulary.size


class _ByteTokenizer(Tokenizer):
    """A byte tokenizer that has every special token an objective may need.

    The token ids are: special tokens, then sentinels, then one id per byte.
    """

    def __init__(self, sentinels: int):
        self._first = len(_SPECIAL_TOKENS) + sentinels
        special_ids = {name: i for i, name in enumerate(_SPECIAL_TOKENS)}
        vocabulary = Vocabulary(
            self._first + _TEXT_TOKENS, **special_ids, sentinels=tuple(range(len(_SPECIAL_TOKENS), self._first))
        )
        super().__init__(bytes(range(256)), vocabulary, {i: f"<{i}>" for i in range(self._first)})

    def _encode_batch(self, texts):
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) + self._first for text in texts]

    def spellings(self):
        return [b""] * self._first + [bytes([byte]) for byte in range(256)]


def _example(
    objective: Objective,
    lengths: Lengths,
    vocabulary: Vocabulary,
    counter: TextCounter,
    rng: Optional[np.random.Generator],
) -> Example:
    """Builds an example of an objective from one synthetic document of the maximum length."""
    source, _ = objective.max_pair_lengths(lengths) if objective.unit == "pairs" else (lengths.raw // 2, None)
    tokens = np.full(lengths.raw, vocabulary.size - 1, np.int32)
    if rng is not None:
        frequencies = 1 / np.arange(1.0, _TEXT_TOKENS + 1)
        tokens -= rng.choice(_TEXT_TOKENS, lengths.raw, p=frequencies / frequencies.sum()).astype(np.int32)
    boundaries, note = np.array([source, len(tokens)]), None  # ends of two sentences, or of source and target
    if isinstance(objective, Task):
        boundaries, note = (
            np.arange(1, objective.max_texts + 1) * lengths.raw // objective.max_texts,
            objective.sample_note(),
        )
    text = ObjectiveInput(tokens, np.ones_like(tokens), boundaries, draw_other_document=lambda rng: text, note=note)
    return counter.add_counts(objective.example(text, rng or np.random.default_rng(0), vocabulary), tokens)
