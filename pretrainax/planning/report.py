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
from pretrainax.reporting.units import byte_size, short_time
from pretrainax.runtime.chips import Chip
from pretrainax.sharding.stages import describe_stages

_MOST = 10  # maximum number of rows for meshes and for large arrays


def run_report(name: str, candidate: Candidate, topology: Topology, compiled: Optional[Compiled], note: str) -> str:
    """Returns the full report of one run on one mesh, as text for a terminal.

    Args:
      name: name of the config.
      compiled: the compiled step; None leaves out the parts about the compiled step.
      note: one line about the compilation, printed in the summary.
    """
    blocks = [
        _table(_summary(name, candidate, topology, compiled, note)),
        "memory of one device (activations: saved for the backward pass of one microbatch; logits: one chunk;\n"
        "workspace: backward pass of one layer; copies: parameters in the compute dtype)\n"
        + _table(_memory(candidate, compiled)),
        "largest arrays of one device (estimate)\n"
        + _table([(where, byte_size(size)) for where, size in candidate.memory.largest[:_MOST]]),
        "communication: bytes that one device sends per step, by mesh axis\n" + _table(_traffic(candidate, compiled)),
    ]
    if compiled and compiled.buffers:
        buffers = [(b.where, b.shape, byte_size(b.bytes)) for b in compiled.buffers[:_MOST]]
        blocks.append("largest arrays of the compiled step\n" + _table(buffers))
    if compiled and compiled.moved:
        blocks.append(
            "memory traffic of the compiled step, by kind of kernel\n" + _table(_memory_traffic(compiled.moved))
        )
    return "\n\n".join(blocks)


def _summary(
    name: str, candidate: Candidate, topology: Topology, compiled: Optional[Compiled], note: str
) -> Iterator[tuple[str, ...]]:
    time, experiment, chip = candidate.roofline, candidate.experiment, topology.chip
    flops = sum(p.steps * one.roofline.flops for p, one in candidate.phases) or time.flops * experiment.train.steps
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
        off = needed / compiled.needed - 1
        yield "", f"{verdict} as compiled: {byte_size(compiled.needed)}; the estimate differs from it by {off:+.0%}"
    yield "", note
    if candidate.memory.exceeds_default_share(chip):
        yield "", f"JAX uses 75 % of a GPU by default, which is too little: set {MEM_FRACTION}"
    for phase, one in candidate.phases:
        yield phase.name, _phase(phase, one)
    phase_name = next((f" of {phase.name}" for phase, one in candidate.phases if one is candidate.largest), "")
    yield (
        "FLOPs",
        f"{time.flops:.3g} per step{phase_name}, {flops:.3g} in total (model FLOPs: full attention, no recomputation)",
    )
    if time.done < time.flops:
        yield (
            "",
            f"{time.done:.3g} per step ({time.done / time.flops:.0%}) executed: attention skips masked positions",
        )
    yield "step", _step(time)
    yield "run", _run(time, experiment, chip)
    least, most = time.spread
    yield (
        "",
        "MFU: model FLOPs utilization; ranges: published runs took "
        f"{least} to {most} times the estimate (benchmarks/published.toml)",
    )
    if compiled and compiled.moved:
        one = candidate.largest
        # With several slices, the compiled step does not show which bytes use the slow network; the estimate does.
        sent = compiled.collectives if topology.slices == 1 else one.collectives
        compiled_time = roofline.estimate_time(
            one.experiment, one.sizes, topology, one.memory, sent, moved=compiled.moved
        )
        yield "as compiled", _step(compiled_time)
        yield "", _memory_traffic_line(compiled.moved, chip)
        if not candidate.phases:  # only one phase is compiled
            yield "", _run(compiled_time, experiment, chip)


def _phase(phase: RunPhase, one: Candidate) -> str:
    verdict = "fits" if one.fits else "DOES NOT FIT"
    return (
        f"{phase.what}; {byte_size(one.memory.total)}, {verdict}; {short_time(one.roofline.seconds)} per step, "
        f"{one.roofline.hours:,.1f} hours"
    )


def _step(time: Roofline) -> str:
    least, most = time.range
    return (
        f"{short_time(time.seconds)} ({short_time(least)} to {short_time(most)}), {_mfu(time)}: products "
        f"{short_time(time.compute)}, other memory access {short_time(time.memory)}, exposed communication "
        f"{short_time(time.exposed)}; hidden communication {short_time(time.hidden)}"
    )


def _memory_traffic_line(moved: MemoryTraffic, chip: Chip) -> str:
    return (
        f"memory traffic of the compiled step: {byte_size(moved.total)} by {moved.kernels:,} kernels, of which "
        f"{byte_size(moved.besides_products)} outside products, at {byte_size(chip.memory_rate)}/s"
    )


