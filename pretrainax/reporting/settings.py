"""Compares the settings of a group of comparable runs: runs with equal configs apart from the seed are one setting."""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

from pretrainax.config import differing_fields
from pretrainax.config.choice import format_value
from pretrainax.config.metric import METRICS, declared, reported
from pretrainax.reporting.run_groups import Group, Record
from pretrainax.reporting.run_lines import RunLines

SEEDS = tuple(f"train.{name}" for name in ("seed", "init_seed", "order_seed", "dropout_seed", "mask_seed"))
# Runs are equally long if their tokens differ by less than this ratio. Padding changes the tokens of a step slightly.
_SAME_LENGTH = 1.02
_MAX_CHANCE = 0.05  # largest probability of naming a best setting if all settings are equal
_MAX_FIELDS = 3  # fields in the label of a setting


class Setting(NamedTuple):
    """Runs of a group with equal configs apart from the seed."""

    label: str  # the values that distinguish this setting from the others; "" if there are no others
    runs: tuple[int, ...]  # indices into the list of runs
    seeds: int  # number of different seeds
    values: tuple[float, ...]  # the selection metric of each run, at its best validation

    def to_json(self, runs: Sequence[RunLines]) -> dict:
        low, high = (min(self.values), max(self.values)) if self.values else (None, None)
        names = [runs[i].name for i in self.runs]
        return {"setting": self.label, "runs": names, "seeds": self.seeds, "lowest": low, "highest": high}


class Verdict(NamedTuple):
    """The settings of a group, and the best one if it is better than all others for every seed."""

    metric: str  # the selection metric of the runs; "": they have different ones, or none is known
    settings: tuple[Setting, ...]
    best: Optional[Setting]
    text: str  # one line for the user: the best setting, or why none is the best; "": there is only one setting


def select_by(record: Record) -> str:
    """Returns the metric that selects the best validation of a run; "loss" if the config is unknown."""
    return "loss" if record.experiment is None else record.experiment.select_by


def compare(runs: Sequence[RunLines], records: Sequence[Record], group: Group) -> Verdict:
    """Compares the settings of a group by their ranges over seeds.

    A setting is the best only if all runs are equally long, the range of the best setting does not overlap with any
    other range, and there are so many seeds that this happens in at most 5 % of cases if all settings are equal.
    """
    metrics = {select_by(records[i]) for i in group.runs}
    metric = metrics.pop() if len(metrics) == 1 else ""
    settings = _settings(runs, records, group, metric)
    if len(settings) < 2:
        return Verdict(metric, settings, None, "")
    reason, ranked = _obstacle(runs, group, metric, settings), []
    if not reason:
        sign = -1 if declared(metric).larger_is_better else 1
        ranked = sorted(settings, key=lambda setting: min(sign * value for value in setting.values))
        reason = _overlap(metric, ranked, sign) or _too_few_seeds(settings)
    if reason:
        return Verdict(metric, settings, None, f"no best: {reason}")
    best, second = ranked[:2]
    text = f"best {metric.replace('_', ' ')}: {_with_range(metric, best)}; next: {_with_range(metric, second)}"
    return Verdict(metric, settings, best, text)


def _obstacle(runs: Sequence[RunLines], group: Group, metric: str, settings: Sequence[Setting]) -> str:
    """Returns the reason why the settings cannot be ranked, or "" if they can, unless their ranges overlap."""
    if not metric:
        return "the runs select their best checkpoints by different metrics"
    if metric.partition("/")[0] not in METRICS:
        return f"it is unknown if larger values of {metric} are better"
    if without := [runs[i].name for i in group.runs if runs[i].best(metric) is None]:
        return f"{without[0]} has no validation {metric} yet"
    lengths = [runs[i].lines[-1].get("text_tokens") or runs[i].lines[-1]["step"] for i in group.runs]
    if max(lengths) > _SAME_LENGTH * min(lengths):
        steps = sorted({runs[i].lines[-1]["step"] for i in group.runs})
        return f"the runs have different lengths ({steps[0]:,} to {steps[-1]:,} steps, or other tokens per step)"
    if single := [setting for setting in settings if setting.seeds == 1]:
        return f"1 seed of {single[0].label}" + (f" and of {len(single) - 1} more" if single[1:] else "")
    return ""


