"""Defines the base class of heads. A head computes an output and a loss from the last hidden states of a model."""

from typing import ClassVar, NamedTuple, Optional, Unpack

import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.config.metric import Metric, declare
from pretrainax.data.batch import Batch, has_loss
from pretrainax.layers.sums import Sums
from pretrainax.models.heads.vocabulary_loss import PER_TARGET, LossOptions
from pretrainax.sharding.param_paths import PyTree
from pretrainax.sharding.rules import add_partition_rules

MAX_ANSWERS = 1024  # predictions of a batch whose spread is measured


class Answers(NamedTuple):
    """Predictions of a batch and their targets, for measuring their spread (`models.spread`)."""

    predictions: jax.Array  # [n, …] int32, the most probable prediction
    targets: jax.Array  # the same shape
    is_asked: jax.Array  # [n] bool, False for padding


class Head:
    """Base class of heads. Defines which models have the head, and its Flax modules, output, loss and metrics."""

    name: ClassVar[str]  # key of the output in Outputs.heads
    loss_name: ClassVar[str]  # name of the loss metric; "label_loss" for the head of a task
    partition_rules: ClassVar[tuple[tuple[str, str], ...]] = ()  # added to sharding.rules.PARTITION_RULES
    metrics: ClassVar[tuple[Metric, ...]] = ()  # metrics computed from the sums

    def is_in(self, config: ModelConfig) -> bool:
        """Checks whether the model of this config has the head."""
        raise NotImplementedError

    def modules(self, config: ModelConfig) -> dict[str, nn.Module]:
        """Builds the Flax submodules that the head adds to the model, by name."""
        raise NotImplementedError

    def output(self, model: nn.Module, x: jax.Array, batch: Batch, *, deterministic: bool) -> PyTree:
        """Computes the output of the head, a pytree.

        Args:
          model: the model that calls this method. The submodules of the head are attributes of the model.
          x: the last hidden states, [B, T, D].
          deterministic: disables dropout.
        """
        raise NotImplementedError

    def predictions(self, output: PyTree, batch: Batch) -> PyTree:
        """Returns the arrays [B, …] from which a task computes metrics on the host; by default, the complete output."""
        return output

    def answers(self, output: PyTree, batch: Batch) -> Optional[Answers]:
        """Returns about MAX_ANSWERS predictions of a batch, or None if their spread has no meaning.

        Called only if `count` is not None.
        """
        return None

    def block_sums(self, output: PyTree) -> Sums:
        """Returns the metric sums {name: (sum, count)} of the head's own blocks, or {} if it has no blocks."""
        return {}

    def count(self, batch: Batch) -> Optional[jax.Array]:
        """Computes the denominator of the head's loss: the number of predictions in a batch, or their total weight.

        Returns None if the batch has no labels for this head.
        """
        raise NotImplementedError

    def check(self, output: Optional[PyTree], batch: Batch) -> None:
        """Checks that the batch has labels for this head if and only if the model has the head.

        Args:
          output: the output of the head; None if the model does not have the head.

        Raises:
          UserError: the batch has no labels for a head of the model, or labels for a head that the model lacks.
        """

    def sums(self, output: PyTree, batch: Batch, **options: Unpack[LossOptions]) -> tuple[jax.Array, Sums]:
        """Computes the loss to minimize, summed over the predictions of a batch, and {metric: (sum, count)}.

        The caller divides the loss by the `count` of the global batch.

        Args:
          options: options of the vocabulary loss, see `vocabulary_loss.LossOptions`. With `per_target`, a head may add
            the values and the weights of single predictions, [B, …] each, under names that begin with PER_TARGET.
        """
        raise NotImplementedError

    def flops(self, config: ModelConfig, inputs: int, targets: int) -> int:
        """Computes the forward FLOPs of the head for one example, ignoring negligible operations.

        Args:
          inputs, targets: tokens per example, as in `models.flops.flops_per_step`.
        """
        return 0


HEADS: dict[str, Head] = {}


def register_head(cls: type[Head]) -> type[Head]:
    """Registers a head with its partition rules and metrics, as a class decorator."""
    HEADS[cls.name] = cls()
    declare(*cls.metrics)
    add_partition_rules(cls.partition_rules)
    return cls


def heads_of(config: ModelConfig) -> list[Head]:
    """Returns the heads of a config's model, in the order of HEADS."""
    return [head for head in HEADS.values() if head.is_in(config)]


def modules_of_heads(config: ModelConfig) -> dict[str, nn.Module]:
    """Builds the Flax submodules of a model's heads, by name.

    The name is the first component of the paths of a submodule's parameters.
    """
    stack = config.last_stack
    return {name: module for head in heads_of(stack) for name, module in head.modules(stack).items()}


def head_modules(config: ModelConfig) -> set[str]:
    """Returns the names of the submodules of a model's heads.

    If the model has a task head, the names include the `task_modules` of `config.model.parts`.
    """
    task_modules = {name for part in config.parts for name in part.task_modules} if config.head is not None else set()
    return set(modules_of_heads(config)) | task_modules


def loss_denominator(batch: Batch) -> Optional[jax.Array]:
    """Computes the denominator of the token loss; returns None if the batch has no loss weights.

    The denominator is the sum of the batch's "denominator" array if it has one, otherwise the sum of its loss weights.
    Batches with importance weights have this array, because their loss is divided by the number of samples.
    """
    if not has_loss(batch):
        return None
    return batch["denominator" if "denominator" in batch else "loss_weights"].sum()


def sampled(x: jax.Array) -> jax.Array:
    """Selects every k-th column of x [B, N, …], so that about MAX_ANSWERS items, or one per row, remain."""
    return x[:, :: max(1, x.shape[0] * x.shape[1] // MAX_ANSWERS)]


def flat_answers(predictions: jax.Array, targets: jax.Array, is_asked: jax.Array) -> Answers:
    """Builds the `Answers` from arrays [B, N], which the caller has `sampled`."""
    return Answers(*(x.reshape(-1) for x in (predictions, targets, is_asked)))


def non_empty_rows(batch: Batch) -> jax.Array:
    """Computes a row mask [B] float32, which is 1 for rows with tokens and 0 for rows that are only padding."""
    return (batch["segment_ids"][:, 0] > 0).astype(jnp.float32)


def per_target_sums(name: str, loss: jax.Array, right: jax.Array, weights: jax.Array) -> Sums:
    """Returns the values and weights of single predictions, not summed, with the arguments of `mean_sums`."""
    return {
        f"{PER_TARGET}{name}_loss": (jax.lax.stop_gradient(loss), weights),
        f"{PER_TARGET}{name}_accuracy": (right.astype(jnp.float32), weights),
    }


def mean_sums(name: str, loss: jax.Array, right: jax.Array, weights: jax.Array) -> Sums:
    """Computes {"NAME_loss": (sum, count), "NAME_accuracy": (sum, count)} over the predictions of a batch.

    Args:
      name: the prefix NAME of both metrics.
      loss: the loss of each prediction, already multiplied by its weight.
      right: bool, True for correct predictions.
      weights: the weight of each prediction. All three arrays have the same shape.
    """
    total, count = jax.lax.stop_gradient(loss.sum()), weights.sum()
    return {f"{name}_loss": (total, count), f"{name}_accuracy": (jnp.where(right, weights, 0.0).sum(), count)}
