"""Published architectures: rows of data, one file a family, with its Hugging Face name table.

zoo.preset("bert_base"), zoo.preset("t5_v1_0_small"), zoo.preset("gpt2_124m"), zoo.preset("llama3_8b")
"""

from collections.abc import Callable

from pretrainax.config import ModelConfig
from pretrainax.zoo import bert, gpt, llama, t5
from pretrainax.zoo.variants import pick

_FAMILIES = (("bert_", bert.bert, bert), ("t5_", t5.t5, t5), ("gpt2_", gpt.gpt2, gpt), ("llama", llama.llama, llama))

# name -> function and variant
PRESETS: dict[str, tuple[Callable[[str], ModelConfig], str]] = {
    prefix + variant: (function, variant) for prefix, function, module in _FAMILIES for variant in module.SIZES
}


def preset(name: str) -> ModelConfig:
    """A fresh config of a published model; UserError with the nearest names where there is none."""
    function, variant = pick("the zoo", name, PRESETS)
    return function(variant)
