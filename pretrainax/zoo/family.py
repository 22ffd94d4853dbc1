"""Published families: their sizes, and the conversion to and from transformers (config.json and tensor names).

In names and comments, "ours" is what belongs to this package and "theirs" is what belongs to transformers. A name table
is a list of `NameRow`: it maps each of our parameters to its tensors in files of transformers.
"""

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Optional, TypeAlias, TypeVar

from pretrainax.config import (
    Classify,
    DecoderSizes,
    Embed,
    Extract,
    HeadConfig,
    MixtureOfExperts,
    ModelConfig,
    SparseAttention,
    Tag,
    UserError,
)
from pretrainax.files.json_files import JsonObject

# The contents of a config.json, not validated: `HuggingFace.read` of each family checks the values that it reads.
ConfigJson: TypeAlias = JsonObject
_Part = TypeVar("_Part", HeadConfig, MixtureOfExperts, SparseAttention)

# Our name of an activation -> its name in config.json. transformers may have several names for one of our activations.
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


class FusedPart(NamedTuple):
    """Selects contiguous outputs of a fused matrix in transformers, which contains one of our matrices.

    The outputs of the fused matrix are divided into `pieces` equal pieces. Our matrix is the `count` pieces from piece
    `first` on.
    """

    first: int = 0
    count: int = 1
    pieces: int = 1

    def of(self, size: int) -> slice:
        """Returns the slice that selects our outputs from the `size` outputs of the fused matrix."""
        piece = size // self.pieces
        return slice(self.first * piece, (self.first + self.count) * piece)

    def whole(self, size: int) -> int:
        """Returns the number of outputs of the fused matrix if our matrix has `size` outputs."""
        return size // self.count * self.pieces


class Every(NamedTuple):
    """Selects every `pieces`-th output of a fused matrix in transformers, starting at output `first`.

    gpt-oss interleaves the outputs of the gate and up projections in this way.
    """

    first: int
    pieces: int

    def of(self, size: int) -> slice:
        """Returns the slice that selects our outputs from the `size` outputs of the fused matrix."""
        return slice(self.first, size, self.pieces)

    def whole(self, size: int) -> int:
        """Returns the number of outputs of the fused matrix if our matrix has `size` outputs."""
        return size * self.pieces


WHOLE = FusedPart()


class NameRow(NamedTuple):
    """One row of a name table: maps one of our parameters to its tensors in a Hugging Face state dict."""

    path: str  # the path of our parameter, "decoder/blocks/mlp/up/kernel"
    # The name of their tensor. It contains "{layer}" if our first axis stacks layers, and "{expert}" if our next axis
    # stacks experts.
    name: str
    # True: their tensor is the weight of a torch.nn.Linear, [out, in]. Ours is [in, out]; `in` or `out` may be two
    # axes, heads and width.
    transposed: bool = False
    part: FusedPart | Every = WHOLE  # selects our outputs from a fused tensor (GPT-2: query | key | value)
    first: Optional[str] = None  # the tensor name in layer 0 if it differs from `name`
    layers: Optional[Sequence[int]] = None  # the layer number in transformers of each stacked layer; None: 0, 1, …


def linear(path: str, name: str, bias: bool, part: FusedPart = WHOLE) -> list[NameRow]:
    """Returns the name-table rows of a linear layer: its kernel and, with `bias`, its bias.

    Args:
      path: our path of the layer.
      name: the name of the torch.nn.Linear in transformers.
      part: selects our outputs from a fused matrix.
    """
    rows = [NameRow(f"{path}/kernel", f"{name}.weight", transposed=True, part=part)]
    return rows + [NameRow(f"{path}/bias", f"{name}.bias", part=part)] if bias else rows


def layer_norm(path: str, name: str) -> list[NameRow]:
    return [NameRow(f"{path}/scale", f"{name}.weight"), NameRow(f"{path}/bias", f"{name}.bias")]


TaskHead: TypeAlias = Classify | Tag | Extract
_MODULES = {Classify: "classifier", Tag: "tagger", Extract: "extractor"}


