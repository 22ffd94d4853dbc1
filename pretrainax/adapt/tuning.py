"""The interface of parameter-efficient tuning methods, which train, add and merge parameters."""

import copy
from collections.abc import Callable, Iterator
from typing import ClassVar, Optional, cast

import flax.linen as nn
import jax

from pretrainax import models
from pretrainax.adapt.adapted import Adapted
from pretrainax.adapt.cost import cost_of
from pretrainax.adapt.matrices import add_tuning_rules
from pretrainax.config import AUTO, Experiment, ModelConfig, TrainConfig, kinds
from pretrainax.data.batch import Batch
from pretrainax.layers.compute import compute_for
from pretrainax.layers.linear import Linear
from pretrainax.models.flops import UpdateCost
from pretrainax.sharding.axes import AXES
from pretrainax.sharding.mesh import abstract_mesh
from pretrainax.sharding.param_paths import Flat, PyTree

Interceptor = Callable[[Callable, tuple, dict, nn.module.InterceptorContext], PyTree]


class Tuning(kinds.Tuning):
    """Base class of parameter-efficient tuning methods.

    Parameters from `config.checkpoint.init_from` are frozen, except those that the tuning trains. Newly initialized
    heads are also trained (`Experiment.initializes_missing_heads`).
    """

    is_mergeable: ClassVar[bool] = True  # True if an equivalent model without tuning exists

    def wrap(self, experiment: Experiment, train: TrainConfig, teacher: Optional[ModelConfig]) -> Adapted:
        return self.adapted(models.build(experiment.model, compute_for(train)), experiment)

    def adapted(self, model: models.AnyModel, experiment: Experiment) -> Adapted:
        """Wraps `model`, the model of an experiment, with this tuning."""
        add_tuning_rules()
        return Adapted(model, self, experiment.initializes_missing_heads)

    def cost(self, experiment: Experiment) -> UpdateCost:
        return cost_of(self, experiment, abstract_params(experiment.model))

    def virtual_tokens(self, config: ModelConfig) -> tuple[int, int]:
        """Returns the virtual tokens of a row, (in the encoder or only stack, in the decoder of an encoder-decoder)."""
        del config
        return 0, 0

    def merged_elements(self, params: PyTree) -> int:
        """Returns the multiply-adds that compute updated matrices in each update, whatever the number of tokens."""
        del params
        return 0

    @property
    def tokens(self) -> int:
        """Returns the number of virtual tokens (positions with trained vectors) before each document."""
        return 0

    def limits(self, config: ModelConfig) -> dict[str, int]:
        """Returns the maximum number of non-virtual tokens for each config.model field that limits the row length."""
        limit = config.position.max_length
        return {"position.max_length": limit - self.tokens} if isinstance(limit, int) else {}

    def trains(self, path: str, heads: set[str]) -> bool:
        """Checks whether the tuning trains the model's parameter at `path`.

        Args:
          path: parameter path.
          heads: first path components of the parameters of heads.
        """
        del path, heads
        return False

    def added(self, params: PyTree, key: jax.Array) -> Flat:
        """Initializes the parameters that the tuning adds to a model; returns {parameter path: array}.

        Args:
          params: the parameters of the model.
          key: random key.
        """
        del params, key
        return {}

    def expanded(self, params: Flat) -> Flat:
        """Computes the parameters that the model reads, given all trained and frozen parameters."""
        return params

    def extended(self, batch: Batch, config: ModelConfig) -> Batch:
        """Adds virtual tokens before each document of a batch; `config` is the model config."""
        del config
        return batch

    def interceptor(self, batch: Batch, training: bool) -> Interceptor:
        """Builds the Flax interceptor that applies the tuning in a forward pass over a batch."""
        del batch

        def intercept(call, args, kwargs, context):
            if isinstance(context.module, Linear) and context.method_name == "__call__":
                return self.apply_linear(context.module, call, *args, training=training)
            return call(*args, **kwargs)

        return intercept

    def apply_linear(
        self, linear: Linear, call: Callable[[jax.Array], jax.Array], x: jax.Array, training: bool
    ) -> jax.Array:
        """Computes the output of a linear layer with the added parameters.

        Args:
          linear: the bound module of the layer.
          call: computes the layer without the added parameters.
          x: the input of the layer.
          training: whether dropout applies: True in training, False in validation.
        """
        del linear, training
        return call(x)

    def merged(self, params: Flat) -> Flat:
        """Merges the tuning into the parameters of an equivalent model without tuning.

        Args:
          params: all parameters of the model, including the added parameters.
        """
        return params

    def problems(self, experiment: Experiment) -> Iterator[str]:
        if not experiment.checkpoint.init_from:
            yield (
                f"config.tuning is {self}, which needs an existing model: set "
                "config.checkpoint.init_from to the --workdir of a run, a Hugging Face directory or hf:org/name"
            )
        yield from self.length_problems(experiment)

    def length_problems(self, experiment: Experiment) -> Iterator[str]:
        """Yields an error message if rows and virtual tokens together exceed a limit of the model."""
        length, objective = experiment.data.sequence_length, experiment.objective
        if not self.tokens or list(objective.field_problems()) or length < objective.shortest:
            return  # without virtual tokens or valid lengths, there is nothing to compare
        row = objective.adapted(experiment).max_positions(length)
        for field, limit in self.limits(experiment.model).items():
            if row > limit:
                lower = (
                    f"config.data.sequence_length to at most {limit}" if limit > 0 else "a lower config.tuning.length"
                )
                yield (
                    f"config.data.sequence_length {length} makes rows of {row} tokens, but after the {self.tokens} "
                    f"tokens of config.tuning {self} config.model.{field} has room for {max(limit, 0)}: set {lower}"
                )


def abstract_params(config: ModelConfig) -> PyTree:
    """Computes the shapes of a model's parameters; a vocabulary size or maximum length of "auto" is treated as 2."""
    config = copy.deepcopy(config)
    if config.vocab_size == AUTO:
        config.vocab_size = 2
    if config.position.max_length == AUTO:
        config.position.max_length = 2
    if not jax.sharding.get_abstract_mesh().empty:  # of a run, which a smaller mesh cannot replace
        return models.abstract_params(config)
    # Without a mesh, tracing would query the devices before the processes of a run have connected.
    with jax.sharding.use_abstract_mesh(abstract_mesh(dict.fromkeys(AXES, 1), "cpu")):
        return models.abstract_params(config)


def broadcast_to_rows(vector: jax.Array, y: jax.Array) -> jax.Array:
    """Reshapes `vector`, whose axes are the last axes of y, so that it broadcasts with y; casts it to y's dtype."""
    return vector.astype(y.dtype).reshape((1,) * (y.ndim - vector.ndim) + vector.shape)


def has_plain_model(experiment: Experiment) -> bool:
    """Checks whether a model without `config.tuning` computes the same function as the trained model."""
    return experiment.tuning is None or cast(Tuning, experiment.tuning).is_mergeable
