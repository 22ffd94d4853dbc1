"""A published family: its rows, and how transformers writes it down (config.json and tensor names)."""

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

# The contents of a config.json, whatever it holds: each family's `read` checks the values that it uses.
ConfigJson: TypeAlias = JsonObject
_Part = TypeVar("_Part", HeadConfig, MixtureOfExperts, SparseAttention)

# config.json's names of activations, where they are not ours; several of theirs may be one of ours
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


class Part(NamedTuple):
    """Says what of a matrix of theirs is ours: of so many equal pieces of its outputs, `count`, from `first` on."""

    first: int = 0
    count: int = 1
    pieces: int = 1

    def of(self, size: int) -> slice:
        """Returns where ours are among `size` outputs of theirs."""
        piece = size // self.pieces
        return slice(self.first * piece, (self.first + self.count) * piece)

    def whole(self, size: int) -> int:
        """Returns how many outputs theirs has, where ours has `size`."""
        return size // self.count * self.pieces


class Every(NamedTuple):
    """Says that ours is each so many-th output of theirs, from `first` on (gpt-oss: gate and up in turns)."""

    first: int
    pieces: int

    def of(self, size: int) -> slice:
        """Returns where ours are among `size` outputs of theirs."""
        return slice(self.first, size, self.pieces)

    def whole(self, size: int) -> int:
        """Returns how many outputs theirs has, where ours has `size`."""
        return size * self.pieces


WHOLE = Part()


class Row(NamedTuple):
    """The place of one of our parameters in a Hugging Face state dict."""

    path: str  # ours
    name: str  # theirs; "{layer}" where ours stacks all layers on its first axis, "{expert}" the same of the next
    transposed: bool = False  # theirs is torch.nn.Linear's [out, in]; ours is [in, out], each perhaps cut into heads
    part: Part | Every = WHOLE  # which of their outputs are ours (GPT-2's query | key | value); else all
    first: Optional[str] = None  # the name in layer 0, where it is another
    layers: Optional[Sequence[int]] = None  # the numbers that theirs have of the layers of ours; None: 0, 1, …


def linear(path: str, name: str, bias: bool, part: Part = WHOLE) -> list[Row]:
    """Returns the rows of a linear map that theirs is a torch.nn.Linear of."""
    rows = [Row(f"{path}/kernel", f"{name}.weight", transposed=True, part=part)]
    return rows + [Row(f"{path}/bias", f"{name}.bias", part=part)] if bias else rows


def layer_norm(path: str, name: str) -> list[Row]:
    return [Row(f"{path}/scale", f"{name}.weight"), Row(f"{path}/bias", f"{name}.bias")]


TaskHead: TypeAlias = Classify | Tag | Extract
_MODULES = {Classify: "classifier", Tag: "tagger", Extract: "extractor"}


class Classifier(NamedTuple):
    """Says how transformers' class for a family writes down a head of a whole row, of its words, or of its tokens."""

    architecture: str  # "BertForSequenceClassification"
    head: TaskHead  # as that class has it
    output: str = "score"  # their name of the last map; of decoders this one
    dense: str = ""  # of the hidden layer
    norm: str = ""  # of its norm
    prefix: str = ""  # before the names of all that is no head
    base: str = ""  # how those begin, up to a point, where it is with another word than in the class of pretraining
    family: str = ""  # of the model that has it, where that is a part of the one that is pretrained: "encoder"
    changes: Mapping[str, object] = MappingProxyType({})  # fields of the model that have another value in this class
    more: tuple[Row, ...] = ()  # of what the head has beside

    def of_model(self, config: ModelConfig) -> ModelConfig:
        """Returns a model with the fields that have another value in this class, and objects of its own there."""
        return dataclasses.replace(config, **copy.deepcopy(dict(self.changes)))

    def rows(self, head: TaskHead) -> list[Row]:
        """Returns the rows of the head."""
        module = _MODULES[type(head)]
        rows = linear(f"{module}/output", self.output, head.output_bias)
        rows += linear(f"{module}/dense", self.dense, head.hidden_bias) if head.hidden != "none" else []
        rows += self.more if isinstance(head, Extract) and head.feed_forward else ()
        return rows + ([Row(f"{module}/norm/scale", f"{self.norm}.weight")] if head.hidden_norm else [])

    def name_of(self, row: Row) -> Row:
        """Returns the row of a parameter that is of no head."""
        rest = row.name.partition(".")[2]
        return row._replace(name=f"{self.base}.{rest}" if self.base else self.prefix + row.name)


