"""Implements the sentence-pair head, which classifies how the two segments of a row are related (BERT, ALBERT)."""

from typing import Optional, Unpack

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig, UserError
from pretrainax.config.metric import FRACTION, Metric
from pretrainax.data.batch import has_pairs
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.layers.sums import Sums
from pretrainax.models.heads.base import Batch, Head, mean_sums, non_empty_rows, per_target_sums, register_head
from pretrainax.models.heads.vocabulary_loss import LossOptions
from pretrainax.sharding.arrays import constrain
from pretrainax.sharding.axes import logical_spec


@register_head
class Pairs(Head):
    """The sentence-pair head. The output is each row's logits for the two labels, [B, 2] float32."""

    name, loss_name = "pair", "pair_loss"
    metrics = (
        Metric("pair_loss", "nats per pair of segments, for its label", in_total_loss=True, unit="nats per pair"),
        Metric("pair_accuracy", "pairs of segments with the correct label", larger_is_better=True, unit=FRACTION),
    )
    partition_rules = (
        (r"pair_head/dense/kernel", "d_model features"),
        (r"pair_head/output/kernel", "d_model labels"),
        (r"pair_head/(dense|output)/bias", "features"),
    )

    def is_in(self, config: ModelConfig) -> bool:
        return config.pair_head

    def modules(self, config: ModelConfig) -> dict[str, nn.Module]:
        return {"pair_head": PairHead(config)}

    def output(self, model: nn.Module, x: jax.Array, batch: Batch, *, deterministic: bool) -> jax.Array:
        return model.pair_head(x)

    def count(self, batch: Batch) -> Optional[jax.Array]:
        return non_empty_rows(batch).sum() if has_pairs(batch) else None

    def check(self, output: Optional[jax.Array], batch: Batch) -> None:
        if (output is None) == (has_pairs(batch)):
            mismatch = "pair_labels have no head" if has_pairs(batch) else "the head has no pair_labels to learn from"
            raise UserError(f"config.model.pair_head and config.objective do not fit: {mismatch}")

    def sums(self, output: jax.Array, batch: Batch, **options: Unpack[LossOptions]) -> tuple[jax.Array, Sums]:
        labels = batch["pair_labels"]
        chex.assert_shape(output, (*labels.shape, 2), custom_message="logits are [B, 2], pair_labels [B]")
        target_logits = jnp.take_along_axis(output, labels[:, None], axis=1).squeeze(1)  # [B, 2] -> [B]
        real = non_empty_rows(batch)
        loss = (jax.nn.logsumexp(output, axis=-1) - target_logits) * real
        correct = jnp.argmax(output, axis=-1) == labels
        values = per_target_sums("pair", loss, correct, real) if options.get("per_target") else {}
        return loss.sum(), mean_sums("pair", loss, correct, real) | values


class PairHead(nn.Module):
    """Computes the logits of a pair of segments from the state of the first token, [B, T, D] -> [B, 2] float32.

    BERT predicts whether the second segment follows the first segment in the document (Devlin et al. 2018, section 3.1,
    task 2). ALBERT predicts whether two consecutive segments are in the original order (Lan et al. 2019, section 3.1).
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width, init = self.config.d_model, normal_init(self.config, self.config.d_model)
        x = constrain(x[:, 0], logical_spec("batch"))  # [B, T, D] -> [B, D]
        x = constrain(jnp.tanh(Linear((width,), ("d_model", "features"), init, name="dense")(x)), logical_spec("batch"))
        return Linear((2,), ("d_model", "labels"), init, name="output")(x).astype(jnp.float32)
