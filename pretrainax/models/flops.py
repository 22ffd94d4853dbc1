"""Floating-point operations of a step, counted from the architecture on paper.

XLA's own count is of no use for this: it counts the body of the scan over layers once.
"""

from pretrainax.config import ModelConfig
from pretrainax.layers.feed_forward import feed_forward_of
from pretrainax.layers.positions import positions_of
from pretrainax.models.electra import discriminator_config, generator_config
from pretrainax.models.heads import heads_of


def flops_per_step(config: ModelConfig, batch_size: int, inputs: int, targets: int) -> float:
    """Counts the FLOPs of the matrix products of one update: forward, and twice that for the backward.

    What is counted: 2 a multiplication and its addition; attention in full, also where a causal mask throws half of it
    away, or a window more; a masked LM's head on its `lengths.targets` positions only; padding as if it were text;
    generator and discriminator.
    What is not: norms, activations, softmax, embeddings, the optimizer, what rematerialisation does again, and the
    logits that a generator's replacements are drawn from.

    Args:
      batch_size: examples of one update.
      inputs, targets: tokens of an example. An encoder reads `inputs` tokens and predicts `targets` of them, an
        encoder-decoder reads `inputs` and writes `targets`, a decoder has as many of both.
    """
    if config.generator is not None:
        parts = discriminator_config(config), generator_config(config)
        return sum(flops_per_step(part, batch_size, inputs, targets) for part in parts)
    total = config.num_layers * _block(config, inputs)
    if config.family == "encoder_decoder":
        total += config.decoder_layers * (_block(config, targets) + _attention(config, targets, inputs))
    if config.enhanced_mask_decoder:
        total += _block(config, inputs)  # the last one runs twice
    if config.input_convolution is not None:
        total += 2 * inputs * config.input_convolution * config.d_model**2
    if config.embedding_dim:
        total += 2 * inputs * config.embedding_dim * config.d_model
    total += sum(head.flops(config, inputs, targets) for head in heads_of(config))
    return 3.0 * batch_size * total


def _block(config: ModelConfig, length: int) -> int:
    """Counts self-attention and feed-forward of one example."""
    feed_forward = feed_forward_of(config).flops(config, length)
    positions = positions_of(config).flops(length, length)
    return _attention(config, length, length) + positions + feed_forward


def _attention(config: ModelConfig, length: int, read: int) -> int:
    """Counts `length` queries on `read` keys, with the four projections."""
    width, kv_width = config.num_heads * config.dim_per_head, config.kv_heads * config.dim_per_head
    query_and_out = 2 * 2 * length * config.d_model * width
    key_and_value = 2 * 2 * read * config.d_model * kv_width
    logits_and_sum = 2 * 2 * length * read * width
    return query_and_out + key_and_value + logits_and_sum
