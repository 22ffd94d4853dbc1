"""Converts the keys of config.json that describe a task head: labels, problem type and dropout."""

import dataclasses
from typing import NamedTuple, Optional, TypeAlias

from pretrainax.config import Classify, Extract, Tag
from pretrainax.files.json_files import JsonObject

TaskHead: TypeAlias = Classify | Tag | Extract
_PROBLEM_TYPES = {
    "single": "single_label_classification",
    "multi": "multi_label_classification",
    "regression": "regression",
}


class HeadDropout(NamedTuple):
    """The key of config.json with the dropout rate before the layers of a task head."""

    key: str = "classifier_dropout"  # "": the class has no such key
    default: Optional[float] = None  # rate if the key is missing or null; None: the rate of the model

    def read(self, json: JsonObject) -> Optional[float]:
        """Returns the rate of the head; None means the rate of the model."""
        rate = json.get(self.key)
        return self.default if rate is None else rate

    def write(self, rate: Optional[float], model_rate: float) -> JsonObject:
        """Returns the key with the rate of the head, or {} if the class uses this rate without the key."""
        rate = model_rate if rate is None and self.default is not None else rate
        return {self.key: rate} if self.key and rate is not None else {}


def read_head(json: JsonObject, class_head: TaskHead, default_labels: int, dropout: HeadDropout) -> TaskHead:
    """Builds the config of the task head from config.json.

    The number of labels is `num_labels`, or the number of entries in id2label. For multiple choice, the labels are the
    choices, and their number does not affect the weights.

    Args:
      class_head: the default head config of the class that config.json names.
      default_labels: number of labels if config.json has neither key.
      dropout: the key of the head's dropout rate.
    """
    if (rate := dropout.read(json)) is not None:
        class_head = dataclasses.replace(class_head, dropout_rate=rate)
    labels = json.get("num_labels") or (default_labels if json.get("id2label") is None else len(json["id2label"]))
    if isinstance(class_head, Extract):
        return dataclasses.replace(class_head)
    if isinstance(class_head, Tag):
        return dataclasses.replace(class_head, num_labels=labels)
    kinds = {theirs: ours for ours, theirs in _PROBLEM_TYPES.items()}
    kind = kinds.get(json.get("problem_type"), "regression" if labels == 1 else "single")
    kind = "choice" if class_head.kind == "choice" else kind
    pooling = json.get("classifier_pooling", class_head.pooling)  # a key of ModernBERT
    return dataclasses.replace(class_head, num_labels=labels, kind=kind, pooling=pooling)


def default_label_names(count: int) -> list[str]:
    """Returns the names of labels in transformers if config.json does not name them: LABEL_0, LABEL_1, …"""
    return [f"LABEL_{i}" for i in range(count)]


def write_head(head: TaskHead, dropout: HeadDropout, model_rate: float) -> JsonObject:
    """Returns the config.json keys for a task head; the labels have transformers' default names.

    Args:
      dropout: the key of the head's dropout rate.
      model_rate: config.model.dropout_rate.
    """
    json = dropout.write(head.dropout_rate, model_rate)
    if isinstance(head, Extract):
        return json
    names = default_label_names(int(head.num_labels))
    json["id2label"] = {str(i): name for i, name in enumerate(names)}
    json["label2id"] = {name: i for i, name in enumerate(names)}
    if isinstance(head, Tag):
        return json
    pooling = {"classifier_pooling": head.pooling} if head.hidden_norm else {}
    return {**json, "problem_type": _PROBLEM_TYPES.get(head.kind), **pooling}
