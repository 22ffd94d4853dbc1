"""A model that is ready to be asked: its config, parameters and tokenizer, on a mesh."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Self, cast

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pretrainax.config import Experiment
from pretrainax.data.batch import Batch
from pretrainax.models import AnyModel, Outputs
from pretrainax.models.outputs import hidden_states
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.axes import BATCH_AXES
from pretrainax.sharding.mesh import axis_size
from pretrainax.sharding.param_paths import PyTree
from pretrainax.tokenization.base import Tokenizer


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """Holds what every use of a model needs. `load` makes it of a directory, and a run of what it has trained."""

    experiment: Experiment  # the run's, or what an import says; its `model` has numbers where a config had "auto"
    model: AnyModel  # of a run of ELECTRA its two encoders; `load` parts them
    params: PyTree  # float32, in their shards
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    origin: str  # where from, for people: "runs/mine, step 2,000"

    def __call__(self, batch: Mapping[str, np.ndarray], hidden: bool = False) -> Outputs:
        """Returns what the heads say of a batch as data/batch.py describes it, without dropout.

        Compiled once for each set of shapes. `.logits` are [B, N, V] float32; `.hidden` are the states after each block
        of each stack, [L, B, T, D], where `hidden` asks for them.
        """
        with jax.set_mesh(self.mesh):
            return self._apply(self.params, self._put(batch), hidden)

    def ask(self, question: Callable[[Outputs, Batch], PyTree], batch: Mapping[str, np.ndarray]) -> PyTree:
        """Returns what a function makes of the outputs for a batch, and of the batch: only that is kept of them.

        question: a function at the top of a file, compiled with the model once for each set of shapes.
        """
        with jax.set_mesh(self.mesh):
            return self._asking(question)(self.params, self._put(batch))

    def compiled_as(self, other: Self) -> Self:
        """Returns this model, that of another checkpoint of one run, after it has taken what `other` has compiled."""
        self.__dict__["_asking"] = other._asking
        return self

    def _put(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Spreads the rows over the mesh; a number that it does not divide is whole on each device."""
        if len(batch["tokens"]) % axis_size(BATCH_AXES):
            return jax.device_put(dict(batch), NamedSharding(self.mesh, PartitionSpec()))
        return put_batch(batch, self.mesh)

    @functools.cached_property
    def _apply(self) -> Callable[[PyTree, Mapping[str, jax.Array], bool], Outputs]:
        def say(params: PyTree, batch: Mapping[str, jax.Array], hidden: bool) -> Outputs:
            if not hidden:
                return self.model.apply({"params": params}, dict(batch), deterministic=True)
            stacks = cast(nn.Module, self.model)  # and no `Electra`, whose two encoders each have their own
            outputs, kept = stacks.apply({"params": params}, dict(batch), deterministic=True, mutable=["intermediates"])
            return outputs.replace(hidden=hidden_states(kept["intermediates"]))

        return jax.jit(say, static_argnums=2)

    @functools.cached_property
    def _asking(self) -> Callable[[Callable[[Outputs, Batch], PyTree]], Callable[[PyTree, Batch], PyTree]]:
        @functools.cache
        def asking(question):
            def answer(params, batch):
                return question(self.model.apply({"params": params}, dict(batch), deterministic=True), batch)

            return jax.jit(answer)

        return asking
