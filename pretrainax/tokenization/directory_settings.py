"""Reads the settings of a Hugging Face directory that do not affect the ids of a text."""

import os
import re
from typing import Optional

from pretrainax.config import UserError
from pretrainax.files.json_files import JsonObject, read_object

_LEFT_CLASSES = ("Llama", "CodeLlama", "Gemma")  # tokenizer classes of transformers that pad on the left by default
SIDES = {"padding_side": "padding", "truncation_side": "truncation"}  # field -> object of tokenizer.json


def read_json(directory: str, name: str) -> JsonObject:
    """Reads a JSON file from a directory; returns {} if the file does not exist."""
    path = os.path.join(directory, name)
    return read_object(path) if os.path.exists(path) else {}


def tokenizer_class(directory: str) -> str:
    """Returns a directory's transformers tokenizer class without "Tokenizer" and "Fast", for example "Bert".

    Returns "" if neither tokenizer_config.json nor config.json names the class.
    """
    files = ("tokenizer_config.json", "config.json")
    name = next(filter(None, (read_json(directory, name).get("tokenizer_class") for name in files)), "")
    return re.sub("Tokenizer(Fast)?$", "", str(name))


def decoder_start(directory: str) -> Optional[int]:
    """Reads the id of the first decoder token from a model's directory, as generate() of transformers does.

    generation_config.json takes precedence over config.json, and a file's `bos_token_id` replaces a missing
    `decoder_start_token_id` if the model is an encoder-decoder.

    Returns:
      The id, or None if neither file defines it.

    Raises:
      UserError: the value is not an id.
    """
    config = read_json(directory, "config.json")
    nested = next((config[key] for key in ("decoder", "text_config") if isinstance(config.get(key), dict)), {})
    names = ["decoder_start_token_id", *["bos_token_id"] * (config.get("is_encoder_decoder") is True)]
    for file, settings in (
        ("generation_config.json", [read_json(directory, "generation_config.json")]),
        ("config.json", [config, nested]),
    ):
        for name in names:
            if (start := next((x[name] for x in settings if x.get(name) is not None), None)) is not None:
                if type(start) is not int or start < 0:
                    raise UserError(f"{directory}/{file}: {name} is {start!r}, it must be the id of a token")
                return start
    return None


def left_sides(directory: str, class_name: Optional[str]) -> tuple[str, ...]:
    """Returns the fields of `SIDES` that are "left": transformers pads or truncates a text on its left.

    The default is "right". tokenizer_config.json takes precedence over tokenizer.json.

    Args:
      class_name: tokenizer class, as from `tokenizer_class`.
    """
    config, description = (read_json(directory, name) for name in ("tokenizer_config.json", "tokenizer.json"))
    defaults = {"padding_side": "Left"} if class_name in _LEFT_CLASSES else {}
    stored = {field: (description.get(name) or {}).get("direction") for field, name in SIDES.items()}
    sides = {field: config.get(field) or stored[field] or defaults.get(field) for field in SIDES}
    return tuple(field for field, side in sides.items() if side in ("left", "Left"))  # "Left" in tokenizer.json
