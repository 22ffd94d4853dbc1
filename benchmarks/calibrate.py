"""Compares the planned step time with published runs, and fits the constants of the plan to them.

    python benchmarks/calibrate.py [--only=gpt2_124m_h100,llama3_8b_v6e_8]

published.toml contains the runs and their sources. The script prints one row per run. It also prints the fitted values
of ATTAINABLE for TPUs, GROUPED and SPREAD, from the runs that are not held out. pretrainax/planning/roofline.py
contains the values in use.
"""

import argparse
import math
import pathlib
import statistics
import tomllib
from collections.abc import Iterator
from typing import NamedTuple

from pretrainax.config import resolve_auto
from pretrainax.planning import roofline
from pretrainax.planning.search import estimate_run
from pretrainax.planning.topologies import Topology
from pretrainax.reporting.tables import text_table
from pretrainax.studies.arms import Arm, configured

WIDER = 1.1  # SPREAD extends the range of the fitted runs by this factor at both ends


class Run(NamedTuple):
    """A published run and its plan."""

    name: str
    platform: str
    tokens: float  # per second and device, as published; the next three are in the same unit
    planned: float
    least: float  # at the upper end of the planned time
    most: float
    held_out: bool
    has_experts: bool

    @property
    def ratio(self) -> float:
        """Measured time / planned time."""
        return self.planned / self.tokens


def published() -> dict[str, dict]:
    with open(pathlib.Path(__file__).with_name("published.toml"), "rb") as f:
        return tomllib.load(f)


def planned(name: str, entry: dict) -> Run:
    """Returns a published run and its plan, from the estimate alone."""
    flags = tuple(f"--config.{flag}" for flag in entry["flags"])
    experiment, topology = configured(Arm(name, entry["config"], flags)), Topology.parse(entry["topology"])
    experiment.phases = ()
    resolve_auto(experiment, None)
    time = estimate_run(experiment, topology).roofline
    tokens = experiment.train.global_batch_size * experiment.data.sequence_length / topology.num_devices
    quick, slow = time.range
    platform, experts = topology.chip.platform, experiment.model.experts is not None
    return Run(
        name, platform, entry["tokens"], tokens / time.seconds, tokens / slow, tokens / quick,
        entry.get("held_out", False), experts,
    )  # fmt: skip


def spread(runs: list[Run]) -> dict[str, tuple[float, float]]:
    """Returns SPREAD of each platform: the range of measured / planned time, a tenth wider at both ends."""
    found = {}
    for platform in sorted({run.platform for run in runs}):
        ratios = [run.ratio for run in runs if run.platform == platform and not run.held_out]
        found[platform] = (round(min(ratios) / WIDER, 2), round(max(ratios) * WIDER, 2))
    return found


def fit(runs: list[Run]) -> Iterator[tuple[str, float]]:
    """Yields the name and fitted value of each constant, from the mean logarithm of the ratios.

    Products take nearly all of the time of these steps, so the step time is about proportional to their time.
    """
    tpu = [run for run in runs if run.platform == "tpu" and not run.held_out]
    for name, value, experts in (
        ("ATTAINABLE of a TPU", roofline.ATTAINABLE["tpu"], False),
        ("GROUPED", roofline.GROUPED, True),
    ):
        if ratios := [math.log(run.ratio) for run in tpu if run.has_experts == experts]:
            yield name, value / math.exp(statistics.mean(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of runs, separated by commas")
    wanted = [name for name in parser.parse_args().only.split(",") if name]
    runs = [planned(name, entry) for name, entry in published().items() if not wanted or name in wanted]
    rows = [("run", "published", "plan", "from", "to", "time / plan", "", "")]
    for run in runs:
        inside = "" if run.least <= run.tokens <= run.most else "OUTSIDE"
        figures = (f"{tokens:,.0f}" for tokens in (run.tokens, run.planned, run.least, run.most))
        rows.append((run.name, *figures, f"{run.ratio:.2f}", "held out" if run.held_out else "", inside))
    print(text_table(rows, align="<>>>>><<"))
    for name, value in fit(runs):
        print(f"{name}: {value:.2f}")
    print(f"SPREAD: {spread(runs)}, in roofline.py {roofline.SPREAD}")


if __name__ == "__main__":
    main()
