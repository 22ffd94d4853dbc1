"""Estimates the time of a step and the cost of a run from FLOPs, memory traffic and communication.

"Products" are matrix multiplications. The estimate assumes:

- Products reach the fraction ATTAINABLE of the chip's peak FLOP/s. Products grouped by expert reach GROUPED times this
  fraction. On a GPU, reading and writing the operands takes additional time: for a product of width 768, a third of the
  product's own time. A fused attention kernel skips masked blocks, which then take no time; "xla" does not skip them.
  The head computes whole tiles of its columns (ALIGNMENT).
  Recomputation (by rematerialization, and by the backward pass of fused attention) takes time but does not count toward
  an MFU. `mfu` follows PaLM's convention, which counts attention in full; `mfu_executed` counts only executed FLOPs.
- Between products, other kernels read and write main memory, without overlapping with the products. They access block
  residuals, logits and the train state, each as often as in compiled steps (PASSES). For a compiled step, the estimate
  takes the actual traffic of its kernels without products (`hlo.memory_traffic`), at the chip's full memory rate. On a
  TPU, the products of a compiled step take the time of their FLOPs or of their bytes, whichever is longer.
- Pipeline stages idle in the bubble for (P - 1) / M of the layers' time (P stages, M pipeline microbatches). With a
  pipeline, the gathers along `fsdp` are exposed: no computation overlaps with them.
- Without a pipeline, gathers and scatters along `fsdp` overlap with computation and memory access, and only their
  excess time is exposed: gathers of parameters start early, and no computation waits for reduced gradients. All other
  collectives are exposed. In a compiled step, a collective is hidden if it starts before a product and ends after this
  product.
- A collective around a torus uses as many dimensions of the slice as its mesh axis covers (in logarithms). Between
  hosts, each GPU sends through one network port.

benchmarks/calibrate.py fits ATTAINABLE of a TPU, GROUPED and SPREAD to published runs (benchmarks/published.toml). The
ratio of measured to estimated step time is within SPREAD for all of these runs.
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
from pretrainax.models.active import logits_per_target, predicted_vocabulary
from pretrainax.models.flops import (
    Attention,
    WorkOf,
    attention_flops,
    attentions,
    executed_flops,
    expert_flops,
    flops_per_step,
    implementation_of,
    other_flops,
    update_cost,
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
    shard_experiment,
)
from pretrainax.planning.hlo import MemoryTraffic
from pretrainax.planning.memory import Memory, part_bytes
from pretrainax.planning.optimizer_work import optimizer_flops, optimizer_operands
from pretrainax.planning.product_bytes import product_bytes
from pretrainax.planning.topologies import Topology
from pretrainax.planning.traffic import Collective
from pretrainax.runtime.chips import Chip
from pretrainax.sharding.axes import AXES, DATA_AXIS, LENGTH_AXIS, PARAMETER_AXES, TENSOR_AXIS
from pretrainax.sharding.param_paths import is_stacked, parameter_names, stack_of
from pretrainax.sharding.stages import pipeline_stages

# Fraction of the peak FLOP/s that matrix multiplications reach, by platform. GPU: published measurements on an H100 are
# 790 of 990 TFLOP/s for a bfloat16 matmul of 8,192³.
ATTAINABLE = {"gpu": 0.8, "tpu": 0.62}
GROUPED = 0.75  # fraction of ATTAINABLE that matmuls grouped by expert reach
# (minimum, maximum) of published step time / estimated step time, by platform, widened by 10 %. The largest ratio for
# GPUs comes from H100s with a power limit of 500 W.
SPREAD = {"gpu": (0.9, 1.99), "tpu": (0.83, 1.2)}


class Passes(NamedTuple):
    """The number of times per step that kernels without matmuls access each byte of an array, by kind of array.

    An access is a read or a write. For example, `logits=3.2` means that these kernels move 3.2 times the size of the
    logits.
    """

    block_residuals: float  # residuals of a block, except for attention
    attention_residuals: float  # residuals of attention: queries, keys, values, outputs
    pairs: float  # float32 logits of attention without a fused kernel; on a TPU also of attention with a bias
    dropped: float  # as `pairs`, for attention with dropout: the backward pass reads the logits again
    row_bias: float  # logits with a position bias that differs by batch row, in addition to `pairs` or `dropped`
    rotated: float  # queries and keys in float32, if the model has rotary position embeddings
    logits: float  # logits of the loss, in the compute dtype
    state: float  # parameters, optimizer moments, moving averages and gradients
    stacked: float  # residuals of loops over layers: written into stacked arrays and sliced out of them
    factored: float  # parameters, if the optimizer is factored: it reads gradients to sum their rows and columns
    layers: float  # parameters of layers outside loops: sliced from their stacks and cast to the compute dtype
    looped: float  # parameters of layers in a loop: sliced twice, and their gradients written into stacks
    experts: float  # parameters of experts; includes sending tokens to experts and back


# Fitted to compiled steps of this repository's configs, for one H100 and one v5e (loops of 4 layers), as counted by
# benchmarks/traffic.py. benchmarks/lab_book.md has the method and the errors. Three GPU values are derived, not fitted:
# - `state`: AdamW reads parameters, gradients and two moments, and writes all of them except gradients. The gradient
#   norm reads the gradients once more. The 4 arrays therefore have 8 reads and writes.
# - `layers`: parameters of layers are read in float32 and written in bfloat16, which is half of the bytes.
# - `looped`: the copies that a loop makes add up to 5 passes.
# The TPU value of `state` is not fitted either. `row_bias` comes from DeBERTa, the only config with a bias that differs
# by batch row. `dropped` comes from four compiled steps that have all layers.
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
# Multiple of which the sizes of a product should be: lanes of a TPU's matrix unit, tiles of a GPU's tensor cores.
ALIGNMENT = {"tpu": 128, "gpu": 64}
_VMEM = 2**27  # bytes of a TPU core's VMEM. Attention logits of a layer that fit in VMEM never go to main memory.
# Bytes of VMEM that are free for the residuals of a layer. Residuals that fit are written to main memory only as part
# of the stacked residuals of a loop.
_LAYER_VMEM_BYTES = _VMEM // 2


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The estimated time of one step, and the resulting MFU, hours and price of the run."""

    flops: float  # model FLOPs of a step, over all devices, by PaLM's convention
    executed_flops: float  # executed FLOPs: less than `flops` if attention kernels skip masked blocks
    compute: float  # seconds of matrix multiplications
    memory: float  # seconds of memory access between matrix multiplications
    hidden: float  # seconds of communication that overlaps with `compute` and `memory`
    exposed: float  # seconds of communication that the devices wait for
    mfu: float  # model FLOPs utilization: `flops` per second, divided by the peak FLOP/s of all devices
    mfu_executed: float  # `executed_flops` per second, divided by the peak FLOP/s of all devices
    hours: float  # duration of the run
    price: Optional[float]  # price of the run in USD; None if the chip's price is not public
    spread: tuple[float, float]  # the entry of SPREAD for the platform

    @property
    def seconds(self) -> float:
        """Returns the estimated seconds of a step.

        Hidden communication adds only the time by which it exceeds `compute` and `memory`.
        """
        return max(self.compute + self.memory, self.hidden) + self.exposed

    @property
    def range(self) -> tuple[float, float]:
        """Returns the (minimum, maximum) expected seconds of a step.

        The bounds are the estimate times the two factors in `spread`. These factors are the smallest and the largest
        ratio of actual to estimated step time among published runs, widened by 10%.
        """
        low, high = self.spread
        return low * self.seconds, high * self.seconds


