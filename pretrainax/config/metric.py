"""Defines the registry of metrics, in which each module declares the metrics that it computes."""

from typing import NamedTuple

from pretrainax.config.choice import import_built_in
from pretrainax.files.errors import UserError


class Metric(NamedTuple):
    """Declares a metric that metrics.jsonl may contain."""

    name: str
    meaning: str  # description for users
    larger_is_better: bool = False  # if False, smaller values are better
    in_total_loss: bool = False  # "total_loss" is the sum of "loss" and the metrics with this flag
    is_count: bool = False  # the values are counts or means of counts, which are printed without trailing zeros


METRICS: dict[str, Metric] = {}  # all declared metrics, by name


def declare(*metrics: Metric) -> None:
    """Adds metrics to METRICS; each module calls this on import for the metrics that it computes."""
    METRICS.update({metric.name: metric for metric in metrics})


def value_format(name: str) -> str:
    """Returns the format of a metric's value: at most four decimals for a count, exactly four for other metrics."""
    metric = METRICS.get(name.partition("/")[0])
    return ",.15g" if metric is not None and metric.is_count else ",.4f"


def metric_text(name: str, value: float) -> str:
    """Formats a metric's value, also on a subset of the data: "1,216" for a count, "2.0000" for a loss."""
    return format(round(value, 4), value_format(name))


def larger_is_better(name: str) -> bool:
    """Returns True if larger values of a metric are better.

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
