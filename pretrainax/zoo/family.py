"""Families of published models: sizes, and the conversion of config.json and tensor names to and from transformers.

In names and comments, "ours" refers to this package and "theirs" to transformers. A name table is a list of `NameRow`
that maps each of our parameters to tensors in transformers' files.
"""

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Optional, TypeAlias

from pretrainax.config import (
    Classify,
    Embed,
    Extract,
    HeadConfig,
    ModelConfig,
    Tag,
    UserError,
)
from pretrainax.files.json_files import JsonObject
from pretrainax.zoo.differences import biases, differences, without_training
from pretrainax.zoo.task_heads import HeadDropout, TaskHead, read_head, write_head

# The contents of a config.json, not validated. `HuggingFace.read` of each family checks the values that it uses.
ConfigJson: TypeAlias = JsonObject

# Our name of an activation -> its name in config.json. transformers may have several names for the same activation.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "gelu_sigmoid": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
}
_THEIR_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "swish": "silu"} | {
    theirs: ours for ours, theirs in _ACTIVATIONS.items()
}


# The keys that may be null in most families. If the number of key heads is null, it equals the number of heads. A null
# in another key disables a feature.
NULLABLE = ("num_key_value_heads", "sliding_window", "q_lora_rank")
NULLABLE += ("final_logit_softcapping", "attn_logit_softcapping")


class FusedPart(NamedTuple):
    """Selects one of our matrices, which is a contiguous range of outputs, from a fused matrix in transformers.

    The outputs of the fused matrix are divided into `pieces` equal pieces, of which our matrix has `count`, starting at
    piece `first`.
    """

    first: int = 0
    count: int = 1
    pieces: int = 1

    def our_slice(self, size: int) -> slice:
        """Returns the slice that selects our outputs from the `size` outputs of the fused matrix."""
        piece = size // self.pieces
        return slice(self.first * piece, (self.first + self.count) * piece)

    def fused_size(self, size: int) -> int:
        """Returns the number of outputs of the fused matrix if our matrix has `size` outputs."""
        return size // self.count * self.pieces


class Every(NamedTuple):
    """Selects every `pieces`-th output of a fused matrix in transformers, starting at output `first`.

    For example, gpt-oss fuses the gate and up projections into one matrix with interleaved outputs.
    """

    first: int
    pieces: int

    def our_slice(self, size: int) -> slice:
        """Returns the slice that selects our outputs from the `size` outputs of the fused matrix."""
        return slice(self.first, size, self.pieces)

    def fused_size(self, size: int) -> int:
        """Returns the number of outputs of the fused matrix if our matrix has `size` outputs."""
        return size * self.pieces


WHOLE = FusedPart()


class NameRow(NamedTuple):
    """A row of a name table, which maps one of our parameters to its tensors in a Hugging Face state dict."""

    path: str  # path of our parameter: "decoder/blocks/mlp/up/kernel"
    # Name of their tensor, with the placeholder "{layer}" if our first axis stacks layers, and "{expert}" if our next
    # axis stacks experts.
    name: str
    # True: their tensor is the weight of a torch.nn.Linear, [out, in]. Ours is [in, out], where `in` or `out` may be
    # two axes, heads and head width.
    transposed: bool = False
    part: FusedPart | Every = WHOLE  # selects our outputs from a fused tensor (GPT-2: query | key | value)
    first: Optional[str] = None  # tensor name in layer 0, if different from `name`
    layers: Optional[Sequence[int]] = None  # layer number in transformers of each stacked layer; None: 0, 1, …


def linear(path: str, name: str, bias: bool, part: FusedPart = WHOLE) -> list[NameRow]:
    """Builds the name-table rows of a linear layer.

    Args:
      path: our path to the layer.
      name: transformers' name for the layer, a torch.nn.Linear.
      bias: whether the layer has a bias.
      part: selects our outputs from a fused matrix.
    """
    rows = [NameRow(f"{path}/kernel", f"{name}.weight", transposed=True, part=part)]
    return rows + [NameRow(f"{path}/bias", f"{name}.bias", part=part)] if bias else rows


