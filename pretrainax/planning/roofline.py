"""Estimates the time of a step and the cost of a run from FLOPs, memory traffic and communication.

"Products" are matrix products. The estimate assumes:

- Products reach the share ATTAINABLE of the chip's peak FLOP/s. Products grouped by expert reach GROUPED times this
  share. On a GPU, reading and writing the operands takes additional time: a third of the time of a product of width
  768. A fused attention kernel skips masked blocks, which then take no time; "xla" does not skip them. Recomputation
  (by rematerialization, and by the backward pass of fused attention) takes time but does not count in an MFU. `mfu`
  follows PaLM's convention, which counts attention in full; `mfu_executed` counts only executed FLOPs.
- Between products, kernels read and write main memory, and this does not overlap with products. They access residuals
  of blocks, logits and the train state, each as often as compiled steps do (PASSES). For a compiled step, the bytes are
  the traffic of its kernels without products (`hlo.memory_traffic`), at the chip's full memory rate. On a TPU, the
  products of a compiled step take the time of their FLOPs or of their bytes, the longer of the two.
- Pipeline stages wait in the bubble: (P - 1) / M of the time of the layers (P stages, M parts of a microbatch). The
  gathers of a pipeline along `fsdp` are exposed: no computation overlaps with them.
- Without a pipeline, gathers and scatters along `fsdp` overlap with computation and memory access, up to the duration
  of these: gathers of parameters start early, and no computation waits for reduced gradients. All other collectives are
  exposed. In a compiled step, a collective is hidden if it starts before a product and ends after this product.
- A collective around a torus uses as many dimensions of the slice as its mesh axis covers (in logarithms). Between
  hosts, each GPU sends through one network port.

benchmarks/calibrate.py fits ATTAINABLE of a TPU, GROUPED and SPREAD to published runs (benchmarks/published.toml). All
of these runs are within SPREAD.
"""

import dataclasses
import math
from typing import NamedTuple, Optional

import jax

from pretrainax.config import Experiment, ModelConfig, RotaryPositions
from pretrainax.data.batch import lengths_of
from pretrainax.interop.teacher import teacher_of
from pretrainax.layers.attention_spec import PRODUCTS
from pretrainax.layers.attention_work import all_pairs
from pretrainax.layers.compute import blocks_per_iteration, compute_for
from pretrainax.models.active import predicted_vocabulary
from pretrainax.models.flops import (
    Attention,
    WorkOf,
    attention_flops,
    attention_fraction,
    attentions,
    executed_flops,
    expert_flops,
    flops_per_step,
    implementation_of,
    matrix_flops,
    other_flops,
    work_of,
)
from pretrainax.planning.activations import (
    SavedResidual,
    abstract_state,
    attention_specs,
    compute_itemsize,
    micro_rows,
    saved_residuals,
    shapes_of,
)
from pretrainax.planning.hlo import MemoryTraffic
from pretrainax.planning.memory import Memory, part_bytes
from pretrainax.planning.product_bytes import product_bytes
from pretrainax.planning.topologies import Topology
from pretrainax.planning.traffic import Collective
from pretrainax.sharding.axes import AXES, DATA_AXIS, FSDP_AXIS, LENGTH_AXIS, TENSOR_AXIS
from pretrainax.sharding.param_paths import is_stacked, parameter_names, stack_of
from pretrainax.sharding.stages import pipeline_stages

# Share of the peak FLOP/s that matrix products reach, by platform. GPU: others measured 790 of 990 TFLOP/s on an H100
# for a bfloat16 product of 8,192³.
ATTAINABLE = {"gpu": 0.8, "tpu": 0.62}
GROUPED = 0.75  # share of ATTAINABLE for products grouped by expert
# (minimum, maximum) of published step time / estimated step time, by platform, widened by a tenth. The largest ratio of
# GPUs is of H100s with a power limit of 500 W.
SPREAD = {"gpu": (0.9, 1.99), "tpu": (0.83, 1.2)}


