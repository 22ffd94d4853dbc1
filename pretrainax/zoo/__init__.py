"""Published architectures: rows of data, one file a family, with its Hugging Face name table.

zoo.preset("bert_base"), zoo.preset("t5_v1_0_small"), zoo.preset("gpt2_124m"), zoo.preset("llama3_8b")
"""

import importlib
import importlib.util

from pretrainax.config import ModelConfig, UserError, nearest
from pretrainax.zoo.family import Family

_MODULES = ("transformer bert roberta albert electra deberta modernbert t5 bart gpt llama mistral qwen gemma").split()

FAMILIES: tuple[Family, ...] = tuple(
    family
    for module in _MODULES
    if importlib.util.find_spec(f"pretrainax.zoo.{module}")
    for family in getattr(importlib.import_module(f"pretrainax.zoo.{module}"), "FAMILIES", ())
)

# "bert_base" -> family and variant
PRESETS: dict[str, tuple[Family, str]] = {
    family.prefix + variant: (family, variant) for family in FAMILIES for variant in family.sizes
}


def preset(name: str) -> ModelConfig:
    """A fresh config of a published model; UserError with the nearest names where there is none."""
    if name not in PRESETS:
        raise UserError(f"the zoo has no model {name!r}, {nearest(name, PRESETS)}")
    family, variant = PRESETS[name]
    return family.preset(variant)
