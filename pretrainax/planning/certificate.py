"""Certifies a compiled step: how far its bytes, products, kernels and programs are from what the config asks for.

    plan --prove --config=gpt2:124m --topology=h100:1

Each entry is a number with its unit, its source and the direction that is better. All counts describe one device and
one update of the compiled program, which no accelerator has to run.

- Products are classified by the operand types in the optimized HLO. Fused attention kernels have no FLOPs in the HLO;
  `unknown_products` counts all other kernels without FLOPs, which every other entry leaves out.
- Attention: the FLOPs of products that the compiled step computes outside fused kernels, compared with the FLOPs of the
  model's attention. Rematerialized products do not count.
- `recomputed` compares products outside attention and the optimizer with the model's count (`models.flops`).
- `loader_over_chip` divides the measured rate of a data pipeline by the rate at which a device consumes tokens.
"""

import dataclasses
import math
from typing import NamedTuple, Optional

import jax

from pretrainax.config import Experiment, UserError, phases_of
from pretrainax.data.batch import lengths_of
from pretrainax.data.objectives import CausalLM, MaskedLM, SpanCorruption
from pretrainax.data.packing import OneEach
from pretrainax.files.json_files import JsonObject
from pretrainax.interop.teacher import teacher_of
from pretrainax.layers.attention_spec import PRODUCTS
from pretrainax.models.flops import Attention, attention_flops, flops_per_step, update_cost, work_of
from pretrainax.planning import memory
from pretrainax.planning.activations import abstract_state, attention_specs, micro_rows, shapes_of
from pretrainax.planning.compiled import Compiled
from pretrainax.planning.estimated_traffic import least_bytes
from pretrainax.planning.hlo import MatrixProduct, matrix_products_of, runtime_conditionals
from pretrainax.planning.roofline import Roofline, estimate_time
from pretrainax.planning.topologies import Topology
from pretrainax.planning.traffic import collectives
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.units import byte_size, large_number, percent
from pretrainax.runtime.chips import ALIGNMENT, Chip
from pretrainax.sharding.axes import PIPELINE_AXIS
from pretrainax.sharding.mesh import mesh_sizes
from pretrainax.tasks import Task

# Tokens/s of a data pipeline on one core: docs/benchmarks.md, measured by benchmarks/data.py on 2026-11-23.
LOADER_RATES = {CausalLM: 28.9e6, MaskedLM: 7.0e6, SpanCorruption: 7.1e6}
# Bytes/s that a host writes into a checkpoint: an assumption, the rate of data/checksums.py. A slow disk takes longer.
STORAGE_RATE = 1e9
_NARROW = {"fp8": ("f8",), "int8": ("s8", "u8")}  # prefixes of the types of 8-bit products, by config.train.products
_MAX_ROWS = 2**20  # largest number of rows that `largest_batch` tries


class Entry(NamedTuple):
    """One line of a certificate."""

    name: str
    value: Optional[float]  # None: the config or the HLO does not determine the value
    unit: str  # "%" for a fraction, 0 to 1
    source: str
    larger_is_better: bool
    note: str = ""


def certify(
    experiment: Experiment, topology: Topology, compiled: Compiled, run: Optional[Experiment] = None
) -> list[Entry]:
    """Returns the certificate of a compiled step.

    Args:
      experiment: the compiled config, without phases.
      run: the config with all phases, of which `experiment` is one; None: `experiment`.

    Raises:
      UserError: compilation ran out of memory, so there is no program.
    """
    if compiled.program is None or compiled.traffic is None or compiled.memory is None:
        needed, there = byte_size(compiled.needed), byte_size(compiled.available)
        raise UserError(
            f"the step needs {needed}, the device has {there}: reduce config.train.global_batch_size, which is "
            f"{experiment.train.global_batch_size}"
        )
    chip = topology.chip
    sizes = mesh_sizes(experiment.mesh, topology.num_devices, processes=topology.hosts)
    estimate = memory.estimate(experiment, sizes, chip)
    floor = sum(least_bytes(experiment, sizes, chip.platform, estimate).values())
    # With several slices, only the estimate tells which bytes use the slow network between slices.
    sent = compiled.collectives if topology.slices == 1 else collectives(experiment, sizes, topology)
    time = estimate_time(experiment, sizes, topology, estimate, sent, traffic=compiled.traffic)
    optimizer = compiled.traffic.sum_by("kind").get("optimizer", 0)
    rows = largest_batch(experiment, sizes, chip)
    return [
        Entry("bytes_over_floor", compiled.traffic.total / floor, "×", "HLO; floor: plan", False, byte_size(floor)),
        *_product_entries(experiment, sizes, topology, matrix_products_of(compiled.program)),
        Entry("exposed_collectives", time.exposed * 1e3, "ms", "HLO; rates: plan", False),
        Entry("optimizer_traffic", optimizer / estimate.parameters, "× parameters", "HLO", False),
        Entry("compiled_programs", compiled_programs(run or experiment), "programs", "config", False),
        Entry("conditionals", math.ceil(runtime_conditionals(compiled.program)), "per step", "HLO", False),
        Entry("temporaries", compiled.memory.temporaries, "bytes", "compiler", False),
        Entry("largest_batch", rows, "rows per device", "plan's memory estimate", True),
        _loader_entry(experiment, topology, time),
        Entry("checkpoint", _checkpoint_seconds(experiment, sizes, topology), "s", "state / 1 GB/s per host", False),
    ]


