"""Makes numbers of a config arguments of the compiled update, so that runs which differ only in them share it."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Optional

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pretrainax.config import Experiment, LayersConfig, TrainConfig, to_json
from pretrainax.optim.layers import with_layer_rates
from pretrainax.optim.optimizers import Optimizer
from pretrainax.optim.schedules import Rate
from pretrainax.sharding.param_paths import PyTree

# Fields that change neither the model nor the update: arguments of the update, data, validation and checkpoints.
_OUTSIDE = "data tokenizer objective schedule evaluate mesh phases trackers callbacks".split()
_OUTSIDE_OF = {
    "train": ("steps", "budget", "seed", "init_seed", "order_seed", "dropout_seed", "mask_seed", "log_every"),
    "checkpoint": ("every", "keep", "keep_at", "local_dir"),
}
_MIN_RATES = 64  # entries of the smallest table of learning rates


def arguments_of(optimizer: Optimizer) -> dict[str, np.float32]:
    """Returns the fields of an optimizer that its update takes as arguments, {field: value}."""
    values = {name: getattr(optimizer, name, None) for name in optimizer.arguments}
    return {name: np.float32(value) for name, value in values.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class RunNumbers:
    """The numbers that a compiled update takes as arguments: seeds, fields of the optimizer and learning rates."""

    numbers: Mapping[str, np.generic]  # seeds by use, "dropout" and "sample", and fields of the optimizer
    schedule: Rate
    steps: int  # number of updates of the run

    def arrays(self, sharding: jax.sharding.Sharding) -> dict[str, jax.Array]:
        """Returns `numbers` and "rates", the learning rates of all steps, float32 [N], as arrays on devices.

        N is a power of two, so that runs of slightly different lengths share a compiled update.
        """

        def compute_rates() -> jax.Array:
            return jax.vmap(lambda step: jnp.float32(self.schedule(step)))(jnp.arange(self._num_rates))

        rates = jax.jit(compute_rates, out_shardings=sharding)()
        return {**jax.device_put(dict(self.numbers), sharding), "rates": rates}

    def shapes(self) -> dict[str, np.generic | jax.ShapeDtypeStruct]:
        """Returns `arrays` with the shape of "rates" instead of its values, without using a device."""
        return {**self.numbers, "rates": jax.ShapeDtypeStruct((self._num_rates,), jnp.float32)}

    @property
    def _num_rates(self) -> int:
        return 1 << (max(self.steps, _MIN_RATES) - 1).bit_length()


def numbers_of(schedule: Rate, train: TrainConfig, optimizer: Optimizer) -> RunNumbers:
    """Returns the numbers of a run, or of one of its phases."""
    seeds = {"dropout": train.seed_of("dropout"), "sample": train.seed_of("mask")}  # ELECTRA's samples are masks
    numbers = {use: seed_argument(seed) for use, seed in seeds.items()} | arguments_of(optimizer)
    return RunNumbers(numbers, schedule, train.steps)


def seed_argument(seed: int) -> np.uint32:
    """Returns a seed as an argument of a compiled program, which draws the same numbers as for `seed` itself."""
    return np.uint32(seed % 2**32)


def rate_in(rates: jax.Array) -> Rate:
    """Returns the schedule whose rates [N] are in a table; after the last entry, the rate stays constant."""
    return lambda step: jax.lax.dynamic_index_in_dim(rates, step, keepdims=False)  # clamps the index


def build_optimizer(
    chosen: Optimizer, layers: LayersConfig, params: PyTree, multipliers: Optional[PyTree] = None
) -> optax.GradientTransformationExtraArgs:
    """Builds the optimizer of a config, whose numbers are an argument of its `update`.

    `update` takes `arguments`: the fields of `arguments_of` and "rates", the learning rates [N] of all steps.

    Args:
      params: arrays or shapes.
      multipliers: with config.transfer, the result of `optim.transfer.multipliers_of`.

    Raises:
      UserError: `layers` leaves no parameter to train.
    """

    def built(fields: Mapping[str, jax.Array], schedule: Rate) -> optax.GradientTransformationExtraArgs:
        optimizer = dataclasses.replace(chosen, **fields)
        transfer = () if multipliers is None else (multipliers,)  # other optimizers have no such argument
        return with_layer_rates(layers, optimizer, optimizer.build(schedule, params, *transfer), params)

    def update(
        updates: PyTree, state: PyTree, params: Optional[PyTree] = None, *, arguments: Mapping[str, jax.Array], **extra
    ):
        fields = {name: arguments[name] for name in arguments_of(chosen)}
        return built(fields, rate_in(arguments["rates"])).update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(built({}, jnp.zeros_like).init, update)


def update_key(experiment: Experiment) -> str:
    """Returns equal keys for configs whose updates are equal programs, given equal devices and shapes of batches."""
    config = {name: value for name, value in to_json(experiment).items() if name not in _OUTSIDE}
    for section, names in _OUTSIDE_OF.items():
        config[section] = {name: value for name, value in config[section].items() if name not in names}
    config["optimizer"] |= dict.fromkeys(arguments_of(experiment.optimizer), "argument")  # None is another program
    return json.dumps(config, sort_keys=True)
