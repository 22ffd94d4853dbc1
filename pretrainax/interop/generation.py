"""Reads the generation settings of a Hugging Face directory."""

import os
from typing import Optional

from pretrainax.config import UserError
from pretrainax.files.json_files import read_object
from pretrainax.interop.directories import GENERATION, ORIGINAL
from pretrainax.storage.store import print_message


def end_tokens(directory: str, rows: int) -> Optional[tuple[int, ...]]:
    """Reads the ids of the tokens that end a generated text, as transformers' generate() does.

    generation_config.json takes precedence over config.json. Both may list several ids, as chat models do:
    `"eos_token_id": [2, 11]`.

    Args:
      directory: a Hugging Face directory, or a workdir into which one was imported.
      rows: number of token ids of the model.

    Returns:
      The ids, without ids that the model lacks; None if no such id remains, or no file has `eos_token_id`.

    Raises:
      UserError: `eos_token_id` is neither an id nor a list of ids.
    """
    for folder in (os.path.join(directory, ORIGINAL), directory):
        for name in (GENERATION, "config.json"):
            path = os.path.join(folder, name)
            value = read_object(path).get("eos_token_id") if os.path.exists(path) else None
            if value is not None:
                ids = value if isinstance(value, list) else [value]
                if invalid := [i for i in ids if type(i) is not int or i < 0]:
                    raise UserError(f"{path}: eos_token_id has {invalid[0]!r}, it must be an id or a list of ids")
                if outside := [i for i in ids if i >= rows]:
                    print_message(f"{path}: eos_token_id {outside[0]} is ignored: the model has ids 0 to {rows - 1:,}")
                return tuple(dict.fromkeys(i for i in ids if i < rows)) or None
    return None
