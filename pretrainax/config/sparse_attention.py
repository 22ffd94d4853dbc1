"""Defines the configs of sparse attention, in which each token attends to a subset of the tokens of its document."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pretrainax.config.choice import Choice
from pretrainax.config.heads import Classify, Embed, Extract
from pretrainax.config.positions import LearnedPositions, RotaryPositions, SinusoidalPositions

if TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment


class SparseAttention(Choice):
    """Base class of the configs of sparse attention; layers/sparse_attention/ implements each subclass."""

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        path, m = "config.model.sparse_attention", experiment.model
        if m.family != "encoder":
            yield f"{path} requires an encoder, config.model.family is {m.family!r}: set it to None"
        if not isinstance(m.position, (LearnedPositions, SinusoidalPositions, RotaryPositions)):
            yield (
                f"{path} does not support logit biases, config.model.position is {type(m.position).__name__}: use "
                "LearnedPositions, SinusoidalPositions or RotaryPositions"
            )
        if m.kv_heads != m.num_heads:
            yield (
                f"{path} requires one key head per head: config.model.num_kv_heads is {m.num_kv_heads}, set it to None"
            )
        unset = {"latent_attention": None, "qk_norm": False, "attention_sinks": False, "attention_logit_cap": None}
        for name, value in unset.items():
            if (current := getattr(m, name)) != value:
                yield f"{path} does not support config.model.{name}, which is {current}: set it to {value}"


@dataclasses.dataclass
class SlidingWindows(SparseAttention):
    """Config of sliding windows with global tokens (Longformer: Beltagy et al. 2020, arXiv 2004.05150, section 3).

    Each token attends to the tokens in a window of size config.model.window, and to the global tokens of its document.
    Global tokens attend to the whole document. Attention within windows is computed block by block.
    """

    # global tokens, which have separate query, key and value projections. first: the first token of each document |
    # question: the question tokens of a row, for an Extract head | none: no global tokens
    global_tokens: Literal["first", "question", "none"] = "first"
    # maximum number of question tokens at the start of a row, including the first token
    longest_question: int = 65

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        yield from super().problems(experiment)
        m, path = experiment.model, "config.model.sparse_attention"
        if m.layer_pattern != ("local",):
            yield f"{path} requires local layers: config.model.layer_pattern is {m.layer_pattern}, set it to ('local',)"
        if m.window is not None and m.window % 2:
            yield (
                f"config.model.window is {m.window}, and {path} splits it evenly around a token: "
                f"set it to {m.window - 1}, which is equivalent, or to {m.window + 1}"
            )
        if self.longest_question < 1:
            yield f"{path}.longest_question is {self.longest_question}, it must be at least 1"
        if self.global_tokens == "question" and not isinstance(m.head, Extract):
            yield f"{path}.global_tokens is 'question', which requires config.model.head Extract: set it to 'first'"
        if self.global_tokens == "none" and isinstance(m.head, Extract):
            yield (
                f"{path}.global_tokens is 'none', and config.model.head Extract would see the question only within "
                f"a window of {m.window}: set it to 'question'"
            )
        head_name = "config.model.pair_head" if m.pair_head else f"config.model.head {type(m.head).__name__}"
        if self.global_tokens == "none" and (
            m.pair_head or (isinstance(m.head, (Classify, Embed)) and m.head.pooling == "cls")
        ):
            yield (
                f"{path}.global_tokens is 'none', and {head_name} reads the first token, which only attends to "
                f"its window of {m.window}: set it to 'first'"
            )


@dataclasses.dataclass
class RandomBlocks(SparseAttention):
    """Config of block-sparse attention (BigBird: Zaheer et al. 2020, arXiv 2007.14062, section 2).

    Each block of tokens attends to itself, to the two adjacent blocks, to the first and last block of the row (the
    global tokens), and to random blocks.
    """

    size: int = 64  # tokens per block
    random: int = 3  # number of random blocks that each block attends to, drawn separately for each head and layer
    # always: random blocks in training and evaluation | training: evaluation uses the first block instead of random
    # blocks, as in transformers
    drawn: Literal["always", "training"] = "always"

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        yield from super().problems(experiment)
        m, path = experiment.model, "config.model.sparse_attention"
        if self.size < 1:
            yield f"{path}.size is {self.size}, it must be at least 1"
        if self.random < 0:
            yield f"{path}.random is {self.random}, it must be at least 0"
        if "local" in m.layer_pattern:
            yield (
                f"{path} requires global layers: config.model.layer_pattern is {m.layer_pattern}, set it to ('global',)"
            )
        if isinstance(m.head, Embed) or (isinstance(m.head, Classify) and m.head.kind == "choice"):
            yield (
                f"{path} splits rows into blocks, and config.model.head {type(m.head).__name__} has several "
                "documents per row: use SlidingWindows() or None"
            )
        if m.position.max_length is None:
            yield (
                f"{path} needs a maximum length, which {type(m.position).__name__} does not have: use LearnedPositions"
            )