def estimate_time(
    experiment: Experiment,
    mesh_sizes: dict[str, int],
    topology: Topology,
    memory: Memory,
    sent: list[Collective],
    steps: Optional[int] = None,
    traffic: Optional[MemoryTraffic] = None,
) -> Roofline:
    """Estimates the time of a step of `experiment` on a mesh, and the hours and price of the run.

    Args:
      memory: the memory estimate of the step.
      sent: the collectives of the step.
      steps: number of steps of the run. Defaults to `experiment.train.steps`.
      traffic: memory traffic of the compiled step. If None, the memory traffic is estimated.
    """
    chip, train, devices = topology.chip, experiment.train, topology.num_devices
    lengths, platform = lengths_of(shapes_of(experiment)), chip.platform
    work = work_of(attention_specs(experiment, mesh_sizes, platform), train.attention, platform)
    model_and_batch = experiment.model, experiment.rows_per_update, lengths.inputs, lengths.targets
    teacher, cost = teacher_of(experiment), update_cost(experiment)
    stretch = pipeline_stages(experiment, mesh_sizes).relative_layer_time
    flops = flops_per_step(*model_and_batch, teacher, cost)
    executed = executed_flops(*model_and_batch, work, teacher, cost)
    product_flops = _product_flops(experiment, teacher, work, stretch, chip, mesh_sizes[TENSOR_AXIS]) / devices
    product_flops += optimizer_flops(experiment, mesh_sizes, platform)
    compute = product_flops / (chip.peak_flops * ATTAINABLE[platform])
    if traffic is None:
        memory_time = memory_bytes_between_products(experiment, mesh_sizes, platform, memory) / chip.memory_rate
        operand_time = product_operands(experiment, mesh_sizes, platform) / chip.memory_rate
    else:
        memory_time = traffic.bytes_outside_matmuls / chip.memory_rate
        operand_time = (traffic.total - traffic.bytes_outside_matmuls) / chip.memory_rate
    if not chip.is_tpu:
        compute += operand_time
    elif traffic is not None:
        compute = max(compute, operand_time)
    link_seconds = {True: 0.0, False: 0.0}
    for collective in sent:
        fraction = hidden_fraction(collective)
        seconds = collective.total / link_rate(collective.axis, mesh_sizes, topology)
        link_seconds[True] += fraction * seconds
        link_seconds[False] += (1 - fraction) * seconds
    seconds = max(compute + memory_time, link_seconds[True]) + link_seconds[False]
    hours = seconds * (train.steps if steps is None else steps) / 3600
    return Roofline(
        flops=flops,
        executed_flops=executed,
        compute=compute,
        memory=memory_time,
        hidden=link_seconds[True],
        exposed=link_seconds[False],
        mfu=flops / (seconds * devices * chip.peak_flops),
        mfu_executed=executed / (seconds * devices * chip.peak_flops),
        hours=hours,
        price=chip.price and hours * devices * chip.price,
        spread=SPREAD[platform],
    )


