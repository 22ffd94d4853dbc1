"""A model under tuning: the same calls, with what is trained and what is frozen as two trees.

No model knows of it. Flax calls `Tuning.around` in the place of each `Linear`, in whose scope the parameters lie that
were added: so a scan over layers splits them as it splits the kernel, and they are there under rematerialisation too.
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

if TYPE_CHECKING:  # which makes these models
    from pretrainax.adapt.tuning import Tuning
    from pretrainax.training.run import Run

FROZEN = "frozen"  # the collection of the parameters that no update changes


@dataclasses.dataclass(frozen=True)
class Adapted(Wrapped):
    """Used like the model that it is of. Of "params" and "frozen", the second need not be there: `params` of both."""

    model: AnyModel
    tuning: "Tuning"
    train_heads: bool  # beside what the tuning trains

    @property
    def plain(self) -> AnyModel:
        return self.model

    def init(self, rngs: PyTree, batch: Batch, *, deterministic: bool) -> dict[str, PyTree]:
        """Returns {"params": what is trained, "frozen": what is not}, of a model that is drawn anew."""
        key = rngs["params"]
        params = self.model.init(rngs, batch, deterministic=deterministic)["params"]
        return {"params": self.start(params, key), **self.frozen(params)}

    def start(self, params: PyTree, key: jax.Array) -> PyTree:
        kept = {path: x for path, x in flat(params).items() if self._trains(path)}
        return nested(kept | self.tuning.added(params, key))

    def frozen(self, params: PyTree) -> dict[str, PyTree]:
        return {FROZEN: nested({path: x for path, x in flat(params).items() if not self._trains(path)})}

    def merged(self, params: PyTree, frozen: Frozen) -> tuple[AnyModel, PyTree]:
        """Returns the plain model and the parameters that compute the same; this one where no plain model does, or the
        frozen parameters are not known."""
        if frozen is None:
            return self, params
        whole = nested(self.tuning.merged(_joined(params, frozen[FROZEN])))
        return self.model if self.tuning.is_mergeable else self, whole

    def counted(self, params: PyTree, frozen: Frozen) -> PyTree:
        return params, frozen

    def describe(self, run: "Run") -> Iterator[tuple[str, str]]:
        trained, share = run.trained_parameters, run.trained_parameters / run.parameters
        yield "tuning", f"{self.tuning}: {trained:,} parameters are trained, {share:.2%} of all"

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
