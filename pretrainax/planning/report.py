"""Formats the tables that `plan` prints: one run on one mesh, the best meshes, and changes that make a run fit."""

from collections.abc import Iterable, Iterator
from typing import Optional

from pretrainax.config import Experiment, RunPhase, UserError
from pretrainax.models.active import describe_experts
from pretrainax.planning import roofline, search
from pretrainax.planning.compiled import Compiled
from pretrainax.planning.hlo import MemoryTraffic
from pretrainax.planning.memory import MARGIN, MEM_FRACTION
from pretrainax.planning.roofline import Roofline
from pretrainax.planning.search import Candidate
from pretrainax.planning.topologies import Topology
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.units import byte_size, percent, short_time, with_decimals
from pretrainax.runtime.chips import Chip
from pretrainax.sharding.stages import describe_stages

_MAX_ROWS = 10  # maximum number of rows in the tables of meshes and of large arrays


def run_report(name: str, candidate: Candidate, topology: Topology, compiled: Optional[Compiled], note: str) -> str:
    """Formats the full report of one run on one mesh, for a terminal.

    Args:
      name: name of the config.
      compiled: the compiled step. If None, the report omits the tables about the compiled step.
      note: one line about the compilation, printed in the summary.
    """
    blocks = [
        _table(_summary(name, candidate, topology, compiled, note)),
        "memory of one device (activations: saved for the backward pass of one microbatch; logits: one chunk;\n"
        "workspace: backward pass of one layer; copies: parameters in the compute dtype)\n"
        + _table(_memory(candidate, compiled)),
        "largest arrays of one device (estimate)\n"
        + _table([(where, byte_size(size)) for where, size in candidate.memory.largest[:_MAX_ROWS]]),
        "communication: bytes that one device sends per step, by mesh axis\n" + _table(_traffic(candidate, compiled)),
    ]
    if compiled and compiled.buffers:
        buffers = [(b.where, b.shape, byte_size(b.bytes)) for b in compiled.buffers[:_MAX_ROWS]]
        blocks.append("largest arrays of the compiled step\n" + _table(buffers))
    if compiled and compiled.traffic:
        blocks.append(
            "memory traffic of the compiled step, by kind of kernel\n" + _table(_memory_traffic(compiled.traffic))
        )
    return "\n\n".join(blocks)


def _summary(
    name: str, candidate: Candidate, topology: Topology, compiled: Optional[Compiled], note: str
) -> Iterator[tuple[str, ...]]:
    time, experiment, chip = candidate.roofline, candidate.experiment, topology.chip
    flops = sum(p.steps * plan.roofline.flops for p, plan in candidate.phases) or time.flops * experiment.train.steps
    fits, needed = candidate.fits, candidate.memory.total
    yield "config", f"{name} on {topology}: {topology.num_devices} device(s) on {topology.hosts} host(s)"
    if experts := describe_experts(experiment.model):
        yield "experts", experts
    yield "mesh", _mesh(candidate)
    if stages := describe_stages(candidate.largest.experiment, candidate.sizes):
        yield "stages", stages
    yield (
        "memory",
        f"{'FITS' if fits else 'DOES NOT FIT'} by the estimate: {byte_size(needed)} per device; limit: {MARGIN:.0%} of "
        f"{byte_size(chip.memory_bytes)}",
    )
    if not fits and candidate.memory.ema and needed - candidate.memory.ema <= MARGIN * chip.memory_bytes:
        yield (
            "",
            f"without the {byte_size(candidate.memory.ema)} of config.train.ema_decay the run fits",
        )
    if compiled:
        verdict = "FITS" if compiled.fits else "DOES NOT FIT"
        error = needed / compiled.needed - 1
        yield "", f"{verdict} as compiled: {byte_size(compiled.needed)}; the estimate differs from it by {error:+.0%}"
    yield "", note
    if candidate.memory.exceeds_default_share(chip):
        yield "", f"JAX uses 75 % of a GPU by default, which is too little: set {MEM_FRACTION}"
    for phase, plan in candidate.phases:
        yield phase.name, _phase(phase, plan)
    phase_name = next((f" of {phase.name}" for phase, plan in candidate.phases if plan is candidate.largest), "")
    yield (
        "FLOPs",
        f"{time.flops:.3g} per step{phase_name}, {flops:.3g} in total (model FLOPs: full attention, no recomputation)",
    )
    if time.executed_flops < time.flops:
        ratio = time.executed_flops / time.flops
        yield "", f"{time.executed_flops:.3g} per step ({percent(ratio)}) executed: attention skips masked positions"
    yield "step", _step(time)
    yield "run", _run(time, experiment, chip)
    least, most = time.spread
    yield (
        "",
        "MFU: model FLOPs utilization; ranges: published runs took "
        f"{least} to {most} times the estimate (benchmarks/published.toml)",
    )
    if compiled and compiled.traffic:
        plan = candidate.largest
        # With several slices, only the estimate knows the bytes on the slow network between slices.
        sent = compiled.collectives if topology.slices == 1 else plan.collectives
        compiled_time = roofline.estimate_time(
            plan.experiment, plan.sizes, topology, plan.memory, sent, traffic=compiled.traffic
        )
        yield "as compiled", _step(compiled_time)
        yield "", _memory_traffic_line(compiled.traffic, chip)
        if not candidate.phases:  # only one phase is compiled
            yield "", _run(compiled_time, experiment, chip)


