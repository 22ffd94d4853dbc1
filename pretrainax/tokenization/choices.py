"""Defines the base class of tokenizer configs, which train a tokenizer on text or load a saved tokenizer."""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Optional

from pretrainax.config import AUTO, Experiment, UserError, kinds, nearest
from pretrainax.files.paths import is_hub, is_url
from pretrainax.files.regular_files import read_bytes
from pretrainax.storage.places import local_path
from pretrainax.tokenization.base import DESCRIPTION, Tokenizer, Vocabulary, check_no_run, load_tokenizer


def check_tokenizer(tokenizer: Tokenizer, experiment: Experiment) -> None:
    """Raises UserError if the vocabulary exceeds the model's or lacks special ids that an objective needs."""
    size, embedding_rows = tokenizer.vocabulary.size, experiment.model.vocab_size
    if size > embedding_rows:
        raise UserError(
            f"the tokenizer has {size} ids, config.model.vocab_size is {embedding_rows}: it must be at least {size}"
        )
    for problem in _missing_tokens(tokenizer.vocabulary, experiment):
        raise UserError(problem)


def _missing_tokens(vocabulary: Vocabulary, experiment: Experiment) -> Iterator[str]:
    """Yields an error message for each objective of a run that needs special ids which the vocabulary lacks."""
    for objective in (experiment.objective, experiment.evaluate.objective):
        try:
            if objective is not None:
                objective.check_vocabulary(vocabulary, experiment.data.sequence_length)
        except UserError as error:
            yield str(error)


class TokenizerConfig(kinds.TokenizerConfig):
    """Base class of tokenizer configs."""

    kind: ClassVar[type[Tokenizer]]  # class of the tokenizer that the config trains or loads
    path: Optional[str]  # a saved tokenizer to load; None: trains a tokenizer
    train_bytes: Optional[int]  # number of bytes of text for `build`; None: all text
    # Vocabulary field -> special piece of a trained tokenizer, in the order of the ids; empty: unknown before training
    specials: Mapping[str, str] = {}
    num_sentinels: int = 0

    @property
    def size(self) -> Optional[int]:
        """The trained tokenizer's number of ids, including special ids, or None if it depends on the training text."""
        return None

    def build(self, texts: Iterator[str]) -> Tokenizer:
        """Trains a tokenizer on documents; raises UserError if they have too little text."""
        raise NotImplementedError

    def load(self) -> Tokenizer:
        """Loads the tokenizer at `path`.

        `path` is a directory written by `Tokenizer.save`, a model file, or a directory that contains a model file.

        Raises:
          UserError: a file is missing or damaged, or contains a tokenizer of a different kind.
        """
        path = local_path(os.path.expanduser(self.path))
        if os.path.exists(os.path.join(path, DESCRIPTION)):
            tokenizer = load_tokenizer(path)
            if type(tokenizer) is not self.kind:
                raise UserError(f"config.tokenizer.path={self.path} is not a {type(self).__name__} tokenizer")
            return tokenizer
        check_no_run(path)
        file = os.path.join(path, self.kind.file) if os.path.isdir(path) else path
        try:
            return self._read(read_bytes(file))
        except OSError as e:
            raise UserError(f"config.tokenizer.path={self.path}: cannot read {file} ({e.strerror})") from e
        except UserError:
            raise
        except Exception as e:  # errors of the libraries, and errors from values of wrong types
            raise UserError(f"config.tokenizer.path={self.path}: {file} is damaged ({type(e).__name__}: {e})") from e

    def problems(self, experiment: Experiment) -> Iterator[str]:
        if self.path is not None:
            if not (is_url(self.path) or is_hub(self.path)) and not os.path.exists(os.path.expanduser(self.path)):
                yield f"config.tokenizer.path is {self.path!r}, which does not exist"
            return
        if self.train_bytes is not None and self.train_bytes < 1:
            yield f"config.tokenizer.train_bytes is {self.train_bytes}, it must be at least 1"
        embedding_rows = experiment.model.vocab_size
        if self.size is not None and embedding_rows != AUTO and self.size > embedding_rows:
            yield (
                f"config.model.vocab_size is {embedding_rows}, but the tokenizer will have {self.size} ids: "
                "increase it, or decrease config.tokenizer.vocab_size"
            )

    def vocabulary_problems(self, experiment):
        if self.path is not None or not self.specials:
            return
        ids = {field: i for i, field in enumerate(self.specials)}
        sentinels = tuple(len(ids) + i for i in range(self.num_sentinels))
        vocabulary = dataclasses.replace(Vocabulary(self.size or len(ids)), sentinels=sentinels, **ids)
        yield from _missing_tokens(vocabulary, experiment)

    def _read(self, model: bytes) -> Tokenizer:
        """Builds the tokenizer from the content of its model file."""
        raise NotImplementedError


def special_piece_problems(config: Any, allowed: Mapping[str, Any]) -> Iterator[str]:
    """Yields an error message for each invalid field among `num_sentinels` and `special_pieces`.

    Args:
      config: a tokenizer config that has both fields.
      allowed: a mapping whose keys are the valid values of `special_pieces`.
    """
    if config.num_sentinels < 0:
        yield f"config.tokenizer.num_sentinels is {config.num_sentinels}, it must be at least 0"
    if config.special_pieces not in allowed:
        yield f"config.tokenizer.special_pieces is {config.special_pieces!r}, {nearest(config.special_pieces, allowed)}"


def too_little_text(vocab_size: int, most: int) -> str:
    """Formats the error message for training text that is only sufficient for `most` pieces."""
    return (
        f"config.tokenizer.vocab_size is {vocab_size}, but this text is enough for at most {most}: "
        "set it lower, or provide more text"
    )
