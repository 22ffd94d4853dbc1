"""Adaptations convert the parameters of a trained model to a model of a different family or shape.

Each adaptation has a rule for each parameter.
"""

from collections.abc import Iterable

from pretrainax.config import ModelConfig
from pretrainax.interop.adaptations.base import Adaptation, Operation, ParameterRule
from pretrainax.interop.adaptations.experts import DenseToExperts
from pretrainax.interop.adaptations.families import DecoderToEncoder, DecoderToEncoderDecoder
from pretrainax.interop.adaptations.layers import Layers
from pretrainax.interop.adaptations.sparse import FullToSparse
from pretrainax.interop.adaptations.tables import LongerContext, WiderVocabulary

_FAMILIES = (DecoderToEncoder, DecoderToEncoderDecoder)
_KINDS = (*_FAMILIES, DenseToExperts, Layers, WiderVocabulary, LongerContext, FullToSparse)


def suggested(theirs: ModelConfig, ours: ModelConfig, fields: Iterable[str]) -> list[Adaptation]:
    """Returns the adaptations that convert `theirs` to `ours`; [] if they cannot convert all differing fields.

    Args:
      fields: the fields of ModelConfig that differ.
    """
    kinds = [kind() for kind in _KINDS if kind.makes in (None, ours.family) and set(kind.fields) & set(fields)]
    changed = {field for kind in kinds if not list(kind.mismatches(ours, theirs)) for field in kind.fields}
    return kinds if set(fields) <= changed else []


__all__ = [
    "Adaptation",
    "DecoderToEncoder",
    "DecoderToEncoderDecoder",
    "DenseToExperts",
    "FullToSparse",
    "Layers",
    "LongerContext",
    "Operation",
    "ParameterRule",
    "WiderVocabulary",
    "suggested",
]
