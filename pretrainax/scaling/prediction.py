"""Predicts the validation loss of a config's run by a law: `python -m pretrainax.plan --config=FILE --law=…`."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Optional

from pretrainax.config import Experiment, UserError, differences, from_json
from pretrainax.files.json_files import JsonObject
from pretrainax.reporting.units import large_number
from pretrainax.scaling.compute_optimal import count_parameters, text_tokens
from pretrainax.scaling.law_intervals import PREDICTION_COVERAGE, prediction_interval
from pretrainax.scaling.power_laws import NATS, LossLaw, law_of

# The fields of the config that must be equal in two runs, so that their losses are comparable.
_SAME = ("data.", "tokenizer", "objective", "model.family", "evaluate.objective", "evaluate.parameters")


class Prediction(NamedTuple):
    """The predicted final validation loss of a run."""

    law: LossLaw
    parameters: int  # N, as the law defines it
    tokens: float  # D, tokens of text that all steps train on
    loss: float
    interval: Optional[tuple[float, float]]  # interval of one more run, including noise; None: the law has no runs
    uniform: float  # nats per token of a uniform distribution over the vocabulary
    epochs: float = 1.0  # passes over the text
    differences: Sequence[str] = ()  # fields in which the law's runs differ, so that losses are not comparable

    def values(self) -> JsonObject:
        """Returns the numbers that `plan --json` prints."""
        return {
            "law": self.law.source,
            "metric": self.law.metric,
            "parameters": self.parameters,
            "tokens": self.tokens,
            "epochs": self.epochs,
            "loss": self.loss,
            "interval": self.interval and list(self.interval),
            "coverage": PREDICTION_COVERAGE,
            "differences": list(self.differences),
        }

    def __str__(self) -> str:
        without = "" if self.law.with_embeddings else " without embeddings"
        bounds = "no interval, because the law has no runs"
        if self.interval is not None:
            bounds = f"{PREDICTION_COVERAGE:.0%} interval of one run {self.interval[0]:.3f} to {self.interval[1]:.3f}"
        note = f"  NOTE the uniform distribution has loss {self.uniform:.3f}: the law does not hold at this size"
        other = "  NOTE the law is of other runs, whose losses are not comparable: " + ", ".join(self.differences)
        lines = [
            f"predicted validation {self.law.metric}: {self.loss:.3f} {self.law.unit}; {bounds}",
            f"  {large_number(self.parameters)} parameters{without}, {large_number(self.tokens)} tokens",
            f"  law: {self.law.source}",
            *([note] if self.law.unit == NATS and self.loss > self.uniform else []),
            *([other] if self.differences else []),
        ]
        return "\n".join(lines)


def predict_loss(experiment: Experiment, name: str) -> Prediction:
    """Predicts the last validation loss of a run; its text counts as new.

    Args:
      experiment: the config, with numbers of steps and sizes.
      name: the law, as in `law_of`.

    Raises:
      UserError: the law does not exist, its runs do not determine it, or it was measured on another model family or
        metric.
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
    check_identified(name, law)
    of_runs = () if law.config is None else loss_differences(from_json(Experiment, law.config), experiment)
    return predict(law, experiment)._replace(differences=of_runs)


def loss_differences(one: Experiment, other: Experiment) -> list[str]:
    """Lists the fields that make the losses of two runs incomparable, one line each, as in `config.differences`."""
    return [line for line in differences(one, other) if line.startswith(_SAME)]


def check_identified(name: str, law: LossLaw) -> None:
    """Raises UserError, in one line, if the runs of a law do not determine it."""
    if law.unidentified:
        raise UserError(f"--law={name} is not identified by its runs: {'; '.join(law.unidentified)}")


def predict(law: LossLaw, experiment: Experiment, epochs: float = 1.0) -> Prediction:
    """Predicts the last validation loss of a run by a law of its family and metric.

    Args:
      experiment: the config, with numbers of steps and sizes.
      epochs: passes over the text.
    """
    parameters = count_parameters(experiment.model)[0 if law.with_embeddings else 1]
    tokens = text_tokens(experiment)
    interval = prediction_interval(law, parameters, tokens, epochs) if law.runs else None
    uniform = math.log(experiment.model.vocab_size)
    return Prediction(law, parameters, tokens, float(law.loss(parameters, tokens, epochs)), interval, uniform, epochs)
