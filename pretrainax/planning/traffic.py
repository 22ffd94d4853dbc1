"""The collectives of a step, estimated from the mesh and the model.

NOTE libtpu (0.0.42) makes all-reduces around the whole torus of gathers and scatters that all chips of a slice take
part in, where its wires wrap around in all dimensions (v5p 4x4x4 and larger, v6e 16x16): they send twice the bytes and
are waited for, also with the flags that are to keep reduce-scatters. Groups that are a part of the slice stay as they
are: of 4 layers of LLaMA 3 8B on v5p:4x4x4, 30.9 GB a device with fsdp 64, 15.5 GB with data 2 and fsdp 32. So a
search prefers these. On v6e:16x16 the layers' scatters and small gathers become sums with fsdp 256, and neither with
data 2 and fsdp 128; large gathers stay there, and are counted as sums all the same. Not counted: of small arrays libtpu
does so on v5e too; on v6e tables of tokens are gathered once, and their gradients summed whole.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Optional

import jax

from pretrainax.config import Experiment, ModelConfig
from pretrainax.data.batch import lengths_of
from pretrainax.layers.feed_forward import feed_forwards_of, kinds_of_layers
from pretrainax.planning.activations import abstract_frozen, abstract_state, micro_rows, shapes_of, width_on
from pretrainax.planning.topologies import Topology
from pretrainax.sharding.axes import (
    AXES,
    DATA_AXIS,
    EXPERT_AXIS,
    FSDP_AXIS,
    LENGTH_AXIS,
    PIPELINE_AXIS,
    TENSOR_AXIS,
    TOKEN_AXES,
)
from pretrainax.sharding.param_paths import PyTree, is_stacked, parameter_names, stack_of
from pretrainax.sharding.stages import stages_of


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that a step runs `count` times; or several alike."""

    axis: str  # of the mesh; "data+fsdp" where its groups span both
    kind: str  # all-gather | reduce-scatter | all-reduce | all-to-all | collective-permute
    bytes: int  # that a device sends in one run, around a ring: of an array of V bytes over n devices V (n - 1) / n,
    # of an all-reduce, which is both a reduce-scatter and an all-gather, twice that
    count: int  # runs in a step
    where: str  # the module, "encoder/blocks/mlp/up"
    # of the runs, those that begin before a product and end behind it; None: nothing was compiled
    beside: Optional[int] = dataclasses.field(default=None, compare=False)

    @property
    def total(self) -> int:
        """Counts the bytes that a device sends in a step."""
        return self.bytes * self.count


def collectives(
    experiment: Experiment, mesh_sizes: dict[str, int], topology: Optional[Topology] = None
) -> list[Collective]:
    """Estimates the collectives of one update, on accelerators; topology: None: no matter which.

    Counted: parameters gathered along `fsdp` for the forward, for the backward, and once more where the backward makes
    the forward again; their gradients, reduced in float32 in each micro-batch; along `tensor` the sum after each
    sublayer, forward and backward; along `sequence` keys and values; along `expert` tokens sent there and back; along
    `pipeline` the stream, and before the stages a gather of it, behind them a scatter. Not counted: scalars, norms of
    gradients, and the softmax's sums over a split vocabulary.
    """
    width = width_on(experiment, "tpu")
    frozen = _parameters(experiment, mesh_sizes, abstract_frozen(experiment, mesh_sizes), width)
    found = [
        *_parameters(experiment, mesh_sizes, abstract_state(experiment, mesh_sizes).params, width),
        *(c for c in frozen if c.kind == "all-gather"),  # they have no gradients
        *_tensor(experiment, mesh_sizes, width),
        *_sequence(experiment, mesh_sizes, width),
        *_experts(experiment, mesh_sizes, width),
        *_pipeline(experiment, mesh_sizes, width),
    ]
    wraps = topology is not None and topology.wraps_around
    return [_around_the_torus(c, mesh_sizes, topology) if wraps else c for c in found if c.bytes]


