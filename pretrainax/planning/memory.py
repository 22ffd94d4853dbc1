"""Estimates the memory of one device during a train step, from shapes alone: `estimate(experiment, mesh_sizes, chip)`.

The sizes of parameters, optimizer state and batch are exact: the module applies the real sharding rules to the shapes
of the real train state. Activations are the residuals from a trace of the backward pass (`planning.activations`). All
other numbers are approximate. They assume that memory peaks either while the loss is computed, when a chunk of logits
is in memory, or in the backward pass, when the gradients are.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Optional

import jax

from pretrainax.config import Experiment
from pretrainax.data.batch import lengths_of
from pretrainax.models.active import predicted_vocabulary
from pretrainax.planning.activations import (
    SavedResidual,
    abstract_frozen,
    abstract_state,
    compute_itemsize,
    micro_rows,
    resolved_train_config,
    saved_residuals,
    shapes_of,
)
from pretrainax.runtime.chips import Chip
from pretrainax.sharding.arrays import batch_sharding
from pretrainax.sharding.axes import LENGTH_AXIS, TENSOR_AXIS
from pretrainax.sharding.mesh import abstract_mesh
from pretrainax.sharding.param_paths import PyTree, is_stacked, parameter_names, stack_of
from pretrainax.sharding.rules import gathered_axes
from pretrainax.sharding.stages import Stages, pipeline_stages

# A run fits if its estimate fills at most this fraction of the chip's memory. The remaining memory is for gaps between
# the compiler's buffers, and for the padding of arrays on a TPU to multiples of 128.
MARGIN = 0.85
MEM_FRACTION = "XLA_CLIENT_MEM_FRACTION=0.92"  # as in launch/slurm.sbatch: MARGIN plus compiled programs


@dataclasses.dataclass(frozen=True)
class Memory:
    """Estimated memory in bytes that one device uses during a train step, by content."""

    parameters: int  # trained parameters
    optimizer: int  # optimizer state
    ema: int  # exponential moving average of the parameters
    frozen: int  # parameters that parameter-efficient fine-tuning does not train, and the teacher's parameters
    batch: int
    gradients: int
    # residuals of one microbatch; times 3 if the optimizer differentiates the gradient
    activations: int
    logits: int  # one chunk of logits, or its gradient, and the output matrix
    workspace: int  # temporary arrays in the backward pass of one layer, and the gathered parameters of the layer
    # layer parameters in the compute dtype; also a copy of all parameters if the optimizer computes gradients at a
    # point other than the current parameters
    copies: int
    largest: list[tuple[str, int]] = dataclasses.field(compare=False)  # (module and content, bytes), largest first

    @property
    def total(self) -> int:
        """Returns the estimated peak memory in bytes.

        The peak is either during the loss or in the backward pass, because the logits are freed before the gradients
        are allocated.
        """
        persistent = self.arguments + self.activations + self.copies
        return persistent + max(self.logits, self.gradients + self.workspace)

    @property
    def arguments(self) -> int:
        """Returns the size in bytes of the train step's arguments: train state, frozen parameters and batch."""
        return self.parameters + self.optimizer + self.ema + self.frozen + self.batch

    def exceeds_default_share(self, chip: Chip) -> bool:
        """Checks whether a step needs more than 75 % of a GPU's memory, the fraction that JAX allocates by default.

        If so, the run needs the environment variable in MEM_FRACTION. Returns False for TPUs, which have no such limit.
        """
        return not chip.is_tpu and self.total > 0.75 * chip.memory_bytes

    def fits(self, chip: Chip) -> bool:
        """Checks whether the peak memory is at most the fraction MARGIN of the chip's memory."""
        return self.total <= MARGIN * chip.memory_bytes

    def parts(self) -> list[tuple[str, int]]:
        """Returns (field name, size in bytes) for each kind of content; omits `ema` and `frozen` if they are 0."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "largest"]
        return [(name, getattr(self, name)) for name in names if getattr(self, name) or name not in ("ema", "frozen")]


def estimate(
    experiment: Experiment, mesh_sizes: dict[str, int], chip: Optional[Chip] = None, single: bool = False
) -> Memory:
    """Estimates the memory of one device during a train step of `experiment`.

    Args:
      mesh_sizes: size of each mesh axis, {axis of AXES: size}.
      chip: the chip of the devices. If None, the device is a CPU, which computes in float32 and saves attention logits.
      single: as in `saved_residuals`; for a single estimate, not for a search.

    Raises:
      UserError: the batch size or a model dimension is not divisible by the mesh.
    """
    platform = "cpu" if chip is None else chip.platform
    mesh = abstract_mesh(mesh_sizes, platform)
    shapes, train = shapes_of(experiment), resolved_train_config(experiment, platform)
    state, frozen = abstract_state(experiment, mesh_sizes), abstract_frozen(experiment, mesh_sizes)
    width = compute_itemsize(experiment, platform)
    residuals = saved_residuals(experiment, mesh_sizes, platform, single)
    parameter_bytes = {
        name: _bytes(x) for name, x in zip(parameter_names(state.params), jax.tree.leaves(state.params), strict=True)
    }
    parameters = sum(parameter_bytes.values())
    stacked = sum(sum(_stack_bytes(tree).values()) for tree in (state.params, *frozen.values()))
    copies = stacked // 2 if width == 2 else 0
    stages = pipeline_stages(experiment, mesh_sizes)
    # Without a pipeline, one layer's parameters are gathered at a time. A pipeline stage gathers all of its layers
    # before the first tick.
    max_layers = max(stack.num_layers for stack in experiment.model.stacks.values())
    gathered = sum(_gathered_bytes(tree, mesh_sizes) for tree in (state.params, *frozen.values()))
    gathered_layer = gathered * width / 4 / max_layers if stages.count == 1 else 0
    gathered_stage = gathered if stages.count > 1 else 0
    row_fraction = stages.rows / micro_rows(experiment, mesh_sizes)  # rows of a pipeline microbatch / rows of a device
    optimizer = experiment.optimizer
    # Differentiating the gradient needs the signs of the gradient, its product with these signs, and the tangents of
    # the residuals. The factors below were measured on a CPU.
    second_order = optimizer.needs_gradient_function
    return Memory(
        parameters=parameters,
        optimizer=sum(map(_bytes, jax.tree.leaves(state.opt_state))),
        ema=sum(map(_bytes, jax.tree.leaves(state.ema))),
        frozen=sum(map(_bytes, jax.tree.leaves(frozen))),
        batch=sum(part_bytes(x, batch_sharding(mesh, x.shape)) for x in shapes.values()),
        gradients=parameters * ((2 if train.accumulate > 1 else 1) + 2 * second_order) + gathered_stage,
        activations=round(_activation_bytes(experiment, mesh_sizes, residuals, stages, width))
        * (3 if second_order else 1),
        logits=_logit_bytes(experiment, shapes, mesh_sizes, train.loss_chunk, width, platform),
        workspace=round(row_fraction * _layer_workspace(experiment, mesh_sizes, platform, single) + gathered_layer),
        copies=copies + gathered_stage + parameters * optimizer.has_gradient_point,
        largest=sorted(_largest_arrays(parameter_bytes, state.opt_state, residuals), key=lambda item: -item[1]),
    )


def least_bytes(experiment: Experiment, mesh_sizes: dict[str, int]) -> int:
    """Computes the bytes per device of the train state and one gradient, which are needed with each `train` setting.

    Raises:
      UserError: as `estimate`.
    """
    state, frozen = abstract_state(experiment, mesh_sizes), abstract_frozen(experiment, mesh_sizes)
    trees = state.params, state.params, state.opt_state, state.ema, frozen
    return sum(map(_bytes, jax.tree.leaves(trees)))


def _bytes(x: jax.ShapeDtypeStruct) -> int:
    return part_bytes(x, x.sharding)


def part_bytes(x: jax.ShapeDtypeStruct, sharding: jax.sharding.NamedSharding) -> int:
    """Computes the size in bytes of one device's shard of an array with the given sharding."""
    return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _activation_bytes(
    experiment: Experiment, mesh_sizes: dict[str, int], saved: list[SavedResidual], stages: Stages, width: int
) -> float:
    """Computes the bytes that the forward pass saves for the backward pass, per device.

    Without a pipeline, this is the size of `saved`. A GPipe pipeline saves the residuals of all its ticks, and the
    hidden states before the first stage and after the last stage. The 1F1B schedule runs the backward pass separately
    for each pipeline microbatch. With P stages, it saves the residuals of one pipeline microbatch, the inputs of
    2 P - 1 pipeline microbatches, the arrays received from both neighboring stages, and the embeddings with their
    gradient.

    Args:
      saved: the residuals of one microbatch, as if there were no pipeline.
      width: bytes per element of the compute dtype.
    """
    if stages.recompute:
        layer_factor, num_streams = 1 / stages.parts, 2 * stages.count + 1 + 2 * stages.parts / stages.count
    else:
        layer_factor, num_streams = stages.compute_factor, stages.parts + stages.ticks if stages.count > 1 else 0
    residuals = sum(x.bytes * (layer_factor if is_stacked(x.module) else 1) for x in saved)
    tokens = stages.rows * lengths_of(shapes_of(experiment)).inputs / mesh_sizes[LENGTH_AXIS]
    return residuals + num_streams * tokens * experiment.model.d_model * width