def _phase(phase: RunPhase, plan: Candidate) -> str:
    """Formats the memory, step time and hours of one training phase."""
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    return (
        f"{phase.what}; {byte_size(plan.memory.total)}, {verdict}; {short_time(plan.roofline.seconds)} per step, "
        f"{with_decimals(plan.roofline.hours, 1)} hours"
    )


def _step(time: Roofline) -> str:
    """Formats the step time with its range, the MFU, and the time in matmuls, memory access and communication."""
    least, most = time.range
    return (
        f"{short_time(time.seconds)} ({short_time(least)} to {short_time(most)}), {_mfu(time)}: products "
        f"{short_time(time.compute)}, other memory access {short_time(time.memory)}, exposed communication "
        f"{short_time(time.exposed)}; hidden communication {short_time(time.hidden)}"
    )


def _memory_traffic_line(traffic: MemoryTraffic, chip: Chip) -> str:
    return (
        f"memory traffic of the compiled step: {byte_size(traffic.total)} by {traffic.kernels:,} kernels, of which "
        f"{byte_size(traffic.bytes_outside_matmuls)} outside products, at {byte_size(chip.memory_rate)}/s"
    )


def _mfu(time: Roofline) -> str:
    return f"{time.mfu:.0%} MFU" + (
        f" ({time.mfu_executed:.0%} from executed FLOPs)" if time.executed_flops < time.flops else ""
    )


def _run(time: Roofline, experiment: Experiment, chip: Chip) -> str:
    """Formats the hours and price of the run, with their ranges."""
    price = f"the price of a {chip.name} is unknown"
    if time.price is not None:
        price = f"{_with_range(time.price, 0, time)} USD at {chip.price:.2f} per device hour"
    hours = f"{_with_range(time.hours, 1, time)} hours"
    return f"{hours} for {experiment.train.steps:,} steps, {price} (pretrainax/runtime/chips.py)"


def _with_range(number: float, decimals: int, time: Roofline) -> str:
    """Formats a number that is proportional to the time of a step, with its range."""
    least, most = (with_decimals(factor * number, decimals) for factor in time.spread)
    return f"{with_decimals(number, decimals)} ({least} to {most})"


