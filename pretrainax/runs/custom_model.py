"""Adds a user's own model, or an additional loss, to a run."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Optional

import jax
import jax.numpy as jnp

from pretrainax.config import Experiment, ModelConfig, TrainConfig, UserError
from pretrainax.data.batch import Batch
from pretrainax.distill import Distillation
from pretrainax.interop.run_start import TrainedStart
from pretrainax.layers.compute import Compute, compute_for
from pretrainax.models import AnyModel, Outputs
from pretrainax.models.heads import HEADS
from pretrainax.sharding.param_paths import PyTree
from pretrainax.training.wrapped import Frozen, Wrapped, merged, model_params, plain, teacher_config

# (outputs of the model, batch) -> {name: (sum, count)}, scalars of the batch. Each name ends in "_loss". The value
# sum / count is added to the objective and logged as a metric of that name. With `config.train.accumulate`, the weight
# of a microbatch is its fraction of the predictions.
ExtraLoss = Callable[[Outputs, Batch], Mapping[str, tuple[jax.Array, jax.Array]]]
# The names of the losses that heads report. An extra loss with one of these names would replace the head's loss.
_TAKEN = {"z_loss", *(name for head in HEADS.values() for name in (head.loss_name, *(m.name for m in head.metrics)))}
# (config.model, compute) -> a Linen module with the fields `config` and `compute`, and
# `__call__(batch, *, deterministic: bool) -> pretrainax.models.Outputs`. Requirements: docs/how-to/own-code.md.
BuildModel = Callable[[ModelConfig, Compute], AnyModel]


@dataclasses.dataclass(frozen=True)
class WithLoss(Wrapped):
    """Wraps a model and adds the extra loss's sums to `sums` in the model's outputs."""

    model: AnyModel
    extra_loss: ExtraLoss

    @property
    def plain(self) -> AnyModel:
        return plain(self.model)

    @property
    def teacher_config(self) -> Optional[ModelConfig]:
        return teacher_config(self.model)

    def init(self, rngs: PyTree, batch: Batch, *, deterministic: bool) -> dict[str, PyTree]:
        return self.model.init(rngs, batch, deterministic=deterministic)

    def start(self, params: PyTree, key: jax.Array) -> PyTree:
        return self.model.start(params, key) if isinstance(self.model, Wrapped) else params

    def frozen(self, params: PyTree) -> Frozen:
        return self.model.frozen(params) if isinstance(self.model, Wrapped) else None

    def merged(self, params: PyTree, frozen: Frozen) -> tuple[AnyModel, PyTree]:
        return merged(self.model, params, frozen)

    def model_params(self, params: PyTree, frozen: Frozen) -> PyTree:
        return model_params(self.model, params, frozen)

    def describe(self, run) -> Iterator[tuple[str, str]]:
        if isinstance(self.model, Wrapped):
            yield from self.model.describe(run)
        yield "extra loss", getattr(self.extra_loss, "__name__", type(self.extra_loss).__name__)

    def apply(
        self,
        variables: dict[str, PyTree],
        batch: Batch,
        *,
        deterministic: bool,
        rngs: Optional[dict[str, jax.Array]] = None,
    ) -> Outputs:
        outputs = self.model.apply(variables, batch, deterministic=deterministic, rngs=rngs)
        extra_sums = self.extra_loss(outputs, batch)
        _check_sums(extra_sums, {*_TAKEN, *outputs.sums})
        return dataclasses.replace(outputs, sums={**outputs.sums, **extra_sums})


def _check_sums(extra_sums: object, taken: Collection[str]) -> None:
    """Raises UserError if the result of an extra loss is not {name: (sum, count)}; `taken` are names of the model."""
    if not isinstance(extra_sums, Mapping):
        raise UserError("extra_loss returns no dict, it must return {name: (sum, count)} of scalars")
    for name, pair in extra_sums.items():
        if not name.endswith("_loss") or name in taken:
            raise UserError(f"extra_loss returns {name!r}: names must end in '_loss' and be no metric of the model")
        shapes = [jnp.shape(x) for x in pair] if isinstance(pair, (tuple, list)) else None
        if shapes != [(), ()]:
            found = f"values of shapes {shapes}" if shapes else "one value"
            raise UserError(f"extra_loss returns {name!r}: {found}, it must be (sum, count), two scalars")


class CustomStart(TrainedStart):
    """Builds and initializes a run's model as `TrainedStart` does, but with a custom model or an extra loss."""

    def __init__(self, extra_loss: Optional[ExtraLoss] = None, build: Optional[BuildModel] = None):
        self._extra_loss, self._build = extra_loss, build

    def model(self, experiment: Experiment, train: TrainConfig) -> AnyModel:
        if self._build is None:
            model = super().model(experiment, train)
        else:
            model = self._build(experiment.model, compute_for(train))
        return model if self._extra_loss is None else WithLoss(model, self._extra_loss)


def check_custom(experiment: Experiment, extra_loss: Optional[ExtraLoss], build: Optional[BuildModel]) -> None:
    """Raises UserError if the config is incompatible with the extra loss or the custom model."""
    if build is not None and experiment.wrapper is not None:
        raise UserError("config.tuning and config.distill require a model of this package: set them to None")
    if extra_loss is not None and isinstance(experiment.distill, Distillation) and not experiment.distill.hard:
        raise UserError(
            "config.distill.hard is 0.0, which is also the weight of extra_loss, so that it would have no effect: set "
            "it above 0"
        )
    if extra_loss is not None and experiment.mesh.pipeline != 1 and experiment.train.pipeline_schedule == "1f1b":
        raise UserError(
            "extra_loss needs the outputs of whole batches, but config.train.pipeline_schedule is '1f1b': set it to "
            "'gpipe'"
        )
