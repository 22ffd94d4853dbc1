"""The text of a plan: one run on one mesh, the best meshes, what would make a run fit."""

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

_MOST = 10  # meshes and large arrays that are listed


def run_report(name: str, candidate: Candidate, topology: Topology, compiled: Optional[Compiled], note: str) -> str:
    """Returns everything about one run on one mesh, for a terminal."""
    blocks = [
        _table(_summary(name, candidate, topology, compiled, note)),
        "bytes of a device\n" + _table(_memory(candidate, compiled)),
        "the largest\n" + _table([(where, byte_size(size)) for where, size in candidate.memory.largest[:_MOST]]),
        "sent by a device in a step\n" + _table(_traffic(candidate, compiled)),
    ]
    if compiled and compiled.buffers:
        buffers = [(b.where, b.shape, byte_size(b.bytes)) for b in compiled.buffers[:_MOST]]
        blocks.append("the largest, as compiled\n" + _table(buffers))
    if compiled and compiled.moved:
        blocks.append("moved through memory in a step, as compiled\n" + _table(_kinds(compiled.moved)))
    return "\n\n".join(blocks)


def _summary(
    name: str, candidate: Candidate, topology: Topology, compiled: Optional[Compiled], note: str
) -> Iterator[tuple[str, ...]]:
    time, experiment, chip = candidate.roofline, candidate.experiment, topology.chip
    flops = sum(p.steps * one.roofline.flops for p, one in candidate.phases) or time.flops * experiment.train.steps
    fits, needed = candidate.fits, candidate.memory.total
    yield "config", f"{name} on {topology}: {topology.num_devices} devices, hosts: {topology.hosts}"
    if experts := describe_experts(experiment.model):
        yield "experts", experts
    yield "mesh", _mesh(candidate)
    if stages := describe_stages(candidate.largest.experiment, candidate.sizes):
        yield "stages", stages
    yield (
        "memory",
        f"{'FITS' if fits else 'DOES NOT FIT'} by the estimate: {byte_size(needed)}, at most {MARGIN:.0%} of "
        f"{byte_size(chip.memory_bytes)} a device",
    )
    if not fits and candidate.memory.ema and needed - candidate.memory.ema <= MARGIN * chip.memory_bytes:
        yield "", f"without the {byte_size(candidate.memory.ema)} of config.train.ema_decay it would fit"
    if compiled:
        verdict = "FITS" if compiled.fits else "DOES NOT FIT"
        off = needed / compiled.needed - 1
        yield "", f"{verdict} as compiled: {byte_size(compiled.needed)}; the estimate is {off:+.0%} of it"
    yield "", note
    if candidate.memory.exceeds_default(chip):
        yield "", f"JAX takes 75 % of a GPU: set {MEM_FRACTION}"
    for phase, one in candidate.phases:
        yield phase.name, _phase(phase, one)
    of_which = next((f" of {phase.name}" for phase, one in candidate.phases if one is candidate.largest), "")
    yield "FLOPs", f"{time.flops:.3g} a step{of_which} of the model's own, {flops:.3g} in all"
    if time.done < time.flops:
        yield "", f"{time.done:.3g} a step ({time.done / time.flops:.0%}) done: attention skips what its masks hide"
    yield "step", _step(time)
    yield "run", _run(time, experiment, chip)
    least, most = time.spread
    yield "", f"in brackets: published runs took {least} to {most} times what is expected (benchmarks/published.toml)"
    if compiled and compiled.moved:
        one = candidate.largest
        # Between slices it has one all-reduce, of which nothing says which part goes over the slow network.
        sent = compiled.collectives if topology.slices == 1 else one.collectives
        again = roofline.expect(one.experiment, one.sizes, topology, one.memory, sent, moved=compiled.moved)
        yield "as compiled", _step(again)
        yield "", _counted(compiled.moved, chip)
        if not candidate.phases:  # of which one is compiled
            yield "", _run(again, experiment, chip)


def _phase(phase: RunPhase, one: Candidate) -> str:
    verdict = "fits" if one.fits else "DOES NOT FIT"
    return (
        f"{phase.what}; {byte_size(one.memory.total)}, {verdict}; {short_time(one.roofline.seconds)} a step, "
        f"{one.roofline.hours:,.1f} hours"
    )


def _step(time: Roofline) -> str:
    least, most = time.range
    return (
        f"{short_time(time.seconds)} ({short_time(least)} to {short_time(most)}), {_mfu(time)}: products "
        f"{short_time(time.compute)}, memory {short_time(time.memory)}, links {short_time(time.exposed)}; hidden "
        f"behind these, links {short_time(time.hidden)}"
    )


