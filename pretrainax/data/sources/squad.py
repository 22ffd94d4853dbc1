"""A data source that reads SQuAD's released files: one JSON object of articles, their paragraphs and questions."""

import collections
import dataclasses
import json
from collections.abc import Iterator
from typing import Optional

from pretrainax.config import UserError
from pretrainax.data import files
from pretrainax.data.sources.base import Document, Source
from pretrainax.data.sources.records import RecordFiles


@dataclasses.dataclass
class SquadFiles(RecordFiles, Source):
    """Questions of SQuAD files, for example train-v2.0.json; plain, .gz, .xz or .zst.

    A record has the "id", the "question" and the "answers" of a question, and the "context" and "title" of its
    paragraph. `path` is a file or a glob. A file is read as a whole.
    """

    def _cuts(self, file: str) -> Iterator[tuple[int, Optional[int]]]:
        yield 0, None

    def read(self, shard: files.FileShard, skipped: collections.Counter) -> Iterator[Document]:
        with files.open_decompressed(shard.place) as f:
            content = f.read()
        try:
            records = list(_records(json.loads(content.decode("utf-8-sig"))))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            form = '{"data": [{"paragraphs": [{"context": …, "qas": […]}]}]}'
            raise UserError(
                f"{shard.place}: not a SQuAD file, {form} ({type(e).__name__}: {e}); use JsonLines for one record per "
                "line"
            ) from e
        where = lambda number: f"{shard.place}, question {records[number]['id']!r}"  # noqa: E731
        yield from self.documents(enumerate(records), dict, where, shard.split, skipped)


def _records(content: dict) -> Iterator[dict]:
    """Yields one record per question."""
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            passage = {"title": article.get("title", ""), "context": paragraph["context"]}
            for item in paragraph["qas"]:
                yield {"id": item["id"], "question": item["question"], "answers": item.get("answers", []), **passage}
