"""Small models with the head of a task: Hugging Face directories of them."""

import dataclasses
import json
import pathlib

from pretrainax.zoo.family import without_heads
from tests.golden import CASES
from tests.golden.case import Case


def with_head(name: str, num_labels: int = 3, kind: str = "single", **fields) -> Case:
    """A case of the zoo with the head of its class."""
    case = CASES[name]
    head = dataclasses.replace(case.family.huggingface.classifier.head, num_labels=num_labels, kind=kind, **fields)
    return Case(dataclasses.replace(without_heads(case.config), head=head), case.family, pad_id=case.pad_id)


def named_labels(directory: pathlib.Path, *names: str) -> None:
    """Names the labels of a Hugging Face directory."""
    described = json.loads((directory / "config.json").read_text())
    described["id2label"] = {str(i): name for i, name in enumerate(names)}
    (directory / "config.json").write_text(json.dumps(described))
