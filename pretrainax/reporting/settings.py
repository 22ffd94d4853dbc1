"""Compares the settings of a group of comparable runs: runs with equal configs apart from the seed are one setting."""

import collections
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, Optional

from pretrainax.config import differing_fields
from pretrainax.config.choice import format_value
from pretrainax.config.metric import METRICS, reported_half
from pretrainax.reporting.paired import Difference, Ranking, Values, mean_interval, rank
from pretrainax.reporting.run_groups import Group, Record
from pretrainax.reporting.run_lines import RunLines

SEEDS = tuple(f"train.{name}" for name in ("seed", "init_seed", "order_seed", "dropout_seed", "mask_seed"))
# Runs are equally long if their tokens differ by less than this ratio. Padding changes the tokens of a step slightly.
_SAME_LENGTH = 1.02
_MAX_FIELDS = 3  # fields in the label of a setting


class Setting(NamedTuple):
    """Runs of a group with equal configs apart from the seed."""

    label: str  # the values that distinguish this setting from the others; "" if there are no others
    runs: tuple[int, ...]  # indices into the list of runs
    seeds: int  # number of different seeds
    values: Values  # the reported metric by seed, at the best validation; a mean if several runs have the same seed
    selection: Values  # the selection metric by seed

    def to_json(self, runs: Sequence[RunLines], difference: Optional[Difference]) -> dict:
        names, values = [runs[i].name for i in self.runs], list(self.values.values())
        mean, half_width = mean_interval(values) if values else (None, None)
        row = {"setting": self.label, "runs": names, "seeds": self.seeds, "mean": mean, "half_width": half_width}
        return row | {"difference": difference and difference.to_json()}


class Verdict(NamedTuple):
    """The settings of a group, and the best one if it is distinguishable from all others."""

    metric: str  # the reported metric of the runs; "": they have different ones, or none is known
    settings: tuple[Setting, ...]
    ranking: Optional[Ranking]  # None: there is only one setting, or the settings are not comparable
    text: str  # one line for the user: the best setting, or why none is the best; "": there is only one setting

    @property
    def best(self) -> Optional[Setting]:
        return None if self.ranking is None or self.ranking.best is None else self.settings[self.ranking.best]

    @property
    def differences(self) -> Sequence[Optional[Difference]]:
        """Returns the difference of each setting from the setting with the best mean; None if it is unknown."""
        return (None,) * len(self.settings) if self.ranking is None else self.ranking.differences

    def to_json(self, runs: Sequence[RunLines]) -> list[dict]:
        return [s.to_json(runs, difference) for s, difference in zip(self.settings, self.differences, strict=True)]


def select_by(record: Record) -> str:
    """Returns the metric that selects the best validation of a run; "loss" if the config is unknown."""
    return "loss" if record.experiment is None else record.experiment.select_by


def compare(runs: Sequence[RunLines], records: Sequence[Record], group: Group) -> Verdict:
    """Compares the settings of a group by `paired.rank`, if all runs are equally long."""
    metrics = {select_by(records[i]) for i in group.runs}
    metric = metrics.pop() if len(metrics) == 1 else ""
    settings = _settings(runs, records, group, metric)
    if len(settings) < 2:
        return Verdict(reported_half(metric), settings, None, "")
    if reason := _obstacle(runs, group, metric):
        return Verdict(reported_half(metric), settings, None, f"no best: {reason}")
    values, selection = ([getattr(s, name) for s in settings] for name in ("values", "selection"))
    ranking = rank(reported_half(metric), [setting.label for setting in settings], values, selection)
    return Verdict(reported_half(metric), settings, ranking, ranking.text)


def _obstacle(runs: Sequence[RunLines], group: Group, metric: str) -> str:
    """Returns the reason why the settings are not comparable, or "" if they are."""
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
    return ""


def _settings(runs, records: Sequence[Record], group: Group, metric: str) -> tuple[Setting, ...]:
    """Returns the settings of a group, in the order of their first runs; () if records are missing."""
    if not group.parts:
        return ()
    configs = [experiment for i in group.runs if (experiment := records[i].experiment) is not None]
    fields = {path: tuple(map(format_value, values)) for path, values in differing_fields(configs).items()}
    members, seeds = collections.defaultdict(list), {}
    for n, i in enumerate(group.runs):
        members[tuple((path, values[n]) for path, values in fields.items() if path not in SEEDS)].append(i)
        seeds[i] = tuple(fields[path][n] for path in SEEDS if path in fields)
    best = {i: line for i in group.runs if metric and (line := runs[i].best(metric)) is not None}
    by_seed = lambda indices, name: _means((seeds[i], best[i].get(name, best[i][metric])) for i in indices if i in best)  # noqa: E731
    return tuple(
        Setting(
            label=_label(setting),
            runs=tuple(indices),
            seeds=len({seeds[i] for i in indices}),
            values=by_seed(indices, reported_half(metric)),
            selection=by_seed(indices, metric),
        )
        for setting, indices in members.items()
    )


def _means(pairs: Iterable[tuple[Hashable, float]]) -> Values:
    """Returns the mean of the values of each seed."""
    values = collections.defaultdict(list)
    for seed, value in pairs:
        values[seed].append(value)
    return {seed: statistics.mean(of_seed) for seed, of_seed in values.items()}


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
