"""Floating-point operations of a step, counted from the architecture on paper.

XLA's own count is of no use for this: it counts the body of the scan over layers once.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Optional

from pretrainax.config import ModelConfig
from pretrainax.layers.attention import BACKENDS, choose_implementation
from pretrainax.layers.attention_spec import PRODUCTS, AttentionSpec, Work
from pretrainax.layers.feed_forward import feed_forwards_of, kinds_of_layers
from pretrainax.layers.feed_forward.mixture import Mixture
from pretrainax.layers.multi_head import MultiHeadAttention
from pretrainax.layers.positions import positions_of
from pretrainax.layers.self_attention import self_attention_of
from pretrainax.models.base import model_of
from pretrainax.models.electra import models_of
from pretrainax.models.heads import heads_of


class Attention(NamedTuple):
    """Describes attentions of a model that are alike."""

    layers: int
    queries: int  # of an example
    keys: int
    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int
    causal: bool
    window: Optional[int]


WorkOf = Callable[[Attention], Work]
ImplementationOf = Callable[[Attention], tuple[str, AttentionSpec]]


def flops_per_step(
    config: ModelConfig,
    batch_size: float,
    inputs: int,
    targets: int,
    teacher: Optional[ModelConfig] = None,
    passes: int = 3,
) -> float:
    """Counts the FLOPs of the matrix products of one update: forward, and twice that for the backward.

    What is counted, by the convention of PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), which published
    MFUs follow: 2 a multiplication and its addition; attention in full, also where a causal mask throws half of it
    away, or a window more; a masked LM's head on its `lengths.targets` positions only; padding as if it were text;
    generator and discriminator.
    What is not: norms, activations, softmax, embeddings, the optimizer, what is made again (by rematerialisation, or by
    the backward of a fused attention), and the logits that a generator's replacements are drawn from.

    Args:
      batch_size: examples of one update; where its optimizer takes a gradient more than once, they count as often.
      inputs, targets: tokens of an example. An encoder reads `inputs` tokens and predicts `targets` of them, an
        encoder-decoder reads `inputs` and writes `targets`, a decoder has as many of both.
      teacher: reads the same, forward alone; None: there is none.
      passes: products with each matrix, `Experiment.passes`. What a tuning adds is not counted.
    """
    in_full = attention_flops(config, inputs, targets, lambda one: PRODUCTS * one.queries * one.keys)
    own = batch_size * (mapped(passes, *other_flops(config, inputs, targets)) + attended(passes) * in_full)
    return own if teacher is None else own + flops_per_step(teacher, batch_size, inputs, targets) / 3


def flops_done(
    config: ModelConfig,
    batch_size: float,
    inputs: int,
    targets: int,
    work: WorkOf,
    teacher: Optional[ModelConfig] = None,
    passes: int = 3,
) -> float:
    """Counts those of `flops_per_step` that are done: `work` says which pairs of a query and a key are multiplied."""
    in_part = attention_flops(config, inputs, targets, lambda one: PRODUCTS * work(one).pairs.sum())
    own = batch_size * (mapped(passes, *other_flops(config, inputs, targets)) + attended(passes) * in_part)
    return own if teacher is None else own + flops_done(teacher, batch_size, inputs, targets, work) / 3


def mapped(passes: int, blocks: float, around: float) -> float:
    """Returns the FLOPs of a step with the matrices of blocks, and with those around them: heads that are trained alone
    have a backward where blocks have none."""
    return passes * blocks + (3 if passes == 1 else passes) * around


def attended(passes: int) -> float:
    """Returns the share of attention's products that a step makes: without a backward a third."""
    return 1.0 if passes > 1 else 1 / 3


def attention_flops(config: ModelConfig, inputs: int, targets: int, products: Callable[[Attention], float]) -> float:
    """Counts the FLOPs between queries, keys and values of one example; products: pairs × products of one head."""
    found = attentions(config, inputs, targets)
    # half of the products are with queries and keys, half with values
    width = lambda one: (one.head_dim + one.value_dim) / 2  # noqa: E731
    return sum(2.0 * one.layers * one.heads * width(one) * float(products(one)) for one in found)


