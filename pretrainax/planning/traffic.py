"""Estimates the collectives (communication between devices) of a train step from the mesh and the model.

NOTE On slices whose links wrap around in all dimensions (v5p 4x4x4 and larger, v6e 16x16), libtpu (0.0.42) replaces a
gather or a scatter over all chips with an all-reduce around the whole torus. The all-reduce sends twice the bytes, and
no computation overlaps with it, not even with the flags that should preserve reduce-scatters. Collectives over only
some of the slice's chips are unchanged. Example: 4 layers of LLaMA 3 8B on v5p:4x4x4 send 30.9 GB per device with fsdp
64, but 15.5 GB with data 2 and fsdp 32. The search therefore prefers meshes such as data 2 and fsdp 32. On v6e:16x16
with fsdp 256, the scatters and small gathers of the layers become all-reduces; with data 2 and fsdp 128 they do not.
Large gathers on v6e:16x16 stay gathers, but the estimate counts them as all-reduces. The estimate ignores two effects:
libtpu also replaces collectives of small arrays on v5e, and on v6e it gathers token embeddings once and sums their
whole gradients.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Optional

import jax

from pretrainax.config import Experiment, ModelConfig
from pretrainax.data.batch import lengths_of
from pretrainax.layers.feed_forward import feed_forwards_of, layer_groups
from pretrainax.planning.activations import abstract_frozen, abstract_state, compute_itemsize, micro_rows, shapes_of
from pretrainax.planning.optimizer_work import matrix_work
from pretrainax.planning.topologies import Topology
from pretrainax.sharding.axes import (
    AXES,
    DATA_AXIS,
    EXPERT_AXIS,
    LENGTH_AXIS,
    PIPELINE_AXIS,
    TENSOR_AXIS,
    TOKEN_AXES,
)
from pretrainax.sharding.param_paths import PyTree, is_stacked, parameter_names, stack_of
from pretrainax.sharding.rules import gathered_axes
from pretrainax.sharding.stages import pipeline_stages


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that a device executes `count` times per step; identical collectives are merged into one."""

    axis: str  # the mesh axis of the groups; "data+fsdp" if the groups span both axes
    kind: str  # all-gather | reduce-scatter | all-reduce | all-to-all | collective-permute
    # bytes that a device sends per execution around a ring: V (n - 1) / n for an array of V bytes over n devices; twice
    # as many for an all-reduce, which is a reduce-scatter followed by an all-gather
    bytes: int
    count: int  # executions per step
    where: str  # path of the model's module, "encoder/blocks/mlp/up"
    # number of executions that overlap with a matrix multiplication: they start before it and end after it. None for
    # an estimate whose overlap is unknown.
    overlapping: Optional[int] = dataclasses.field(default=None, compare=False)

    @property
    def total(self) -> int:
        """Returns the number of bytes that a device sends per step."""
        return self.bytes * self.count


