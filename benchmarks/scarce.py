"""Compares the run that `plan --corpus` recommends with 27 other runs on the same little text, at the same FLOPs.

    python benchmarks/scarce.py --workdir=DIR --books=FOLDER --megabytes=1 --flops=2e12 --seeds=4 --out=docs/studies

The grid has half, once and twice the planned size, three weight decays and three dropout rates. The three best settings
of the first seed and the plan are trained with the other seeds too, because the best of 27 is partly chosen by chance.
With --out, it writes scarce-1MB.json. Repeating the command trains only the missing runs. With `--repetition=6.4
--only_plan`, it trains the plan of a law with another R*, no grid, and writes scarce-1MB-plan.json.
"""

import dataclasses
import functools
import glob
import gzip
import itertools
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Optional

import numpy as np
import runs as benchmark_runs
import sweep

from pretrainax.config import Experiment
from pretrainax.reporting.tables import text_table
from pretrainax.scaling.compute_optimal import space_for
from pretrainax.scaling.power_laws import law_of
from pretrainax.scaling.report import training_command
from pretrainax.scaling.scarce import best_size, make_scarce_plan, tokens_of
from pretrainax.studies.arms import Arm, configured

FACTORS, WEIGHT_DECAYS, DROPOUTS = (0.5, 1.0, 2.0), (0.1, 0.4, 1.6), (0.0, 0.1, 0.2)
BEST = 3  # settings of the grid that are trained with all seeds
COMMON = ("--config.trackers=()", "--config.checkpoint.keep=1")
VALIDATION_ROWS = 1920


class Trial(NamedTuple):
    """One run: the plan, or a setting of the grid."""

    factor: float  # parameters, as a multiple of the plan's
    weight_decay: Optional[float]  # None: the plan's
    dropout: Optional[float]  # None: the plan's
    seed: int

    @property
    def name(self) -> str:
        return "-".join(map(str, self))


PLAN = Trial(1.0, None, None, 0)
GRID = [Trial(*setting, 0) for setting in itertools.product(FACTORS, WEIGHT_DECAYS, DROPOUTS)]


@functools.cache
def planned_flags(megabytes: float, flops: float, factor: float, repetition: Optional[float] = None) -> list[str]:
    """Returns the config and the flags that `plan --corpus --flops` prints, for a multiple of the planned size.

    Args:
      repetition: R* of the law; None: the published R*.
    """
    law, num_bytes = law_of("muennighoff"), megabytes * 1e6
    law = law if repetition is None else dataclasses.replace(law, repetition=repetition)

    def best(space) -> float:
        return best_size(space, law, tokens_of(num_bytes, space.vocab_size), flops)

    space = space_for("decoder", None, None, law, best)
    plan = make_scarce_plan(space, law, tokens_of(num_bytes, space.vocab_size), flops, factor)
    command, *_ = training_command(plan.run, space, plan).split("\n\n")
    return [word for word in shlex.split(command.replace("\\\n", " ")) if word.startswith("--config")]


def experiment_of(trial: Trial, options) -> Experiment:
    """Returns the config of a run."""
    config, *flags = planned_flags(options.megabytes, options.flops, trial.factor, options.repetition)
    text, valid = (path_of(name, options) for name in ("text", "valid"))
    flags += [*COMMON, f"--config.data.source=JsonLines(path={text!r}, valid_path={valid!r})"]
    flags += [f"--config.data.cache_dir={os.path.join(options.workdir, 'data')}", f"--config.train.seed={trial.seed}"]
    if trial.weight_decay is not None:
        flags += [f"--config.optimizer.weight_decay={trial.weight_decay}"]
    if trial.dropout is not None:
        flags += [f"--config.model.dropout_rate={trial.dropout}"]
    experiment = configured(Arm(trial.name, config.removeprefix("--config="), tuple(flags)))
    experiment.evaluate.batches = VALIDATION_ROWS // experiment.train.global_batch_size
    experiment.train.log_every = experiment.evaluate.every = experiment.checkpoint.every = experiment.train.steps
    return experiment


