"""Converts between PretrainAX model configs and the config.json files of transformers architectures."""

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Optional

from pretrainax import models, zoo
from pretrainax.config import DataConfig, Experiment, ModelConfig, UserError, nearest
from pretrainax.config.validation import model_problems
from pretrainax.config.values import MAX_LAYERS
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import NoSource
from pretrainax.files.json_files import read_object
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.tokenization import PretrainedTokenizer
from pretrainax.zoo.convert import rows_of
from pretrainax.zoo.family import ConfigJson, HuggingFace, biases

_ADAPTERS = "adapter_config.json"  # file that identifies a PEFT directory
# The errors that a model config with wrong values raises.
DAMAGED = ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError


ANY_EXPERIMENT = Experiment(  # any valid config, whose model is replaced
    ModelConfig(), PretrainedTokenizer(path="."), DataConfig(source=NoSource()), CausalLM(), AdamW(), WarmupCosine()
)


def families() -> list[HuggingFace]:
    """Returns the transformers counterparts of the model families in the zoo; omits families without a counterpart."""
    return [family.huggingface for family in zoo.FAMILIES if family.huggingface is not None]


def is_huggingface_directory(path: str) -> bool:
    """Returns True if `path` is a directory that contains a transformers model or a PEFT adapter."""
    if os.path.exists(os.path.join(path, _ADAPTERS)):
        return True
    try:
        return "model_type" in read_config_json(path)
    except UserError:
        return False


def read_config_json(directory: str) -> ConfigJson:
    """Reads the config.json of a Hugging Face directory.

    Raises:
      UserError: the directory or the file is missing, or the directory contains a PEFT adapter.
    """
    path = os.path.join(directory, "config.json")
    if not os.path.isdir(directory):
        raise UserError(f"{directory} is no directory here{_on_hub(directory)}")
    if os.path.exists(os.path.join(directory, _ADAPTERS)):
        raise UserError(
            f"{directory} holds adapters ({_ADAPTERS}), not a model: merge them into their base with peft first, with "
            "merge_and_unload() and save_pretrained()"
        )
    if not os.path.exists(path):
        raise UserError(f"{directory} holds no config.json: it must be a Hugging Face directory")
    return read_object(path)


def _on_hub(name: str) -> str:
    """Returns a hint to write hf:NAME for a Hub model, for error messages; "" if `name` cannot be a Hub model."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        return ""
    return f"; a model of the Hugging Face Hub is named hf:{name}"


def described_model(config_json: ConfigJson) -> tuple[HuggingFace, ModelConfig]:
    """Converts a config.json to a model config; also returns the transformers family that reads this config.json.

    If several families have the same model_type, the first family that supports the model is used.

    Raises:
      UserError: the model_type is unknown, or the model is not supported.
    """
    model_type, reasons = config_json.get("model_type"), []
    for family in families():
        if family.model_type == model_type:
            try:
                config = family.read_config(config_json)
                if (layers := max(stack.num_layers for stack in config.stacks.values())) > MAX_LAYERS:
                    raise UserError(f"config.json has {layers} layers, at most {MAX_LAYERS} are supported")
                if problems := list(model_problems(dataclasses.replace(ANY_EXPERIMENT, model=config))):
                    raise UserError(f"config.json describes no model: {_with_their_names(problems, family)}")
                models.abstract_params(config)
                return family, config
            except UserError as e:
                reasons.append(e)
            except DAMAGED as e:  # "12", null, 0, a list
                reasons.append(UserError(f"config.json describes no model: a missing or wrong value ({e})"))
    if reasons:
        raise reasons[0]
    if model_type is None:
        raise UserError(
            "config.json has no model_type, so it is not of a Hugging Face directory; for a run, this is the directory "
            "of an export: python -m pretrainax.huggingface export --workdir=RUN --to=DIR"
        )
    model_types = {family.model_type for family in families()}
    raise UserError(f"config.json has model_type {model_type!r}, {nearest(str(model_type), model_types)}")


def _with_their_names(problems: Sequence[str], family: HuggingFace) -> str:
    """Joins error messages, naming the keys of config.json instead of our config fields."""
    text = "; ".join(problems)
    for key, path in family.fields.items():
        text = re.sub(rf"config\.model\.{re.escape(path)}\b", key, text)
    return text


def describe_model(model: ModelConfig, imported: Optional[str]) -> tuple[HuggingFace, ConfigJson, ModelConfig]:
    """Finds a transformers family that can compute `model`.

    The family of an imported model has priority, followed by families that need no additional biases.

    Args:
      imported: model_type in the original config.json of an imported model, or None if the model was not imported.

    Returns:
      The family, its config.json, and the equivalent model config. The equivalent model may have additional biases,
      which are zero.

    Raises:
      UserError: no transformers architecture computes the model. The message lists the unsupported fields of the
        closest architecture.
    """
    matches, reasons, absent = [], [], None
    for family in sorted(families(), key=lambda family: family.model_type != imported):
        try:
            config_json = family.write_config(model)
            if not family.in_transformers and family.model_type != imported:
                absent = config_json["architectures"][0]
                continue
            matches.append((family, config_json, family.read_as(config_json, model)))
        except UserError as e:
            reasons.append(str(e))
        except (ArithmeticError, AttributeError, KeyError, TypeError):  # for example because the positions lack a field
            continue
    for family, config_json, equivalent in sorted(
        matches, key=lambda x: (x[0].model_type != imported, biases(x[2]) != biases(model))
    ):
        try:
            rows_of(family.names(equivalent), models.abstract_params(equivalent))
            return family, config_json, equivalent
        except ValueError as e:  # the class has tensors that the model lacks
            reasons.append(f"{config_json['architectures'][0]} of transformers cannot express this: {e}")
    if absent is not None:
        raise UserError(
            f"transformers has no class for this config.model: {absent} is only in the code released with its weights"
        )
    # The closest class lacks the fewest fields; messages about `experts` come last, because they list no other field.
    sort_key = lambda x: ("config.model.experts=" in x, x.count("config.model."), len(x))  # noqa: E731
    closest = min((reason for reason in reasons if "cannot express config" in reason), key=sort_key, default="none")
    raise UserError(f"no architecture of transformers computes this config.model; the nearest: {closest}")
