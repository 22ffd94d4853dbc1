"""Estimates the bytes that one device reads and writes in main memory per step, without a compiler.

The estimate multiplies the size of each kind of array by the number of times that kernels access it: PASSES for kernels
without matrix multiplications, PRODUCT_PASSES for kernels with them. benchmarks/fit_passes.py fits both to compiled
steps (benchmarks/counted.json) and prints the error of each step.
"""

import dataclasses
from typing import NamedTuple, Optional

import jax

from pretrainax.config import Experiment, RotaryPositions
from pretrainax.data.batch import lengths_of
from pretrainax.layers.attention_work import all_pairs
from pretrainax.layers.compute import blocks_per_iteration, compute_for
from pretrainax.models.active import logits_per_target
from pretrainax.models.flops import attentions, implementation_of
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
from pretrainax.planning.memory import Memory, part_bytes
from pretrainax.planning.optimizer_work import optimizer_operands
from pretrainax.planning.product_bytes import product_bytes
from pretrainax.runtime.chips import tile_padding
from pretrainax.sharding.axes import LENGTH_AXIS, TENSOR_AXIS
from pretrainax.sharding.param_paths import is_stacked, parameter_names, stack_of
from pretrainax.sharding.stages import pipeline_stages

_VMEM = 2**27  # bytes of a TPU core's VMEM. Attention logits of a layer that fit in VMEM never go to main memory.
# Bytes of VMEM that are free for the residuals of a layer. Residuals that fit are written to main memory only as part
# of the stacked residuals of a loop.
_LAYER_VMEM_BYTES = _VMEM // 2


class Passes(NamedTuple):
    """One number per kind of array: its size in bytes, or the number of times that kernels access each of its bytes.

    An access is a read or a write. For example, `logits=3.2` means that kernels move 3.2 times the size of the logits.
    """

    block_residuals: float  # residuals of a block, except for attention
    attention_residuals: float  # residuals of attention: queries, keys, values, outputs
    pairs: float  # float32 logits of attention without a fused kernel; on a TPU also of attention with a bias
    dropped: float  # as `pairs`, for attention with dropout: the backward pass reads the logits again
    row_bias: float  # logits with a position bias that differs by batch row, in addition to `pairs` or `dropped`
    spilled: float  # residuals of which one layer's array does not fit in half of a TPU's VMEM, in addition
    rotated: float  # queries and keys in float32, if the model has rotary position embeddings
    logits: float  # logits of the loss, in the compute dtype
    state: float  # parameters, optimizer moments, moving averages and gradients
    stacked: float  # residuals of loops over layers: written into stacked arrays and sliced out of them
    factored: float  # parameters, if the optimizer is factored: it reads gradients to sum their rows and columns
    layers: float  # parameters of layers outside loops: sliced from their stacks and cast to the compute dtype
    looped: float  # parameters of layers in a loop: sliced twice, and their gradients written into stacks
    experts: float  # parameters of experts; includes sending tokens to experts and back


# Fitted to compiled steps by benchmarks/fit_passes.py, except:
# - `state` of a GPU: AdamW reads parameters, gradients and two moments, and writes all of them except gradients. The
#   gradient norm reads the gradients once more. The 4 arrays therefore have 8 reads and writes.
# - `layers` of a GPU: parameters of layers are read in float32 and written in bfloat16, which is half of the bytes.
# - `looped` of a GPU: the copies that a loop makes add up to 5 passes.
# - `dropped` and `row_bias` of a TPU, and its `state`: no counted step has the first two. They are from an earlier fit.
PASSES = {
    "gpu": Passes(
        block_residuals=7.5,
        attention_residuals=1.1,
        pairs=12.2,
        dropped=16.9,
        row_bias=4.2,
        spilled=0.0,
        rotated=3.6,
        logits=3.3,
        state=2.0,
        stacked=4.9,
        factored=4.4,
        layers=1.5,
        looped=5.0,
        experts=2.8,
    ),
    "tpu": Passes(
        block_residuals=5.2,
        attention_residuals=5.2,
        pairs=6.9,
        dropped=4.9,
        row_bias=47.7,
        spilled=11.5,
        rotated=10.6,
        logits=2.7,
        state=1.6,
        stacked=2.1,
        factored=0.0,
        layers=0.0,
        looped=0.0,
        experts=0.0,
    ),
}
# Accesses by matrix multiplications, without the activations of the layers. On a GPU, these accesses take time. The
# forward product of the head writes the logits, and both of its backward products read their gradient. Products read
# parameters of layers twice in bfloat16 and write their gradients in float32. Without a fused kernel, they write the
# logits of attention and their gradient, and read the weights and the gradient twice. Not derived: `dropped` comes from
# BigBird and Longformer, whose blocks of keys overlap, and `row_bias` from DeBERTa.
PRODUCT_PASSES = Passes(*[0.0] * len(Passes._fields))._replace(
    logits=3.0, layers=2.0, looped=2.0, pairs=6.0, dropped=10.0, row_bias=5.0
)
# Fitted. Kernels with matrix multiplications move this multiple of the products' own activations, because the compiler
# fuses operations that read other arrays into them.
FUSED = 1.15