def layer_norm(path: str, name: str) -> list[NameRow]:
    return [NameRow(f"{path}/scale", f"{name}.weight"), NameRow(f"{path}/bias", f"{name}.bias")]


_MODULES = {Classify: "classifier", Tag: "tagger", Extract: "extractor"}


class TaskClass(NamedTuple):
    """Describes a transformers class with a task head for sequences, multiple choice, tokens or answer spans."""

    architecture: str  # "BertForSequenceClassification"
    head: TaskHead  # the config of our head that computes the same function
    output: str = "score"  # their name for the output layer; "score" in decoders
    dense: str = ""  # their name for the head's hidden layer
    norm: str = ""  # their name for the hidden layer's norm
    prefix: str = ""  # prefix of the names of all tensors outside the head
    base: str = ""  # replaces the first component of the tensor names outside the head; "": no replacement
    family: str = ""  # "encoder": the class uses only the encoder of an encoder-decoder; "": all stacks
    changes: Mapping[str, object] = MappingProxyType({})  # ModelConfig fields that this class overrides
    constants: Mapping[str, object] = MappingProxyType({})  # key of config.json -> the only supported value
    extra_rows: tuple[NameRow, ...] = ()  # additional name-table rows of the head
    dropout: HeadDropout = HeadDropout("")  # the key of the head's dropout rate

    def apply_to(self, config: ModelConfig) -> ModelConfig:
        """Returns a copy of `config` with the fields in `changes` replaced."""
        return dataclasses.replace(config, **copy.deepcopy(dict(self.changes)))

    def head_for(self, config: ModelConfig) -> TaskHead:
        """Returns the head for a model; the hidden layer of ModernBERT has the activation of its feed-forward."""
        if self.head.hidden_norm and config.activation != self.head.hidden:
            return dataclasses.replace(self.head, hidden="model")
        return dataclasses.replace(self.head)

    def rows(self, head: TaskHead) -> list[NameRow]:
        """Builds the name-table rows of the parameters of `head`."""
        module = _MODULES[type(head)]
        rows = linear(f"{module}/output", self.output, head.output_bias)
        rows += linear(f"{module}/dense", self.dense, head.hidden_bias) if head.hidden != "none" else []
        rows += self.extra_rows if isinstance(head, Extract) and head.feed_forward else ()
        return rows + ([NameRow(f"{module}/norm/scale", f"{self.norm}.weight")] if head.hidden_norm else [])

    def name_of(self, row: NameRow) -> NameRow:
        """Copies the name-table row of a parameter outside the head, and sets the tensor name that this class uses."""
        suffix = row.name.partition(".")[2]
        return row._replace(name=f"{self.base}.{suffix}" if self.base else self.prefix + row.name)


def question_answering_class(architecture: str, **names) -> TaskClass:
    """Describes the question-answering class of a model, for example BertForQuestionAnswering.

    Args:
      architecture: the name of any other transformers class for the model, for example "BertForMaskedLM".
      names: the remaining fields of the TaskClass.
    """
    return TaskClass(f"{architecture.partition('For')[0]}ForQuestionAnswering", Extract(), "qa_outputs", **names)


def token_classification_class(architecture: str, output: str = "classifier", **names) -> TaskClass:
    """Describes the token-classification class of a model, for example BertForTokenClassification.

    Args:
      architecture: the name of any other transformers class for the model, for example "BertForMaskedLM".
      output: transformers' name for the output layer.
      names: the remaining fields of the TaskClass.
    """
    if output == "score":  # the class that most decoders share
        names = {"dropout": HeadDropout(default=0.1)} | names
    return TaskClass(f"{architecture.partition('For')[0]}ForTokenClassification", Tag(), output, **names)


LAST = Classify(pooling="last", hidden="none", output_bias=False)  # the classification head of all decoders
# Modules of pretraining heads. Models with a task head do not have these modules.
_PRETRAINING_MODULES = ("masked_lm_head", "unembedding", "pair_head", "replaced_token_head")