def _too_few_seeds(settings: Sequence[Setting]) -> str:
    """Returns a reason if ranges of equal settings would often not overlap by chance, or "" if this is rare.

    All orders of the values of equal settings are equally likely, so the chance is exact: n values are the best of N
    in one of N over n cases.
    """
    total = sum(setting.seeds for setting in settings)
    chance = sum(1 / math.comb(total, setting.seeds) for setting in settings)
    if chance <= _MAX_CHANCE:
        return ""
    return (
        f"too few seeds: the range of one of {len(settings)} equal settings would be separate in {chance:.0%} of cases"
    )


def _overlap(metric: str, ranked: Sequence[Setting], sign: int) -> str:
    """Describes the first overlap of a range with the range of the first setting; returns "" if there is none."""
    worst = max(sign * value for value in ranked[0].values)
    for setting in ranked[1:]:
        if min(sign * value for value in setting.values) <= worst:
            return f"ranges overlap: {_with_range(metric, ranked[0])} and {_with_range(metric, setting)}"
    return ""


def _with_range(metric: str, setting: Setting) -> str:
    return f"{setting.label} {value_range(metric, setting)} ({setting.seeds} seeds)"


def value_range(metric: str, setting: Setting) -> str:
    """Formats the range of a setting's values: "3.1415 to 3.2000", one value, or "none"."""
    values = sorted(set(setting.values))
    return " to ".join(reported(metric, value) for value in (values[:1] + values[1:][-1:])) or "none"


def _settings(runs, records: Sequence[Record], group: Group, metric: str) -> tuple[Setting, ...]:
    """Returns the settings of a group, in the order of their first runs; () if records are missing."""
    if not group.parts:
        return ()
    configs = [experiment for i in group.runs if (experiment := records[i].experiment) is not None]
    fields = {path: tuple(map(format_value, values)) for path, values in differing_fields(configs).items()}
    members, seeds = collections.defaultdict(list), collections.defaultdict(set)
    for n, i in enumerate(group.runs):
        setting = tuple((path, values[n]) for path, values in fields.items() if path not in SEEDS)
        members[setting].append(i)
        seeds[setting].add(tuple(fields[path][n] for path in SEEDS if path in fields))
    values = {i: line[metric] for i in group.runs if metric and (line := runs[i].best(metric)) is not None}
    return tuple(
        Setting(_label(setting), tuple(indices), len(seeds[setting]), tuple(values[i] for i in indices if i in values))
        for setting, indices in members.items()
    )


def _label(setting: Sequence[tuple[str, str]]) -> str:
    """Formats the differing fields of a setting: "learning_rate=0.001, b2=0.98 and 3 more"."""
    fields = [f"{path.rpartition('.')[2]}={value}" for path, value in setting]
    more = f" and {len(fields) - _MAX_FIELDS} more" if len(fields) > _MAX_FIELDS else ""
    return ", ".join(fields[:_MAX_FIELDS]) + more


def field_rows(records: Sequence[Record]) -> list[tuple[str, list[tuple[str, list[int]]]]]:
    """Lists the config fields that differ between runs: (path, [(value, indices of the runs with this value)]).

    The seed is omitted if it only numbers runs of equal configs, as in --seeds.
    """
    known = [(i, record.experiment) for i, record in enumerate(records) if record.experiment is not None]
    fields = differing_fields([experiment for _, experiment in known]) if known else {}
    repeats = _repeats(fields, len(known))
    rows = []
    for path, values in fields.items():
        if path in SEEDS and repeats:
            continue
        indices = collections.defaultdict(list)
        for (i, _), value in zip(known, values, strict=True):
            indices[format_value(value)].append(i)
        rows.append((path, list(indices.items())))
    return rows


def _repeats(fields: Mapping[str, tuple[object, ...]], count: int) -> bool:
    """Returns True if the seeds number the runs of each config, so that no two runs are equal."""
    others = [[format_value(v) for v in values] for path, values in fields.items() if path not in SEEDS]
    seeds = [[format_value(v) for v in values] for path, values in fields.items() if path in SEEDS]
    rows = [tuple(zip(*columns, strict=True)) if columns else ((),) * count for columns in (others, seeds)]
    pairs = list(zip(*rows, strict=True))
    return len(set(pairs)) == len(pairs) and len(set(rows[0])) < len(pairs)