def path_of(name: str, options) -> str:
    """Returns the path of a text, which the config of a run contains: runs on other amounts of text differ in it."""
    return os.path.join(options.workdir, f"{name}-{options.megabytes:g}MB.jsonl")


def write_text(options) -> None:
    """Writes the first megabytes of the training text, and the validation text, to the workdir."""
    for name, split, limit in (("text", "train", options.megabytes * 1e6), ("valid", "valid", np.inf)):
        num_bytes = 0
        with open(path_of(name, options), "w") as out:
            for line in lines_of(os.path.join(options.books, f"{split}*.jsonl.gz")):
                num_bytes += len(json.loads(line)["text"].encode())
                if num_bytes > limit:
                    break
                out.write(line)


def lines_of(pattern: str) -> Iterator[str]:
    """Yields the lines of compressed files, in the order of their names."""
    for path in sorted(glob.glob(pattern)):
        with gzip.open(path, "rt") as f:
            yield from f


def settings(losses: Mapping[Trial, Optional[float]]) -> dict[Trial, np.ndarray]:
    """Returns the losses over the seeds of each setting that was trained with several seeds, best first."""
    found: dict[Trial, list[float]] = {}
    for trial, loss in losses.items():
        found.setdefault(trial._replace(seed=0), []).append(np.inf if loss is None else loss)
    repeated = {setting: np.array(values) for setting, values in found.items() if len(values) > 1}
    return dict(sorted(repeated.items(), key=lambda item: item[1].mean()))


def table(losses: Mapping[Trial, Optional[float]]) -> str:
    """Formats the grid of the first seed, and the difference of the plan from the settings with several seeds."""
    rows = [("size", "weight decay", *(f"dropout {rate:g}" for rate in DROPOUTS))]
    for factor, decay in itertools.product(FACTORS, WEIGHT_DECAYS):
        found = [losses[Trial(factor, decay, rate, 0)] for rate in DROPOUTS]
        rows.append((f"{factor:g}", f"{decay:g}", *("diverged" if x is None else f"{x:.3f}" for x in found)))
    repeated, lines = settings(losses), []
    for setting, values in repeated.items():
        words = f"size {setting.factor:g}, weight decay {setting.weight_decay}, dropout {setting.dropout}"
        more = "" if setting == PLAN else f"; plan minus this {benchmark_runs.gain(repeated[PLAN], values)}"
        lines.append(f"{'plan' if setting == PLAN else words}: {values.mean():.4f} over {len(values)} seeds{more}")
    return "\n".join([text_table(rows), "", *lines])


def main() -> None:
    made = benchmark_runs.parser(__doc__, "books")
    made.add_argument("--megabytes", type=float, required=True)
    made.add_argument("--flops", type=float, required=True)
    made.add_argument("--seeds", type=int, default=4)
    made.add_argument("--repetition", type=float, help="R* of the law; default: the published R*")
    made.add_argument("--only_plan", action="store_true", help="train no grid")
    made.add_argument("--out", help="folder for the JSON file of all losses")
    options = made.parse_args()
    os.makedirs(options.workdir, exist_ok=True)
    options.workdir = os.path.abspath(options.workdir)
    write_text(options)

    make = functools.partial(experiment_of, options=options)
    train = functools.partial(sweep.train_all, experiment_of=make, workdir=options.workdir)
    grid = [] if options.only_plan else GRID
    losses = train([PLAN, *grid])
    best = sorted(grid, key=lambda trial: np.inf if losses[trial] is None else losses[trial])[:BEST]
    losses |= train([trial._replace(seed=seed) for trial in (PLAN, *best) for seed in range(1, options.seeds)])
    print(table(losses) if grid else losses)
    if options.out:
        name = f"scarce-{options.megabytes:g}MB{'-plan' if options.only_plan else ''}.json"
        with open(os.path.join(options.out, name), "w") as f:
            json.dump([trial._asdict() | {"loss": loss} for trial, loss in losses.items()], f, indent=1)


if __name__ == "__main__":
    main()
