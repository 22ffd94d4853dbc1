"""Selects the metrics to display, with their labels and number formats."""

import math
from collections.abc import Collection, Mapping
from typing import Optional

from pretrainax.config.metric import FRACTION, declared, value_format

METRIC_FORMATS = {  # label and format of each validation metric, in display order
    "loss": ("validation loss", ".4f"),
    "perplexity": ("perplexity", ",.2f"),
    "bits_per_token": ("bits per token", ".4f"),
    "bits_per_byte": ("bits per byte", ".4f"),
    "accuracy": ("token accuracy", ".2%"),
    "text_loss": ("loss of text", ".4f"),
    "text_accuracy": ("accuracy of text", ".2%"),
    "sequence_accuracy": ("sequence accuracy", ".2%"),
    "loss_tokens": ("target tokens", ",.0f"),
    "labels": ("labels", ",.0f"),
    "total_loss": ("total loss", ".4f"),
    "pair_loss": ("pair loss", ".4f"),
    "backward_loss": ("backward loss", ".4f"),
    "replaced_loss": ("replaced loss", ".4f"),
}
_IN_LINE = ("loss", "perplexity", "accuracy", "text_loss", "text_accuracy", "sequence_accuracy", "bits_per_byte")
_IN_LINE += ("masked_loss", "replaced_loss", "replaced_accuracy", "pair_loss", "backward_loss")


def label_and_format(name: str) -> tuple[str, str]:
    """Returns a metric's label ("validation loss of source=wiki" for "loss/source=wiki") and number format."""
    name, _, part = name.partition("/")
    spec = ".2%" if declared(name).unit == FRACTION else value_format(name)
    label, spec = METRIC_FORMATS.get("" if part.startswith("task=") else name, (name.replace("_", " "), spec))
    return (f"{label} of {part}" if part else label), spec


def label_and_format_among(name: str, names: Collection[str]) -> tuple[str, str]:
    """Returns a metric's label and number format; accuracy is per label if "labels" is in `names`, else per token."""
    label, spec = label_and_format(name)
    return ("accuracy" if name == "accuracy" and "labels" in names else label), spec


def displayed_metrics(metrics: Mapping[str, Optional[float]], select_by: str) -> dict[str, Optional[float]]:
    """Selects the metrics to display; omits text metrics that are redundant with the loss, except `select_by`."""
    loss, text_loss = metrics.get("loss"), metrics.get("text_loss")
    is_all_text = loss is not None and text_loss is not None and math.isclose(loss, text_loss, rel_tol=1e-6)
    repeated = ("text_loss", "text_accuracy") if is_all_text else ()
    return {name: x for name, x in metrics.items() if name.partition("/")[0] not in repeated or name == select_by}


def validation_parts(
    metrics: Mapping[str, Optional[float]], select_by: str, errors: Mapping[str, Optional[float]]
) -> list[str]:
    """Formats validation metrics for the log line; the loss and `select_by` as "label value ± standard error"."""
    names = {name for name, value in displayed_metrics(metrics, select_by).items() if value is not None}
    formats = {
        name: label_and_format_among(name, names) for name in dict.fromkeys((*_IN_LINE, select_by)) if name in names
    }
    known = {name: error for name, error in errors.items() if error is not None and name in ("loss", select_by)}
    spreads = {name: f" ± {format(error, formats[name][1])}" for name, error in known.items() if name in formats}
    return [f"{label} {format(metrics[n], spec)}{spreads.get(n, '')}" for n, (label, spec) in formats.items()]


def format_metric(value: Optional[float], form: str) -> str:
    """Formats a metric's value; None, which stands for a non-finite value, is formatted as "not finite"."""
    return "not finite" if value is None else format(value, form)
