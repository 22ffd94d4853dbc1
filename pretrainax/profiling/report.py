"""Formats a profile as tables: the slowest kernels by module, and a step's time by activity, next to a plan's values.

    (module)            (kind)     ms per step  share   plan
    decoder/blocks/mlp  products          3.21  24.0 %  2.80

All values are per device, averaged over the devices in the trace.
"""

from collections.abc import Iterator
from typing import Optional

import jax

from pretrainax.config import Experiment
from pretrainax.planning import memory, roofline
from pretrainax.planning.current_devices import current_topology
from pretrainax.planning.hlo import Program, collectives_of, memory_traffic_of
from pretrainax.planning.roofline import Roofline
from pretrainax.planning.topologies import Topology
from pretrainax.profiling.kernels import Work, kernel_work, step_program
from pretrainax.profiling.trace import Trace, read_trace
from pretrainax.reporting.tables import text_table
from pretrainax.sharding.mesh import abstract_mesh, mesh_sizes
from pretrainax.training.run import Run

MAX_ROWS = 20  # maximum number of rows of the kernel table; one additional row has the sum of all other kernels


def run_report(run: Run, path: str) -> str:
    """Formats the tables for a trace of this process, next to the values of a plan for the run's devices.

    Args:
      path: path of the trace file, an xplane.pb.
    """
    text, count = report(read_trace(path), run.trained, current_topology()), jax.process_count()
    if count > 1:
        text = f"process {jax.process_index()} of {count}; to see another process: profile --process\n{text}"
    return text


def report(trace: Trace, experiment: Optional[Experiment], topology: Optional[Topology]) -> str:
    """Formats the table of kernels, and the table of a step's time by activity.

    The table of kernels includes expected times if `topology` is given. The table of the step includes them if both
    `topology` and `experiment` are given.

    Args:
      experiment: the config of the run, without phases, or None if it is unknown.
      topology: the topology of the run, or None if the planner does not support its chip (a CPU, for example).
    """
    work = kernel_work(trace, None if topology is None else topology.chip)
    expected = None
    if experiment is not None and topology is not None:
        expected = expectation(trace, experiment, topology)
    devices = "1 device" if trace.devices == 1 else f"mean of {trace.devices} devices of this process"
    header = f"{steps_of(trace)}, {1e3 * trace.seconds:.2f} ms per step on {trace.platform}, {devices}"
    if topology is None:
        header += f"; without a plan: {_reason_without_plan(trace)}"
    return "\n".join([header, kernel_table(trace, work), "", step_table(trace, work, expected), ""])


def steps_of(trace: Trace) -> str:
    """Returns the steps of a trace: "step 7", or "steps 7 to 9"."""
    return f"step {trace.steps[0]}" if len(trace.steps) == 1 else f"steps {trace.steps[0]} to {trace.steps[-1]}"


def _reason_without_plan(trace: Trace) -> str:
    return (
        "the planner does not support CPUs" if trace.platform == "cpu" else "set --topology to the devices of the run"
    )


def expectation(trace: Trace, experiment: Experiment, topology: Topology) -> Optional[Roofline]:
    """Estimates the duration of the traced step from its compiled program.

    Returns None if the trace does not contain the program.
    """
    step = step_program(trace)
    return None if step is None else estimate_compiled(trace.programs[step], experiment, topology)


def estimate_compiled(program: Program, experiment: Experiment, topology: Topology) -> Roofline:
    """Estimates the duration of a compiled step, in the same way as the planner."""
    sizes = mesh_sizes(experiment.mesh, topology.num_devices, processes=topology.hosts)
    sent = collectives_of(program, abstract_mesh(sizes, topology.chip.platform))
    needed = memory.estimate(experiment, sizes, topology.chip)
    return roofline.estimate_time(experiment, sizes, topology, needed, sent, traffic=memory_traffic_of(program))


def kernel_table(trace: Trace, work: list[Work]) -> str:
    """Formats a table of kernel times with one row per module and kind, slowest first, and a row for idle time."""
    rows = [("module", "kind", "ms per step", "share", "plan")]
    rows += [
        _row(trace, kernels.module or "(none)", kernels.kind, kernels.seconds, kernels.expected)
        for kernels in work[:MAX_ROWS]
    ]
    if other_kernels := work[MAX_ROWS:]:
        expected_times = [kernels.expected for kernels in other_kernels]
        expected_sum = None if None in expected_times else sum(filter(None, expected_times))
        rows.append(
            _row(
                trace, f"{len(other_kernels)} more", "", sum(kernels.seconds for kernels in other_kernels), expected_sum
            )
        )
    rows.append(_row(trace, "idle", "", idle_seconds(trace)))
    return text_table(rows if any(row[-1] for row in rows[1:]) else [row[:-1] for row in rows], "<<>", indent="  ")


def step_table(trace: Trace, work: list[Work], expected: Optional[Roofline]) -> str:
    """Formats a table of a step's time by activity: products, other kernels, collectives and idle time.

    Args:
      expected: the plan's estimate. If None, the column "plan" is omitted.
    """
    rows = [("part of a step", "ms", "share", "plan")]
    rows += [(name, *cells) for name, *cells in _step_rows(trace, work, expected)]
    return text_table(rows if expected else [row[:-1] for row in rows], "<>", indent="  ")


def _step_rows(trace: Trace, work: list[Work], expected: Optional[Roofline]) -> Iterator[tuple[str, ...]]:
    """Yields the rows of `step_table`: activity, milliseconds, fraction of the step, and the plan's milliseconds."""
    products = sum(kernels.in_products for kernels in work)
    links = sum(kernels.seconds - kernels.in_products for kernels in work if kernels.kind == "collectives")
    memory_bound = sum(trace.busy.values()) - products - links
    plan = (expected.compute, expected.memory, expected.exposed, 0.0, expected.seconds) if expected else (None,) * 5
    names = ("products", "other kernels (memory)", "collectives (links)", "idle", "in total")
    measured = (products, memory_bound, links, idle_seconds(trace), trace.seconds)
    for name, seconds, expected_seconds in zip(names, measured, plan, strict=True):
        _, _, *cells = _row(trace, name, "", seconds, expected_seconds)
        yield name, *cells


def idle_seconds(trace: Trace) -> float:
    """Computes the seconds per step in which no kernel runs."""
    return max(trace.seconds - sum(trace.busy.values()), 0.0)


def _row(trace: Trace, module: str, kind: str, seconds: float, expected: Optional[float] = None) -> tuple[str, ...]:
    """Formats a row: module, kind, milliseconds, fraction of the step, and expected milliseconds ("" for None)."""
    expected_cell = "" if expected is None else f"{1e3 * expected:.3f}"
    return module, kind, f"{1e3 * seconds:.3f}", f"{seconds / trace.seconds:.1%}", expected_cell
