"""Data sources: each source lists its shards, reads the documents of a shard, and computes a fingerprint of its text.

A shard is a small picklable description of a subset of the documents, so several processes can read different shards in
parallel. Documents are plain text. A string such as "<s>" or "[MASK]" in a document is tokenized as ordinary
characters, whereas transformers converts the string to the id of the special token.
"""

from pretrainax.data.sources.array_record import ArrayRecord
from pretrainax.data.sources.base import Source
from pretrainax.data.sources.conll import ConllFiles
from pretrainax.data.sources.delimited import Csv, Tsv
from pretrainax.data.sources.hugging_face import HuggingFace
from pretrainax.data.sources.json_lines import JsonLines
from pretrainax.data.sources.mixture import SourceMixture
from pretrainax.data.sources.no_source import NoSource
from pretrainax.data.sources.parquet import Parquet
from pretrainax.data.sources.python_docs import Module, PythonDocs
from pretrainax.data.sources.squad import SquadFiles
from pretrainax.data.sources.text_files import TextFiles
from pretrainax.data.sources.tfds import TFDS

__all__ = [
    "ArrayRecord",
    "ConllFiles",
    "Csv",
    "HuggingFace",
    "JsonLines",
    "Module",
    "NoSource",
    "Parquet",
    "PythonDocs",
    "Source",
    "SourceMixture",
    "SquadFiles",
    "TFDS",
    "TextFiles",
    "Tsv",
]
