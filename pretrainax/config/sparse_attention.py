"""The configuration of attention whose cost is linear in the length, as each token meets a part of its text."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pretrainax.config.choice import Choice
from pretrainax.config.heads import Classify, Embed, Extract
from pretrainax.config.positions import LearnedPositions, RotaryPositions, SinusoidalPositions

if TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment


class SparseAttention(Choice):
    """Base of the kinds: each has its layer in layers/sparse_attention/."""

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        path, m = "config.model.sparse_attention", experiment.model
        if m.family != "encoder":
            yield f"{path} is for an encoder, config.model.family is {m.family!r}: set it to None"
        if not isinstance(m.position, (LearnedPositions, SinusoidalPositions, RotaryPositions)):
            yield (
                f"{path} knows no bias on logits, and config.model.position is {type(m.position).__name__}: take "
                "LearnedPositions, SinusoidalPositions or RotaryPositions"
            )
        if m.kv_heads != m.num_heads:
            yield f"{path} has keys for each head: config.model.num_kv_heads is {m.num_kv_heads}, set it to None"
        unset = {"latent_attention": None, "qk_norm": False, "attention_sinks": False, "attention_logit_cap": None}
        for name, value in unset.items():
            if (found := getattr(m, name)) != value:
                yield f"{path} goes without config.model.{name}, which is {found}: set it to {value}"


@dataclasses.dataclass
class SlidingWindows(SparseAttention):
    """The window of config.model.window, computed by blocks, and tokens that all others of their text see, and that see
    them all (Longformer: Beltagy et al. 2020, arXiv 2004.05150, section 3)."""

    # with maps of their own to queries, keys and values: the first token of each text | those of a row's question, for
    # a head that finds its answer | none: a window is all there is
    global_tokens: Literal["first", "question", "none"] = "first"
    longest_question: int = 65  # tokens at the start of a row that may be of its question, the first one included

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        yield from super().problems(experiment)
        m, path = experiment.model, "config.model.sparse_attention"
        if m.layer_pattern != ("local",):
            yield f"{path} is of windows: config.model.layer_pattern is {m.layer_pattern}, set it to ('local',)"
        if m.window is not None and m.window % 2:
            yield (
                f"config.model.window is {m.window}, and {path} has half of it on each side of a token: set it to the "
                f"even {m.window - 1}, which is the same, or to {m.window + 1}"
            )
        if self.longest_question < 1:
            yield f"{path}.longest_question is {self.longest_question}, it must be at least 1"
        if self.global_tokens == "question" and not isinstance(m.head, Extract):
            yield f"{path}.global_tokens is 'question', and no config.model.head Extract asks one: set it to 'first'"
        if self.global_tokens == "none" and isinstance(m.head, Extract):
            yield (
                f"{path}.global_tokens is 'none', and config.model.head Extract looks for an answer whose question is "
                f"seen within a window of {m.window} alone: set it to 'question'"
            )
        asks = "config.model.pair_head" if m.pair_head else f"config.model.head {type(m.head).__name__}"
        if self.global_tokens == "none" and (
            m.pair_head or (isinstance(m.head, (Classify, Embed)) and m.head.pooling == "cls")
        ):
            yield (
                f"{path}.global_tokens is 'none', and {asks} reads the first token, which sees no more than its window "
                f"of {m.window}: set it to 'first'"
            )


@dataclasses.dataclass
class RandomBlocks(SparseAttention):
    """Blocks of a row that meet their neighbours, the first and the last one, and random ones (BigBird: Zaheer et al.
    2020, arXiv 2007.14062, section 2, with global tokens of the row's own)."""

    size: int = 64  # tokens of a block
    random: int = 3  # blocks that each block meets beside, other ones for each head and each layer
    # training: else the first block is in their place, as in transformers' evaluation
    drawn: Literal["always", "training"] = "always"

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        yield from super().problems(experiment)
        m, path = experiment.model, "config.model.sparse_attention"
        if self.size < 1:
            yield f"{path}.size is {self.size}, it must be at least 1"
        if self.random < 0:
            yield f"{path}.random is {self.random}, it must be at least 0"
        if "local" in m.layer_pattern:
            yield f"{path} has its own windows: config.model.layer_pattern is {m.layer_pattern}, set it to ('global',)"
        if isinstance(m.head, Embed) or (isinstance(m.head, Classify) and m.head.kind == "choice"):
            yield (
                f"{path} has the blocks of a row, and config.model.head {type(m.head).__name__} asks of several texts "
                "in one: take SlidingWindows(), or None"
            )
        if m.position.max_length is None:
            yield f"{path} draws for the longest row, which {type(m.position).__name__} has not: take LearnedPositions"
