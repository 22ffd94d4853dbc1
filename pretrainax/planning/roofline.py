"""Time of a step, and the cost of a run: FLOPs, memory and links against what the chip does at most.

The assumptions, all in one place:

- Matrix products reach ATTAINABLE of the peak, those grouped by expert GROUPED of that. On a GPU reading and writing
  their operands takes time besides: of a product as wide as 768 a third of it. What attention skips because its mask
  hides it takes no time: a fused kernel skips, "xla" does not. What is made again (by rematerialisation, by a fused
  attention's backward) takes time and is in no MFU. `mfu` is by PaLM's convention, with attention in full; `mfu_done`
  is of what is done.
- Between them the memory is read and written, one after the other: what blocks keep, logits and the train state, each
  so often as in steps that were compiled (PASSES). Of a step that was compiled itself it is what its kernels move that
  multiply nothing (`hlo.memory_traffic`), at the chip's full rate; and a TPU's products take the time of what theirs
  move, where that is longer than that of their FLOPs.
- Stages of a pipeline wait in the bubble: layers take longer by (P - 1) / M. What they gather along `fsdp` is waited
  for.
- What is gathered and scattered along `fsdp` is hidden behind all that, as far as it lasts: parameters are asked for
  before they are needed, and nothing waits for their gradients. All other collectives are waited for. Of a step that
  was compiled those are hidden that begin before a product and end behind it.
- A collective around a torus uses as many of its dimensions as its axis has of the slice (in logarithms). Of GPUs, what
  crosses hosts goes through one port a device.

Fitted to published runs (benchmarks/published.toml, by benchmarks/calibrate.py): ATTAINABLE of a TPU, GROUPED and
SPREAD, within which the steps of all of them lie.
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
from pretrainax.layers.compute import blocks_in_a_turn, compute_for
from pretrainax.models.active import predicted_vocabulary
from pretrainax.models.flops import (
    Attention,
    WorkOf,
    attended,
    attention_flops,
    attentions,
    expert_flops,
    flops_done,
    flops_per_step,
    implementation_of,
    mapped,
    other_flops,
    work_of,
)
from pretrainax.planning.activations import (
    SavedResidual,
    abstract_state,
    attention_specs,
    micro_rows,
    saved_residuals,
    shapes_of,
    width_on,
)
from pretrainax.planning.hlo import MemoryTraffic
from pretrainax.planning.memory import Memory, part_bytes
from pretrainax.planning.product_bytes import product_bytes
from pretrainax.planning.topologies import Topology
from pretrainax.planning.traffic import Collective
from pretrainax.sharding.axes import AXES, DATA_AXIS, FSDP_AXIS, LENGTH_AXIS, TENSOR_AXIS
from pretrainax.sharding.param_paths import is_stacked, parameter_names, stack_of
from pretrainax.sharding.stages import stages_of

# Of the peak, by platform. GPU: 8,192³ in bfloat16 on an H100, 790 of 990 TFLOP/s, measured by others.
ATTAINABLE = {"gpu": 0.8, "tpu": 0.62}
GROUPED = 0.75  # of that, by products grouped by expert
# What published steps took, over what is estimated, from the least to the most, and a tenth wider. The most of GPUs is
# of H100s held to 500 W.
SPREAD = {"gpu": (0.9, 1.99), "tpu": (0.83, 1.2)}


class Passes(NamedTuple):
    """Says how often kernels that multiply nothing read or write bytes of each kind, in steps that were compiled."""

    kept: float  # what a block keeps for its backward, but for the next
    attended: float  # queries, keys, values and results of attention
    pairs: float  # float32 logits of an attention that no kernel computes; on a TPU of one with a bias too
    dropped: float  # the same where weights are dropped, which the backward needs again
    by_row: float  # those again to which positions add something else for each row
    turned: float  # queries and keys in float32, where positions turn them
    logits: float  # of the loss, in the dtype of the run
    state: float  # parameters, moments, averages and gradients
    stacked: float  # what loops over layers keep for the backward: put into stacks, and taken out of them
    factored: float  # parameters, by an optimizer that keeps sums of rows and columns, which it reads gradients for
    layers: float  # parameters of layers: cut out of their stacks, in the dtype of the products
    looped: float  # those of layers in a loop: cut out twice, and their gradients put into stacks
    experts: float  # of these the experts', with which rows are dealt out and put back


# Fitted to compiled steps of this repository's configs, for one H100 and one v5e (loops of 4 layers), as counted by
# benchmarks/traffic.py; benchmarks/README.md says how, and how far off each is. Of a GPU three were not fitted: AdamW
# reads parameters, gradients and moments, writes all but gradients, and their norm reads these once more, 8 passes over
# 4 arrays; parameters of layers are read in float32 and written in half of that; and copies of loops add up to 5. Of a
# TPU the optimizer's and its norm's was not, DeBERTa's is the only step that has biases by row, and `dropped` is of
# four steps with all layers.
PASSES = {
    "gpu": Passes(
        kept=9.6,
        attended=3.6,
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
        attended=4.5,
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
_VMEM = 2**27  # a TPU core's own memory: logits of a layer that have room there are never written out
_ROOM_FOR_A_LAYER = _VMEM // 2  # beside what else is there: what a layer keeps within it is written into stacks alone


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of one step, and what follows from them."""

    flops: float  # of a step, over all devices, by PaLM's convention
    done: float  # those of them that are done: attention skips what its mask hides, as far as its kernel can
    compute: float  # seconds, as are the next three
    memory: float
    hidden: float  # of links, behind compute and memory
    exposed: float  # of links, waited for
    mfu: float  # of `flops`
    mfu_done: float  # of `done`
    hours: float  # of the run
    price: Optional[float]  # USD of the run; None where the chip's price is not public
    spread: tuple[float, float]  # SPREAD of the platform

    @property
    def seconds(self) -> float:
        return max(self.compute + self.memory, self.hidden) + self.exposed

    @property
    def range(self) -> tuple[float, float]:
        """Returns the least and the most seconds that published runs make one expect."""
        least, most = self.spread
        return least * self.seconds, most * self.seconds


