"""Starts a model from some of the layers of a deeper one: every second, say (Sanh et al. 2019, section 3)."""

import copy
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pretrainax.checkpoints.params import Params
from pretrainax.config import InitLayers, ModelConfig, UserError
from pretrainax.interop.origin import Origin
from pretrainax.interop.start import model_at
from pretrainax.sharding.param_paths import PyTree, parameter_names, stack_of


class Picked(NamedTuple):
    """Says which layers of a start a model takes."""

    model: ModelConfig  # the same, with as many layers as the start has
    layers: dict[str, list[int]]  # of each stack, from 0; {}: all, in their order

    @property
    def description(self) -> str:
        """Returns the layers for people; "" where all are taken."""
        return "; ".join(
            f"layers {', '.join(map(str, kept))} of the {self.model.stacks[name]} of the {name}"
            for name, kept in self.layers.items()
        )

    def take(self, params: Params, shardings: PyTree) -> Params:
        """Returns the parameters of the model that is started, from those of the start."""
        if not self.layers:
            return params

        def taken(params: Params) -> Params:
            stacks = (stack_of(path) for path in parameter_names(params))
            kept = [stack and jnp.array(self.layers[stack.removesuffix("/blocks")]) for stack in stacks]
            leaves = zip(jax.tree.leaves(params), kept, strict=True)
            return jax.tree.unflatten(jax.tree.structure(params), [x if i is None else x[i] for x, i in leaves])

        return jax.jit(taken, out_shardings=shardings)(params)


def picked(origin: Origin, model: ModelConfig, layers: InitLayers) -> Picked:
    """Returns which layers of a start a model takes, as `config.checkpoint.init_layers` says.

    Raises:
      UserError: the start has no such layers, or not as many for each of the model's.
    """
    theirs = model_at(origin)
    if not layers or theirs.family != model.family:  # of which `fit_of` says more
        return Picked(model, {})
    deeper = dataclasses.replace(
        copy.deepcopy(model), num_layers=theirs.num_layers, num_decoder_layers=theirs.num_decoder_layers
    )
    kept = {name: _kept(layers, count, deeper.stacks[name], origin) for name, count in model.stacks.items()}
    return Picked(deeper, kept)


def _kept(layers: InitLayers, ours: int, theirs: int, origin: Origin) -> list[int]:
    if layers == "evenly":
        if theirs % ours:
            raise UserError(
                f"config.checkpoint.init_layers is 'evenly', and {ours} layers of config.model do not divide the "
                f"{theirs} of {origin.description}: set config.model.num_layers to a divisor, or give their numbers"
            )
        return list(range(0, theirs, theirs // ours))
    if len(layers) != ours or not all(0 <= layer < theirs for layer in layers):
        raise UserError(
            f"config.checkpoint.init_layers is {layers}: it must be {ours} numbers from 0 to {theirs - 1}, one for "
            f"each layer of config.model, of the {theirs} layers of {origin.description}"
        )
    return list(layers)
