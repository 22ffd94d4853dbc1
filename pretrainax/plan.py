"""What a run will take, before it is paid for: `python -m pretrainax.plan --config=FILE --topology=v5p:4x4x8`.

Says whether it fits, bytes by part, what goes over which axis of the mesh, FLOPs, time, hours and price; where it does
not fit, what would. `--search` lists the best meshes. No accelerator is needed. With the extra `tpu` or `cuda` the real
step is compiled for the topology too, and its figures stand beside the estimates (`--nocompile`: not).
`--flops`, `--hours`, `--tokens` and `--fit` size a run for a budget: see `pretrainax.scaling.budget`.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any, Optional

import jax
from absl import flags

from pretrainax import cli
from pretrainax.config import Experiment, UserError
from pretrainax.planning import page, roofline, search
from pretrainax.planning.memory import MARGIN
from pretrainax.planning.roofline import Roofline
from pretrainax.planning.search import Candidate
from pretrainax.planning.topologies import Topology
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.units import byte_size, short_time
from pretrainax.runtime.chips import Chip
from pretrainax.scaling import budget

_TOPOLOGY = flags.DEFINE_string("topology", None, "Devices: v5p:4x4x8, h100:8, h100:4x8 (hosts x devices), 4*v5e:16x16")
_SEARCH = flags.DEFINE_bool("search", False, "List the best meshes, each with the fastest rematerialisation")
_COMPILE = flags.DEFINE_bool("compile", True, "Compile the step, where the compiler of the chip is installed")
_TABLE = flags.DEFINE_bool("table", False, "Print docs/plans.md")
_BUDGET = budget.define_flags()
_MOST = 10  # meshes and large arrays that are listed


def main() -> int:
    jax.config.update("jax_platforms", "cpu")  # nothing runs here: an accelerator that is there is left alone
    asked = {name: flag.value for name, flag in _BUDGET.items() if flag.present}
    if any(name in asked for name in budget.BUDGETS):
        topology = {"topology": _TOPOLOGY.value} if _TOPOLOGY.value else {}
        print(budget.report(**asked, **topology), end="")
        return 0
    if _TABLE.value:
        print(page.markdown(list(page.rows())), end="")
        return 0
    experiment = cli.experiment(files=False)
    if _TOPOLOGY.value is None:
        raise UserError("--topology is missing: the devices of the run, as v5p:4x4x8 or h100:8")
    topology = Topology.parse(_TOPOLOGY.value)
    if _SEARCH.value:
        print(in_columns(_meshes(experiment, search.best(experiment, topology))))
        return 0
    candidate = search.assess(experiment, topology)
    compiled, note = _compiled(experiment, topology) if _COMPILE.value else (None, "not compiled: --nocompile")
    print(report(cli.config_name(), candidate, topology, compiled, note))
    if not (compiled or candidate).fits:
        print("\n" + _proposals(experiment, topology))
    return 0


def _compiled(experiment: Experiment, topology: Topology) -> tuple[Optional[Any], str]:
    """What the compiler says, or why it was not asked."""
    from pretrainax.planning.compiled import compile_step

    print(f"compiling for {topology} (--nocompile: not) ...", file=sys.stderr, flush=True)
    try:
        compiled = compile_step(experiment, topology)
    except UserError as e:
        return None, f"not compiled: {e}"
    return compiled, f"compiled in {compiled.seconds:.0f} s"


def report(name: str, candidate: Candidate, topology: Topology, compiled: Optional[Any], note: str) -> str:
    """Everything about one run on one mesh, for a terminal."""
    blocks = [
        in_columns(_summary(name, candidate, topology, compiled, note)),
        "bytes of a device\n" + in_columns(_memory(candidate, compiled)),
        "the largest\n" + in_columns([(where, byte_size(size)) for where, size in candidate.memory.largest[:_MOST]]),
        "sent by a device in a step\n" + in_columns(_traffic(candidate, compiled)),
    ]
    if compiled and compiled.buffers:
        buffers = [(b.where, b.shape, byte_size(b.bytes)) for b in compiled.buffers[:_MOST]]
        blocks.append("the largest, as compiled\n" + in_columns(buffers))
    return "\n\n".join(blocks)


def _summary(
    name: str, candidate: Candidate, topology: Topology, compiled: Optional[Any], note: str
) -> Iterator[tuple[str, ...]]:
    time, experiment, chip = candidate.roofline, candidate.experiment, topology.chip
    fits, needed = candidate.fits, candidate.memory.total
    yield "config", f"{name} on {topology}: {topology.num_devices} devices, hosts: {topology.hosts}"
    yield "mesh", mesh(candidate)
    yield (
        "memory",
        f"{'FITS' if fits else 'DOES NOT FIT'} by the estimate: {byte_size(needed)}, at most {MARGIN:.0%} of "
        f"{byte_size(chip.memory_bytes)} a device",
    )
    if compiled:
        verdict = "FITS" if compiled.fits else "DOES NOT FIT"
        off = needed / compiled.needed - 1
        yield "", f"{verdict} as compiled: {byte_size(compiled.needed)}; the estimate is {off:+.0%} of it"
    yield "", note
    if not chip.is_tpu and needed > 0.75 * chip.memory_bytes:
        yield "", "JAX takes 75 % of a GPU: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
    yield "FLOPs", f"{time.flops:.3g} a step of the model's own, {time.flops * experiment.train.steps:.3g} in all"
    yield "step", _step(time)
    yield "run", _run(time, experiment, chip)
    # Between slices the compiled text has one all-reduce, of which nothing says which part goes over the slow network.
    if compiled and compiled.collectives and topology.slices == 1:
        again = roofline.expect(experiment, candidate.sizes, topology, candidate.memory, compiled.collectives)
        yield "as compiled", _step(again)
        yield "", _run(again, experiment, chip)


def _step(time: Roofline) -> str:
    return (
        f"{short_time(time.seconds)} at best, {time.mfu:.0%} MFU: products {short_time(time.compute)}, memory "
        f"{short_time(time.memory)}, links {short_time(time.exposed)}; hidden behind these, links "
        f"{short_time(time.hidden)}"
    )


def _run(time: Roofline, experiment: Experiment, chip: Chip) -> str:
    price = f", {time.price:,.0f} USD at {chip.price:.2f} a device and hour (pretrainax/runtime/chips.py)"
    return f"{time.hours:,.1f} hours for {experiment.train.steps:,} steps" + (price if chip.price else "")


def _memory(candidate: Candidate, compiled: Optional[Any]) -> Iterator[tuple[str, ...]]:
    memory = candidate.memory
    said = compiled and compiled.memory
    yield "", "estimate", *(("compiled",) if said else ())
    for name, size in memory.parts():
        yield name, byte_size(size)
    arguments = memory.parameters + memory.optimizer + memory.batch
    yield "arguments of the step", byte_size(arguments), *((byte_size(said.arguments),) if said else ())
    yield "at the worst moment", byte_size(memory.total), *((byte_size(said.total),) if said else ())


def _traffic(candidate: Candidate, compiled: Optional[Any]) -> Iterator[tuple[str, ...]]:
    """By axis and kind, estimate and compiled."""
    sums: dict[tuple[str, str], list[int]] = {}
    for place, found in enumerate((candidate.collectives, compiled.collectives if compiled else [])):
        for one in found:
            sums.setdefault((one.axis, one.kind), [0, 0])[place] += one.total
    yield "axis", "kind", "estimate", *(("compiled",) if compiled else ())
    for (axis, kind), (estimated, measured) in sorted(sums.items(), key=lambda item: -max(item[1])):
        yield axis, kind, byte_size(estimated), *((byte_size(measured),) if compiled else ())


def _meshes(experiment: Experiment, found: list[Candidate]) -> Iterator[tuple[str, ...]]:
    if not found:
        raise UserError("no mesh of these devices divides config.train.global_batch_size and config.model")
    yield "fits", "memory", "step", "MFU", "flags"
    for one in found[:_MOST]:
        flags_to_add = one.flags(experiment) or "(as it is)"
        time = one.roofline
        yield (
            "yes" if one.fits else "no",
            byte_size(one.memory.total),
            short_time(time.seconds),
            f"{time.mfu:.0%}",
            flags_to_add,
        )


def _proposals(experiment: Experiment, topology: Topology) -> str:
    larger, found = search.enough(experiment, topology)
    title = "what would fit, the cheapest change first"
    if larger != topology:
        no = f"no mesh of {topology}, rematerialisation policy or accumulation makes it fit"
        if not found:
            return f"{no}, nor does {larger}"
        title = f"{no}; on {larger} fits"
    rows = [
        (byte_size(c.memory.total), short_time(c.roofline.seconds), c.flags(experiment) or "(as it is)") for c in found
    ]
    return f"{title}\n" + in_columns([("memory", "step", "flags to add"), *rows])


def mesh(candidate: Candidate) -> str:
    parts = [f"{axis} {size}" for axis, size in candidate.sizes.items() if size > 1]
    slices = candidate.experiment.mesh.slices
    return " × ".join(parts or ["one device"]) + (f", data over {slices} slices" if slices > 1 else "")


def in_columns(rows: Iterable[tuple[str, ...]]) -> str:
    """Returns the rows as an indented table."""
    return text_table(rows, indent="  ")


if __name__ == "__main__":
    cli.run(main)
