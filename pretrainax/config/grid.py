"""Builds the configs of a grid of runs from --seeds and --sweep: copies of a base config with changed fields."""

import copy
import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

from pretrainax.config.choice import Choice
from pretrainax.config.experiment import Experiment, SeedUse
from pretrainax.config.overrides import set_field
from pretrainax.config.serialization import to_json
from pretrainax.config.validation import get, validate
from pretrainax.files.errors import UserError, shortened

# Prefix of a seed field in config.train (init_seed, …) -> what the seed randomizes.
SEED_USES: dict[SeedUse, str] = {
    "init": "fresh parameters",
    "order": "the order of the data",
    "dropout": "dropout",
    "mask": "masks",
}
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
        values = ({"evaluate.halves": "True"} if self.experiment.evaluate.halves else {}) | values
        return [f"--config.{field}={value}" for field, value in values.items()]


def grid_of(experiment: Experiment, seeds: Optional[int], sweeps: Sequence[str]) -> list[GridRun]:
    """Builds a grid of runs, one for each combination of a seed and values of the swept fields.

    All runs with one seed precede the runs with the next seed, so that even an interrupted grid compares as many values
    as possible.

    If fields are swept and the metric allows it, the runs have `evaluate.halves`, so that different rows select the
    best value and measure the reported metric.

    Args:
      experiment: base config; not modified.
      seeds: number of consecutive seeds, starting with `train.seed`. If None, only `train.seed` is used, and run names
        omit the seed.
      sweeps: one string per field, with the field and its values: "optimizer.learning_rate=1e-5,3e-5". A value that
        contains commas must be in brackets. Several fields, separated by commas, change together; their values are in
        brackets: "optimizer.learning_rate,optimizer.b2=(1e-3,0.98),(3e-3,0.95)".

    Raises:
      UserError: a field is unknown or repeated, a value is invalid or repeated, a config is invalid, the seeds have no
        effect, or the runs select their best checkpoints by different metrics.
    """
    axes = [_axis(sweep, experiment) for sweep in sweeps]
    fields = [field for axis in axes for field in axis[0]]
    if len(set(fields)) < len(fields):
        raise UserError("--sweep has a field twice: give all of its values in one --sweep")
    if seeds is not None:
        _check_seeds(experiment, fields)
    if (count := (seeds or 1) * math.prod(map(len, axes))) > _MAX_RUNS:
        raise UserError(f"--seeds and --sweep make {count:,} runs, the maximum is {_MAX_RUNS:,}: give fewer values")
    runs = []
    for seed in [None] if seeds is None else range(experiment.train.seed, experiment.train.seed + seeds):
        for combination in itertools.product(*axes):
            values = {field: value for settings in combination for field, value in settings.items()}
            config = _with(experiment, values if seed is None else values | {"train.seed": str(seed)})
            name_parts = [f"{field.rpartition('.')[2]}={_slug(value)}" for field, value in values.items()]
            name = ",".join([*name_parts, *([] if seed is None else [f"seed-{seed}"])])
            runs.append(GridRun(name, seed, values, config))
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
    if axes and all(run.experiment.has_halves for run in runs):
        for run in runs:
            run.experiment.evaluate.halves = True
    return runs


def describe_seeds(experiment: Experiment) -> str:
    """Describes in one sentence what --seeds randomizes and which seeds stay fixed."""
    seeds = {use: getattr(experiment.train, f"{use}_seed") for use in SEED_USES}
    fixed = "".join(f"; config.train.{use}_seed stays {seed}" for use, seed in seeds.items() if seed is not None)
    controlled = [description for use, description in SEED_USES.items() if seeds[use] is None]
    return f"each seed is config.train.seed, which controls {', '.join(controlled)}{fixed}"


def swept_numbers(run: GridRun) -> dict[str, tuple[str, float]]:
    """Returns the swept numbers of a run, {path: (class of the swept object, number)}, also those inside objects.

    {"optimizer.learning_rate": ("", 1e-3)} or, if whole optimizers are swept, ("AdamW", 1e-3).
    """

    def numbers(path: str, value: object, kind: str) -> Iterator[tuple[str, tuple[str, float]]]:
        if isinstance(value, Choice):
            kind = f"{kind}/{type(value).__name__}"
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield path, (kind, float(value))
        elif dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                yield from numbers(f"{path}.{field.name}", getattr(value, field.name), kind)

    return dict(pair for field in run.values for pair in numbers(field, get(run.experiment, field), ""))


def _axis(sweep: str, experiment: Experiment) -> list[dict[str, str]]:
    """Parses a --sweep value; returns its settings, [{"optimizer.learning_rate": "1e-5"}, …]."""
    path, equals, text = sweep.strip().partition("=")
    fields = [field.strip().lstrip("-").removeprefix("config.") for field in path.split(",")]
    values = [value.strip() for value in _split_values(text)]
    rows = [[value] if len(fields) == 1 else _bracketed(value) for value in values]
    if not (equals and all(fields) and all(map(all, rows))):
        raise UserError(
            f"--sweep={shortened(sweep)}: give a field and its values, such as "
            '--sweep="optimizer.learning_rate=1e-5,3e-5,1e-4"'
        )
    if wrong := [value for value, row in zip(values, rows, strict=True) if len(row) != len(fields)]:
        raise UserError(
            f"--sweep={shortened(sweep)}: {wrong[0]} must be {len(fields)} values in brackets, one for each field, "
            'such as --sweep="optimizer.learning_rate,optimizer.b2=(1e-3,0.98),(3e-3,0.95)"'
        )
    settings = [dict(zip(fields, row, strict=True)) for row in rows]
    value_of: dict[str, str] = {}
    for value, setting in zip(values, settings, strict=True):
        try:
            changed = _with(experiment, setting)
            parsed = str([to_json(get(changed, field)) for field in fields])
        except UserError as e:
            raise UserError(f"--sweep={shortened(sweep)}: {e}") from e
        if parsed in value_of:
            raise UserError(f"--sweep={shortened(sweep)}: {value_of[parsed]} and {value} are the same value")
        value_of[parsed] = value
    return settings


def _bracketed(value: str) -> list[str]:
    """Splits the values in brackets, "(1e-3,0.98)"; returns no values if there are no brackets."""
    is_bracketed = value[:1] + value[-1:] in ("()", "[]")
    return [part.strip() for part in _split_values(value[1:-1])] if is_bracketed else []


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


def _check_seeds(experiment: Experiment, fields: Sequence[str]) -> None:
    """Raises UserError if --seeds has no effect or conflicts with --sweep."""
    if "train.seed" in fields:
        raise UserError("--sweep of train.seed conflicts with --seeds: give only one of them")
    if all(getattr(experiment.train, f"{use}_seed") is not None for use in SEED_USES):
        fields = ", ".join(f"config.train.{use}_seed" for use in SEED_USES)
        raise UserError(f"--seeds would repeat the same run: {fields} are all set; leave one of them None")


def _slug(value: str) -> str:
    """Converts a value to part of a folder name; appends a digest if characters had to be replaced or cut off."""
    slug = re.sub(r"[^\w.+-]+", "_", value)[:_MAX_NAME]
    return slug if slug == value else f"{slug.strip('_')}-{hashlib.sha256(value.encode()).hexdigest()[:8]}"
