"""Heads of tasks, which stand in the place of a language model's: the fields of each kind."""

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
    """Base of the heads of tasks: each has its module and loss in models/heads/."""

    def completed(self, wanted: "HeadConfig") -> "HeadConfig":
        """Returns this head with the fields that are `auto` as a task wants them."""
        mine, theirs = (vars(head) for head in (self, wanted)) if type(self) is type(wanted) else ({}, {})
        return dataclasses.replace(self, **{name: theirs[name] for name, x in mine.items() if x == AUTO})

    def left_open(self) -> "HeadConfig":
        """Returns this head with `auto` again in the fields that are so where nobody says more."""
        return dataclasses.replace(self, **{x.name: AUTO for x in dataclasses.fields(self) if x.default == AUTO})


@dataclasses.dataclass
class Classify(HeadConfig):
    """Says of a whole row which class it is of, which labels it has, a number, or which of its texts is the right one.

    The last hidden states become one by `pooling`; then comes a hidden layer, unless there is none, and a linear map.
    What is usual differs from family to family, and is that of its published class.
    """

    # what is told of a row: classes, labels, or numbers, or its texts to choose from; auto: by the task
    num_labels: Size = AUTO  # pyright: ignore[reportAssignmentType]
    # one class of several | any of the labels, each by itself | numbers | the right one of the texts of a row, each of
    # which has a number; auto: by the task
    kind: Kind = "auto"
    pooling: Pooling = "cls"  # the first token (cls), the mean or the maximum over all, the last token
    # activation of a hidden layer as wide as the model | model: that of its feed-forward (BigBird)
    hidden: Literal["none", "tanh", "gelu", "relu", "model"] = "tanh"
    hidden_bias: bool = True  # of the hidden layer
    hidden_norm: bool = False  # a norm of what the hidden layer gives (ModernBERT)
    output_bias: bool = True  # of the last map (decoders: none)
    dropout_rate: Optional[float] = None  # before each map; None: config.model.dropout_rate

    @classmethod
    def usual(cls, model: "ModelConfig", num_labels: int, kind: Kind) -> "Classify":
        """Returns the head that a model of this architecture has where nobody says more."""
        if model.family == "decoder":
            return cls(num_labels, kind, pooling="last", hidden="none", output_bias=False)
        if model.own_model is not None and (own := model.own_model.default_classifier(num_labels, kind)):
            return own
        return cls(num_labels, kind, pooling="cls" if model.family == "encoder" else "last")

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        if AUTO in (self.num_labels, self.kind):
            yield "config.model.head.num_labels and kind are 'auto', which a task of config.objective says: it is none"
        elif self.num_labels < 1:
            yield f"config.model.head.num_labels is {self.num_labels}, it must be at least 1"
        yield from _rate_problems(self.dropout_rate)
        if self.pooling == "cls" and experiment.model.family == "decoder":
            yield "config.model.head.pooling is 'cls', and the first token of a decoder has seen nothing: take 'last'"


@dataclasses.dataclass
class Tag(HeadConfig):
    """Says of each word which tag it has: a linear map of its hidden state, each word by itself or all as a chain."""

    num_labels: Size = AUTO  # tags; auto: by the task  # pyright: ignore[reportAssignmentType]
    # each word by itself (softmax), or all words of a row as a linear-chain CRF (Lafferty et al. 2001)
    kind: Literal["softmax", "crf"] = "softmax"
    # of each tag those after one of which alone a CRF says it, none: after any; (): any after any; auto: by the scheme
    # of the task, so that no span begins where it should not
    follows: Annotated[tuple[tuple[int, ...], ...], AUTO] = ()
    hidden: Literal["none", "gelu"] = "none"  # activation of a hidden layer as wide as the model (ModernBERT: gelu)
    hidden_bias: bool = True  # of the hidden layer
    hidden_norm: bool = False  # a norm of what the hidden layer gives (ModernBERT)
    output_bias: bool = True  # of the last map
    dropout_rate: Optional[float] = None  # before each map; None: config.model.dropout_rate

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        if AUTO in (self.num_labels, self.follows):
            yield "config.model.head has fields that are 'auto', which a task of config.objective says: it is none"
            return
        if self.num_labels < 1:
            yield f"config.model.head.num_labels is {self.num_labels}, it must be at least 1"
        if self.follows and self.kind != "crf":
            yield "config.model.head.follows is of a CRF: set config.model.head.kind to 'crf', or follows to ()"
        if self.follows and (
            len(self.follows) != self.num_labels or any(not 0 <= i < self.num_labels for x in self.follows for i in x)
        ):
            yield (
                f"config.model.head.follows is {self.follows}, it must have for each of the {self.num_labels} tags the "
                "numbers of others"
            )
        yield from _rate_problems(self.dropout_rate)