def hidden_fraction(one: Collective) -> float:
    """Computes the fraction (0 to 1) of a collective's time that overlaps with matrix multiplications.

    For a collective of a compiled step, this is the fraction of its executions that overlap. For an estimated
    collective, it follows the rule in the docstring of this module.
    """
    if one.overlapping is None:
        return float({*one.axis.split("+")} <= {*PARAMETER_AXES} and one.kind in ("all-gather", "reduce-scatter"))
    return one.overlapping / one.count


def tile_padding(columns: float, platform: str) -> float:
    """Returns the columns that a product computes, in whole tiles, divided by its columns; 1 for no columns."""
    multiple = ALIGNMENT[platform]
    return math.ceil(columns / multiple) * multiple / columns if columns else 1.0


def _product_flops(
    experiment: Experiment, teacher: Optional[ModelConfig], work: WorkOf, stretch: float, chip: Chip, shards: int
) -> float:
    """Computes the FLOPs of all matrix multiplications of a step over all devices, including recomputation.

    Products grouped by expert are slower, and 8-bit products faster, so they count as the FLOPs that other products
    would execute in the same time. With remat "block", the forward pass of each layer runs twice. With "dots", only the
    products of attention run again. If the sequence is sharded, all devices wait for the device whose queries have the
    most keys.

    Args:
      teacher: config of the teacher model, or None if the run has no teacher.
      work: function that maps a group of attention layers to its `Work` (query-key pairs, recomputed products).
      stretch: time of the layers with the pipeline, divided by their time without a pipeline.
      chip: the chip, whose peak for `train.products` applies to linear layers, experts and heads.
      shards: number of devices that share the columns of the head.
    """
    train, cost, lengths = experiment.train, update_cost(experiment), lengths_of(shapes_of(experiment))
    has_backward = cost.blocks > 1
    makes_again = has_backward and train.remat != "none"

    def products(one: Attention) -> float:
        pairs, recompute = work(one)
        count = PRODUCTS * cost.attention(one) + has_backward * recompute + 2 * makes_again
        return count * pairs.max() * len(pairs)

    tokens, with_virtual = (lengths.inputs, lengths.targets), cost.lengths(lengths.inputs, lengths.targets)
    model = experiment.model
    _, outside_blocks = other_flops(model, *tokens)
    experts = expert_flops(model, *with_virtual)
    slower_experts = (1 / GROUPED - 1) * experts
    again = (train.layer_forwards - 1) * (other_flops(model, *with_virtual)[0] + slower_experts) * has_backward
    teacher_flops = 0.0 if teacher is None else executed_flops(teacher, 1, lengths.inputs, lengths.targets, work) / 3
    layers = cost.matrices(model, *tokens) + cost.blocks * slower_experts + again
    eight_bit_flops = other_flops(model, *with_virtual)[0] + slower_experts
    eight_bit_flops *= cost.blocks + (train.layer_forwards - 1) * has_backward
    layers -= (1 - chip.peak_flops / chip.product_flops(train.products)) * eight_bit_flops
    outside_blocks *= tile_padding(predicted_vocabulary(model) / shards, chip.platform)
    outside_blocks *= chip.peak_flops / chip.product_flops(train.head_products)
    layers += attention_flops(model, *with_virtual, products)
    per_row = stretch * layers + cost.heads * outside_blocks + teacher_flops
    return experiment.rows_per_update * per_row + cost.per_update


