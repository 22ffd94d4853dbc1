"""Defines the named tasks of SuperGLUE (Wang et al. 2019, arXiv 1905.00537): fields, labels, source, size and metric.

The diagnostic datasets AX-b and AX-g are not included, because they have no training split.
"""

from pretrainax.data.sources import HuggingFace
from pretrainax.tasks.answer_judgement import AnswerJudgement
from pretrainax.tasks.base import Task
from pretrainax.tasks.classification import Classification
from pretrainax.tasks.entity_choice import EntityChoice
from pretrainax.tasks.glue import NamedTask
from pretrainax.tasks.marked_words import MarkedWords
from pretrainax.tasks.multiple_choice import MultipleChoice


def _superglue(name: str, task: Task, examples: int, select_by: str = "accuracy", length: int = 128) -> NamedTask:
    source = HuggingFace(path="aps/super_glue", name=name, valid_split="validation")
    return NamedTask(task, source, examples, select_by, tfds=f"super_glue/{name}", length=length)


def _pair(fields: str, labels: str) -> Classification:
    first, second = fields.split()
    return Classification(first, second, labels=tuple(labels.split()))


_WIC = MarkedWords(
    "sentence1", "sentence2", labels=("False", "True"), marks=("sentence1 start1 end1", "sentence2 start2 end2")
)
_WSC = MarkedWords(
    "text",
    labels=("False", "True"),
    marks=("text span1_index span1_text", "text span2_index span2_text"),
    position_unit="words",
)

TASKS = {
    "boolq": _superglue("boolq", _pair("passage question", "False True"), 9_427, length=256),
    "cb": _superglue(
        "cb", _pair("premise hypothesis", "entailment contradiction neutral"), 250, "accuracy_f1", length=256
    ),
    "copa": _superglue(
        "copa", MultipleChoice(("premise",), "question", ("choice1", "choice2"), "label", choices=2), 400
    ),
    "multirc": _superglue("multirc", AnswerJudgement(), 27_243, "f1", length=512),
    "record": _superglue("record", EntityChoice(), 100_730, "answer_f1", length=512),
    "superglue_rte": _superglue("rte", _pair("premise hypothesis", "entailment not_entailment"), 2_490),
    "wic": _superglue("wic", _WIC, 5_428),
    "wsc": _superglue("wsc.fixed", _WSC, 554),
}
