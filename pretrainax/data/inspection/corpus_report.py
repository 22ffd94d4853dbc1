"""Writes the report of a prepared corpus: `python -m pretrainax.prepare --config=... --report=DIR`."""

import json
import os
from typing import Any

from pretrainax.data.inspection.corpus import measure, table
from pretrainax.files.atomic_files import write_atomically


def write_report(prepared: Any, directory: str) -> str:
    """Writes corpus.md, corpus.json and corpus.png to a directory, and returns the table in corpus.md.

    Args:
      prepared: the prepared data (`data.preparation.prepare.Prepared`) to measure.
    """
    from pretrainax.reporting.text_plots import draw_corpus  # a local import: matplotlib is slow to import

    splits = {}
    for name, corpora in (("train", prepared.train), ("valid", prepared.valid)):
        for i, corpus in enumerate(corpora):
            splits[name if len(corpora) == 1 else f"{name} {i + 1}"] = corpus
    metrics = measure(splits, prepared.tokenizer)
    markdown = table(metrics)
    os.makedirs(directory, exist_ok=True)
    for file, content in (("corpus.md", markdown), ("corpus.json", json.dumps(metrics, indent=1) + "\n")):
        write_atomically(os.path.join(directory, file), content)
    draw_corpus(os.path.join(directory, "corpus.png"), metrics)
    return markdown
