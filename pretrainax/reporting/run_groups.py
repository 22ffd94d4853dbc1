"""Groups runs whose metrics are comparable, and lists the metrics that do not compare between groups.

A group has runs with equal objectives, tokenizers and validation text. `Metric.depends_on` states which of these
properties ("aspects") a metric depends on, so some metrics also compare between groups.
"""

import collections
import itertools
import string
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

from pretrainax.config import Experiment, differing_fields
from pretrainax.config.metric import Aspect, declared
from pretrainax.reporting.run_lines import RunLines
from pretrainax.reporting.units import byte_size

# aspect of a run -> properties of the run that have to be equal
_PARTS: dict[Aspect, tuple[str, ...]] = {
    "objective": ("objective",),
    "tokenizer": ("tokenizer",),
    "text": ("validation text", "filters", "rows", "size"),
    "generator": ("generator",),
    "hardware": (),  # a workdir does not record it
}
PARTS = tuple(itertools.chain(*_PARTS.values()))
# Two sizes of the validation text are equal up to this ratio: a validation leaves out its last, incomplete batch.
_SAME_SIZE = 1.01
_MAX_VALUES = 3  # values of a property that a note lists
# Fields on which training metrics depend, in addition to the validation's properties
_TRAINING = ("objective", "data.source", "data.quality", "data.drop", "data.near", "phases", "distill", "model.dropout")
_TRAINING += ("model.attention_dropout",)


class Part(NamedTuple):
    """A property of a run: `key` is equal for equal properties, and `text` describes the property."""

    key: Hashable  # None: unknown
    text: str


class Record(NamedTuple):
    """Describes the measurement of a run's metrics, as far as the workdir records it."""

    experiment: Optional[Experiment]  # None: unknown, for the reason in `missing`
    parts: Mapping[str, Part]  # {name in PARTS: property}; {}: unknown
    corpora: Hashable = None  # fingerprints of the validation corpora; None: not known, or of other text as well
    missing: str = ""  # the missing records; "": none


class Group(NamedTuple):
    """Runs whose metrics are comparable, or all runs with missing records (`parts` is then {})."""

    name: str
    runs: tuple[int, ...]  # indices into the list of runs
    parts: Mapping[str, Part]
    label: str  # description of the properties that differ between groups

    @property
    def title(self) -> str:
        return f"{self.name}: {self.label}" if self.label else self.name


def group_runs(runs: Sequence[RunLines], records: Sequence[Record]) -> list[Group]:
    """Groups runs by objective, tokenizer and validation text; runs with missing records are the last group, "?"."""
    properties = _complete(_with_sizes(runs, _with_texts(records)))
    indices = collections.defaultdict(list)
    for i, parts in enumerate(properties):
        indices[tuple(part.key for part in parts.values())].append(i)
    unknown = indices.pop((), [])
    differing = [name for n, name in enumerate(PARTS) if len({key[n] for key in indices}) > 1]
    if (
        len({tuple(part.key for name, part in properties[i[0]].items() if name != "size") for i in indices.values()})
        > 1
    ):
        differing = [name for name in differing if name != "size"]  # follows from the others
    groups = []
    for name, members in zip(_names(), indices.values(), strict=False):
        parts = properties[members[0]]
        label = ", ".join(filter(None, (parts[part].text for part in differing or PARTS[:3])))
        groups.append(Group(name, tuple(members), parts, label))
    return groups + [Group("?", tuple(unknown), {}, "records are missing")] * bool(unknown)


def _names() -> Iterator[str]:
    """Yields A, B, …, Z, AA, AB, …"""
    for length in itertools.count(1):
        yield from map("".join, itertools.product(string.ascii_uppercase, repeat=length))


def _with_texts(records: Sequence[Record]) -> list[dict[str, Part]]:
    """Returns the parts of each run, where the validation text is equal if the source and the fingerprints say so.

    A fingerprint covers text and tokenizer, wherever the files are. Equal fingerprints therefore mean equal text even
    if the paths differ, and different fingerprints with the same tokenizer mean that the text at a path has changed.
    Between tokenizers, only the source and the size of the text can be compared.
    """
    texts, versions, properties = {}, collections.defaultdict(list), []
    for record in records:
        parts = dict(record.parts)
        if parts and record.corpora is not None:
            text = texts.setdefault(record.corpora, parts["validation text"])
            known = versions[parts["tokenizer"].key, text.key]
            known += [record.corpora] * (record.corpora not in known)
            if number := known.index(record.corpora):
                text = Part((text.key, record.corpora), f"{text.text}, version {number + 1}")
            parts["validation text"] = text
        properties.append(parts)
    tokenizers = {parts["tokenizer"] for parts in properties if parts}
    names = collections.Counter(tokenizer.text for tokenizer in tokenizers)
    for parts in filter(None, properties):
        key, text = parts["tokenizer"]
        if names[text] > 1:
            parts["tokenizer"] = Part(key, f"{text} ({str(key)[:6]})")
    return properties


def _with_sizes(runs: Sequence[RunLines], properties: Sequence[dict[str, Part]]) -> Sequence[dict[str, Part]]:
    """Adds the size of the text that the last validation of each run has read, as the part "size"."""
    sizes = [_size(run) for run in runs]
    clusters, before = {}, 0.0
    for size in sorted(size for size, _ in filter(None, sizes)):
        clusters[size] = clusters[before] if before and size <= _SAME_SIZE * before else size
        before = size
    for parts, size in zip(properties, sizes, strict=True):
        if parts:
            number, unit = size or (0.0, "")
            text = f"{byte_size(number)} of text" if unit == "bytes" else f"{number:,.0f} {unit}"
            parts["size"] = Part((clusters[number], unit), text) if size else Part(None, "no validation yet")
    return properties