def without_heads(config: ModelConfig) -> ModelConfig:
    """Copies a model config without its pretraining heads and without the fields that only these heads use."""
    headless = copy.deepcopy(config)
    headless.masked_lm_head = headless.pair_head = headless.replaced_token_head = headless.replaced_token_context = (
        False
    )
    headless.enhanced_mask_decoder = False
    return dataclasses.replace(headless, generator=None, multi_token=None)


def _nothing_to_read(json: ConfigJson, config: ModelConfig) -> None:
    pass


def _nothing_to_write(config: ModelConfig) -> ConfigJson:
    return {}


def check_tied(json: ConfigJson, config: ModelConfig) -> None:
    """Raises UserError if the config.json of a masked LM has untied embeddings; other models always pass."""
    if config.masked_lm_head and not json.get("tie_word_embeddings", True):
        raise UserError("config.json has tie_word_embeddings False; only True is supported for a masked LM")


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """Converts a family's model configs and tensor names between this package and transformers.

    `read_config` and `write_config` convert config.json; `names` builds the name table of the weights.
    """

    model_type: str  # value of `model_type` in config.json
    architecture: str | Callable[[ModelConfig], str]  # the class of transformers that computes the same logits
    base: Callable[[], ModelConfig]  # builds a config with transformers' defaults for missing keys
    fields: Mapping[str, str]  # key of config.json -> path of the ModelConfig field it sets ("position.max_length")
    table: Callable[[ModelConfig], list[NameRow]]  # builds the name table of a pretraining model; see `names`
    constants: ConfigJson = dataclasses.field(default_factory=dict)  # key of config.json -> the only supported value
    # alternative name of a key, which has priority -> key
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    nullable: tuple[str, ...] = NULLABLE  # keys of `fields` that may be null
    default_labels: int = 2  # transformers' number of labels for a config.json without labels
    divisible: bool = False  # whether transformers requires hidden_size to be a multiple of num_attention_heads
    in_transformers: bool = True  # False: only code that was released with the weights has the class
    # Conversions that `fields` cannot express: `read` sets or adjusts fields, `write` returns keys of config.json.
    read: Callable[[ConfigJson, ModelConfig], None] = _nothing_to_read
    notes: Callable[[ConfigJson], list[str]] = lambda json: []  # features of config.json that this package ignores
    write: Callable[[ModelConfig], ConfigJson] = _nothing_to_write
    tied: Callable[[ModelConfig], dict[str, str]] = lambda config: {}  # name of a tied copy -> original
    # name of a tensor that a file of `architecture` may lack -> the tensor whose values transformers then uses
    copied: Callable[[ModelConfig], dict[str, str]] = lambda config: {}
    zeros: Callable[[ModelConfig], dict[str, tuple[int, ...]]] = lambda config: {}  # their zero tensors: name -> shape
    ignored: tuple[str, ...] = ()  # regular expressions for tensors to skip (masks, frequencies, unused heads)

    sequence_classification_class: Optional[TaskClass] = None  # ForSequenceClassification
    token_classification_class: Optional[TaskClass] = None  # ForTokenClassification
    multiple_choice_class: Optional[TaskClass] = None  # ForMultipleChoice
    question_answering_class: Optional[TaskClass] = None  # ForQuestionAnswering

    @property
    def classifiers(self) -> list[TaskClass]:
        """Lists the classes with task heads that transformers has for this family."""
        classes = (
            self.sequence_classification_class,
            self.token_classification_class,
            self.multiple_choice_class,
            self.question_answering_class,
        )
        return [classifier for classifier in classes if classifier is not None]

    def classifier_of(self, head: Optional[HeadConfig]) -> Optional[TaskClass]:
        """Returns the transformers class with this kind of task head, or None if there is no such class.

        For a head without parameters (`Embed`), returns the sequence classifier, because outside the head it has the
        same tensor names as the class without a head.
        """
        if isinstance(head, Embed):
            return self.sequence_classification_class
        return next((classifier for classifier in self.classifiers if _is_same_kind(classifier.head, head)), None)

    def names(self, config: ModelConfig) -> list[NameRow]:
        """Builds the table of a model's tensor names, without parameters of heads that transformers does not have."""
        rows, classifier, head = self.table(config), self.classifier_of(config.head), config.head
        if head is None:
            return rows
        rows = [row for row in rows if row.path.partition("/")[0] not in _PRETRAINING_MODULES]
        if config.family == "encoder":  # possibly the encoder of an encoder-decoder
            rows = [row for row in rows if not row.path.startswith("decoder")]
        if classifier is None:
            return rows
        rows = [classifier.name_of(row) for row in rows]
        return rows + classifier.rows(head) if isinstance(head, TaskHead) else rows

    def read_config(self, json: ConfigJson) -> ModelConfig:
        """Converts a config.json to a model config.

        Raises:
          UserError: this package does not support the model.
        """
        architecture = (json.get("architectures") or [""])[0]
        for classifier in self.classifiers:
            if architecture == classifier.architecture:
                encoder_decoder_key = {"is_encoder_decoder": True} if classifier.family else {}  # some files have False
                _check_constants(json, classifier.constants, architecture)
                config = without_heads(self.read_config({**json, "architectures": None, **encoder_decoder_key}))
                config = config.stacks[classifier.family] if classifier.family else config
                config.head = read_head(json, classifier.head_for(config), self.default_labels, classifier.dropout)
                return classifier.apply_to(config)
        config = self.base()
        json = json | {key: json[alias] for alias, key in self.aliases.items() if alias in json}
        _check_constants(json, self.constants, self.model_type)
        for key, path in self.fields.items():
            if key in json:
                if json[key] is None and key not in self.nullable:
                    raise UserError(f"config.json has {key} null, which {self.model_type!r} does not support")
                _set_field(config, path, _our_value(path, key, json[key]))
        self.read(json, config)
        if (types := json.get("layer_types")) is not None and len(types) != config.num_layers:
            raise UserError(f"config.json has {len(types)} layer_types for {config.num_layers} layers")
        if self.divisible and config.d_model % config.num_heads:
            raise UserError(
                f"config.json has hidden_size {config.d_model}, which must be a multiple of num_attention_heads, "
                f"{config.num_heads}"
            )
        return config

    def read_as(self, json: ConfigJson, config: ModelConfig) -> ModelConfig:
        """Converts `json`, which was written for `config`, back to a model config.

        A head without parameters is copied from `config`, because `json` names a class without a head.
        """
        config_read = self.read_config(json)
        return (
            dataclasses.replace(without_heads(config_read), head=config.head)
            if isinstance(config.head, Embed)
            else config_read
        )

    def class_of(self, config: ModelConfig) -> str:
        """Returns the name of the transformers class that computes the same function as `config`.

        Raises:
          UserError: transformers has no class of this family with the task head of `config`.
        """
        if config.head is not None:
            if (classifier := self.classifier_of(config.head)) is None:
                raise UserError(f"{self.model_type!r} of transformers has no class with the head {config.head}")
            bare = re.sub("For[A-Z][A-Za-z]+$", "Model", classifier.architecture)
            return bare if isinstance(config.head, Embed) else classifier.architecture
        return self.architecture if isinstance(self.architecture, str) else self.architecture(config)

    def write_config(self, config: ModelConfig) -> ConfigJson:
        """Converts a model config to a config.json.

        The class in transformers may have biases that the model does not have; the export writes zeros for them.

        Raises:
          UserError: transformers cannot compute the function of `config`; the message lists the unsupported fields.
        """
        architecture = self.class_of(config)
        cannot = f"{architecture} of transformers cannot express"
        if (config.experts is None) != (self.base().experts is None):  # `fields` would refer to fields of None
            raise UserError(f"{cannot} config.model.experts={config.experts!r}")
        json = {"model_type": self.model_type, "architectures": [architecture], **self.constants}
        for key, path in self.fields.items():
            value = _field(config, path)
            json[key] = their_activation(config) if path == "activation" else value
        json |= self.write(config)
        if isinstance(config.head, TaskHead) and (classifier := self.classifier_of(config.head)) is not None:
            json |= write_head(config.head, classifier.dropout, config.dropout_rate)
        refused_nulls = {key for key in self.fields if json[key] is None and key not in self.nullable}
        json = {key: value for key, value in json.items() if key not in refused_nulls}  # transformers' defaults apply
        try:
            theirs = self.read_as(json, config)
        except UserError as e:
            raise UserError(f"{architecture} of transformers does not support the model: {e}") from e
        bias_pairs = zip(biases(theirs), biases(config), strict=True)
        ignored = _BIAS_FIELDS if all(our_bias <= their_bias for their_bias, our_bias in bias_pairs) else ()
        differing_fields = [name for name in differences(theirs, config) if name not in ignored]
        if differing_fields:
            values = (value for name in differing_fields for value in _differing_values(config, theirs, name))
            raise UserError(f"{cannot} {', '.join(values)}")
        return json


