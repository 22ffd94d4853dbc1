"""Builds the rows of one objective over one corpus."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.data.batch import LENGTH_FIELDS, Example, Lengths
from pretrainax.data.corpus import Corpus
from pretrainax.data.objectives import Objective, ObjectiveInput
from pretrainax.data.packing import BestFit, OneEach, Packing, Windows
from pretrainax.data.permutation import epoch_draws
from pretrainax.data.rng import CounterRng
from pretrainax.data.row_plan import make_row_plan
from pretrainax.data.sources.base import Note
from pretrainax.data.text_counts import TextCounter, bytes_per_spelled
from pretrainax.data.token_inputs import with_token_inputs
from pretrainax.tokenization.base import TextTable, Vocabulary


@dataclasses.dataclass(frozen=True)
class RowOptions:
    """Options for building rows from documents, shared by all streams of a run."""

    sequence_length: int
    global_batch_size: int  # rows of a batch over all processes
    seed: int  # seed of the order of rows; also of the masks, if mask_seed is None
    mask_seed: Optional[int] = None
    shuffle: bool = True  # each epoch in a different order; False: in corpus order
    packing: Optional[Packing] = None  # None: `default_packing`
    text: Optional[TextTable] = None  # table for counting text; None: text is not counted
    token_inputs: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # see `data/token_inputs.py`
    labels_replacements: bool = False  # batches have the array "replacements", see `data/replacements.py`
    no_target_bytes: str = "target bytes are not counted"  # why the bytes of targets are not counted; "": they are


def default_packing(objective: Objective) -> Packing:
    """Returns an objective's default packing, for configs that do not set one."""
    if objective.unit == "tokens":
        return Windows()
    return BestFit() if objective.packs else OneEach()


def text_lengths(objectives: Sequence[Objective], packing: Optional[Packing], names: Iterable[str]) -> Example:
    """Returns a zero for each text-length array that the batches need, by name; {} if rows may have several segments.

    The zeros are added to an example, to form the template from which `collate` takes the names of its arrays.

    names: names of the arrays in that example.
    """
    if not all(
        objective.single_segment and (packing or default_packing(objective)).one_piece for objective in objectives
    ):
        return {}
    return {name: np.array(0, np.int32) for name, ids in LENGTH_FIELDS.items() if ids in names}


