"""Implements a data source that reads Parquet files."""

import collections
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from pretrainax.config import UserError
from pretrainax.data import files
from pretrainax.data.sources.base import Document, Source
from pretrainax.data.sources.records import RecordFiles, row_location, rows_per_chunk
from pretrainax.files.extras import import_extra

_BATCH_BYTES = 1 << 22  # encoded bytes of the rows in memory at a time
_DECODED_BYTES = 1 << 29  # limit of the decoded bytes of these rows, even if each row is as large as its row group
_BATCH_ROWS = 1 << 10


@dataclasses.dataclass
class Parquet(RecordFiles, Source):
    """Reads documents or records from columns of Parquet files. Requires pyarrow.

    Only the required columns are read. `path` is a file, a folder (all .parquet files in it and its subfolders) or a
    glob. A shard is one row group or several small row groups. Without `valid_path`, a hash of the text selects
    `valid_fraction` of the documents for validation.
    """

    endings: ClassVar[tuple[str, ...]] = (".parquet",)

    def _shard_ranges(self, file: str) -> Iterator[tuple[int, int]]:
        with _open_file(file) as table:
            sizes = [table.metadata.row_group(i).total_byte_size for i in range(table.num_row_groups)]
        start, size = 0, 0
        for stop, group_bytes in enumerate(sizes, start=1):
            size += group_bytes
            if size >= files.SHARD_BYTES or stop == len(sizes):
                yield start, stop
                start, size = stop, 0

    def read(self, shard: files.FileShard, skipped: collections.Counter) -> Iterator[Document]:
        with _open_file(shard.path_or_split) as table:
            columns = self.columns_read(table.schema_arrow.names)
            rows = self._rows(table, columns, range(shard.start, shard.stop))
            yield from self.documents(rows, self._record, row_location(shard.path_or_split), shard.split, skipped)

    def _rows(self, table: Any, columns: list[str], groups: range) -> Iterator[tuple[int, tuple[Any, int]]]:
        """Yields (row number in the file, (batch, index in the batch)) for each row in the row groups `groups`."""
        number = sum(table.metadata.row_group(i).num_rows for i in range(groups.start))
        for group in groups:
            count, size = table.metadata.row_group(group).num_rows, _encoded_bytes(table, group, columns)
            # With dictionary encoding, a few bytes may refer to a large value. Each decoded row may therefore be as
            # large as all encoded rows together.
            max_rows = max(1, min(_BATCH_ROWS, _DECODED_BYTES // max(size, 1)))
            rows = min(rows_per_chunk(count, size, _BATCH_BYTES), max_rows)
            for batch in table.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False):
                yield from ((number + i, (batch, i)) for i in range(batch.num_rows))
                number += batch.num_rows

    def _record(self, row: tuple[Any, int]) -> dict[str, Any]:
        batch, i = row
        if batch.nbytes > self.max_record_bytes:
            self.check_size(batch.slice(i, 1).nbytes)
        return {name: column[i].as_py() for name, column in zip(batch.schema.names, batch.columns, strict=True)}


def _encoded_bytes(table: Any, group: int, columns: list[str]) -> int:
    """Returns the total size of `columns` in a row group in bytes, encoded but uncompressed."""
    chunks = (table.metadata.row_group(group).column(i) for i in range(table.metadata.num_columns))
    return sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in columns)


@contextlib.contextmanager
def _open_file(path: str) -> Iterator[Any]:
    """Opens a Parquet file, turning pyarrow's exceptions into UserErrors."""
    arrow, parquet = (import_extra(name, "data", path) for name in ("pyarrow", "pyarrow.parquet"))
    try:
        # NOTE: without buffer_size, or with pre_buffer, pyarrow reads the columns of a whole row group at once.
        with parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as table:
            yield table
    except (arrow.ArrowException, OSError) as e:
        raise UserError(f"{path}: cannot be read as Parquet ({(str(e) or type(e).__name__).splitlines()[0]})") from e
