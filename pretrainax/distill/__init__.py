"""Trains a student to be like a teacher: in what it says, and in what it computes on the way."""

from pretrainax.distill.distillation import DistilBERT, Distillation, MiniLM, TinyBERT
from pretrainax.distill.distilled import MAPS, TEACHER, Compared, Distilled

__all__ = ["MAPS", "TEACHER", "Compared", "DistilBERT", "Distillation", "Distilled", "MiniLM", "TinyBERT"]