def expect(
    experiment: Experiment,
    mesh_sizes: dict[str, int],
    topology: Topology,
    memory: Memory,
    sent: list[Collective],
    steps: Optional[int] = None,
    moved: Optional[MemoryTraffic] = None,
) -> Roofline:
    """Returns the time of a step of `experiment` whose memory and collectives are known, and of a run.

    Args:
      steps: of the run; None: all of the experiment's.
      moved: counted in the step as compiled; None: it is estimated.
    """
    chip, train, devices = topology.chip, experiment.train, topology.num_devices
    lengths, platform = lengths_of(shapes_of(experiment)), chip.platform
    work = work_of(attention_specs(experiment, mesh_sizes, platform), train.attention, platform)
    step = experiment.model, experiment.rows_per_update, lengths.inputs, lengths.targets
    teacher = teacher_of(experiment)
    stretch = stages_of(experiment, mesh_sizes).stretch
    passes = experiment.passes
    flops, done = flops_per_step(*step, teacher, passes), flops_done(*step, work, teacher, passes)
    compute = _made(experiment, teacher, work, stretch) / (devices * chip.peak_flops * ATTAINABLE[platform])
    if moved is None:
        between = between_products(experiment, mesh_sizes, platform, memory) / chip.memory_rate
        operands = product_operands(experiment, mesh_sizes, platform) / chip.memory_rate
    else:
        between = moved.besides_products / chip.memory_rate
        operands = (moved.total - moved.besides_products) / chip.memory_rate
    if not chip.is_tpu:
        compute += operands
    elif moved is not None:
        compute = max(compute, operands)
    links = {True: 0.0, False: 0.0}
    for one in sent:
        hidden = hidden_share(one)
        seconds = one.total / rate(one.axis, mesh_sizes, topology)
        links[True] += hidden * seconds
        links[False] += (1 - hidden) * seconds
    seconds = max(compute + between, links[True]) + links[False]
    hours = seconds * (train.steps if steps is None else steps) / 3600
    return Roofline(
        flops=flops,
        done=done,
        compute=compute,
        memory=between,
        hidden=links[True],
        exposed=links[False],
        mfu=flops / (seconds * devices * chip.peak_flops),
        mfu_done=done / (seconds * devices * chip.peak_flops),
        hours=hours,
        price=chip.price and hours * devices * chip.price,
        spread=SPREAD[platform],
    )


def hidden_share(one: Collective) -> float:
    """Returns how much of a collective products hide: as compiled, or else by the rule above."""
    if one.beside is None:
        return float(one.axis == FSDP_AXIS and one.kind in ("all-gather", "reduce-scatter"))
    return one.beside / one.count


def _made(experiment: Experiment, teacher: Optional[ModelConfig], work: WorkOf, stretch: float) -> float:
    """Counts the FLOPs of a step's products, with those that are made again, and for products that are grouped as many
    as others would do in their time; stretch: of the layers, by a pipeline.

    "block" makes each layer's forward twice, "dots" of it the products of attention alone. Where the mesh splits the
    length, all wait for the device whose queries have the most keys.
    """
    train, passes, lengths = experiment.train, experiment.passes, lengths_of(shapes_of(experiment))
    has_backward = passes > 1
    makes_again = has_backward and train.remat != "none"

    def products(one: Attention) -> float:
        pairs, again = work(one)
        made = PRODUCTS * attended(passes) + has_backward * again + 2 * makes_again
        return made * pairs.max() * len(pairs)

    model = experiment.model, lengths.inputs, lengths.targets
    blocks, around = other_flops(*model)
    blocks += (1 / GROUPED - 1) * expert_flops(*model)
    again = (train.layer_forwards - 1) * blocks if has_backward else 0.0
    taught = 0.0 if teacher is None else flops_done(teacher, 1, lengths.inputs, lengths.targets, work) / 3
    layers = mapped(passes, blocks, 0.0) + again + attention_flops(*model, products)
    return experiment.rows_per_update * (stretch * layers + mapped(passes, 0.0, around) + taught)


