"""Computes the standard errors of the metrics of each validation during training, over documents."""

import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Optional

import jax
import numpy as np

from pretrainax.config.metric import STANDARD_ERRORS
from pretrainax.data.batch import HostBatch
from pretrainax.data.parts import with_halves
from pretrainax.runs.cluster_sums import MIN_DOCUMENTS, ClusterSums, values_of_predictions
from pretrainax.runs.comparison import compare_sums
from pretrainax.training.callbacks import Callback
from pretrainax.training.metrics import metrics_from_loss
from pretrainax.training.validation import Validation


class ValidationErrors(Callback):
    """Adds {"standard_errors": {metric: error}} to the validation lines of language models in runs of one process."""

    part = "evaluating"

    def rows(self, run):
        if jax.process_count() > 1 and run.experiment.validation_objective.unit != "records":
            yield "standard errors", "only in the final table, because the run has several processes"

    def on_start(self, loop, state, metrics):
        if jax.process_count() == 1 and loop.run.experiment.validation_objective.unit != "records":
            for part in loop.run.parts:
                part.validation.observe = DocumentErrors(part.validation)

    def evaluation_metrics(self, loop, state):
        observer = loop.run.validation.observe
        return {STANDARD_ERRORS: observer.errors()} if isinstance(observer, DocumentErrors) else {}


class _Clusters(NamedTuple):
    """The clusters of the tokens of a validation's batches, int32 [B, T] each, and the parts of these batches."""

    documents: list[np.ndarray]  # document numbers within the validation; padding has a separate number
    rows: list[np.ndarray]
    sizes: tuple[int, int]  # number of documents and of rows
    parts: list[tuple[str, ...]]  # names of the parts of each batch; all batches are in the part ""
    by_row: set[str]  # parts with fewer than MIN_DOCUMENTS documents, whose errors are computed over rows


class DocumentErrors:
    """Computes the standard errors of one `Validation`, which calls this object with the values of each batch.

    The object adds a batch after the next batch is dispatched, so that the devices do not wait.
    """

    def __init__(self, validation: Validation):
        self._validation, self._sums = validation, dict[str, ClusterSums]()
        self._pending: Optional[tuple[int, HostBatch, Mapping[str, tuple]]] = None

    def __call__(self, number: int, batch: HostBatch, values: Mapping[str, tuple]) -> None:
        """Receives the values of batch `number` of a validation; at the first batch, discards the last validation."""
        if number == 0:
            self._sums, self._pending = {}, None
        self._add_pending()
        self._pending = number, batch, values

    def errors(self) -> dict[str, float]:
        """Returns {metric: standard error} of the last validation, also of its parts, {"loss/source=wiki": …}."""
        self._add_pending()
        errors, derived = {}, metrics_from_loss(0.0)  # `derived`: the metrics that parts do not have
        for part, sums in self._sums.items():
            unit = "rows" if part in self._clusters.by_row else "documents"
            for name, (model, _, _) in compare_sums(sums.sums(), unit).items():
                if model.standard_error is not None and not (part and name in derived):
                    errors[f"{name}/{part}" if part else name] = model.standard_error
        return errors

    def _add_pending(self) -> None:
        if self._pending is None:
            return
        (number, batch, values), self._pending = self._pending, None
        values, clusters = values_of_predictions(jax.device_get(values), batch), self._clusters
        for part in clusters.parts[number]:
            is_by_row = part in clusters.by_row
            sums = self._sums.setdefault(part, ClusterSums(clusters.sizes[is_by_row]))
            sums.add(values, batch, (clusters.rows if is_by_row else clusters.documents)[number])

    @functools.cached_property
    def _clusters(self) -> _Clusters:
        """Finds the documents and rows of all batches, which are the same in every validation."""
        parts, documents = zip(*_documents(self._validation), strict=True)
        parts = [("", *names) for names in with_halves(parts, self._validation.experiment.evaluate.halves)]
        found, index = np.unique(np.concatenate([x.ravel() for x in documents]), return_inverse=True)
        ends = np.cumsum([x.size for x in documents])
        index = np.split(index.astype(np.int32), ends[:-1])
        numbered = [x.reshape(y.shape) for x, y in zip(index, documents, strict=True)]
        seen: dict[str, set[int]] = {}
        for names, batch_documents in zip(parts, documents, strict=True):
            for name in names:
                seen.setdefault(name, set()).update(np.unique(batch_documents[batch_documents >= 0]).tolist())
        ends = np.cumsum([len(x) for x in documents])
        numbers = np.split(np.arange(ends[-1], dtype=np.int32), ends[:-1])
        rows = [np.broadcast_to(x[:, None], y.shape) for x, y in zip(numbers, documents, strict=True)]
        by_row = {name for name, those in seen.items() if len(those) < MIN_DOCUMENTS}
        return _Clusters(numbered, rows, (len(found), int(ends[-1])), parts, by_row)


def _documents(validation: Validation) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """Yields (part names, document of each token, -1 for padding) for the batches of `Validation.iterate_parts`."""
    batches, size = validation.valid_batches, validation.experiment.train.global_batch_size
    if not any(validation.parts):
        yield from (((), batches.with_documents(i)[1]) for i in range(validation.sizes[0]))
        return
    for number, (parts, count) in enumerate(zip(validation.parts, validation.rows, strict=True)):
        for first in range(0, count, size):
            yield parts, batches.stream_batch_with_documents(number, range(first, count))[1]