def memory_bytes_between_products(
    experiment: Experiment, mesh_sizes: dict[str, int], platform: str, memory: Memory
) -> float:
    """Estimates the bytes per device that kernels without matrix multiplications read and write in one step.

    Args:
      platform: "tpu" or "gpu".
      memory: the memory estimate of the step.
    """
    train, passes = experiment.train, PASSES[platform]
    without_remat = dataclasses.replace(experiment, train=dataclasses.replace(train, remat="none"))
    width = compute_itemsize(experiment, platform)
    residuals = [
        x
        for x in saved_residuals(without_remat, mesh_sizes, platform)
        if x.module != "loss"
        and (
            x.dtype != "float32" or width == 4
        )  # excludes float32 arrays: attention logits and sums over the model width
    ]
    lengths = lengths_of(shapes_of(experiment))
    rows = micro_rows(experiment, mesh_sizes) / mesh_sizes[LENGTH_AXIS]
    block_bytes = passes.stacked * _stacked_residuals(experiment, mesh_sizes, platform)
    attention = _attention_bytes(experiment, mesh_sizes, platform, rows / mesh_sizes[TENSOR_AXIS])
    block_bytes += passes.dropped * attention.dropped
    if platform == "gpu" or train.remat == "block" or _layer_residuals(residuals) > _LAYER_VMEM_BYTES:
        block_bytes += sum(
            x.bytes * (passes.attention_residuals if x.module.endswith("attention") else passes.block_residuals)
            for x in residuals
        )
        block_bytes += (
            passes.pairs * attention.pairs + passes.row_bias * attention.row_bias + passes.rotated * attention.rotated
        )
    logits = rows * lengths.targets * logits_per_target(experiment.model) / mesh_sizes[TENSOR_AXIS]
    microbatch_bytes = (
        pipeline_stages(experiment, mesh_sizes).relative_layer_time * block_bytes + passes.logits * width * logits
    )
    layer_parameters = _layer_bytes(experiment, mesh_sizes, platform)
    microbatch_bytes += (
        passes.layers * layer_parameters.unrolled
        + passes.looped * layer_parameters.looped
        + passes.experts * layer_parameters.experts
    )
    state_bytes = passes.state * (memory.parameters + memory.optimizer + memory.ema + memory.gradients)
    if memory.optimizer < memory.parameters / 10:
        state_bytes += passes.factored * memory.parameters
    return state_bytes + train.accumulate * experiment.optimizer.gradients_per_update * microbatch_bytes


