"""A model under tuning: the same calls, with what is trained and what is frozen as two trees.

No model knows of it. Flax calls `Tuning.around` in the place of each `Linear`, in whose scope the parameters lie that
were added: so a scan over layers splits them as it splits the kernel, and they are there under rematerialisation too.
"""

import dataclasses
from typing import Optional, cast

import flax.linen as nn
import jax

from pretrainax.adapt.tuning import Flat, Tuning, flat, nested
from pretrainax.config import Experiment, ModelConfig
from pretrainax.data.batch import Batch
from pretrainax.layers.compute import Compute
from pretrainax.models import AnyModel, Outputs
from pretrainax.models.heads.base import head_modules
from pretrainax.sharding.param_paths import PyTree

FROZEN = "frozen"  # the collection of the parameters that no update changes


@dataclasses.dataclass(frozen=True)
class Adapted:
    """Used like the model that it is of. Of "params" and "frozen", the second need not be there: `params` of both."""

    model: AnyModel
    tuning: Tuning
    train_heads: bool  # beside what the tuning trains

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def compute(self) -> Compute:
        return self.model.compute

    def init(self, rngs: PyTree, batch: Batch, *, deterministic: bool) -> dict[str, PyTree]:
        """Returns {"params": what is trained, "frozen": what is not}, of a model that is drawn anew."""
        key = rngs["params"]
        params = self.model.init(rngs, batch, deterministic=deterministic)["params"]
        return {"params": self.start(params, key), FROZEN: self.frozen(params)}

    def start(self, params: PyTree, key: jax.Array) -> PyTree:
        """Returns the parameters that are trained as they start, from those of the model."""
        kept = {path: x for path, x in flat(params).items() if self._trains(path)}
        return nested(kept | self.tuning.added(params, key))

    def frozen(self, params: PyTree) -> PyTree:
        """Returns the parameters of the model that are not trained; arrays, or shapes."""
        return nested({path: x for path, x in flat(params).items() if not self._trains(path)})

    def merged(self, params: PyTree, frozen: PyTree) -> tuple[AnyModel, PyTree]:
        """Returns the plain model and the parameters that compute the same; this one where no plain model does."""
        return self.model if self.tuning.is_mergeable else self, nested(self.tuning.merged(_joined(params, frozen)))

    def apply(
        self,
        variables: dict[str, PyTree],
        batch: Batch,
        *,
        deterministic: bool,
        rngs: Optional[dict[str, jax.Array]] = None,
    ) -> Outputs:
        params = nested(self.tuning.expanded(_joined(variables["params"], variables.get(FROZEN, {}))))
        with nn.intercept_methods(self.tuning.interceptor(batch, training=not deterministic)):
            longer = self.tuning.extended(batch, self.config)
            return self.model.apply({"params": params}, longer, deterministic=deterministic, rngs=rngs)

    def _trains(self, path: str) -> bool:
        heads = head_modules(self.config)
        return self.tuning.trains(path, heads) or (self.train_heads and path.partition("/")[0] in heads)


def _joined(params: PyTree, frozen: PyTree) -> Flat:
    return flat(params) | flat(frozen)


def adapted(model: AnyModel, experiment: Experiment) -> AnyModel:
    """Returns the model of a run as it is trained: under `config.tuning`, where that is set."""
    if experiment.tuning is None:
        return model
    return Adapted(model, cast(Tuning, experiment.tuning), experiment.draws_heads)


def plain(model: AnyModel) -> AnyModel:
    """Returns the model without its tuning."""
    return model.model if isinstance(model, Adapted) else model
