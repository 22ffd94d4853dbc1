"""Distillation: trains a student on the outputs and hidden states of a teacher."""

from pretrainax.distill.distillation import DistilBERT, Distillation, MiniLM, TinyBERT
from pretrainax.distill.distilled import MAPS, TEACHER, Compared, Distilled

__all__ = ["MAPS", "TEACHER", "Compared", "DistilBERT", "Distillation", "Distilled", "MiniLM", "TinyBERT"]