@dataclasses.dataclass
class Extract(HeadConfig):
    """Says where in a row an answer begins and where it ends: two numbers of each token, by a linear map."""

    feed_forward: bool = False  # one as in a block comes first, with its residual and norm (BigBird)
    second_text: bool = False  # an answer is in the second text, by token types, or the first token, none (BigBird)
    hidden: Literal["none", "gelu"] = "none"  # activation of a hidden layer as wide as the model (ModernBERT: gelu)
    hidden_bias: bool = True  # of the hidden layer
    hidden_norm: bool = False  # a norm of what the hidden layer gives (ModernBERT)
    output_bias: bool = True  # of the last map
    dropout_rate: Optional[float] = 0.0  # before each map (BERT: none); None: config.model.dropout_rate

    num_labels: ClassVar[int] = 2  # the begin and the end

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        model = experiment.model
        if self.second_text and (model.family != "encoder" or model.num_token_types < 2):
            yield (
                "config.model.head.second_text goes by token types, and config.model.num_token_types is "
                f"{model.num_token_types} in an {model.family}: set it to False"
            )
        yield from _rate_problems(self.dropout_rate)


@dataclasses.dataclass
class Embed(HeadConfig):
    """Makes a vector of each text of a row, a query and its passages, by pooling the last hidden states: it has no
    parameters of its own (Karpukhin et al. 2020, arXiv 2004.04906; Reimers and Gurevych 2019, arXiv 1908.10084).
    """

    num_texts: Size = AUTO  # pyright: ignore[reportAssignmentType]  # of a row; auto: by the task
    pooling: Pooling = "mean"  # of the tokens of a text: the first (cls), the mean or the maximum of all, the last
    normalize: bool = True  # vectors have length 1, so that their product is the cosine
    temperature: float = 0.05  # that scores are divided by (SimCSE: 0.05); of products that are not normalised 1
    symmetric: bool = False  # the loss of finding the query of a passage too, half of each
    # first numbers of a vector that are a vector too, each with a loss of its own (Matryoshka: Kusupati et al. 2022)
    dimensions: tuple[int, ...] = ()

    @classmethod
    def usual(cls, model: "ModelConfig", num_texts: Size = AUTO) -> "Embed":  # pyright: ignore[reportArgumentType]
        """Returns the head that a model of this architecture has where nobody says more."""
        return cls(num_texts, pooling="last" if model.family == "decoder" else "mean")

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        model = experiment.model
        if self.temperature <= 0:
            yield f"config.model.head.temperature is {self.temperature}, it must be greater than 0"
        if self.pooling == "cls" and model.family == "decoder":
            yield "config.model.head.pooling is 'cls', and the first token of a decoder has seen nothing: take 'last'"
        if any(not 0 < n < model.d_model for n in self.dimensions) or len(set(self.dimensions)) < len(self.dimensions):
            yield (
                f"config.model.head.dimensions is {self.dimensions}, each must be another number below "
                f"config.model.d_model {model.d_model}, which is always one"
            )


def _rate_problems(dropout_rate: Optional[float]) -> Iterator[str]:
    if dropout_rate is not None and not 0 <= dropout_rate < 1:
        yield f"config.model.head.dropout_rate is {dropout_rate}, it must be in [0, 1)"
