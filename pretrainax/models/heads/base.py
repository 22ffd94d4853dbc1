"""The base of all heads: a head is a question that a model answers from its last hidden state, and its score."""

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
    """One question. A head says which models have it, what it adds to them, and what its loss is."""

    name: ClassVar[str]  # of its output in Outputs.heads
    loss_name: ClassVar[str]  # of its loss among the metrics; of a task's head "label_loss"
    partition_rules: ClassVar[tuple[tuple[str, str], ...]] = ()  # rows for sharding.rules.PARTITION_RULES
    metrics: ClassVar[tuple[Metric, ...]] = ()  # that its sums become

    def is_in(self, config: ModelConfig) -> bool:
        """Returns True if a model of this config has the head."""
        raise NotImplementedError

    def modules(self, config: ModelConfig) -> dict[str, nn.Module]:
        """Returns what the model gets as submodules, by name."""
        raise NotImplementedError

    def answer(self, model: nn.Module, x: jax.Array, batch: Batch, *, deterministic: bool) -> PyTree:
        """Returns the output of the head, a pytree; called inside `model`, which has its modules.

        Args:
          x: the last hidden state, [B, T, D].
          deterministic: without dropout.
        """
        raise NotImplementedError

    def answers(self, output: PyTree, batch: Batch) -> PyTree:
        """Returns what a task's figures are made of, arrays [B, …], of the output: they are gathered on the host."""
        return output

    def of_blocks(self, output: PyTree) -> Sums:
        """Returns the sums of blocks that are the head's own."""
        return {}

    def count(self, batch: Batch) -> Optional[jax.Array]:
        """Returns how many predictions a batch asks for; None where it has no labels for this head."""
        raise NotImplementedError

    def check(self, output: Optional[PyTree], batch: Batch) -> None:
        """Raises UserError where a model in training (`output` None: without this head) and its batch do not fit."""

    def sums(self, output: PyTree, batch: Batch, **options: Unpack[LossOptions]) -> tuple[jax.Array, Sums]:
        """Returns the sum to minimise, which `count` divides, and the sums of the metrics.

        Args:
          options: of the loss over the vocabulary, see `vocabulary_loss.loss_sums`.
        """
        raise NotImplementedError

    def flops(self, config: ModelConfig, inputs: int, targets: int) -> int:
        """Returns the floating-point operations of one example's forward pass that are worth counting."""
        return 0


HEADS: dict[str, Head] = {}


def register_head(cls: type[Head]) -> type[Head]:
    """Adds a head to HEADS, its rows to the partition rules, and its metrics to METRICS."""
    HEADS[cls.name] = cls()
    declare(*cls.metrics)
    add_partition_rules(cls.partition_rules)
    return cls


def heads_of(config: ModelConfig) -> list[Head]:
    """Returns the heads of a model."""
    return [head for head in HEADS.values() if head.is_in(config)]


def modules_of_heads(config: ModelConfig) -> dict[str, nn.Module]:
    """Returns the submodules of a model's heads by name, which is the first component of their parameters' paths."""
    read = config.last_stack
    return {name: module for head in heads_of(read) for name, module in head.modules(read).items()}


def head_modules(config: ModelConfig) -> set[str]:
    """Names these submodules, and those that `config.model.parts` adds for a task."""
    added = {name for part in config.parts for name in part.task_modules} if config.head is not None else set()
    return set(modules_of_heads(config)) | added


def loss_denominator(batch: Batch) -> Optional[jax.Array]:
    """Returns what the loss over tokens is divided by; None where the batch does not say which predictions count.

    It is the sum of the loss weights, unless the objective gives its own (an importance-weighted mean has the number of
    samples there).
    """
    if not has_loss(batch):
        return None
    return batch["denominator" if "denominator" in batch else "loss_weights"].sum()


def rows_with_text(batch: Batch) -> jax.Array:
    """Returns 1 for each row that is not all padding, [B] float32."""
    return (batch["segment_ids"][:, 0] > 0).astype(jnp.float32)


def mean_sums(name: str, loss: jax.Array, right: jax.Array, weights: jax.Array) -> Sums:
    """Returns the sums of a loss and an accuracy over answers of any shape; `loss` is weighted already."""
    total, count = jax.lax.stop_gradient(loss.sum()), weights.sum()
    return {f"{name}_loss": (total, count), f"{name}_accuracy": (jnp.where(right, weights, 0.0).sum(), count)}
