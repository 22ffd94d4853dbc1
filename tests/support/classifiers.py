"""Defines small models with a task head, and names the labels in their Hugging Face directories."""

import dataclasses
import json
import pathlib

from pretrainax.config import Classify, HeadConfig
from pretrainax.zoo.family import without_heads
from tests.golden import CASES
from tests.golden.case import Case

CLASSIFY = Classify(num_labels=3, kind="single")


def with_head(name: str, head: HeadConfig = CLASSIFY) -> Case:
    """Returns a case of the zoo with the head of the matching class of transformers, of the kind and size of `head`."""
    case = CASES[name]
    found = case.family.huggingface.classifier_of(head)
    asked = {field: value for field, value in vars(head).items() if field in ("num_labels", "kind")}
    config = dataclasses.replace(without_heads(case.config), head=dataclasses.replace(found.head, **asked))
    config.family = found.family or config.family
    return Case(config, case.family, pad_id=case.pad_id)


def named_labels(directory: pathlib.Path, *names: str) -> None:
    """Writes the names of the labels to a Hugging Face directory."""
    described = json.loads((directory / "config.json").read_text())
    described["id2label"] = {str(i): name for i, name in enumerate(names)}
    (directory / "config.json").write_text(json.dumps(described))
