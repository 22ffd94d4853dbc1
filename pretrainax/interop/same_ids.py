"""Tells whether an id means the same to a model that is there, a start or a teacher, as to the run that takes it up."""

import os

from pretrainax.config import UserError
from pretrainax.interop.origin import Origin
from pretrainax.tokenization.base import Tokenizer, load_tokenizer
from pretrainax.tokenization.huggingface import read_tokenizer, tokenizer_file


def check_tokenizer_of(origin: Origin, ours: Tokenizer, name: str) -> None:
    """Raises a UserError unless each id of `ours` is that of the same piece there, in the same role.

    Args:
      name: of what the model is to the run, as "the teacher".
    """
    folder = os.path.join(origin.directory, "tokenizer") if origin.steps else origin.directory
    theirs = load_tokenizer(folder) if origin.steps else read_tokenizer(folder)
    if theirs.fingerprint == ours.fingerprint:
        return
    if (theirs.vocabulary, theirs.spellings()) != (ours.vocabulary, ours.spellings()):
        raise UserError(
            f"{name} {origin.description} has another tokenizer ({theirs.vocabulary.size:,} ids, here "
            f"{ours.vocabulary.size:,}; the same id is to mean the same to both): set "
            f"config.tokenizer=\"PretrainedTokenizer(path='{folder}')\""
        )


def has_tokenizer(origin: Origin) -> bool:
    """Tells whether a tokenizer lies with a model: of a directory of weights alone nobody knows what ids mean."""
    if origin.steps:
        return os.path.isdir(os.path.join(origin.directory, "tokenizer"))
    try:
        return bool(tokenizer_file(origin.directory))
    except UserError:
        return False
