"""Estimates the time of a step and the cost of a run: FLOPs, memory and links at the rates of the chip.

All assumptions:

- Matrix products reach ATTAINABLE of the peak; products grouped by expert reach GROUPED of that. On a GPU the operands
  take additional time to read and write: a third of the time of a product of width 768. A fused attention kernel skips
  masked blocks, which then take no time; "xla" does not skip them. Recomputation (by rematerialization, by the backward
  pass of fused attention) takes time and is in no MFU. `mfu` follows PaLM's convention, with attention in full;
  `mfu_executed` counts only executed FLOPs.
- Between products, kernels read and write memory, and nothing overlaps: the residuals of blocks, logits and the train
  state, each as often as in compiled steps (PASSES). For a compiled step, the bytes are those of its kernels without
  products (`hlo.memory_traffic`), at the chip's full rate. On a TPU the products of a compiled step take the time of
  their FLOPs or of their bytes, whichever is longer.
- Pipeline stages wait in the bubble: (P - 1) / M of the time of the layers. Their gathers along `fsdp` are exposed.
- Gathers and scatters along `fsdp` overlap with all of the above, as far as that lasts: gathers of parameters start
  early, and nothing waits for the gradients. All other collectives are exposed. In a compiled step, a collective is
  hidden if it starts before a product and ends after it.
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

# Share of the peak, by platform. GPU: a bfloat16 product of 8,192³ on an H100, 790 of 990 TFLOP/s, measured by others.
ATTAINABLE = {"gpu": 0.8, "tpu": 0.62}
GROUPED = 0.75  # share of ATTAINABLE for products grouped by expert
# (least, most) of the ratio of published step times to the estimates, widened by a tenth. The largest ratio of GPUs is
# of H100s with a power limit of 500 W.
SPREAD = {"gpu": (0.9, 1.99), "tpu": (0.83, 1.2)}


class Passes(NamedTuple):
    """Numbers of reads and writes per byte of each kind, by the kernels without products of compiled steps."""

    kept: float  # residuals of a block, except for attention
    attention_residuals: float  # residuals of attention: queries, keys, values, results
    pairs: float  # float32 logits of attention without a fused kernel; on a TPU also of attention with a bias
    dropped: float  # the same logits if dropout applies to the weights: the backward pass reads them again
    by_row: float  # logits with a position bias that differs by row, in addition
    turned: float  # queries and keys in float32, with rotary positions
    logits: float  # logits of the loss, in the compute dtype
    state: float  # parameters, moments, averages and gradients
    stacked: float  # residuals of loops over layers: written into stacks and sliced out of them
    factored: float  # parameters, with a factored optimizer, which reads gradients for sums of rows and columns
    layers: float  # parameters of layers: slices of their stacks, in the compute dtype
    looped: float  # parameters of layers in a loop: sliced twice, and their gradients written into stacks
    experts: float  # parameters of experts, with the dispatch and the return of rows


# Fitted to compiled steps of this repository's configs, for one H100 and one v5e (loops of 4 layers), as counted by
# benchmarks/traffic.py. benchmarks/lab_book.md has the method and the errors. Three GPU values are not fitted:
# - `state`: AdamW reads parameters, gradients and moments and writes all but the gradients; the gradient norm reads the
#   gradients once more. That is 8 passes over 4 arrays.
# - `layers`: parameters of layers are read in float32 and written in half of the bytes.
# - `looped`: the copies of loops add up to 5.
# The TPU value of `state` is not fitted. `by_row` is from DeBERTa, the only step with biases by row. `dropped` is from
# four steps with all layers.
PASSES = {
    "gpu": Passes(
        kept=9.6,
        attention_residuals=3.6,
        pairs=11.3,
        dropped=11.3,
        by_row=11.3,
        turned=0.0,
        logits=3.2,
        state=2.0,
        stacked=4.7,
        factored=3.0,
        layers=1.5,
        looped=5.0,
        experts=4.2,
    ),
    "tpu": Passes(
        kept=4.5,
        attention_residuals=4.5,
        pairs=7.7,
        dropped=4.9,
        by_row=47.7,
        turned=12.4,
        logits=5.9,
        state=1.6,
        stacked=1.8,
        factored=0.0,
        layers=0.0,
        looped=0.0,
        experts=0.0,
    ),
}
_VMEM = 2**27  # memory of a TPU core: logits of a layer that fit into it never go to main memory
_ROOM_FOR_A_LAYER = _VMEM // 2  # free share of VMEM: residuals of a layer that fit go only into the stacks


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of one step, and the resulting MFU, hours and price."""

    flops: float  # model FLOPs of a step, over all devices, by PaLM's convention
    done: float  # executed share of `flops`: attention kernels skip masked blocks
    compute: float  # seconds of matrix products
    memory: float  # seconds of memory access between products
    hidden: float  # seconds of communication that overlaps with compute and memory
    exposed: float  # seconds of communication that the devices wait for
    mfu: float  # model FLOPs utilization, from `flops`
    mfu_executed: float  # the same from `done`
    hours: float  # of the run
    price: Optional[float]  # USD of the run; None if the chip's price is not public
    spread: tuple[float, float]  # SPREAD of the platform

    @property
    def seconds(self) -> float:
        return max(self.compute + self.memory, self.hidden) + self.exposed

    @property
    def range(self) -> tuple[float, float]:
        """Returns the (least, most) seconds, from the spread of published runs."""
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
    """Returns the expected time of a step of `experiment`, and hours and price of the run.

    Args:
      memory: the memory estimate of the step.
      sent: the collectives of the step.
      steps: number of steps of the run; None: `experiment.train.steps`.
      moved: memory traffic of the compiled step; None: estimate it.
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
    """Returns the share of a collective that products hide: as compiled, or by the rule of the module docstring."""
    if one.beside is None:
        return float(one.axis == FSDP_AXIS and one.kind in ("all-gather", "reduce-scatter"))
    return one.beside / one.count


def _product_flops(experiment: Experiment, teacher: Optional[ModelConfig], work: WorkOf, stretch: float) -> float:
    """Returns the FLOPs of a step's products, including recomputation.

    Products grouped by expert count as the FLOPs that other products would execute in the same time. Remat "block" runs
    each layer's forward pass twice; "dots" repeats only the products of attention. If the mesh splits the sequence, all
    devices wait for the one whose queries have the most keys.

    Args:
      stretch: factor on the time of the layers, by a pipeline.
    """
    train, passes, lengths = experiment.train, experiment.passes, lengths_of(shapes_of(experiment))
    has_backward = passes > 1
    makes_again = has_backward and train.remat != "none"

    def products(one: Attention) -> float:
        pairs, again = work(one)
        count = PRODUCTS * attention_fraction(passes) + has_backward * again + 2 * makes_again
        return count * pairs.max() * len(pairs)

    model = experiment.model, lengths.inputs, lengths.targets
    blocks, around = other_flops(*model)
    blocks += (1 / GROUPED - 1) * expert_flops(*model)
    again = (train.layer_forwards - 1) * blocks if has_backward else 0.0
    teacher_flops = 0.0 if teacher is None else executed_flops(teacher, 1, lengths.inputs, lengths.targets, work) / 3
    layers = matrix_flops(passes, blocks, 0.0) + again + attention_flops(*model, products)
    return experiment.rows_per_update * (stretch * layers + matrix_flops(passes, 0.0, around) + teacher_flops)


def memory_bytes_between_products(
    experiment: Experiment, mesh_sizes: dict[str, int], platform: str, memory: Memory
) -> float:
    """Estimates the bytes that the kernels without products of a step read and write, per device."""
    train, passes = experiment.train, PASSES[platform]
    plain = dataclasses.replace(experiment, train=dataclasses.replace(train, remat="none"))
    width = compute_itemsize(experiment, platform)
    arrays = [
        x
        for x in saved_residuals(plain, mesh_sizes, platform)
        if x.module != "loss"
        and (x.dtype != "float32" or width == 4)  # without logits of attention and sums of a token
    ]
    lengths = lengths_of(shapes_of(experiment))
    rows = micro_rows(experiment, mesh_sizes) / mesh_sizes[LENGTH_AXIS]
    layers = passes.stacked * _stacked_residuals(experiment, mesh_sizes, platform)
    attention = _of_attention(experiment, mesh_sizes, platform, rows / mesh_sizes[TENSOR_AXIS])
    layers += passes.dropped * attention.dropped
    if platform == "gpu" or train.remat == "block" or _layer_residuals(arrays) > _ROOM_FOR_A_LAYER:
        layers += sum(
            x.bytes * (passes.attention_residuals if x.module.endswith("attention") else passes.kept) for x in arrays
        )
        layers += passes.pairs * attention.pairs + passes.by_row * attention.by_row + passes.turned * attention.turned
    logits = rows * lengths.targets * predicted_vocabulary(experiment.model) / mesh_sizes[TENSOR_AXIS]
    each = pipeline_stages(experiment, mesh_sizes).stretch * layers + passes.logits * width * logits
    parts = _of_layers(experiment, mesh_sizes, platform)
    each += passes.layers * parts.unrolled + passes.looped * parts.looped + passes.experts * parts.experts
    state = passes.state * (memory.parameters + memory.optimizer + memory.ema + memory.gradients)
    if memory.optimizer < memory.parameters / 10:
        state += passes.factored * memory.parameters
    return state + train.accumulate * experiment.optimizer.gradients_per_update * each


def product_operands(experiment: Experiment, mesh_sizes: dict[str, int], platform: str) -> float:
    """Estimates the bytes that products of layers read and write: each pass moves the bytes of one forward pass."""
    passes = experiment.passes + (experiment.train.layer_forwards - 1) * (experiment.passes > 1)
    return passes * product_bytes(experiment, mesh_sizes, platform)


def _layer_residuals(arrays: list[SavedResidual]) -> float:
    """Returns the bytes of the residuals of one layer, in the stack with the largest layers."""
    stacks: dict[str, float] = {}
    for x in arrays:
        if (stack := stack_of(x.module)) is not None and x.shape:
            stacks[stack] = stacks.get(stack, 0.0) + x.bytes / x.shape[0]  # [L, …]
    return max(stacks.values(), default=0.0)


def _stacked_residuals(experiment: Experiment, mesh_sizes: dict[str, int], platform: str) -> float:
    """Returns the bytes of residuals that loops over layers save; 0 if all blocks are unrolled."""
    looped = _looped_stacks(experiment, platform)
    residuals = saved_residuals(experiment, mesh_sizes, platform) if looped else ()
    return sum(x.bytes for x in residuals if any(f"{name}/blocks" in x.module for name in looped))


def _looped_stacks(experiment: Experiment, platform: str) -> list[str]:
    """Returns the names of the stacks whose layers run in a loop."""
    compute, stacks = compute_for(experiment.train), experiment.model.stacks.items()
    return [name for name, one in stacks if blocks_per_iteration(compute, one.num_layers, platform) < one.num_layers]


class _Layers(NamedTuple):
    """Bytes of the parameters of layers, per device."""

    unrolled: int
    looped: int
    experts: int  # experts in unrolled and looped layers


def _of_layers(experiment: Experiment, mesh_sizes: dict[str, int], platform: str) -> _Layers:
    params, loops = abstract_state(experiment, mesh_sizes).params, _looped_stacks(experiment, platform)
    named = zip(parameter_names(params), jax.tree.leaves(params), strict=True)
    layers = {name: part_bytes(x, x.sharding) for name, x in named if is_stacked(name)}
    looped = sum(size for name, size in layers.items() if any(f"{loop}/" in name for loop in loops))
    experts = sum(size for name, size in layers.items() if "/experts_" in name)
    return _Layers(sum(layers.values()) - looped, looped, experts)


class _Attention(NamedTuple):
    """Float32 bytes of all attentions, by the kinds of `Passes`."""

    pairs: float
    dropped: float
    by_row: float
    turned: float


def _of_attention(experiment: Experiment, mesh_sizes: dict[str, int], platform: str, rows: float) -> _Attention:
    """Returns the bytes for `rows` rows: logits in main memory, and queries and keys with rotary positions."""
    specs, lengths = attention_specs(experiment, mesh_sizes, platform), lengths_of(shapes_of(experiment))
    implementation, is_tpu = implementation_of(specs, experiment.train.attention, platform), platform == "tpu"
    model, pairs, dropped, by_row, turned = experiment.model, 0.0, 0.0, 0.0, 0.0
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
            turned += 4 * rows * one.layers * width * one.queries
    return _Attention(pairs, dropped, by_row, turned)


def link_rate(axis: str, mesh_sizes: dict[str, int], topology: Topology) -> float:
    """Returns the B/s that a device sends along one axis of the mesh, or several ("data+sequence")."""
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
