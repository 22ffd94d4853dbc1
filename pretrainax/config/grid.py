"""Builds the configs of a grid of runs from --seeds and --sweep: copies of a base config with changed fields."""

import copy
import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

from pretrainax.config.experiment import Experiment
from pretrainax.config.overrides import set_field
from pretrainax.config.serialization import to_json
from pretrainax.config.validation import get, validate
from pretrainax.files.errors import UserError, shortened

# prefix of a seed field in config.train (init_seed, …) -> what the seed randomizes
SEED_USES = {"init": "fresh parameters", "order": "the order of the data", "dropout": "dropout", "mask": "masks"}
_MAX_NAME = 40  # maximum characters of a value in a folder name
_MAX_RUNS = 1000  # maximum runs of a grid


class GridRun(NamedTuple):
    """One run of a grid."""

    name: str  # folder name: "learning_rate=1e-5,seed-0"
    seed: Optional[int]  # train.seed of the run; None: train.seed of the config
    values: dict[str, str]  # values as in --sweep, by field: {"optimizer.learning_rate": "1e-5"}
    experiment: Experiment  # config of the run

    @property
    def flags(self) -> list[str]:
        """Returns the flags that set the run's changed fields, to be appended to the base command's flags."""
        values = self.values if self.seed is None else self.values | {"train.seed": str(self.seed)}
        return [f"--config.{field}={value}" for field, value in values.items()]


def grid_of(experiment: Experiment, seeds: Optional[int], sweeps: Sequence[str]) -> list[GridRun]:
    """Builds a grid of runs, one for each combination of a seed and values of the swept fields.

    All runs with one seed precede those with the next seed, so that even an interrupted grid compares as many values as
    possible.

    Args:
      experiment: base config; not modified.
      seeds: number of consecutive seeds, starting with `train.seed`. If None, only `train.seed` is used, and run names
        omit the seed.
      sweeps: one string per field, with the field and its values, such as "optimizer.learning_rate=1e-5,3e-5". A value
        that contains commas must be in brackets.

    Raises:
      UserError: a field is unknown or repeated, a value is invalid or repeated, a config is invalid, the seeds have no
        effect, or the runs select their best checkpoints by different metrics.
    """
    axes = dict(_axis(sweep, experiment) for sweep in sweeps)
    if len(axes) < len(sweeps):
        raise UserError("--sweep has a field twice: give all of its values in one --sweep")
    if seeds is not None:
        _check_seeds(experiment, axes)
    if (count := (seeds or 1) * math.prod(map(len, axes.values()))) > _MAX_RUNS:
        raise UserError(f"--seeds and --sweep make {count:,} runs, the maximum is {_MAX_RUNS:,}: give fewer values")
    runs = []
    for seed in [None] if seeds is None else range(experiment.train.seed, experiment.train.seed + seeds):
        for combination in itertools.product(*axes.values()):
            values = dict(zip(axes, combination, strict=True))
            config = _with(experiment, values if seed is None else values | {"train.seed": str(seed)})
            name_parts = [f"{field.rpartition('.')[2]}={_slug(value)}" for field, value in values.items()]
            runs.append(
                GridRun(",".join([*name_parts, *([] if seed is None else [f"seed-{seed}"])]), seed, values, config)
            )
    for run in runs:
        try:
            validate(run.experiment)
        except UserError as e:
            raise UserError(f"{run.name}: {e}") from e
    if len(metrics := {run.experiment.select_by for run in runs}) > 1:
        raise UserError(
            f"--sweep makes runs that select by {' and '.join(sorted(metrics))}, which are not comparable: set "
            "--config.evaluate.select_by to a metric that all runs have"
        )
    return runs


def describe_seeds(experiment: Experiment) -> str:
    """Describes in one sentence what --seeds randomizes and which seeds stay fixed."""
    seeds = {use: getattr(experiment.train, f"{use}_seed") for use in SEED_USES}
    fixed = "".join(f"; config.train.{use}_seed stays {seed}" for use, seed in seeds.items() if seed is not None)
    controlled = [description for use, description in SEED_USES.items() if seeds[use] is None]
    return f"each seed is config.train.seed, which controls {', '.join(controlled)}{fixed}"


def _axis(sweep: str, experiment: Experiment) -> tuple[str, list[str]]:
    """Parses a --sweep value; returns the field ("optimizer.learning_rate") and its values as strings."""
    path, equals, text = sweep.strip().partition("=")
    field, values = path.lstrip("-").removeprefix("config."), [value.strip() for value in _split_values(text)]
    if not (equals and field and all(values)):
        raise UserError(
            f"--sweep={shortened(sweep)}: give a field and its values, such as "
            '--sweep="optimizer.learning_rate=1e-5,3e-5,1e-4"'
        )
    value_of: dict[str, str] = {}
    for value in values:
        try:
            parsed = str(to_json(get(_with(experiment, {field: value}), field)))
        except UserError as e:
            raise UserError(f"--sweep={shortened(sweep)}: {e}") from e
        if parsed in value_of:
            raise UserError(f"--sweep={shortened(sweep)}: {value_of[parsed]} and {value} are the same value")
        value_of[parsed] = value
    return field, values


def _split_values(text: str) -> Iterator[str]:
    """Splits a string at commas, except commas in brackets."""
    depth, value = 0, ""
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            yield value
            value = ""
        else:
            value += c
    yield value


def _with(experiment: Experiment, values: dict[str, str]) -> Experiment:
    changed = copy.deepcopy(experiment)
    for field, value in values.items():
        set_field(changed, f"config.{field}", value)
    return changed


def _check_seeds(experiment: Experiment, axes: dict[str, list[str]]) -> None:
    """Raises UserError if --seeds has no effect or conflicts with --sweep."""
    if "train.seed" in axes:
        raise UserError("--sweep of train.seed conflicts with --seeds: give only one of them")
    if all(getattr(experiment.train, f"{use}_seed") is not None for use in SEED_USES):
        fields = ", ".join(f"config.train.{use}_seed" for use in SEED_USES)
        raise UserError(f"--seeds would repeat the same run: {fields} are all set; leave one of them None")


def _slug(value: str) -> str:
    """Converts a value to part of a folder name; appends a digest if characters had to be replaced or cut off."""
    slug = re.sub(r"[^\w.+-]+", "_", value)[:_MAX_NAME]
    return slug if slug == value else f"{slug.strip('_')}-{hashlib.sha256(value.encode()).hexdigest()[:8]}"