def least_bytes(experiment: Experiment, sizes: dict[str, int], platform: str, memory: Memory) -> dict[str, int]:
    """Returns a lower bound of the bytes that one device moves in an update, by kind of array.

    The bound counts each array as written once and read once; an update reads and writes its state. A step that reads
    from a cache, or recomputes more, may move fewer bytes. `products` are the activations of the layers' products.
    """
    passes = experiment.train.accumulate
    predicted = lengths_of(shapes_of(experiment)).targets * logits_per_target(shard_experiment(experiment, sizes).model)
    rows = passes * micro_rows(experiment, sizes) / sizes[LENGTH_AXIS]
    parts = {
        "products": product_bytes(experiment, sizes, platform),
        "logits": 2 * compute_itemsize(experiment, platform) * rows * predicted,
        "parameters": 2 * passes * memory.parameters,
        "gradients": 2 * passes * memory.parameters,
        "update": 2 * (memory.parameters + memory.optimizer + memory.ema),
    }
    return {name: round(size) for name, size in parts.items()}


def product_operands(experiment: Experiment, mesh_sizes: dict[str, int], platform: str) -> float:
    """Estimates the bytes per device that the matrix multiplications of layers and optimizer access in one step.

    Each pass moves as many bytes as the forward pass. The passes are the forward pass, each recomputation, and two
    for the backward pass, which has two matrix multiplications for each one in the forward pass.
    """
    passes = experiment.passes + (experiment.train.layer_forwards - 1) * (experiment.passes > 1)
    return passes * product_bytes(experiment, mesh_sizes, platform) + optimizer_operands(experiment, mesh_sizes)


def _layer_residuals(arrays: list[SavedResidual]) -> float:
    """Computes the size in bytes of one layer's residuals, for the stack in which this size is largest."""
    bytes_by_stack: dict[str, float] = {}
    for x in arrays:
        if (stack := stack_of(x.module)) is not None and x.shape:
            bytes_by_stack[stack] = bytes_by_stack.get(stack, 0.0) + x.bytes / x.shape[0]  # [L, …]
    return max(bytes_by_stack.values(), default=0.0)


def _stacked_residuals(experiment: Experiment, mesh_sizes: dict[str, int], platform: str) -> float:
    """Computes the bytes of residuals that loops over layers save per microbatch, or 0 if all layers are unrolled."""
    looped = _looped_stacks(experiment, platform)
    residuals = saved_residuals(experiment, mesh_sizes, platform) if looped else ()
    return sum(x.bytes for x in residuals if any(f"{name}/blocks" in x.module for name in looped))


def _looped_stacks(experiment: Experiment, platform: str) -> list[str]:
    """Returns the names of the stacks whose layers run in a loop."""
    compute, stacks = compute_for(experiment.train), experiment.model.stacks.items()
    return [
        name for name, stack in stacks if blocks_per_iteration(compute, stack.num_layers, platform) < stack.num_layers
    ]


