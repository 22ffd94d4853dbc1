"""Implements multi-token prediction (DeepSeek-V3): in training, a head predicts the tokens after the next token.

Section and equation numbers refer to DeepSeek-V3, arXiv 2412.19437.
"""

import dataclasses
from typing import Optional, Unpack

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig, NoPositions, RotaryPositions
from pretrainax.config.metric import FRACTION, Metric
from pretrainax.data.batch import has_loss, segments_of
from pretrainax.layers.compute import Compute
from pretrainax.layers.feed_forward import feed_forwards_of
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.layers.norm import Norm
from pretrainax.layers.positions import positions_for
from pretrainax.layers.self_attention import self_attention_of
from pretrainax.layers.stack import Stack
from pretrainax.layers.sums import Sums, add_sums
from pretrainax.models.heads.base import Batch, Head, loss_denominator, register_head
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.models.heads.vocabulary_loss import LossOptions, loss_sums


class MultiTokenTargets(flax.struct.PyTreeNode):
    """Targets and loss weights of one prediction depth, [B, T]. Depth k predicts the token k + 1 positions ahead."""

    targets: jax.Array
    weights: jax.Array  # float32; 0 after the end of the document, or if a token before the target has no weight


class MultiTokenOutput(flax.struct.PyTreeNode):
    """Predictions of the tokens 2, 3, … positions ahead, with the targets of each depth."""

    outputs: tuple[LanguageModelOutput, ...]
    targets: tuple[MultiTokenTargets, ...]
    blocks: Sums  # sums of the head's blocks
    weight: float = flax.struct.field(pytree_node=False, default=1.0)  # config.model.multi_token.weight


def shifted_targets(
    previous: MultiTokenTargets, first: MultiTokenTargets, segment_ids: jax.Array, depth: int
) -> MultiTokenTargets:
    """Computes the targets of a depth: the tokens `depth` positions after the next token.

    A target has nonzero weight only if it is in the same document as the token that predicts it and every target in
    between also has nonzero weight. Prefix tokens, which attend to later prefix tokens, therefore never predict a token
    to which they attend.

    Args:
      previous: the targets of depth - 1.
      first: the targets of depth 0, the next tokens.
      segment_ids: [B, T], the document of each token in its row; 0 for padding.
    """

    def shift(x: jax.Array) -> jax.Array:
        return jnp.pad(x[:, depth:], ((0, 0), (0, depth)))  # 0 past the end of a row

    same_document = (shift(segment_ids) == segment_ids) & (segment_ids > 0)
    return MultiTokenTargets(
        shift(first.targets), previous.weights * jnp.where(same_document, shift(first.weights), 0.0)
    )