def _mfu(time: Roofline) -> str:
    return f"{time.mfu:.0%} MFU" + (f" ({time.mfu_executed:.0%} from executed FLOPs)" if time.done < time.flops else "")


def _run(time: Roofline, experiment: Experiment, chip: Chip) -> str:
    least, most = time.spread
    price = f"the price of a {chip.name} is unknown"
    if time.price is not None:
        price_range = f"{least * time.price:,.0f} to {most * time.price:,.0f}"
        price = f"{time.price:,.0f} ({price_range}) USD at {chip.price:.2f} per device hour"
    hours = f"{time.hours:,.1f} ({least * time.hours:,.1f} to {most * time.hours:,.1f}) hours"
    return f"{hours} for {experiment.train.steps:,} steps, {price} (pretrainax/runtime/chips.py)"


def _memory(candidate: Candidate, compiled: Optional[Compiled]) -> Iterator[tuple[str, ...]]:
    memory = candidate.memory
    usage = compiled and compiled.memory
    yield "", "estimate", *(("compiled",) if usage else ())
    for name, size in memory.parts():
        yield name, byte_size(size)
    yield "state and batch", byte_size(memory.arguments), *((byte_size(usage.arguments),) if usage else ())
    yield "peak memory", byte_size(memory.total), *((byte_size(usage.total),) if usage else ())


def _traffic(candidate: Candidate, compiled: Optional[Compiled]) -> Iterator[tuple[str, ...]]:
    """Yields the rows of the communication table: bytes per mesh axis and kind of collective.

    With `compiled`, the rows also list the bytes in the compiled step and the fraction overlapped with matrix
    multiplications.
    """
    sums: dict[tuple[str, str], list[int]] = {}
    for place, collectives in enumerate((candidate.collectives, compiled.collectives if compiled else [])):
        for one in collectives:
            sizes = sums.setdefault((one.axis, one.kind), [0, 0, 0])
            sizes[place] += one.total
            sizes[2] += one.bytes * (one.overlapping or 0)
    yield "axis", "kind", "estimate", *(("compiled", "overlapped with products") if compiled else ())
    for (axis, kind), (estimated, measured, overlapped) in sorted(sums.items(), key=lambda item: -max(item[1])):
        share = f"{overlapped / measured:.0%}" if measured else ""
        yield axis, kind, byte_size(estimated), *((byte_size(measured), share) if compiled else ())


def _memory_traffic(moved: MemoryTraffic) -> Iterator[tuple[str, ...]]:
    for kind, size in moved.sum_by("kind").items():
        yield kind, byte_size(size), f"{size / moved.total:.0%}"


def mesh_table(experiment: Experiment, found: list[Candidate]) -> str:
    """Returns a table of the best meshes, one row per mesh, with memory, step time and the flags to set.

    Args:
      experiment: the config before the search; the flags change it.
      found: the result of `search.best`, best first.

    Raises:
      UserError: `found` is empty.
    """
    if not found:
        raise UserError(
            "no mesh of these devices divides both config.train.global_batch_size and config.model; change one of them"
        )
    rows = [("fits", "memory", "step", "MFU", "flags")]
    for one in found[:_MOST]:
        fits, time = "yes" if one.fits else "no", one.roofline
        cells = byte_size(one.memory.total), short_time(time.seconds), f"{time.mfu:.0%}"
        rows.append((fits, *cells, _flags_to_add(one, experiment)))
    return _table(rows)


def _flags_to_add(candidate: Candidate, experiment: Experiment) -> str:
    return candidate.flags(experiment) or "(no change)"


def proposals(experiment: Experiment, topology: Topology) -> str:
    """Returns a table of changes that make a run fit in memory, on the topology or else on a larger topology."""
    larger, found = search.remedies_on_larger_topology(experiment, topology)
    title = "changes that make the run fit, simplest change first"
    if larger != topology:
        failure = f"no mesh of {topology}, rematerialization policy or accumulation makes the run fit"
        if not found:
            return f"{failure}, and neither does {larger}"
        title = f"{failure}; changes that fit on {larger}"
    rows = [(byte_size(c.memory.total), short_time(c.roofline.seconds), _flags_to_add(c, experiment)) for c in found]
    return f"{title}\n" + _table([("memory", "step", "flags to add"), *rows])


def _mesh(candidate: Candidate) -> str:
    parts = [f"{axis} {size}" for axis, size in candidate.sizes.items() if size > 1]
    slices = candidate.experiment.mesh.slices
    return " × ".join(parts or ["one device"]) + (f", data over {slices} slices" if slices > 1 else "")


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    return text_table(rows, indent="  ")
