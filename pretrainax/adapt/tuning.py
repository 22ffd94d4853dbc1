"""Says what every way of tuning has: which parameters it trains and adds, what a matrix computes with them."""

import copy
from collections.abc import Callable, Iterator
from typing import ClassVar, Optional

import flax.linen as nn
import jax

from pretrainax import models
from pretrainax.adapt.adapted import Adapted
from pretrainax.config import AUTO, Experiment, ModelConfig, TrainConfig, kinds
from pretrainax.data.batch import Batch
from pretrainax.layers.compute import compute_for
from pretrainax.layers.linear import Linear
from pretrainax.sharding.axes import AXES
from pretrainax.sharding.mesh import abstract_mesh
from pretrainax.sharding.param_paths import Flat, PyTree

Interceptor = Callable[[Callable, tuple, dict, nn.module.InterceptorContext], PyTree]


class Tuning(kinds.Tuning):
    """Base of the ways of tuning: all parameters of the model stay as `config.checkpoint.init_from` has them, but those
    that it trains, and what it adds beside them.

    Heads are trained too where they are drawn anew (`Experiment.draws_heads`).
    """

    is_mergeable: ClassVar[bool] = True  # into the parameters of a plain model

    def wrap(self, experiment: Experiment, train: TrainConfig, teacher: Optional[ModelConfig]) -> Adapted:
        return self.adapted(models.build(experiment.model, compute_for(train)), experiment)

    def adapted(self, model: models.AnyModel, experiment: Experiment) -> Adapted:
        """Returns a model of the experiment under this tuning."""
        return Adapted(model, self, experiment.draws_heads)

    @property
    def tokens(self) -> int:
        """Returns how many tokens are read before those of a text."""
        return 0

    def limits(self, config: ModelConfig) -> dict[str, int]:
        """Returns how many tokens of a text the model reads at most, by the field of config.model that says so."""
        most = config.position.max_length
        return {"position.max_length": most - self.tokens} if isinstance(most, int) else {}

    def trains(self, path: str, heads: set[str]) -> bool:
        """Tells whether a parameter of the model is trained; heads: the first parts of the paths of its heads'."""
        del path, heads
        return False

    def added(self, params: PyTree, key: jax.Array) -> Flat:
        """Returns the parameters beside the model's, as they start; params: of the model."""
        del params, key
        return {}

    def expanded(self, params: Flat) -> Flat:
        """Returns the parameters that the model's calls read, made of those that are trained, and frozen ones."""
        return params

    def extended(self, batch: Batch, config: ModelConfig) -> Batch:
        """Returns what the model reads in the place of a batch."""
        del config
        return batch

    def interceptor(self, batch: Batch, training: bool) -> Interceptor:
        """Returns what Flax calls around each method of each module, while the model reads a batch."""
        del batch

        def around(call, args, kwargs, context):
            if isinstance(context.module, Linear) and context.method_name == "__call__":
                return self.around(context.module, call, *args, training=training)
            return call(*args, **kwargs)

        return around

    def around(self, linear: Linear, call: Callable[[jax.Array], jax.Array], x: jax.Array, training: bool) -> jax.Array:
        """Returns what a linear map of the model gives for x, with what is added beside its kernel.

        Args:
          linear: bound, in its scope.
          call: what the map does without tuning.
        """
        del linear, training
        return call(x)

    def merged(self, params: Flat) -> Flat:
        """Returns the parameters of a plain model that computes the same; params: of the model, and those added."""
        return params

    def problems(self, experiment: Experiment) -> Iterator[str]:
        if not experiment.checkpoint.init_from:
            yield (
                f"config.tuning is {self}, which trains a few parameters of a model that is there: set "
                "config.checkpoint.init_from to the --workdir of a run, a Hugging Face directory or hf:org/name"
            )
        yield from self.length_problems(experiment)

    def length_problems(self, experiment: Experiment) -> Iterator[str]:
        """Yields where rows are longer than what the model reads behind the tokens of the tuning."""
        length, objective = experiment.data.sequence_length, experiment.objective
        if not self.tokens or list(objective.field_problems()) or length < objective.shortest:
            return  # there are no lengths to compare
        row = objective.adapted(experiment).places(length)
        for field, most in self.limits(experiment.model).items():
            if row > most:
                lower = f"config.data.sequence_length to at most {most}" if most > 0 else "a lower config.tuning.length"
                yield (
                    f"config.data.sequence_length {length} makes rows of {row} tokens, and behind the {self.tokens} of "
                    f"config.tuning {self} config.model.{field} has room for {max(most, 0)}: set {lower}"
                )


def abstract_params(config: ModelConfig) -> PyTree:
    """Returns the shapes of a model's parameters, also before the text is prepared; the vocabulary is then made up."""
    config = copy.deepcopy(config)
    if config.vocab_size == AUTO:
        config.vocab_size = 2
    if config.position.max_length == AUTO:
        config.position.max_length = 2
    # Without a mesh, the trace would ask which devices there are, before the processes of a run have joined.
    with jax.sharding.use_abstract_mesh(abstract_mesh(dict.fromkeys(AXES, 1), "cpu")):
        return models.abstract_params(config)


def beside(vector: jax.Array, y: jax.Array) -> jax.Array:
    """Returns a vector over the last axes of y in y's rank and dtype."""
    return vector.astype(y.dtype).reshape((1,) * (y.ndim - vector.ndim) + vector.shape)
