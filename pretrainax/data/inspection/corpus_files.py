"""The report of a prepared corpus: `python -m pretrainax.prepare --config=... --report=DIR`."""

import json
import os
from typing import Any

from pretrainax.config.atomic_files import write_atomically
from pretrainax.data.inspection import corpus as report


def write_report(prepared: Any, directory: str) -> str:
    """Writes corpus.md, corpus.json and corpus.png for a `prepare.Prepared`; returns the table."""
    from pretrainax.reporting import text_plots as text_pictures  # here: matplotlib takes long to import

    splits = {}
    for name, corpora in (("train", prepared.train), ("valid", prepared.valid)):
        for i, corpus in enumerate(corpora):
            splits[name if len(corpora) == 1 else f"{name} {i + 1}"] = corpus
    figures = report.measure(splits, prepared.tokenizer)
    table = report.table(figures)
    os.makedirs(directory, exist_ok=True)
    for file, content in (("corpus.md", table), ("corpus.json", json.dumps(figures, indent=1) + "\n")):
        write_atomically(os.path.join(directory, file), content)
    text_pictures.draw_corpus(os.path.join(directory, "corpus.png"), figures)
    return table
