"""Describes what a run computes: model, trained parameters, batch, mesh, attention and FLOPs."""

from collections.abc import Iterator

import jax

from pretrainax.files.errors import counted
from pretrainax.layers.attention import choose_backend
from pretrainax.layers.feed_forward import describe_routing
from pretrainax.models.active import describe_experts
from pretrainax.optim.layers import count_trained
from pretrainax.reporting.units import byte_size, percent
from pretrainax.sharding.mesh import GPUS, platform
from pretrainax.sharding.optimizer_state import replicated_bytes
from pretrainax.sharding.stages import describe_stages
from pretrainax.training.run import Run
from pretrainax.training.wrapped import Wrapped


def describe(run: Run) -> list[tuple[str, str]]:
    """Builds the (name, value) header rows that describe what a run computes, with warnings last."""
    model, train = run.experiment.model, run.experiment.train
    layers = sum(stack.num_layers for stack in model.stacks.values())
    mesh = " × ".join(f"{axis} {size}" for axis, size in run.mesh.shape.items() if size > 1)
    device = jax.devices()[0].device_kind
    specs = [spec for part in run.parts for spec in part.work.attention_specs]
    heads = f", {model.format_size('num_heads')} heads" if specs else ""
    shape = f"{counted(layers, 'layer')}, width {model.format_size('d_model')}{heads}"
    backends = [choose_backend(run.model.compute.attention, platform(), spec) for spec in specs]
    attention = list(dict.fromkeys(name for name, _ in backends))
    warnings = dict.fromkeys(warning for _, warning in backends if warning)
    no_bytes_reason = (
        run.validation.valid_batches.no_target_bytes if model.family == "decoder" else ""
    )  # only decoders report bits per byte
    total = sum(part.work.flops_per_step * part.steps for part in run.parts)
    return [
        ("model", f"{model.family.replace('_', '-')}, {run.parameters / 1e6:,.1f} M parameters, {shape}"),
        *([("experts", f"{describe_experts(model)}; {describe_routing(model)}")] if model.experts else []),
        *([("more tokens", f"{model.multi_token} after the next one, in training")] if model.multi_token else []),
        *(run.model.describe(run) if isinstance(run.model, Wrapped) else ()),
        ("data", run.prepared.summary),
        *(_phases(run) if run.phases else [("batch", _batch(run))]),
        ("mesh", f"{run.mesh.size} × {device}" + (f": {mesh}" if mesh else "")),
        *_stages(run),
        ("compute", _compute(run, attention)),
        *_layers(run),
        *_replicated(run),
        *_ema(run),
        ("FLOPs", f"{total:.3g} in {counted(train.steps, 'step')}" if run.phases else _flops(run)),
        *([("bits per byte", f"none: {no_bytes_reason}")] if no_bytes_reason else []),
        *(("WARNING", warning) for warning in warnings),
    ]


def _compute(run: Run, attention: list[str]) -> str:
    """Formats a run's compute dtype, 8-bit products and attention backends.

    On a GPU, the result also states whether the run is deterministic.
    """
    text, is_deterministic = run.model.compute.dtype, run.experiment.train.deterministic
    if products := run.model.compute.products:
        text += f", products {products}"
    if attention:
        text += f", attention {', '.join(attention)}"
    if is_deterministic or platform() in GPUS:
        text += ", deterministic" if is_deterministic else ", not deterministic: see config.train.deterministic"
    return text


def _stages(run: Run) -> Iterator[tuple[str, str]]:
    for part in run.parts:
        if text := describe_stages(part.trained, run.mesh.shape):
            yield "stages", text


def _batch(run: Run) -> str:
    return f"{counted(run.trained.train.global_batch_size, 'example')}, {counted(run.work.tokens_per_step, 'token')}"


def _flops(run: Run) -> str:
    work = run.work
    fraction_done = work.flops_done_per_step / work.flops_per_step
    skipped = f"; {percent(fraction_done)} done: attention skips masked positions" if fraction_done < 1 else ""
    total = f"{work.flops_per_step * run.steps:.3g} in {counted(run.steps, 'step')}"
    return f"{work.flops_per_step:.3g} per step, {total}{skipped}"


def _phases(run: Run) -> Iterator[tuple[str, str]]:
    for part in run.phases:
        assert part.phase is not None
        yield part.phase.name, f"{part.phase.what}; {_batch(part)}, FLOPs {_flops(part)}"
    length, rows = run.experiment.data.sequence_length, run.experiment.train.global_batch_size
    yield "validation", f"the same in every phase: sequence_length {length}, {counted(rows, 'example')} per batch"


def _layers(run: Run) -> Iterator[tuple[str, str]]:
    if text := run.experiment.layers.describe():
        count = count_trained(run.experiment.layers, run.abstract_state.params)
        yield "layers", f"{text}; {count:,} of {run.parameters:,} parameters are trained"


def _replicated(run: Run) -> Iterator[tuple[str, str]]:
    if size := replicated_bytes(run.optimizer, run.abstract_state.params):
        yield "state", f"{byte_size(size)} of optimizer state are replicated, because shapes differ from the parameters"


def _ema(run: Run) -> Iterator[tuple[str, str]]:
    decay, validated = run.experiment.train.ema_decay, run.experiment.evaluate.parameters == "ema"
    if decay is not None:
        usage = "used in validation and for the best checkpoint" if validated else "not used in validation"
        yield "average", f"moving average of the parameters, decay {decay:g}; {usage}"