def collectives(
    experiment: Experiment, mesh_sizes: dict[str, int], topology: Optional[Topology] = None
) -> list[Collective]:
    """Estimates the collectives of one update on a TPU or GPU.

    The estimate counts, by mesh axis:

    - `data`, `slices`: all-reduces of gradients, in each microbatch.
    - `fsdp`: gathers of the parameters for the forward pass, the backward pass and each recomputation; scatters of the
      gradients in float32, in each microbatch.
    - `tensor`: all-reduces after each sublayer, in both the forward and the backward pass.
    - `sequence`: gathers of keys and values, and scatters of their gradients.
    - `expert`: all-to-alls that send tokens to the experts and back.
    - `pipeline`: transfers of hidden states between stages, a gather before the first stage and a scatter after the
      last stage.
    - all axes: transfers of an optimizer that shares matrices between devices (optim/sharded_stacks.py).

    The estimate excludes scalars, gradient norms, and the sums of the softmax over a sharded vocabulary.

    Args:
      mesh_sizes: size of each mesh axis, {axis of AXES: size}.
      topology: the devices. If None, the estimate ignores that libtpu replaces some gathers and scatters with
        all-reduces (see the module docstring).
    """
    width = compute_itemsize(experiment, "tpu")
    frozen = _parameter_collectives(experiment, mesh_sizes, abstract_frozen(experiment, mesh_sizes), width)
    estimates = [
        *_parameter_collectives(experiment, mesh_sizes, abstract_state(experiment, mesh_sizes).params, width),
        *(c for c in frozen if c.kind == "all-gather"),  # frozen parameters have no gradients
        *_tensor_collectives(experiment, mesh_sizes, width),
        *_sequence_collectives(experiment, mesh_sizes, width),
        *_expert_collectives(experiment, mesh_sizes, width),
        *_pipeline_collectives(experiment, mesh_sizes, width),
        *_optimizer_collectives(experiment, mesh_sizes),
    ]
    wraps = topology is not None and topology.is_torus
    return [_as_torus_all_reduce(c, mesh_sizes, topology) if wraps else c for c in estimates if c.bytes]


def _as_torus_all_reduce(collective: Collective, mesh_sizes: dict[str, int], topology: Topology) -> Collective:
    """Converts a gather or scatter to the all-reduce with which libtpu replaces it on a slice that wraps around.

    Collectives over only some of the slice's chips, and collectives of other kinds, are returned unchanged.
    """
    group_size = math.prod(mesh_sizes[axis] for axis in collective.axis.split("+") if axis in mesh_sizes)
    if collective.kind not in ("all-gather", "reduce-scatter") or group_size < topology.num_devices // topology.slices:
        return collective
    return dataclasses.replace(collective, kind="all-reduce", bytes=2 * collective.bytes)


def _bytes_sent(size: float, devices: int, factor: int = 1) -> int:
    """Computes the bytes that a device sends in a ring collective: factor * size * (devices - 1) / devices."""
    return round(factor * size * (devices - 1) / devices)


def _gathers_per_microbatch(experiment: Experiment, sizes: dict[str, int]) -> int:
    """Returns how many times per microbatch the parameters of a layer are gathered.

    The parameters are gathered for each forward pass, including recomputation, and for the backward pass.
    """
    return experiment.train.layer_forwards + 1 + bool(pipeline_stages(experiment, sizes).recompute)


def _parameter_collectives(
    experiment: Experiment, sizes: dict[str, int], params: PyTree, width: int
) -> Iterator[Collective]:
    """Yields the collectives of parameters and gradients for each stack of layers and each remaining top-level module.

    Args:
      params: abstract parameters (shapes and shardings).
      width: bytes per element of the compute dtype.
    """
    accumulate, slices = experiment.train.accumulate, experiment.mesh.slices
    # (stack, axes along which the parameter is gathered, axes that split it) -> [layers, elements per layer]
    stacks: dict[tuple[str, tuple[str, ...], frozenset[str]], list[int]] = {}
    for name, x, gathered in zip(parameter_names(params), jax.tree.leaves(params), gathered_axes(params), strict=True):
        stack = stack_of(name)
        gathered = tuple(axis for axis in gathered if sizes[axis] > 1)
        split_by = jax.tree.leaves(tuple(x.sharding.spec))
        shard_shape = x.sharding.shard_shape(x.shape)
        module, layers = (stack, shard_shape[0]) if stack else (name.split("/")[0], 1)
        entry = stacks.setdefault((module, gathered, frozenset(split_by) & {*TOKEN_AXES}), [layers, 0])
        entry[1] += math.prod(shard_shape) * math.prod(sizes[axis] for axis in gathered) // layers
    for (module, gathered, split_by), (layers, elements) in stacks.items():
        runs, shards, gather_axis = layers * accumulate, math.prod(sizes[axis] for axis in gathered), "+".join(gathered)
        if shards > 1:
            passes, element_bytes, overlapped = (
                _gathers_per_microbatch(experiment, sizes) if is_stacked(module) else 2,
                width,
                None,
            )
            if is_stacked(module) and sizes[PIPELINE_AXIS] > 1:
                # gathered before the first tick, in float32, and scattered after the last tick
                passes, element_bytes, overlapped = 1, 4, 0
            sent = _bytes_sent(elements * element_bytes, shards)
            yield Collective(gather_axis, "all-gather", sent, runs * passes, module, overlapped)
            yield Collective(gather_axis, "reduce-scatter", _bytes_sent(elements * 4, shards), runs, module, overlapped)
        shard_shape = 4 * elements / shards
        # The gradient is summed over each mesh axis that splits the tokens but not the parameter.
        axes = {
            axis: sizes[axis] // (slices if axis == DATA_AXIS else 1) for axis in TOKEN_AXES if axis not in split_by
        }
        group = math.prod(axes.values())
        axis_names = "+".join(axis for axis in AXES if axes.get(axis, 1) > 1)
        yield Collective(axis_names, "all-reduce", _bytes_sent(shard_shape, group, 2), runs, module)
        # Between slices, each device sends its shard of the gradient that was summed within its slice.
        yield Collective("slices", "all-reduce", _bytes_sent(shard_shape / group, slices, 2), runs, module)


