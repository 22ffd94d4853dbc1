"""Contains the registry of metrics; each module that computes metrics declares them there."""

from typing import NamedTuple

from pretrainax.config.choice import import_built_in
from pretrainax.files.errors import UserError


class Metric(NamedTuple):
    """The declaration of a metric in metrics.jsonl."""

    name: str
    meaning: str  # description for users
    larger_is_better: bool = False  # if False, smaller values are better
    in_total_loss: bool = False  # the metric is added to "loss", with weight 1, in "total_loss"


METRICS: dict[str, Metric] = {}  # all declared metrics, by name


def declare(*metrics: Metric) -> None:
    """Adds metrics to METRICS; call it when the module that computes the metrics is imported."""
    METRICS.update({metric.name: metric for metric in metrics})


def larger_is_better(name: str) -> bool:
    """Returns True if larger values of a metric are better.

    name: name of a metric ("accuracy"), or of its value for a part of the data ("accuracy/source=wiki").

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