class Passes(NamedTuple):
    """Counts how often kernels without matrix products read or write each byte of an array in a step, by kind of array.

    For example, with `logits=3.2` these kernels move 3.2 times the bytes of the logits.
    """

    block_residuals: float  # residuals of a block, except for attention
    attention_residuals: float  # residuals of attention: queries, keys, values, results
    pairs: float  # float32 logits of attention without a fused kernel; on a TPU also of attention with a bias
    dropped: float  # logits as for `pairs`, if attention weights have dropout: the backward pass reads them again
    row_bias: float  # logits with a position bias that differs by row, in addition to `pairs` or `dropped`
    rotated: float  # queries and keys in float32, with rotary positions
    logits: float  # logits of the loss, in the compute dtype
    state: float  # parameters, optimizer moments, moving averages and gradients
    stacked: float  # residuals of loops over layers: written into stacks and sliced out of the stacks
    factored: float  # parameters, with a factored optimizer, which reads gradients for sums of rows and columns
    layers: float  # parameters of layers outside loops: sliced from their stacks and cast to the compute dtype
    looped: float  # parameters of layers in a loop: sliced twice, and their gradients written into stacks
    experts: float  # parameters of experts; includes sending rows to experts and back


# Fitted to compiled steps of this repository's configs, for one H100 and one v5e (loops of 4 layers), as counted by
# benchmarks/traffic.py. benchmarks/lab_book.md has the method and the errors. Three GPU values are derived, not fitted:
# - `state`: AdamW reads parameters, gradients and two moments, and writes all of them except gradients. The gradient
#   norm reads the gradients once more. The 4 arrays therefore have 8 reads and writes.
# - `layers`: parameters of layers are read in float32 and written in half of the bytes.
# - `looped`: the copies that a loop makes add up to 5.
# The TPU value of `state` is not fitted either. `row_bias` is from DeBERTa, the only config with a bias that differs by
# row. `dropped` is from four steps with all layers.
PASSES = {
    "gpu": Passes(
        block_residuals=9.6,
        attention_residuals=3.6,
        pairs=11.3,
        dropped=11.3,
        row_bias=11.3,
        rotated=0.0,
        logits=3.2,
        state=2.0,
        stacked=4.7,
        factored=3.0,
        layers=1.5,
        looped=5.0,
        experts=4.2,
    ),
    "tpu": Passes(
        block_residuals=4.5,
        attention_residuals=4.5,
        pairs=7.7,
        dropped=4.9,
        row_bias=47.7,
        rotated=12.4,
        logits=5.9,
        state=1.6,
        stacked=1.8,
        factored=0.0,
        layers=0.0,
        looped=0.0,
        experts=0.0,
    ),
}
_VMEM = 2**27  # bytes of a TPU core's VMEM. Attention logits of a layer that fit in VMEM never go to main memory.
# Bytes of VMEM that are free for the residuals of a layer. Residuals that fit move to main memory only in the stacks.
_ROOM_FOR_A_LAYER = _VMEM // 2


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The estimated time of one step, and the resulting MFU, hours and price of the run."""

    flops: float  # model FLOPs of a step, over all devices, by PaLM's convention
    done: float  # the part of `flops` that is executed: attention kernels skip masked blocks
    compute: float  # seconds of matrix products
    memory: float  # seconds of memory access between products
    hidden: float  # seconds of communication that overlaps with `compute` and `memory`
    exposed: float  # seconds of communication that the devices wait for
    mfu: float  # model FLOPs utilization: `flops` per second / peak FLOP/s of all devices
    mfu_executed: float  # `done` per second / peak FLOP/s of all devices
    hours: float  # duration of the run
    price: Optional[float]  # price of the run in USD; None if the chip's price is not public
    spread: tuple[float, float]  # the entry of SPREAD for the platform

    @property
    def seconds(self) -> float:
        return max(self.compute + self.memory, self.hidden) + self.exposed

    @property
    def range(self) -> tuple[float, float]:
        """Returns the (minimum, maximum) expected seconds of a step.

        The bounds are the estimate times `spread`: the range of the ratio of published to estimated step time in
        published runs, widened by 10%.
        """
        least, most = self.spread
        return least * self.seconds, most * self.seconds


def estimate_time(
    experiment: Experiment,
    mesh_sizes: dict[str, int],
    topology: Topology,
    memory: Memory,
    sent: list[Collective],
    steps: Optional[int] = None,
    moved: Optional[MemoryTraffic] = None,
) -> Roofline:
    """Estimates the time of a step of `experiment` on a mesh, and the hours and price of the run.

    Args:
      memory: the memory estimate of the step.
      sent: the collectives of the step.
      steps: number of steps of the run; None: `experiment.train.steps`.
      moved: memory traffic of the compiled step; None: the function estimates the traffic.
    """
    chip, train, devices = topology.chip, experiment.train, topology.num_devices
    lengths, platform = lengths_of(shapes_of(experiment)), chip.platform
    work = work_of(attention_specs(experiment, mesh_sizes, platform), train.attention, platform)
    step = experiment.model, experiment.rows_per_update, lengths.inputs, lengths.targets
    teacher = teacher_of(experiment)
    stretch = pipeline_stages(experiment, mesh_sizes).stretch
    passes = experiment.passes
    flops, done = flops_per_step(*step, teacher, passes), executed_flops(*step, work, teacher, passes)
    compute = _product_flops(experiment, teacher, work, stretch) / (devices * chip.peak_flops * ATTAINABLE[platform])
    if moved is None:
        memory_time = memory_bytes_between_products(experiment, mesh_sizes, platform, memory) / chip.memory_rate
        operand_time = product_operands(experiment, mesh_sizes, platform) / chip.memory_rate
    else:
        memory_time = moved.besides_products / chip.memory_rate
        operand_time = (moved.total - moved.besides_products) / chip.memory_rate
    if not chip.is_tpu:
        compute += operand_time
    elif moved is not None:
        compute = max(compute, operand_time)
    links = {True: 0.0, False: 0.0}
    for one in sent:
        hidden = hidden_share(one)
        seconds = one.total / link_rate(one.axis, mesh_sizes, topology)
        links[True] += hidden * seconds
        links[False] += (1 - hidden) * seconds
    seconds = max(compute + memory_time, links[True]) + links[False]
    hours = seconds * (train.steps if steps is None else steps) / 3600
    return Roofline(
        flops=flops,
        done=done,
        compute=compute,
        memory=memory_time,
        hidden=links[True],
        exposed=links[False],
        mfu=flops / (seconds * devices * chip.peak_flops),
        mfu_executed=done / (seconds * devices * chip.peak_flops),
        hours=hours,
        price=chip.price and hours * devices * chip.price,
        spread=SPREAD[platform],
    )


def hidden_share(one: Collective) -> float:
    """Returns the share (0 to 1) of a collective's time that overlaps with matrix products.

    For a collective of a compiled step, this is the share of its runs that overlap. For an estimated collective, the
    rule is in the docstring of this module.
    """
    if one.overlapping is None:
        return float(one.axis == FSDP_AXIS and one.kind in ("all-gather", "reduce-scatter"))
    return one.overlapping / one.count


def _product_flops(experiment: Experiment, teacher: Optional[ModelConfig], work: WorkOf, stretch: float) -> float:
    """Returns the FLOPs of all matrix products of a step over all devices, including recomputation.

    Products grouped by expert count as the FLOPs that other products would execute in the same time. With remat "block"
    the forward pass of each layer runs twice; with "dots" only the products of attention run again. If the mesh splits
    the sequence, all devices wait for the device whose queries have the most keys.

    Args:
      teacher: config of the teacher model; None without a teacher.
      work: returns the work of an attention: the query-key pairs of each device, and recomputed products.
      stretch: time of the layers in the pipeline / time of the layers without a pipeline.
    """
    train, passes, lengths = experiment.train, experiment.passes, lengths_of(shapes_of(experiment))
    has_backward = passes > 1
    makes_again = has_backward and train.remat != "none"

    def products(one: Attention) -> float:
        pairs, recompute = work(one)
        count = PRODUCTS * attention_fraction(passes) + has_backward * again + 2 * makes_again
        return count * pairs.max() * len(pairs)

    model = experiment.model, lengths.inputs, lengths.targets
    blocks, outside_blocks = other_flops(*model)
    blocks += (1 / GROUPED - 1) * expert_flops(*model)
    again = (train.layer_forwards - 1) * blocks if has_backward else 0.0
    teacher_flops = 0.0 if teacher is None else executed_flops(teacher, 1, lengths.inputs, lengths.targets, work) / 3
    layers = matrix_flops(passes, blocks, 0.0) + again + attention_flops(*model, products)
    return experiment.rows_per_update * (stretch * layers + matrix_flops(passes, 0.0, outside_blocks) + teacher_flops)


def memory_bytes_between_products(
    experiment: Experiment, mesh_sizes: dict[str, int], platform: str, memory: Memory
) -> float:
    """Returns the estimated bytes that the kernels without matrix products read and write in one step, per device.

    Args:
      platform: "tpu" or "gpu".
      memory: the memory estimate of the step.
    """
    train, passes = experiment.train, PASSES[platform]
    plain = dataclasses.replace(experiment, train=dataclasses.replace(train, remat="none"))
    width = compute_itemsize(experiment, platform)
    arrays = [
        x
        for x in saved_residuals(plain, mesh_sizes, platform)
        if x.module != "loss"
        and (x.dtype != "float32" or width == 4)  # excludes attention logits and sums over the width of a token
    ]
    lengths = lengths_of(shapes_of(experiment))
    rows = micro_rows(experiment, mesh_sizes) / mesh_sizes[LENGTH_AXIS]
    layers = passes.stacked * _stacked_residuals(experiment, mesh_sizes, platform)
    attention = _of_attention(experiment, mesh_sizes, platform, rows / mesh_sizes[TENSOR_AXIS])
    layers += passes.dropped * attention.dropped
    if platform == "gpu" or train.remat == "block" or _layer_residuals(arrays) > _ROOM_FOR_A_LAYER:
        layers += sum(
            x.bytes * (passes.attention_residuals if x.module.endswith("attention") else passes.block_residuals)
            for x in arrays
        )
        layers += (
            passes.pairs * attention.pairs + passes.row_bias * attention.row_bias + passes.rotated * attention.rotated
        )
    logits = rows * lengths.targets * predicted_vocabulary(experiment.model) / mesh_sizes[TENSOR_AXIS]
    each = pipeline_stages(experiment, mesh_sizes).stretch * layers + passes.logits * width * logits
    parts = _of_layers(experiment, mesh_sizes, platform)
    each += passes.layers * parts.unrolled + passes.looped * parts.looped + passes.experts * parts.experts
    state = passes.state * (memory.parameters + memory.optimizer + memory.ema + memory.gradients)
    if memory.optimizer < memory.parameters / 10:
        state += passes.factored * memory.parameters
    return state + train.accumulate * experiment.optimizer.gradients_per_update * each


def product_operands(experiment: Experiment, mesh_sizes: dict[str, int], platform: str) -> float:
    """Returns the estimated bytes that matrix products of layers read and write in one step, per device.

    Each pass (forward, recomputation, or either of two products per backward pass) moves the bytes of a forward pass.
    """
    passes = experiment.passes + (experiment.train.layer_forwards - 1) * (experiment.passes > 1)
    return passes * product_bytes(experiment, mesh_sizes, platform)


def _layer_residuals(arrays: list[SavedResidual]) -> float:
    """Returns the bytes of the residuals of one layer, for the stack whose layers have the most bytes."""
    stacks: dict[str, float] = {}
    for x in arrays:
        if (stack := stack_of(x.module)) is not None and x.shape:
            stacks[stack] = stacks.get(stack, 0.0) + x.bytes / x.shape[0]  # [L, …]
    return max(stacks.values(), default=0.0)


def _stacked_residuals(experiment: Experiment, mesh_sizes: dict[str, int], platform: str) -> float:
    """Returns the bytes of residuals that loops over layers save per microbatch; 0 if all layers are unrolled."""
    looped = _looped_stacks(experiment, platform)
    residuals = saved_residuals(experiment, mesh_sizes, platform) if looped else ()
    return sum(x.bytes for x in residuals if any(f"{name}/blocks" in x.module for name in looped))


def _looped_stacks(experiment: Experiment, platform: str) -> list[str]:
    """Returns the names of the stacks whose layers run in a loop."""
    compute, stacks = compute_for(experiment.train), experiment.model.stacks.items()
    return [name for name, one in stacks if blocks_per_iteration(compute, one.num_layers, platform) < one.num_layers]


class _Layers(NamedTuple):
    """Bytes of the parameters of layers, per device."""

    unrolled: int  # layers outside loops
    looped: int  # layers that run in a loop
    experts: int  # experts, in both kinds of layers


def _of_layers(experiment: Experiment, mesh_sizes: dict[str, int], platform: str) -> _Layers:
    params, loops = abstract_state(experiment, mesh_sizes).params, _looped_stacks(experiment, platform)
    named = zip(parameter_names(params), jax.tree.leaves(params), strict=True)
    layers = {name: part_bytes(x, x.sharding) for name, x in named if is_stacked(name)}
    looped = sum(size for name, size in layers.items() if any(f"{loop}/" in name for loop in loops))
    experts = sum(size for name, size in layers.items() if "/experts_" in name)
    return _Layers(sum(layers.values()) - looped, looped, experts)


class _Attention(NamedTuple):
    """Bytes of float32 arrays in the attentions of all layers; the fields are explained at `Passes`."""

    pairs: float
    dropped: float
    row_bias: float
    rotated: float


def _of_attention(experiment: Experiment, mesh_sizes: dict[str, int], platform: str, rows: float) -> _Attention:
    """Returns the bytes of attention logits in main memory, and of queries and keys with rotary positions.

    Args:
      rows: number of batch rows.
    """
    specs, lengths = attention_specs(experiment, mesh_sizes, platform), lengths_of(shapes_of(experiment))
    implementation, is_tpu = implementation_of(specs, experiment.train.attention, platform), platform == "tpu"
    model, pairs, dropped, by_row, rotated = experiment.model, 0.0, 0.0, 0.0, 0.0
    for one in attentions(model, lengths.inputs, lengths.targets):
        name, spec = implementation(one)
        layer = 4 * rows * one.heads * float(all_pairs(spec).sum())
        if name == "xla" and spec.dropout_rate:
            dropped += one.layers * layer * (not is_tpu or layer >= _ROOM_FOR_A_LAYER)
        elif name == "xla" and not (is_tpu and layer < _VMEM) or is_tpu and spec.bias != "none":
            pairs += one.layers * layer
        by_row += (spec.bias == "by_row") * one.layers * layer
        if isinstance(model.position, RotaryPositions):
            width = (one.heads + one.kv_heads) * model.position.rotated_dims(one.head_dim)
            rotated += 4 * rows * one.layers * width * one.queries
    return _Attention(pairs, dropped, by_row, rotated)


def link_rate(axis: str, mesh_sizes: dict[str, int], topology: Topology) -> float:
    """Returns the bytes per second that a device can send along a mesh axis.

    Args:
      axis: a mesh axis, several axes ("data+sequence"), or "slices" for the network between slices.
      mesh_sizes: size of each mesh axis, {axis of AXES: size}.
    """
    chip = topology.chip
    if axis == "slices":
        return chip.network_rate
    sizes = dict(mesh_sizes) | {DATA_AXIS: mesh_sizes[DATA_AXIS] // topology.slices}
    group = math.prod(sizes[name] for name in axis.split("+"))
    if chip.is_tpu:
        total = math.prod(sizes.values())
        dimensions = max(1, round(chip.torus * math.log(group) / math.log(total)))
        return chip.link_rate * dimensions / chip.torus
    inside = math.prod(sizes[name] for name in AXES[AXES.index(axis.split("+")[-1]) + 1 :])
    on_a_host = min(group, max(1, topology.shape[1] // inside))  # devices of the group on one host
    return chip.link_rate if on_a_host == group else min(chip.link_rate, on_a_host * chip.network_rate)
