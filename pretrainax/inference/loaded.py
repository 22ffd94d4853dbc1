"""A model that is ready to be asked: its config, parameters and tokenizer, on a mesh."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import numpy as np

from pretrainax.config import Experiment
from pretrainax.data.batch import Batch
from pretrainax.models import AnyModel, Outputs
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.param_paths import PyTree
from pretrainax.tokenization.base import Tokenizer


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """Holds what every use of a model needs. `load` makes it of a directory, and a run of what it has trained."""

    experiment: Experiment  # the run's, or what an import says; its `model` has numbers where a config had "auto"
    model: AnyModel  # of a run of ELECTRA its two encoders
    params: PyTree  # float32, in their shards
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    origin: str  # where from, for people: "runs/mine, step 2,000"

    def __call__(self, batch: Mapping[str, np.ndarray]) -> Outputs:
        """Returns what the heads say of a batch as data/batch.py describes it, without dropout.

        Compiled once for each set of shapes. Of the output of a head, `.logits()` is [B, N, V] float32.
        """
        return self.ask(_everything, batch)

    def ask(self, question: Callable[[Outputs, Batch], PyTree], batch: Mapping[str, np.ndarray]) -> PyTree:
        """Returns what a function makes of the outputs for a batch, and of the batch: arrays that are all that is kept.

        question: a function at the top of a file; compiled with the model once for each set of shapes.
        """
        with jax.set_mesh(self.mesh):
            return self._asking(question)(self.params, put_batch(batch, self.mesh))

    @functools.cached_property
    def _asking(self) -> Callable[[Callable[[Outputs, Batch], PyTree]], Callable[[PyTree, Batch], PyTree]]:
        @functools.cache
        def asking(question):
            def answer(params, batch):
                return question(self.model.apply({"params": params}, dict(batch), deterministic=True), batch)

            return jax.jit(answer)

        return asking


def _everything(outputs: Outputs, batch: Batch) -> Outputs:
    return outputs
