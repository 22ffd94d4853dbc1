"""Bytes of one device during a step, from shapes alone: `estimate(experiment, mesh_sizes, chip)`.

Parameters, moments and batch are exact: the real optimizer's state of the real model, cut by the real sharding table.
Activations are what the traced backward needs (`planning.activations`). The rest is modelled on two moments, of which
the worse one counts: the loss, when a chunk of logits is there, and the backward, when the gradients are.
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
    micro_rows,
    saved_residuals,
    shapes_of,
    train_on,
    width_on,
)
from pretrainax.runtime.chips import Chip
from pretrainax.sharding.arrays import batch_sharding
from pretrainax.sharding.axes import FSDP_AXIS, LENGTH_AXIS, TENSOR_AXIS
from pretrainax.sharding.mesh import abstract_mesh
from pretrainax.sharding.param_paths import PyTree, is_stacked, parameter_names, stack_of
from pretrainax.sharding.stages import Stages, stages_of

# Of a chip's memory, what an estimate may fill: the compiler's plan of buffers has gaps, and rows of a TPU's arrays are
# filled up to 128.
MARGIN = 0.85
MEM_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION=0.92"  # as launch/slurm.sbatch sets it: MARGIN, and room for programs


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device."""

    parameters: int  # that are trained
    optimizer: int
    ema: int  # the moving average of the parameters
    frozen: int  # parameters that a tuning does not train, or a teacher's
    batch: int
    gradients: int
    activations: int  # kept from the forward to the backward, of one micro-batch; with a gradient of it, three times
    logits: int  # of a chunk, or their gradient in its place, and the output matrix
    workspace: int  # of the backward of one layer, with its gathered parameters
    copies: int  # of the layers' parameters, in the dtype of the products; of all, where gradients are taken elsewhere
    largest: list[tuple[str, int]] = dataclasses.field(compare=False)  # (module and kind, bytes), descending

    @property
    def total(self) -> int:
        """Counts the worse of two moments: logits are gone when the layers' gradients come."""
        lasting = self.arguments + self.activations + self.copies
        return lasting + max(self.logits, self.gradients + self.workspace)

    @property
    def arguments(self) -> int:
        """Counts what the step is given."""
        return self.parameters + self.optimizer + self.ema + self.frozen + self.batch

    def exceeds_default(self, chip: Chip) -> bool:
        """Returns True if a step takes more of a GPU than JAX does unless MEM_FRACTION is set: 75 %."""
        return not chip.is_tpu and self.total > 0.75 * chip.memory_bytes

    def fits(self, chip: Chip) -> bool:
        return self.total <= MARGIN * chip.memory_bytes

    def parts(self) -> list[tuple[str, int]]:
        names = [field.name for field in dataclasses.fields(self) if field.name != "largest"]
        return [(name, getattr(self, name)) for name in names if getattr(self, name) or name not in ("ema", "frozen")]


def estimate(experiment: Experiment, mesh_sizes: dict[str, int], chip: Optional[Chip] = None) -> Memory:
    """Estimates a step of `experiment` on a mesh {axis of AXES: size}.

    Args:
      chip: None stands for a CPU, on which everything is float32 and attention is written out.

    Raises:
      UserError: a mesh that does not divide the batch or the model.
    """
    platform = "cpu" if chip is None else chip.platform
    mesh = abstract_mesh(mesh_sizes, platform)
    shapes, train = shapes_of(experiment), train_on(experiment, platform)
    state, frozen = abstract_state(experiment, mesh_sizes), abstract_frozen(experiment, mesh_sizes)
    width = width_on(experiment, platform)
    arrays = saved_residuals(experiment, mesh_sizes, platform)
    items = {
        name: _bytes(x) for name, x in zip(parameter_names(state.params), jax.tree.leaves(state.params), strict=True)
    }
    parameters = sum(items.values())
    stacked = sum(sum(_stacked(tree).values()) for tree in (state.params, *frozen.values()))
    copies = stacked // 2 if width == 2 else 0
    fsdp, stages = mesh.shape[FSDP_AXIS], stages_of(experiment, mesh_sizes)
    # of one layer; a stage of a pipeline has all of its layers whole, with their gradients, from the first tick on
    layers = max(stack.num_layers for stack in experiment.model.stacks.values())
    whole = copies * fsdp / layers if fsdp > 1 and stages.count == 1 else 0
    gathered = stacked * fsdp if fsdp > 1 and stages.count > 1 else 0
    rows = stages.rows / micro_rows(experiment, mesh_sizes)  # of a part, to those that are a device's
    optimizer = experiment.optimizer
    # A gradient of gradients: signs and a product beside them, and tangents of what is kept, measured on a CPU.
    twice = optimizer.asks_for_gradients
    return Memory(
        parameters=parameters,
        optimizer=sum(map(_bytes, jax.tree.leaves(state.opt_state))),
        ema=sum(map(_bytes, jax.tree.leaves(state.ema))),
        frozen=sum(map(_bytes, jax.tree.leaves(frozen))),
        batch=sum(part_bytes(x, batch_sharding(mesh, x.shape)) for x in shapes.values()),
        gradients=parameters * ((2 if train.accumulate > 1 else 1) + 2 * twice) + gathered,
        activations=round(_kept(experiment, mesh_sizes, arrays, stages, width)) * (3 if twice else 1),
        logits=_logits(experiment, shapes, mesh_sizes, train.loss_chunk, width, platform),
        workspace=round(rows * _layer(experiment, mesh_sizes, platform) + whole),
        copies=copies + gathered + parameters * optimizer.moves_the_gradient,
        largest=sorted(_named(items, state.opt_state, arrays), key=lambda item: -item[1]),
    )


