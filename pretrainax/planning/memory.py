"""Estimates the memory of one device during a train step, from shapes alone: `estimate(experiment, mesh_sizes, chip)`.

The bytes of parameters, optimizer state and batch are exact: the module applies the real sharding rules to the shapes
of the real train state. Activations are the residuals from a trace of the backward pass (`planning.activations`). The
rest is an approximation: memory peaks either at the loss, with a chunk of logits, or in the backward pass, with the
gradients.
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
from pretrainax.sharding.axes import FSDP_AXIS, LENGTH_AXIS, TENSOR_AXIS
from pretrainax.sharding.mesh import abstract_mesh
from pretrainax.sharding.param_paths import PyTree, is_stacked, parameter_names, stack_of
from pretrainax.sharding.stages import Stages, pipeline_stages

# The largest share of a chip's memory that an estimate may fill for the run to count as fitting. The rest is for gaps
# between the compiler's buffers and for the padding of arrays on a TPU to multiples of 128.
MARGIN = 0.85
MEM_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION=0.92"  # as in launch/slurm.sbatch: MARGIN and space for programs


@dataclasses.dataclass(frozen=True)
class Memory:
    """Estimated bytes of memory of one device during a train step, by content."""

    parameters: int  # trained parameters
    optimizer: int  # optimizer state
    ema: int  # moving average of the parameters
    frozen: int  # parameters that parameter-efficient tuning does not train, and parameters of a teacher
    batch: int
    gradients: int
    # residuals of one microbatch; three times as many if the optimizer differentiates the gradient
    activations: int
    logits: int  # one chunk of logits, or its gradient, and the output matrix
    workspace: int  # temporary arrays in the backward pass of one layer, with the gathered parameters of this layer
    # layer parameters in the compute dtype; also all parameters, if the optimizer computes gradients at a different
    # point than the current parameters
    copies: int
    largest: list[tuple[str, int]] = dataclasses.field(compare=False)  # (module and content, bytes), largest first

    @property
    def total(self) -> int:
        """Returns the peak memory in bytes.

        The peak is either at the loss or in the backward pass: the logits are freed before the gradients are allocated.
        """
        lasting = self.arguments + self.activations + self.copies
        return lasting + max(self.logits, self.gradients + self.workspace)

    @property
    def arguments(self) -> int:
        """Returns the bytes of the arguments of the step: train state, frozen parameters and batch."""
        return self.parameters + self.optimizer + self.ema + self.frozen + self.batch

    def exceeds_default_share(self, chip: Chip) -> bool:
        """Returns True if a step needs more than 75 % of a GPU's memory, the share that JAX allocates by default.

        The run then needs the environment variable in MEM_FRACTION. TPUs have no such limit, so the result is False.
        """
        return not chip.is_tpu and self.total > 0.75 * chip.memory_bytes

    def fits(self, chip: Chip) -> bool:
        return self.total <= MARGIN * chip.memory_bytes

    def parts(self) -> list[tuple[str, int]]:
        names = [field.name for field in dataclasses.fields(self) if field.name != "largest"]
        return [(name, getattr(self, name)) for name in names if getattr(self, name) or name not in ("ema", "frozen")]


def estimate(experiment: Experiment, mesh_sizes: dict[str, int], chip: Optional[Chip] = None) -> Memory:
    """Estimates the memory of one device during a train step of `experiment`.

    Args:
      mesh_sizes: size of each mesh axis, {axis of AXES: size}.
      chip: the chip of the devices. None: a CPU, which computes in float32 and stores attention logits.

    Raises:
      UserError: the batch size or a size of the model is not divisible by the mesh.
    """
    platform = "cpu" if chip is None else chip.platform
    mesh = abstract_mesh(mesh_sizes, platform)
    shapes, train = shapes_of(experiment), resolved_train_config(experiment, platform)
    state, frozen = abstract_state(experiment, mesh_sizes), abstract_frozen(experiment, mesh_sizes)
    width = compute_itemsize(experiment, platform)
    arrays = saved_residuals(experiment, mesh_sizes, platform)
    items = {
        name: _bytes(x) for name, x in zip(parameter_names(state.params), jax.tree.leaves(state.params), strict=True)
    }
    parameters = sum(items.values())
    stacked = sum(sum(_stack_bytes(tree).values()) for tree in (state.params, *frozen.values()))
    copies = stacked // 2 if width == 2 else 0
    fsdp, stages = mesh.shape[FSDP_AXIS], pipeline_stages(experiment, mesh_sizes)
    # Gathered parameters of one layer. A pipeline stage gathers all its layers before the first tick.
    layers = max(stack.num_layers for stack in experiment.model.stacks.values())
    gathered_layer = copies * fsdp / layers if fsdp > 1 and stages.count == 1 else 0
    gathered_stage = stacked * fsdp if fsdp > 1 and stages.count > 1 else 0
    rows = stages.rows / micro_rows(experiment, mesh_sizes)  # microbatch of the pipeline / rows of a device
    optimizer = experiment.optimizer
    # Differentiating the gradient needs its signs, a product with these signs, and tangents of the residuals. The
    # factors below were measured on a CPU.
    second_order = optimizer.needs_gradient_function
    return Memory(
        parameters=parameters,
        optimizer=sum(map(_bytes, jax.tree.leaves(state.opt_state))),
        ema=sum(map(_bytes, jax.tree.leaves(state.ema))),
        frozen=sum(map(_bytes, jax.tree.leaves(frozen))),
        batch=sum(part_bytes(x, batch_sharding(mesh, x.shape)) for x in shapes.values()),
        gradients=parameters * ((2 if train.accumulate > 1 else 1) + 2 * second_order) + gathered_stage,
        activations=round(_activation_bytes(experiment, mesh_sizes, arrays, stages, width))
        * (3 if second_order else 1),
        logits=_logit_bytes(experiment, shapes, mesh_sizes, train.loss_chunk, width, platform),
        workspace=round(rows * _layer_workspace(experiment, mesh_sizes, platform) + gathered_layer),
        copies=copies + gathered_stage + parameters * optimizer.has_gradient_point,
        largest=sorted(_largest_arrays(items, state.opt_state, arrays), key=lambda item: -item[1]),
    )


def _bytes(x: jax.ShapeDtypeStruct) -> int:
    return part_bytes(x, x.sharding)


def part_bytes(x: jax.ShapeDtypeStruct, sharding: jax.sharding.NamedSharding) -> int:
    """Returns the bytes of one device's shard of an array with this sharding."""
    return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _activation_bytes(
    experiment: Experiment, mesh_sizes: dict[str, int], arrays: list[SavedResidual], stages: Stages, width: int
) -> float:
    """Returns the bytes that the forward pass saves for the backward pass, per device.

    Without a pipeline these are `arrays`. A GPipe pipeline saves the residuals of all its ticks, and the hidden states
    before its first and after its last stage. The 1F1B schedule, which runs the backward pass of each part of a
    microbatch separately, saves the residuals of one part, the inputs of 2 P - 1 parts (P stages), the arrays from both
    neighboring stages, and the embeddings with their gradient.

    Args:
      arrays: the residuals of one microbatch, without the effect of a pipeline.
      width: bytes per element of the compute dtype.
    """
    if stages.recompute:
        layers, streams = 1 / stages.parts, 2 * stages.count + 1 + 2 * stages.parts / stages.count
    else:
        layers, streams = stages.compute_factor, stages.parts + stages.ticks if stages.count > 1 else 0
    residuals = sum(x.bytes * (layers if is_stacked(x.module) else 1) for x in arrays)
    tokens = stages.rows * lengths_of(shapes_of(experiment)).inputs / mesh_sizes[LENGTH_AXIS]
    return residuals + streams * tokens * experiment.model.d_model * width


