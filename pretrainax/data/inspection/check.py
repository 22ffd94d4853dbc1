"""Checks, before the first step of a run, that the statistics of its first rows match the config."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

from pretrainax.config import RunFailed, UserError
from pretrainax.data.batch import Example, Lengths, has_loss, has_word_labels, is_encoder_decoder
from pretrainax.data.objectives import Objective, ObjectiveInput, Statistic
from pretrainax.data.objectives.tolerances import ROUNDING_ERROR
from pretrainax.files.errors import counted
from pretrainax.files.json_files import JsonObject

# Limits of a measurement, so that it takes about a second. With 1,024 examples, a check of a rate of 0.5, such as that
# of random next sentences, finds deviations of 0.11 reliably; 200,000 tokens are 390 examples of 512 tokens, with 0.18.
_MAX_TOKENS, _MAX_ROWS = 200_000, 1_024
_PERCENT_PREFIXES = ("padding", "unknown", "rows without")  # statistics with these names are printed in percent
_MAX_ROWS_WITHOUT_LOSS = 0.01  # maximum fraction of rows; for example, rows of unknown tokens have no loss token


class Group(NamedTuple):
    """The examples of one objective in a mixture of objectives, and their statistics."""

    name: str  # "MaskedLM"; "SpanCorruption 2" for the second SpanCorruption of a mixture
    examples: list[Example]
    statistics: list[Statistic]


class Measurement(NamedTuple):
    """The statistics of the first rows of a run."""

    groups: list[Group]  # one per objective
    rows: int  # number of measured rows
    statistics: list[Statistic]  # statistics of the rows over all objectives, such as padding
    fill: np.ndarray  # [rows], the fraction of each row's input positions that are not padding
    plan: dict[str, float]  # statistics of the row plan, such as the numbers of cut and dropped documents


def measure(batches: Any, rows: int = _MAX_ROWS, step: Optional[int] = None) -> Measurement:
    """Computes per-objective statistics of the first rows of `batches`, and their padding, loss and unknown tokens.

    Args:
      batches: the `Batches` of a run.
      rows: the maximum number of rows to measure, which is also limited by _MAX_ROWS and _MAX_TOKENS.
      step: the step whose batch is measured first. If None, the step at which `batches` starts.
    """
    rows = max(1, min(rows, _MAX_ROWS, _MAX_TOKENS // max(batches.lengths.raw, 1)))
    groups_by_objective: dict[int, tuple[Objective, list[Example], list[ObjectiveInput]]] = {}
    examples_by_row = []
    first = (batches.start if step is None else step) * batches.global_batch_size
    for row in range(first, first + rows):
        objective, examples = batches.examples(row)
        examples_by_row.append(examples)
        _, group_examples, inputs = groups_by_objective.setdefault(id(objective), (objective, [], []))
        group_examples += examples
        inputs += batches.inputs(row) if objective.pairs_documents else []
    kinds = [type(objective).__name__ for objective, _, _ in groups_by_objective.values()]
    groups = []
    first_progress, last_progress = batches.progress(first), batches.progress(first + rows - 1)
    for i, (objective, examples, inputs) in enumerate(groups_by_objective.values()):
        suffix = f" {kinds[: i + 1].count(kinds[i])}" if kinds.count(kinds[i]) > 1 else ""
        objective = objective.with_settings_between(first_progress, last_progress)
        statistics = list(objective.statistics(examples, batches.vocabulary))
        if inputs:
            statistics += objective.input_statistics(examples, inputs, batches.vocabulary)
        groups.append(Group(kinds[i] + suffix, examples, statistics))
    capacity = [batches.lengths_of(row // batches.global_batch_size) for row in range(first, first + rows)]
    statistics, fill = _row_statistics(examples_by_row, capacity, batches)
    return Measurement(groups, rows, statistics, fill, batches.statistics())


def check(measured: Measurement, objective: Objective, path: str = "config.objective") -> None:
    """Compares the statistics of `measure` with their expected values.

    Args:
      objective: the objective of the config, for error messages.
      path: the config path of `objective`, for error messages.

    Raises:
      UserError: too many rows have no loss token.
      RunFailed: an objective's statistic, such as the mask rate, differs from its expected value by more than its
        tolerance.
    """
    for stat in measured.statistics:
        if stat.is_off:
            fields = " or ".join([*_fields(objective, path), "config.data.sequence_length"])
            raise UserError(
                f"{stat.measured:.1%} of {measured.rows:,} rows have no loss token: {type(objective).__name__} "
                f"predicts nothing in them. Raise {fields}, or check with python -m pretrainax.inspect --config=... "
                "if these rows hold only unknown tokens"
            )
    for group in measured.groups:
        for stat in group.statistics:
            if stat.is_off:
                raise RunFailed(
                    f"{group.name} has {stat.name} {stat.measured:.4f} (of {counted(len(group.examples), 'example')}), "
                    f"expected {stat.expected:.4g} ± {stat.tolerance:.2g}. Run python -m pretrainax.inspect "
                    f"--config=..., and {stat.advice or f'compare {path} with the dataset'}"
                )


def summary_line(measured: Measurement) -> str:
    """Formats the measured statistics as one line.

    Example: `MaskedLM: mask rate 0.15 (expected 0.15 ± 0.002), …; padding 0.00%, loss tokens a batch 1,216`.
    """
    rates = [
        f"{group.name}: " + ", ".join(f"{s.name} {s.measured:.3g} ({_format_expected(s)})" for s in checked)
        for group in measured.groups
        if (checked := [s for s in group.statistics if s.expected is not None])
    ]
    other_statistics = [
        f"{stat.name} {format_statistic(stat)}" for stat in measured.statistics if stat.expected is None
    ]
    plan_counts = [f"{count:,} {name}" for name, count in measured.plan.items() if count and name != "fill"]
    return "; ".join(filter(None, [*rates, ", ".join(other_statistics), ", ".join(plan_counts)]))


def _format_expected(stat: Statistic) -> str:
    """Formats the expected value of a statistic and its tolerance; says so if there are too few examples."""
    tolerance = f" ± {stat.tolerance:.1g}" if stat.tolerance > ROUNDING_ERROR else ""
    return f"expected {stat.expected:.3g}{tolerance}" + (": too few examples to check" if stat.is_weak else "")


def format_statistic(stat: Statistic) -> str:
    """Formats the measured value of a statistic: fractions in percent, large numbers with commas."""
    if stat.name.startswith(_PERCENT_PREFIXES):
        return f"{stat.measured:.2%}"
    return f"{stat.measured:,.0f}" if stat.measured >= 100 else f"{stat.measured:.4g}"


def values(measured: Measurement) -> JsonObject:
    """Returns the measured and expected statistics as values that JSON supports."""
    groups = [(group.name, group.statistics) for group in measured.groups] + [("rows", measured.statistics)]
    statistics = [
        {
            "group": name,
            "name": stat.name,
            "measured": float(stat.measured),
            "expected": stat.expected,
            "tolerance": stat.tolerance if stat.expected is not None else None,
            "off": stat.is_off,
            "weak": bool(stat.is_weak),
        }
        for name, group in groups
        for stat in group
    ]
    plan = {name: float(value) for name, value in measured.plan.items()}
    return {"rows": measured.rows, "statistics": statistics, "plan": plan}


def format_plan_value(value: float) -> str:
    """Formats a statistic of the row plan: counts with all digits, fractions with four."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