@register_head
class MultiToken(Head):
    """The multi-token prediction head (section 2.2, equations 21 to 23).

    At position i, h_k = block_k(join_k[norm(embedding of token i + k) | norm(h_(k-1))]), and h_0 is the last hidden
    state of the model. The model's output matrix predicts token i + k + 1 from h_k.
    """

    name, loss_name = "multi_token", "multi_token_loss"
    metrics = (
        Metric("multi_token_loss", "nats per token after the next token", unit="nats per token"),
        Metric(
            "multi_token_accuracy",
            "tokens after the next token predicted correctly",
            larger_is_better=True,
            unit=FRACTION,
        ),
    )
    partition_rules = (
        (r"multi_token/(token|hidden)_norm_\d+/(scale|bias)", "features"),
        (r"multi_token/join_\d+/kernel", "features d_model"),
        (r"multi_token/join_\d+/bias", "d_model"),
    )

    def is_in(self, config: ModelConfig) -> bool:
        return config.multi_token is not None

    def modules(self, config: ModelConfig) -> dict[str, nn.Module]:
        return {"multi_token": MultiTokenModule(config)}

    def output(
        self, model: nn.Module, x: jax.Array, batch: Batch, *, deterministic: bool
    ) -> Optional[MultiTokenOutput]:
        """Computes the predictions of all depths; returns None if the batch has no targets, as in generation."""
        if not has_loss(batch) and not model.is_initializing():
            return None
        tokens = batch["tokens"]
        first = MultiTokenTargets(
            batch.get("targets", tokens), batch.get("loss_weights", jnp.ones(tokens.shape, jnp.float32))
        )
        settings, targets, outputs, sums = model.config.multi_token, [], [], {}
        current = first
        for depth in range(1, settings.depth + 1):
            # The targets of one depth are the inputs of the next depth.
            embeddings = model.embed(current.targets, batch["positions"], deterministic=deterministic)
            current = shifted_targets(current, first, batch["segment_ids"], depth)
            x, block_sums = model.multi_token(
                x, embeddings, batch, model.compute, depth=depth, deterministic=deterministic
            )
            outputs.append(model.unembedding(x, model.output_embedding.embedding))
            targets.append(current)
            sums = add_sums(sums, block_sums)
        return MultiTokenOutput(tuple(outputs), tuple(targets), sums, settings.weight)

    def block_sums(self, output: Optional[MultiTokenOutput]) -> Sums:
        return {} if output is None else output.blocks

    def count(self, batch: Batch) -> Optional[jax.Array]:
        """Computes the total weight of next-token targets, by which each depth's loss is divided (equation 24)."""
        return loss_denominator(batch)

    def sums(self, output: MultiTokenOutput, batch: Batch, **options: Unpack[LossOptions]) -> tuple[jax.Array, Sums]:
        total, metric_sums = jnp.zeros((), jnp.float32), {}
        loss_options = LossOptions(**(options | {"sequences": False, "per_target": False}))
        for prediction, targets in zip(output.outputs, output.targets, strict=True):
            depth_sums = loss_sums(prediction, targets.targets, targets.weights, **loss_options)
            total += depth_sums["objective"][0]
            metric_sums = add_sums(
                metric_sums, {f"{self.name}_{name}": depth_sums[name] for name in ("loss", "accuracy")}
            )
        return output.weight / len(output.outputs) * total, metric_sums

    def flops(self, config: ModelConfig, inputs: int, targets: int) -> int:
        assert config.multi_token is not None
        block_config = block_of(config)
        block = sum(
            feed_forward.kind.flops(feed_forward.config, inputs) for feed_forward in feed_forwards_of(block_config)
        )
        block += positions_for(block_config).flops(inputs, inputs)
        block += self_attention_of(block_config).flops(block_config, inputs, inputs)
        outside_block = 2 * inputs * config.d_model * (2 * config.d_model + config.vocab_size)
        return config.multi_token.depth * (block + outside_block)


def block_of(config: ModelConfig) -> ModelConfig:
    """Builds the config of the head's blocks, which have the architecture of the model's last block."""
    experts = None if config.experts is None else dataclasses.replace(config.experts, first_dense=None, every=None)
    kind, position = config.layer_pattern[(config.num_layers - 1) % len(config.layer_pattern)], config.position
    if isinstance(position, RotaryPositions) and (every := position.no_rotation_every) is not None:
        is_rotated = config.num_layers % every != 0
        position = dataclasses.replace(position, no_rotation_every=None) if is_rotated else NoPositions()
    window = config.window if kind == "local" else None
    # `norm_starts_stream` is for the first block of the model.
    fields = {"layer_pattern": (kind,), "window": window, "position": position, "norm_starts_stream": False}
    return dataclasses.replace(config, experts=experts, **fields)


class MultiTokenModule(nn.Module):
    """Computes the hidden states of one depth and the sums of its block.

    A call takes the hidden states of the previous depth (`x`) and the embeddings of the tokens `depth` positions ahead
    (`read`), [B, T, D] each.
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, read: jax.Array, batch: Batch, compute: Compute, *, depth: int, deterministic: bool
    ) -> tuple[jax.Array, Sums]:
        config = self.config
        token, hidden = (Norm(config, name=f"{name}_norm_{depth}") for name in ("token", "hidden"))
        # [B, T, D], [B, T, D] -> [B, T, 2 D] -> [B, T, D]
        joined = jnp.concatenate([token(read), hidden(x)], axis=-1)
        init = normal_init(config, 2 * config.d_model)
        x = Linear((config.d_model,), ("features", "d_model"), init, use_bias=False, name=f"join_{depth}")(joined)
        stack = Stack(block_of(config), compute, causal=True, num_layers=1, name=f"ahead_{depth}")
        segments, prefix = segments_of(batch), batch.get("prefix_mask")
        x, side_outputs = stack(x, batch["positions"], segments, prefix_mask=prefix, deterministic=deterministic)
        return x, side_outputs.sums
