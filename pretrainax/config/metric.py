"""Registry of metrics; the module that computes a metric declares it."""

from typing import NamedTuple

from pretrainax.config.choice import import_built_in
from pretrainax.files.errors import UserError


class Metric(NamedTuple):
    """A metric in metrics.jsonl."""

    name: str
    meaning: str  # description for users
    larger_is_better: bool = False
    in_total_loss: bool = False  # a loss term with weight 1, in addition to "loss"; "total_loss" is their sum


METRICS: dict[str, Metric] = {}


def declare(*metrics: Metric) -> None:
    """Adds metrics to METRICS; call it in the module that computes them."""
    METRICS.update({metric.name: metric for metric in metrics})


def larger_is_better(name: str) -> bool:
    """Returns True if larger values are better, for a metric ("accuracy") or a part of one ("accuracy/source=wiki").

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
