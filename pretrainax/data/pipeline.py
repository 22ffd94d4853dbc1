"""Builds batches from corpora: chooses the tokens of each row, and loads batches in the background.

Row i of a run is a pure function of (seed, i), and so is batch s of (seed, s). A run can therefore resume without saved
state, and its batches do not depend on the number of processes or of loader workers.
"""

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Protocol

import numpy as np
from absl import flags

from pretrainax.config import Experiment, UserError, phase_at, phase_in_errors, phases_of
from pretrainax.config.config_file import file_with_classes, import_file
from pretrainax.data.batch import Example, HostBatch, Lengths, highest_id
from pretrainax.data.collate import collate
from pretrainax.data.corpus import Corpus, Window, damage_message
from pretrainax.data.mixture_schedule import MixtureSchedule
from pretrainax.data.objectives import Objective, ObjectiveInput
from pretrainax.data.preparation.workers import check_shared_memory
from pretrainax.data.read_ahead import ReadAhead
from pretrainax.data.replacements import with_replacements
from pretrainax.data.rng import CounterRng
from pretrainax.data.row_stream import RowOptions, RowStream, text_lengths
from pretrainax.data.sources.base import WeightStages
from pretrainax.data.text_counts import text_loss_reason
from pretrainax.data.token_inputs import token_inputs

if TYPE_CHECKING:
    from pretrainax.data.preparation.prepare import Prepared
    from pretrainax.tokenization.base import Tokenizer, Vocabulary

_CONCURRENT_ROWS = 32  # rows that are built concurrently if building a row reads text from a store
StreamKey = tuple[tuple, int]  # plan key of a stream, and index of the stream among the streams with this plan key


class StreamPosition(NamedTuple):
    """A stream's number, and how many rows the stream has produced so far."""

    number: int  # index of the stream among all streams of the run
    rows: int


