"""From a corpus to batches: which window each row is made of, and the loader.

Row i of a run is a pure function of (seed, i), so batch s is one of (seed, s): nothing has to be saved to resume, and
neither the number of processes nor of loader workers changes it.
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

from pretrainax.config import Experiment, UserError, naming, phase_at, phases_of
from pretrainax.data.batch import Example, HostBatch, Lengths, highest_id
from pretrainax.data.collate import collate
from pretrainax.data.corpus import Corpus, Window, damaged
from pretrainax.data.mixture_schedule import MixtureSchedule
from pretrainax.data.objectives import Objective
from pretrainax.data.preparation.workers import check_shared_memory
from pretrainax.data.read_ahead import ReadAhead
from pretrainax.data.rng import CounterRng
from pretrainax.data.row_stream import RowOptions, RowStream, text_lengths
from pretrainax.data.sources.base import WeightStages
from pretrainax.data.text_counts import lost_text
from pretrainax.data.token_inputs import token_inputs

if TYPE_CHECKING:
    from pretrainax.data.preparation.prepare import Prepared
    from pretrainax.tokenization.base import Tokenizer, Vocabulary

_WAITING = 32  # rows that are made at a time, where each waits for text of a store that it draws
StreamKey = tuple[tuple, int]  # the plan of its rows, and which of the streams with the same plan it is


class Taken(NamedTuple):
    """Says what a stream has given so far."""

    number: int  # of the stream among all of the run
    rows: int


class Batches:
    """`batches[step]`: this process's rows of the global batch of a step, as a dict of arrays [b, ...].

    Process p of n holds rows [p * b, (p + 1) * b) with b = global_batch_size / n. Each objective of a mixture has a
    stream of rows over each corpus; the streams take turns in proportion to their weights: of rows, where a source has
    pairs of those. A stream uses each of its rows once an epoch; with `shuffle` their order is new each epoch, without
    they come in order.

    Of a run in phases each has batches of its own, looked up by the step of the run. A stream whose rows are those of a
    phase before goes on where that left it; another one begins with a new order.

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
        self.no_target_bytes = options.no_target_bytes  # why there are no bits per byte; "": there are
        self.first_row = process_index * self.local_batch_size
        masks = options.seed if options.mask_seed is None else options.mask_seed
        self.mask_seed = masks % 2**64  # NumPy takes no negative ones
        options = dataclasses.replace(options, seed=options.seed % 2**64)
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
        self.start, self.stop = 0, steps or 0  # updates before these, and at their end
        self._offsets = np.zeros(len(self.streams), np.int64)  # of each stream, rows beside those of the schedule
        self._before: dict[StreamKey, Taken] = {}  # of the phases before
        self.rows_per_epoch = sum(stream.plan.rows_per_epoch for stream in self.streams)
        self.lengths = Lengths(*np.max([stream.lengths[-1] for stream in self.streams], axis=0).tolist())
        self._ahead = ReadAhead()

    def examples(self, row: int) -> tuple[Objective, list[Example]]:
        """Returns what row `row` of the run is made of: the examples, not padded, of one objective."""
        stream, n = self._place(row)
        return stream.objective, stream.examples(n, self.progress(row), CounterRng(self.mask_seed))

    def progress(self, row: int) -> float:
        """Returns how much of the training is done at a row of the run, from 0 to 1."""
        return min(row / self.rows, 1.0) if self.rows else 1.0

    @property
    def epochs(self) -> tuple[float, ...]:
        """Tells how often the whole run, or its phase, reads each corpus."""
        times = [0.0] * (1 + max(self._corpora))
        first, last = (self.schedule.before(n * self.global_batch_size) for n in (self.start, self.stop))
        for corpus, stream, rows in zip(self._corpora, self.streams, last - first, strict=True):
            times[corpus] += float(rows) / stream.plan.rows_per_epoch
        return tuple(times)

    def follow(self, before: "Optional[Batches]", start: int, stop: int) -> None:
        """Makes these the batches of some steps of the run, which go on where those of the phase before have ended."""
        self.start, self.stop = start, stop
        self._before = {} if before is None else before.taken()
        known = dict(self._before)
        numbers = [known.setdefault(key, Taken(len(known), 0)) for key in self._keys()]
        for stream, taken in zip(self.streams, numbers, strict=True):
            stream.number = taken.number
        rows = np.array([taken.rows for taken in numbers])
        self._offsets = rows - self.schedule.before(start * self.global_batch_size)

    def taken(self) -> "dict[StreamKey, Taken]":
        """Returns what each stream has given at the end of the phase, of those of earlier phases too."""
        rows = (self.schedule.before(self.stop * self.global_batch_size) + self._offsets).tolist()
        here = zip(self._keys(), self.streams, rows, strict=True)
        return self._before | {key: Taken(stream.number, count) for key, stream, count in here}

    def _keys(self) -> "list[StreamKey]":
        """Returns the name by which other phases know each stream: its rows, and which of those with the same it is."""
        plans = [stream.plan_key for stream in self.streams]
        return [(plan, plans[:i].count(plan)) for i, plan in enumerate(plans)]

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
        if any(stream.corpus.is_in_store for stream in self.streams):
            stop = self.stop or self.rows_per_epoch // self.global_batch_size  # a validation is read once
            self._ahead.hold(step, stop, self._windows)
        numbers = self._rows(step)
        places = [self._place(row) for row in numbers]
        return self._collated(self._counted(numbers, places), self.lengths_of(step), places)

    def _counted(self, numbers: Sequence[int], places: Sequence[tuple[RowStream, int]]) -> list[list[Example]]:
        """Makes rows of the run, each at its place; where they draw text that is in a store, several at a time."""

        def made(row: int, place: tuple[RowStream, int], draws: CounterRng) -> list[Example]:
            stream, n = place
            return stream.counted(n, self.progress(row), draws)

        if any(stream.draws_text and stream.corpus.is_in_store for stream in self.streams):
            own = [CounterRng(self.mask_seed) for _ in numbers]  # which gives one row at a time
            with concurrent.futures.ThreadPoolExecutor(_WAITING) as pool:
                return list(pool.map(made, numbers, places, own))
        draws = CounterRng(self.mask_seed)
        return [made(row, place, draws) for row, place in zip(numbers, places, strict=True)]

    def _rows(self, step: int) -> range:
        """Returns which rows of the run the batch of a step has in this process."""
        first = step * self.global_batch_size + self.first_row
        return range(first, first + self.local_batch_size)

    def _windows(self, step: int) -> Iterator[tuple[Corpus, Window]]:
        """Yields what the rows of a batch read."""
        for stream, n in map(self._place, self._rows(step)):
            for window in stream.row(n)[0]:
                yield stream.corpus, window

    def of_stream(self, number: int, rows: range) -> HostBatch:
        """Returns a batch of one stream alone, as at the end of the training: the first of `rows`, which are its own.

        Where these are fewer than a batch has, the others are empty.
        """
        stream, draws = self.streams[number], CounterRng(self.mask_seed)
        own = rows[self.first_row :][: self.local_batch_size]
        stream.hold(own)
        examples = [stream.counted(n, 1.0, draws) for n in own]
        empty = [[] for _ in range(self.local_batch_size - len(own))]
        return self._collated(examples + empty, self.lengths, [(stream, n) for n in own])

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
        draws = CounterRng(self.mask_seed)
        named = {name: array for s in self.streams for name, array in s.counted(0, 0.0, draws)[0].items()}
        objectives = [stream.objective for stream in self.streams]
        return named | text_lengths(objectives, self.streams[0].options.packing, named)

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
        return self.streams[number], n + int(self._offsets[number])


