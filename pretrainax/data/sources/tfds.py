"""Implements a data source that reads TensorFlow Datasets."""

import collections
import contextlib
import dataclasses
import io
import os
from collections.abc import Iterator
from typing import Any, Optional

from pretrainax.config import UserError
from pretrainax.data import files
from pretrainax.data.sources.base import Document, Source
from pretrainax.data.sources.records import RecordSets, class_name_decoder, equal_ranges, row_location, rows_per_chunk
from pretrainax.files.extras import import_extra

_BATCH, _BATCH_BYTES = 100, 1 << 22  # maximum number and total size (bytes) of the records per read


@dataclasses.dataclass
class TFDS(RecordSets, Source):
    """Reads a prepared dataset of TensorFlow Datasets (TFDS) in the random-access format array_record.

    TensorFlow is not required. Class labels are converted from numbers to names.
    """

    name: str  # for example "wikipedia/20230601.en"; with a version: "my_set/config:1.0.0"
    data_dir: Optional[str] = None  # folder of the prepared datasets; None: the default folder of TFDS
    valid_split: Optional[str] = dataclasses.field(default="validation", kw_only=True)

    def fingerprint(self) -> str:
        """Computes a hash of the dataset's version and shard sizes.

        TFDS never changes a prepared version, and stores no hashes of its contents.
        """
        info = self._builder().info
        sizes = {name: [int(n) for n in split.shard_lengths] for name, split in info.splits.items()}
        num_bytes = {name: split.num_bytes for name, split in info.splits.items()}
        return files.digest(files.settings_of(self), info.full_name, sizes, num_bytes)

    def shards(self, split: str) -> list[files.FileShard]:
        splits = self._builder().info.splits
        name, selected_split = self.named(split, splits)
        ranges = equal_ranges(splits[name].num_examples, splits[name].num_bytes)
        return [files.FileShard(name, start, stop, selected_split) for start, stop in ranges]

    def read(self, shard: files.FileShard, skipped: collections.Counter) -> Iterator[Document]:
        builder = self._builder()
        self.columns_read(builder.info.features)
        try:
            records = builder.as_data_source(split=shard.path_or_split)
        except NotImplementedError as e:
            raise UserError(f"{self.name} is prepared in a format without random access: {e}") from e
        split, parse = builder.info.splits[shard.path_or_split], class_name_decoder(builder.info.features)
        rows = _rows(records, shard, min(_BATCH, rows_per_chunk(split.num_examples, split.num_bytes, _BATCH_BYTES)))
        return self.documents(rows, parse, row_location(f"{self.name} {shard.path_or_split}"), shard.split, skipped)

    def _builder(self) -> Any:
        """Returns the TFDS builder of the dataset; raises UserError if the dataset is unknown or not prepared."""
        tfds = import_extra("tensorflow_datasets", "tfds", f"{self.config_path} is TFDS, which")
        not_found = tfds.core.registered.DatasetNotFoundError
        folder = str(tfds.core.constants.DATA_DIR if self.data_dir is None else os.path.expanduser(self.data_dir))
        builder = None
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # hides a message about missing TensorFlow
                builder = tfds.builder(self.name, data_dir=folder)
        except not_found as e:
            raise UserError(f"{self.config_path}.name is {self.name!r}: TFDS has no such dataset") from e
        except ImportError:  # the dataset's code imports TensorFlow; the prepared files suffice without this code
            name, options = tfds.core.naming.parse_builder_name_kwargs(self.name, data_dir=folder)
            with contextlib.suppress(not_found):
                builder = tfds.core.read_only_builder.builder_from_files(str(name), **options)
        if builder is None or not builder.is_prepared():
            raise UserError(
                f"{self.name} is not prepared in {folder if builder is None else builder.data_dir}: run "
                f'tfds.builder({self.name!r}).download_and_prepare(file_format="array_record"), or set '
                f"{self.config_path}.data_dir"
            )
        return builder


def _rows(records: Any, shard: files.FileShard, count: int) -> Iterator[tuple[int, dict]]:
    """Yields (row number, record) for the rows of a shard, reading `count` rows at a time."""
    for first in range(shard.start, shard.stop, count):
        numbers = range(first, min(first + count, shard.stop))
        try:
            batch = records.__getitems__(numbers)
        except RuntimeError as e:
            raise UserError(f"{shard.path_or_split}, rows {first} to {numbers[-1]} (from 0): damaged ({e})") from e
        yield from zip(numbers, batch, strict=True)
