"""Positions, by which a model knows where a token stands: the fields of each kind, and their problems.

What a kind computes is in a file of its own in `pretrainax.layers.positions`.
"""

import dataclasses
import typing
from collections.abc import Iterator
from typing import ClassVar, Optional

from pretrainax.config.auto import Size
from pretrainax.config.choice import Choice

if typing.TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment
    from pretrainax.config.model import ModelConfig


class Position(Choice):
    """Tells a model where a token stands. `max_length` is None where any length works."""

    max_length: ClassVar[Optional[int]] = None

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        if experiment.model.enhanced_mask_decoder:
            kind = type(self).__name__
            yield f"config.model.enhanced_mask_decoder needs DisentangledPositions, config.model.position is {kind}"


@dataclasses.dataclass
class NoPositions(Position):
    """Nothing: what tells places apart is the order in which words are read, or a causal mask alone."""


@dataclasses.dataclass
class LearnedPositions(Position):
    """One trained vector a position (Devlin et al. 2018)."""

    max_length: Size = 512  # positions there are; auto: those of the longest row
    offset: int = 0  # rows at the start of the table that no position uses (RoBERTa, BART: 2, in fairseq's way)


@dataclasses.dataclass
class SinusoidalPositions(Position):
    """Fixed sines and cosines (Vaswani et al. 2017, section 3.5)."""


class RotaryScaling(Choice):
    """Stretches the frequencies of a trained context to a longer one."""

    def problems_of(self, planes: int) -> Iterator[str]:
        """Yields what keeps it from stretching so many planes, a line each."""
        yield from ()


@dataclasses.dataclass
class LongContextScaling(RotaryScaling):
    """LLaMA 3.1's stretching of the low rotary frequencies (Grattafiori et al. 2024; the released `rope_scaling`)."""

    factor: float = 8.0  # how much longer the new context is
    low_frequency_factor: float = 1.0  # wavelengths above original_length / this are stretched in full
    high_frequency_factor: float = 4.0  # wavelengths below original_length / this are left alone
    original_length: int = 8192  # the context before stretching


@dataclasses.dataclass
class LinearScaling(RotaryScaling):
    """All frequencies divided by one number (Chen et al. 2023, arXiv 2306.15595; Gemma 3's global layers)."""

    factor: float = 8.0  # how much longer the new context is


@dataclasses.dataclass
class YarnScaling(RotaryScaling):
    """Slow planes stretched and fast ones left alone, with sharper attention (Peng et al. 2023, arXiv 2309.00071).

    With m(w) = 0.1 · w · ln(factor) + 1, what is turned is multiplied by m(turned_weight) / m(logit_weight), and logits
    by m(logit_weight)²: section 3.4, where both ways are the same for heads that are turned in full.
    """

    factor: float = 40.0  # how much longer the new context is
    fast: float = 32.0  # planes that turn more often in the old context are left alone
    slow: float = 1.0  # planes that turn less often are stretched in full
    original_length: int = 4096  # the context before stretching
    rounded: bool = True  # where one becomes the other is a whole plane (gpt-oss: False)
    turned_weight: float = 1.0  # `mscale` of DeepSeek's files
    logit_weight: float = 0.0  # `mscale_all_dim` there


@dataclasses.dataclass
class LongRopeScaling(RotaryScaling):
    """Each plane stretched by a number of its own, one of two (Ding et al. 2024, arXiv 2402.13753; Phi-3.5).

    All tokens of a text that is longer than `original_length` are turned by the long ones, of others by the short ones.
    What is turned is multiplied by sqrt(1 + ln(factor) / ln(original_length)), in both.
    """

    short_factors: tuple[float, ...] = ()  # one for each plane of a head
    long_factors: tuple[float, ...] = ()  # the same, of a text of more tokens than original_length
    factor: float = 32.0  # how much longer the new context is
    original_length: int = 4096  # the context before stretching

    def problems_of(self, planes: int) -> Iterator[str]:
        for name in ("short_factors", "long_factors"):
            numbers = getattr(self, name)
            if len(numbers) != planes or not all(number > 0 for number in numbers):
                yield (
                    f"config.model.position.scaling.{name} has {len(numbers)} numbers from {min(numbers, default=0)}; "
                    f"it must have {planes} above 0, one for each plane of a head that is turned"
                )
        if self.original_length < 2:
            yield f"config.model.position.scaling.original_length is {self.original_length}, it must be at least 2"


