"""Fits PASSES of the plan to the memory traffic of compiled steps (counted.json), and prints the error of each step.

    python benchmarks/fit_passes.py [--platform=gpu] [--count]

--count first compiles each step whose count is missing, without the device, and stores its bytes outside matrix
multiplications. Each step is compiled in its own process (traffic.py), so a compiler that fails loses one step only.
The fit minimizes the sum of the fourth powers of log(estimate / count) over the steps that are not held out.
pretrainax/planning/estimated_traffic.py contains the values in use.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple, Optional

import numpy as np
import scipy.optimize

from pretrainax.config import Experiment, resolve_auto
from pretrainax.planning import estimated_traffic, memory
from pretrainax.planning.estimated_traffic import PASSES, Passes
from pretrainax.planning.topologies import Topology
from pretrainax.reporting.tables import text_table
from pretrainax.sharding.mesh import mesh_sizes
from pretrainax.studies.arms import Arm, configured

FILE = pathlib.Path(__file__).with_name("counted.json")
# Kinds that are not fitted: derived, or in no counted step.
FIXED = {
    "gpu": ("state", "layers", "looped", "spilled"),
    "tpu": ("dropped", "row_bias", "state", "factored", "layers", "looped", "experts"),
}
SAME = {
    "gpu": [],
    "tpu": ["attention_residuals", "block_residuals"],
}  # kinds with one number: their sizes grow together
TIMEOUT = 900  # seconds to compile a step


class Step(NamedTuple):
    """A train step and its counted bytes; a row of counted.json."""

    name: str
    config: str
    topology: str
    flags: list[str]  # "train.remat=block"
    held_out: bool = False  # not part of the fit
    outside: Optional[int] = None  # bytes of kernels without matrix multiplications; None: not counted
    products: Optional[int] = None  # bytes of the other kernels

    @property
    def platform(self) -> str:
        return Topology.parse(self.topology).chip.platform


def counted() -> list[Step]:
    return [Step(**row) for row in json.loads(FILE.read_text())]


def experiment_of(step: Step) -> Experiment:
    """Returns the config of a step, without phases."""
    experiment = configured(Arm(step.name, step.config, tuple(f"--config.{flag}" for flag in step.flags)))
    experiment.phases = ()
    resolve_auto(experiment, None)
    return experiment


def count(step: Step) -> Step:
    """Compiles a step and returns it with its bytes."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "traffic.json")
        flags = [f"--config={step.config}", *(f"--config.{flag}" for flag in step.flags)]
        command = [sys.executable, str(FILE.with_name("traffic.py")), *flags, f"--topology={step.topology}"]
        done = subprocess.run([*command, f"--json={file}"], capture_output=True, text=True, timeout=TIMEOUT)
        if not os.path.exists(file):
            print(f"{step.name}: exit status {done.returncode}, {done.stderr.strip()[-200:]}", file=sys.stderr)
            return step
        found = json.loads(pathlib.Path(file).read_text())
        outside = found["bytes_besides_products"]
        return step._replace(outside=outside, products=found["bytes"] - outside)


class Estimate(NamedTuple):
    """The estimate of a step."""

    sizes: Passes  # bytes of each kind of array
    products: float  # bytes of kernels with matrix multiplications


def estimated(step: Step) -> Estimate:
    experiment, topology = experiment_of(step), Topology.parse(step.topology)
    sizes = mesh_sizes(experiment.mesh, topology.num_devices, processes=topology.hosts)
    of_step = experiment, sizes, topology.chip.platform, memory.estimate(experiment, sizes, topology.chip)
    return Estimate(estimated_traffic.bytes_by_kind(*of_step), estimated_traffic.product_operands(*of_step))


def fit(counts: np.ndarray, sizes: np.ndarray, platform: str) -> Passes:
    """Fits the passes of a platform, except FIXED ones, to the counted bytes.

    Args:
      counts: bytes of each step, [S].
      sizes: bytes of each kind of array in each step, [S, K].
    """
    in_use = PASSES[platform]._asdict()
    columns = dict(zip(in_use, sizes.T, strict=True))
    groups = [[kind] for kind in in_use if kind not in (*FIXED[platform], *SAME[platform])]
    groups += [SAME[platform]] if SAME[platform] else []
    free = np.stack([sum(columns[kind] for kind in group) for group in groups], axis=1)
    constant = sum(columns[kind] * in_use[kind] for kind in FIXED[platform])
    start = np.maximum([in_use[group[0]] for group in groups], 0.1)

    def errors(values: np.ndarray) -> np.ndarray:
        return np.log((constant + free @ values) / counts) ** 2

    found = scipy.optimize.least_squares(errors, start, bounds=(0, np.inf), x_scale=start).x
    values = {kind: round(float(value), 1) for group, value in zip(groups, found, strict=True) for kind in group}
    return Passes(**(in_use | values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", choices=FIXED, help="default: both")
    parser.add_argument("--count", action="store_true", help="compile the steps without a count")
    options = parser.parse_args()
    steps = counted()
    if options.count:
        for i, step in enumerate(steps):
            steps[i] = step if step.outside else count(step)
            FILE.write_text("[\n" + ",\n".join(f" {json.dumps(step._asdict())}" for step in steps) + "\n]\n")
    for platform in [options.platform] if options.platform else FIXED:
        report(platform, [step for step in steps if step.platform == platform and step.outside])


def report(platform: str, steps: list[Step]) -> None:
    """Prints the errors of the estimate of each step, and the fitted passes."""
    estimates = list(map(estimated, steps))
    sizes = np.array([estimate.sizes for estimate in estimates])
    fitted = np.array([not step.held_out for step in steps])
    best = fit(np.array([step.outside for step in steps])[fitted], sizes[fitted], platform)
    rows = [("step", "outside products, GB", "estimate", "with the fit", "products, GB", "estimate", "total", "")]
    for step, one, used, refitted in zip(steps, estimates, sizes @ PASSES[platform], sizes @ best, strict=True):
        total, note = error(used + one.products, step.outside + step.products), "held out" if step.held_out else ""
        rows.append((
            step.name, f"{step.outside / 1e9:.2f}", error(used, step.outside), error(refitted, step.outside),
            f"{step.products / 1e9:.2f}", error(one.products, step.products), total, note,
        ))  # fmt: skip
    print(text_table(rows, align="<>>>>>><"), f"in use: {PASSES[platform]}", f"fitted: {best}", sep="\n")


def error(estimate: float, counted: int) -> str:
    return f"{estimate / counted - 1:+.1%}"


if __name__ == "__main__":
    main()
