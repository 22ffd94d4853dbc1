"""Determines the model that an adapter changes: the base model, with the task head of the adapter's task."""

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

from pretrainax.config import Experiment, ModelConfig, UserError
from pretrainax.files.json_files import JsonObject
from pretrainax.interop.adapters.fields import CONFIG, is_known
from pretrainax.interop.adapters.modules import TheirModel
from pretrainax.interop.architectures import described_model, read_config_json
from pretrainax.interop.directories import describe_export, evaluation_of
from pretrainax.interop.origin import Origin
from pretrainax.interop.start import experiment_of
from pretrainax.interop.weights import label_names
from pretrainax.tokenization.base import Tokenizer, load_tokenizer
from pretrainax.tokenization.huggingface import read_tokenizer
from pretrainax.zoo.family import ConfigJson, HuggingFace, TaskClass, TaskHead

# task_type of PEFT -> attribute of HuggingFace with the class that has this task head.
_CLASSES = {
    "SEQ_CLS": "sequence_classification_class",
    "TOKEN_CLS": "token_classification_class",
    "QUESTION_ANS": "question_answering_class",
}
# Other values of task_type -> families of models; () allows all.
_FAMILIES = {"CAUSAL_LM": ("decoder",), "SEQ_2_SEQ_LM": ("encoder_decoder",), "FEATURE_EXTRACTION": (), None: ()}


class BaseModel(NamedTuple):
    """The model that an adapter changes."""

    experiment: Experiment  # config for the import, without `tuning`
    tokenizer: Tokenizer
    their: TheirModel


def read_base_model(origin: Origin, workdir: str, described: JsonObject, shapes: Mapping[str, tuple]) -> BaseModel:
    """Reads the config and the tokenizer of a base model, and adds the task head of an adapter.

    Args:
      origin: location of the base model.
      workdir: folder of the new run, which will contain the tokenizer.
      described: contents of adapter_config.json.
      shapes: shapes of the adapter's tensors by name.

    Raises:
      UserError: the base model has no class for the task of the adapter.
    """
    if origin.steps:
        tokenizer = load_tokenizer(os.path.join(origin.directory, "tokenizer"))
        experiment, labels = experiment_of(origin), ()
        family, config_json, _ = describe_export(experiment, tokenizer.vocabulary)
        model = experiment.model
    else:
        tokenizer, config_json = read_tokenizer(origin.directory), read_config_json(origin.directory)
        (family, model), experiment = described_model(config_json), None
        labels = label_names(config_json) if model.head is not None else ()
    classifier = _class_of_task(family, described)
    if classifier is not None:
        count = _num_labels(classifier, shapes)
        head = model.head
        if type(head) is not type(classifier.head) or count not in (None, getattr(head, "num_labels", None)):
            model, labels, experiment = _with_head(family, config_json, classifier, count), (), None
    elif families := _FAMILIES[cast("str | None", described.get("task_type"))]:
        if model.family not in families or model.head is not None:
            raise UserError(
                f"{CONFIG} has task_type {described.get('task_type')!r}, but the base model is {model.family} with "
                f"head {model.head}: give the base model that the adapter was trained with as --base=DIR"
            )
    if experiment is None:
        path = os.path.abspath(os.path.join(workdir, "tokenizer"))
        experiment = evaluation_of(model, tokenizer.vocabulary, path, labels)
    return BaseModel(experiment, tokenizer, TheirModel(family, model))


def _class_of_task(family: HuggingFace, described: JsonObject) -> TaskClass | None:
    """Returns the transformers class with the task head of an adapter, or None for an adapter without task head."""
    task = described.get("task_type")
    if not is_known(task, (*_CLASSES, *_FAMILIES)):
        raise UserError(f"{CONFIG} has task_type {task!r}, supported: {', '.join(map(repr, (*_CLASSES, *_FAMILIES)))}")
    if isinstance(task, str) and task in _CLASSES:
        if (classifier := getattr(family, _CLASSES[task])) is None:
            raise UserError(f"{CONFIG} has task_type {task!r}, for which {family.model_type!r} has no class here")
        return classifier
    mapping = described.get("auto_mapping")
    name = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    return next((x for x in family.classifiers if x.architecture == name), None)


def _num_labels(classifier: TaskClass, shapes: Mapping[str, tuple]) -> int | None:
    """Returns the number of outputs of the adapter's task head, or None if the adapter lacks the output layer."""
    names = (f"{classifier.output}.weight", f".{classifier.output}.weight")
    sizes = [shape[0] for name, shape in shapes.items() if name.endswith(names[1]) and len(shape) == 2]
    if not hasattr(classifier.head, "num_labels") or getattr(classifier.head, "kind", "") == "choice":
        return None
    return sizes[0] if sizes else None


def _with_head(family: HuggingFace, config_json: ConfigJson, classifier: TaskClass, count: int | None) -> ModelConfig:
    """Returns the config of the base model with the task head of `classifier`, which has `count` labels."""
    labels = {str(i): f"LABEL_{i}" for i in range(count or 2)}
    json = {**config_json, "architectures": [classifier.architecture], "id2label": labels}
    return family.read_config({**json, "problem_type": None})


def task_fields(family: HuggingFace, model: ModelConfig) -> JsonObject:
    """Returns the fields of adapter_config.json from which PEFT's AutoPeftModel classes select the model class."""
    head, name = model.head, family.class_of(model)
    by_family = {"decoder": "CAUSAL_LM", "encoder_decoder": "SEQ_2_SEQ_LM"}
    task = by_family.get(model.family) if head is None else _task_of(family, head, name)
    mapping = {"base_model_class": name, "parent_library": "transformers"}
    return {"task_type": task, "auto_mapping": mapping if task is None else None}


def _task_of(family: HuggingFace, head: object, name: str) -> str | None:
    """Returns the task_type of a model with a task head, or None if PEFT has no task_type for it (multiple choice)."""
    if not isinstance(head, TaskHead):
        return "FEATURE_EXTRACTION"
    classes: Iterable[tuple[str, TaskClass | None]] = ((task, getattr(family, x)) for task, x in _CLASSES.items())
    return next((task for task, classifier in classes if classifier and classifier.architecture == name), None)