def memory_bytes_between_products(
    experiment: Experiment, mesh_sizes: dict[str, int], platform: str, memory: Memory
) -> float:
    """Estimates the bytes per device that kernels without matrix multiplications read and write in one step.

    Args:
      platform: "tpu" or "gpu".
      memory: the memory estimate of the step.
    """
    return _dot(PASSES[platform], bytes_by_kind(experiment, mesh_sizes, platform, memory))


def product_operands(experiment: Experiment, mesh_sizes: dict[str, int], platform: str, memory: Memory) -> float:
    """Estimates the bytes per device that matrix multiplications, and attention, read and write in one step.

    Each pass through the layers moves as many bytes as the forward pass. The passes are the forward pass, each
    recomputation, and two for the backward pass, which has two matrix multiplications for each one in the forward pass.
    """
    sizes = bytes_by_kind(experiment, mesh_sizes, platform, memory)
    per_pass = product_bytes(experiment, mesh_sizes, platform) + sizes.attention_residuals
    passes = experiment.passes + (experiment.train.layer_forwards - 1) * (experiment.passes > 1)
    return FUSED * passes * per_pass + _dot(PRODUCT_PASSES, sizes) + optimizer_operands(experiment, mesh_sizes)


def _dot(passes: Passes, sizes: Passes) -> float:
    return sum(count * size for count, size in zip(passes, sizes, strict=True))


def bytes_by_kind(experiment: Experiment, mesh_sizes: dict[str, int], platform: str, memory: Memory) -> Passes:
    """Computes the size in bytes of each kind of array on one device, over all microbatches of an update.

    Arrays that stay in a TPU's VMEM do not count.

    Args:
      platform: "tpu" or "gpu".
      memory: the memory estimate of the step.
    """
    train, width = experiment.train, compute_itemsize(experiment, platform)
    lengths, rows = lengths_of(shapes_of(experiment)), micro_rows(experiment, mesh_sizes) / mesh_sizes[LENGTH_AXIS]
    residuals = _block_residuals(experiment, mesh_sizes, platform)
    of_attention = sum(x.bytes for x in residuals if x.module.endswith("attention"))
    attention = _attention_bytes(experiment, mesh_sizes, platform, rows / mesh_sizes[TENSOR_AXIS])
    layers = _layer_bytes(experiment, mesh_sizes, platform)
    updates = train.accumulate * experiment.optimizer.gradients_per_update
    in_blocks = updates * pipeline_stages(experiment, mesh_sizes).relative_layer_time
    in_memory = platform == "gpu" or train.remat == "block" or _layer_residuals(residuals) > _LAYER_VMEM_BYTES
    columns = logits_per_target(experiment.model) / mesh_sizes[TENSOR_AXIS]
    logits = rows * lengths.targets * columns * tile_padding(columns, platform)
    return Passes(
        block_residuals=in_blocks * in_memory * (sum(x.bytes for x in residuals) - of_attention),
        attention_residuals=in_blocks * in_memory * of_attention,
        pairs=in_blocks * in_memory * attention.pairs,
        dropped=in_blocks * attention.dropped,
        row_bias=in_blocks * in_memory * attention.row_bias,
        spilled=in_blocks * sum(x.bytes for x in residuals if _bytes_of_a_layer(x) > _LAYER_VMEM_BYTES),
        rotated=in_blocks * in_memory * attention.rotated,
        logits=updates * width * logits,
        state=memory.parameters + memory.optimizer + memory.ema + memory.gradients,
        stacked=in_blocks * _stacked_residuals(experiment, mesh_sizes, platform),
        factored=memory.parameters * (memory.optimizer < memory.parameters / 10),
        layers=updates * layers.unrolled,
        looped=updates * layers.looped,
        experts=updates * layers.experts,
    )


def _block_residuals(experiment: Experiment, mesh_sizes: dict[str, int], platform: str) -> list[SavedResidual]:
    """Returns the residuals of the layers without rematerialization, in the compute dtype.

    This excludes float32 arrays of a bfloat16 step: attention logits and sums over the model width.
    """
    without_remat = dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, remat="none"))
    is_float32 = compute_itemsize(experiment, platform) == 4
    residuals = saved_residuals(without_remat, mesh_sizes, platform)
    return [x for x in residuals if x.module != "loss" and (is_float32 or x.dtype != "float32")]


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


def _layer_residuals(arrays: list[SavedResidual]) -> float:
    """Computes the size in bytes of one layer's residuals, for the stack in which this size is largest."""
    bytes_by_stack: dict[Optional[str], float] = {}
    for x in arrays:
        stack = stack_of(x.module)
        bytes_by_stack[stack] = bytes_by_stack.get(stack, 0.0) + _bytes_of_a_layer(x)
    return max((size for stack, size in bytes_by_stack.items() if stack is not None), default=0.0)


def _bytes_of_a_layer(one: SavedResidual) -> float:
    """Returns the size of a residual in one layer, [L, …] if it is part of a stack."""
    return one.bytes / one.shape[0] if stack_of(one.module) is not None and one.shape else one.bytes


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
