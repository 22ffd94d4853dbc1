"""Decoder-only Transformer: each token attends to earlier tokens (GPT-2, LLaMA).

In a prefix LM, prefix tokens also attend to the later tokens of the prefix.
"""

import functools
from collections.abc import Callable
from typing import Optional, cast

import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.data.batch import Batch, segments_of
from pretrainax.layers.block import AuxOutputs
from pretrainax.layers.one_forward_one_backward import Loss, LossStage
from pretrainax.layers.stack import Stack
from pretrainax.models.base import Model, register_model
from pretrainax.models.outputs import Outputs
from pretrainax.sharding.param_paths import PyTree


@register_model
class Decoder(Model):
    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        return config.family == "decoder"

    def setup(self):
        super().setup()
        self.decoder = Stack(self.config, self.compute, causal=True, num_layers=self.config.num_layers)

    def __call__(self, batch: Batch, *, deterministic: bool) -> Outputs:
        return self.decode(batch, deterministic=deterministic)

    def decode(self, batch: Batch, state: PyTree = None, *, deterministic: bool) -> Outputs:
        """Computes the outputs for each token, and the updated `state` of the blocks.

        Args:
          state: the state of all blocks, such as a KV cache, stacked as [L, …]. None if the blocks have no state.
          deterministic: disables dropout.
        """
        x, side_outputs = self._through_stack(batch, state, deterministic=deterministic)
        return self.head_outputs(x, side_outputs, batch, deterministic=deterministic)

    def one_forward_one_backward_loss(self, batch: Batch, loss: Callable[[Outputs, Batch], Loss]) -> Loss:
        """Computes the training objective and the metric sums of a batch in a pipeline with the 1F1B schedule.

        The pipeline computes each microbatch's gradients directly after its loss.

        Args:
          loss: maps the outputs and the batch of n tokens, [1, n], to (objective, sums). The pipeline adds up the
            results.
        """
        names = (*self.names_of_heads, *(["token_embedding"] if self.config.tie_embeddings else []))
        params = {name: tree for name, tree in self.variables["params"].items() if name in names}
        tokens = {name: batch[name] for name in ("targets", "loss_weights", "text_weights") if name in batch}
        if "target_bytes" in batch:  # one count per row, stored at the row's first token
            tokens["target_bytes"] = jnp.zeros_like(batch["loss_weights"]).at[:, 0].set(batch["target_bytes"])
        head_outputs = functools.partial(self.clone(parent=None).apply, deterministic=False, method="head_outputs")

        def run(params, x, tokens):
            return loss(cast(Outputs, head_outputs({"params": params}, x, AuxOutputs(), tokens)), tokens)

        objective, side_outputs = self._through_stack(batch, ending=LossStage(run, params, tokens), deterministic=False)
        return objective, side_outputs.sums

    def _through_stack(
        self, batch: Batch, state: PyTree = None, ending: Optional[LossStage] = None, *, deterministic: bool
    ) -> tuple[jax.Array, AuxOutputs]:
        return self.decoder(
            self.embed(batch["tokens"], batch["positions"], deterministic=deterministic),
            batch["positions"],
            segments_of(batch),
            prefix_mask=batch.get("prefix_mask"),
            ending=ending,
            state=state,
            deterministic=deterministic,
        )
