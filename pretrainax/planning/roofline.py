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
from typing import Optional

from pretrainax.config import Experiment, ModelConfig
from pretrainax.data.batch import lengths_of
from pretrainax.interop.teacher import teacher_of
from pretrainax.layers.attention_spec import PRODUCTS
from pretrainax.models.active import predicted_vocabulary
from pretrainax.models.flops import (
    Attention,
    WorkOf,
    attention_flops,
    executed_flops,
    expert_flops,
    flops_per_step,
    other_flops,
    update_cost,
    work_of,
)
from pretrainax.planning.activations import (
    attention_specs,
    shapes_of,
)
from pretrainax.planning.estimated_traffic import memory_bytes_between_products, product_operands
from pretrainax.planning.hlo import MemoryTraffic
from pretrainax.planning.memory import Memory
from pretrainax.planning.optimizer_work import optimizer_flops
from pretrainax.planning.topologies import Topology
from pretrainax.planning.traffic import Collective
from pretrainax.runtime.chips import Chip, tile_padding
from pretrainax.sharding.axes import AXES, DATA_AXIS, PARAMETER_AXES, TENSOR_AXIS
from pretrainax.sharding.stages import pipeline_stages

# Fraction of the peak FLOP/s that matrix multiplications reach, by platform. GPU: published measurements on an H100 are
# 790 of 990 TFLOP/s for a bfloat16 matmul of 8,192³.
ATTAINABLE = {"gpu": 0.8, "tpu": 0.72}
GROUPED = 0.66  # fraction of ATTAINABLE that matmuls grouped by expert reach
# (minimum, maximum) of published step time / estimated step time, by platform, widened by 10 %. The largest ratio for
# GPUs comes from H100s with a power limit of 500 W.
SPREAD = {"gpu": (0.87, 1.97), "tpu": (0.85, 1.2)}


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
        operands = 0.0 if chip.is_tpu else product_operands(experiment, mesh_sizes, platform, memory)
        operand_time = operands / chip.memory_rate
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
