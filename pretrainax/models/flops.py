"""Computes the FLOPs of a training step from the architecture of the model.

XLA's cost analysis counts the body of the scan over layers only once, so it cannot be used here.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Optional

from pretrainax.config import Experiment, ModelConfig
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
from pretrainax.models.heads.multi_token import block_of


class Attention(NamedTuple):
    """A group of attention layers that have the same shapes and masks."""

    layers: int  # number of layers in the group
    queries: int  # number of queries per example
    keys: int  # number of keys per example
    heads: int  # number of query heads
    kv_heads: int  # number of key-value heads
    head_dim: int  # width of a query or key of one head
    value_dim: int  # width of a value of one head
    causal: bool  # a query attends only to its own token and earlier tokens
    window: Optional[int]  # size of the sliding window in tokens, or None
    in_encoder: bool = False  # the self-attention of the encoder of an encoder-decoder


WorkOf = Callable[[Attention], Work]
ImplementationOf = Callable[[Attention], tuple[str, AttentionSpec]]


class UpdateCost(NamedTuple):
    """The matmuls of an update: forward, gradients of activations, and gradients of trained parameters.

    A trained matrix costs three matmuls of the same size, a frozen matrix two, or one if nothing below it is trained.
    The layers of a stack run in one loop, so all of them have a backward pass if one of them has a trained parameter.
    """

    blocks: int = 3  # matmuls per matrix in the blocks
    encoder: int = 3  # the same in the encoder of an encoder-decoder
    heads: float = 3.0  # matmuls per matrix outside the blocks; a mean over the matrices
    per_input: float = 0.0  # FLOPs of all passes of added matrices and of gradients of trained ones, per input token
    per_target: float = 0.0  # the same per token of the decoder of an encoder-decoder
    per_update: float = 0.0  # FLOPs of added matrices that read no tokens, of an update
    virtual: tuple[int, int] = (0, 0)  # virtual tokens before each row; of the decoder of an encoder-decoder

    def attention(self, group: Attention) -> float:
        """Returns the fraction of the attention matmuls that an update computes: 1, or 1/3 without a backward pass."""
        return 1.0 if (self.encoder if group.in_encoder else self.blocks) > 1 else 1 / 3

    def matrices(self, config: ModelConfig, inputs: int, targets: int) -> float:
        """Computes the FLOPs of one example's matmuls with matrices in the blocks, except for query-key pairs."""
        inputs, targets = self.lengths(inputs, targets)
        blocks, _ = other_flops(config, inputs, targets)
        if config.family != "encoder_decoder":
            return self.blocks * blocks + self.per_input * inputs
        encoder, decoder = config.stacks.values()
        of_encoder = _block_flops(encoder, encoder.num_layers, inputs)
        flops = self.blocks * (blocks - of_encoder) + self.encoder * of_encoder
        if self.encoder == 1 < self.blocks:  # keys and values of the cross-attention send no gradient to the encoder
            read = [MultiHeadAttention.flops(decoder, targets, n, encoder.d_model) for n in (inputs, 0)]
            flops -= decoder.num_layers * (read[0] - read[1])
        return flops + self.per_input * inputs + self.per_target * targets

    def lengths(self, inputs: int, targets: int) -> tuple[int, int]:
        """Returns the tokens per example that the blocks read, including virtual tokens."""
        return inputs + self.virtual[0], targets + self.virtual[1]


FULL = UpdateCost()  # an update of all parameters


def update_cost(experiment: Experiment) -> UpdateCost:
    """Returns the matmuls of an update of an experiment, which depend on its tuning.

    Layers that `config.layers` freezes cost as much as others: their gradients are computed and then set to 0.
    """
    return FULL if experiment.tuning is None else experiment.tuning.cost(experiment)