def _stacks(experiment: Experiment) -> list[tuple[ModelConfig, int, int]]:
    """Returns (config, tokens per sequence, sublayers per layer) for each of the model's one or two stacks."""
    lengths = lengths_of(shapes_of(experiment))
    return list(zip(experiment.model.stacks.values(), (lengths.inputs, lengths.targets), (2, 3), strict=False))


def _layer_rows(experiment: Experiment, sizes: dict[str, int]) -> float:
    """Computes the rows per microbatch that a device's layers process, including the rows of the pipeline bubble."""
    return micro_rows(experiment, sizes) * pipeline_stages(experiment, sizes).compute_factor


def _tensor_collectives(experiment: Experiment, sizes: dict[str, int], width: int) -> Iterator[Collective]:
    """Yields the all-reduces along `tensor`: after each sublayer in the forward pass, before it in the backward pass.

    Source: Shoeybi et al. 2019, section 3.
    """
    rows, accumulate, stacks = _layer_rows(experiment, sizes), experiment.train.accumulate, _stacks(experiment)
    for stack, length, sublayers in stacks:
        hidden_states = rows * length / sizes[LENGTH_AXIS] * stack.d_model * width
        groups = layer_groups(stack, stack.num_layers)
        parallel_sublayers = sum(len(group.numbers) * (len(feed_forwards_of(group.config)) - 1) for group in groups)
        forward = sublayers * stack.num_layers + parallel_sublayers
        backward = stack.num_layers if stack.parallel else forward  # parallel sublayers read the same norm
        count = (forward * (_gathers_per_microbatch(experiment, sizes) - 1) + backward) * accumulate
        bytes_sent = _bytes_sent(hidden_states, sizes[TENSOR_AXIS], 2)
        yield Collective(TENSOR_AXIS, "all-reduce", bytes_sent, count, f"{stack.family}/blocks")
    if len(stacks) > 1:  # the gradient of the encoder's output, from the keys and values of each decoder layer
        (encoder, length, _), (decoder, _, _) = stacks
        encoded = rows * length / sizes[LENGTH_AXIS] * encoder.d_model * width
        bytes_sent, count = _bytes_sent(encoded, sizes[TENSOR_AXIS], 2), decoder.num_layers * accumulate
        yield Collective(TENSOR_AXIS, "all-reduce", bytes_sent, count, f"{decoder.family}/blocks/cross_attention")