def _counted(moved: MemoryTraffic, chip: Chip) -> str:
    return (
        f"memory is counted in the compiled step: {byte_size(moved.total)} by {moved.kernels:,} kernels, of it "
        f"{byte_size(moved.besides_products)} besides products, at {byte_size(chip.memory_rate)}/s"
    )


def _mfu(time: Roofline) -> str:
    return f"{time.mfu:.0%} MFU" + (f" ({time.mfu_done:.0%} of what is done)" if time.done < time.flops else "")


def _run(time: Roofline, experiment: Experiment, chip: Chip) -> str:
    least, most = time.spread
    price = f"no price of a {chip.name} is known"
    if time.price is not None:
        between = f"{least * time.price:,.0f} to {most * time.price:,.0f}"
        price = f"{time.price:,.0f} ({between}) USD at {chip.price:.2f} a device and hour"
    hours = f"{time.hours:,.1f} ({least * time.hours:,.1f} to {most * time.hours:,.1f}) hours"
    return f"{hours} for {experiment.train.steps:,} steps, {price} (pretrainax/runtime/chips.py)"


def _memory(candidate: Candidate, compiled: Optional[Compiled]) -> Iterator[tuple[str, ...]]:
    memory = candidate.memory
    said = compiled and compiled.memory
    yield "", "estimate", *(("compiled",) if said else ())
    for name, size in memory.parts():
        yield name, byte_size(size)
    yield "arguments of the step", byte_size(memory.arguments), *((byte_size(said.arguments),) if said else ())
    yield "at the worst moment", byte_size(memory.total), *((byte_size(said.total),) if said else ())


def _traffic(candidate: Candidate, compiled: Optional[Compiled]) -> Iterator[tuple[str, ...]]:
    """Yields bytes by axis and kind, estimated and compiled, and how much of these is sent while products run."""
    sums: dict[tuple[str, str], list[int]] = {}
    for place, found in enumerate((candidate.collectives, compiled.collectives if compiled else [])):
        for one in found:
            sizes = sums.setdefault((one.axis, one.kind), [0, 0, 0])
            sizes[place] += one.total
            sizes[2] += one.bytes * (one.beside or 0)
    yield "axis", "kind", "estimate", *(("compiled", "beside products") if compiled else ())
    for (axis, kind), (estimated, measured, beside) in sorted(sums.items(), key=lambda item: -max(item[1])):
        share = f"{beside / measured:.0%}" if measured else ""
        yield axis, kind, byte_size(estimated), *((byte_size(measured), share) if compiled else ())


def _kinds(moved: MemoryTraffic) -> Iterator[tuple[str, ...]]:
    for kind, size in moved.by("kind").items():
        yield kind, byte_size(size), f"{size / moved.total:.0%}"


def mesh_table(experiment: Experiment, found: list[Candidate]) -> str:
    """Returns the first of the meshes that a search found, a row each; UserError where it found none."""
    if not found:
        raise UserError("no mesh of these devices divides config.train.global_batch_size and config.model")
    rows = [("fits", "memory", "step", "MFU", "flags")]
    for one in found[:_MOST]:
        fits, time = "yes" if one.fits else "no", one.roofline
        cells = byte_size(one.memory.total), short_time(time.seconds), f"{time.mfu:.0%}"
        rows.append((fits, *cells, _flags_to_add(one, experiment)))
    return _table(rows)


def _flags_to_add(candidate: Candidate, experiment: Experiment) -> str:
    return candidate.flags(experiment) or "(as it is)"


def proposals(experiment: Experiment, topology: Topology) -> str:
    """Returns what would make a run fit, on the topology or else on a larger one."""
    larger, found = search.enough(experiment, topology)
    title = "what would fit, the cheapest change first"
    if larger != topology:
        no = f"no mesh of {topology}, rematerialisation policy or accumulation makes it fit"
        if not found:
            return f"{no}, nor does {larger}"
        title = f"{no}; on {larger} fits"
    rows = [(byte_size(c.memory.total), short_time(c.roofline.seconds), _flags_to_add(c, experiment)) for c in found]
    return f"{title}\n" + _table([("memory", "step", "flags to add"), *rows])


def _mesh(candidate: Candidate) -> str:
    parts = [f"{axis} {size}" for axis, size in candidate.sizes.items() if size > 1]
    slices = candidate.experiment.mesh.slices
    return " × ".join(parts or ["one device"]) + (f", data over {slices} slices" if slices > 1 else "")


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    return text_table(rows, indent="  ")