class TaskClass(NamedTuple):
    """Describes a class of transformers with a task head: for sequences, multiple choice, tokens or answer spans."""

    architecture: str  # "BertForSequenceClassification"
    head: TaskHead  # the config of our head that computes the same function
    output: str = "score"  # their name of the output layer; "score" in decoders
    dense: str = ""  # their name of the hidden layer of the head
    norm: str = ""  # their name of the norm of the hidden layer
    prefix: str = ""  # is put before the names of all tensors outside the head
    base: str = ""  # replaces the first component of the names of tensors outside the head; "" keeps that component
    family: str = ""  # "encoder" if the class uses only the encoder of the pretrained model; "": the whole model
    changes: Mapping[str, object] = MappingProxyType({})  # fields of ModelConfig with a different value in this class
    more: tuple[NameRow, ...] = ()  # additional name-table rows of the head

    def apply_to(self, config: ModelConfig) -> ModelConfig:
        """Returns `config` with the field values that this class overrides (copies of `changes`)."""
        return dataclasses.replace(config, **copy.deepcopy(dict(self.changes)))

    def rows(self, head: TaskHead) -> list[NameRow]:
        """Returns the name-table rows of the parameters of `head`."""
        module = _MODULES[type(head)]
        rows = linear(f"{module}/output", self.output, head.output_bias)
        rows += linear(f"{module}/dense", self.dense, head.hidden_bias) if head.hidden != "none" else []
        rows += self.more if isinstance(head, Extract) and head.feed_forward else ()
        return rows + ([NameRow(f"{module}/norm/scale", f"{self.norm}.weight")] if head.hidden_norm else [])

    def name_of(self, row: NameRow) -> NameRow:
        """Returns `row`, a row of a parameter outside the head, with the tensor name that this class has for it."""
        rest = row.name.partition(".")[2]
        return row._replace(name=f"{self.base}.{rest}" if self.base else self.prefix + row.name)


def question_answering_class(architecture: str, **names) -> TaskClass:
    """Returns the question-answering class of a model, such as BertForQuestionAnswering.

    Args:
      architecture: the name of any other class of the model in transformers, such as "BertForMaskedLM".
      names: fields of the TaskClass.
    """
    return TaskClass(f"{architecture.partition('For')[0]}ForQuestionAnswering", Extract(), "qa_outputs", **names)


def token_classification_class(architecture: str, output: str = "classifier", **names) -> TaskClass:
    """Returns the token-classification class of a model, such as BertForTokenClassification.

    Args:
      architecture: the name of any other class of the model in transformers, such as "BertForMaskedLM".
      output: transformers' name of the output layer.
      names: fields of the TaskClass.
    """
    return TaskClass(f"{architecture.partition('For')[0]}ForTokenClassification", Tag(), output, **names)


LAST = Classify(pooling="last", hidden="none", output_bias=False)  # the classification head of all decoders
_PROBLEMS = {"single": "single_label_classification", "multi": "multi_label_classification", "regression": "regression"}
# Pretraining heads, which a model with a task head does not have.
_PRETRAINING_MODULES = ("masked_lm_head", "unembedding", "pair_head", "replaced_token_head")


