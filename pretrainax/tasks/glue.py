"""Defines the named tasks of GLUE (Wang et al. 2018, arXiv 1804.07461): fields, labels, source, size and metric."""

from typing import NamedTuple

from pretrainax.data.sources import HuggingFace
from pretrainax.tasks.base import Task
from pretrainax.tasks.classification import Classification
from pretrainax.tasks.regression import Regression


class NamedTask(NamedTuple):
    """A task together with its dataset."""

    task: Task
    source: HuggingFace
    examples: int  # number of examples in the training split
    select_by: str  # metric for the selection of the best checkpoint, the official metric; "": the default of the task
    tfds: str = ""  # the name of the dataset in TFDS, with the same fields and labels; "": not in TFDS
    length: int = 128  # number of tokens per row, if the model supports it


def _glue(name: str, fields: str, labels: str, examples: int, select_by: str, valid: str = "validation") -> NamedTask:
    """Builds a GLUE task with its dataset.

    Args:
      name: name of the task in GLUE.
      fields: the field of the text, or the two fields of a text pair, separated by a space.
      labels: names of the classes in the order of their numbers, separated by spaces. If "", the task is regression
        from 0 to 5.
      examples: number of training examples.
      select_by: the official metric.
      valid: name of the validation split.
    """
    first, *second = fields.split()
    texts = {"text_field": first, "pair_field": second[0] if second else None}
    task = Classification(**texts, labels=tuple(labels.split())) if labels else Regression(**texts, low=0.0, high=5.0)
    source = HuggingFace(path="nyu-mll/glue", name=name, valid_split=valid)
    return NamedTask(task, source, examples, select_by, tfds=f"glue/{name}")


TASKS = {
    "cola": _glue("cola", "sentence", "unacceptable acceptable", 8_551, "matthews"),
    "sst2": _glue("sst2", "sentence", "negative positive", 67_349, "accuracy"),
    "mrpc": _glue("mrpc", "sentence1 sentence2", "not_equivalent equivalent", 3_668, "accuracy_f1"),
    "stsb": _glue("stsb", "sentence1 sentence2", "", 5_749, "pearson_spearman"),
    "qqp": _glue("qqp", "question1 question2", "not_duplicate duplicate", 363_846, "accuracy_f1"),
    "mnli": _glue(
        "mnli", "premise hypothesis", "entailment neutral contradiction", 392_702, "accuracy", "validation_matched"
    ),
    "qnli": _glue("qnli", "question sentence", "entailment not_entailment", 104_743, "accuracy"),
    "rte": _glue("rte", "sentence1 sentence2", "entailment not_entailment", 2_490, "accuracy"),
    "wnli": _glue("wnli", "sentence1 sentence2", "not_entailment entailment", 635, "accuracy"),
}