def _logit_bytes(
    experiment: Experiment,
    shapes: dict[str, jax.ShapeDtypeStruct],
    mesh_sizes: dict[str, int],
    chunk: int,
    width: int,
    platform: str,
) -> int:
    """Computes the size in bytes of one chunk of logits plus the output matrix, which is gathered along `fsdp`.

    The gradient of the logits reuses the memory of the logits, unless the logits are capped: the backward pass then
    reads them behind an optimization barrier, so they need twice the memory.

    Args:
      chunk: number of positions per chunk.
      width: bytes per element of the compute dtype. Logits are always float32 on a CPU.
    """
    model, stages = experiment.model, pipeline_stages(experiment, mesh_sizes)
    rows = stages.rows / stages.count if stages.recompute else micro_rows(experiment, mesh_sizes)
    predicted = rows * lengths_of(shapes).targets / mesh_sizes[LENGTH_AXIS]
    vocabulary = predicted_vocabulary(model) / mesh_sizes[TENSOR_AXIS]
    logit_width = 4 if platform == "cpu" else width if model.final_logit_cap is None else 2 * width
    return round(vocabulary * (logit_width * min(chunk, predicted) + width * model.last_stack.embedding_width))


def _layer_workspace(experiment: Experiment, mesh_sizes: dict[str, int], platform: str, single: bool) -> float:
    """Estimates the temporary memory of one layer's backward pass as 3 times the layer's largest residual, in bytes.

    With rematerialization, the backward pass recomputes the smaller arrays one after another.
    """
    without_remat = dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, remat="none"))
    residuals = saved_residuals(without_remat, mesh_sizes, platform, single)
    bytes_per_layer = [x.bytes / x.shape[0] for x in residuals if is_stacked(x.module) and x.shape]  # [L, …]
    return 3 * max(bytes_per_layer, default=0.0)


