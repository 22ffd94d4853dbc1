"""Implements a data source that reads Hugging Face datasets."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Iterator
from typing import Any, Optional

from pretrainax.config import Experiment, UserError
from pretrainax.data import files
from pretrainax.data.sources.base import Document, Source
from pretrainax.data.sources.records import RecordSets, class_name_decoder, equal_ranges, row_location
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.extras import import_extra
from pretrainax.storage import hub


@dataclasses.dataclass
class HuggingFace(RecordSets, Source):
    """Reads a dataset from the Hugging Face Hub or from a local folder, with the `datasets` library.

    `path` is the argument of `datasets.load_dataset`: a name on the Hub ("wikimedia/wikipedia"), a folder (of data
    files, or written by `save_to_disk`), or a file type ("parquet", "json", "text", "csv", "arrow") for the files in
    `data_files`. Class labels are converted from numbers to names. The loading scripts of datasets are never run.

    With `streaming`, nothing is copied to the cache of `datasets`, and a shard is one file of the dataset. Without
    `streaming`, a shard is a range of rows. `datasets` reads whole row groups of Parquet files into memory. The
    `Parquet` source needs less memory, because it reads a row group in several chunks.
    """

    path: str  # a name on the Hub, a folder, or a file type: "json", "parquet", "text", "csv", "arrow"
    name: Optional[str] = None  # configuration of the dataset, for example "20231101.en"
    revision: Optional[str] = None  # commit, branch or tag on the Hub; None: the latest commit
    data_files: tuple[str, ...] = ()  # file names or globs; (): all files of the dataset
    valid_data_files: tuple[str, ...] = ()  # file names or globs for the split "validation"
    streaming: bool = False  # streams the data, without a copy in the cache of `datasets`

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        for field in ("data_files", "valid_data_files"):
            if isinstance(getattr(self, field), str):
                yield f"{self.config_path}.{field} is {getattr(self, field)!r}, it must be a tuple of names"
        if self.valid_data_files and not self.data_files:
            yield f"{self.config_path}.valid_data_files needs {self.config_path}.data_files"
        if self.valid_data_files and self.valid_split is None:
            yield f"{self.config_path}.valid_data_files needs {self.config_path}.valid_split='validation'"

    def fingerprint(self) -> str:
        """Computes a hash of the contents of local files and of the URLs of Hub files, which include the commit.

        The hash is saved next to the cached copy, because without access to the Hub, `datasets` knows only the cached
        copy's commit and not the URLs.
        """
        with self._converted_errors() as datasets:
            builder = datasets.load_dataset_builder(**self._arguments())
        hash_path = os.path.join(builder.cache_dir, f"pretrainax-{files.digest(files.settings_of(self))}.txt")
        if builder.config.data_files is None and os.path.exists(hash_path):
            with open(hash_path, encoding="ascii") as f:
                return f.read()
        data_files = builder.config.data_files or {}
        names = {str(split): list(map(str, names)) for split, names in data_files.items()}
        counts = collections.Counter(itertools.chain(*names.values()))
        if self.data_files and (repeated := [name for name, count in counts.items() if count > 1]):
            raise UserError(
                f"{self.config_path}.data_files and valid_data_files select {repeated[0]} {counts[repeated[0]]} times, "
                "it must be once: name the files, or use patterns that do not overlap"
            )
        contents = {split: files.hashes_of([n for n in names[split] if os.path.exists(n)]) for split in names}
        remote = {split: [n for n in names[split] if not os.path.exists(n)] for split in names}
        settings = {
            k: v for k, v in files.settings_of(self).items() if k not in ("path", "data_files", "valid_data_files")
        }
        digest = files.digest(settings, type(builder).__name__, contents, remote)  # the type is the file format
        if any(remote.values()) and os.path.isdir(builder.cache_dir):
            with contextlib.suppress(OSError):  # a read-only cache
                write_atomically(hash_path, digest)
        return digest

    def shards(self, split: str) -> list[files.FileShard]:
        _load_dataset.cache_clear()  # files may have changed since this process last loaded them
        splits = self._load()
        name, selected_split = self.named(split, splits)
        if self.streaming:
            return [files.FileShard(name, i, i + 1, selected_split) for i in range(splits[name].num_shards)]
        ranges = equal_ranges(len(splits[name]), splits[name].data.nbytes)
        return [files.FileShard(name, start, stop, selected_split) for start, stop in ranges]

    def read(self, shard: files.FileShard, skipped: collections.Counter) -> Iterator[Document]:
        with self._converted_errors():
            rows = self._load()[shard.path_or_split]
            if rows.column_names is not None:  # a stream may have no list of columns
                rows = rows.select_columns(self.columns_read(rows.column_names))
            decode, location = class_name_decoder(rows.features or {}), f"{self.path} {shard.path_or_split}"
            if self.streaming:
                location = f"{location} shard {shard.start}"
                numbered_rows, parse = enumerate(rows.shard(rows.num_shards, shard.start)), decode
            else:
                numbered_rows, parse = ((i, i) for i in range(shard.start, shard.stop)), lambda i: decode(rows[i])
            yield from self.documents(numbered_rows, parse, row_location(location), shard.split, skipped)

    def _arguments(self) -> dict[str, Any]:
        """Returns the arguments of `datasets.load_dataset`, except `streaming`."""
        path = os.path.expanduser(self.path)
        if os.path.exists(os.path.join(path, "state.json")):  # written by save_to_disk for datasets without splits
            return {"path": "arrow", "data_files": {"train": [os.path.join(path, "*.arrow")]}}
        files_by_split = {"train": self.data_files, "validation": self.valid_data_files}
        data_files = {name: list(files_by_split[name]) for name in files_by_split if files_by_split[name]} or None
        return {"path": path, "name": self.name, "revision": self.revision, "data_files": data_files}

    def _load(self) -> Any:
        with self._converted_errors():
            return _load_dataset(json.dumps(self._arguments()), self.streaming)

    @contextlib.contextmanager
    def _converted_errors(self) -> Iterator[Any]:
        """Yields the `datasets` module, and turns its exceptions into one-line UserErrors."""
        datasets = import_extra("datasets", "data", f"{self.config_path} is HuggingFace, which")
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are raised as exceptions too
        datasets.disable_progress_bars()
        try:
            with hub.show_client_log():
                yield datasets
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError, *files.BROKEN_ARCHIVE) as e:
            setting = f"{self.config_path}.path is {self.path!r}"
            if error := hub.dataset_error(setting, self.path, e):
                raise error from e
            reason = (str(e.__cause__ or e) or type(e).__name__).splitlines()[0]
            data_files = f", data_files {', '.join(self.data_files)}" if self.data_files else ""
            raise UserError(f"{setting}{data_files}: datasets cannot read it ({reason})") from e


@functools.lru_cache(maxsize=8)  # a worker reads many shards of one dataset
def _load_dataset(arguments: str, streaming: bool) -> Any:
    datasets = import_extra("datasets", "data", "HuggingFace")
    return datasets.load_dataset(**json.loads(arguments), streaming=streaming)
