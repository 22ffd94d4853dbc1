"""Implements the backward language-model head, which predicts the previous token in a bidirectional recurrent model."""

from typing import Optional, Unpack

import flax.linen as nn
import jax

from pretrainax.config import ModelConfig, Recurrent, UserError
from pretrainax.config.metric import FRACTION, Metric
from pretrainax.data.batch import has_loss, has_previous
from pretrainax.layers.sums import Sums
from pretrainax.models.heads.base import Batch, Head, register_head
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.models.heads.vocabulary_loss import PER_TARGET, LossOptions, loss_sums


@register_head
class BackwardLanguageModel(Head):
    """The backward head, which uses the output matrix of the language-model head (Peters et al. 2018, section 3.1)."""

    name, loss_name = "backward_lm", "backward_loss"
    metrics = (
        Metric(
            "backward_loss",
            "nats per token of the backward language model, which predicts each token from the tokens after it",
            in_total_loss=True,
            unit="nats per token",
        ),
        Metric(
            "backward_accuracy",
            "tokens that the backward model predicts correctly",
            larger_is_better=True,
            unit=FRACTION,
        ),
    )

    def is_in(self, config: ModelConfig) -> bool:
        return config.part(Recurrent) is not None and config.head is None

    def modules(self, config: ModelConfig) -> dict[str, nn.Module]:
        return {}

    def output(self, model: nn.Module, x: jax.Array, batch: Batch, *, deterministic: bool) -> LanguageModelOutput:
        """Predicts the previous token at all positions from the backward LSTMs' hidden states.

        These are the second half of x [B, T, 2 D].
        """
        return model.unembedding(x[..., model.config.d_model :], None)

    def count(self, batch: Batch) -> Optional[jax.Array]:
        return batch["previous_weights"].sum() if has_previous(batch) else None

    def check(self, output: Optional[LanguageModelOutput], batch: Batch) -> None:
        if has_loss(batch) and (output is None) == has_previous(batch):
            mismatch = "previous has no head" if has_previous(batch) else "the backward head has no previous to predict"
            raise UserError(f"config.model.family and config.objective do not fit: {mismatch}")

    def sums(self, output: LanguageModelOutput, batch: Batch, **options: Unpack[LossOptions]) -> tuple[jax.Array, Sums]:
        targets = batch["previous"], batch["previous_weights"], batch.get("segment_ids")
        sums = loss_sums(output, *targets, **options)
        objective, _ = sums.pop("objective")
        summed = {f"backward_{name}": x for name, x in sums.items() if not name.startswith(PER_TARGET)}
        values = {name.replace("/", "/backward_"): x for name, x in sums.items() if name.startswith(PER_TARGET)}
        return objective, summed | values

    def flops(self, config: ModelConfig, inputs: int, targets: int) -> int:
        return 2 * inputs * config.d_model * config.vocab_size