def without_heads(config: ModelConfig) -> ModelConfig:
    """Returns a copy of a model config without its pretraining heads and the fields that only these heads use."""
    plain = copy.deepcopy(config)
    plain.masked_lm_head = plain.pair_head = plain.replaced_token_head = plain.replaced_token_context = False
    plain.enhanced_mask_decoder = False
    return dataclasses.replace(plain, generator=None, multi_token=None)


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
    """Converts the models of a family between this package and transformers.

    `read_config` and `write_config` convert config.json; `names` gives the name table of the weights.
    """

    model_type: str  # of config.json
    architecture: str | Callable[[ModelConfig], str]  # the class of transformers that computes the same logits
    base: Callable[[], ModelConfig]  # returns a new config with the values of transformers for missing keys
    fields: Mapping[str, str]  # key of config.json -> field of ModelConfig, "position.max_length" for a nested field
    table: Callable[[ModelConfig], list[NameRow]]  # returns the name table of a pretraining model: see `names`
    constants: ConfigJson = dataclasses.field(default_factory=dict)  # key of config.json -> the only supported value
    # Conversions that `fields` cannot express: `read` sets fields of the config, `write` returns keys of config.json.
    read: Callable[[ConfigJson, ModelConfig], None] = _nothing_to_read
    write: Callable[[ModelConfig], ConfigJson] = _nothing_to_write
    tied: Callable[[ModelConfig], dict[str, str]] = lambda config: {}  # tied copies in a file -> original
    zeros: Callable[[ModelConfig], dict[str, tuple[int, ...]]] = lambda config: {}  # their tensors of zeros -> shape
    ignored: tuple[str, ...] = ()  # regular expressions: tensors to skip (masks, frequencies, unused heads)

    classifier: Optional[TaskClass] = None  # ForSequenceClassification
    token_classification_class: Optional[TaskClass] = None  # ForTokenClassification
    chooser: Optional[TaskClass] = None  # ForMultipleChoice
    question_answering_class: Optional[TaskClass] = None  # ForQuestionAnswering

    @property
    def classifiers(self) -> list[TaskClass]:
        """Returns the classes with task heads that transformers has for this family."""
        classes = (self.classifier, self.token_classification_class, self.chooser, self.question_answering_class)
        return [classifier for classifier in classes if classifier is not None]

    def classifier_of(self, head: Optional[HeadConfig]) -> Optional[TaskClass]:
        """Returns the class of transformers with this kind of task head; None if there is no such class.

        For a head without parameters (`Embed`), the result is the sequence classifier. Its names of the tensors outside
        the head are equal to the names in the class without a head.
        """
        if isinstance(head, Embed):
            return self.classifier
        return next((classifier for classifier in self.classifiers if _is_same_kind(classifier.head, head)), None)

    def names(self, config: ModelConfig) -> list[NameRow]:
        """Returns the name table of a model. Parameters of a head that transformers does not have are left out."""
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
        """Returns the model config that a config.json describes.

        Raises:
          UserError: this package does not support the described model.
        """
        architecture = (json.get("architectures") or [""])[0]
        for classifier in self.classifiers:
            if architecture == classifier.architecture:
                whole = {"is_encoder_decoder": True} if classifier.family else {}  # files of this class may have False
                config = without_heads(self.read_config({**json, "architectures": None, **whole}))
                config.head = _read_head(json, classifier.head)
                config.family = classifier.family or config.family  # pyright: ignore[reportAttributeAccessIssue]
                return classifier.apply_to(config)
        config = self.base()
        for key, value in self.constants.items():
            if json.get(key, value) != value and not (json[key] is None and _null_means(value)):
                raise UserError(f"config.json has {key} {json[key]!r}; {self.model_type!r} supports only {value!r}")
        for key, path in self.fields.items():
            if key in json:
                _set_field(config, path, _our_value(path, key, json[key]))
        self.read(json, config)
        return config

    def read_as(self, json: ConfigJson, config: ModelConfig) -> ModelConfig:
        """Returns the model config that `json` describes, where `json` was written for `config`.

        A head without parameters is taken from `config`, because its class in transformers has no head.
        """
        read = self.read_config(json)
        return dataclasses.replace(without_heads(read), head=config.head) if isinstance(config.head, Embed) else read

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
        """Returns the config.json of `config`.

        Biases that only the class in transformers has are allowed: the export writes them as zeros.

        Raises:
          UserError: transformers cannot compute the function of `config`; the message lists the unsupported fields.
        """
        architecture = self.class_of(config)
        if (config.experts is None) != (self.base().experts is None):  # then `fields` would name missing attributes
            raise UserError(f"{architecture} of transformers cannot express config.model.experts={config.experts!r}")
        json = {"model_type": self.model_type, "architectures": [architecture], **self.constants}
        for key, path in self.fields.items():
            value = _field(config, path)
            json[key] = _ACTIVATIONS[value] if path == "activation" else value
        json |= self.write(config)
        if isinstance(config.head, TaskHead):
            json |= _write_head(config.head)
        theirs = self.read_as(json, config)
        more = zip(biases(theirs), biases(config), strict=True)
        fillable = _BIASES if all(mine <= their for their, mine in more) else ()
        different = [name for name in differences(theirs, config) if name not in fillable]
        if different:
            raise UserError(
                f"{architecture} of transformers cannot express "
                + ", ".join(value for name in different for value in _differing_values(config, theirs, name))
            )
        return json


def _differing_values(config: ModelConfig, theirs: ModelConfig, name: str) -> Iterable[str]:
    """Returns "config.model.field=value" for the differing field `name`; for a head, one string per differing field."""
    head, other = config.head, theirs.head
    if name == "head" and head is not None and type(head) is type(other):
        fields = [
            field for field, x in vars(_without_training(head)).items() if x != vars(_without_training(other))[field]
        ]
        return (f"config.model.head.{field}={getattr(head, field)!r}" for field in fields)
    return (f"config.model.{name}={getattr(config, name)!r}",)


def _is_same_kind(a: HeadConfig, b: Optional[HeadConfig]) -> bool:
    """Returns True if two heads have the same class. Multiple choice and classification count as different classes."""
    chooses = [isinstance(head, Classify) and head.kind == "choice" for head in (a, b)]
    return type(a) is type(b) and chooses[0] == chooses[1]


