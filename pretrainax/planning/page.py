"""The page docs/plans.md: every config on some topologies, by the estimate alone."""

import glob
import os
import runpy
from collections.abc import Iterator

from pretrainax.config import Experiment
from pretrainax.planning import search
from pretrainax.planning.search import Candidate
from pretrainax.planning.topologies import Topology

COLUMNS = "config topology fits flags memory step MFU hours price".split()
TOPOLOGIES = ("v5e:8x8", "v5p:4x4x4", "v6e:8x8", "h100:8", "h200:8")
LEGEND = """\
Written by `python -m pretrainax.plan --table > docs/plans.md`: each config, with its default variant, on 64 chips of
TPU or 8 GPUs. Where it does not fit or divide as it is, the column *flags* has the fastest change found that makes it
fit, and the figures are with it. Memory is of one device at the worst moment; a step fits that fills 85 % or less.
Step, MFU, hours and price (USD) are a roofline's: no run is faster, and small models, whose kernels are too short to
keep a chip busy, are much slower. Its assumptions are in `pretrainax/planning/roofline.py`; chips, prices and their
sources in `pretrainax/chips.py`. Prices are recalled of 2025: look them up before you pay them.
"""


def configs() -> list[str]:
    """Files of configs/, from the root of the repository."""
    return sorted(glob.glob(os.path.join("configs", "*.py")))


def rows(files: list[str] | None = None) -> Iterator[tuple[str, ...]]:
    """The cells of COLUMNS, of each config with its default variant on each of TOPOLOGIES."""
    for file in files or configs():
        for name in TOPOLOGIES:
            yield row(file, runpy.run_path(file)["get_config"](), Topology.parse(name))


def row(file: str, experiment: Experiment, topology: Topology) -> tuple[str, ...]:
    name = os.path.basename(file).removesuffix(".py")
    found = proposal(experiment, topology)
    if found is None:
        return name, str(topology), "no", *[""] * (len(COLUMNS) - 3)
    time = found.roofline
    return (
        name,
        str(topology),
        "yes",
        found.flags(experiment).replace("--config.", ""),
        f"{found.memory.total / 1e9:.1f} GB",
        f"{time.seconds:.3g} s",
        f"{time.mfu:.0%}",
        f"{time.hours:,.1f}",
        "" if time.price is None else f"{time.price:,.0f} $",
    )


def proposal(experiment: Experiment, topology: Topology) -> Candidate | None:
    """The run as it is where it fits and divides, else the fastest of what would."""
    found = search.attempt(experiment, topology)
    if found is not None and found.fits:
        return found
    return next(iter(search.remedies(experiment, topology)[::-1]), None)


def markdown(table: list[tuple[str, ...]]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *table]
    return f"# Plans\n\n{LEGEND}\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def amount(size: float) -> str:
    """Bytes, in the units of data sheets."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size / 1e3:.2f} kB"


def seconds(time: float) -> str:
    return f"{time:.2f} s" if time >= 1 else f"{1e3 * time:.3g} ms"