class Batches:
    """The batches of a run: `batches[step]` is this process's part of the global batch, as a dict of arrays [b, ...].

    Process p of n gets the rows [p * b, (p + 1) * b) of the global batch, where b = global_batch_size / n. Each
    objective in a mixture has one stream of rows per corpus, and the streams alternate in proportion to their weights.
    The weights are in units of rows, or of pairs if the source has pairs. A stream uses each of its rows once per
    epoch. With `shuffle`, each epoch has a different order; otherwise, rows are in corpus order.

    In a run with phases (training phases with different configs), each phase has its own `Batches`, still indexed by
    the step of the run. A stream that has the same rows as one in an earlier phase continues where that one stopped.
    Any other stream starts with a new order.

    Raises:
      UserError: a corpus is shorter than one row, the number of processes does not divide the batch size, or the
        vocabulary lacks tokens that the objective requires.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        objective: Objective,
        vocabulary: "Vocabulary",
        options: RowOptions,
        *,
        weight_stages: WeightStages = ((0.0, (1.0,)),),
        steps: Optional[int] = None,
        process_index: int = 0,
        process_count: int = 1,
    ):
        """Creates the streams of rows.

        Args:
          corpora: the corpora of the split, one per component of the data source.
          objective: an objective that is bound to the tokenizer.
          weight_stages: (training progress, weight of each corpus) at the start of each stage.
          steps: the number of steps of the whole run. If None, every row has training progress 1.
          process_index: index of the process for which to build batches.
          process_count: number of processes in the run.
        """
        rows = options.global_batch_size
        objective.check_vocabulary(vocabulary, options.sequence_length)
        if rows % process_count:
            raise UserError(f"config.train.global_batch_size {rows} is not a multiple of the {process_count} processes")
        self.vocabulary, self.global_batch_size, self.rows = vocabulary, rows, (steps or 0) * rows
        self.local_batch_size = rows // process_count
        self.no_target_bytes = options.no_target_bytes  # why bits per byte cannot be computed; "": they can
        self._labels_replacements = options.labels_replacements
        self.first_row = process_index * self.local_batch_size
        mask_seed = options.seed if options.mask_seed is None else options.mask_seed
        self.mask_seed = mask_seed % 2**64  # NumPy accepts no negative seeds
        options = dataclasses.replace(options, seed=options.seed % 2**64)
        self.streams, stream_weights = [], []  # corpus and weight of each stream
        for corpus_number, corpus in enumerate(corpora):
            for weight, component in objective.components(corpus.parts == "pairs"):
                stream = RowStream(corpus, component, vocabulary, options, number=len(self.streams))
                self.streams.append(stream)
                stream_weights.append((corpus_number, weight / stream.examples_per_row))
        if len(self.streams) > 1 and any(len(stream.lengths) > 1 for stream in self.streams):
            raise UserError("config.data.packing has buckets, which the rows of a mixture cannot share: set buckets=()")
        self._first_document = np.cumsum([0, *(corpus.num_documents for corpus in corpora)])
        self._corpus_numbers = [corpus_number for corpus_number, _ in stream_weights]
        self.schedule = MixtureSchedule(
            [
                (int(start * self.rows), [weights[c] * weight for c, weight in stream_weights])
                for start, weights in weight_stages
            ]
        )
        self.start, self.stop = 0, steps or 0  # the batches are for the steps [start, stop)
        self._offsets = np.zeros(len(self.streams), np.int64)  # per stream: row number minus the schedule's row number
        self._earlier_positions: dict[StreamKey, StreamPosition] = {}  # positions of the streams of earlier phases
        self.rows_per_epoch = sum(stream.plan.rows_per_epoch for stream in self.streams)
        self.lengths = Lengths(*np.max([stream.lengths[-1] for stream in self.streams], axis=0).tolist())
        self._read_ahead = ReadAhead()

    def examples(self, row: int) -> tuple[Objective, list[Example]]:
        """Returns the objective of row `row` of the run, and that row's examples without padding."""
        stream, n = self._stream_row(row)
        return stream.objective, stream.examples(n, self.progress(row), CounterRng(self.mask_seed))

    def inputs(self, row: int) -> list[ObjectiveInput]:
        """Returns the sequences of tokens from which `examples` makes the examples of row `row` of the run."""
        stream, n = self._stream_row(row)
        return stream.inputs(n, self.progress(row))

    def progress(self, row: int) -> float:
        """Returns the training progress at row `row` of the run, from 0 to 1 (1 if the number of steps is unknown)."""
        return min(row / self.rows, 1.0) if self.rows else 1.0

    @property
    def epochs(self) -> tuple[float, ...]:
        """Returns how many epochs the run, or this phase of it, trains on each corpus."""
        epochs = [0.0] * (1 + max(self._corpus_numbers))
        first, last = (self.schedule.before(n * self.global_batch_size) for n in (self.start, self.stop))
        for corpus, stream, rows in zip(self._corpus_numbers, self.streams, last - first, strict=True):
            epochs[corpus] += float(rows) / stream.plan.rows_per_epoch
        return tuple(epochs)

    def follow(self, before: "Optional[Batches]", start: int, stop: int) -> None:
        """Restricts the batches to the steps [start, stop) of the run, and continues the streams of the previous phase.

        before: the batches of the previous phase, or None in the first phase.
        """
        self.start, self.stop = start, stop
        self._earlier_positions = {} if before is None else before.stream_positions()
        positions_by_key = dict(self._earlier_positions)
        positions = [
            positions_by_key.setdefault(key, StreamPosition(len(positions_by_key), 0)) for key in self._stream_keys()
        ]
        for stream, position in zip(self.streams, positions, strict=True):
            stream.number = position.number
        rows = np.array([position.rows for position in positions])
        self._offsets = rows - self.schedule.before(start * self.global_batch_size)

    def stream_positions(self) -> "dict[StreamKey, StreamPosition]":
        """Returns each stream's position at the end of this phase, including the streams of earlier phases."""
        rows = (self.schedule.before(self.stop * self.global_batch_size) + self._offsets).tolist()
        current = zip(self._stream_keys(), self.streams, rows, strict=True)
        return self._earlier_positions | {key: StreamPosition(stream.number, count) for key, stream, count in current}

    def _stream_keys(self) -> "list[StreamKey]":
        """Returns the key of each stream, which is the same in every phase (see `StreamKey`)."""
        plans = [stream.plan_key for stream in self.streams]
        return [(plan, plans[:i].count(plan)) for i, plan in enumerate(plans)]

    def lengths_of(self, step: int) -> Lengths:
        """Returns the row lengths of a step's batch: those of its bucket or, without buckets, the maximum lengths."""
        if len(self.streams[0].lengths) == 1:
            return self.lengths
        stream, n = self._stream_row(step * self.global_batch_size)
        return stream.row(n)[1]

    def statistics(self) -> dict[str, float]:
        """Returns the statistics of the row plans by name, combined over all streams.

        The statistic "fill" is the maximum over the streams; all others are sums.
        """
        total: dict[str, float] = {}
        for stream in self.streams:
            for name, value in stream.plan.statistics.items():
                total[name] = max(total.get(name, 0), value) if name == "fill" else total.get(name, 0) + value
        return total

    def __getitem__(self, step: int) -> HostBatch:
        """Returns this process's rows of the global batch of a step."""
        if any(stream.corpus.is_in_store for stream in self.streams):
            stop = self.stop or self.rows_per_epoch // self.global_batch_size  # a validation reads its rows once
            self._read_ahead.prefetch(step, stop, self._windows)
        numbers = self._row_numbers(step)
        stream_rows = [self._stream_row(row) for row in numbers]
        return self._collate_rows(self._counted_examples(numbers, stream_rows), self.lengths_of(step), stream_rows)

    def with_documents(self, step: int) -> tuple[HostBatch, np.ndarray]:
        """Returns the batch of a step, and the document of each token in its rows, [b, T] int64.

        Documents are numbered across all corpora, from 0; padding has -1. In a decoder, the document at a position is
        that of the target that is predicted there.
        """
        numbers = self._row_numbers(step)
        stream_rows = [self._stream_row(row) for row in numbers]
        examples = self._counted_examples(numbers, stream_rows)
        batch = self._collate_rows(examples, self.lengths_of(step), stream_rows)
        return batch, self._documents(examples, stream_rows, batch)

    def stream_batch_with_documents(self, number: int, rows: range) -> tuple[HostBatch, np.ndarray]:
        """Returns the batch of `stream_batch`, and the document of each token as in `with_documents`."""
        examples, stream_rows = self._stream_examples(number, rows)
        batch = self._collate_rows(examples, self.lengths, stream_rows)
        return batch, self._documents(examples, stream_rows, batch)

    def _documents(
        self, examples: Sequence[list[Example]], stream_rows: Sequence[tuple[RowStream, int]], batch: HostBatch
    ) -> np.ndarray:
        """Returns the document of each token in a batch; rows after the last of `stream_rows` are padding."""
        documents = np.full(batch["tokens"].shape, -1, np.int64)
        for (stream, n), row_examples, out in zip(stream_rows, examples, documents, strict=False):
            in_corpus = stream.token_documents(n, row_examples)
            out[: len(in_corpus)] = in_corpus + self._first_document[self._corpus_numbers[self.streams.index(stream)]]
        return documents

    @property
    def num_documents(self) -> int:
        """Returns the number of documents in all corpora."""
        return int(self._first_document[-1])

    def _counted_examples(
        self, numbers: Sequence[int], stream_rows: Sequence[tuple[RowStream, int]]
    ) -> list[list[Example]]:
        """Builds the examples of rows, with text counts; works concurrently if rows must be read from an object store.

        Args:
          numbers: the numbers of the rows in the run.
          stream_rows: the stream of each row, and the number of the row in the stream.
        """

        def build(row: int, stream_row: tuple[RowStream, int], draws: CounterRng) -> list[Example]:
            stream, n = stream_row
            return stream.counted_examples(n, self.progress(row), draws)

        if any(stream.draws_text and stream.corpus.is_in_store for stream in self.streams):
            generators = [CounterRng(self.mask_seed) for _ in numbers]  # one per row
            with concurrent.futures.ThreadPoolExecutor(_CONCURRENT_ROWS) as pool:
                return list(pool.map(build, numbers, stream_rows, generators))
        draws = CounterRng(self.mask_seed)
        return [build(row, stream_row, draws) for row, stream_row in zip(numbers, stream_rows, strict=True)]

    def _row_numbers(self, step: int) -> range:
        """Returns which rows of the run are this process's rows in a step's batch, as a range of row numbers."""
        first = step * self.global_batch_size + self.first_row
        return range(first, first + self.local_batch_size)

    def _windows(self, step: int) -> Iterator[tuple[Corpus, Window]]:
        """Yields (corpus, window) for each piece of text that this process's rows in a step's batch need."""
        for stream, n in map(self._stream_row, self._row_numbers(step)):
            for window in stream.row(n)[0]:
                yield stream.corpus, window

    def stream_batch(self, number: int, rows: range) -> HostBatch:
        """Returns a batch of rows from a single stream, built as at the end of training (progress 1).

        `rows` are row numbers in the stream; the global batch takes as many of them as fit, starting from the first. If
        there are too few, the remaining rows of the batch are padding.
        """
        examples, stream_rows = self._stream_examples(number, rows)
        return self._collate_rows(examples, self.lengths, stream_rows)

    def _stream_examples(self, number: int, rows: range) -> tuple[list[list[Example]], list[tuple[RowStream, int]]]:
        """Returns the examples of each row of `stream_batch`, [] for padding, and the rows that are not padding."""
        stream, draws = self.streams[number], CounterRng(self.mask_seed)
        local_rows = rows[self.first_row :][: self.local_batch_size]
        stream.prefetch(local_rows)
        examples = [stream.counted_examples(n, 1.0, draws) for n in local_rows]
        padding_rows = [[] for _ in range(self.local_batch_size - len(local_rows))]
        return examples + padding_rows, [(stream, n) for n in local_rows]

    def _collate_rows(
        self, rows: Sequence[Sequence[Example]], lengths: Lengths, stream_rows: Iterable[tuple[RowStream, int]]
    ) -> HostBatch:
        """Collates rows of examples into a batch; raises UserError if it has a token id outside the vocabulary."""
        batch = collate(rows, lengths, self.vocabulary.pad or 0, self.template)
        if highest_id(batch) >= self.vocabulary.size:
            raise UserError(self._invalid_id_message(stream_rows, highest_id(batch)))
        return with_replacements(batch, self.vocabulary.mask) if self._labels_replacements else batch

    @functools.cached_property
    def template(self) -> Example:
        """Returns an example that has every array of the batches, including those of all objectives in a mixture."""
        draws = CounterRng(self.mask_seed)
        arrays = {name: array for s in self.streams for name, array in s.counted_examples(0, 0.0, draws)[0].items()}
        objectives = [stream.objective for stream in self.streams]
        return arrays | text_lengths(objectives, self.streams[0].options.packing, arrays)

    def _invalid_id_message(self, stream_rows: Iterable[tuple[RowStream, int]], highest: int) -> str:
        """Returns the error message for an invalid token id in a batch, naming the corpus file if it is damaged."""
        size = self.vocabulary.size
        problem = f"a batch has the id {highest}; the tokenizer has {size} ids"
        for stream, n in stream_rows:
            for start, length in stream.row(n)[0]:
                invalid = np.flatnonzero(stream.corpus.tokens(start, length).view(np.uint32) >= size)
                if len(invalid):
                    return f"{problem}: {damage_message(stream.corpus.path_of(start + int(invalid[0])))}"
        return f"{problem}: config.objective creates an invalid id"

    def _stream_row(self, row: int) -> tuple[RowStream, int]:
        """Returns the stream that row `row` of the run comes from, and the row's number in that stream."""
        number, n = self.schedule[row]
        return self.streams[number], n + int(self._offsets[number])


