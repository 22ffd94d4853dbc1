"""Defines the configs of task heads, which replace the pretraining heads of a model in fine-tuning."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Optional

from pretrainax.config.auto import AUTO, Size
from pretrainax.config.choice import Choice

if TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment
    from pretrainax.config.model import ModelConfig

Pooling = Literal["cls", "mean", "max", "last"]
Kind = Literal["auto", "single", "multi", "regression", "choice"]


class HeadConfig(Choice):
    """Base class of the configs of task heads; models/heads/ has a Flax module and a loss for each subclass."""

    labels_tokens: ClassVar[bool] = False  # whether the head predicts from the state of each token, as in tagging

    def completed(self, wanted: "HeadConfig") -> "HeadConfig":
        """Returns a copy in which each `auto` is replaced by the value in `wanted`, the task's head config."""
        own_fields, wanted_fields = (vars(head) for head in (self, wanted)) if type(self) is type(wanted) else ({}, {})
        return dataclasses.replace(
            self, **{name: wanted_fields[name] for name, value in own_fields.items() if value == AUTO}
        )

    def left_open(self) -> "HeadConfig":
        """Returns a copy with `auto` in every field whose default is `auto`; this is the inverse of `completed`."""
        return dataclasses.replace(
            self, **{field.name: AUTO for field in dataclasses.fields(self) if field.default == AUTO}
        )


@dataclasses.dataclass
class Classify(HeadConfig):
    """Predicts a class, labels or numbers for a sequence, or selects one of several documents in a row.

    `pooling` reduces the last hidden states to one vector. An optional hidden layer and a linear layer follow. `usual`
    returns the published settings for each model family.
    """

    # number of classes, labels, regression values, or documents of a row to choose from; auto: set by the task
    num_labels: Size = AUTO  # pyright: ignore[reportAssignmentType]
    # single: one of several classes | multi: any set of independent labels | regression: numbers | choice: one of the
    # documents of a row, by a score for each; auto: set by the task
    kind: Kind = "auto"
    pooling: Pooling = "cls"  # the first token (cls), the mean or maximum over all tokens, or the last token
    # activation of a hidden layer with the width of the model; none: no hidden layer; model: the activation of the
    # feed-forward (BigBird, ModernBERT)
    hidden: Literal["none", "tanh", "gelu", "relu", "model"] = "tanh"
    hidden_bias: bool = True  # bias of the hidden layer
    hidden_norm: bool = False  # a norm of the output of the hidden layer (ModernBERT)
    output_bias: bool = True  # bias of the last linear layer (decoders: none)
    dropout_rate: Optional[float] = None  # dropout before each linear layer; None: config.model.dropout_rate

    @classmethod
    def usual(cls, model: "ModelConfig", num_labels: int, kind: Kind) -> "Classify":
        """Returns the default head for a model of this architecture."""
        if model.family == "decoder":
            return cls(num_labels, kind, pooling="last", hidden="none", output_bias=False)
        if model.own_model is not None and (classifier := model.own_model.default_classifier(num_labels, kind)):
            return classifier
        return cls(num_labels, kind, pooling="cls" if model.family == "encoder" else "last")

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        if AUTO in (self.num_labels, self.kind):
            yield "config.model.head.num_labels and kind are 'auto', which requires a task as config.objective"
        elif self.num_labels < 1:
            yield f"config.model.head.num_labels is {self.num_labels}, it must be at least 1"
        yield from _layer_problems(self)
        if self.pooling == "cls" and experiment.model.family == "decoder":
            yield "config.model.head.pooling is 'cls', but a decoder's first token attends only to itself: use 'last'"


@dataclasses.dataclass
class Tag(HeadConfig):
    """Predicts the tag of each word with a linear layer; words are independent or form a linear-chain CRF."""

    # number of tags; auto: set by the task
    num_labels: Size = AUTO  # pyright: ignore[reportAssignmentType]
    # softmax: each word independently | crf: all words of a row as a linear-chain CRF (Lafferty et al. 2001)
    kind: Literal["softmax", "crf"] = "softmax"
    # for each tag, the numbers of the tags that may precede the tag in a CRF; an empty inner tuple allows all tags.
    # (): no constraints. auto: the constraints of the task's tagging scheme: I-PER only after B-PER or I-PER
    follows: Annotated[tuple[tuple[int, ...], ...], AUTO] = ()
    # activation of a hidden layer with the width of the model; none: no hidden layer; model: the activation of the
    # feed-forward (ModernBERT)
    hidden: Literal["none", "gelu", "model"] = "none"
    hidden_bias: bool = True  # bias of the hidden layer
    hidden_norm: bool = False  # a norm of the output of the hidden layer (ModernBERT)
    output_bias: bool = True  # bias of the last linear layer
    dropout_rate: Optional[float] = None  # dropout before each linear layer; None: config.model.dropout_rate

    labels_tokens: ClassVar[bool] = True

    def left_open(self) -> "HeadConfig":
        return dataclasses.replace(super().left_open(), follows=())  # constraints, which only a CRF may have

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        if AUTO in (self.num_labels, self.follows):
            yield "config.model.head has 'auto' fields, which require a task as config.objective"
            return
        if self.num_labels < 1:
            yield f"config.model.head.num_labels is {self.num_labels}, it must be at least 1"
        if self.follows and self.kind != "crf":
            yield "config.model.head.follows requires a CRF: set config.model.head.kind to 'crf', or follows to ()"
        if self.follows and (
            len(self.follows) != self.num_labels or any(not 0 <= i < self.num_labels for x in self.follows for i in x)
        ):
            yield (
                f"config.model.head.follows is {self.follows}, it must have an entry for each of the {self.num_labels} "
                "tags, with the numbers of other tags"
            )
        yield from _layer_problems(self)


