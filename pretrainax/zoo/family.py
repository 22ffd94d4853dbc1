"""A published family: its rows, and how transformers writes it down (config.json and tensor names)."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Optional, TypeAlias

from pretrainax.config import ModelConfig, UserError
from pretrainax.config.json_files import JsonObject

# The contents of a config.json, whatever it holds: each family's `read` checks the values that it uses.
ConfigJson: TypeAlias = JsonObject

# config.json's names of activations, where they are not ours; several of theirs may be one of ours
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
    "silu": "silu",
}
_THEIR_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "swish": "silu"} | {
    theirs: ours for ours, theirs in _ACTIVATIONS.items()
}


class Row(NamedTuple):
    """The place of one of our parameters in a Hugging Face state dict."""

    path: str  # ours
    name: str  # theirs; "{layer}" where ours stacks all layers on its first axis
    transposed: bool = False  # theirs is torch.nn.Linear's [out, in]; ours is [in, out], each perhaps cut into heads
    part: Optional[tuple[int, int]] = None  # ours is part i of n of their last axis (GPT-2's query | key | value)
    first: Optional[str] = None  # the name in layer 0, where it is another


def linear(path: str, name: str, bias: bool, part: Optional[tuple[int, int]] = None) -> list[Row]:
    """Returns the rows of a linear map that theirs is a torch.nn.Linear of."""
    rows = [Row(f"{path}/kernel", f"{name}.weight", transposed=True, part=part)]
    return rows + [Row(f"{path}/bias", f"{name}.bias", part=part)] if bias else rows


def layer_norm(path: str, name: str) -> list[Row]:
    return [Row(f"{path}/scale", f"{name}.weight"), Row(f"{path}/bias", f"{name}.bias")]


def _nothing_to_read(json: ConfigJson, config: ModelConfig) -> None:
    pass


def _nothing_to_write(config: ModelConfig) -> ConfigJson:
    return {}


def refuse_untied(json: ConfigJson, config: ModelConfig) -> None:
    """Raises a UserError where a masked LM has an output matrix of its own; without that head there is none to tie."""
    if config.masked_lm_head and not json.get("tie_word_embeddings", True):
        raise UserError("config.json has tie_word_embeddings False; only True is known for a masked LM")


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """Says how transformers writes a family down. `read_config` and `write_config` are its two directions."""

    model_type: str  # of config.json
    architecture: str | Callable[[ModelConfig], str]  # the class whose logits are ours
    base: Callable[[], ModelConfig]  # a fresh config with all that config.json does not say
    fields: Mapping[str, str]  # their key -> field of ModelConfig, "position.max_length" for a field of a field
    names: Callable[[ModelConfig], list[Row]]
    constants: ConfigJson = dataclasses.field(default_factory=dict)  # their key -> the one value we compute
    # What takes more than a name: `read` sets fields of the config, `write` gives keys of config.json.
    read: Callable[[ConfigJson, ModelConfig], None] = _nothing_to_read
    write: Callable[[ModelConfig], ConfigJson] = _nothing_to_write
    tied: Callable[[ModelConfig], dict[str, str]] = lambda config: {}  # copies that a file may hold -> the original
    zeros: Callable[[ModelConfig], dict[str, tuple[int, ...]]] = lambda config: {}  # theirs only, and always zero
    ignored: tuple[str, ...] = ()  # expressions for tensors that hold no weights (masks, frequencies), or unused heads

    def read_config(self, json: ConfigJson) -> ModelConfig:
        """Returns the architecture that a config.json describes; UserError where it is none that we compute."""
        config = self.base()
        for key, value in self.constants.items():
            if json.get(key, value) != value and not (json[key] is None and _null_is(value)):
                raise UserError(f"config.json has {key} {json[key]!r}; only {value!r} is known for {self.model_type!r}")
        for key, path in self.fields.items():
            if key in json:
                _set_field(config, path, _our_value(path, key, json[key]))
        self.read(json, config)
        return config

    def class_of(self, config: ModelConfig) -> str:
        """Returns the class of transformers whose logits are those of `config`."""
        return self.architecture if isinstance(self.architecture, str) else self.architecture(config)

    def write_config(self, config: ModelConfig) -> ConfigJson:
        """Returns the config.json of `config`; UserError where this family of transformers cannot compute it.

        Biases that theirs has and `config` has not are no obstacle: `read_config` says which, and they are zero.
        """
        architecture = self.class_of(config)
        json = {"model_type": self.model_type, "architectures": [architecture], **self.constants}
        for key, path in self.fields.items():
            value = _field(config, path)
            json[key] = _ACTIVATIONS[value] if path == "activation" else value
        json |= self.write(config)
        theirs = self.read_config(json)
        more = zip(biases(theirs), biases(config), strict=True)
        fillable = _BIASES if all(mine <= their for their, mine in more) else ()
        different = [name for name in differences(theirs, config) if name not in fillable]
        if different:
            raise UserError(
                f"{architecture} of transformers has no way to say "
                + ", ".join(f"config.model.{name}={getattr(config, name)!r}" for name in different)
            )
        return json


def _null_is(value: object) -> bool:
    """Tells whether null says the same as `value`, of a constant: no, or a word that is not said."""
    return value is False or isinstance(value, str)


# Of training, not of the function that is computed: config.json may be silent about them.
_TRAINING = ("dropout_rate", "attention_dropout_rate", "init_stddev", "scale_residual_init")


_BIASES = ("use_bias", "qkv_bias")


def biases(config: ModelConfig) -> tuple[bool, bool]:
    """Says whether a model has biases, and whether its maps to queries, keys and values have them."""
    return config.use_bias, config.use_bias if config.qkv_bias is None else config.qkv_bias


def differences(a: ModelConfig, b: ModelConfig) -> list[str]:
    """Names the fields in which two architectures compute something else."""
    return [f.name for f in dataclasses.fields(a) if _differ(a, b, f.name)]


def _differ(a: ModelConfig, b: ModelConfig, name: str) -> bool:
    if name in ("num_kv_heads", "head_dim"):  # None and the number that it stands for are the same
        return a.kv_heads != b.kv_heads or a.dim_per_head != b.dim_per_head
    if name == "num_decoder_layers":
        return "encoder_decoder" in (a.family, b.family) and a.decoder_layers != b.decoder_layers
    return name not in _TRAINING and getattr(a, name) != getattr(b, name)


def _field(config: ModelConfig, path: str) -> object:
    """Returns the value of a field, or of a field of a field: "position.max_length"."""
    return functools.reduce(getattr, path.split("."), config)


def _set_field(config: ModelConfig, path: str, value: object) -> None:
    *parents, name = path.split(".")
    setattr(functools.reduce(getattr, parents, config), name, value)


def _our_value(path: str, key: str, value: object) -> object:
    if path != "activation":
        return value
    if value not in _THEIR_ACTIVATIONS:
        raise UserError(f"config.json has {key} {value!r}; known: {', '.join(sorted(_THEIR_ACTIVATIONS))}")
    return _THEIR_ACTIVATIONS[value]


@dataclasses.dataclass(frozen=True)
class Family:
    """One line of a paper's history: `preset(variant)` for each variant of `sizes`."""

    name: str  # as people say it
    prefix: str  # of its presets: "bert_" + "base"
    preset: Callable[[str], ModelConfig]
    sizes: Mapping[str, object]  # variant -> what `preset` makes it of
    paper: str
    objective: str  # of its pretraining, in words
    huggingface: Optional[HuggingFace]  # None where transformers has no such model
    configs: Mapping[str, str] = dataclasses.field(default_factory=dict)  # variant -> what trains it, as --config takes


def trained_by(config: str, variants: Iterable[str]) -> dict[str, str]:
    """Returns a `Family.configs`: of these variants, which a file of configs/ calls the same."""
    return {variant: f"configs/{config}.py:{variant}" for variant in variants}
