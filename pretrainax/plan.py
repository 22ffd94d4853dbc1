"""Says what a run will take, before it is paid for: `python -m pretrainax.plan --config=FILE --topology=v5p:4x4x8`.

Says whether it fits, bytes by part, what goes over which axis of the mesh, FLOPs, time, hours and price; where it does
not fit, what would. `--search` lists the best meshes. No accelerator is needed. With the extra `tpu` or `cuda` the real
step is compiled for the topology too, and what the compiler says stands beside the estimates (`--nocompile`: not).
`--flops`, `--hours`, `--tokens` and `--fit` size a run for a budget: see `pretrainax.scaling.budget`.
"""

import sys
from typing import Optional

import jax
from absl import flags

from pretrainax import cli
from pretrainax.config import Experiment, UserError, resolve_auto
from pretrainax.planning import plans_page, report, search
from pretrainax.planning.compiled import Compiled, compile_step
from pretrainax.planning.topologies import Topology
from pretrainax.scaling import budget
from pretrainax.scaling.budget import Budget

_TOPOLOGY = flags.DEFINE_string("topology", None, "Devices: v5p:4x4x8, h100:8, h100:4x8 (hosts x devices), 4*v5e:16x16")
_SEARCH = flags.DEFINE_bool("search", False, "List the best meshes, each with the fastest rematerialisation")
_COMPILE = flags.DEFINE_bool("compile", True, "Compile the step, where the compiler of the chip is installed")
_TABLE = flags.DEFINE_bool("table", False, "Print docs/plans.md")
_BUDGET = budget.define_flags()


def main() -> int:
    jax.config.update("jax_platforms", "cpu")  # nothing runs here: an accelerator that is there is left alone
    asked = {name: flag.value for name, flag in _BUDGET.items() if flag.present}
    if any(name in asked for name in budget.BUDGETS):
        print(budget.report(Budget(**asked, topology=_TOPOLOGY.value)), end="")
        return 0
    if _TABLE.value:
        print(plans_page.markdown(list(plans_page.rows())), end="")
        return 0
    experiment = cli.experiment(files=False)
    tokenizer = experiment.tokenizer
    resolve_auto(experiment, tokenizer.size if tokenizer.path is None else None)
    if _TOPOLOGY.value is None:
        raise UserError("--topology is missing: the devices of the run, as v5p:4x4x8 or h100:8")
    topology = Topology.parse(_TOPOLOGY.value)
    if _SEARCH.value:
        print(report.mesh_table(experiment, search.best(experiment, topology)))
        return 0
    candidate = search.assess(experiment, topology)
    experiment = candidate.experiment
    compiled, note = (
        _compiled(candidate.largest.experiment, topology) if _COMPILE.value else (None, "not compiled: --nocompile")
    )
    print(report.run_report(cli.config_name(), candidate, topology, compiled, note))
    if not (compiled or candidate).fits:
        print("\n" + report.proposals(experiment, topology))
    return 0


def _compiled(experiment: Experiment, topology: Topology) -> tuple[Optional[Compiled], str]:
    """Compiles the step; returns what the compiler says, None where it was not asked, and a line about it."""
    print(f"compiling for {topology} (--nocompile: not) ...", file=sys.stderr, flush=True)
    try:
        compiled = compile_step(experiment, topology)
    except UserError as e:
        return None, f"not compiled: {e}"
    return compiled, f"compiled in {compiled.seconds:.0f} s"


if __name__ == "__main__":
    cli.run(main)