def _differing_values(config: ModelConfig, theirs: ModelConfig, name: str) -> Iterable[str]:
    """Formats a field that differs as "config.model.field=value"; a head yields one string per differing head field."""
    head, their_head = config.head, theirs.head
    if name == "head" and head is not None and type(head) is type(their_head):
        fields = [
            field for field, x in vars(without_training(head)).items() if x != vars(without_training(their_head))[field]
        ]
        return (f"config.model.head.{field}={getattr(head, field)!r}" for field in fields)
    return (f"config.model.{name}={getattr(config, name)!r}",)


def _is_same_kind(a: HeadConfig, b: Optional[HeadConfig]) -> bool:
    """Returns True if two heads have the same class; multiple choice and classification count as different classes."""
    is_choice = [isinstance(head, Classify) and head.kind == "choice" for head in (a, b)]
    return type(a) is type(b) and is_choice[0] == is_choice[1]


def their_activation(config: ModelConfig) -> str:
    """Returns the name of the model's activation in config.json."""
    return _ACTIVATIONS[config.activation]


def _check_constants(json: ConfigJson, constants: Mapping[str, object], name: str) -> None:
    """Raises UserError if a key of config.json has a value that the class `name` does not support."""
    for key, value in constants.items():
        if json.get(key, value) != value and not (json[key] is None and _is_equivalent_to_null(value)):
            raise UserError(f"config.json has {key} {json[key]!r}; {name!r} supports only {value!r}")


