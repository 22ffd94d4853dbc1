"""Adaptations convert the parameters of a trained model to a model of a different family or shape.

Each adaptation defines, for each parameter of the new model, the rule that creates it.
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
    """Finds the adaptations that convert `theirs` to `ours`; returns [] if any of `fields` cannot be converted.

    Args:
      theirs: config of the trained model.
      ours: config of the new model.
      fields: names of the differing fields of ModelConfig.
    """
    adaptations = [
        adaptation()
        for adaptation in _KINDS
        if adaptation.target_family in (None, ours.family) and set(adaptation.fields) & set(fields)
    ]
    convertible_fields = {
        field
        for adaptation in adaptations
        if not list(adaptation.mismatches(ours, theirs))
        for field in adaptation.fields
    }
    return adaptations if set(fields) <= convertible_fields else []


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
