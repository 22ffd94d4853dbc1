"""The page docs/plans.md: every config on some topologies, by the estimate alone."""

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
from pretrainax.reporting.units import byte_size, short_time

COLUMNS = "config topology fits flags memory step MFU done hours USD".split()
TOPOLOGIES = ("v5e:8x8", "v5p:4x4x4", "v6e:8x8", "h100:8", "h200:8")
_SPREAD = " and ".join(f"{least} to {most} ({name.upper()})" for name, (least, most) in SPREAD.items())
LEGEND = f"""\
Written by `python -m pretrainax.plan --table > docs/plans.md`: each config, with its default variant, on 64 chips of
TPU or 8 GPUs, by estimates alone. Where it does not fit or divide as it is, the column *flags* has the fastest change
found that makes it fit, each to be given as `--config.…`, and the figures are with it; where nothing does, the reason
stands there. *memory* is of one device at the worst moment; a step fits that fills 85 % or less. A † marks more than
the 75 % that JAX takes of a GPU: set {MEM_FRACTION}, as `launch/slurm.sbatch` does. *step*, *MFU*,
*hours* and *USD* of the whole run are estimates: published runs took {_SPREAD} times what
they say (`benchmarks/published.toml`). Assumptions are in `pretrainax/planning/roofline.py`; chips, prices on demand
and their sources in `pretrainax/runtime/chips.py`. Prices are recalled of 2025: look them up before you pay them.
*MFU* counts attention in full, as published figures do; *done* is of the FLOPs that are done, without what a kernel of
attention skips because a causal mask or a window hides it.

On TPU slices whose wires wrap around, libtpu makes all-reduces over the whole torus of gathers and scatters that all
chips take part in (v5p with `mesh.fsdp=64`). They are counted as such, and not hidden behind compute as gathers
are: `mesh.data=2 mesh.fsdp=32` keeps the gathers. `plan` with the extra `tpu` or `cuda` compiles the step and says what
follows from the collectives as compiled, and from the bytes that its kernels move through memory.
"""


def rows(files: list[str] | None = None) -> Iterator[tuple[str, ...]]:
    """Yields the cells of COLUMNS, of each config with its default variant on each of TOPOLOGIES."""
    for file in files or (find_config(name)[0] for name in config_names()):
        for name in TOPOLOGIES:
            experiment = runpy.run_path(file)["get_config"]()
            complete(experiment)
            yield row(file, experiment, Topology.parse(name))


def row(file: str, experiment: Experiment, topology: Topology) -> tuple[str, ...]:
    name = os.path.basename(file).removesuffix(".py")
    found, reason = proposal(experiment, topology)
    if found is None:
        return name, str(topology), "no", reason, *[""] * (len(COLUMNS) - 4)
    time = found.roofline
    return (
        name,
        str(topology),
        "yes",
        found.flags(experiment).replace("--config.", ""),
        byte_size(found.memory.total) + " †" * found.memory.exceeds_default(topology.chip),
        short_time(time.seconds),
        f"{time.mfu:.0%}",
        f"{time.mfu_done:.0%}",
        f"{time.hours:,.1f}",
        "" if time.price is None else f"{time.price:,.0f}",
    )


def proposal(experiment: Experiment, topology: Topology) -> tuple[Candidate | None, str]:
    """Returns the run as it is where it fits and divides, else the fastest of what would, and why there is none."""
    try:
        as_it_is, reason = search.assess(experiment, topology), "too large"
    except UserError as e:
        as_it_is, reason = None, str(e).partition(":")[0].replace("config.", "")
    if as_it_is is not None and as_it_is.fits:
        return as_it_is, ""
    remedies = search.remedies(experiment, topology)  # the fastest last
    return remedies[-1] if remedies else None, reason


def markdown(table: list[tuple[str, ...]]) -> str:
    return f"# Plans\n\n{LEGEND}\n" + tables.markdown(COLUMNS, table, padded=False)