class PhaseBatches:
    """The batches of a run with phases: `batches.at(step)` returns the batches of the phase that contains a step."""

    def __init__(self, phases: Sequence[Batches]):
        self.phases = phases

    def at(self, step: int) -> Batches:
        """Returns the batches of the phase that contains step `step` (counted from 0)."""
        return phase_at(self.phases, step)


def batches_of(
    experiment: Experiment,
    prepared: Any,
    split: str,
    process_index: int = 0,
    process_count: int = 1,
) -> Batches:
    """Builds one process's batches from a config, ignoring `experiment.phases`.

    Args:
      experiment: the config of the run, or of one phase.
      prepared: the prepared data, a prepare.Prepared.
      split: "train" for batches in an order that depends on the seed; "valid" for the same batches at every validation.
      process_index: index of the process for which to build batches.
      process_count: number of processes in the run.
    """
    corpora, data = getattr(prepared, split), experiment.data
    training, tokenizer = split == "train", prepared.tokenizer
    objective = (experiment.objective if training else experiment.validation_objective).adapted(experiment)
    # A task validates on every record, so its validation has no buckets: buckets drop rows that do not fill a batch.
    packing = None if objective.unit == "records" and not training else data.packing
    return Batches(
        corpora,
        objective.bind(tokenizer),
        tokenizer.vocabulary,
        RowOptions(
            sequence_length=data.sequence_length,
            global_batch_size=experiment.train.global_batch_size,
            seed=experiment.train.seed_of("order") if training else 0,
            mask_seed=experiment.train.seed_of("mask") if training else 0,
            shuffle=training,
            packing=packing,
            text=tokenizer.text_table,
            token_inputs=token_inputs(experiment.model, tokenizer),
            labels_replacements=not training,
            no_target_bytes=_no_target_bytes(objective, tokenizer, corpora),
        ),
        weight_stages=data.source.weight_stages([corpus.num_documents for corpus in corpora]),
        steps=experiment.train.steps if training else None,
        process_index=process_index,
        process_count=process_count,
    )


