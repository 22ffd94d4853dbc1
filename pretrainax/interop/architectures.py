"""Converts between model configs of this package and the config.json of transformers architectures."""

import os
import re
from typing import Optional

from pretrainax import models, zoo
from pretrainax.config import ModelConfig, UserError, nearest
from pretrainax.config.values import MAX_LAYERS
from pretrainax.files.json_files import read_object
from pretrainax.zoo.convert import rows_of
from pretrainax.zoo.family import ConfigJson, HuggingFace, biases

_ADAPTERS = "adapter_config.json"  # file of a peft directory


def families() -> list[HuggingFace]:
    """Returns the transformers counterparts of the model families in the zoo; families without one are left out."""
    return [family.huggingface for family in zoo.FAMILIES if family.huggingface is not None]


def is_huggingface_directory(path: str) -> bool:
    """Returns True if `path` is a Hugging Face directory with a model, or with adapters of the peft library."""
    if os.path.exists(os.path.join(path, _ADAPTERS)):
        return True
    try:
        return "model_type" in read_config_json(path)
    except UserError:
        return False


def read_config_json(directory: str) -> ConfigJson:
    """Returns the contents of the config.json of a Hugging Face directory; raises UserError if there is none."""
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
    """Returns a hint for messages that a hub model is named hf:NAME; "" if `name` cannot be the name of a hub model."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        return ""
    return f"; a model of the Hugging Face Hub is named hf:{name}"


def described_model(config_json: ConfigJson) -> tuple[HuggingFace, ModelConfig]:
    """Returns the first transformers family that can read a config.json, and the model config.

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
                models.abstract_params(config)
                return family, config
            except UserError as e:
                reasons.append(e)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:  # "12", null, 0, a list
                reasons.append(UserError(f"config.json describes no model: a missing or wrong value ({e})"))
    if reasons:
        raise reasons[0]
    known = {family.model_type for family in families()}
    raise UserError(f"config.json has model_type {model_type!r}, {nearest(str(model_type), known)}")


def describe_model(model: ModelConfig, imported: Optional[str]) -> tuple[HuggingFace, ConfigJson, ModelConfig]:
    """Returns the transformers family that can compute `model`, its config.json, and the equivalent model config.

    The equivalent model may have additional biases, which are zero. Families that need no additional biases have
    priority.

    Args:
      imported: model_type of the original config.json of an imported model, whose family has priority; None: no import.

    Raises:
      UserError: no architecture of transformers computes the model; the message has the unsupported fields of the
        closest architecture.
    """
    matches, reasons = [], []
    for family in sorted(families(), key=lambda family: family.model_type != imported):
        try:
            config_json = family.write_config(model)
            matches.append((family, config_json, family.read_as(config_json, model)))
        except UserError as e:
            reasons.append(str(e))
        except (AttributeError, KeyError, TypeError):  # for example, other positions lack expected fields
            continue
    for family, config_json, theirs in sorted(
        matches, key=lambda x: (x[0].model_type != imported, biases(x[2]) != biases(model))
    ):
        try:
            rows_of(family.names(theirs), models.abstract_params(theirs))
            return family, config_json, theirs
        except ValueError as e:  # the class has tensors that the model lacks
            reasons.append(f"{config_json['architectures'][0]} of transformers cannot express this: {e}")
    # Reasons about `experts` come last, because they do not help to find the closest family.
    distance = lambda reason: ("config.model.experts=" in reason, len(reason))  # noqa: E731
    closest = min((reason for reason in reasons if "cannot express config" in reason), key=distance, default="none")
    raise UserError(f"no architecture of transformers computes this config.model; the nearest: {closest}")
