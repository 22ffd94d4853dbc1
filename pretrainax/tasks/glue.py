"""The GLUE tasks by name (Wang et al. 2018, arXiv 1804.07461): fields, labels, source, size and metric."""

from typing import NamedTuple

from pretrainax.data.sources import HuggingFace
from pretrainax.tasks.base import Task
from pretrainax.tasks.classification import Classification
from pretrainax.tasks.regression import Regression


class NamedTask(NamedTuple):
    """A task together with its dataset."""

    task: Task
    source: HuggingFace
    examples: int  # in the training split
    select_by: str  # the official metric
    tfds: str = ""  # the name of the dataset in TFDS, with the same fields and labels
    length: int = 128  # tokens of a row


def _glue(name: str, fields: str, labels: str, examples: int, select_by: str, valid: str = "validation") -> NamedTask:
    """Returns a GLUE task; fields: of the text or the pair; labels: in order, "" for a number from 0 to 5."""
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