def _logit_bytes(
    experiment: Experiment,
    shapes: dict[str, jax.ShapeDtypeStruct],
    mesh_sizes: dict[str, int],
    chunk: int,
    width: int,
    platform: str,
) -> int:
    """Returns the bytes of one chunk of logits and of the output matrix, gathered along `fsdp`.

    The gradient of the logits reuses their memory. Logits with a cap are an exception: the backward pass reads them
    behind an optimization barrier, so they need twice the memory.

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


def _layer_workspace(experiment: Experiment, mesh_sizes: dict[str, int], platform: str) -> float:
    """Returns the estimated bytes of temporary arrays in the backward pass of one layer: 3 times its largest array.

    With rematerialization, the backward pass recomputes the smaller arrays one after another.
    """
    plain = dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, remat="none"))
    arrays = [x for x in saved_residuals(plain, mesh_sizes, platform) if is_stacked(x.module) and x.shape]
    layers = [x.bytes / x.shape[0] for x in arrays]  # [L, …]
    return 3 * max(layers, default=0.0)


def _stack_bytes(params: PyTree) -> dict[str, int]:
    """Returns the bytes of one device's shard of the parameters of each stack of layers, {stack: bytes}."""
    stacks: dict[str, int] = {}
    for name, x in zip(parameter_names(params), jax.tree.leaves(params), strict=True):
        if (stack := stack_of(name)) is not None:
            stacks[stack] = stacks.get(stack, 0) + _bytes(x)
    return stacks


def _largest_arrays(items: dict[str, int], opt_state: PyTree, arrays: list[SavedResidual]) -> Iterator[tuple[str, int]]:
    optimizer_bytes = dict.fromkeys(items, 0)
    for path, x in zip(parameter_names(opt_state), jax.tree.leaves(opt_state), strict=True):
        if matches := [name for name in items if f"/{name}/" in f"/{path}/"]:
            optimizer_bytes[max(matches, key=len)] += _bytes(x)
    for name, size in items.items():
        yield (
            f"{re.sub('/(kernel|embedding)$', '', name)}: parameters, gradients, optimizer",
            2 * size + optimizer_bytes[name],
        )
    modules: dict[str, float] = {}
    for array in arrays:
        modules[array.module] = modules.get(array.module, 0) + array.bytes
    for module, size in modules.items():
        yield f"{module}: saved for the backward pass", round(size)