def values(entries: list[Entry]) -> JsonObject:
    """Returns {name: {"value", "unit", "source", "note"}} of a certificate, for `--json`."""
    fields = ("value", "unit", "source", "note")
    return {entry.name: {field: getattr(entry, field) for field in fields} for entry in entries}


def table(entries: list[Entry]) -> str:
    """Formats a certificate for a terminal, one line per entry with its source in brackets."""
    rows = [(entry.name.replace("_", " "), _number(entry), f"[{entry.source}]", entry.note) for entry in entries]
    return text_table(rows, indent="  ")


def _number(entry: Entry) -> str:
    if entry.value is None:
        return "unknown"
    if entry.unit == "%":
        return percent(entry.value, 1)
    if entry.unit == "bytes":
        return byte_size(entry.value)
    number = f"{entry.value:,}" if isinstance(entry.value, int) else f"{entry.value:.3g}"
    return f"{number} {entry.unit}"


# --- products --------------------------------------------------------------------------------------------------------


def _product_entries(
    experiment: Experiment, sizes: dict[str, int], topology: Topology, products: list[MatrixProduct]
) -> list[Entry]:
    counted = [product for product in products if product.flops]
    unknown = [product for product in products if product.flops is None and not product.is_fused_attention]
    intended = intended_types(experiment)
    other = [product for product in counted if not _has_types(product, intended)]
    multiple = ALIGNMENT[topology.chip.platform]
    unaligned = [product for product in counted if not product.is_aligned(multiple)]
    layers = [x for x in counted if not x.is_attention and not x.module.startswith("optimizer")]
    matrices, attention = _model_flops(experiment, sizes, topology.chip.platform)
    return [
        Entry("intended_type", _share(counted, other), "%", "HLO", True, f"{'/'.join(intended)}; {_worst(other)}"),
        Entry("fused_attention", _fused_share(products, attention / topology.num_devices), "%", "HLO, model", True),
        Entry("aligned", _share(counted, unaligned), "%", "HLO", True, f"multiples of {multiple}; {_worst(unaligned)}"),
        Entry("recomputed", _flops(layers) * topology.num_devices / matrices, "× the model's FLOPs", "HLO", False),
        Entry("unknown_products", sum(x.times for x in unknown), "kernels", "HLO", False, _worst(unknown)),
    ]


def intended_types(experiment: Experiment) -> tuple[str, ...]:
    """Returns the prefixes of the intended operand types: bfloat16, or 8 bits if `config.train.products` selects them.

    A config that computes in float32 therefore has a share of 0.
    """
    return _NARROW.get(experiment.train.products, ("bf16",))


def _has_types(product: MatrixProduct, intended: tuple[str, ...]) -> bool:
    """Checks the operand types of a product; the products of attention stay in bfloat16 if the others have 8 bits."""
    allowed = (*intended, "bf16") if product.is_attention else intended
    return all(dtype.startswith(allowed) for dtype in product.dtypes)


def _flops(products: list[MatrixProduct]) -> float:
    return sum(product.flops or 0.0 for product in products)


def _share(products: list[MatrixProduct], faulty: list[MatrixProduct]) -> Optional[float]:
    """Computes the fraction of the FLOPs of `products` that are not in `faulty`; None without products."""
    return 1 - _flops(faulty) / _flops(products) if products else None


def _worst(products: list[MatrixProduct]) -> str:
    """Describes the product with the most FLOPs."""
    worst = max(products, key=lambda product: product.flops or product.times, default=None)
    return "no other" if worst is None else f"largest other: {worst}, {'·'.join(worst.dtypes)}"


def _fused_share(products: list[MatrixProduct], model_flops: float) -> Optional[float]:
    """Computes the fraction of the attention FLOPs of a device that fused kernels compute; None without attention.

    Args:
      model_flops: FLOPs of attention per device and update, forward and backward, with the pairs that the chosen
        implementation computes.
    """
    unfused = _flops([x for x in products if x.is_attention and not x.is_recomputed])
    has_kernels = any(product.is_fused_attention for product in products)
    fused = max(model_flops - unfused, 0.0) if has_kernels else 0.0
    return fused / (fused + unfused) if fused + unfused else None


