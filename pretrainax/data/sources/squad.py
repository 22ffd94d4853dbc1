"""Implements a data source for the SQuAD files, each a JSON object with articles, paragraphs and questions."""

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
    """Reads the questions in SQuAD files such as train-v2.0.json, plain or compressed (.gz, .xz, .zst).

    A record is one question. Its fields are "id", "question", "answers", "context" (the text of the paragraph) and
    "title" (the title of the article). `path` is a file or a glob. The whole file is read into memory.
    """

    def _shard_ranges(self, file: str) -> Iterator[tuple[int, Optional[int]]]:
        yield 0, None

    def read(self, shard: files.FileShard, skipped: collections.Counter) -> Iterator[Document]:
        with files.open_decompressed(shard.path_or_split) as f:
            content = f.read()
        try:
            records = list(_records(json.loads(content.decode("utf-8-sig"))))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            shape = '{"data": [{"paragraphs": [{"context": …, "qas": […]}]}]}'
            raise UserError(
                f"{shard.path_or_split}: not a SQuAD file, {shape} ({type(e).__name__}: {e}); "
                "use JsonLines for one record per line"
            ) from e
        where = lambda number: f"{shard.path_or_split}, question {records[number]['id']!r}"  # noqa: E731
        yield from self.documents(enumerate(records), dict, where, shard.split, skipped)


def _records(content: dict) -> Iterator[dict]:
    """Yields one record per question of a parsed SQuAD file, with the fields that `SquadFiles` documents."""
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            passage = {"title": article.get("title", ""), "context": paragraph["context"]}
            for item in paragraph["qas"]:
                yield {"id": item["id"], "question": item["question"], "answers": item.get("answers", []), **passage}