class PhaseBatches:
    """`batches.at(step)` of a run in phases: the batches of the phase that a step is in."""

    def __init__(self, phases: Sequence[Batches]):
        self.phases = phases

    def at(self, step: int) -> Batches:
        """Returns the batches of the phase of the update after `step` updates."""
        return phase_at(self.phases, step)


def batches_of(
    experiment: Experiment,
    prepared: Any,
    split: str,
    process_index: int = 0,
    process_count: int = 1,
) -> Batches:
    """Returns the batches of a config, whose phases do not count.

    Args:
      prepared: prepare.Prepared.
      split: "train", in an order of the seed, or "valid", always the same ones.
    """
    corpora, data = getattr(prepared, split), experiment.data
    training, tokenizer = split == "train", prepared.tokenizer
    objective = (experiment.objective if training else experiment.validation_objective).adapted(experiment)
    # A validation of a task has each record, and so no buckets, of whose rows some fill no batch.
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
            no_target_bytes=_no_target_bytes(objective, tokenizer, corpora),
        ),
        weight_stages=data.source.weight_stages([corpus.num_documents for corpus in corpora]),
        steps=experiment.train.steps if training else None,
        process_index=process_index,
        process_count=process_count,
    )


def _no_target_bytes(objective: Objective, tokenizer: "Tokenizer", corpora: Sequence[Corpus]) -> str:
    """Returns why an objective has no bits per byte on these corpora, as the end of a line; "" where it has."""
    if not objective.is_likelihood:
        others = dict.fromkeys(type(part).__name__ for _, part in objective.components() if not part.is_likelihood)
        return f"the loss of {' and '.join(others)} is no likelihood of the text"
    lost = lost_text(tokenizer, corpora)
    return lost and f"they would be of another text: {lost}"


def phase_batches(
    experiment: Experiment, prepared: "Prepared", process_index: int = 0, process_count: int = 1
) -> PhaseBatches:
    """Returns the batches that a run trains on; without phases they are those of `batches_of`."""
    processes = process_index, process_count
    if not experiment.phases:
        return PhaseBatches([batches_of(experiment, prepared, "train", *processes)])
    found: list[Batches] = []
    for phase, corpora in zip(phases_of(experiment), prepared.phases, strict=True):
        with naming(phase):
            own = batches_of(phase.experiment, dataclasses.replace(prepared, train=corpora), "train", *processes)
        own.follow(found[-1] if found else None, phase.start, phase.stop)
        found.append(own)
    return PhaseBatches(found)


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