def extractor(architecture: str, **names) -> Classifier:
    """Returns the same of the class for question answering beside another of the same model."""
    return Classifier(f"{architecture.partition('For')[0]}ForQuestionAnswering", Extract(), "qa_outputs", **names)


def token_classifier(architecture: str, output: str = "classifier", **names) -> Classifier:
    """Returns how the class for token classification beside another of the same model writes down its head."""
    return Classifier(f"{architecture.partition('For')[0]}ForTokenClassification", Tag(), output, **names)


LAST = Classify(pooling="last", hidden="none", output_bias=False)  # of every decoder
_PROBLEMS = {"single": "single_label_classification", "multi": "multi_label_classification", "regression": "regression"}
_OF_PRETRAINING = ("masked_lm_head", "unembedding", "pair_head", "replaced_token_head")  # what a task's model has not


def without_heads(config: ModelConfig) -> ModelConfig:
    """Returns an architecture without the heads of its pretraining, and what only they need."""
    plain = copy.deepcopy(config)
    plain.masked_lm_head = plain.pair_head = plain.replaced_token_head = plain.replaced_token_context = False
    plain.enhanced_mask_decoder = False
    return dataclasses.replace(plain, generator=None, multi_token=None)


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
    token_classifier: Optional[Classifier] = None  # that with a head of each word
    chooser: Optional[Classifier] = None  # the one that gives each of several rows a number
    extractor: Optional[Classifier] = None  # the one that finds an answer in a row

    @property
    def classifiers(self) -> list[Classifier]:
        """Returns the classes of transformers that have heads of tasks."""
        classes = (self.classifier, self.token_classifier, self.chooser, self.extractor)
        return [found for found in classes if found is not None]

    def classifier_of(self, head: Optional[HeadConfig]) -> Optional[Classifier]:
        """Returns the class of transformers with such a head; None: it has none. Of a head without parameters it is
        that of a whole row, as what it names below its head has the names of the class without any."""
        if isinstance(head, Embed):
            return self.classifier
        return next((found for found in self.classifiers if _alike(found.head, head)), None)

    def names(self, config: ModelConfig) -> list[Row]:
        """Returns the name table of a model, with the heads that it has and transformers too."""
        rows, classifier, head = self.table(config), self.classifier_of(config.head), config.head
        if head is None:
            return rows
        rows = [row for row in rows if row.path.partition("/")[0] not in _OF_PRETRAINING]
        if config.family == "encoder":  # perhaps that of an encoder-decoder
            rows = [row for row in rows if not row.path.startswith("decoder")]
        if classifier is None:
            return rows
        rows = [classifier.name_of(row) for row in rows]
        return rows + classifier.rows(head) if isinstance(head, TaskHead) else rows

    def read_config(self, json: ConfigJson) -> ModelConfig:
        """Returns the architecture that a config.json describes; UserError where it is none that we compute."""
        named = (json.get("architectures") or [""])[0]
        for classifier in self.classifiers:
            if named == classifier.architecture:
                whole = {"is_encoder_decoder": True} if classifier.family else {}  # which it may say no longer
                config = without_heads(self.read_config({**json, "architectures": None, **whole}))
                config.head = _read_head(json, classifier.head)
                config.family = classifier.family or config.family  # pyright: ignore[reportAttributeAccessIssue]
                return classifier.of_model(config)
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
            if (classifier := self.classifier_of(config.head)) is None:
                raise UserError(f"{self.model_type!r} of transformers has no class with the head {config.head}")
            bare = re.sub("For[A-Z][A-Za-z]+$", "Model", classifier.architecture)
            return bare if isinstance(config.head, Embed) else classifier.architecture
        return self.architecture if isinstance(self.architecture, str) else self.architecture(config)

    def write_config(self, config: ModelConfig) -> ConfigJson:
        """Returns the config.json of `config`; UserError where this family of transformers cannot compute it.

        Biases that theirs has and `config` has not are no obstacle: `read_config` says which, and they are zero.
        """
        architecture = self.class_of(config)
        if (config.experts is None) != (self.base().experts is None):  # whose fields there would be none to ask for
            raise UserError(f"{architecture} of transformers has no way to say config.model.experts={config.experts!r}")
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
                f"{architecture} of transformers has no way to say "
                + ", ".join(said for name in different for said in _said(config, theirs, name))
            )
        return json


