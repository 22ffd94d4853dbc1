"""The parts of a run, put together from its config: what training, evaluation and the benchmarks share."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Optional

import jax
import numpy as np

from pretrainax import flops, models, sharding, train_step
from pretrainax.config import Experiment
from pretrainax.data.objectives import Lengths
from pretrainax.data.pipeline import Batches
from pretrainax.evaluate import evaluate
from pretrainax.host import compute_for
from pretrainax.prepare import Prepared


@dataclasses.dataclass
class Job:
    """Made inside `jax.set_mesh(mesh)`. Nothing is allocated on a device yet."""

    experiment: Experiment
    prepared: Prepared
    mesh: jax.sharding.Mesh
    model: Any
    optimizer: Any
    lengths: Lengths
    train_batches: Batches
    valid_batches: Batches
    step: Callable  # (state, batch) -> (state, metrics), jitted
    eval_step: Callable  # (params, batch) -> {name: (sum, count)}, jitted
    abstract_state: train_step.TrainState  # shapes, dtypes and shardings

    @functools.cached_property
    def parameters(self) -> int:
        return sum(p.size for p in jax.tree.leaves(self.abstract_state.params))

    @functools.cached_property
    def tokens_per_step(self) -> int:
        """Tokens that enter the model in one update, padding included; encoder's and decoder's."""
        batch = self.train_batches[0]
        rows = self.experiment.train.global_batch_size
        return rows * sum(v.shape[1] for k, v in batch.items() if k in ("tokens", "encoder_tokens"))

    @functools.cached_property
    def flops_per_step(self) -> float:
        return flops.flops_per_step(self.experiment.model, self.experiment.train.global_batch_size, self.lengths)

    def mfu(self, step_seconds: float) -> Optional[float]:
        """Model FLOPs utilisation; None where the chip's peak is unknown."""
        peak = flops.peak_flops(jax.devices()[0].device_kind)
        return peak and self.flops_per_step / (step_seconds * peak * self.mesh.size)

    def validate(self, params: Any) -> dict:
        """The figures of the validation split: always the same batches, with the same masks."""
        batches = self.valid_batches
        every = max(batches.windows_per_epoch // self.experiment.train.global_batch_size, 1)
        count = min(self.experiment.evaluate.batches or every, every)
        valid = self.prepared.valid
        causal = self.experiment.model.family == "decoder"  # the only loss that is a likelihood of the text
        return evaluate(
            self.eval_step,
            params,
            (sharding.put_batch(batches[i], self.mesh) for i in range(count)),
            bytes_per_token=valid.num_bytes / valid.num_tokens if causal else None,
        )


def assemble(experiment: Experiment, prepared: Prepared, mesh: jax.sharding.Mesh) -> Job:
    sharding.check_batch_divides(experiment.train.global_batch_size, experiment.train.accumulate, mesh)
    vocabulary = prepared.tokenizer.vocabulary
    data = dict(
        objective=experiment.objective,
        vocabulary=vocabulary,
        sequence_length=experiment.data.sequence_length,
        global_batch_size=experiment.train.global_batch_size,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    train_batches = Batches(prepared.train, seed=experiment.train.seed, **data)
    valid_batches = Batches(prepared.valid, seed=0, shuffle=False, **data)
    model = models.build(experiment.model, compute_for(experiment))
    batch_shapes = train_step.global_shapes(train_batches[0], experiment.train.global_batch_size)
    params = train_step.abstract_params(model, batch_shapes)
    schedule = experiment.schedule.build(experiment.optimizer.learning_rate, experiment.train.steps)
    optimizer = experiment.optimizer.build(schedule, params)
    return Job(
        experiment=experiment,
        prepared=prepared,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        lengths=experiment.objective.lengths(experiment.data.sequence_length),
        train_batches=train_batches,
        valid_batches=valid_batches,
        step=train_step.make_train_step(model, optimizer, schedule, experiment.train, mesh),
        eval_step=train_step.make_eval_step(model, experiment.train, mesh),
        abstract_state=train_step.abstract_state(model, optimizer, batch_shapes, mesh),
    )