@dataclasses.dataclass
class Extract(HeadConfig):
    """Predicts the start and end of an answer span, with a linear layer to two logits per token."""

    # adds a feed-forward sublayer with residual and norm, as in a block, before the other layers (BigBird)
    feed_forward: bool = False
    # predicts answers only in the second segment (token type 1), or at the first token, if the question has no answer
    # (BigBird)
    second_text: bool = False
    # activation of a hidden layer with the width of the model; none: no hidden layer; model: the activation of the
    # feed-forward (ModernBERT)
    hidden: Literal["none", "gelu", "model"] = "none"
    hidden_bias: bool = True  # bias of the hidden layer
    hidden_norm: bool = False  # a norm of the output of the hidden layer (ModernBERT)
    output_bias: bool = True  # bias of the last linear layer
    dropout_rate: Optional[float] = 0.0  # dropout before each linear layer (BERT: 0); None: config.model.dropout_rate

    num_labels: ClassVar[int] = 2  # logits of the start and of the end
    labels_tokens: ClassVar[bool] = True

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        model = experiment.model
        if self.second_text and (model.family != "encoder" or model.num_token_types < 2):
            yield (
                "config.model.head.second_text requires an encoder with token types, config.model.family is "
                f"{model.family} and num_token_types is {model.num_token_types}: set second_text to False"
            )
        yield from _layer_problems(self)


@dataclasses.dataclass
class Embed(HeadConfig):
    """Embeds each document of a row (a query and its passages) by pooling the document's last hidden states.

    The head has no parameters (Karpukhin et al. 2020, arXiv 2004.04906; Reimers and Gurevych 2019, arXiv 1908.10084).
    """

    # documents per row; auto: set by the task
    num_texts: Size = AUTO  # pyright: ignore[reportAssignmentType]
    # the first token (cls), the mean or maximum over all tokens of a document, or the last token
    pooling: Pooling = "mean"
    normalize: bool = True  # scales embeddings to length 1, so that their dot product is the cosine similarity
    temperature: float = 0.05  # divides the scores of the loss (SimCSE: 0.05); use 1 if `normalize` is False
    symmetric: bool = False  # the loss is the mean of two losses: query to passage, and passage to query
    # sizes of embedding prefixes, each with an additional loss (Matryoshka: Kusupati et al. 2022); (): none
    dimensions: tuple[int, ...] = ()

    @classmethod
    def usual(cls, model: "ModelConfig", num_texts: Size = AUTO) -> "Embed":  # pyright: ignore[reportArgumentType]
        """Returns the default head for a model of this architecture."""
        return cls(num_texts, pooling="last" if model.family == "decoder" else "mean")

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        model = experiment.model
        if self.temperature <= 0:
            yield f"config.model.head.temperature is {self.temperature}, it must be greater than 0"
        if self.pooling == "cls" and model.family == "decoder":
            yield "config.model.head.pooling is 'cls', but a decoder's first token attends only to itself: use 'last'"
        if any(not 0 < n < model.d_model for n in self.dimensions) or len(set(self.dimensions)) < len(self.dimensions):
            yield (
                f"config.model.head.dimensions is {self.dimensions}, they must be distinct numbers below "
                f"config.model.d_model {model.d_model}, which is always included"
            )


def _layer_problems(head: Classify | Tag | Extract) -> Iterator[str]:
    """Yields an error message for each problem with the hidden layer of a head and with its dropout."""
    if head.dropout_rate is not None and not 0 <= head.dropout_rate < 1:
        yield f"config.model.head.dropout_rate is {head.dropout_rate}, it must be in [0, 1)"
    for name, default in (("hidden_bias", True), ("hidden_norm", False)):
        if head.hidden == "none" and (value := getattr(head, name)) != default:
            yield (
                f"config.model.head.{name} is {value}, which requires a hidden layer, and config.model.head.hidden is "
                f"'none': set it to {default}"
            )