def _said(config: ModelConfig, theirs: ModelConfig, name: str) -> Iterable[str]:
    """Returns a field of a model that theirs has otherwise, with its value; of a head its fields."""
    head, other = config.head, theirs.head
    if name == "head" and head is not None and type(head) is type(other):
        fields = [field for field, x in vars(_computed(head)).items() if x != vars(_computed(other))[field]]
        return (f"config.model.head.{field}={getattr(head, field)!r}" for field in fields)
    return (f"config.model.{name}={getattr(config, name)!r}",)


def _alike(a: HeadConfig, b: Optional[HeadConfig]) -> bool:
    """Returns True if heads are of one kind; that of a choice is another one than that of classes."""
    chooses = [isinstance(head, Classify) and head.kind == "choice" for head in (a, b)]
    return type(a) is type(b) and chooses[0] == chooses[1]


def _read_head(json: ConfigJson, usual: TaskHead) -> TaskHead:
    """Returns the head that a config.json describes: as many labels as are named, two where none are.

    Of a choice these are the texts to choose from, which change no weight.
    """
    labels = len(json.get("id2label") or ()) or 2
    if isinstance(usual, Extract):
        return dataclasses.replace(usual)
    if isinstance(usual, Tag):
        return dataclasses.replace(usual, num_labels=labels)
    kinds = {theirs: ours for ours, theirs in _PROBLEMS.items()}
    kind = kinds.get(json.get("problem_type"), "regression" if labels == 1 else "single")
    kind = "choice" if usual.kind == "choice" else kind
    pooling = json.get("classifier_pooling", usual.pooling)  # of ModernBERT
    return dataclasses.replace(usual, num_labels=labels, kind=kind, pooling=pooling)


def _write_head(head: TaskHead) -> ConfigJson:
    """Returns what config.json says of a head; the labels have numbers for names until somebody names them."""
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


def _null_is(value: object) -> bool:
    """Returns True if null says the same as `value`, of a constant: no, or a word that is not said."""
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
    if name == "num_kv_heads":  # None and the number that it stands for are the same
        return a.kv_heads != b.kv_heads
    if name == "head_dim":
        return a.dim_per_head != b.dim_per_head
    of_a, of_b = getattr(a, name), getattr(b, name)
    if name in ("head", "experts", "sparse_attention") and of_a is not None and of_b is not None:
        return _computed(of_a) != _computed(of_b)
    if name == "num_decoder_layers":
        return "encoder_decoder" in (a.family, b.family) and a.last_stack.num_layers != b.last_stack.num_layers
    if name == "decoder" and of_a != of_b:
        return any(_differ(a.last_stack, b.last_stack, size) for size in DecoderSizes.__dataclass_fields__)
    return name not in _TRAINING and of_a != of_b


def _computed(part: _Part) -> _Part:
    """Returns a head, experts or sparse attention without what is of training, of what is said in the end, or of how
    long a question may be, and not of the logits."""
    of_training = {"dropout_rate": None, "follows": (), "capacity": None, "balance_weight": 0.0, "z_weight": 0.0}
    of_training |= {"balance_over": "batch", "longest_question": 0}
    if getattr(part, "bias_rate", None) is not None:  # of a bias that is computed with
        of_training["bias_rate"] = 0.0
    return dataclasses.replace(part, **{name: x for name, x in of_training.items() if name in vars(part)})


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
