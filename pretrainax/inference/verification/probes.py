"""Builds the inputs for the comparison of a model's outputs: rows of probe text, and rows of ids of the vocabulary."""

from collections.abc import Iterator

import numpy as np

from pretrainax.config import Classify, Extract
from pretrainax.data.batch import Example
from pretrainax.data.framing import special_token_frame
from pretrainax.data.objectives.spans import encoder_decoder_prompt
from pretrainax.inference.verification.subject import Subject
from pretrainax.tasks.base import Task, concatenate_segments

PROMPTS = ("The cat sat on the mat.", "1, 2, 3,", "def f(x):")
_LENGTH = 32  # maximum tokens of a row
_ROWS = 8  # maximum rows of ids of the vocabulary
_MAX_LOGITS = 64_000_000  # maximum elements of an array of logits, 256 MB


def probe_examples(subject: Subject) -> list[Example]:
    """Returns the model inputs without padding, each of at most 32 tokens.

    The first rows are text. The other rows contain ids that are evenly spaced over the vocabulary, so that the
    comparison finds a difference in the embedding of any id of a small vocabulary.
    """
    model = subject.model
    length = min(_LENGTH, subject.max_length or _LENGTH)
    rows = [ids for ids in subject.tokenizer.encode_batch([*PROMPTS]) if len(ids)]
    rows += _vocabulary_rows(subject, length)
    rows = rows[: max(2, _MAX_LOGITS // (model.vocab_size * length))]
    return [_example(subject, ids, length, number) for number, ids in enumerate(rows)]


def _vocabulary_rows(subject: Subject, length: int) -> Iterator[np.ndarray]:
    """Yields rows of ids without special ids, in random order and of different lengths."""
    vocabulary = subject.tokenizer.vocabulary
    ids = np.setdiff1d(np.arange(vocabulary.size), [*vocabulary.special_ids])
    size = max(length - 4, 1)  # room for special tokens
    ids = ids[np.linspace(0, len(ids) - 1, min(len(ids), _ROWS * size)).astype(int)] if len(ids) else ids
    ids = np.random.default_rng(0).permutation(ids).astype(np.int32)
    yield from np.split(ids, range(size, len(ids), size)) if len(ids) else ()


def _example(subject: Subject, ids: np.ndarray, length: int, number: int) -> Example:
    """Builds the model input of a row; if the model reads pairs of text, rows with odd numbers are pairs."""
    model, vocabulary = subject.model, subject.tokenizer.vocabulary
    frame = special_token_frame(model.family, vocabulary)
    is_choice = isinstance(model.head, Classify) and model.head.kind == "choice"
    reads_pairs = frame.pair is not None and (model.family == "encoder" or isinstance(model.head, Extract))
    is_pair = reads_pairs and (number % 2 == 1 or isinstance(model.head, Extract) or is_choice)
    ids = ids[: length - frame.count(2 if is_pair else 1)]
    texts = [ids[: (cut := max(len(ids) // 3, 1))], ids[cut:]] if is_pair else [ids]
    task = subject.experiment.objective
    if isinstance(task, Task):
        task = task.adapted(subject.experiment).bind(subject.tokenizer)
        example = task.framed(texts, vocabulary, length)
        if model.reads_question:
            question = np.arange(len(example["tokens"])) < len(frame.row(2).before) + len(texts[0])
            example["question"] = question.astype(np.int32)
        if is_choice:
            other = task.framed([texts[0], texts[-1][::-1]], vocabulary, length)
            labels = int(model.head.num_labels) if isinstance(model.head, Classify) else 1
            return concatenate_segments([example, *[other] * (labels - 1)])
        return example
    row, types = frame.wrap(texts)
    if model.family == "encoder_decoder":
        decoder_ids = np.append([subject.decoder_start], ids[::-1][: length - 1]).astype(np.int32)
        return encoder_decoder_prompt(row, subject.decoder_start) | _document(decoder_ids)
    example = _document(row)
    if model.num_token_types:
        example["token_types"] = np.minimum(types, model.num_token_types - 1).astype(np.int32)
    return example


def _document(ids: np.ndarray) -> Example:
    """Returns the arrays of a row with a single document."""
    return {"tokens": ids, "segment_ids": np.ones_like(ids), "positions": np.arange(len(ids), dtype=np.int32)}