def _model_flops(experiment: Experiment, sizes: dict[str, int], platform: str) -> tuple[float, float]:
    """Computes the model's FLOPs per update of all devices: (outside attention, attention as executed)."""
    lengths, cost = lengths_of(shapes_of(experiment)), update_cost(experiment)
    tokens, rows, teacher = (lengths.inputs, lengths.targets), experiment.rows_per_update, teacher_of(experiment)
    work = work_of(attention_specs(experiment, sizes, platform), experiment.train.attention, platform)

    def full(group: Attention) -> float:
        return PRODUCTS * group.queries * group.keys

    def executed(group: Attention) -> float:
        return PRODUCTS * float(work(group).pairs.sum())

    total = flops_per_step(experiment.model, rows, *tokens, teacher, cost) - cost.per_update
    counts = []
    for pairs in (full, executed):
        flops = attention_flops(experiment.model, *cost.lengths(*tokens), lambda g, p=pairs: cost.attention(g) * p(g))
        flops += 0.0 if teacher is None else attention_flops(teacher, *tokens, pairs) / 3
        counts.append(rows * flops)
    return total - counts[0], counts[1]


# --- programs, memory and data ---------------------------------------------------------------------------------------


def compiled_programs(experiment: Experiment) -> int:
    """Counts the programs with the model that a run compiles, from its phases, row lengths and objective.

    These are the initialization, a train step for each different phase and row length, an evaluation step for each row
    length, and one more: the step that returns the outputs of a task, or the predictions of the samples at the end of
    the run. Small programs, such as the ones that place arrays, do not count. Prompts and generated answers add more
    programs.
    """
    steps = set()
    for phase in phases_of(experiment):
        e = phase.experiment
        shapes = {name: x.shape for name, x in shapes_of(e).items()}
        parts = repr((e.model, e.train, e.optimizer, e.schedule, shapes))
        steps |= {(parts, length) for length in _row_lengths(e)}
    # A task validates on every record, so its validation has no buckets.
    evaluations = 1 if isinstance(experiment.objective, Task) else len(_row_lengths(experiment))
    return 1 + len(steps) + evaluations + 1


def _row_lengths(experiment: Experiment) -> list[int]:
    packing = experiment.data.packing
    buckets = packing.buckets if isinstance(packing, OneEach) else ()
    return [*buckets, experiment.data.sequence_length]


def largest_batch(experiment: Experiment, sizes: dict[str, int], chip: Chip) -> int:
    """Returns the largest number of rows per device and microbatch with which the run fits by the memory estimate.

    A pipeline divides its rows into `config.train.pipeline_microbatches` equal parts, so the result is a multiple.
    """
    stages = sizes[PIPELINE_AXIS]
    parts = experiment.train.pipeline_microbatches if stages > 1 else 1
    rows, unit = micro_rows(experiment, sizes), parts // math.gcd(parts, stages) or 1

    def fits(count: int) -> bool:
        batch = round(experiment.train.global_batch_size * unit * count / rows)
        train = dataclasses.replace(experiment.train, global_batch_size=batch)
        return memory.estimate(dataclasses.replace(experiment, train=train), sizes, chip).fits(chip)

    if not fits(1):
        return 0
    low, high = 1, 2
    while high < _MAX_ROWS and fits(high):
        low, high = high, 2 * high
    while high - low > max(low // 64, 1):  # within 2 %, because each estimate takes a tenth of a second
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return unit * low


def _loader_entry(experiment: Experiment, topology: Topology, time: Roofline) -> Entry:
    """Compares the corpus tokens per second of one core's data pipeline with the ones that a device consumes."""
    rate = next((n for kind, n in LOADER_RATES.items() if type(experiment.objective) is kind), None)
    raw = experiment.objective.lengths(experiment.data.sequence_length).raw
    consumed = experiment.train.global_batch_size * raw / time.seconds / topology.num_devices
    note = f"a device consumes {large_number(consumed)} tokens/s" + ("" if rate else "; the pipeline was not measured")
    return Entry(
        "loader_over_chip", rate and rate / consumed, "× per core", "benchmarks/data.py; step: plan", True, note
    )


def _checkpoint_seconds(experiment: Experiment, sizes: dict[str, int], topology: Topology) -> float:
    """Computes the seconds in which the hosts write the train state at STORAGE_RATE bytes/s each."""
    leaves = jax.tree.leaves(abstract_state(experiment, sizes))
    return sum(x.size * x.dtype.itemsize for x in leaves) / topology.hosts / STORAGE_RATE
