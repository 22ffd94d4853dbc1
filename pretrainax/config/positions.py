"""Defines the configs of position encodings.

`pretrainax.layers.positions` implements each kind of position encoding in a separate file.
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


_SCALING = "config.model.position.scaling"  # path in error messages


class Position(Choice):
    """Base class of the configs of position encodings."""

    max_length: ClassVar[Optional[int]] = None  # context length in tokens; None: not limited by the position encoding

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        if experiment.model.enhanced_mask_decoder:
            kind = type(self).__name__
            yield f"config.model.enhanced_mask_decoder requires DisentangledPositions, config.model.position is {kind}"

    def head_problems(self, path: str, stack: "ModelConfig") -> Iterator[str]:
        """Yields an error message for each problem with the heads of a stack; `path` is the config of its sizes."""
        yield from ()


@dataclasses.dataclass
class NoPositions(Position):
    """Disables position encodings: the model is recurrent, or only the causal mask encodes the order of tokens."""


@dataclasses.dataclass
class LearnedPositions(Position):
    """Adds a trained embedding of each position to the token embeddings (Devlin et al. 2018)."""

    max_length: Size = 512  # number of positions; auto: the positions of the longest row
    offset: int = 0  # unused rows at the start of the table (RoBERTa, BART: 2, as in fairseq)

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        yield from super().problems(experiment)
        if self.offset < 0:
            yield f"config.model.position.offset is {self.offset}, it must be at least 0"


@dataclasses.dataclass
class SinusoidalPositions(Position):
    """Adds fixed sines and cosines of the position to the token embeddings (Vaswani et al. 2017, section 3.5)."""

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        yield from super().problems(experiment)
        for path, stack in experiment.model.sized.items():
            if stack.embedding_width % 2:
                width = "d_model" if stack.embedding_dim is None else "embedding_dim"
                yield f"{path}.{width} is {stack.embedding_width}, it must be even with SinusoidalPositions"


class RotaryScaling(Choice):
    """Base class of methods that scale the frequencies of rotary positions to extend the trained context length."""

    def problems_of(self, planes: int) -> Iterator[str]:
        """Yields an error message for each invalid field; `planes` is the number of rotated pairs per head."""
        path = _SCALING
        for name in ("factor", "original_length", "fast", "slow", "low_frequency_factor", "high_frequency_factor"):
            if (value := getattr(self, name, None)) is not None and value <= 0:
                yield f"{path}.{name} is {value}, it must be above 0"


@dataclasses.dataclass
class LongContextScaling(RotaryScaling):
    """Scales low frequencies, as in LLaMA 3.1 (Grattafiori et al. 2024; the released `rope_scaling`)."""

    factor: float = 8.0  # ratio of the new context length to the trained one
    low_frequency_factor: float = 1.0  # wavelengths above original_length / low_frequency_factor are scaled fully
    high_frequency_factor: float = 4.0  # wavelengths below original_length / high_frequency_factor are unchanged
    original_length: int = 8192  # context length before the scaling

    def problems_of(self, planes: int) -> Iterator[str]:
        yield from super().problems_of(planes)
        path = _SCALING
        if self.low_frequency_factor >= self.high_frequency_factor:
            yield (
                f"{path}.low_frequency_factor is {self.low_frequency_factor}, it must be below "
                f"{path}.high_frequency_factor, {self.high_frequency_factor}"
            )


@dataclasses.dataclass
class LinearScaling(RotaryScaling):
    """Divides all frequencies by the same factor (Chen et al. 2023, arXiv 2306.15595; Gemma 3's global layers)."""

    factor: float = 8.0  # ratio of the new context length to the trained one


@dataclasses.dataclass
class YarnScaling(RotaryScaling):
    """Scales low but not high frequencies, and sharpens attention (YaRN: Peng et al. 2023, arXiv 2309.00071).

    With m(w) = 0.1 · w · ln(factor) + 1, the rotated dimensions are multiplied by m(mscale) / m(mscale_all_dim),
    and the logits by m(mscale_all_dim)². If all dimensions of a head are rotated, multiplying them by a factor is
    equivalent to multiplying the logits by its square (section 3.4).
    """

    factor: float = 40.0  # ratio of the new context length to the trained one
    fast: float = 32.0  # dimension pairs with more than `fast` rotations within original_length are unchanged
    slow: float = 1.0  # dimension pairs with fewer than `slow` rotations within original_length are scaled fully
    original_length: int = 4096  # context length before the scaling
    # rounds the bounds of the range between `fast` and `slow` to whole dimension pairs (gpt-oss: False)
    rounded: bool = True
    mscale: float = 1.0  # `mscale` in DeepSeek's config.json
    mscale_all_dim: float = 0.0  # `mscale_all_dim` in DeepSeek's config.json

    def problems_of(self, planes: int) -> Iterator[str]:
        yield from super().problems_of(planes)
        path = _SCALING
        for name in ("mscale", "mscale_all_dim"):
            if getattr(self, name) < 0:
                yield f"{path}.{name} is {getattr(self, name)}, it must be at least 0"
        if self.slow >= self.fast:
            yield f"{path}.slow is {self.slow}, it must be below {path}.fast, {self.fast}"


@dataclasses.dataclass
class LongRopeScaling(RotaryScaling):
    """Divides each frequency by a separate factor (LongRoPE: Ding et al. 2024, arXiv 2402.13753; Phi-3.5).

    Documents longer than `original_length` use the long factors for all tokens. Other documents use the short factors.
    In generation, all tokens of a text are read again when the text exceeds `original_length`. In both cases, the
    rotated dimensions are multiplied by sqrt(1 + ln(factor) / ln(original_length)).
    """

    short_factors: tuple[float, ...] = ()  # one factor per dimension pair of a head
    long_factors: tuple[float, ...] = ()  # one factor per pair, for documents with more than original_length tokens
    factor: float = 32.0  # ratio of the new context length to the trained one
    original_length: int = 4096  # context length before the scaling

    def problems_of(self, planes: int) -> Iterator[str]:
        yield from super().problems_of(planes)
        path = _SCALING
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if len(factors) != planes or not all(factor > 0 for factor in factors):
                yield (
                    f"{path}.{name} has {len(factors)} numbers, the smallest is "
                    f"{min(factors, default=0)}; "
                    f"it must have {planes} numbers above 0, one per rotated dimension pair of a head"
                )
        if self.original_length == 1:  # its logarithm is a divisor
            yield f"{path}.original_length is 1, it must be at least 2"


@dataclasses.dataclass
class RotaryPositions(Position):
    """Rotates pairs of dimensions of queries and keys by angles proportional to the position (Su et al. 2021)."""

    max_length: Size = 2048  # context length of the model; auto: number of positions of the longest row
    theta: float = 10_000.0  # base of the geometric sequence of wavelengths
    scaling: Optional[RotaryScaling] = None  # scaling to a longer context than in training; None: no scaling
    # a dimension pair is (x[2i], x[2i + 1]), as in the paper and DeepSeek; False: (x[i], x[i + K/2])
    interleaved: bool = False
    # theta of local layers, which are not scaled; None: theta and scaling of the global layers (Gemma 3: 10,000)
    local_theta: Optional[float] = None
    # fraction of each head to rotate, from its first dimension; None: all dimensions (Phi-2: 0.4)
    fraction: Optional[float] = None
    # every n-th layer has no rotation (Yang et al. 2025, arXiv 2501.18795; SmolLM 3: 4); None: all layers rotate
    no_rotation_every: Optional[int] = None

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        yield from super().problems(experiment)
        for name in ("theta", "local_theta"):
            if (value := getattr(self, name)) is not None and value <= 0:
                yield f"config.model.position.{name} is {value}, it must be above 0"
        if self.fraction is not None and not 0 < self.fraction < 1:
            yield f"config.model.position.fraction is {self.fraction}, it must be in (0, 1); None rotates whole heads"
        if isinstance(self.scaling, YarnScaling) and self.theta == 1:  # its logarithm is a divisor
            yield "config.model.position.theta is 1, it must not be 1 with YarnScaling"
        stacks = experiment.model.sized.items()
        # Problems of the scaling do not depend on the stack.
        yield from dict.fromkeys(line for path, stack in stacks for line in self.head_problems(path, stack))
        if self.no_rotation_every is not None and self.no_rotation_every < 2:
            yield (
                f"config.model.position.no_rotation_every is {self.no_rotation_every}, it must be at least 2; "
                "None rotates in all layers"
            )

    def head_problems(self, path: str, stack: "ModelConfig") -> Iterator[str]:
        if stack.num_heads < 1 or stack.dim_per_head < 1:  # config/validation.py
            return
        if stack.latent_attention is None and stack.dim_per_head % 2:
            size = "d_model / num_heads" if stack.head_dim is None else "head_dim"
            yield f"rotary positions require an even head dimension, {path}.{size} is {stack.dim_per_head}"
        if self.fraction is not None and self.rotated_dims(stack.dim_per_head) < 2:
            yield (
                f"config.model.position.fraction {self.fraction} of head dimension {stack.dim_per_head} is less than "
                "one pair of dimensions: increase it, or set it to None"
            )
        elif self.scaling is not None:
            yield from self.scaling.problems_of(self.rotated_dims(stack.position_dim) // 2)

    def rotated_dims(self, head_dim: int) -> int:
        """Returns the number of rotated dimensions (two per pair) of a head with `head_dim` dimensions."""
        return head_dim if self.fraction is None else 2 * int(head_dim * self.fraction / 2)


@dataclasses.dataclass
class RelativePositionBuckets(Position):
    """Adds T5's trained bias per head and distance bucket to attention logits (Raffel et al. 2020, section 2.1)."""

    num_buckets: int = 32  # half of them for exact distances, half for logarithmic ranges
    max_distance: int = 128  # larger distances share the last bucket

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        yield from super().problems(experiment)
        family = experiment.model.family  # an encoder has half of the buckets per direction
        lowest, exact = 2 if family == "decoder" else 4, self.num_buckets // (4 if family == "encoder" else 2)
        if self.num_buckets < lowest:
            yield f"config.model.position.num_buckets is {self.num_buckets}, it must be at least {lowest}"
        elif self.max_distance <= exact:
            yield f"config.model.position.max_distance is {self.max_distance}, it must be above {exact}"


@dataclasses.dataclass
class DisentangledPositions(Position):
    """Adds content-to-position and position-to-content logits to attention (DeBERTa: He et al. 2020, section 3.1)."""

    num_buckets: int = 256  # buckets of each direction: half for exact distances, half for logarithmic ranges
    max_distance: int = 512  # this distance and larger distances share the last bucket
    # context length of the model, and number of absolute positions of an enhanced mask decoder; auto: the positions of
    # the longest row
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
                yield f"DisentangledPositions require one key head per head, {path}.num_kv_heads is {stack.kv_heads}"
        if m.enhanced_mask_decoder and (m.family != "encoder" or m.norm_at != "post" or m.num_layers < 2):
            yield "config.model.enhanced_mask_decoder requires an encoder with norm_at='post' and at least 2 layers"
        if m.enhanced_mask_decoder and not (m.masked_lm_head or m.generator):
            yield "config.model.enhanced_mask_decoder requires a masked_lm_head or a generator"
