"""A model with parameter-efficient tuning, whose trained and frozen parameters are in separate trees.

The model itself is unchanged. A Flax interceptor calls `Tuning.apply_linear` instead of each `Linear`. The added
parameters are in the scope of that `Linear`, so that scans over layers and rematerialization treat them like its
kernel.
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Optional

import flax.linen as nn
import jax

from pretrainax.data.batch import Batch
from pretrainax.models import AnyModel, Outputs
from pretrainax.models.heads.base import head_modules
from pretrainax.sharding.param_paths import Flat, PyTree, flat, nested
from pretrainax.training.wrapped import Frozen, Wrapped

if TYPE_CHECKING:  # circular: `tuning` builds `Adapted`
    from pretrainax.adapt.tuning import Tuning
    from pretrainax.training.run import Run

FROZEN = "frozen"  # name of the Flax collection of frozen parameters


@dataclasses.dataclass(frozen=True)
class Adapted(Wrapped):
    """Wraps a model with a parameter-efficient tuning method, and is used like the model.

    `apply` reads the collections "params" (trained) and "frozen". "params" may also contain the frozen parameters.
    """

    model: AnyModel
    tuning: "Tuning"
    train_heads: bool  # also train the heads of the model

    @property
    def plain(self) -> AnyModel:
        return self.model

    def init(self, rngs: PyTree, batch: Batch, *, deterministic: bool) -> dict[str, PyTree]:
        """Initializes the parameters: {"params": trained parameters, "frozen": all other parameters of the model}."""
        key = rngs["params"]
        params = self.model.init(rngs, batch, deterministic=deterministic)["params"]
        return {"params": self.start(params, key), **self.frozen(params)}

    def start(self, params: PyTree, key: jax.Array) -> PyTree:
        trained = {path: x for path, x in flat(params).items() if self._is_trained(path)}
        return nested(trained | self.tuning.added(params, key))

    def frozen(self, params: PyTree) -> dict[str, PyTree]:
        return {FROZEN: nested({path: x for path, x in flat(params).items() if not self._is_trained(path)})}

    def merged(self, params: PyTree, frozen: Frozen) -> tuple[AnyModel, PyTree]:
        """Merges the tuning into the parameters; returns an equivalent model without tuning and the merged parameters.

        If no model without tuning is equivalent, returns this model and the merged parameters. If `frozen` is None,
        returns this model and the unchanged `params`.
        """
        if frozen is None:
            return self, params
        merged_params = nested(self.tuning.merged(_merge_trees(params, frozen[FROZEN])))
        return self.model if self.tuning.is_mergeable else self, merged_params

    def model_params(self, params: PyTree, frozen: Frozen) -> PyTree:
        return params, frozen

    def describe(self, run: "Run") -> Iterator[tuple[str, str]]:
        trained, fraction = run.trained_parameters, run.trained_parameters / run.parameters
        yield "tuning", f"{self.tuning}: trains {trained:,} parameters, {fraction:.2%} of all"

    def apply(
        self,
        variables: dict[str, PyTree],
        batch: Batch,
        *,
        deterministic: bool,
        rngs: Optional[dict[str, jax.Array]] = None,
    ) -> Outputs:
        params = nested(self.tuning.expanded(_merge_trees(variables["params"], variables.get(FROZEN, {}))))
        with nn.intercept_methods(self.tuning.interceptor(batch, training=not deterministic)):
            extended_batch = self.tuning.extended(batch, self.config)
            return self.model.apply({"params": params}, extended_batch, deterministic=deterministic, rngs=rngs)

    def _is_trained(self, path: str) -> bool:
        heads = head_modules(self.config)
        return self.tuning.trains(path, heads) or (self.train_heads and path.partition("/")[0] in heads)


def _merge_trees(params: PyTree, frozen: PyTree) -> Flat:
    return flat(params) | flat(frozen)
