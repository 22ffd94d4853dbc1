"""Converts a decoder to an encoder or an encoder-decoder."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

import jax.numpy as jnp

from pretrainax.config import Experiment, ModelConfig, RelativePositionBuckets
from pretrainax.interop.adaptations.base import Adaptation, Operation, ParameterRule


class _FromDecoder(Adaptation):
    """Base class of adaptations that convert a decoder to a different family."""

    fields = ("family",)

    def before(self, ours: ModelConfig, theirs: ModelConfig) -> ModelConfig:
        return dataclasses.replace(ours.last_stack, family="decoder")

    def mismatches(self, ours: ModelConfig, theirs: ModelConfig) -> Iterator[str]:
        if theirs.family != "decoder":
            yield f"config.checkpoint.adapt has {self}, and the start has family {theirs.family!r}: leave it out"
        if isinstance(ours.position, RelativePositionBuckets):
            yield (
                f"config.checkpoint.adapt has {self}, and config.model.position is {ours.position}, whose buckets are "
                "of other distances with a bidirectional mask: start from a decoder with other positions"
            )


@dataclasses.dataclass
class DecoderToEncoder(_FromDecoder):
    """Converts a decoder to an encoder: attention becomes bidirectional (BehnamGhader et al. 2024, section 2.1)."""

    target_family = "encoder"

    def parameter_rule(self, path: str, before: ModelConfig, ours: ModelConfig) -> ParameterRule:
        return ParameterRule(_decoder_path(path))

    def effect(self, before: ModelConfig, ours: ModelConfig) -> str:
        return "attention is bidirectional, so tokens see later tokens; outputs for a single token are unchanged"


@dataclasses.dataclass
class DecoderToEncoderDecoder(_FromDecoder):
    """Copies a decoder to both stacks of an encoder-decoder (T5Gemma: Zhang et al. 2025, section 3).

    The attention of the encoder becomes bidirectional.
    """

    target_family = "encoder_decoder"
    # initial values. self: a copy of self-attention in the same layer | zero: this copy, with an output of zero
    cross_attention: Literal["self", "zero"] = "self"

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if self.cross_attention == "zero" and experiment.model.norm_at != "pre":
            yield (
                f"config.checkpoint.adapt has {self}, and config.model.norm_at is {experiment.model.norm_at!r}, whose "
                "norm changes the stream even after a zero output: set cross_attention='self'"
            )

    def mismatches(self, ours: ModelConfig, theirs: ModelConfig) -> Iterator[str]:
        yield from super().mismatches(ours, theirs)
        if (layers := ours.last_stack.num_layers) != ours.num_layers:
            yield (
                f"config.checkpoint.adapt has {self}, which makes two stacks of one, and config.model has "
                f"num_layers {ours.num_layers} and num_decoder_layers {layers}: set the second to None, "
                "or add Layers() after it"
            )
        if ours.decoder is not None:
            yield (
                f"config.checkpoint.adapt has {self}, which makes two stacks of one, and config.model.decoder is "
                f"{ours.decoder}: set it to None"
            )

    def parameter_rule(self, path: str, before: ModelConfig, ours: ModelConfig) -> ParameterRule:
        # Parameters outside the stack have the prefix decoder_: positions, an embedding norm, or token embeddings.
        source = _decoder_path(path.removeprefix("decoder_"))
        if "/cross_attention" not in path:
            return ParameterRule(source)
        source = source.replace("/cross_attention", "/self_attention")
        if self.cross_attention == "zero" and "/out/" in path:
            return ParameterRule(source, (Operation("zero", jnp.zeros_like),))
        return ParameterRule(source, (Operation("copy of self-attention in the same layer", lambda x: x),))

    def effect(self, before: ModelConfig, ours: ModelConfig) -> str:
        encoder_effect = "the encoder is bidirectional"
        if self.cross_attention == "zero":
            return f"{encoder_effect}; the decoder adds cross-attention, and its initial outputs are unchanged"
        return f"{encoder_effect}; cross-attention changes the outputs of the decoder from the first step"


def _decoder_path(path: str) -> str:
    """Replaces the stack name `encoder` in a parameter path with `decoder`; returns other paths unchanged."""
    stack, slash, rest = path.partition("/")
    return f"decoder{slash}{rest}" if stack == "encoder" else path
