"""The base of the tokenizers that a config can choose: each either learns its vocabulary from text or reads one."""

import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Optional

from pretrainax.config import AUTO, Experiment, UserError, kinds, nearest
from pretrainax.files.paths import is_hub, is_url
from pretrainax.files.regular_files import read_bytes
from pretrainax.storage.places import here
from pretrainax.tokenization.base import DESCRIPTION, Tokenizer, load_tokenizer


def check_tokenizer(tokenizer: Tokenizer, experiment: Experiment) -> None:
    """Raises a UserError where the vocabulary does not fit the model or the objective."""
    size, rows = tokenizer.vocabulary.size, experiment.model.vocab_size
    if size > rows:
        raise UserError(f"the tokenizer has {size} ids, config.model.vocab_size is {rows}: it must be at least {size}")
    for objective in (experiment.objective, experiment.validation_objective):
        objective.check_vocabulary(tokenizer.vocabulary, experiment.data.sequence_length)


class TokenizerConfig(kinds.TokenizerConfig):
    """Base of the tokenizer choices."""

    kind: ClassVar[type[Tokenizer]]
    path: Optional[str]
    train_bytes: Optional[int]  # how much text `build` needs; None: all there is

    @property
    def size(self) -> Optional[int]:
        """Ids of a vocabulary trained from this config, special ones included; None: only the text can tell."""
        return None

    def build(self, texts: Iterator[str]) -> Tokenizer:
        """Learns a vocabulary from text."""
        raise NotImplementedError

    def load(self) -> Tokenizer:
        """Reads `path`: a directory that `Tokenizer.save` wrote, a model file, or a directory that holds one."""
        path = here(os.path.expanduser(self.path))
        if os.path.exists(os.path.join(path, DESCRIPTION)):
            tokenizer = load_tokenizer(path)
            if type(tokenizer) is not self.kind:
                raise UserError(f"config.tokenizer.path={self.path} is no {type(self).__name__} tokenizer")
            return tokenizer
        file = os.path.join(path, self.kind.file) if os.path.isdir(path) else path
        try:
            return self._read(read_bytes(file))
        except OSError as e:
            raise UserError(f"config.tokenizer.path={self.path}: cannot read {file} ({e.strerror})") from e
        except UserError:
            raise
        except Exception as e:  # what the libraries raise, and what follows from a value of a wrong type
            raise UserError(f"config.tokenizer.path={self.path}: {file} is damaged ({type(e).__name__}: {e})") from e

    def problems(self, experiment: Experiment) -> Iterator[str]:
        if self.path is not None:
            if not (is_url(self.path) or is_hub(self.path)) and not os.path.exists(os.path.expanduser(self.path)):
                yield f"config.tokenizer.path is {self.path!r}, which does not exist"
            return
        if self.train_bytes is not None and self.train_bytes < 1:
            yield f"config.tokenizer.train_bytes is {self.train_bytes}, it must be at least 1"
        rows = experiment.model.vocab_size
        if self.size is not None and rows != AUTO and self.size > rows:
            yield (
                f"config.model.vocab_size is {rows}, the tokenizer will have {self.size} ids: "
                "make it at least that, or config.tokenizer.vocab_size smaller"
            )

    def _read(self, model: bytes) -> Tokenizer:
        raise NotImplementedError


def special_piece_problems(config: Any, allowed: Mapping[str, Any]) -> Iterator[str]:
    """Yields the error lines of `num_sentinels` and `special_pieces`."""
    if config.num_sentinels < 0:
        yield f"config.tokenizer.num_sentinels is {config.num_sentinels}, it must be at least 0"
    if config.special_pieces not in allowed:
        yield f"config.tokenizer.special_pieces is {config.special_pieces!r}, {nearest(config.special_pieces, allowed)}"


def too_little_text(vocab_size: int, most: int) -> str:
    """Writes the error line of a text that has no more than `most` pieces."""
    return (
        f"config.tokenizer.vocab_size is {vocab_size}, this text is enough for {most} at most: "
        "set it lower, or give more text"
    )
