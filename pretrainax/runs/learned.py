"""Decides whether a model has learned more than its baseline, and formulates the warning at the end of a run."""

from collections.abc import Sequence
from typing import NamedTuple, Optional

from pretrainax.reporting.significance import ALPHA
from pretrainax.scoring.results import Estimate


class Gain(NamedTuple):
    """The improvement of a model over a baseline, on the same predictions."""

    metric: str  # description of the metric, with its unit: "loss at [MASK], nats"
    baseline: str  # description of the baseline: "token frequencies"
    estimate: Estimate  # the paired difference with its standard error; positive if the model is better

    def __str__(self) -> str:
        error = self.estimate.standard_error
        spread = "(standard error unknown)" if error is None else f"± {error:.4f} (standard error)"
        return f"{self.metric}: gain over {self.baseline} {self.estimate.value:+.4f} {spread}"

    @property
    def is_learned(self) -> bool:
        """Returns True if the gain is positive beyond chance; False if the standard error is unknown.

        If the model equals its baseline, this happens in 2.5 % of runs, also with few records.
        """
        return self.estimate.value > 0 and self.estimate.p_value < ALPHA


def warning_of(gains: Sequence[Gain]) -> Optional[str]:
    """Returns a warning that lists each baseline that the model does not beat, or None if it beats all baselines."""
    failures = [gain for gain in gains if not gain.is_learned]
    if not failures:
        return None
    return "\n".join(["WARNING: the model does not beat its baseline", *(f"  {gain}" for gain in failures)])
