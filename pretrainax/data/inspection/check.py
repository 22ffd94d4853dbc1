"""A check that the examples are what the config asks for, by measuring some before the first step."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

from pretrainax.config import RunFailed, UserError
from pretrainax.data.batch import Example, Lengths, has_loss, has_word_labels, is_encoder_decoder
from pretrainax.data.objectives import Objective, Statistic

_TOKENS, _ROWS = 200_000, 256  # at most so many are measured, which takes less than a second
_SHARES = ("padding", "unknown", "rows without")  # statistics that are shown as per cent
_FEW = 0.01  # of the rows may have nothing to predict: those of a text of unknown tokens


class Group(NamedTuple):
    """The examples of one objective of a mixture."""

    name: str  # "MaskedLM"; "SpanCorruption 2" where there are several
    examples: list[Example]
    statistics: list[Statistic]


class Measured(NamedTuple):
    """The statistics of the first rows of a run."""

    groups: list[Group]
    rows: int
    statistics: list[Statistic]  # of the rows, whatever the objective
    fill: np.ndarray  # [rows], the share of each row's inputs that is no padding
    plan: dict[str, float]  # what the plan of the rows cut and left out


def measure(batches: Any, rows: int = _ROWS, step: Optional[int] = None) -> Measured:
    """Returns statistics of the objectives and of the padding, over `rows` rows of `batches` or fewer.

    step: the updates before the first of them; None: those before the first batch.
    """
    rows = max(1, min(rows, _ROWS, _TOKENS // max(batches.lengths.raw, 1)))
    by_objective: dict[int, tuple[Objective, list[Example]]] = {}
    made = []
    first = (batches.start if step is None else step) * batches.global_batch_size
    for row in range(first, first + rows):
        objective, examples = batches.examples(row)
        made.append(examples)
        by_objective.setdefault(id(objective), (objective, []))[1].extend(examples)
    kinds = [type(objective).__name__ for objective, _ in by_objective.values()]
    groups = []
    begin, end = batches.progress(first), batches.progress(first + rows - 1)
    for i, (objective, examples) in enumerate(by_objective.values()):
        number = f" {kinds[: i + 1].count(kinds[i])}" if kinds.count(kinds[i]) > 1 else ""
        statistics = list(objective.between(begin, end).statistics(examples, batches.vocabulary))
        groups.append(Group(kinds[i] + number, examples, statistics))
    capacity = [batches.lengths_of(row // batches.global_batch_size) for row in range(first, first + rows)]
    statistics, fill = _row_statistics(made, capacity, batches)
    return Measured(groups, rows, statistics, fill, batches.statistics())


def check(measured: Measured, objective: Objective, path: str = "config.objective") -> None:
    """Raises UserError where rows have no loss token, and RunFailed where a rate is not the one asked for.

    objective, path: that of the config and its field, for the field to set.
    """
    for stat in measured.statistics:
        if stat.is_off:
            fields = " or ".join([*_fields(objective, path), "config.data.sequence_length"])
            raise UserError(
                f"{stat.measured:.1%} of {measured.rows} rows have no loss token, {type(objective).__name__} leaves "
                f"nothing to predict there: raise {fields}, "
                "or see in python -m pretrainax.inspect --config=... whether they are all unknown tokens"
            )
    for group in measured.groups:
        for stat in group.statistics:
            if stat.is_off:
                raise RunFailed(
                    f"{group.name} has {stat.name} {stat.measured:.4g} in {len(group.examples):,} examples, "
                    f"asked is {stat.asked:.4g} within {stat.tolerance:.2g}; see python -m pretrainax.inspect "
                    f"--config=..., and {stat.advice or f'compare {path} with the text'}"
                )


def one_line(measured: Measured) -> str:
    """Writes `MaskedLM: mask rate 0.15 (asked 0.15), …; padding 0.0 %, 1,216 loss tokens a batch`."""
    rates = [
        f"{group.name}: " + ", ".join(f"{s.name} {s.measured:.3g} (asked {s.asked:.3g})" for s in asked)
        for group in measured.groups
        if (asked := [s for s in group.statistics if s.asked is not None])
    ]
    general = [f"{stat.name} {number(stat)}" for stat in measured.statistics if stat.asked is None]
    counted = [f"{count:,} {name}" for name, count in measured.plan.items() if count and name != "fill"]
    return "; ".join(filter(None, [*rates, ", ".join(general), ", ".join(counted)]))


def number(stat: Statistic) -> str:
    """Writes shares of the rows as per cent, counts with commas."""
    if stat.name.startswith(_SHARES):
        return f"{stat.measured:.2%}"
    return f"{stat.measured:,.0f}" if stat.measured >= 100 else f"{stat.measured:.4g}"


def _row_statistics(
    made: Sequence[list[Example]], capacity: Sequence[Lengths], batches: Any
) -> tuple[list[Statistic], np.ndarray]:
    """Returns statistics of the rows made of these examples, with room for `capacity`, and how full each row is."""
    has_encoder = is_encoder_decoder(made[0][0])
    read = "encoder_tokens" if has_encoder else "tokens"
    inputs = np.array([sum(len(e[read]) for e in row) for row in made])
    room = np.array([lengths.inputs for lengths in capacity])
    loss = np.array([sum(map(_asked, row)) for row in made])
    statistics = [
        Statistic("padding of the encoder" if has_encoder else "padding", float(1 - inputs.sum() / room.sum()))
    ]
    if has_encoder:
        outputs = sum(len(e["tokens"]) for row in made for e in row)
        statistics.append(
            Statistic("padding of the decoder", 1 - outputs / sum(lengths.targets for lengths in capacity))
        )
    statistics += [
        Statistic("loss tokens a batch", float(loss.mean()) * batches.global_batch_size),
        Statistic("examples a row", sum(map(len, made)) / len(made)),
    ]
    if batches.vocabulary.unk is not None:
        unknown = sum(np.count_nonzero(e[read] == batches.vocabulary.unk) for row in made for e in row)
        statistics.append(Statistic("unknown tokens", float(unknown / inputs.sum())))
    few = _FEW + 5 * math.sqrt(_FEW / len(made))
    statistics.append(Statistic("rows without loss", float(np.mean(loss == 0)), asked=0.0, tolerance=few))
    return statistics, inputs / room


def _asked(example: Example) -> int:
    """Counts what is to be said of an example: tokens, labels of words, or one label."""
    if has_loss(example):
        return np.count_nonzero(example["loss_weights"])
    return len(example["word_labels"]) if has_word_labels(example) else 1


def _fields(objective: Any, path: str) -> Iterator[str]:
    """Yields the paths of the fields that say how much is predicted."""
    for field in dataclasses.fields(objective):
        value = getattr(objective, field.name)
        if field.name.endswith(("_rate", "_density")) and isinstance(value, float):
            yield f"{path}.{field.name}"
        elif isinstance(value, Objective):
            yield from _fields(value, f"{path}.{field.name}")