def _is_equivalent_to_null(value: object) -> bool:
    """Returns True if null in config.json means the same as `value`: if `value` is False or a string."""
    return value is False or isinstance(value, str)


_BIAS_FIELDS = ("use_bias", "qkv_bias")


def _field(config: ModelConfig, path: str) -> object:
    """Returns the value of a field, or None in a part that is None; `path` may be nested: "position.max_length"."""
    return functools.reduce(lambda part, name: None if part is None else getattr(part, name), path.split("."), config)


def _set_field(config: ModelConfig, path: str, value: object) -> None:
    *parents, name = path.split(".")
    setattr(functools.reduce(getattr, parents, config), name, value)


def _our_value(path: str, key: str, value: object) -> object:
    if path != "activation":
        return value
    if value not in _THEIR_ACTIVATIONS:
        raise UserError(f"config.json has {key} {value!r}; supported: {', '.join(sorted(_THEIR_ACTIVATIONS))}")
    return _THEIR_ACTIVATIONS[value]


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of published models: `preset(variant)` builds the model config of each variant in `sizes`."""

    name: str  # for display
    prefix: str  # a preset name is prefix + variant: "bert_" + "base"
    preset: Callable[[str], ModelConfig]
    sizes: Mapping[str, object]  # variant -> row of the size table
    paper: str
    objective: str  # the pretraining objective, for display
    huggingface: Optional[HuggingFace]  # None if transformers has no such model
    configs: Mapping[str, str] = dataclasses.field(default_factory=dict)  # variant -> the value of --config


def config_variants(config: str, variants: Iterable[str]) -> dict[str, str]:
    """Maps each variant to the --config value that trains it, for use as `Family.configs`.

    Args:
      config: name of a file in configs/, without ".py". The file must define variants with the same names.
    """
    return {variant: f"configs/{config}.py:{variant}" for variant in variants}
