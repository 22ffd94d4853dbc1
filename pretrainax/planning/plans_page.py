"""Generates docs/plans.md: estimated memory, time and price of every config on the topologies in TOPOLOGIES."""

import os
import runpy
from collections.abc import Iterator

from pretrainax.config import Experiment, UserError
from pretrainax.config.config_file import config_names, find_config
from pretrainax.config.validation import complete
from pretrainax.planning import search
from pretrainax.planning.memory import MEM_FRACTION
from pretrainax.planning.roofline import SPREAD
from pretrainax.planning.search import Candidate
from pretrainax.planning.topologies import Topology
from pretrainax.reporting import tables
from pretrainax.reporting.units import byte_size, short_time, with_decimals

COLUMNS = "config topology fits flags memory step MFU done hours USD".split()
TOPOLOGIES = ("v5e:8x8", "v5p:4x4x4", "v6e:8x8", "h100:8", "h200:8")
_SPREAD = " and ".join(f"{least} to {most} ({name.upper()})" for name, (least, most) in SPREAD.items())
LEGEND = f"""\
`python -m pretrainax.plan --table > docs/plans.md` writes this page. It plans each config, with its default variant, on
64 TPU chips or 8 GPUs. All values are estimates; nothing was compiled or run.

- *flags*: the fastest change that makes the run fit in memory, without needless recomputation, and divide over the
  devices, to set as `--config.…`. The other columns include this change. If no change helps, it gives the reason.
- *memory*: peak memory of one device. A step fits if it fills at most 85 % of the device. A † marks more than 75 %,
  JAX's default share of a GPU: set {MEM_FRACTION}, as `launch/slurm.sbatch` does.
- *step*, *hours*, *USD*: time of a step; time and price of the whole run. Ratio of published runs to the estimate:
  {_SPREAD}; see `benchmarks/published.toml`.
- *MFU*: model FLOPs utilization. It counts attention in full, as published values do. *done* excludes the FLOPs that an
  attention kernel skips because a causal mask or a window hides them.

The assumptions are in `pretrainax/planning/roofline.py`. Chips, on-demand prices and their sources are in
`pretrainax/runtime/chips.py`. The prices are from memory, as of 2025: check current prices before you pay.

If the wires of a TPU slice wrap around, libtpu replaces gathers and scatters over all chips of the slice by all-reduces
over the whole torus (for example v5p with `mesh.fsdp=64`). The estimate counts them as all-reduces, which compute does
not hide, unlike gathers. `mesh.data=2 mesh.fsdp=32` keeps the gathers. With the extra `tpu` or `cuda13`, `plan`
compiles the step and adds an estimate from the compiled collectives and from the bytes that the compiled kernels move
through memory.
"""


def rows(files: list[str] | None = None) -> Iterator[tuple[str, ...]]:
    """Yields one table row (the cells of COLUMNS) for the default variant of each config on each topology.

    Args:
      files: paths of config files. None selects all of the package's config files.
    """
    for file in files or (find_config(name)[0] for name in config_names()):
        for name in TOPOLOGIES:
            experiment = runpy.run_path(file)["get_config"]()
            complete(experiment)
            yield row(file, experiment, Topology.parse(name))


def row(file: str, experiment: Experiment, topology: Topology) -> tuple[str, ...]:
    """Returns the cells of COLUMNS for one config on one topology.

    If no change makes the run fit, the cells say "no" and give the reason.

    Args:
      file: path of the config file.
    """
    name = os.path.basename(file).removesuffix(".py")
    candidate, reason = proposal(experiment, topology)
    if candidate is None:
        return name, str(topology), "no", reason, *[""] * (len(COLUMNS) - 4)
    time = candidate.roofline
    return (
        name,
        str(topology),
        "yes",
        candidate.flags(experiment).replace("--config.", ""),
        byte_size(candidate.memory.total) + " †" * candidate.memory.exceeds_default_share(topology.chip),
        short_time(time.seconds),
        f"{time.mfu:.0%}",
        f"{time.mfu_executed:.0%}",
        with_decimals(time.hours, 1),
        "" if time.price is None else with_decimals(time.price, 0),
    )


def proposal(experiment: Experiment, topology: Topology) -> tuple[Candidate | None, str]:
    """Finds a plan for a run that fits in memory; returns (plan, reason why the config had to be changed).

    If the run fits without changes, the reason is "". If it then recomputes because of `train.remat="auto"`, the plan
    contains the fastest change, for example more microbatches without recomputation. If it does not fit, the plan
    contains the config change that makes the run fit and is fastest, or is None if no change makes it fit.
    """
    try:
        unchanged, reason = search.estimate_run(experiment, topology), "too large"
    except UserError as e:
        unchanged, reason = None, str(e).partition(":")[0].replace("config.", "")
    if unchanged is not None and unchanged.fits:
        recomputes = experiment.train.remat == "auto" and unchanged.experiment.train.remat != "none"
        return search.remedies(experiment, topology)[-1] if recomputes else unchanged, ""
    remedies = search.remedies(experiment, topology)  # fastest last
    return remedies[-1] if remedies else None, reason


def markdown(table: list[tuple[str, ...]]) -> str:
    """Formats the whole page as Markdown: title, legend and the rows of `table`."""
    return f"# Plans\n\n{LEGEND}\n" + tables.markdown(COLUMNS, table, padded=False)
