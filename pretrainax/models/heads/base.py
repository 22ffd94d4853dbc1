"""The base class of heads, which compute an output and a loss from a model's last hidden states."""

from typing import ClassVar, Optional, Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.config.metric import Metric, declare
from pretrainax.data.batch import Batch, has_loss
from pretrainax.layers.sums import Sums
from pretrainax.models.heads.vocabulary_loss import LossOptions
from pretrainax.sharding.param_paths import PyTree
from pretrainax.sharding.rules import add_partition_rules


class Head:
    """A head: its models, the modules that it adds to them, its output, loss and metrics."""

    name: ClassVar[str]  # key of the output in Outputs.heads
    loss_name: ClassVar[str]  # name of the loss metric; "label_loss" for the head of a task
    partition_rules: ClassVar[tuple[tuple[str, str], ...]] = ()  # rows for sharding.rules.PARTITION_RULES
    metrics: ClassVar[tuple[Metric, ...]] = ()  # metrics computed from the sums

    def is_in(self, config: ModelConfig) -> bool:
        """Returns True if a model of this config has the head."""
        raise NotImplementedError

    def modules(self, config: ModelConfig) -> dict[str, nn.Module]:
        """Returns the submodules that the head adds to the model, by name."""
        raise NotImplementedError

    def answer(self, model: nn.Module, x: jax.Array, batch: Batch, *, deterministic: bool) -> PyTree:
        """Returns the output of the head, a pytree; called inside `model`, which owns the head's modules.

        Args:
          x: the last hidden state, [B, T, D].
          deterministic: disables dropout.
        """
        raise NotImplementedError

    def answers(self, output: PyTree, batch: Batch) -> PyTree:
        """Returns the arrays [B, …] from which a task computes its metrics on the host."""
        return output

    def of_blocks(self, output: PyTree) -> Sums:
        """Returns the sums of the head's own blocks, if it has any."""
        return {}

    def count(self, batch: Batch) -> Optional[jax.Array]:
        """Returns the number of predictions in a batch; None if the batch has no labels for this head."""
        raise NotImplementedError

    def check(self, output: Optional[PyTree], batch: Batch) -> None:
        """Raises UserError if the model has the head (else `output` is None) but the batch no labels, or vice versa."""

    def sums(self, output: PyTree, batch: Batch, **options: Unpack[LossOptions]) -> tuple[jax.Array, Sums]:
        """Returns the sum to minimize, to be divided by `count`, and the sums of the metrics.

        Args:
          options: options of the vocabulary loss, see `vocabulary_loss.loss_sums`.
        """
        raise NotImplementedError

    def flops(self, config: ModelConfig, inputs: int, targets: int) -> int:
        """Returns the forward FLOPs of one example, without negligible operations."""
        return 0


HEADS: dict[str, Head] = {}


def register_head(cls: type[Head]) -> type[Head]:
    """Registers a head in HEADS, its partition rules, and its metrics in METRICS."""
    HEADS[cls.name] = cls()
    declare(*cls.metrics)
    add_partition_rules(cls.partition_rules)
    return cls


def heads_of(config: ModelConfig) -> list[Head]:
    """Returns the heads of a model."""
    return [head for head in HEADS.values() if head.is_in(config)]


def modules_of_heads(config: ModelConfig) -> dict[str, nn.Module]:
    """Returns the submodules of a model's heads by name, the first component of their parameter paths."""
    read = config.last_stack
    return {name: module for head in heads_of(read) for name, module in head.modules(read).items()}


def head_modules(config: ModelConfig) -> set[str]:
    """Returns the names of the head submodules, including the task modules of `config.model.parts`."""
    added = {name for part in config.parts for name in part.task_modules} if config.head is not None else set()
    return set(modules_of_heads(config)) | added


def loss_denominator(batch: Batch) -> Optional[jax.Array]:
    """Returns the denominator of the token loss; None if the batch has no loss weights.

    It is the sum of the loss weights, unless the batch has a "denominator" (for an importance-weighted mean, the number
    of samples).
    """
    if not has_loss(batch):
        return None
    return batch["denominator" if "denominator" in batch else "loss_weights"].sum()


def non_empty_rows(batch: Batch) -> jax.Array:
    """Returns 1 for each row that is not all padding, [B] float32."""
    return (batch["segment_ids"][:, 0] > 0).astype(jnp.float32)


def mean_sums(name: str, loss: jax.Array, right: jax.Array, weights: jax.Array) -> Sums:
    """Returns the sums of a loss and an accuracy over predictions of any shape; `loss` is already weighted."""
    total, count = jax.lax.stop_gradient(loss.sum()), weights.sum()
    return {f"{name}_loss": (total, count), f"{name}_accuracy": (jnp.where(right, weights, 0.0).sum(), count)}