def _memory(candidate: Candidate, compiled: Optional[Compiled]) -> Iterator[tuple[str, ...]]:
    """Yields the rows of the memory table: estimated bytes by content and, if `compiled` is given, compiled bytes."""
    memory = candidate.memory
    usage = compiled and compiled.memory
    yield "", "estimate", *(("compiled",) if usage else ())
    for name, size in memory.parts():
        yield name, byte_size(size)
    yield "state and batch", byte_size(memory.arguments), *((byte_size(usage.arguments),) if usage else ())
    yield "peak memory", byte_size(memory.total), *((byte_size(usage.total),) if usage else ())


def _traffic(candidate: Candidate, compiled: Optional[Compiled]) -> Iterator[tuple[str, ...]]:
    """Yields the rows of the communication table: bytes per mesh axis and kind of collective.

    If `compiled` is given, the rows also list the bytes that the compiled step sends and the fraction of its
    communication that overlaps with matrix multiplications.
    """
    bytes_by_collective: dict[tuple[str, str], list[int]] = {}
    for column, collectives in enumerate((candidate.collectives, compiled.collectives if compiled else [])):
        for collective in collectives:
            sizes = bytes_by_collective.setdefault((collective.axis, collective.kind), [0, 0, 0])
            sizes[column] += collective.total
            sizes[2] += collective.bytes * (collective.overlapping or 0)
    yield "axis", "kind", "estimate", *(("compiled", "overlapped with products") if compiled else ())
    for (axis, kind), (estimated, measured, overlapped) in sorted(
        bytes_by_collective.items(), key=lambda item: -max(item[1])
    ):
        overlap = percent(overlapped / measured) if measured else ""
        yield axis, kind, byte_size(estimated), *((byte_size(measured), overlap) if compiled else ())


def _memory_traffic(traffic: MemoryTraffic) -> Iterator[tuple[str, ...]]:
    """Yields one row per kind of kernel: the kind, its bytes, and its fraction of all bytes."""
    for kind, size in traffic.sum_by("kind").items():
        yield kind, byte_size(size), f"{size / traffic.total:.0%}"


def mesh_table(experiment: Experiment, found: list[Candidate]) -> str:
    """Formats a table of the best meshes, one row per mesh, with memory, step time and the flags to set.

    Args:
      experiment: the config before the search; the flags change this config.
      found: the result of `search.best`, best first.

    Raises:
      UserError: `found` is empty.
    """
    if not found:
        raise UserError(
            "no mesh of these devices divides both config.train.global_batch_size and config.model; change one of them"
        )
    rows = [("fits", "memory", "step", "MFU", "flags")]
    for candidate in found[:_MAX_ROWS]:
        fits, time = "yes" if candidate.fits else "no", candidate.roofline
        cells = byte_size(candidate.memory.total), short_time(time.seconds), f"{time.mfu:.0%}"
        rows.append((fits, *cells, _flags_to_add(candidate, experiment)))
    return _table(rows)


def _flags_to_add(candidate: Candidate, experiment: Experiment) -> str:
    return candidate.flags(experiment) or "(no change)"


def proposals(experiment: Experiment, topology: Topology) -> str:
    """Formats a table of changes that make a run fit in memory, on this topology or, failing that, on a larger one."""
    larger, candidates = search.remedies_on_larger_topology(experiment, topology)
    title = "changes that make the run fit, simplest change first"
    if larger != topology:
        failure = f"no mesh of {topology}, rematerialization policy or accumulation makes the run fit"
        if not candidates:
            return f"{failure}, and neither does {larger}"
        title = f"{failure}; changes that fit on {larger}"
    rows = [
        (
            byte_size(candidate.memory.total),
            short_time(candidate.roofline.seconds),
            _flags_to_add(candidate, experiment),
        )
        for candidate in candidates
    ]
    return f"{title}\n" + _table([("memory", "step", "flags to add"), *rows])


def _mesh(candidate: Candidate) -> str:
    axis_sizes = [f"{axis} {size}" for axis, size in candidate.sizes.items() if size > 1]
    slices = candidate.experiment.mesh.slices
    return " × ".join(axis_sizes or ["one device"]) + (f", data over {slices} slices" if slices > 1 else "")


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    return text_table(rows, indent="  ")