def _bytes(x: jax.ShapeDtypeStruct) -> int:
    return part_bytes(x, x.sharding)


def part_bytes(x: jax.ShapeDtypeStruct, sharding: jax.sharding.NamedSharding) -> int:
    """Counts the bytes of a device's part of an array."""
    return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _kept(
    experiment: Experiment, mesh_sizes: dict[str, int], arrays: list[SavedResidual], stages: Stages, width: int
) -> float:
    """Counts what the backward needs of the forward: in a pipeline of all ticks, with the stream at its two ends; where
    parts go back one by one, of one part, with what came in of 2 P - 1, what both neighbours have sent, and the
    embeddings with their gradient."""
    if stages.again:
        layers, streams = 1 / stages.parts, 2 * stages.count + 1 + 2 * stages.parts / stages.count
    else:
        layers, streams = stages.seen, stages.parts + stages.ticks if stages.count > 1 else 0
    kept = sum(x.bytes * (layers if is_stacked(x.module) else 1) for x in arrays)
    tokens = stages.rows * lengths_of(shapes_of(experiment)).inputs / mesh_sizes[LENGTH_AXIS]
    return kept + streams * tokens * experiment.model.d_model * width


def _logits(
    experiment: Experiment,
    shapes: dict[str, jax.ShapeDtypeStruct],
    mesh_sizes: dict[str, int],
    chunk: int,
    width: int,
    platform: str,
) -> int:
    """Counts a chunk, on a CPU in float32, and the output matrix, whole along `fsdp`; both in `width` bytes a number.

    The gradient takes the place of the logits; of those with a cap it does not, as they are read behind a barrier.
    """
    model, stages = experiment.model, stages_of(experiment, mesh_sizes)
    rows = stages.rows / stages.count if stages.again else micro_rows(experiment, mesh_sizes)
    predicted = rows * lengths_of(shapes).targets / mesh_sizes[LENGTH_AXIS]
    vocabulary = predicted_vocabulary(model) / mesh_sizes[TENSOR_AXIS]
    of_logit = 4 if platform == "cpu" else width if model.final_logit_cap is None else 2 * width
    return round(vocabulary * (of_logit * min(chunk, predicted) + width * model.last_stack.embedding_width))


def _layer(experiment: Experiment, mesh_sizes: dict[str, int], platform: str) -> float:
    """Estimates a layer's backward by three arrays as large as its largest. The rest is made again, piece by piece."""
    plain = dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, remat="none"))
    arrays = [x for x in saved_residuals(plain, mesh_sizes, platform) if is_stacked(x.module) and x.shape]
    layers = [x.bytes / x.shape[0] for x in arrays]  # [L, …]
    return 3 * max(layers, default=0.0)


def _stacked(params: PyTree) -> dict[str, int]:
    """Counts the bytes of a device's part of each stack of layers."""
    stacks: dict[str, int] = {}
    for name, x in zip(parameter_names(params), jax.tree.leaves(params), strict=True):
        if (stack := stack_of(name)) is not None:
            stacks[stack] = stacks.get(stack, 0) + _bytes(x)
    return stacks


def _named(items: dict[str, int], opt_state: PyTree, arrays: list[SavedResidual]) -> Iterator[tuple[str, int]]:
    kept = dict.fromkeys(items, 0)  # by the optimizer
    for path, x in zip(parameter_names(opt_state), jax.tree.leaves(opt_state), strict=True):
        if of := [name for name in items if f"/{name}/" in f"/{path}/"]:
            kept[max(of, key=len)] += _bytes(x)
    for name, size in items.items():
        yield f"{re.sub('/(kernel|embedding)$', '', name)}: parameters, gradients, optimizer", 2 * size + kept[name]
    modules: dict[str, float] = {}
    for array in arrays:
        modules[array.module] = modules.get(array.module, 0) + array.bytes
    for module, size in modules.items():
        yield f"{module}: kept for the backward", round(size)
