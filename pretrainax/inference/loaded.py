"""A model that is ready to be asked: its config, parameters and tokenizer, on a mesh."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import numpy as np

from pretrainax.config import Experiment
from pretrainax.models import AnyModel, Outputs
from pretrainax.sharding.arrays import put_batch
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

    def __call__(self, batch: Mapping[str, np.ndarray]) -> Outputs:
        """Returns what the heads say of a batch as data/batch.py describes it, without dropout.

        Compiled once for each set of shapes. Of the output of a head, `.logits()` is [B, N, V] float32.
        """
        with jax.set_mesh(self.mesh):
            return self._apply(self.params, put_batch(batch, self.mesh))

    @functools.cached_property
    def _apply(self) -> Callable[[PyTree, Mapping[str, jax.Array]], Outputs]:
        return jax.jit(lambda params, batch: self.model.apply({"params": params}, dict(batch), deterministic=True))