def _around_the_torus(one: Collective, mesh_sizes: dict[str, int], topology: Topology) -> Collective:
    """Returns the all-reduce that is made of a gather or a scatter in which a whole slice takes part."""
    group = math.prod(mesh_sizes[axis] for axis in one.axis.split("+") if axis in mesh_sizes)
    if one.kind not in ("all-gather", "reduce-scatter") or group < topology.num_devices // topology.slices:
        return one
    return dataclasses.replace(one, kind="all-reduce", bytes=2 * one.bytes)


def _sent(size: float, devices: int, ways: int = 1) -> int:
    return round(ways * size * (devices - 1) / devices)


def _passes(experiment: Experiment, sizes: dict[str, int]) -> int:
    """Counts how often a step needs a layer's parameters: for each forward and for the backward."""
    return experiment.train.layer_forwards + 1 + bool(stages_of(experiment, sizes).again)


def _parameters(experiment: Experiment, sizes: dict[str, int], params: PyTree, width: int) -> Iterator[Collective]:
    """Yields those of parameters and gradients, a stack of layers at a time."""
    accumulate, slices, fsdp = experiment.train.accumulate, experiment.mesh.slices, sizes[FSDP_AXIS]
    # (stack, split by fsdp, axes that split it too) -> [layers, numbers of one]
    stacks: dict[tuple[str, bool, frozenset[str]], list[int]] = {}
    for name, x in zip(parameter_names(params), jax.tree.leaves(params), strict=True):
        stack = stack_of(name)
        split_by = jax.tree.leaves(tuple(x.sharding.spec))
        is_split = FSDP_AXIS in split_by or fsdp == 1
        part = x.sharding.shard_shape(x.shape)
        place, layers = (stack, part[0]) if stack else (name.split("/")[0], 1)
        entry = stacks.setdefault((place, is_split, frozenset(split_by) & {*TOKEN_AXES}), [layers, 0])
        entry[1] += math.prod(part) * (fsdp if is_split else 1) // layers
    for (place, is_split, split_by), (layers, numbers) in stacks.items():
        runs = layers * accumulate
        if is_split and fsdp > 1:
            passes, wide, beside = _passes(experiment, sizes) if is_stacked(place) else 2, width, None
            if is_stacked(place) and sizes[PIPELINE_AXIS] > 1:
                passes, wide, beside = 1, 4, 0  # before the first tick, in float32, and scattered behind the last
            yield Collective(FSDP_AXIS, "all-gather", _sent(numbers * wide, fsdp), runs * passes, place, beside)
            yield Collective(FSDP_AXIS, "reduce-scatter", _sent(numbers * 4, fsdp), runs, place, beside)
        part = 4 * numbers / (fsdp if is_split else 1)
        # Each axis that splits the tokens, and not the parameter, has parts of its gradient to add.
        axes = {
            axis: sizes[axis] // (slices if axis == DATA_AXIS else 1) for axis in TOKEN_AXES if axis not in split_by
        }
        group = math.prod(axes.values())
        named = "+".join(axis for axis in AXES if axes.get(axis, 1) > 1)
        yield Collective(named, "all-reduce", _sent(part, group, 2), runs, place)
        # Between slices, each device passes on its share of what its slice has summed.
        yield Collective("slices", "all-reduce", _sent(part / group, slices, 2), runs, place)


def _stacks(experiment: Experiment) -> list[tuple[ModelConfig, int, int]]:
    """Returns each stack, with the tokens of a row that pass through it, and the sublayers of a layer."""
    lengths = lengths_of(shapes_of(experiment))
    return list(zip(experiment.model.stacks.values(), (lengths.inputs, lengths.targets), (2, 3), strict=False))


def _rows_of_layers(experiment: Experiment, sizes: dict[str, int]) -> float:
    """Counts the rows that all layers see on a device, in a pipeline with those that nobody reads."""
    return micro_rows(experiment, sizes) * stages_of(experiment, sizes).seen


