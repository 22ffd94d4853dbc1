"""FLOPs of a step, computed from the architecture.

XLA's cost analysis is not usable here, because it counts the body of the scan over layers once.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Optional

from pretrainax.config import ModelConfig
from pretrainax.layers.attention import BACKENDS, choose_backend
from pretrainax.layers.attention_spec import PRODUCTS, AttentionSpec, Work
from pretrainax.layers.feed_forward import feed_forwards_of, layer_groups
from pretrainax.layers.feed_forward.mixture import Mixture
from pretrainax.layers.multi_head import MultiHeadAttention
from pretrainax.layers.positions import positions_for
from pretrainax.layers.self_attention import self_attention_of
from pretrainax.models.base import model_of
from pretrainax.models.electra import component_configs
from pretrainax.models.heads import heads_of


class Attention(NamedTuple):
    """A group of equal attentions of a model."""

    layers: int
    queries: int  # per example
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
    """Returns the FLOPs of the matrix products of one update: the forward pass, plus twice that for the backward pass.

    The count follows PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), like published MFUs. A multiply-add
    counts as 2 FLOPs. Attention counts in full, even if a causal mask removes half of it or a window removes more. The
    head of a masked LM counts for `lengths.targets` positions only. Padding counts like text. Generator and
    discriminator both count.
    Not counted: norms, activations, softmax, embeddings, the optimizer, recomputation (by rematerialization, or in the
    backward pass of a fused attention), and the logits for sampling a generator's replacements.

    Args:
      batch_size: examples per update, times the number of gradients that the optimizer takes per update.
      inputs, targets: tokens per example. An encoder reads `inputs` tokens and predicts `targets` of them, an
        encoder-decoder reads `inputs` and predicts `targets`, and in a decoder both are equal.
      teacher: a model that also runs the forward pass; None: no teacher.
      passes: number of products with each matrix, `Experiment.passes`. Matrices that a tuning adds are not counted.
    """
    attention = attention_flops(config, inputs, targets, lambda one: PRODUCTS * one.queries * one.keys)
    total = batch_size * (
        matrix_flops(passes, *other_flops(config, inputs, targets)) + attention_fraction(passes) * attention
    )
    return total if teacher is None else total + flops_per_step(teacher, batch_size, inputs, targets) / 3


def executed_flops(
    config: ModelConfig,
    batch_size: float,
    inputs: int,
    targets: int,
    work: WorkOf,
    teacher: Optional[ModelConfig] = None,
    passes: int = 3,
) -> float:
    """Returns the FLOPs of `flops_per_step` without query-key pairs that the attention skips, by `work`."""
    attention = attention_flops(config, inputs, targets, lambda one: PRODUCTS * work(one).pairs.sum())
    total = batch_size * (
        matrix_flops(passes, *other_flops(config, inputs, targets)) + attention_fraction(passes) * attention
    )
    return total if teacher is None else total + executed_flops(teacher, batch_size, inputs, targets, work) / 3


def matrix_flops(passes: int, blocks: float, around: float) -> float:
    """Returns the FLOPs of a step's products with matrices, from the forward FLOPs in and around the blocks.

    If only the heads are trained (one pass), the heads have a backward pass and the blocks have none.
    """
    return passes * blocks + (3 if passes == 1 else passes) * around


def attention_fraction(passes: int) -> float:
    """Returns the fraction of the attention products that a step computes: 1/3 without a backward pass."""
    return 1.0 if passes > 1 else 1 / 3


def attention_flops(config: ModelConfig, inputs: int, targets: int, products: Callable[[Attention], float]) -> float:
    """Returns the FLOPs between queries, keys and values of one example.

    Args:
      products: returns query-key pairs × matrix products per pair, of one head.
    """
    groups = attentions(config, inputs, targets)
    # Half of the products are between queries and keys, half with values.
    width = lambda one: (one.head_dim + one.value_dim) / 2  # noqa: E731
    return sum(2.0 * one.layers * one.heads * width(one) * float(products(one)) for one in groups)


def other_flops(config: ModelConfig, inputs: int, targets: int) -> tuple[float, float]:
    """Returns the other forward FLOPs of one example: in the blocks, and before and after the blocks."""
    if config.generator is not None:
        parts = (other_flops(part, inputs, targets) for part in component_configs(config))
        blocks, around = map(sum, zip(*parts, strict=True))
        return blocks, around
    if (own := model_of(config).flops(config, inputs, targets)) is not None:
        return own
    repeated = 1 if config.enhanced_mask_decoder else 0  # the last block runs twice
    stacks = list(zip(config.stacks.values(), (inputs, targets), strict=False))
    blocks = sum(_blocks(stack, stack.num_layers + repeated, length) for stack, length in stacks)
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
    """Returns the FLOPs of the feed-forwards with experts, whose products are grouped by expert."""
    if config.experts is None:
        return 0.0
    stacks = zip(config.stacks.values(), (inputs, targets), strict=False)
    return sum(
        len(kind.numbers) * part.kind.flops(part.config, length)
        for stack, length in stacks
        for kind in layer_groups(stack, stack.num_layers)
        for part in feed_forwards_of(kind.config)
        if issubclass(part.kind, Mixture)
    )


def _blocks(config: ModelConfig, layers: int, length: int) -> int:
    """Returns the forward FLOPs of one example in feed-forwards, positions and self-attention projections."""
    attention = self_attention_of(config).flops(config, length, length) + positions_for(config).flops(length, length)
    return layers * attention + sum(
        len(kind.numbers) * part.kind.flops(part.config, length)
        for kind in layer_groups(config, layers)
        for part in feed_forwards_of(kind.config)
    )


# --- query-key pairs -----------------------------------------------------------------------------------------------


def attentions(config: ModelConfig, inputs: int, targets: int) -> Iterator[Attention]:
    """Yields all attentions of a model, in groups."""
    if config.generator is not None:
        for part in component_configs(config):
            yield from attentions(part, inputs, targets)
        return
    if model_of(config).flops(config, inputs, targets) is not None:  # the model has no attention of this package
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
    """Returns the numbers of query heads and key heads, and the widths of keys and values."""
    width, latent = config.dim_per_head, config.latent_attention
    return config.num_heads, config.kv_heads, width, width if latent is None else latent.value_dim


def implementation_of(specs: Sequence[AttentionSpec], requested: str, platform: str) -> ImplementationOf:
    """Returns a function from an attention to the name of its implementation and its spec.

    Args:
      specs: specs from a trace of the model, possibly with other sequence lengths.
      requested, platform: as in `choose_backend`.
    """

    def implementation(one: Attention) -> tuple[str, AttentionSpec]:
        candidates = [s for s in specs if (s.causal, s.head_dim) == (one.causal, one.head_dim)]
        lengths = one.queries, one.keys
        # With other lengths, cross-attention may get the encoder's spec; no kernel skips pairs in either.
        traced = next((spec for spec in candidates if spec.lengths == lengths), candidates[0])
        traced = dataclasses.replace(traced, query_length=one.queries, key_length=one.keys)
        name, _ = choose_backend(requested, platform, traced)  # all layers of a stack use the same
        return name, dataclasses.replace(traced, window=one.window)

    return implementation


def work_of(specs: Sequence[AttentionSpec], requested: str, platform: str) -> WorkOf:
    """Returns a function from an attention to the work of its implementation; arguments as in `implementation_of`."""
    implementation = implementation_of(specs, requested, platform)

    def work(one: Attention) -> Work:
        name, spec = implementation(one)
        return BACKENDS[name].work(spec)

    return work
