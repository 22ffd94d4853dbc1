"""The report of a prepared corpus: `python -m pretrainax.prepare --config=... --report=DIR`."""

import json
import os
from typing import Any

from pretrainax.data.inspection.corpus import measure, table
from pretrainax.files.atomic_files import write_atomically


def write_report(prepared: Any, directory: str) -> str:
    """Writes corpus.md, corpus.json and corpus.png for a `prepare.Prepared`; returns the table."""
    from pretrainax.reporting.text_plots import draw_corpus  # here: matplotlib takes long to import

    splits = {}
    for name, corpora in (("train", prepared.train), ("valid", prepared.valid)):
        for i, corpus in enumerate(corpora):
            splits[name if len(corpora) == 1 else f"{name} {i + 1}"] = corpus
    metrics = measure(splits, prepared.tokenizer)
    written = table(metrics)
    os.makedirs(directory, exist_ok=True)
    for file, content in (("corpus.md", written), ("corpus.json", json.dumps(metrics, indent=1) + "\n")):
        write_atomically(os.path.join(directory, file), content)
    draw_corpus(os.path.join(directory, "corpus.png"), metrics)
    return written
