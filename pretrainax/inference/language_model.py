"""The face of a loaded model in Python: `LanguageModel`, which `pretrainax.load` returns."""

import dataclasses
from typing import Optional

import jax

from pretrainax.config import ModelConfig
from pretrainax.inference.loaded import LoadedModel
from pretrainax.sharding.param_paths import parameter_names


@dataclasses.dataclass(frozen=True)
class LanguageModel(LoadedModel):
    """Answers what a user asks of a trained model. docs/use.md shows each method.

    `model(batch)` gives the logits of a batch as data/batch.py describes it, which `encode` makes of texts.
    """

    generator: Optional["LanguageModel"] = None  # of ELECTRA: the masked LM beside this discriminator

    @property
    def config(self) -> ModelConfig:
        """The sizes and the architecture. `experiment` is all of the run's config.json."""
        return self.experiment.model

    @property
    def parameters(self) -> dict[str, jax.Array]:
        """All parameters by their paths, float32, as they lie on the mesh."""
        return dict(zip(parameter_names(self.params), jax.tree.leaves(self.params), strict=True))