def _sequence_collectives(experiment: Experiment, sizes: dict[str, int], width: int) -> Iterator[Collective]:
    """Yields the gathers of keys and values along the mesh axis `sequence`, and the scatters of their gradients."""
    rows, inputs = _layer_rows(experiment, sizes), lengths_of(shapes_of(experiment)).inputs
    for stack, length, sublayers in _stacks(experiment):
        scatters = stack.num_layers * experiment.train.accumulate
        gathers = scatters * _gathers_per_microbatch(experiment, sizes)
        for name, read in (("self", length), ("cross", inputs))[: sublayers - 1]:
            keys_and_values = 2 * rows * read * stack.kv_heads * stack.dim_per_head / sizes[TENSOR_AXIS] * width
            sent, where = _bytes_sent(keys_and_values, sizes[LENGTH_AXIS]), f"{stack.family}/blocks/{name}_attention"
            yield Collective(LENGTH_AXIS, "all-gather", sent, gathers, where)
            yield Collective(LENGTH_AXIS, "reduce-scatter", sent, scatters, where)


def _expert_collectives(experiment: Experiment, sizes: dict[str, int], width: int) -> Iterator[Collective]:
    """Yields the all-to-alls that send tokens to experts on other devices and back, and likewise for the gradients."""
    settings = experiment.model.experts
    if settings is None:
        return
    rows, accumulate = micro_rows(experiment, sizes), experiment.train.accumulate
    for stack, length, _ in _stacks(experiment):
        tokens = settings.top_k * (settings.capacity or 1.0) * rows * length / sizes[LENGTH_AXIS]
        bytes_sent = _bytes_sent(tokens * stack.d_model * width, sizes[EXPERT_AXIS])
        _, with_experts = layer_groups(stack, stack.num_layers)
        count = 2 * _gathers_per_microbatch(experiment, sizes) * len(with_experts.numbers) * accumulate
        yield Collective(EXPERT_AXIS, "all-to-all", bytes_sent, count, f"{stack.family}/blocks/mlp")


def _pipeline_collectives(experiment: Experiment, sizes: dict[str, int], width: int) -> Iterator[Collective]:
    """Yields the transfers of hidden states between pipeline stages, into the first stage and out of the last stage.

    A transfer to the next stage occurs at each tick. Before the first stage and after the last stage, all pipeline
    microbatches are transferred at once, or separately with the 1F1B schedule. Gradients take the same paths backwards.
    """
    stages, accumulate = pipeline_stages(experiment, sizes), experiment.train.accumulate
    if stages.count == 1:
        return
    for stack, length, _ in _stacks(experiment):
        name, microbatch_bytes = stack.family, stages.rows * length / sizes[LENGTH_AXIS] * stack.d_model * width
        yield Collective(
            PIPELINE_AXIS, "collective-permute", round(microbatch_bytes), 2 * stages.ticks * accumulate, name
        )
        if stages.recompute:
            input_bytes = _bytes_sent(microbatch_bytes, stages.count, 2)
            yield Collective(PIPELINE_AXIS, "all-reduce", input_bytes, 2 * stages.ticks * accumulate, name)
        end_bytes, transfers = (
            (microbatch_bytes, stages.parts) if stages.recompute else (stages.parts * microbatch_bytes, 2)
        )
        for kind in ("all-gather", "reduce-scatter"):
            yield Collective(PIPELINE_AXIS, kind, _bytes_sent(end_bytes, stages.count), transfers * accumulate, name)


def _optimizer_collectives(experiment: Experiment, sizes: dict[str, int]) -> Iterator[Collective]:
    """Yields the collectives with which an optimizer shares matrices between devices; no computation overlaps."""
    for work in matrix_work(experiment, sizes):
        for transfer in work.stack.transfers(sizes):
            devices = math.prod(sizes[axis] for axis in transfer.axes)
            sent = _bytes_sent(work.itemsize * transfer.elements, devices)
            yield Collective("+".join(transfer.axes), transfer.kind, sent, transfer.count, "optimizer", overlapping=0)
