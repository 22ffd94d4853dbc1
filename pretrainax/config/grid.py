"""The runs that --seeds and --sweep ask for: each is the config with other values of some fields, and has a name."""

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

USES = {"init": "fresh parameters", "order": "the order of the data", "dropout": "dropout", "mask": "masks"}  # of seeds
_NAME = 40  # characters of a value in the name of a folder
_MOST = 1000  # runs of a grid


class GridRun(NamedTuple):
    """One run of a grid."""

    name: str  # of its folder: "learning_rate=1e-5,seed-0"
    seed: Optional[int]  # its train.seed; None: that of the config, as of all runs
    values: dict[str, str]  # as they were given, by their fields: {"optimizer.learning_rate": "1e-5"}
    experiment: Experiment

    @property
    def flags(self) -> list[str]:
        """Returns what sets its fields, after the flags of the command."""
        own = self.values if self.seed is None else self.values | {"train.seed": str(self.seed)}
        return [f"--config.{field}={value}" for field, value in own.items()]


def grid_of(experiment: Experiment, seeds: Optional[int], sweeps: Sequence[str]) -> list[GridRun]:
    """Returns each pair of a seed and a value, or of several fields each combination of their values.

    All runs of one seed come before those of the next: so a grid that is cut short compares all values.

    Args:
      experiment: is left as it is.
      seeds: from `train.seed` on; None: that one alone, and no name has it.
      sweeps: as "optimizer.learning_rate=1e-5,3e-5"; a value that has commas stands in brackets.

    Raises:
      UserError: a field that there is not, values that are none of its, twice the same, or no sound config; seeds or
        values that change nothing, or what the runs are compared by.
    """
    axes = dict(_axis(sweep, experiment) for sweep in sweeps)
    if len(axes) < len(sweeps):
        raise UserError("--sweep has a field twice: give all of its values at once")
    if seeds is not None:
        _check_seeds(experiment, axes)
    if (count := (seeds or 1) * math.prod(map(len, axes.values()))) > _MOST:
        raise UserError(f"--seeds and --sweep make {count:,} runs, and a grid has at most {_MOST:,}: give fewer values")
    runs = []
    for seed in [None] if seeds is None else range(experiment.train.seed, experiment.train.seed + seeds):
        for chosen in itertools.product(*axes.values()):
            values = dict(zip(axes, chosen, strict=True))
            own = _with(experiment, values if seed is None else values | {"train.seed": str(seed)})
            parts = [f"{field.rpartition('.')[2]}={_slug(value)}" for field, value in values.items()]
            runs.append(GridRun(",".join([*parts, *([] if seed is None else [f"seed-{seed}"])]), seed, values, own))
    for run in runs:
        try:
            validate(run.experiment)
        except UserError as e:
            raise UserError(f"{run.name}: {e}") from e
    if len(figures := {run.experiment.select_by for run in runs}) > 1:
        raise UserError(
            f"--sweep makes runs that select by {' and '.join(sorted(figures))}, which cannot be compared: set "
            "--config.evaluate.select_by to one figure that all have"
        )
    return runs


def what_differs(experiment: Experiment) -> str:
    """Says what each seed of --seeds decides, and what it leaves alone."""
    own = {use: getattr(experiment.train, f"{use}_seed") for use in USES}
    kept = "".join(f"; config.train.{use}_seed stays {seed}" for use, seed in own.items() if seed is not None)
    decided = [what for use, what in USES.items() if own[use] is None]
    return f"each seed is config.train.seed, which decides {', '.join(decided)}{kept}"


def _axis(sweep: str, experiment: Experiment) -> tuple[str, list[str]]:
    """Returns a field, "optimizer.learning_rate", and the texts of its values."""
    path, equals, text = sweep.strip().partition("=")
    field, values = path.lstrip("-").removeprefix("config."), [value.strip() for value in _parted(text)]
    if not (equals and field and all(values)):
        raise UserError(
            f"--sweep={shortened(sweep)}: give a field and its values, as "
            '--sweep="optimizer.learning_rate=1e-5,3e-5,1e-4"'
        )
    seen: dict[str, str] = {}
    for value in values:
        try:
            read = str(to_json(get(_with(experiment, {field: value}), field)))
        except UserError as e:
            raise UserError(f"--sweep={shortened(sweep)}: {e}") from e
        if read in seen:
            raise UserError(f"--sweep={shortened(sweep)}: {seen[read]} and {value} are one value")
        seen[read] = value
    return field, values


def _parted(text: str) -> Iterator[str]:
    """Yields what stands between commas that are in no brackets."""
    depth, part = 0, ""
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            yield part
            part = ""
        else:
            part += c
    yield part


def _with(experiment: Experiment, values: dict[str, str]) -> Experiment:
    changed = copy.deepcopy(experiment)
    for field, value in values.items():
        set_field(changed, f"config.{field}", value)
    return changed


def _check_seeds(experiment: Experiment, axes: dict[str, list[str]]) -> None:
    """Raises a UserError where --seeds would change nothing, or what --sweep changes."""
    if "train.seed" in axes:
        raise UserError("--sweep of train.seed is what --seeds does: give one of the two")
    if all(getattr(experiment.train, f"{use}_seed") is not None for use in USES):
        fields = ", ".join(f"config.train.{use}_seed" for use in USES)
        raise UserError(f"--seeds would make the same run again and again: {fields} are set; leave one of them None")


def _slug(value: str) -> str:
    """Returns a value as a folder may be called; what is lost of it is told apart by a digest."""
    slug = re.sub(r"[^\w.+-]+", "_", value)[:_NAME]
    return slug if slug == value else f"{slug.strip('_')}-{hashlib.sha256(value.encode()).hexdigest()[:8]}"
