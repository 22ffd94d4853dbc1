"""Defines the pretraining objectives, each of which converts a sequence of token ids into a training example.

The package uses only NumPy, because loader workers never import JAX.
"""

from pretrainax.data.batch import Lengths
from pretrainax.data.objectives.base import Objective, ObjectiveInput, Statistic
from pretrainax.data.objectives.bidirectional import BidirectionalLM
from pretrainax.data.objectives.causal import CausalLM
from pretrainax.data.objectives.denoisers import UL2R, MixtureOfDenoisers, SequentialDenoising
from pretrainax.data.objectives.denoising import Denoising
from pretrainax.data.objectives.infilling import FillInTheMiddle
from pretrainax.data.objectives.masked import MaskedLM, RateChange
from pretrainax.data.objectives.masking_units import NGrams, Spans, Tokens, WholeWords
from pretrainax.data.objectives.mixture import ObjectiveMixture
from pretrainax.data.objectives.prefix import DecoderOnly, PrefixLM
from pretrainax.data.objectives.replaced import ReplacedTokenDetection
from pretrainax.data.objectives.sentence_pairs import NextSentencePrediction, SentenceOrderPrediction
from pretrainax.data.objectives.sequence_to_sequence import SequenceToSequence
from pretrainax.data.objectives.spans import SpanCorruption
from pretrainax.data.objectives.text_to_text import TextToText

__all__ = [
    "BidirectionalLM",
    "CausalLM",
    "DecoderOnly",
    "Denoising",
    "FillInTheMiddle",
    "Lengths",
    "MaskedLM",
    "MixtureOfDenoisers",
    "NGrams",
    "NextSentencePrediction",
    "Objective",
    "ObjectiveMixture",
    "PrefixLM",
    "RateChange",
    "ReplacedTokenDetection",
    "SentenceOrderPrediction",
    "SequenceToSequence",
    "SequentialDenoising",
    "SpanCorruption",
    "Spans",
    "Statistic",
    "ObjectiveInput",
    "TextToText",
    "Tokens",
    "UL2R",
    "WholeWords",
]
