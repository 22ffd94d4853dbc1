"""Finds the dropout rates of a config.json that this package does not use."""

import re
from collections.abc import Iterator

from pretrainax.config import ModelConfig
from pretrainax.zoo.family import ConfigJson, HuggingFace

_RATE = re.compile(r"\w*(dropout\w*|pdrop|layerdrop)")
_OF_EMBEDDINGS = re.compile(r"emb\w*drop\w*")  # here, embeddings have the rate of the sublayers
_OF_HEADS = re.compile(r"(classif|cls|pooler|qa|seq_classif|summary)\w*")  # config.json has them for all classes


def unused_rates(config_json: ConfigJson, family: HuggingFace) -> dict[str, float]:
    """Returns the dropout rates in `config_json` that do not affect the model config, by key."""
    rates = {key: x for key, x in config_json.items() if _RATE.fullmatch(key) and isinstance(x, (int, float))}
    read = lambda key, rate: family.read_config({**config_json, key: rate})  # noqa: E731
    return {key: x for key, x in rates.items() if read(key, 0.25) == read(key, 0.5)}


def rate_notes(config_json: ConfigJson, family: HuggingFace, model: ModelConfig) -> Iterator[str]:
    """Yields a message for each unused dropout rate that differs from the rate that `model` has instead."""
    for key, rate in unused_rates(config_json, family).items():
        if _OF_EMBEDDINGS.fullmatch(key):
            if rate != model.dropout_rate:
                yield f"{key} {rate} is not used: embeddings have config.model.dropout_rate {model.dropout_rate}"
        elif rate and not _OF_HEADS.fullmatch(key):
            yield f"{key} {rate} is not used: this package has no such dropout"