def _read_head(json: ConfigJson, usual: TaskHead) -> TaskHead:
    """Returns the config of the task head that a config.json describes.

    The number of labels is the number of entries of id2label, or two without id2label. For multiple choice, the labels
    are the choices, and their number does not change the weights.

    Args:
      usual: the head of the class that config.json names.
    """
    labels = len(json.get("id2label") or ()) or 2
    if isinstance(usual, Extract):
        return dataclasses.replace(usual)
    if isinstance(usual, Tag):
        return dataclasses.replace(usual, num_labels=labels)
    kinds = {theirs: ours for ours, theirs in _PROBLEMS.items()}
    kind = kinds.get(json.get("problem_type"), "regression" if labels == 1 else "single")
    kind = "choice" if usual.kind == "choice" else kind
    pooling = json.get("classifier_pooling", usual.pooling)  # a key of ModernBERT
    return dataclasses.replace(usual, num_labels=labels, kind=kind, pooling=pooling)


def _write_head(head: TaskHead) -> ConfigJson:
    """Returns the keys of config.json for a task head; the labels have the names LABEL_0, LABEL_1, …"""
    if isinstance(head, Extract):
        return {}
    names = [f"LABEL_{i}" for i in range(head.num_labels)]
    json: ConfigJson = {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }
    if isinstance(head, Tag):
        return json
    pooling = {"classifier_pooling": head.pooling} if head.hidden_norm else {}
    return {**json, "problem_type": _PROBLEMS.get(head.kind), **pooling}


def _null_means(value: object) -> bool:
    """Returns True if null in config.json is equivalent to `value`: for False and for strings."""
    return value is False or isinstance(value, str)


# Fields that matter only in training. They do not change the logits, so they may be missing in config.json.
_TRAINING = ("dropout_rate", "attention_dropout_rate", "init_stddev", "scale_residual_init")


_BIASES = ("use_bias", "qkv_bias")


def biases(config: ModelConfig) -> tuple[bool, bool]:
    """Returns (use_bias, qkv_bias): whether linear layers, and query, key and value projections, have biases."""
    return config.use_bias, config.use_bias if config.qkv_bias is None else config.qkv_bias


def differences(a: ModelConfig, b: ModelConfig) -> list[str]:
    """Returns the names of the fields that differ between two model configs, except fields that only training uses."""
    return [f.name for f in dataclasses.fields(a) if _differ(a, b, f.name)]


def _differ(a: ModelConfig, b: ModelConfig, name: str) -> bool:
    if name == "num_kv_heads":  # None is equivalent to the number of query heads
        return a.kv_heads != b.kv_heads
    if name == "head_dim":
        return a.dim_per_head != b.dim_per_head
    value_a, value_b = getattr(a, name), getattr(b, name)
    if name in ("head", "experts", "sparse_attention") and value_a is not None and value_b is not None:
        return _without_training(value_a) != _without_training(value_b)
    if name == "num_decoder_layers":
        return "encoder_decoder" in (a.family, b.family) and a.last_stack.num_layers != b.last_stack.num_layers
    if name == "decoder" and value_a != value_b:
        return any(_differ(a.last_stack, b.last_stack, size) for size in DecoderSizes.__dataclass_fields__)
    return name not in _TRAINING and value_a != value_b


def _without_training(part: _Part) -> _Part:
    """Returns `part` (the config of a head, experts or sparse attention) without its training settings.

    All fields that do not change the logits get a fixed value, so that they do not count as differences.
    """
    training = {"dropout_rate": None, "follows": (), "capacity": None, "balance_weight": 0.0, "z_weight": 0.0}
    training |= {"balance_over": "batch", "longest_question": 0}
    if getattr(part, "bias_rate", None) is not None:  # the logits depend on the bias, but not on its update rate
        training["bias_rate"] = 0.0
    return dataclasses.replace(part, **{name: x for name, x in training.items() if name in vars(part)})


def _field(config: ModelConfig, path: str) -> object:
    """Returns the value of a field of `config`; `path` may be nested, such as "position.max_length"."""
    return functools.reduce(getattr, path.split("."), config)


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
    """One family of published models: `preset(variant)` returns the model config of each variant in `sizes`."""

    name: str  # for display
    prefix: str  # preset names are prefix + variant: "bert_" + "base"
    preset: Callable[[str], ModelConfig]
    sizes: Mapping[str, object]  # variant -> row of the size table
    paper: str
    objective: str  # the pretraining objective, for display
    huggingface: Optional[HuggingFace]  # None if transformers has no such model
    configs: Mapping[str, str] = dataclasses.field(default_factory=dict)  # variant -> the value of --config


def config_variants(config: str, variants: Iterable[str]) -> dict[str, str]:
    """Returns `Family.configs` for variants that have the same names in a file of configs/.

    Args:
      config: name of the file in configs/, without ".py".
    """
    return {variant: f"configs/{config}.py:{variant}" for variant in variants}
