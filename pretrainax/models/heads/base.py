"""Defines the base class of heads, which compute an output and a loss from the last hidden states of a model."""

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
    """Base class of heads: the models that have the head, the head's Flax modules, its output, loss and metrics."""

    name: ClassVar[str]  # key of the output in Outputs.heads
    loss_name: ClassVar[str]  # name of the loss metric; "label_loss" for the head of a task
    partition_rules: ClassVar[tuple[tuple[str, str], ...]] = ()  # rows for sharding.rules.PARTITION_RULES
    metrics: ClassVar[tuple[Metric, ...]] = ()  # metrics computed from the sums

    def is_in(self, config: ModelConfig) -> bool:
        """Returns True if the model of this config has the head."""
        raise NotImplementedError

    def modules(self, config: ModelConfig) -> dict[str, nn.Module]:
        """Returns the Flax submodules that the head adds to the model, by name."""
        raise NotImplementedError

    def output(self, model: nn.Module, x: jax.Array, batch: Batch, *, deterministic: bool) -> PyTree:
        """Returns the output of the head, a pytree.

        Args:
          model: the model that calls this method. The submodules of the head are attributes of the model.
          x: the last hidden states, [B, T, D].
          deterministic: disables dropout.
        """
        raise NotImplementedError

    def predictions(self, output: PyTree, batch: Batch) -> PyTree:
        """Returns the arrays [B, …] from which a task computes its metrics on the host; by default the whole output."""
        return output

    def block_sums(self, output: PyTree) -> Sums:
        """Returns the sums {name: (sum, count)} of the head's own blocks; {} for a head without blocks."""
        return {}

    def count(self, batch: Batch) -> Optional[jax.Array]:
        """Returns the denominator of the head's loss: the number of predictions in a batch, or their total weight.

        None means that the batch has no labels for this head.
        """
        raise NotImplementedError

    def check(self, output: Optional[PyTree], batch: Batch) -> None:
        """Raises UserError if the model has the head (else `output` is None) but the batch no labels, or vice versa."""

    def sums(self, output: PyTree, batch: Batch, **options: Unpack[LossOptions]) -> tuple[jax.Array, Sums]:
        """Returns the loss to minimize, summed over the predictions of a batch, and {metric: (sum, count)}.

        The caller divides the loss by the `count` of the global batch.

        Args:
          options: options of the vocabulary loss, see `vocabulary_loss.LossOptions`.
        """
        raise NotImplementedError

    def flops(self, config: ModelConfig, inputs: int, targets: int) -> int:
        """Returns the FLOPs of the head's forward pass on one example; negligible operations are not counted.

        Args:
          inputs, targets: tokens per example, as in `models.flops.flops_per_step`.
        """
        return 0


HEADS: dict[str, Head] = {}


def register_head(cls: type[Head]) -> type[Head]:
    """Adds a head to HEADS, its partition rules to PARTITION_RULES and its metrics to METRICS; a class decorator."""
    HEADS[cls.name] = cls()
    declare(*cls.metrics)
    add_partition_rules(cls.partition_rules)
    return cls


def heads_of(config: ModelConfig) -> list[Head]:
    """Returns the heads of a config's model, in the order of HEADS."""
    return [head for head in HEADS.values() if head.is_in(config)]


def modules_of_heads(config: ModelConfig) -> dict[str, nn.Module]:
    """Returns the Flax submodules of a model's heads, by name; their parameter paths start with this name."""
    read = config.last_stack
    return {name: module for head in heads_of(read) for name, module in head.modules(read).items()}


def head_modules(config: ModelConfig) -> set[str]:
    """Returns the names of the submodules of a model's heads.

    For the head of a task, they include the `task_modules` of `config.model.parts`.
    """
    added = {name for part in config.parts for name in part.task_modules} if config.head is not None else set()
    return set(modules_of_heads(config)) | added


def loss_denominator(batch: Batch) -> Optional[jax.Array]:
    """Returns the denominator of the token loss; None if the batch has no loss weights.

    The denominator is the sum of the array "denominator" if the batch has this array, else the sum of the loss weights.
    An importance-weighted mean has such an array, because it is divided by the number of samples.
    """
    if not has_loss(batch):
        return None
    return batch["denominator" if "denominator" in batch else "loss_weights"].sum()


def non_empty_rows(batch: Batch) -> jax.Array:
    """Returns 1 for each row that has a token, and 0 for a row that is only padding, [B] float32."""
    return (batch["segment_ids"][:, 0] > 0).astype(jnp.float32)


def mean_sums(name: str, loss: jax.Array, right: jax.Array, weights: jax.Array) -> Sums:
    """Returns {"NAME_loss": (sum, count), "NAME_accuracy": (sum, count)} over predictions.

    Args:
      name: the prefix NAME of both metrics.
      loss: the loss of each prediction, already multiplied by its weight.
      right: bool, True for correct predictions.
      weights: the weight of each prediction. All three arrays have the same shape.
    """
    total, count = jax.lax.stop_gradient(loss.sum()), weights.sum()
    return {f"{name}_loss": (total, count), f"{name}_accuracy": (jnp.where(right, weights, 0.0).sum(), count)}
