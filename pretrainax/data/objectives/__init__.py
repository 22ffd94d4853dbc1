"""What a model is asked to predict: each objective turns a window of token ids into an example of arrays.

NumPy only: loader workers never load JAX.
"""

from pretrainax.data.objectives.base import Lengths, Objective, Statistic, Text
from pretrainax.data.objectives.causal import CausalLM
from pretrainax.data.objectives.masked import MaskedLM
from pretrainax.data.objectives.spans import SpanCorruption

__all__ = ["CausalLM", "Lengths", "MaskedLM", "Objective", "SpanCorruption", "Statistic", "Text"]