class _Layers(NamedTuple):
    """Size in bytes of the layers' parameters, per device."""

    unrolled: int  # layers outside loops
    looped: int  # layers that run in a loop
    experts: int  # experts, in unrolled and in looped layers


def _layer_bytes(experiment: Experiment, mesh_sizes: dict[str, int], platform: str) -> _Layers:
    """Computes the size in bytes of the parameters of unrolled layers, looped layers and experts, per device."""
    params, looped_stacks = abstract_state(experiment, mesh_sizes).params, _looped_stacks(experiment, platform)
    named_params = zip(parameter_names(params), jax.tree.leaves(params), strict=True)
    bytes_by_path = {name: part_bytes(x, x.sharding) for name, x in named_params if is_stacked(name)}
    looped = sum(size for name, size in bytes_by_path.items() if any(f"{stack}/" in name for stack in looped_stacks))
    experts = sum(size for name, size in bytes_by_path.items() if "/experts_" in name)
    return _Layers(sum(bytes_by_path.values()) - looped, looped, experts)


class _Attention(NamedTuple):
    """The total size in bytes of each kind of float32 array in attention, over all layers; see `Passes`."""

    pairs: float
    dropped: float
    row_bias: float
    rotated: float


def _attention_bytes(experiment: Experiment, mesh_sizes: dict[str, int], platform: str, rows: float) -> _Attention:
    """Computes the size in bytes of attention logits in main memory, and of queries and keys with rotary embeddings.

    Args:
      rows: number of batch rows.
    """
    specs, lengths = attention_specs(experiment, mesh_sizes, platform), lengths_of(shapes_of(experiment))
    implementation, is_tpu = implementation_of(specs, experiment.train.attention, platform), platform == "tpu"
    model, pairs, dropped, row_bias, rotated = experiment.model, 0.0, 0.0, 0.0, 0.0
    for attention in attentions(model, lengths.inputs, lengths.targets):
        name, spec = implementation(attention)
        layer_bytes = 4 * rows * attention.heads * float(all_pairs(spec).sum())
        if name == "xla" and spec.dropout_rate:
            dropped += attention.layers * layer_bytes * (not is_tpu or layer_bytes >= _LAYER_VMEM_BYTES)
        elif name == "xla" and not (is_tpu and layer_bytes < _VMEM) or is_tpu and spec.bias != "none":
            pairs += attention.layers * layer_bytes
        row_bias += (spec.bias == "by_row") * attention.layers * layer_bytes
        if isinstance(model.position, RotaryPositions):
            width = (attention.heads + attention.kv_heads) * model.position.rotated_dims(attention.head_dim)
            rotated += 4 * rows * attention.layers * width * attention.queries
    return _Attention(pairs, dropped, row_bias, rotated)


def link_rate(axis: str, mesh_sizes: dict[str, int], topology: Topology) -> float:
    """Computes the bytes per second that a device can send along a mesh axis.

    Args:
      axis: a mesh axis, several axes ("data+sequence"), or "slices" for the network between slices.
      mesh_sizes: size of each mesh axis, {axis of AXES: size}.
    """
    chip = topology.chip
    if axis == "slices":
        return chip.network_rate
    slice_sizes = dict(mesh_sizes) | {DATA_AXIS: mesh_sizes[DATA_AXIS] // topology.slices}
    group = math.prod(slice_sizes[name] for name in axis.split("+"))
    if chip.is_tpu:
        total = math.prod(slice_sizes.values())
        dimensions = max(1, round(chip.torus * math.log(group) / math.log(total)))
        return chip.link_rate * dimensions / chip.torus
    inner_devices = math.prod(slice_sizes[name] for name in AXES[AXES.index(axis.split("+")[-1]) + 1 :])
    on_a_host = min(group, max(1, topology.shape[1] // inner_devices))  # number of the group's devices on one host
    return chip.link_rate if on_a_host == group else min(chip.link_rate, on_a_host * chip.network_rate)
