"""Defines the registry of metrics, in which each module declares the metrics that it computes."""

import numbers
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple, Optional

from pretrainax.config.choice import import_built_in
from pretrainax.files.errors import UserError

# The properties of a run that change the value of a metric without making the model better or worse.
Aspect = Literal["objective", "tokenizer", "text", "generator", "hardware"]
FRACTION = "fraction"  # unit of values from 0 to 1, which logs and reports display in %
_FRACTIONS = ("accuracy", "precision", "recall", "fraction")  # ends of the names of undeclared fractions
# The ends of the names of metrics on the halves of the validation, with `config.evaluate.halves`.
SELECTION_HALF, REPORT_HALF = "/half=1", "/half=2"
# The name of {metric: its standard error} in validation lines; the errors are over documents or rows.
STANDARD_ERRORS = "standard_errors"
_LINE_FIELDS = ("step", "split")  # the fields of a line of metrics.jsonl that are not metrics
OF_RECORDS: tuple[Aspect, ...] = ("objective", "text")  # for metrics per record or byte, with any tokenizer


class Metric(NamedTuple):
    """Declares a metric that metrics.jsonl may contain."""

    name: str
    meaning: str  # description for users
    larger_is_better: bool = False  # if False, smaller values are better
    in_total_loss: bool = False  # "total_loss" is the sum of "loss" and the metrics with this flag
    is_count: bool = False  # the values are counts or means of counts, which are printed without trailing zeros
    unit: str = ""  # FRACTION, or the unit as text: "nats per target"; "": the meaning states the unit
    # The values of two runs are comparable only if these aspects of the runs are equal. (): always.
    depends_on: tuple[Aspect, ...] = ("objective", "tokenizer", "text")


METRICS: dict[str, Metric] = {}  # all declared metrics, by name
# The metrics that have a different meaning in the runs of tasks. The metrics of these runs include "labels".
_TASK_METRICS = {
    "loss": Metric("loss", "nats per label, or the squared error of a number", depends_on=OF_RECORDS),
    "accuracy": Metric("accuracy", "labels predicted correctly", True, unit=FRACTION, depends_on=OF_RECORDS),
}


def declare(*metrics: Metric, depends_on: Optional[tuple[Aspect, ...]] = None) -> None:
    """Adds metrics to METRICS; each module calls this on import for the metrics that it computes.

    Args:
      depends_on: `Metric.depends_on` of all these metrics; None: does not change this field of the metrics.
    """
    for metric in metrics:
        METRICS[metric.name] = metric if depends_on is None else metric._replace(depends_on=depends_on)


def with_metrics(metrics: Mapping, more: Mapping, origin: str) -> dict:
    """Adds the metrics of a callback to a line of metrics.jsonl, and merges STANDARD_ERRORS.

    Args:
      origin: the method of the callback, "NAME.method", for messages.

    Raises:
      UserError: a name is already in the line, or is neither a number nor a dict.
    """
    if not isinstance(more, Mapping):
        raise UserError(f"callback {origin} returns {more!r}, it must return a dict of metrics")
    for name, value in more.items():
        if (name in metrics and name != STANDARD_ERRORS) or name in _LINE_FIELDS:
            raise UserError(
                f"callback {origin} returns {name!r}, a name of the run or of another callback: choose another name"
            )
        if not isinstance(value, (numbers.Real, Mapping, type(None))) and getattr(value, "ndim", None) != 0:
            raise UserError(f"callback {origin} returns {name!r}: {value!r}, it must be a number or a dict of numbers")
    errors = {**metrics.get(STANDARD_ERRORS, {}), **more.get(STANDARD_ERRORS, {})}
    return {**metrics, **more, **({STANDARD_ERRORS: errors} if errors else {})}


def declared(name: str, names: Collection[str] = ()) -> Metric:
    """Returns the declaration of a metric, also of a metric on a subset of the data ("loss/source=wiki").

    An undeclared metric gets the defaults of `Metric`, which allow a comparison only if all aspects are equal. Its unit
    is FRACTION if the end of its name is in _FRACTIONS, as in "my_accuracy".

    Args:
      names: all metrics of the run; if "labels" is one of them, the run trains a task.
    """
    metric = name.partition("/")[0]
    unit = FRACTION if metric.endswith(_FRACTIONS) else ""
    known = (_TASK_METRICS if "labels" in names else {}).get(metric) or METRICS.get(metric)
    return known or Metric(metric, "", unit=unit)


def value_format(name: str) -> str:
    """Returns the format of a metric's value: at most four decimals for a count, exactly four for other metrics."""
    return ",.15g" if declared(name).is_count else ",.4f"


def metric_text(name: str, value: float) -> str:
    """Formats a metric's value, also on a subset of the data: "1,216" for a count, "2.0000" for a loss."""
    return format(round(value, 4), value_format(name))


def reported(name: str, value: float) -> str:
    """Formats a metric's value with its unit of display: "8.72%" for a fraction, "2.0000" for a loss."""
    return f"{value:.2%}" if declared(name).unit == FRACTION else metric_text(name, value)


def reported_half(name: str) -> str:
    """Returns the metric to report if `name` has selected a checkpoint: its other half with `evaluate.halves`.

    "loss/half=1" -> "loss/half=2", "loss" -> "loss".
    """
    return f"{name.removesuffix(SELECTION_HALF)}{REPORT_HALF}" if name.endswith(SELECTION_HALF) else name


def larger_is_better(name: str) -> bool:
    """Returns True if larger values of a metric are better.

    Args:
      name: name of a metric ("accuracy"), or of a metric on a subset of the data ("accuracy/source=wiki").

    Raises:
      UserError: the metric is not declared.
    """
    metric = name.partition("/")[0]
    if metric not in METRICS:
        import_built_in()  # the modules declare their metrics
    if metric not in METRICS:
        raise UserError(
            f"the metric {metric!r} is not declared, so it is unknown if larger values are better: call "
            "pretrainax.config.metric.declare(Metric(...)) in the module that computes it"
        )
    return METRICS[metric].larger_is_better
