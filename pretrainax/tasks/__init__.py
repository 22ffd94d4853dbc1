"""Defines fine-tuning tasks. A task converts records to examples, and defines a model head and metrics.

A task is an objective over records; each task has its own file. Tasks use NumPy and never JAX, so that the worker
processes that load data do not import JAX.
"""

from pretrainax.tasks.answer_judgement import AnswerJudgement
from pretrainax.tasks.base import Task, TextTask
from pretrainax.tasks.chunks import Chunks
from pretrainax.tasks.classification import Classification
from pretrainax.tasks.entity_choice import EntityChoice
from pretrainax.tasks.extractive_qa import ExtractiveQA
from pretrainax.tasks.instructions import Instructions
from pretrainax.tasks.marked_words import MarkedWords
from pretrainax.tasks.multiple_choice import MultipleChoice
from pretrainax.tasks.regression import Regression
from pretrainax.tasks.retrieval import Retrieval
from pretrainax.tasks.text_generation import TextGeneration
from pretrainax.tasks.token_classification import TokenClassification
from pretrainax.tasks.writing import WritingTask

__all__ = [
    "AnswerJudgement",
    "Chunks",
    "Classification",
    "EntityChoice",
    "ExtractiveQA",
    "Instructions",
    "MarkedWords",
    "MultipleChoice",
    "Regression",
    "Retrieval",
    "Task",
    "TextGeneration",
    "TextTask",
    "TokenClassification",
    "WritingTask",
]
