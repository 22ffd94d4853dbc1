"""Parquet files."""

import collections
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from pretrainax.config import UserError
from pretrainax.data import files
from pretrainax.data.sources.base import Document, Source
from pretrainax.data.sources.records import RecordFiles, row_of, rows_of

_BATCH_BYTES = 1 << 22  # of rows that are in memory at a time


@dataclasses.dataclass
class Parquet(RecordFiles, Source):
    """The documents in a column of Parquet files, of which no other column is read. Needs pyarrow.

    `path` is a file, a folder (every .parquet below it) or a glob. A shard is a row group, or several small ones.
    Without `valid_path`, `valid_fraction` of the documents are for validation, by a hash of the text.
    """

    endings: ClassVar[tuple[str, ...]] = (".parquet",)

    def _cuts(self, file: str) -> Iterator[tuple[int, int]]:
        with _opened(file) as table:
            sizes = [table.metadata.row_group(i).total_byte_size for i in range(table.num_row_groups)]
        start, size = 0, 0
        for stop, more in enumerate(sizes, start=1):
            size += more
            if size >= files.SHARD_BYTES or stop == len(sizes):
                yield start, stop
                start, size = stop, 0

    def read(self, shard: files.Part, skipped: collections.Counter) -> Iterator[Document]:
        with _opened(shard.place) as table:
            groups = [table.metadata.row_group(i) for i in range(shard.stop)]
            first = sum(group.num_rows for group in groups[: shard.start])
            groups = groups[shard.start :]
            counts, sizes = [g.num_rows for g in groups], [g.total_byte_size for g in groups]
            batches = table.iter_batches(
                rows_of(sum(counts), sum(sizes), _BATCH_BYTES),
                row_groups=range(shard.start, shard.stop),
                columns=self.columns(table.schema_arrow.names),
                use_threads=False,
            )
            rows = ((batch, i) for batch in batches for i in range(batch.num_rows))
            yield from self.documents(enumerate(rows, first), _record, row_of(shard.place), shard.split, skipped)


def _record(row: tuple[Any, int]) -> dict[str, Any]:
    batch, i = row
    return {name: column[i].as_py() for name, column in zip(batch.schema.names, batch.columns, strict=True)}


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Any]:
    arrow, parquet = files.extra("pyarrow"), files.extra("pyarrow.parquet")
    try:
        # NOTE: without a buffer, and with pre_buffer, the columns of a whole row group are read at once.
        with parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as table:
            yield table
    except (arrow.ArrowException, OSError) as e:
        raise UserError(f"{path}: cannot be read as Parquet ({(str(e) or type(e).__name__).splitlines()[0]})") from e