def _row_statistics(
    rows: Sequence[list[Example]], capacity: Sequence[Lengths], batches: Any
) -> tuple[list[Statistic], np.ndarray]:
    """Computes the statistics that cover the rows of all objectives, and what fraction of each row is filled, [rows].

    Args:
      rows: the examples of each row.
      capacity: the lengths to which each row is padded.
    """
    has_encoder = is_encoder_decoder(rows[0][0])
    inputs_name = "encoder_tokens" if has_encoder else "tokens"
    inputs = np.array([sum(len(e[inputs_name]) for e in row) for row in rows])
    input_lengths = np.array([lengths.inputs for lengths in capacity])
    predictions = np.array([sum(map(_num_predictions, row)) for row in rows])
    statistics = [
        Statistic("padding of the encoder" if has_encoder else "padding", float(1 - inputs.sum() / input_lengths.sum()))
    ]
    if has_encoder:
        outputs = sum(len(e["tokens"]) for row in rows for e in row)
        statistics.append(
            Statistic("padding of the decoder", 1 - outputs / sum(lengths.targets for lengths in capacity))
        )
    statistics += [
        Statistic("loss tokens a batch", float(predictions.mean()) * batches.global_batch_size),
        Statistic("examples a row", sum(map(len, rows)) / len(rows)),
    ]
    if batches.vocabulary.unk is not None:
        unknown = sum(np.count_nonzero(e[inputs_name] == batches.vocabulary.unk) for row in rows for e in row)
        statistics.append(Statistic("unknown tokens", float(unknown / inputs.sum())))
    tolerance = _MAX_ROWS_WITHOUT_LOSS + 5 * math.sqrt(_MAX_ROWS_WITHOUT_LOSS / len(rows))
    statistics.append(
        Statistic("rows without loss", float(np.mean(predictions == 0)), expected=0.0, tolerance=tolerance)
    )
    return statistics, inputs / input_lengths


def _num_predictions(example: Example) -> int:
    """Counts the predictions in an example: its loss tokens or word labels, or 1 for any other kind of label."""
    if has_loss(example):
        return np.count_nonzero(example["loss_weights"])
    return len(example["word_labels"]) if has_word_labels(example) else 1


def _fields(objective: Any, path: str) -> Iterator[str]:
    """Yields the config paths of an objective's rate fields, which set the fraction of predicted tokens."""
    for field in dataclasses.fields(objective):
        value = getattr(objective, field.name)
        if field.name.endswith(("_rate", "_density")) and isinstance(value, float):
            yield f"{path}.{field.name}"
        elif isinstance(value, Objective):
            yield from _fields(value, f"{path}.{field.name}")