def _no_target_bytes(objective: Objective, tokenizer: "Tokenizer", corpora: Sequence[Corpus]) -> str:
    """Returns why bits per byte cannot be computed for an objective on these corpora, or "" if they can."""
    if not objective.is_likelihood:
        names = dict.fromkeys(type(part).__name__ for _, part in objective.components() if not part.is_likelihood)
        return f"the loss of {' and '.join(names)} is not a likelihood of the text"
    reason = text_loss_reason(tokenizer, corpora)
    return reason and f"they would measure a different text: {reason}"


def phase_batches(
    experiment: Experiment, prepared: "Prepared", process_index: int = 0, process_count: int = 1
) -> PhaseBatches:
    """Builds the training batches for all phases of a run; a run without phases has the batches of `batches_of`."""
    processes = process_index, process_count
    if not experiment.phases:
        return PhaseBatches([batches_of(experiment, prepared, "train", *processes)])
    phases: list[Batches] = []
    for phase, corpora in zip(phases_of(experiment), prepared.phases, strict=True):
        with phase_in_errors(phase):
            current = batches_of(phase.experiment, dataclasses.replace(prepared, train=corpora), "train", *processes)
        current.follow(phases[-1] if phases else None, phase.start, phase.stop)
        phases.append(current)
    return PhaseBatches(phases)


