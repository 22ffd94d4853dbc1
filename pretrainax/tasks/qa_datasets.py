"""Defines named tasks for datasets of questions: SQuAD, RACE and SWAG.

SQuAD: Rajpurkar et al. 2016, arXiv 1606.05250, and 2018, 1806.03822. RACE: Lai et al. 2017, 1704.04683. SWAG: Zellers
et al. 2018, 1808.05326.

TFDS also has RACE (race/high), but a record of that dataset is a passage with all its questions, which
MultipleChoice cannot read. TFDS does not have SWAG.
"""

from pretrainax.data.sources import HuggingFace
from pretrainax.tasks.extractive_qa import ExtractiveQA
from pretrainax.tasks.glue import NamedTask
from pretrainax.tasks.multiple_choice import MultipleChoice


def _squad(name: str, tfds: str, examples: int) -> NamedTask:
    task = ExtractiveQA(no_answer=name == "squad_v2")
    source = HuggingFace(path=f"rajpurkar/{name}", valid_split="validation")
    return NamedTask(task, source, examples, "answer_f1", tfds, length=384)


def _race(name: str, examples: int) -> NamedTask:
    task = MultipleChoice(("article",), "question", ("options",), "answer")
    return NamedTask(task, _hub_source("ehovy/race", name), examples, "accuracy", length=512)


def _hub_source(path: str, name: str) -> HuggingFace:
    return HuggingFace(path=path, name=name, valid_split="validation")


TASKS = {
    "squad": _squad("squad", "squad/v1.1", 87_599),
    "squad_v2": _squad("squad_v2", "squad/v2.0", 130_319),
    "race": _race("all", 87_866),
    "race_middle": _race("middle", 25_421),
    "race_high": _race("high", 62_445),
    "swag": NamedTask(
        MultipleChoice(("sent1",), "sent2", ("ending0", "ending1", "ending2", "ending3"), "label"),
        _hub_source("allenai/swag", "regular"),
        73_546,
        "accuracy",
    ),
}