def flops_per_step(
    config: ModelConfig,
    batch_size: float,
    inputs: int,
    targets: int,
    teacher: Optional[ModelConfig] = None,
    cost: UpdateCost = FULL,
) -> float:
    """Computes the matmul FLOPs of one update; the backward pass counts as twice the forward pass.

    The definition follows PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B) and published MFUs. A multiply-add
    counts as 2 FLOPs. All query-key pairs of attention are counted, even if a causal mask or a window removes some of
    them. The masked-LM head is counted for only `targets` positions. Padding tokens are counted, too. For ELECTRA, both
    encoders are counted. Not counted: norms, activations, softmax, embeddings, the optimizer, recomputation (by
    rematerialization, or in the backward pass of a fused attention), and the logits for sampling a generator's
    replacements.

    Args:
      batch_size: examples per update, times the number of gradients that the optimizer computes per update.
      inputs, targets: tokens per example. An encoder reads `inputs` tokens and predicts `targets` of them, an
        encoder-decoder reads `inputs` and predicts `targets`, and for a decoder the two numbers are equal. Virtual
        tokens are not included.
      teacher: the config of the distillation teacher, which runs only a forward pass. None without distillation.
      cost: `update_cost` of the experiment: the matmuls of a tuning. By default, all parameters are trained.
    """
    all_pairs = lambda group: PRODUCTS * group.queries * group.keys  # noqa: E731
    total = _step_flops(config, batch_size, inputs, targets, all_pairs, cost)
    return total if teacher is None else total + flops_per_step(teacher, batch_size, inputs, targets) / 3


def executed_flops(
    config: ModelConfig,
    batch_size: float,
    inputs: int,
    targets: int,
    work: WorkOf,
    teacher: Optional[ModelConfig] = None,
    cost: UpdateCost = FULL,
) -> float:
    """Computes the FLOPs of `flops_per_step` without the query-key pairs that the attention implementation skips.

    Args:
      work: maps an `Attention` to its work, including the computed query-key pairs; a result of `work_of`.
    """
    pairs = lambda group: PRODUCTS * work(group).pairs.sum()  # noqa: E731
    total = _step_flops(config, batch_size, inputs, targets, pairs, cost)
    return total if teacher is None else total + executed_flops(teacher, batch_size, inputs, targets, work) / 3


def _step_flops(
    config: ModelConfig,
    batch_size: float,
    inputs: int,
    targets: int,
    products: Callable[[Attention], float],
    cost: UpdateCost,
) -> float:
    _, outside_blocks = other_flops(config, inputs, targets)
    pairs = attention_flops(config, *cost.lengths(inputs, targets), lambda g: cost.attention(g) * products(g))
    per_example = cost.matrices(config, inputs, targets) + cost.heads * outside_blocks + pairs
    return batch_size * per_example + cost.per_update


def attention_flops(config: ModelConfig, inputs: int, targets: int, products: Callable[[Attention], float]) -> float:
    """Computes the FLOPs of the matmuls between queries, keys and values for one example.

    Args:
      products: maps an `Attention` to query-key pairs × matmuls per pair, for one head.
    """
    groups = attentions(config, inputs, targets)
    # Half of the matmuls multiply queries and keys, the other half attention weights and values.
    width = lambda group: (group.head_dim + group.value_dim) / 2  # noqa: E731
    return sum(2.0 * group.layers * group.heads * width(group) * float(products(group)) for group in groups)


def other_flops(config: ModelConfig, inputs: int, targets: int) -> tuple[float, float]:
    """Computes (FLOPs in the blocks, FLOPs outside them) of one example's forward, excluding query-key matmuls."""
    if config.generator is not None:
        flops = (other_flops(component, inputs, targets) for component in component_configs(config))
        blocks, outside_blocks = map(sum, zip(*flops, strict=True))
        return blocks, outside_blocks
    if (family_flops := model_of(config).flops(config, inputs, targets)) is not None:
        return family_flops
    repeated = 1 if config.enhanced_mask_decoder else 0  # the last block runs twice
    stacks = list(zip(config.stacks.values(), (inputs, targets), strict=False))
    blocks = sum(_block_flops(stack, stack.num_layers + repeated, length) for stack, length in stacks)
    if config.family == "encoder_decoder":
        encoder, decoder = config.stacks.values()
        blocks += decoder.num_layers * MultiHeadAttention.flops(decoder, targets, inputs, encoder.d_model)
    outside_blocks = sum(head.flops(config.last_stack, inputs, targets) for head in heads_of(config))
    if config.input_convolution is not None:
        outside_blocks += 2 * inputs * config.input_convolution * config.d_model**2
    if config.embedding_dim:
        outside_blocks += 2 * inputs * config.embedding_dim * config.d_model
    return blocks, outside_blocks


