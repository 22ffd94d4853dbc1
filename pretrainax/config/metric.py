"""The metrics of runs: each is declared once, by the part that gives it."""

from typing import NamedTuple

from pretrainax.config.choice import import_built_in
from pretrainax.files.errors import UserError


class Metric(NamedTuple):
    """A number of a line of metrics.jsonl."""

    name: str
    meaning: str  # for people, beside the number
    larger_is_better: bool = False
    in_total_loss: bool = False  # a loss that is trained with weight 1 beside "loss": "total_loss" is their sum


METRICS: dict[str, Metric] = {}


def declare(*metrics: Metric) -> None:
    """Adds metrics to METRICS: called where a part that gives them is defined."""
    METRICS.update({metric.name: metric for metric in metrics})


def larger_is_better(name: str) -> bool:
    """Returns True if more is better, of a metric ("accuracy") or a part of one ("accuracy/source=wiki").

    Raises:
      UserError: no part declares such a metric.
    """
    whole = name.partition("/")[0]
    if whole not in METRICS:
        import_built_in()  # whose parts declare theirs
    if whole not in METRICS:
        raise UserError(
            f"the metric {whole!r} is declared nowhere, so that nobody knows which value is the better one: "
            "pretrainax.config.metric.declare(Metric(...)) does, where the part that gives it is defined"
        )
    return METRICS[whole].larger_is_better
