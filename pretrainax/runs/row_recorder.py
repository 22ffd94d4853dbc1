"""Records a digest of each row in each training batch."""

import functools
import hashlib
import json
from typing import TextIO

import jax

from pretrainax.config import Experiment
from pretrainax.data.batch import HostBatch
from pretrainax.sharding.mesh import BatchShare, batch_share, make_mesh
from pretrainax.training.callbacks import Callback


class RowRecorder(Callback):
    """Writes a JSON line for each training batch: {"step": 7, "first_row": 0, "rows": [digest, …]}."""

    def __init__(self, experiment: Experiment, file: TextIO):
        self._experiment, self._file = experiment, file

    def on_batch(self, step: int, batch: HostBatch) -> None:
        digests = row_digests(batch)
        line = {"step": step, "first_row": self._share.index * len(digests), "rows": digests}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    @functools.cached_property
    def _share(self) -> BatchShare:
        return batch_share(make_mesh(self._experiment.mesh), jax.process_index())


def row_digests(batch: HostBatch) -> list[str]:
    """Computes a digest of each row of a batch, covering all arrays in the batch."""
    digests = [hashlib.blake2b(digest_size=8) for _ in next(iter(batch.values()))]
    for name in sorted(batch):
        for digest, row in zip(digests, batch[name], strict=True):
            digest.update(f"{name} {row.dtype} {row.shape}".encode() + row.tobytes())
    return [digest.hexdigest() for digest in digests]