def _stack_bytes(params: PyTree) -> dict[str, int]:
    """Computes the size in bytes of one device's shard of the parameters of each stack of layers."""
    stack_bytes: dict[str, int] = {}
    for name, x in zip(parameter_names(params), jax.tree.leaves(params), strict=True):
        if (stack := stack_of(name)) is not None:
            stack_bytes[stack] = stack_bytes.get(stack, 0) + _bytes(x)
    return stack_bytes


def _gathered_bytes(params: PyTree, mesh_sizes: dict[str, int]) -> int:
    """Computes the size in bytes of all parameters of stacks that a device gathers, after it has gathered them."""
    total = 0
    for name, x, axes in zip(parameter_names(params), jax.tree.leaves(params), gathered_axes(params), strict=True):
        shards = math.prod(mesh_sizes[axis] for axis in axes)
        total += _bytes(x) * shards if shards > 1 and stack_of(name) is not None else 0
    return total


def _largest_arrays(
    parameter_bytes: dict[str, int], opt_state: PyTree, residuals: list[SavedResidual]
) -> Iterator[tuple[str, int]]:
    """Yields (module and content, size in bytes) for each large consumer of memory.

    These are each parameter together with its gradient and moments, and the residuals of each module.

    Args:
      parameter_bytes: size in bytes of one device's shard of each parameter, by parameter path.
    """
    optimizer_bytes = dict.fromkeys(parameter_bytes, 0)
    for path, x in zip(parameter_names(opt_state), jax.tree.leaves(opt_state), strict=True):
        if matches := [name for name in parameter_bytes if f"/{name}/" in f"/{path}/"]:
            optimizer_bytes[max(matches, key=len)] += _bytes(x)
    for name, size in parameter_bytes.items():
        yield (
            f"{re.sub('/(kernel|embedding)$', '', name)}: parameters, gradients, optimizer",
            2 * size + optimizer_bytes[name],
        )
    bytes_by_module: dict[str, float] = {}
    for residual in residuals:
        bytes_by_module[residual.module] = bytes_by_module.get(residual.module, 0) + residual.bytes
    for module, size in bytes_by_module.items():
        yield f"{module}: saved for the backward pass", round(size)
