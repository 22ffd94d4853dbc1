"""Maps the parameters of a start to those of a model of another family or shape, each by a rule of its own."""

from pretrainax.interop.adaptations.base import Adaptation, Making, Way
from pretrainax.interop.adaptations.experts import DenseToExperts
from pretrainax.interop.adaptations.families import DecoderToEncoder, DecoderToEncoderDecoder
from pretrainax.interop.adaptations.layers import Layers
from pretrainax.interop.adaptations.tables import LongerContext, WiderVocabulary

__all__ = [
    "Adaptation",
    "DecoderToEncoder",
    "DecoderToEncoderDecoder",
    "DenseToExperts",
    "Layers",
    "LongerContext",
    "Making",
    "Way",
    "WiderVocabulary",
]
