"""Makes an encoder, or both stacks of an encoder-decoder, of a decoder."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

import jax.numpy as jnp

from pretrainax.config import Experiment, ModelConfig, RelativePositionBuckets
from pretrainax.interop.adaptations.base import Adaptation, Making, Way


class _FromDecoder(Adaptation):
    """Base of what begins with a decoder."""

    fields = ("family",)

    def before(self, ours: ModelConfig, theirs: ModelConfig) -> ModelConfig:
        return dataclasses.replace(ours.last_stack, family="decoder")

    def mismatches(self, ours: ModelConfig, theirs: ModelConfig) -> Iterator[str]:
        if theirs.family != "decoder":
            yield f"config.checkpoint.adapt has {self}, and there is a model of family {theirs.family!r}: leave it out"
        if isinstance(ours.position, RelativePositionBuckets):
            yield (
                f"config.checkpoint.adapt has {self}, and config.model.position is {ours.position}, whose buckets are "
                "of other distances where the mask is open: start from a decoder with other positions"
            )


@dataclasses.dataclass
class DecoderToEncoder(_FromDecoder):
    """Opens the mask of a decoder: each token sees those after it too (BehnamGhader et al. 2024, section 2.1)."""

    makes = "encoder"

    def way(self, path: str, before: ModelConfig, ours: ModelConfig) -> Way:
        return Way(_in_decoder(path))

    def effect(self, before: ModelConfig, ours: ModelConfig) -> str:
        return "the mask is opened, and with it a token sees what comes after it; of one token alone the same is said"


@dataclasses.dataclass
class DecoderToEncoderDecoder(_FromDecoder):
    """Makes both stacks of a decoder, the encoder with its mask opened (T5Gemma: Zhang et al. 2025, section 3)."""

    makes = "encoder_decoder"
    # how it starts. self: as self-attention of the same layer | silent: so too, but nothing is added to the stream
    cross_attention: Literal["self", "silent"] = "self"

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if self.cross_attention == "silent" and experiment.model.norm_at != "pre":
            yield (
                f"config.checkpoint.adapt has {self}, and config.model.norm_at is {experiment.model.norm_at!r}, whose "
                "norm would not let a zero pass: set cross_attention='self'"
            )

    def mismatches(self, ours: ModelConfig, theirs: ModelConfig) -> Iterator[str]:
        yield from super().mismatches(ours, theirs)
        if (layers := ours.last_stack.num_layers) != ours.num_layers:
            yield (
                f"config.checkpoint.adapt has {self}, which makes two stacks of one, and config.model has "
                f"num_layers {ours.num_layers} and num_decoder_layers {layers}: set the second to None, "
                "or add Layers() behind"
            )
        if ours.decoder is not None:
            yield (
                f"config.checkpoint.adapt has {self}, which makes two stacks of one, and config.model.decoder is "
                f"{ours.decoder}: set it to None"
            )

    def way(self, path: str, before: ModelConfig, ours: ModelConfig) -> Way:
        # what the decoder has of its own beside the stack: positions, an embedding norm, perhaps a table of tokens
        source = _in_decoder(path.removeprefix("decoder_"))
        if "/cross_attention" not in path:
            return Way(source)
        source = source.replace("/cross_attention", "/self_attention")
        if self.cross_attention == "silent" and "/out/" in path:
            return Way(source, (Making("zero", jnp.zeros_like),))
        return Way(source, (Making("as self-attention of the same layer", lambda x: x),))

    def effect(self, before: ModelConfig, ours: ModelConfig) -> str:
        opened = "the mask of the encoder is opened"
        if self.cross_attention == "silent":
            return f"{opened}; the decoder reads it, and at first says what it did"
        return f"{opened}; cross-attention adds what it reads, so the decoder says something else from the first step"


def _in_decoder(path: str) -> str:
    """Returns the path in a decoder of what is in the first stack."""
    stack, slash, rest = path.partition("/")
    return f"decoder{slash}{rest}" if stack == "encoder" else path
