"""Says what a fine-tuning starts from: architecture, tokenizer and parameters of a trained model, without its heads."""

import dataclasses
import os
from typing import NamedTuple, Optional

import jax
from flax import traverse_util

from pretrainax import config as config_lib
from pretrainax import models
from pretrainax.checkpoints.params import Fresh
from pretrainax.config import Classify, HeadConfig, ModelConfig, UserError, trained_as
from pretrainax.inference.load import load_origin
from pretrainax.inference.origin import Origin, find_origin
from pretrainax.interop import weights
from pretrainax.interop.architectures import describe_model, described_model, read_config_json
from pretrainax.models.electra import discriminator_config
from pretrainax.sharding.param_paths import PyTree, parameter_names
from pretrainax.tokenization import PretrainedTokenizer
from pretrainax.tokenization.choices import TokenizerConfig
from pretrainax.zoo.family import HuggingFace, differences, without_heads


class Start(NamedTuple):
    """A trained model as the beginning of another run."""

    model: ModelConfig  # without the heads of its pretraining
    tokenizer: TokenizerConfig
    head: Optional[HeadConfig]  # that of a whole row, as transformers' class of the family has it; None: it has none


def start_of(name: str) -> Start:
    """Returns what `name`, a run or a Hugging Face directory as `inference.origin` takes it, is to begin with.

    Raises:
      UserError: nothing is there, or nothing that can be used.
    """
    origin = find_origin(name)
    model, family = _described(origin)
    folder = os.path.join(origin.directory, "tokenizer") if origin.steps else origin.directory
    head = None if family is None or family.classifier is None else dataclasses.replace(family.classifier.head)
    return Start(without_heads(model), PretrainedTokenizer(path=os.path.abspath(folder)), head)


def describe(name: str, model: ModelConfig) -> tuple[str, list[str], list[str]]:
    """Returns what `model` starts from, and the paths of the parameters that are drawn anew, and that are left out.

    No number is read.

    Raises:
      UserError: another architecture, with the fields.
    """
    origin = find_origin(name)
    theirs, _ = _described(origin)
    if origin.steps:
        _check(name, without_heads(theirs), without_heads(model))
        there = _paths(theirs)
        lacking = [path for path in _paths(model) if path not in there and _of_pair(path, model) not in there]
    else:
        lacking = weights.open_start(origin.directory, model, fresh_heads=True).lacking
        there = _paths(theirs)
    used = {*_paths(model), *(_of_pair(path, model) for path in _paths(model) if path not in lacking)}
    return origin.description, lacking, [path for path in there if path not in used]


def read_params(name: str, model: ModelConfig, abstract: PyTree, fresh: Fresh, mesh: jax.sharding.Mesh) -> PyTree:
    """Returns the parameters of `model` from a trained one, each device with its shards.

    Args:
      abstract: shapes, dtypes and shardings.
      fresh: gives those of a head that are drawn anew.

    Raises:
      UserError: as `describe` does, or the checkpoint is damaged.
    """
    origin = find_origin(name)
    _, lacking, _ = describe(name, model)
    if not origin.steps:
        return weights.load_params(origin.directory, model, abstract, fresh)
    read = traverse_util.flatten_dict(load_origin(origin, mesh=mesh).params, sep="/")
    drawn = fresh(lacking)
    found = [
        drawn[path] if path in drawn else read.get(path, read.get(_of_pair(path, model)))
        for path in parameter_names(abstract)
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), found)


def _described(origin: Origin) -> tuple[ModelConfig, Optional[HuggingFace]]:
    """Returns the model that goes on to other tasks, with its heads, and its family in transformers, if it has one."""
    if not origin.steps:
        family, model = described_model(read_config_json(origin.directory))
        return model, family
    experiment = config_lib.load(os.path.join(origin.directory, "config.json"))
    model = trained_as(experiment, [int(os.path.basename(step)) for step in origin.steps]).model
    if model.generator is not None:
        model = discriminator_config(model)
    try:
        return model, describe_model(model, None)[0]
    except UserError:
        return model, None


def _check(name: str, theirs: ModelConfig, ours: ModelConfig) -> None:
    if names := [field for field in differences(theirs, ours) if field != "head"]:
        fields = "; ".join(f"config.model.{x} is {getattr(ours, x)!r}, there {getattr(theirs, x)!r}" for x in names[:6])
        raise UserError(f"config.checkpoint.init_from={name} holds another architecture: {fields}")


def _paths(model: ModelConfig) -> list[str]:
    return parameter_names(models.abstract_params(model))


def _of_pair(path: str, model: ModelConfig) -> str:
    """Returns the path of the pair head's layer that stands for one of a head: BERT's pooler is trained with it."""
    is_pooler = isinstance(model.head, Classify) and (model.head.hidden, model.head.pooling) == ("tanh", "cls")
    return path.replace("classifier/dense/", "pair_head/dense/") if is_pooler else path
