"""A published family: its rows, and how transformers writes it down (config.json and tensor names)."""

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Optional, TypeAlias

from pretrainax.config import Classify, Embed, ModelConfig, UserError
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


class Classifier(NamedTuple):
    """Says how transformers' class for a family writes down a head of a whole row."""

    architecture: str  # "BertForSequenceClassification"
    head: Classify  # as that class has it
    output: str = "score"  # their name of the last map; of decoders this one
    dense: str = ""  # of the hidden layer
    norm: str = ""  # of its norm
    prefix: str = ""  # before the names of all that is no head

    def rows(self, head: Classify) -> list[Row]:
        """Returns the rows of the head."""
        rows = linear("classifier/output", self.output, head.output_bias)
        rows += linear("classifier/dense", self.dense, head.hidden_bias) if head.hidden != "none" else []
        return rows + ([Row("classifier/norm/scale", f"{self.norm}.weight")] if head.hidden_norm else [])


LAST = Classify(pooling="last", hidden="none", output_bias=False)  # of every decoder
_PROBLEMS = {"single": "single_label_classification", "multi": "multi_label_classification", "regression": "regression"}
_OF_PRETRAINING = ("masked_lm_head", "unembedding", "pair_head", "replaced_token_head")  # what a task's model has not


def without_heads(config: ModelConfig) -> ModelConfig:
    """Returns an architecture without the heads of its pretraining, and what only they need."""
    plain = copy.deepcopy(config)
    plain.masked_lm_head = plain.pair_head = plain.replaced_token_head = plain.replaced_token_context = False
    plain.enhanced_mask_decoder = False
    return dataclasses.replace(plain, generator=None)


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
    table: Callable[[ModelConfig], list[Row]]  # of a model that is pretrained: see `names`
    constants: ConfigJson = dataclasses.field(default_factory=dict)  # their key -> the one value we compute
    # What takes more than a name: `read` sets fields of the config, `write` gives keys of config.json.
    read: Callable[[ConfigJson, ModelConfig], None] = _nothing_to_read
    write: Callable[[ModelConfig], ConfigJson] = _nothing_to_write
    tied: Callable[[ModelConfig], dict[str, str]] = lambda config: {}  # copies that a file may hold -> the original
    zeros: Callable[[ModelConfig], dict[str, tuple[int, ...]]] = lambda config: {}  # theirs only, and always zero
    ignored: tuple[str, ...] = ()  # expressions for tensors that hold no weights (masks, frequencies), or unused heads

    classifier: Optional[Classifier] = None  # the class of transformers with a head of a whole row

    def names(self, config: ModelConfig) -> list[Row]:
        """Returns the name table of a model, with the heads that it has."""
        if config.head is None or self.classifier is None:
            return self.table(config)
        rows = [row for row in self.table(config) if row.path.partition("/")[0] not in _OF_PRETRAINING]
        rows = [row._replace(name=self.classifier.prefix + row.name) for row in rows]
        return rows if isinstance(config.head, Embed) else rows + self.classifier.rows(_classify(config))

    def read_config(self, json: ConfigJson) -> ModelConfig:
        """Returns the architecture that a config.json describes; UserError where it is none that we compute."""
        if self.classifier is not None and (json.get("architectures") or [""])[0] == self.classifier.architecture:
            config = without_heads(self.read_config({**json, "architectures": None}))
            config.head = _read_head(json, self.classifier.head)
            return config
        config = self.base()
        for key, value in self.constants.items():
            if json.get(key, value) != value and not (json[key] is None and _null_is(value)):
                raise UserError(f"config.json has {key} {json[key]!r}; only {value!r} is known for {self.model_type!r}")
        for key, path in self.fields.items():
            if key in json:
                _set_field(config, path, _our_value(path, key, json[key]))
        self.read(json, config)
        return config

    def read_as(self, json: ConfigJson, config: ModelConfig) -> ModelConfig:
        """Returns what `read_config` does of the config.json of `config`: with its head, where that has no parameters,
        and transformers' class is the one without any head."""
        read = self.read_config(json)
        return dataclasses.replace(without_heads(read), head=config.head) if isinstance(config.head, Embed) else read

    def class_of(self, config: ModelConfig) -> str:
        """Returns the class of transformers whose logits are those of `config`."""
        if config.head is not None:
            if self.classifier is None:
                raise UserError(f"{self.model_type!r} of transformers has no class with the head {config.head}")
            bare = re.sub("For[A-Z][A-Za-z]+$", "Model", self.classifier.architecture)
            return bare if isinstance(config.head, Embed) else self.classifier.architecture
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
        if config.head is not None and not isinstance(config.head, Embed):
            json |= _write_head(_classify(config))
        theirs = self.read_as(json, config)
        more = zip(biases(theirs), biases(config), strict=True)
        fillable = _BIASES if all(mine <= their for their, mine in more) else ()
        different = [name for name in differences(theirs, config) if name not in fillable]
        if different:
            raise UserError(
                f"{architecture} of transformers has no way to say "
                + ", ".join(f"config.model.{name}={getattr(config, name)!r}" for name in different)
            )
        return json


def _classify(config: ModelConfig) -> Classify:
    """Returns the head of a model, which transformers has a class for."""
    if not isinstance(config.head, Classify):
        raise UserError(f"transformers has no way to say config.model.head={config.head}")
    return config.head


def _read_head(json: ConfigJson, usual: Classify) -> Classify:
    """Returns the head that a config.json describes: as many labels as are named, two where none are."""
    labels = len(json.get("id2label") or ()) or 2
    kinds = {theirs: ours for ours, theirs in _PROBLEMS.items()}
    kind = kinds.get(json.get("problem_type"), "regression" if labels == 1 else "single")
    pooling = json.get("classifier_pooling", usual.pooling)  # of ModernBERT
    return dataclasses.replace(usual, num_labels=labels, kind=kind, pooling=pooling)


def _write_head(head: Classify) -> ConfigJson:
    """Returns what config.json says of a head; the labels have numbers for names until somebody names them."""
    names = [f"LABEL_{i}" for i in range(head.num_labels)]
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        "problem_type": _PROBLEMS[head.kind],
        **({"classifier_pooling": head.pooling} if head.hidden_norm else {}),
    }


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
    if name == "head" and isinstance(a.head, Classify) and isinstance(b.head, Classify):
        return dataclasses.replace(a.head, dropout_rate=None) != dataclasses.replace(b.head, dropout_rate=None)
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