def _size(run: RunLines) -> Optional[tuple[float, str]]:
    """Returns the size and unit of a run's last validation, or None if there is none.

    The unit is "bytes" if the run reports bits per byte, from which the number of bytes follows, so that sizes are
    comparable between tokenizers. Otherwise, the unit is "labels" or "targets".
    """
    for line in reversed(run.lines):
        if line["split"] == "valid" and (count := line.get("labels") or line.get("loss_tokens")):
            if line.get("bits_per_byte") and line.get("bits_per_token"):
                return line["bits_per_token"] * count / line["bits_per_byte"], "bytes"
            return count, "labels" if line.get("labels") else "targets"
    return None


def _complete(properties: Sequence[dict[str, Part]]) -> Sequence[dict[str, Part]]:
    """Takes an unknown size from the runs with otherwise equal parts, if these runs agree about it."""
    known = collections.defaultdict(set)
    key_of = lambda parts: tuple(part.key for name, part in parts.items() if name != "size")  # noqa: E731
    for parts in filter(None, properties):
        if parts["size"].key is not None:
            known[key_of(parts)].add(parts["size"])
    for parts in filter(None, properties):
        sizes = known[key_of(parts)]
        if parts["size"].key is None and len({size.key for size in sizes}) == 1:
            parts["size"] = min(sizes, key=lambda size: size.text)
    return properties


# --- metrics ---------------------------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """A metric of runs that are comparable in this metric."""

    metric: str
    runs: tuple[int, ...]
    groups: str  # names of the groups, such as "A+B"; "": all groups
    is_mixed: bool  # True: a diagnostic of all groups, which does not compare between them


def panels_of(runs: Sequence[RunLines], groups: Sequence[Group], metrics: Sequence[str]) -> list[Panel]:
    """Returns for each metric one panel per set of groups between which it is comparable.

    A metric that does not depend on the validation text, such as the gradient norm, is a diagnostic. It does not rank
    runs, so one panel has all groups.
    """
    panels = []
    for metric in metrics:
        sets = _comparable(runs, groups, metric)
        if is_mixed := len(sets) > 1 and "text" not in declared(metric).depends_on:
            sets = [[group for groups_of_set in sets for group in groups_of_set]]
        for groups_of_set in sets:
            members = sorted(i for group in groups_of_set for i in group.runs)
            panels.append(Panel(metric, tuple(members), _joined(groups_of_set) if len(sets) > 1 else "", is_mixed))
    return panels


def _joined(groups: Sequence[Group]) -> str:
    return "+".join(group.name for group in groups)


def _comparable(runs: Sequence[RunLines], groups: Sequence[Group], metric: str) -> list[list[Group]]:
    """Divides the groups that have a metric into sets of groups between which it is comparable."""
    sets = collections.defaultdict(list)
    for group in groups:
        if any(runs[i].has(metric) for i in group.runs):
            sets[_keys(group, _aspects(runs, group, metric))].append(group)
    return list(sets.values())


def _aspects(runs: Sequence[RunLines], group: Group, metric: str) -> tuple[Aspect, ...]:
    names: Collection[str] = [name for name in ("labels",) if any(runs[i].has(name) for i in group.runs)]
    return declared(metric, names).depends_on


def _keys(group: Group, aspects: Sequence[Aspect]) -> Hashable:
    names = [name for aspect in aspects for name in _PARTS[aspect]]
    return tuple((name, group.parts[name].key if group.parts else None) for name in names)


def comparison_notes(runs: Sequence[RunLines], groups: Sequence[Group], records: Sequence[Record], metrics, by: str):
    """Yields one line for each set of metrics that do not compare, with the groups and the differing properties."""
    lines = collections.defaultdict(list)
    for metric in metrics:
        sets = _comparable(runs, [group for group in groups if group.parts], metric)
        if len(sets) > 1:
            names = dict.fromkeys(
                name for s in sets for aspect in _aspects(runs, s[0], metric) for name in _PARTS[aspect]
            )
            reasons = [reason for name in names if (reason := _difference(name, [s[0] for s in sets]))]
            reasons = reasons[:1] if reasons[0].startswith("size") else [r for r in reasons if not r.startswith("size")]
            lines[", ".join(map(_joined, sets)), "; ".join(reasons)].append(metric)
    for (sets, reasons), names in lines.items():
        advice = "; config.evaluate.batches=0 validates on all text" if reasons.startswith("size") else ""
        yield f"{', '.join(names)}: not comparable between groups {sets}: other {reasons}{advice}"
    for group in groups:
        if not group.parts:
            missing = "; ".join(f"{runs[i].name}: {records[i].missing}" for i in group.runs)
            yield f"group ?: not comparable with other runs, because records are missing ({missing})"
        elif changed := [path for path in _fields(group, records) if path.startswith(_TRAINING)]:
            yield f"training metrics in group {group.name}: not comparable, only validation is: other {_list(changed)}"
    speeds = [metric for metric in metrics if "hardware" in declared(metric).depends_on]
    if len(runs) > 1 and (speeds := speeds + ["time"] * (by == "time")):
        yield f"{', '.join(speeds)}: comparable only on equal hardware, which a run does not record"


def _difference(name: str, groups: Sequence[Group]) -> str:
    texts = {group.parts[name].key: group.parts[name].text or "none" for group in groups}
    values = f" ({' / '.join(texts.values())})" if len(texts) <= _MAX_VALUES else f" ({len(texts)} different)"
    return f"{name}{values}" if len(texts) > 1 else ""


def _list(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _fields(group: Group, records: Sequence[Record]) -> dict[str, tuple[object, ...]]:
    """Returns the config fields that differ between the runs of a group, {path: value of each run}."""
    return differing_fields([e for i in group.runs if (e := records[i].experiment) is not None])
