"""Validates a model: selects rows of the validation split, and computes metrics on these rows."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Optional

import jax
import numpy as np

from pretrainax.config import Experiment
from pretrainax.data.batch import HostBatch
from pretrainax.data.parts import stream_part_names, with_halves
from pretrainax.data.pipeline import Batches
from pretrainax.data.sources.base import Note
from pretrainax.runtime.watchdog import Watchdog
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.param_paths import PyTree
from pretrainax.training.metrics import add_up, summarize, summarize_parts
from pretrainax.training.train_step import Frozen, Params


@dataclasses.dataclass
class Validation:
    """Evaluates a model on the validation split, using the same rows and masks each time."""

    experiment: Experiment  # config of the run, without phases
    valid_batches: Batches
    eval_step: jax.stages.Wrapped  # (params, batch, frozen) -> ({name: (sum, count)}, {name: (value, weight)})
    answer_step: jax.stages.Wrapped  # (params, batch, frozen) -> ({name: (sum, count)}, answers [B, …])
    mesh: jax.sharding.Mesh
    peers: Watchdog
    frozen: Frozen = dataclasses.field(default=None, repr=False)  # the frozen parameters of the run
    # (index of the batch in the validation, batch, values of `eval_step`), called by `metrics` for each batch
    observe: Optional[Callable[[int, HostBatch, Mapping[str, tuple]], None]] = None

    def batches(self, batches: Optional[Batches] = None) -> Iterator[HostBatch]:
        """Yields the batches of one validation from `batches`, by default this process's rows of `valid_batches`."""
        batches, size = batches or self.valid_batches, self.experiment.train.global_batch_size
        for i in range(self.sizes[0]):
            self.peers.progress()
            if self.experiment.validation_objective.unit != "records":
                yield batches[i]
            else:  # each record once, then empty rows to fill the last batch
                yield batches.stream_batch(0, range(i * size, min((i + 1) * size, batches.rows_per_epoch)))

    @property
    def sizes(self) -> tuple[int, int]:
        """Returns the number of batches in one validation and in the complete validation split."""
        rows, size = self.valid_batches.rows_per_epoch, self.experiment.train.global_batch_size
        is_per_record = self.experiment.validation_objective.unit == "records"
        total = -(-rows // size) if is_per_record else max(rows // size, 1)
        return min(self.experiment.evaluate.batches or total, total), total

    @functools.cached_property
    def parts(self) -> list[tuple[str, ...]]:
        """Returns the part names of each stream in `valid_batches`, such as "source=wiki" (see `stream_part_names`)."""
        return stream_part_names(self.experiment.data.source.components(), self.experiment.validation_objective)

    @functools.cached_property
    def rows(self) -> list[int]:
        """Returns the number of rows that one validation reads from each data stream of `valid_batches`."""
        rows = self.sizes[0] * self.experiment.train.global_batch_size
        return self.valid_batches.schedule.before(rows).tolist()

    def iterate_parts(self) -> Iterator[tuple[tuple[str, ...], HostBatch]]:
        """Yields (part names, batch) for all rows of one validation; each batch has rows of a single data stream."""
        if not any(self.parts):
            yield from (((), batch) for batch in self.batches())
            return
        for number, (parts, count) in enumerate(zip(self.parts, self.rows, strict=True)):
            for first in range(0, count, self.experiment.train.global_batch_size):
                self.peers.progress()
                yield parts, self.valid_batches.stream_batch(number, range(first, count))

    def metrics(self, params: Params) -> dict[str, float]:
        """Computes the heads' validation metrics, each as its sum divided by its count over all batches.

        With several sources or objectives, the result also has metrics for each part, {"loss/source=wiki": …}.
        """
        parts, sums = [], []
        for number, (batch_parts, batch) in enumerate(self.iterate_parts()):
            batch_sums, values = self.eval_step(params, put_batch(batch, self.mesh), self.frozen)
            parts.append(batch_parts)
            sums.append(batch_sums)
            if self.observe is not None:
                self.observe(number, batch, values)
        sums = jax.device_get(sums)
        parts = with_halves(parts, self.experiment.evaluate.halves)
        # the loss without targets is NaN, so that it is not the best
        return summarize(add_up(sums), np.nan) | summarize_parts(parts, sums)

    def predict(self, params: Params) -> tuple[dict[str, float], PyTree, list[Note]]:
        """Computes the metrics and outputs of a task head for the n records of one validation, in order.

        Returns:
          The head's metrics, the head's outputs as NumPy arrays [n, …], and the metadata of the n records.
        """
        outputs = [self.answer_step(params, put_batch(batch, self.mesh), self.frozen) for batch in self.batches()]
        sums, outputs = zip(*jax.device_get(outputs), strict=True)
        (stream,) = self.valid_batches.streams
        count = min(len(outputs) * self.experiment.train.global_batch_size, self.valid_batches.rows_per_epoch)
        all_outputs = jax.tree.map(lambda *parts: np.concatenate(parts)[:count], *outputs)
        metrics = summarize(add_up(sums), np.nan)
        metrics |= summarize_parts(with_halves([()] * len(sums), self.experiment.evaluate.halves), sums)
        return metrics, all_outputs, [stream.note(n) for n in range(count)]
