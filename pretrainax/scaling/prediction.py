"""Predicts the validation loss of a config's run by a law: `python -m pretrainax.plan --config=FILE --law=…`."""

import math
from typing import NamedTuple, Optional

from pretrainax.config import Experiment, UserError
from pretrainax.files.json_files import JsonObject
from pretrainax.reporting.units import large_number
from pretrainax.scaling.compute_optimal import count_parameters, text_tokens
from pretrainax.scaling.law_fit import COVERAGE, interval
from pretrainax.scaling.power_laws import LossLaw, law_of


class Prediction(NamedTuple):
    """The predicted final validation loss of a run."""

    law: LossLaw
    parameters: int  # N, as the law defines it
    tokens: float  # D, tokens of text that all steps train on
    loss: float
    interval: Optional[tuple[float, float]]  # None: the law has no resamples
    uniform: float  # loss of a uniform distribution over the vocabulary

    def values(self) -> JsonObject:
        """Returns the numbers that `plan --json` prints."""
        return {
            "law": self.law.source,
            "metric": self.law.metric,
            "parameters": self.parameters,
            "tokens": self.tokens,
            "loss": self.loss,
            "interval": self.interval and list(self.interval),
            "unidentified": list(self.law.unidentified),
        }

    def __str__(self) -> str:
        without = "" if self.law.with_embeddings else " without embeddings"
        bounds = "no interval, because the law has no resamples"
        if self.interval is not None:
            bounds = f"{COVERAGE:.0%} interval {self.interval[0]:.3f} to {self.interval[1]:.3f}"
        note = f"  NOTE the uniform distribution has loss {self.uniform:.3f}: the law does not hold at this size"
        lines = [
            f"predicted validation {self.law.metric}: {self.loss:.3f} nats per token; {bounds}",
            f"  {large_number(self.parameters)} parameters{without}, {large_number(self.tokens)} tokens",
            f"  law: {self.law.source}",
            *([note] if self.loss > self.uniform else []),
            *(f"  NOT IDENTIFIED by the law's runs: {line}" for line in self.law.unidentified),
        ]
        return "\n".join(lines)


def predict_loss(experiment: Experiment, name: str) -> Prediction:
    """Predicts the last validation loss of a run; the interval is that of the law, without the noise of single runs.

    Args:
      experiment: the config, with numbers of steps and sizes.
      name: the law, as in `law_of`.

    Raises:
      UserError: the law does not exist, or it was measured on another model family or metric.
    """
    law, family = law_of(name), experiment.model.family
    if law.family != family:
        raise UserError(
            f"--law={name} was measured on runs of the family {law.family}, and config.model.family is {family}: fit a "
            "law to runs of this family (--fit=runs/*), and set --law to its law.json"
        )
    if law.metric != experiment.select_by:
        raise UserError(
            f"--law={name} predicts {law.metric}, and the run selects by {experiment.select_by}: set "
            f"--config.evaluate.select_by={law.metric}, or another --law"
        )
    parameters = count_parameters(experiment.model)[0 if law.with_embeddings else 1]
    tokens = text_tokens(experiment)
    losses = [float(one.loss(parameters, tokens)) for one in law.resampled]
    uniform = math.log(experiment.model.vocab_size)
    loss = float(law.loss(parameters, tokens))
    return Prediction(law, parameters, tokens, loss, interval(losses) if losses else None, uniform)
