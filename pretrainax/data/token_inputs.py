"""Defines additional model inputs that are looked up by token id (for example ELMo's characters of a word)."""

from collections.abc import Callable, Mapping

import numpy as np

from pretrainax.config import ModelConfig
from pretrainax.config.kinds import ModelPart
from pretrainax.tokenization.base import Tokenizer

MakeTable = Callable[[Tokenizer], np.ndarray]
_TABLES: list[tuple[type[ModelPart], str, MakeTable]] = []


def register_token_input(part: type[ModelPart], name: str) -> Callable[[MakeTable], MakeTable]:
    """Returns a decorator that registers a token input for all models that contain the part `part`.

    The decorated function returns the table [V, …] of the input.

    name: name of the input in a batch.
    """

    def register(make: MakeTable) -> MakeTable:
        _TABLES.append((part, name, make))
        return make

    return register


def token_inputs(model: ModelConfig, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """Returns the lookup table [V, …] of each of a model's token inputs, by name in a batch; {} for most models."""
    return {name: make(tokenizer) for part, name, make in _TABLES if model.part(part) is not None}


def with_token_inputs(batch: Mapping[str, np.ndarray], tables: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns an example or a batch with all missing token inputs added, each int32 [B, T, …]."""
    missing = {name: table for name, table in tables.items() if name not in batch}
    return {**batch, **{name: table[batch["tokens"]].astype(np.int32) for name, table in missing.items()}}