class RowStream:
    """Builds the rows of one objective over one corpus: `examples(n, …)` returns the examples of row n.

    Args:
      objective: an objective that is bound to the tokenizer and is not a mixture.
      number: index of this stream in the run; each stream has its own random numbers.
    """

    def __init__(
        self,
        corpus: Corpus,
        objective: Objective,
        vocabulary: Vocabulary,
        options: RowOptions,
        number: int,
    ):
        self.corpus, self.objective, self.vocabulary = corpus, objective, vocabulary
        self.options, self.number = options, number
        packing, length = options.packing or default_packing(objective), options.sequence_length
        self.lengths = [objective.lengths(n) for n in (*getattr(packing, "buckets", ()), length)]
        self.plan = make_row_plan(corpus, objective, packing, length, options.global_batch_size, options.shuffle)
        # Mixture weights count pairs, even if a row has several pairs; for other text they count rows.
        self.examples_per_row = self.plan.pieces_per_row if objective.unit == "pairs" else 1.0
        self._crosses_documents = not packing.cuts
        self.draws_text = objective.pairs_documents  # an example also has text from other documents
        self._counter = options.text and TextCounter(
            options.text, bytes_per_spelled(options.text, corpus), vocabulary, not options.no_target_bytes
        )
        batch = options.global_batch_size if len(self.lengths) > 1 else None  # each batch has one bucket
        raw = tuple(lengths.raw for lengths in self.lengths)
        self.plan_key = (corpus, objective.unit, str(packing), raw, batch)  # equal for streams with the same rows
        if objective.pairs_documents and corpus.num_documents < 2:
            raise UserError(
                f"{type(objective).__name__} takes text from other documents, but a split of this corpus has only one: "
                "add text in config.data.source, or set a larger valid_fraction"
            )

    def row(self, n: int) -> tuple[list[tuple[int, int]], Lengths]:
        """Returns the pieces (start, length) of row n, and the lengths to which the row is padded.

        Row numbers continue across epochs.
        """
        epoch, row = divmod(n, self.plan.rows_per_epoch)
        if self.options.shuffle:
            seed = self.options.seed
            offset, keys = epoch_draws(seed, self.number, epoch, self.plan.offsets)
            if self.objective.static:  # the same windows in each epoch, in a different order
                offset, _ = epoch_draws(seed, self.number, 0, self.plan.offsets)
        else:
            offset, keys = 0, None
        pieces, bucket = self.plan.row(row, keys, offset)
        return pieces, self.lengths[bucket]

    def prefetch(self, rows: Iterable[int]) -> None:
        """Reads the text of `rows` from the object store in one call; does nothing if the corpus is on this machine."""
        if self.corpus.is_in_store:
            self.corpus.prefetched = self.corpus.read(window for n in rows for window in self.row(n)[0])

    def examples(self, n: int, progress: float, draws: CounterRng) -> list[Example]:
        """Returns the examples of row n, without padding.

        Args:
          progress: training progress at this row, from 0 to 1.
          draws: the source of random numbers, for example for masks.
        """
        return [example for example, _ in self._make_examples(n, progress, draws)]

    def inputs(self, n: int, progress: float) -> list[ObjectiveInput]:
        """Returns the sequences of tokens from which `examples` makes the examples of row n."""
        return [text for _, text in self._inputs(n, progress)]

    def counted_examples(self, n: int, progress: float, draws: CounterRng) -> list[Example]:
        """Returns the examples of row n and, if `options.text` is set, adds the arrays that count text."""
        items = self._make_examples(n, progress, draws)
        return (
            [self._counter.add_counts(*item) for item in items] if self._counter else [example for example, _ in items]
        )

    def _make_examples(self, n: int, progress: float, draws: CounterRng) -> Iterator[tuple[Example, np.ndarray]]:
        """Yields each example of row n, together with the corpus tokens that it is built from."""
        rng = draws.at(2 * self.number, n)
        for start, text in self._inputs(n, progress):
            if self.objective.static:
                rng = draws.at(2 * self.number + 1, start)
            example = self.objective.example(text, rng, self.vocabulary)
            yield with_token_inputs(example, self.options.token_inputs), text.tokens

    def _inputs(self, n: int, progress: float) -> list[tuple[int, ObjectiveInput]]:
        """Returns the input of each example of row n, with the offset of its first token in the corpus."""
        pieces, _ = self.row(n)
        if not self._crosses_documents:
            return [(start, self._text(start, length, progress)) for start, length in pieces]
        tokens, segment_ids = zip(*(self.corpus.window(*piece) for piece in pieces), strict=True)
        last_segments = np.cumsum([0, *(ids[-1] for ids in segment_ids[:-1])], dtype=np.int32)
        segment_ids = [ids + last for ids, last in zip(segment_ids, last_segments, strict=True)]
        return [(pieces[0][0], ObjectiveInput(np.concatenate(tokens), np.concatenate(segment_ids), progress=progress))]

    def _text(self, start: int, length: int, progress: float) -> ObjectiveInput:
        """Returns the input of an example from one document: the `length` tokens at offset `start` of the corpus."""
        corpus, unit = self.corpus, self.objective.unit
        if unit == "pairs":
            return self._pair(start, length, progress)
        if unit == "records":
            note = corpus.note(self._document_at(start))
            tokens = corpus.tokens(start, length)
            return ObjectiveInput(tokens, np.ones(length, np.int32), np.array(note["parts"]), progress, note=note)
        parts = draw_other_text = None
        if unit == "sentences":
            first, last = corpus.part_ends.searchsorted((start, start + length - 1), "right")
            parts = np.minimum(corpus.part_ends[first : last + 1] - start, length)
            draw_other_text = lambda rng: self._text(*self._draw_other_piece(start, rng), progress)  # noqa: E731
        return ObjectiveInput(corpus.tokens(start, length), np.ones(length, np.int32), parts, progress, draw_other_text)

    def token_documents(self, n: int, examples: Sequence[Example]) -> np.ndarray:
        """Returns the index in the corpus of the document of each token in a row, [T] int64, without padding.

        In a decoder, the document at a position is that of the target that is predicted there.

        Args:
          examples: the examples of row n.
        """
        pieces, offsets_of = self.row(n)[0], self.objective.token_offsets
        if self._crosses_documents:
            places = np.concatenate([np.arange(start, start + length) for start, length in pieces])
            places = places[offsets_of(examples[0], self.vocabulary).clip(0, len(places) - 1)]
        else:  # all tokens count as the example's document, also those of another document in a sentence pair
            lengths = [len(offsets_of(example, self.vocabulary)) for example in examples]
            places = np.repeat([start for start, _ in pieces], lengths)
        return self.corpus.document_ends.searchsorted(places, "right")

    def record(self, n: int) -> ObjectiveInput:
        """Returns the record of row n as the input of an example; requires a corpus of records."""
        (start, length), *_ = self.row(n)[0]
        return self._text(start, length, progress=1.0)

    def note(self, n: int) -> Note:
        """Returns the metadata of the record of row n; requires a corpus of records."""
        (start, _), *_ = self.row(n)[0]
        return self.corpus.note(self._document_at(start))

    def _document_at(self, start: int) -> int:
        """Returns the index of the document that contains the token at offset `start`."""
        return int(self.corpus.document_ends.searchsorted(start, "right"))

    def _pair(self, start: int, length: int, progress: float) -> ObjectiveInput:
        """Returns the source and target of a pair, each truncated to its maximum length.

        Truncation keeps the last token of the source and of the target.
        """
        tokens = self.corpus.tokens(start, length)
        middle = int(self.corpus.part_ends[self.corpus.part_ends.searchsorted(start, "right")]) - start
        truncated = []
        for part, limit in zip(
            (tokens[:middle], tokens[middle:]), self.objective.max_pair_lengths(self.lengths[-1]), strict=True
        ):
            truncated.append(part if len(part) <= limit else np.append(part[: limit - 1], part[-1]))
        tokens = np.concatenate(truncated)
        return ObjectiveInput(
            tokens, np.ones(len(tokens), np.int32), np.cumsum([len(part) for part in truncated]), progress
        )

    def _draw_other_piece(self, start: int, rng: np.random.Generator) -> tuple[int, int]:
        """Draws a piece of a document other than the document at `start`; returns the start and length of the piece.

        The piece starts at a multiple of the row length from the start of its document, rounded down to the start of a
        sentence. Documents are drawn with a probability proportional to their length.
        """
        ends, raw = self.corpus.document_ends, self.lengths[-1].raw
        first, last = _span_at(ends, start)
        offset = int(rng.integers(self.corpus.num_tokens - (last - first)))  # a random token of all other documents
        offset += last - first if offset >= first else 0
        first, last = _span_at(ends, offset)
        begin, _ = _span_at(self.corpus.part_ends, first + (offset - first) // raw * raw)
        return begin, min(last - begin, raw)


def _span_at(ends: np.ndarray, offset: int) -> tuple[int, int]:
    """Returns the start and end of the document or sentence that contains the token at `offset`.

    ends: the ends of all documents or of all sentences.
    """
    number = int(ends.searchsorted(offset, "right"))
    return int(ends[number - 1]) if number else 0, int(ends[number])
