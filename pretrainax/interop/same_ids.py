"""Checks that token ids mean the same in a run and in its start or teacher."""

import dataclasses
import os

from pretrainax.config import UserError
from pretrainax.interop.origin import Origin
from pretrainax.tokenization.base import Tokenizer, load_tokenizer
from pretrainax.tokenization.huggingface import read_tokenizer, tokenizer_file


def check_tokenizer_of(origin: Origin, ours: Tokenizer, name: str, may_grow: bool = False) -> None:
    """Raises a UserError unless each id of `ours` is that of the same piece there, in the same role.

    Args:
      name: of what the model is to the run, as "the teacher".
      may_grow: behind the ids that there are, `ours` may have others, in roles that there are none of.
    """
    folder = os.path.join(origin.directory, "tokenizer") if origin.steps else origin.directory
    theirs = load_tokenizer(folder) if origin.steps else read_tokenizer(folder)
    if theirs.fingerprint == ours.fingerprint:
        return
    same = (theirs.vocabulary, theirs.spellings()) == (ours.vocabulary, ours.spellings())
    if not same and not (may_grow and _extends(ours, theirs)):
        raise UserError(
            f"{name} {origin.description} has another tokenizer ({theirs.vocabulary.size:,} ids, here "
            f"{ours.vocabulary.size:,}; the same id is to mean the same to both): set "
            f"config.tokenizer=\"PretrainedTokenizer(path='{folder}')\""
        )


def _extends(ours: Tokenizer, theirs: Tokenizer) -> bool:
    """Returns True if ids of one tokenizer mean the same in another one that has more."""
    known = theirs.vocabulary
    roles = {name: i for name, i in dataclasses.asdict(known).items() if isinstance(i, int) and name != "size"}
    same_roles = all(getattr(ours.vocabulary, name) == i for name, i in roles.items())
    same_sentinels = ours.vocabulary.sentinels[: len(known.sentinels)] == known.sentinels
    return same_roles and same_sentinels and ours.spellings()[: known.size] == theirs.spellings()


def has_tokenizer(origin: Origin) -> bool:
    """Returns True if a tokenizer lies with a model: of a directory of weights alone nobody knows what ids mean."""
    if origin.steps:
        return os.path.isdir(os.path.join(origin.directory, "tokenizer"))
    try:
        return bool(tokenizer_file(origin.directory))
    except UserError:
        return False
