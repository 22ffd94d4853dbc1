"""Checks that token ids mean the same in a run and in its start or teacher."""

import dataclasses
import os

from pretrainax.config import UserError
from pretrainax.interop.origin import Origin
from pretrainax.tokenization.base import Tokenizer, load_tokenizer
from pretrainax.tokenization.huggingface import read_tokenizer, tokenizer_file


def check_tokenizer_of(origin: Origin, ours: Tokenizer, name: str, may_grow: bool = False) -> None:
    """Raises UserError unless each id has the same text and role in `ours` and in the tokenizer of `origin`.

    Args:
      name: role of the model in messages, such as "the teacher".
      may_grow: `ours` may have further ids at the end, also for roles that the other tokenizer lacks.
    """
    folder = os.path.join(origin.directory, "tokenizer") if origin.steps else origin.directory
    theirs = load_tokenizer(folder) if origin.steps else read_tokenizer(folder)
    if theirs.fingerprint == ours.fingerprint:
        return
    is_same = (theirs.vocabulary, theirs.spellings()) == (ours.vocabulary, ours.spellings())
    if not is_same and not (may_grow and _extends(ours, theirs)):
        raise UserError(
            f"{name} {origin.description} has another tokenizer ({theirs.vocabulary.size:,} ids, here "
            f"{ours.vocabulary.size:,}; ids must have the same meaning in both): set "
            f"config.tokenizer=\"PretrainedTokenizer(path='{folder}')\""
        )


def _extends(ours: Tokenizer, theirs: Tokenizer) -> bool:
    """Returns True if `ours` only adds ids to `theirs`."""
    known = theirs.vocabulary
    roles = {name: i for name, i in dataclasses.asdict(known).items() if isinstance(i, int) and name != "size"}
    same_roles = all(getattr(ours.vocabulary, name) == i for name, i in roles.items())
    same_sentinels = ours.vocabulary.sentinels[: len(known.sentinels)] == known.sentinels
    return same_roles and same_sentinels and ours.spellings()[: known.size] == theirs.spellings()


def has_tokenizer(origin: Origin) -> bool:
    """Returns True if a model has a tokenizer; a directory of weights alone does not define the meaning of ids."""
    if origin.steps:
        return os.path.isdir(os.path.join(origin.directory, "tokenizer"))
    try:
        return bool(tokenizer_file(origin.directory))
    except UserError:
        return False
