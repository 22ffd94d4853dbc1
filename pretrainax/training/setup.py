"""The parts of a run, put together from its config: what training, evaluation and the benchmarks share."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Optional

import jax
import numpy as np

from pretrainax import models
from pretrainax.config import Experiment
from pretrainax.data.collate import collate
from pretrainax.data.objectives import CausalLM, Lengths
from pretrainax.data.pipeline import Batches, batches_of
from pretrainax.data.preparation.prepare import Prepared
from pretrainax.layers.attention import choose_implementation
from pretrainax.layers.attention_spec import AttentionSpec, collect_attention_specs
from pretrainax.layers.compute import compute_for, for_this_machine
from pretrainax.models import flops
from pretrainax.runtime.chips import peak_flops
from pretrainax.sharding.arrays import check_batch_divides, put_batch
from pretrainax.sharding.mesh import platform
from pretrainax.training import train_step
from pretrainax.training.metrics import summarize


@dataclasses.dataclass
class Run:
    """Made inside `jax.set_mesh(mesh)`. Nothing is allocated on a device yet."""

    experiment: Experiment
    prepared: Prepared
    mesh: jax.sharding.Mesh
    model: Any
    optimizer: Any
    lengths: Lengths
    batch_shapes: dict[str, jax.ShapeDtypeStruct]  # of the global batch
    train_batches: Batches
    valid_batches: Batches
    step: Callable  # (state, batch) -> (state, metrics), jitted
    eval_step: Callable  # (params, batch) -> {name: (sum, count)}, jitted
    abstract_state: train_step.TrainState  # shapes, dtypes and shardings
    attention_specs: list[AttentionSpec]  # of all that the model computes, in its order

    def fresh_state(self) -> train_step.TrainState:
        """Parameters from `train.seed`, moments of zero, born in their shards."""
        return train_step.init_state(
            self.model, self.optimizer, self.batch_shapes, self.mesh, self.experiment.train.seed
        )

    @functools.cached_property
    def parameters(self) -> int:
        return sum(p.size for p in jax.tree.leaves(self.abstract_state.params))

    @functools.cached_property
    def tokens_per_step(self) -> int:
        """Tokens that enter the model in one update, padding included; encoder's and decoder's."""
        return sum(x.size for name, x in self.batch_shapes.items() if name in ("tokens", "encoder_tokens"))

    @functools.cached_property
    def flops_per_step(self) -> float:
        """Of one update over all devices, as `flops.flops_per_step` counts them."""
        return self._flops(self.lengths)

    def flops_of(self, step: int) -> float:
        """The same of one step, whose batch may be of a shorter bucket."""
        return self._flops(self.train_batches.lengths_of(step))

    def mfu(self, flops_done: float, seconds: float) -> Optional[float]:
        """Model FLOPs utilisation; None where the chip's peak is unknown."""
        peak = peak_flops(jax.devices()[0].device_kind)
        return peak and flops_done / (seconds * peak * self.mesh.size)

    def _flops(self, lengths: Lengths) -> float:
        rows = self.experiment.train.global_batch_size
        return flops.flops_per_step(self.experiment.model, rows, lengths.inputs, lengths.targets)

    def validation_batches(self, batches: Optional[Batches] = None) -> Iterator[dict[str, np.ndarray]]:
        """The validation split, this process's rows or those of `batches`: always the same, with the same masks."""
        batches = batches or self.valid_batches
        every = max(batches.rows_per_epoch // self.experiment.train.global_batch_size, 1)
        for i in range(min(self.experiment.evaluate.batches or every, every)):
            yield batches[i]

    def validate(self, params: Any) -> dict:
        """The figures of the validation batches: sums and counts are added over all of them, then divided once."""
        tokens, text_bytes = (
            sum(getattr(c, name) for c in self.prepared.valid) for name in ("num_tokens", "num_bytes")
        )
        causal = type(self.experiment.objective) is CausalLM  # the only loss that is a likelihood of the text
        sums = [self.eval_step(params, put_batch(batch, self.mesh)) for batch in self.validation_batches()]
        totals = jax.tree.map(lambda *values: sum(map(float, values)), *jax.device_get(sums))
        return summarize(totals, bytes_per_token=text_bytes / tokens if causal else None)

    def describe(self) -> list[tuple[str, str]]:
        """Rows of the run's header."""
        model, train = self.experiment.model, self.experiment.train
        layers = model.num_layers + (model.decoder_layers if model.family == "encoder_decoder" else 0)
        shape = f"{layers} layers, width {model.d_model}, {model.num_heads} heads"
        mesh = " × ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items() if size > 1)
        device = jax.devices()[0].device_kind
        chosen = [
            choose_implementation(self.model.compute.attention, platform(), spec) for spec in self.attention_specs
        ]
        attention = dict.fromkeys(name for name, _ in chosen)
        warnings = dict.fromkeys(warning for _, warning in chosen if warning)
        return [
            ("model", f"{model.family.replace('_', '-')}, {self.parameters / 1e6:,.1f} M parameters, {shape}"),
            ("data", self.prepared.summary),
            ("batch", f"{train.global_batch_size} examples, {self.tokens_per_step:,} tokens"),
            ("mesh", f"{self.mesh.size} × {device}" + (f": {mesh}" if mesh else "")),
            ("compute", f"{self.model.compute.dtype}, attention {', '.join(attention)}"),
            (
                "FLOPs",
                f"{self.flops_per_step:.3g} a step, {self.flops_per_step * train.steps:.3g} in {train.steps:,} steps",
            ),
            *(("WARNING", warning) for warning in warnings),
        ]


class Program(NamedTuple):
    """What is compiled of a run: all that no data is needed for. The fields are those of Run."""

    model: Any
    optimizer: Any
    step: Callable
    eval_step: Callable
    abstract_state: train_step.TrainState
    attention_specs: list[AttentionSpec]


def program_of(
    experiment: Experiment, batch_shapes: dict[str, jax.ShapeDtypeStruct], mesh: jax.sharding.Mesh
) -> Program:
    """Made inside `jax.set_mesh(mesh)`, whose devices may be absent."""
    check_batch_divides(experiment, mesh)
    train = for_this_machine(experiment.train)
    model = models.build(experiment.model, compute_for(train))
    with collect_attention_specs() as attention_specs:
        params = train_step.abstract_params(model, batch_shapes)
    schedule = experiment.schedule.build(experiment.optimizer.learning_rate, experiment.train.steps)
    optimizer = experiment.optimizer.build(schedule, params)
    return Program(
        model=model,
        optimizer=optimizer,
        step=train_step.make_train_step(model, optimizer, schedule, train, mesh),
        eval_step=train_step.make_eval_step(model, train, mesh),
        abstract_state=train_step.abstract_state(model, optimizer, batch_shapes, mesh),
        attention_specs=attention_specs,
    )


def build_run(experiment: Experiment, prepared: Prepared, mesh: jax.sharding.Mesh) -> Run:
    train_batches, valid_batches = (
        batches_of(experiment, prepared, split, jax.process_index(), jax.process_count())
        for split in ("train", "valid")
    )
    # The first batch may be of a short bucket. What needs a trace, and what is said of it, is of the longest rows.
    longest = collate([[train_batches.like]], train_batches.lengths, pad=0)
    batch_shapes, longest_shapes = (
        train_step.global_shapes(batch, experiment.train.global_batch_size) for batch in (train_batches[0], longest)
    )
    return Run(
        experiment=experiment,
        prepared=prepared,
        mesh=mesh,
        lengths=train_batches.lengths,
        batch_shapes=batch_shapes,
        train_batches=train_batches,
        valid_batches=valid_batches,
        **program_of(experiment, longest_shapes, mesh)._asdict(),
    )
