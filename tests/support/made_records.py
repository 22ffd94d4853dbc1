"""Creates runs with metrics and records, without training, for the tests of `report`."""

from typing import Optional

from pretrainax.config.choice import import_built_in
from pretrainax.reporting.run_groups import PARTS, Part, Record
from pretrainax.reporting.run_lines import RunLines
from tests.support import tiny

import_built_in()  # declares the metrics


def made_run(name: str, losses, tokens: int = 100, **valid) -> RunLines:
    """Returns a run with a training line and a validation line for each loss, every 10 steps."""
    lines = []
    for i, loss in enumerate(losses, start=1):
        line = {"step": 10 * i, "loss": loss, "text_tokens": tokens * i, "seconds": float(i)}
        lines += [{**line, "split": "train"}, {**line, "split": "valid", "loss_tokens": 64.0, **valid}]
    return RunLines(name, lines)


def made_record(
    variant: str = "gpt", seed: int = 0, rate: float = 3e-3, corpora: Optional[str] = "c", **parts
) -> Record:
    """Returns the record of a run of `tiny`.

    `parts` replaces properties: tokenizer="1,000 ids", validation_text="books".
    """
    experiment = tiny.get_config(variant)
    experiment.train.seed, experiment.optimizer.learning_rate = seed, rate
    texts = {"objective": str(experiment.objective), "tokenizer": "400 ids", "validation text": "text", "filters": ""}
    texts |= {"rows": "rows of 32 tokens"} | {name.replace("_", " "): text for name, text in parts.items()}
    known = {name: Part(text, text) for name, text in ({"generator": ""} | texts).items()}
    known = {name: known.get(name, Part(None, "")) for name in PARTS}  # the metrics determine the size
    return Record(experiment, known, corpora and (corpora, texts["tokenizer"]))