def between_products(experiment: Experiment, mesh_sizes: dict[str, int], platform: str, memory: Memory) -> float:
    """Estimates the bytes of a device's memory that kernels read and write in a step which multiply nothing."""
    train, passes = experiment.train, PASSES[platform]
    plain = dataclasses.replace(experiment, train=dataclasses.replace(train, remat="none"))
    width = width_on(experiment, platform)
    arrays = [
        x
        for x in saved_residuals(plain, mesh_sizes, platform)
        if x.module != "loss" and (x.dtype != "float32" or width == 4)  # logits of attention, sums of a token
    ]
    lengths = lengths_of(shapes_of(experiment))
    rows = micro_rows(experiment, mesh_sizes) / mesh_sizes[LENGTH_AXIS]
    layers = passes.stacked * _in_stacks(experiment, mesh_sizes, platform)
    attention = _of_attention(experiment, mesh_sizes, platform, rows / mesh_sizes[TENSOR_AXIS])
    layers += passes.dropped * attention.dropped
    if platform == "gpu" or train.remat == "block" or _of_a_layer(arrays) > _ROOM_FOR_A_LAYER:
        layers += sum(x.bytes * (passes.attended if x.module.endswith("attention") else passes.kept) for x in arrays)
        layers += passes.pairs * attention.pairs + passes.by_row * attention.by_row + passes.turned * attention.turned
    logits = rows * lengths.targets * predicted_vocabulary(experiment.model) / mesh_sizes[TENSOR_AXIS]
    each = stages_of(experiment, mesh_sizes).stretch * layers + passes.logits * width * logits
    parts = _of_layers(experiment, mesh_sizes, platform)
    each += passes.layers * parts.unrolled + passes.looped * parts.looped + passes.experts * parts.experts
    state = passes.state * (memory.parameters + memory.optimizer + memory.ema + memory.gradients)
    if memory.optimizer < memory.parameters / 10:
        state += passes.factored * memory.parameters
    return state + train.accumulate * experiment.optimizer.gradients_per_update * each


def product_operands(experiment: Experiment, mesh_sizes: dict[str, int], platform: str) -> float:
    """Estimates the bytes that products of layers read and write: those of one forward in each pass."""
    passes = experiment.passes + (experiment.train.layer_forwards - 1) * (experiment.passes > 1)
    return passes * product_bytes(experiment, mesh_sizes, platform)


def _of_a_layer(arrays: list[SavedResidual]) -> float:
    """Counts the bytes that a layer of a model's largest stack keeps."""
    stacks: dict[str, float] = {}
    for x in arrays:
        if (stack := stack_of(x.module)) is not None and x.shape:
            stacks[stack] = stacks.get(stack, 0.0) + x.bytes / x.shape[0]  # [L, …]
    return max(stacks.values(), default=0.0)


def _in_stacks(experiment: Experiment, mesh_sizes: dict[str, int], platform: str) -> float:
    """Counts the bytes that loops over layers keep for the backward; 0 where all blocks are unrolled."""
    looped = _loops(experiment, platform)
    kept = saved_residuals(experiment, mesh_sizes, platform) if looped else ()
    return sum(x.bytes for x in kept if any(f"{name}/blocks" in x.module for name in looped))


def _loops(experiment: Experiment, platform: str) -> list[str]:
    """Returns the stacks whose layers are a loop."""
    compute, stacks = compute_for(experiment.train), experiment.model.stacks.items()
    return [name for name, one in stacks if blocks_in_a_turn(compute, one.num_layers, platform) < one.num_layers]


class _Layers(NamedTuple):
    """Counts bytes of a device's parameters of layers."""

    unrolled: int
    looped: int
    experts: int  # of both


def _of_layers(experiment: Experiment, mesh_sizes: dict[str, int], platform: str) -> _Layers:
    params, loops = abstract_state(experiment, mesh_sizes).params, _loops(experiment, platform)
    named = zip(parameter_names(params), jax.tree.leaves(params), strict=True)
    layers = {name: part_bytes(x, x.sharding) for name, x in named if is_stacked(name)}
    looped = sum(size for name, size in layers.items() if any(f"{loop}/" in name for loop in loops))
    experts = sum(size for name, size in layers.items() if "/experts_" in name)
    return _Layers(sum(layers.values()) - looped, looped, experts)


class _Attention(NamedTuple):
    """Counts float32 bytes of all attentions, by the kinds of `Passes`."""

    pairs: float
    dropped: float
    by_row: float
    turned: float


def _of_attention(experiment: Experiment, mesh_sizes: dict[str, int], platform: str, rows: float) -> _Attention:
    """Counts those of so many rows: logits that are written out, and queries and keys that positions turn."""
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
            width = (one.heads + one.kv_heads) * model.position.turned(one.head_dim)
            turned += 4 * rows * one.layers * width * one.queries
    return _Attention(pairs, dropped, by_row, turned)


def rate(axis: str, mesh_sizes: dict[str, int], topology: Topology) -> float:
    """Returns B/s that a device sends along an axis, or several ("data+sequence"), of the mesh."""
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
    on_a_host = min(group, max(1, topology.shape[1] // inside))  # devices of the group that share one
    return chip.link_rate if on_a_host == group else min(chip.link_rate, on_a_host * chip.network_rate)
