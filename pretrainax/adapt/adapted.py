"""A model under parameter-efficient tuning, with separate trees for trained and frozen parameters.

The model itself is unchanged. A Flax interceptor calls `Tuning.around` instead of each `Linear`. Added parameters live
in the scope of that `Linear`, so that scans over layers and rematerialization treat the added parameters like the
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
    """Wraps a model with a parameter-efficient tuning, and is used like the model.

    `apply` reads the collections "params" (trained) and "frozen"; "params" may also contain the frozen parameters.
    """

    model: AnyModel
    tuning: "Tuning"
    train_heads: bool  # also train the heads of the model

    @property
    def plain(self) -> AnyModel:
        return self.model

    def init(self, rngs: PyTree, batch: Batch, *, deterministic: bool) -> dict[str, PyTree]:
        """Returns the parameters of a newly initialised model: {"params": trained parameters, "frozen": the others}."""
        key = rngs["params"]
        params = self.model.init(rngs, batch, deterministic=deterministic)["params"]
        return {"params": self.start(params, key), **self.frozen(params)}

    def start(self, params: PyTree, key: jax.Array) -> PyTree:
        trained = {path: x for path, x in flat(params).items() if self._trains(path)}
        return nested(trained | self.tuning.added(params, key))

    def frozen(self, params: PyTree) -> dict[str, PyTree]:
        return {FROZEN: nested({path: x for path, x in flat(params).items() if not self._trains(path)})}

    def merged(self, params: PyTree, frozen: Frozen) -> tuple[AnyModel, PyTree]:
        """Returns an equivalent model without tuning, and its parameters, into which the tuning is merged.

        If no model without tuning is equivalent, or if `frozen` is None, returns this model and its parameters.
        """
        if frozen is None:
            return self, params
        whole = nested(self.tuning.merged(_joined(params, frozen[FROZEN])))
        return self.model if self.tuning.is_mergeable else self, whole

    def model_params(self, params: PyTree, frozen: Frozen) -> PyTree:
        return params, frozen

    def describe(self, run: "Run") -> Iterator[tuple[str, str]]:
        trained, share = run.trained_parameters, run.trained_parameters / run.parameters
        yield "tuning", f"{self.tuning}: trains {trained:,} parameters, {share:.2%} of all"

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
