"""Distillation: trains a model (the student) on the outputs and hidden states of another model (the teacher)."""

from pretrainax.distill.distillation import DistilBERT, Distillation, MiniLM, TinyBERT
from pretrainax.distill.distilled import PROJECTIONS, TEACHER, Compared, Distilled

__all__ = ["PROJECTIONS", "TEACHER", "Compared", "DistilBERT", "Distillation", "Distilled", "MiniLM", "TinyBERT"]
