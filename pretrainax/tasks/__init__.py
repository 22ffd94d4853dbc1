"""Tasks of fine-tuning: what is read of a record, which example it becomes, which head it needs, which figures it has.

A task is an objective over records, a file each. NumPy only: loader workers never load JAX.
"""

from pretrainax.tasks.base import Task, TextTask
from pretrainax.tasks.classification import Classification
from pretrainax.tasks.instructions import Instructions
from pretrainax.tasks.regression import Regression
from pretrainax.tasks.retrieval import Retrieval
from pretrainax.tasks.text_generation import TextGeneration
from pretrainax.tasks.writing import WritingTask

__all__ = [
    "Classification",
    "Instructions",
    "Regression",
    "Retrieval",
    "Task",
    "TextGeneration",
    "TextTask",
    "WritingTask",
]
