"""Parameter-efficient tuning: low-rank updates, rescaling vectors, biases, task heads, prompts and prefixes."""

from pretrainax.adapt.adapted import FROZEN, Adapted
from pretrainax.adapt.lora import LoRA
from pretrainax.adapt.parts import BitFit, HeadAlone
from pretrainax.adapt.rescaling import IA3
from pretrainax.adapt.tuning import Tuning
from pretrainax.adapt.virtual_tokens import PrefixTuning, PromptTuning

__all__ = [
    "FROZEN",
    "IA3",
    "Adapted",
    "BitFit",
    "HeadAlone",
    "LoRA",
    "PrefixTuning",
    "PromptTuning",
    "Tuning",
]
