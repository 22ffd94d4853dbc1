"""Formats the tables of a profile: the slowest kernels by module, and the parts of a step's time, with a plan's values.

    (module)            (kind)     ms per step  share   plan
    decoder/blocks/mlp  products          3.21  24.0 %  2.80

All values are per device: means over the devices in the trace.
"""

from collections.abc import Iterator
from typing import Optional

import jax

from pretrainax.config import Experiment
from pretrainax.planning import memory, roofline
from pretrainax.planning.current_devices import current_topology
from pretrainax.planning.hlo import collectives_of, memory_traffic_of
from pretrainax.planning.roofline import Roofline
from pretrainax.planning.topologies import Topology
from pretrainax.profiling.kernels import Work, kernel_work, step_program
from pretrainax.profiling.trace import Trace, read_trace
from pretrainax.reporting.tables import text_table
from pretrainax.sharding.mesh import abstract_mesh, mesh_sizes
from pretrainax.training.run import Run

MAX_ROWS = 20  # maximum number of rows of the first table; one additional row has the sum of all other rows


def run_report(run: Run, path: str) -> str:
    """Returns the tables for a trace of this process, with the values of a plan for the devices of the run.

    Args:
      path: path of the trace file, an xplane.pb.
    """
    text, count = report(read_trace(path), run.trained, current_topology()), jax.process_count()
    if count > 1:
        text = f"process {jax.process_index()} of {count}; to see another process: profile --process\n{text}"
    return text


def report(trace: Trace, experiment: Optional[Experiment], topology: Optional[Topology]) -> str:
    """Returns the table of kernels and the table of the parts of a step.

    The first table has expected times if there is a topology, the second if there are a topology and a config.

    Args:
      experiment: the config of the run, without phases; None if it is unknown.
      topology: the topology of the run; None if the planner does not support its chip, such as a CPU.
    """
    work = kernel_work(trace, None if topology is None else topology.chip)
    expected = None
    if experiment is not None and topology is not None:
        expected = expectation(trace, experiment, topology)
    steps = f"step {trace.steps[0]}" if len(trace.steps) == 1 else f"steps {trace.steps[0]} to {trace.steps[-1]}"
    devices = "1 device" if trace.devices == 1 else f"mean of {trace.devices} devices of this process"
    head = f"{steps}, {1e3 * trace.seconds:.2f} ms per step on {trace.platform}, {devices}"
    if topology is None:
        head += f"; without a plan: {_reason_without_plan(trace)}"
    return "\n".join([head, kernel_table(trace, work), "", step_table(trace, work, expected), ""])


def _reason_without_plan(trace: Trace) -> str:
    return (
        "the planner does not support CPUs" if trace.platform == "cpu" else "set --topology to the devices of the run"
    )


def expectation(trace: Trace, experiment: Experiment, topology: Topology) -> Optional[Roofline]:
    """Returns the plan's estimate for the compiled step in the trace; None if the trace lacks the step's program."""
    if (step := step_program(trace)) is None:
        return None
    program = trace.programs[step]
    sizes = mesh_sizes(experiment.mesh, topology.num_devices, processes=topology.hosts)
    sent = collectives_of(program, abstract_mesh(sizes, topology.chip.platform))
    needed = memory.estimate(experiment, sizes, topology.chip)
    return roofline.estimate_time(experiment, sizes, topology, needed, sent, moved=memory_traffic_of(program))


def kernel_table(trace: Trace, work: list[Work]) -> str:
    """Returns a table of kernel times with one row per module and kind, the slowest first, and a row for idle time."""
    rows = [("module", "kind", "ms per step", "share", "plan")]
    rows += [_row(trace, one.module or "(none)", one.kind, one.seconds, one.expected) for one in work[:MAX_ROWS]]
    if rest := work[MAX_ROWS:]:
        known = [one.expected for one in rest]
        least = None if None in known else sum(filter(None, known))
        rows.append(_row(trace, f"{len(rest)} more", "", sum(one.seconds for one in rest), least))
    rows.append(_row(trace, "idle", "", idle_seconds(trace)))
    return text_table(rows if any(row[-1] for row in rows[1:]) else [row[:-1] for row in rows], "<<>", indent="  ")


def step_table(trace: Trace, work: list[Work], expected: Optional[Roofline]) -> str:
    """Returns a table of the parts of a step: products, other kernels, collectives and idle time.

    Args:
      expected: the plan's estimate; None leaves out the column "plan".
    """
    rows = [("part of a step", "ms", "share", "plan")]
    rows += [(name, *cells) for name, *cells in _parts(trace, work, expected)]
    return text_table(rows if expected else [row[:-1] for row in rows], "<>", indent="  ")


def _parts(trace: Trace, work: list[Work], expected: Optional[Roofline]) -> Iterator[tuple[str, ...]]:
    products = sum(one.in_products for one in work)
    links = sum(one.seconds - one.in_products for one in work if one.kind == "collectives")
    memory_bound = sum(trace.busy.values()) - products - links
    plan = (expected.compute, expected.memory, expected.exposed, 0.0, expected.seconds) if expected else (None,) * 5
    names = ("products", "other kernels (memory)", "collectives (links)", "idle", "in total")
    measured = (products, memory_bound, links, idle_seconds(trace), trace.seconds)
    for name, seconds, least in zip(names, measured, plan, strict=True):
        _, _, *cells = _row(trace, name, "", seconds, least)
        yield name, *cells


def idle_seconds(trace: Trace) -> float:
    """Returns the seconds per step in which no kernel runs."""
    return max(trace.seconds - sum(trace.busy.values()), 0.0)


def _row(trace: Trace, module: str, kind: str, seconds: float, expected: Optional[float] = None) -> tuple[str, ...]:
    expected_cell = "" if expected is None else f"{1e3 * expected:.3f}"
    return module, kind, f"{1e3 * seconds:.3f}", f"{seconds / trace.seconds:.1%}", expected_cell