def expert_flops(config: ModelConfig, inputs: int, targets: int) -> float:
    """Computes the forward FLOPs of one example in mixture-of-experts layers; returns 0 if the model has none.

    These layers use matmuls that are grouped by expert.
    """
    if config.experts is None:
        return 0.0
    stacks = zip(config.stacks.values(), (inputs, targets), strict=False)
    return sum(
        len(group.numbers) * feed_forward.kind.flops(feed_forward.config, length)
        for stack, length in stacks
        for group in layer_groups(stack, stack.num_layers)
        for feed_forward in feed_forwards_of(group.config)
        if issubclass(feed_forward.kind, Mixture)
    )


def _block_flops(config: ModelConfig, layers: int, length: int) -> int:
    """Computes the forward FLOPs of one example in the blocks of a stack, excluding query-key matmuls.

    Includes feed-forward layers, position embeddings and the projections of self-attention.

    Args:
      layers: number of blocks.
      length: number of tokens.
    """
    attention = self_attention_of(config).flops(config, length, length) + positions_for(config).flops(length, length)
    return layers * attention + sum(
        len(group.numbers) * feed_forward.kind.flops(feed_forward.config, length)
        for group in layer_groups(config, layers)
        for feed_forward in feed_forwards_of(group.config)
    )


# --- query-key pairs -----------------------------------------------------------------------------------------------


def attentions(config: ModelConfig, inputs: int, targets: int) -> Iterator[Attention]:
    """Yields the attention layers of a model, grouped by shapes and masks.

    The arguments are as in `flops_per_step`.
    """
    if config.generator is not None:
        for component in component_configs(config):
            yield from attentions(component, inputs, targets)
        return
    if model_of(config).flops(config, inputs, targets) is not None:  # the model has no attention of this package
        return
    stacks = list(zip(config.stacks.values(), (inputs, targets), strict=False))
    if config.family == "encoder_decoder":
        decoder = config.last_stack
        yield Attention(decoder.num_layers, targets, inputs, *_heads(decoder), causal=False, window=None)
    if config.multi_token is not None:
        stacks += [(dataclasses.replace(block_of(config), num_layers=1), inputs)] * config.multi_token.depth
    for stack, length in stacks:
        if not self_attention_of(stack).has_pairs:
            continue
        kinds = [stack.layer_pattern[i % len(stack.layer_pattern)] for i in range(stack.num_layers)]
        kinds += kinds[-1:] if stack.enhanced_mask_decoder else []
        for kind, count in collections.Counter(kinds).items():
            window = stack.window if kind == "local" else None
            causal, in_encoder = stack.family == "decoder", config.family == "encoder_decoder" and stack is stacks[0][0]
            yield Attention(count, length, length, *_heads(stack), causal, window, in_encoder)


def _heads(config: ModelConfig) -> tuple[int, int, int, int]:
    """Returns the sizes of a stack's attention: (query heads, key-value heads, width of a key, width of a value)."""
    width, latent = config.dim_per_head, config.latent_attention
    return config.num_heads, config.kv_heads, width, width if latent is None else latent.value_dim


def implementation_of(specs: Sequence[AttentionSpec], requested: str, platform: str) -> ImplementationOf:
    """Returns a function that maps an `Attention` to the name of its implementation and its spec.

    Args:
      specs: specs from a trace of the model, possibly with different sequence lengths.
      requested, platform: as in `choose_backend`.
    """

    def implementation(attention: Attention) -> tuple[str, AttentionSpec]:
        candidates = [s for s in specs if (s.causal, s.head_dim) == (attention.causal, attention.head_dim)]
        lengths = attention.queries, attention.keys
        # If no lengths match, cross-attention may get the encoder's spec. No kernel skips pairs in these two layers.
        traced = next((spec for spec in candidates if spec.lengths == lengths), candidates[0])
        spec = dataclasses.replace(
            traced, query_length=attention.queries, key_length=attention.keys, window=attention.window
        )
        return choose_backend(requested, platform, spec)[0], spec

    return implementation


def work_of(specs: Sequence[AttentionSpec], requested: str, platform: str) -> WorkOf:
    """Returns a function that maps an `Attention` to the `Work` of its implementation.

    The arguments are as in `implementation_of`.
    """
    implementation = implementation_of(specs, requested, platform)

    def work(attention: Attention) -> Work:
        name, spec = implementation(attention)
        return BACKENDS[name].work(spec)

    return work