@dataclasses.dataclass
class RotaryPositions(Position):
    """Rotation of queries and keys by an angle that grows with the position (Su et al. 2021)."""

    max_length: Size = 2048  # the context the model is made for; auto: the longest row
    theta: float = 10_000.0  # base of the geometric sequence of wavelengths
    scaling: Optional[RotaryScaling] = None  # to a longer context than the model was trained on; None: as it is
    neighbours: bool = False  # a plane is (x[2i], x[2i + 1]), as in the paper and DeepSeek; False: (x[i], x[i + K/2])
    local_theta: Optional[float] = None  # of local layers, which are not scaled; None: as the others (Gemma 3: 10,000)
    fraction: Optional[float] = None  # of each head that is turned, its first dimensions; None: all (Phi-2: 0.4)
    # each so manieth layer turns nothing (Yang et al. 2025, arXiv 2501.18795; SmolLM 3: 4); None: all layers turn
    no_rotation_every: Optional[int] = None

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        yield from super().problems(experiment)
        if self.fraction is not None and not 0 < self.fraction < 1:
            yield f"config.model.position.fraction is {self.fraction}, it must be in (0, 1); None: heads turn in full"
        for path, stack in experiment.model.sized.items():
            yield from self._problems_of_heads(path, stack) if stack.num_heads > 0 else ()
        if self.no_rotation_every is not None and self.no_rotation_every < 2:
            yield (
                f"config.model.position.no_rotation_every is {self.no_rotation_every}, it must be at least 2; "
                "None: all layers turn"
            )

    def _problems_of_heads(self, path: str, m: "ModelConfig") -> Iterator[str]:
        if m.latent_attention is None and m.dim_per_head % 2:
            yield f"rotary positions need an even head dimension, {path}.head_dim is {m.dim_per_head}"
        if self.fraction is not None and self.turned(m.dim_per_head) < 2:
            yield (
                f"config.model.position.fraction {self.fraction} of a head, {m.dim_per_head} wide, is not one plane: "
                "raise it, or set it to None"
            )
        elif self.scaling is not None:
            yield from self.scaling.problems_of(self.turned(m.position_dim) // 2)

    def turned(self, head_dim: int) -> int:
        """Returns how many dimensions of a head are turned: two a plane."""
        return head_dim if self.fraction is None else 2 * int(head_dim * self.fraction / 2)


@dataclasses.dataclass
class RelativePositionBuckets(Position):
    """T5's bias on attention logits, one scalar a head and bucket of distance (Raffel et al. 2020, section 2.1)."""

    num_buckets: int = 32  # half of them for exact distances, half for logarithmic ranges
    max_distance: int = 128  # farther than this, all share the last bucket


@dataclasses.dataclass
class DisentangledPositions(Position):
    """Relative positions that contents attend to, and that attend to contents (He et al. 2020, section 3.1)."""

    num_buckets: int = 256  # of each direction; half of them for exact distances, half for logarithmic ranges
    max_distance: int = 512  # from here on, all share the last bucket
    # the context the model is made for, and the absolute positions that a mask decoder knows; auto: the longest row
    max_length: Size = 512

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        m = experiment.model
        if self.num_buckets < 2:
            yield f"config.model.position.num_buckets is {self.num_buckets}, it must be at least 2"
        elif self.max_distance < self.num_buckets // 2 + 2:
            yield (
                f"config.model.position.max_distance is {self.max_distance}, it must be at least "
                f"{self.num_buckets // 2 + 2}"
            )
        for path, stack in m.sized.items():
            if stack.kv_heads != stack.num_heads:
                yield f"DisentangledPositions need as many key heads as heads, {path}.num_kv_heads is {stack.kv_heads}"
        if m.enhanced_mask_decoder and (m.family != "encoder" or m.norm_at != "post" or m.num_layers < 2):
            yield "config.model.enhanced_mask_decoder needs an encoder with norm_at='post' and at least 2 layers"
        if m.enhanced_mask_decoder and not (m.masked_lm_head or m.generator):
            yield "config.model.enhanced_mask_decoder needs a masked_lm_head or a generator"