def _tensor(experiment: Experiment, sizes: dict[str, int], width: int) -> Iterator[Collective]:
    """Yields sums of the stream after each sublayer, and of its gradient before it (Shoeybi et al. 2019, section 3)."""
    rows, accumulate = _rows_of_layers(experiment, sizes), experiment.train.accumulate
    for stack, length, sublayers in _stacks(experiment):
        stream = rows * length / sizes[LENGTH_AXIS] * stack.d_model * width
        kinds = kinds_of_layers(stack, stack.num_layers)
        beside = sum(len(kind.numbers) * (len(feed_forwards_of(kind.config)) - 1) for kind in kinds)
        times = (sublayers * stack.num_layers + beside) * _passes(experiment, sizes) * accumulate
        sent = _sent(stream, sizes[TENSOR_AXIS], 2)
        yield Collective(TENSOR_AXIS, "all-reduce", sent, times, f"{stack.family}/blocks")


def _sequence(experiment: Experiment, sizes: dict[str, int], width: int) -> Iterator[Collective]:
    """Yields keys and values of a layer, sent to all devices of the row, and their gradients sent back."""
    rows = _rows_of_layers(experiment, sizes)
    for stack, length, sublayers in _stacks(experiment):
        both = 2 * rows * length * stack.kv_heads * stack.dim_per_head / sizes[TENSOR_AXIS] * width
        times = (sublayers - 1) * stack.num_layers * experiment.train.accumulate
        sent, where = _sent(both, sizes[LENGTH_AXIS]), f"{stack.family}/blocks/self_attention"
        yield Collective(LENGTH_AXIS, "all-gather", sent, times * _passes(experiment, sizes), where)
        yield Collective(LENGTH_AXIS, "reduce-scatter", sent, times, where)


def _experts(experiment: Experiment, sizes: dict[str, int], width: int) -> Iterator[Collective]:
    """Yields the rows that experts of other devices are sent, and send back; their gradients go the same ways."""
    settings = experiment.model.experts
    if settings is None:
        return
    rows, accumulate = micro_rows(experiment, sizes), experiment.train.accumulate
    for stack, length, _ in _stacks(experiment):
        tokens = settings.top_k * (settings.capacity or 1.0) * rows * length / sizes[LENGTH_AXIS]
        sent = _sent(tokens * stack.d_model * width, sizes[EXPERT_AXIS])
        _, with_experts = kinds_of_layers(stack, stack.num_layers)
        times = 2 * _passes(experiment, sizes) * len(with_experts.numbers) * accumulate
        yield Collective(EXPERT_AXIS, "all-to-all", sent, times, f"{stack.family}/blocks/mlp")


def _pipeline(experiment: Experiment, sizes: dict[str, int], width: int) -> Iterator[Collective]:
    """Yields the stream of a part, sent to the next stage at each tick, and what goes in and comes out: of all parts,
    or where they go back one by one of each; their gradients go the same ways."""
    stages, accumulate = stages_of(experiment, sizes), experiment.train.accumulate
    if stages.count == 1:
        return
    for stack, length, _ in _stacks(experiment):
        name, part = stack.family, stages.rows * length / sizes[LENGTH_AXIS] * stack.d_model * width
        yield Collective(PIPELINE_AXIS, "collective-permute", round(part), 2 * stages.ticks * accumulate, name)
        if stages.again:
            entering = _sent(part, stages.count, 2)
            yield Collective(PIPELINE_AXIS, "all-reduce", entering, 2 * stages.ticks * accumulate, name)
        ends, times = (part, stages.parts) if stages.again else (stages.parts * part, 2)
        for kind in ("all-gather", "reduce-scatter"):
            yield Collective(PIPELINE_AXIS, kind, _sent(ends, stages.count), times * accumulate, name)
