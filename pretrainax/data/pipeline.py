"""From a corpus to batches: which window each row is made of, and the loader.

Row i of a run is a pure function of (seed, i), so batch s is one of (seed, s): nothing has to be saved to resume, and
neither the number of processes nor of loader workers changes it.
"""

import dataclasses
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Optional, Protocol

import numpy as np
from absl import flags

from pretrainax.config import Experiment, UserError
from pretrainax.data.batch import Example, HostBatch, Lengths, highest_id
from pretrainax.data.collate import collate
from pretrainax.data.corpus import Corpus, damaged
from pretrainax.data.mixture_schedule import MixtureSchedule
from pretrainax.data.objectives import Objective
from pretrainax.data.preparation.workers import check_shared_memory
from pretrainax.data.rng import CounterRng
from pretrainax.data.row_stream import RowOptions, RowStream
from pretrainax.data.sources.base import WeightStages

if TYPE_CHECKING:
    from pretrainax.tokenization.base import Vocabulary


class Batches:
    """`batches[step]`: this process's rows of the global batch of a step, as a dict of arrays [b, ...].

    Process p of n holds rows [p * b, (p + 1) * b) with b = global_batch_size / n. Each objective of a mixture has a
    stream of rows over each corpus; the streams take turns in proportion to their weights: of rows, where a source has
    pairs of those. A stream uses each of its rows once an epoch; with `shuffle` their order is new each epoch, without
    they come in order.

    Raises UserError when a corpus is shorter than one row, when the processes do not divide the batch, and when the
    vocabulary lacks what the objective needs.
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
        """weight_stages: of the corpora; steps: of the whole run; None: every row is as at its end."""
        rows = options.global_batch_size
        objective.check_vocabulary(vocabulary, options.sequence_length)
        if rows % process_count:
            raise UserError(f"config.train.global_batch_size {rows} is not a multiple of the {process_count} processes")
        self.vocabulary, self.global_batch_size, self.rows = vocabulary, rows, (steps or 0) * rows
        self.local_batch_size = rows // process_count
        self.first_row = process_index * self.local_batch_size
        self.seed = options.seed % 2**64  # NumPy takes no negative ones
        options = dataclasses.replace(options, seed=self.seed)
        self.streams, of_corpus = [], []  # the corpus and the weight of each stream
        for corpus_number, corpus in enumerate(corpora):
            for weight, component in objective.components(corpus.parts == "pairs"):
                stream = RowStream(corpus, component, vocabulary, options, number=len(self.streams))
                self.streams.append(stream)
                of_corpus.append((corpus_number, weight / stream.examples_per_row))
        if len(self.streams) > 1 and any(len(stream.lengths) > 1 for stream in self.streams):
            raise UserError("config.data.packing has buckets, which the rows of a mixture cannot share: set buckets=()")
        self._corpora = [corpus_number for corpus_number, _ in of_corpus]
        self.schedule = MixtureSchedule(
            [
                (int(start * self.rows), [weights[c] * weight for c, weight in of_corpus])
                for start, weights in weight_stages
            ]
        )
        self.rows_per_epoch = sum(stream.plan.rows_per_epoch for stream in self.streams)
        self.lengths = Lengths(*np.max([stream.lengths[-1] for stream in self.streams], axis=0).tolist())

    def examples(self, row: int, draws: Optional[CounterRng] = None) -> tuple[Objective, list[Example]]:
        """Returns what row `row` of the run is made of: the examples, not padded, of one objective."""
        stream, n = self._place(row)
        return stream.objective, stream.examples(n, self.progress(row), draws or CounterRng(self.seed))

    def progress(self, row: int) -> float:
        """Returns how much of the training is done at a row of the run, from 0 to 1."""
        return min(row / self.rows, 1.0) if self.rows else 1.0

    @property
    def epochs(self) -> tuple[float, ...]:
        """Tells how often the whole run reads each corpus."""
        times = [0.0] * (1 + max(self._corpora))
        for corpus, stream, rows in zip(self._corpora, self.streams, self.schedule.before(self.rows), strict=True):
            times[corpus] += float(rows) / stream.plan.rows_per_epoch
        return tuple(times)

    def lengths_of(self, step: int) -> Lengths:
        """Returns the lengths of the rows of a batch: the longest there are, or those of its bucket."""
        if len(self.streams[0].lengths) == 1:
            return self.lengths
        stream, n = self._place(step * self.global_batch_size)
        return stream.row(n)[1]

    def statistics(self) -> dict[str, float]:
        """Adds up what the plans of the streams cut and leave out; the fill is that of the fullest."""
        total: dict[str, float] = {}
        for stream in self.streams:
            for name, value in stream.plan.statistics.items():
                total[name] = max(total.get(name, 0), value) if name == "fill" else total.get(name, 0) + value
        return total

    def __getitem__(self, step: int) -> HostBatch:
        first, draws = step * self.global_batch_size + self.first_row, CounterRng(self.seed)
        numbers = range(first, first + self.local_batch_size)
        rows = [self.examples(row, draws)[1] for row in numbers]
        return self._collated(rows, self.lengths_of(step), map(self._place, numbers))

    def of_stream(self, number: int, rows: range) -> HostBatch:
        """Returns a batch of one stream alone, as at the end of the training: the first of `rows`, which are its own.

        Where these are fewer than a batch has, the others are empty.
        """
        stream, draws = self.streams[number], CounterRng(self.seed)
        own = rows[self.first_row :][: self.local_batch_size]
        examples = [stream.examples(n, 1.0, draws) for n in own]
        empty = [[] for _ in range(self.local_batch_size - len(own))]
        return self._collated(examples + empty, self.lengths, ((stream, n) for n in own))

    def _collated(
        self, rows: Sequence[Sequence[Example]], lengths: Lengths, places: Iterable[tuple[RowStream, int]]
    ) -> HostBatch:
        batch = collate(rows, lengths, self.vocabulary.pad or 0, self.template)
        if highest_id(batch) >= self.vocabulary.size:
            raise UserError(self._explain_ids(places, highest_id(batch)))
        return batch

    @functools.cached_property
    def template(self) -> Example:
        """An array of each name that batches have: those of all objectives of a mixture, if a batch has some or not."""
        draws = CounterRng(self.seed)
        return {name: array for s in self.streams for name, array in s.examples(0, 0.0, draws)[0].items()}

    def _explain_ids(self, places: Iterable[tuple[RowStream, int]], highest: int) -> str:
        """Writes the error line of rows with an id that no text has: where in which corpus it is from."""
        size = self.vocabulary.size
        line = f"a batch has the id {highest}, and the tokenizer {size} ids"
        for stream, n in places:
            for start, length in stream.row(n)[0]:
                bad = np.flatnonzero(stream.corpus.tokens(start, length).view(np.uint32) >= size)
                if len(bad):
                    return f"{line}: {damaged(stream.corpus.path_of(start + int(bad[0])))}"
        return f"{line}: config.objective makes one that is none"

    def _place(self, row: int) -> tuple[RowStream, int]:
        number, n = self.schedule[row]
        return self.streams[number], n


def batches_of(
    experiment: Experiment, prepared: Any, split: str, process_index: int = 0, process_count: int = 1
) -> Batches:
    """Returns the batches of a run (`prepared`: prepare.Prepared): of "train" in an order of its seed, of "valid"
    always the same ones."""
    corpora, data = getattr(prepared, split), experiment.data
    training = split == "train"
    return Batches(
        corpora,
        (experiment.objective if training else experiment.validation_objective).bind(prepared.tokenizer),
        prepared.tokenizer.vocabulary,
        RowOptions(
            sequence_length=data.sequence_length,
            global_batch_size=experiment.train.global_batch_size,
            seed=experiment.train.seed if training else 0,
            shuffle=training,
            packing=data.packing,
        ),
        weight_stages=data.source.weight_stages([corpus.num_documents for corpus in corpora]),
        steps=experiment.train.steps if training else None,
        process_index=process_index,
        process_count=process_count,
    )


class BatchOfStep(Protocol):
    """Gives the batch of each step: `Batches`, or a view of them that counts otherwise."""

    def __getitem__(self, step: int, /) -> HostBatch: ...


def iterate(batches: BatchOfStep, start: int, stop: int, workers: int = 0) -> Iterator[HostBatch]:
    """Yields batches[start], ..., batches[stop - 1], made ahead of time: in a thread, or in `workers` processes.

    A Grain graph whose elements are whole batches, so that their order is that of the steps for any `workers`.
    Worker processes import the program's main module again and start in a few seconds.
    """
    import grain  # not at the top: it imports JAX, which making a batch does not need

    if not flags.FLAGS.is_parsed():  # Grain reads absl flags, which only programs run by absl.app have parsed
        flags.FLAGS.mark_as_parsed()
    dataset = grain.MapDataset.range(start, stop).map(batches.__getitem__)
    dataset = dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
    if workers:
        check_shared_memory("workers", workers, alone=0)
        options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
        dataset = dataset.mp_prefetch(options, worker_init_fn=_start_worker)
    iterator = iter(dataset)
    try:
        yield from iterator
    finally:  # also where the loop that asks for batches is left early: ends the workers, frees what they made ahead
        iterator.close()


def _start_worker(number: int, count: int) -> None:
    """Leaves signals to the process that trains, and ends with that one, however it ends."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # terminals and SLURM send them to all of a job
        signal.signal(each, signal.SIG_IGN)

    def end_with_parent():
        parent = multiprocessing.parent_process()
        assert parent is not None  # which only the first process has not
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