def other_flops(config: ModelConfig, inputs: int, targets: int) -> tuple[float, float]:
    """Counts the other FLOPs of one example's forward: those of the blocks, and those before and after them."""
    if config.generator is not None:
        parts = (other_flops(part, inputs, targets) for part in models_of(config))
        blocks, around = map(sum, zip(*parts, strict=True))
        return blocks, around
    if (own := model_of(config).flops(config, inputs, targets)) is not None:
        return own
    again = 1 if config.enhanced_mask_decoder else 0  # the last block runs twice
    stacks = list(zip(config.stacks.values(), (inputs, targets), strict=False))
    blocks = sum(_blocks(stack, stack.num_layers + again, length) for stack, length in stacks)
    if config.family == "encoder_decoder":
        encoder, decoder = config.stacks.values()
        blocks += decoder.num_layers * MultiHeadAttention.flops(decoder, targets, inputs, encoder.d_model)
    around = sum(head.flops(config.last_stack, inputs, targets) for head in heads_of(config))
    if config.input_convolution is not None:
        around += 2 * inputs * config.input_convolution * config.d_model**2
    if config.embedding_dim:
        around += 2 * inputs * config.embedding_dim * config.d_model
    return blocks, around


def expert_flops(config: ModelConfig, inputs: int, targets: int) -> float:
    """Counts those of the blocks that are of feed-forwards with experts: products grouped by expert."""
    if config.experts is None:
        return 0.0
    stacks = zip(config.stacks.values(), (inputs, targets), strict=False)
    return sum(
        len(kind.numbers) * part.kind.flops(part.config, length)
        for stack, length in stacks
        for kind in kinds_of_layers(stack, stack.num_layers)
        for part in feed_forwards_of(kind.config)
        if issubclass(part.kind, Mixture)
    )


def _blocks(config: ModelConfig, layers: int, length: int) -> int:
    """Counts feed-forward, positions, and the projections of self-attention, of one example's forward."""
    attention = self_attention_of(config).flops(config, length, length) + positions_of(config).flops(length, length)
    return layers * attention + sum(
        len(kind.numbers) * part.kind.flops(part.config, length)
        for kind in kinds_of_layers(config, layers)
        for part in feed_forwards_of(kind.config)
    )


# --- which pairs of a query and a key ------------------------------------------------------------------------------


def attentions(config: ModelConfig, inputs: int, targets: int) -> Iterator[Attention]:
    """Yields all attentions of a model."""
    if config.generator is not None:
        for part in models_of(config):
            yield from attentions(part, inputs, targets)
        return
    if model_of(config).flops(config, inputs, targets) is not None:  # it has no attention of this package
        return
    stacks = list(zip(config.stacks.values(), (inputs, targets), strict=False))
    if config.family == "encoder_decoder":
        decoder = config.last_stack
        yield Attention(decoder.num_layers, targets, inputs, *_heads(decoder), causal=False, window=None)
    if config.multi_token is not None:
        stacks += [(dataclasses.replace(config, num_layers=1), inputs)] * config.multi_token.depth
    for stack, length in stacks:
        if not self_attention_of(stack).has_pairs:
            continue
        kinds = [stack.layer_pattern[i % len(stack.layer_pattern)] for i in range(stack.num_layers)]
        kinds += kinds[-1:] if stack.enhanced_mask_decoder else []
        for kind, count in collections.Counter(kinds).items():
            window = stack.window if kind == "local" else None
            yield Attention(count, length, length, *_heads(stack), causal=stack.family == "decoder", window=window)


def _heads(config: ModelConfig) -> tuple[int, int, int, int]:
    """Returns how many heads an attention has, of queries and of keys, and how wide its keys and its values are."""
    width, latent = config.dim_per_head, config.latent_attention
    return config.num_heads, config.kv_heads, width, width if latent is None else latent.value_dim


def implementation_of(specs: Sequence[AttentionSpec], requested: str, platform: str) -> ImplementationOf:
    """Returns what says of each attention of a model which implementation runs it, and on what.

    Args:
      specs: those that a trace of the model has collected; of a batch of other lengths too.
      requested, platform: as of `choose_implementation`.
    """

    def implementation(one: Attention) -> tuple[str, AttentionSpec]:
        alike = [s for s in specs if (s.causal, s.head_dim) == (one.causal, one.head_dim)]
        lengths = one.queries, one.keys
        # Where lengths are others, cross-attention finds the encoder's own: no kernel skips anything of either.
        traced = next((spec for spec in alike if spec.lengths == lengths), alike[0])
        traced = dataclasses.replace(traced, query_length=one.queries, key_length=one.keys)
        name, _ = choose_implementation(requested, platform, traced)  # of a stack: one, for all of its layers
        return name, dataclasses.replace(traced, window=one.window)

    return implementation


def work_of(specs: Sequence[AttentionSpec], requested: str, platform: str) -> WorkOf:
    """Returns what says of each attention how much its implementation multiplies; arguments as of that."""
    implementation = implementation_of(specs, requested, platform)

    def work(one: Attention) -> Work:
        name, spec = implementation(one)
        return BACKENDS[name].work(spec)

    return work