class BatchOfStep(Protocol):
    """Protocol for mappings from steps to batches: `Batches`, or a view of it that numbers the steps differently."""

    def __getitem__(self, step: int, /) -> HostBatch: ...


def iterate(batches: BatchOfStep, start: int, stop: int, workers: int = 0) -> Iterator[HostBatch]:
    """Yields batches[start], ..., batches[stop - 1], prefetched by a thread or by worker processes.

    workers: the number of worker processes, or 0 to use a thread of this process. The Grain dataset yields whole
    batches, so they arrive in step order for any number of workers. Worker processes re-import the program's main
    module and take a few seconds to start.
    """
    import grain  # imported here, because it imports JAX, which building a batch does not need

    if not flags.FLAGS.is_parsed():  # Grain reads absl flags, which only programs run by absl.app have parsed
        flags.FLAGS.mark_as_parsed()
    dataset = grain.MapDataset.range(start, stop).map(batches.__getitem__)
    dataset = dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
    if workers:
        check_shared_memory("workers", workers, alone=0)
        options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
        start_worker = functools.partial(_start_worker, file_with_classes())
        dataset = dataset.mp_prefetch(options, worker_init_fn=start_worker)
    iterator = iter(dataset)
    try:
        yield from iterator
    finally:  # also if the consumer stops early: stops the workers and frees prefetched batches
        iterator.close()


def _start_worker(config_file: Optional[str], number: int, count: int) -> None:
    """Initializes a worker process: it ignores signals, and exits when the training process ends for any reason.

    Signals are left to the training process.

    config_file: a config file with classes that the batches may contain, or None.
    """
    if config_file is not None:
        import_file(config_file)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # terminals and SLURM signal all processes of a job
        signal.signal(signum, signal.SIG_IGN)

    def end_with_parent():
        parent = multiprocessing.parent_process()
        assert parent is not None  # only the first process has no parent
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
