"""Checks that token ids have the same meaning in a run and in its teacher or the model that initializes it."""

import os

from pretrainax.config import UserError
from pretrainax.interop.origin import Origin
from pretrainax.tokenization.base import Tokenizer, load_tokenizer
from pretrainax.tokenization.huggingface import FIELDS, read_tokenizer, tokenizer_file


def check_tokenizer_of(origin: Origin, ours: Tokenizer, name: str, may_grow: bool = False) -> None:
    """Raises UserError unless each token id has the same string and role in `ours` and in a trained model's tokenizer.

    A role is, for example, EOS or mask.

    Args:
      origin: location of the trained model.
      ours: tokenizer of the run.
      name: role of the trained model in messages, for example "the teacher".
      may_grow: whether `ours` may have additional ids after the ids of the trained model's tokenizer. The additional
        ids may have roles that the trained model's tokenizer lacks, for example a mask token.
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
    """Returns True if `ours` has all ids of `theirs` with the same strings and roles, followed by additional ids."""
    base = theirs.vocabulary
    roles = {name: i for name in FIELDS if (i := getattr(base, name)) is not None}
    same_roles = all(getattr(ours.vocabulary, name) == i for name, i in roles.items())
    same_sentinels = ours.vocabulary.sentinels[: len(base.sentinels)] == base.sentinels
    return same_roles and same_sentinels and ours.spellings()[: base.size] == theirs.spellings()


def has_tokenizer(origin: Origin) -> bool:
    """Returns True if the files of a trained model include a tokenizer."""
    if origin.steps:
        return os.path.isdir(os.path.join(origin.directory, "tokenizer"))
    try:
        return bool(tokenizer_file(origin.directory))
    except UserError:
        return False
