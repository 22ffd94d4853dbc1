"""The rows of one objective over one corpus."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.data.batch import LENGTH_FIELDS, Example, Lengths
from pretrainax.data.corpus import Corpus
from pretrainax.data.objectives import Objective, Text
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
    """The ways in which texts become rows: the same for all streams of a run."""

    sequence_length: int
    global_batch_size: int  # rows of a batch over all processes
    seed: int  # of the order, and of the masks where these have none of their own
    mask_seed: Optional[int] = None
    shuffle: bool = True  # each epoch in an order of its own; False: in order
    packing: Optional[Packing] = None  # None: what fits the objective
    text: Optional[TextTable] = None  # by which text is counted; None: it is not
    token_inputs: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # see `data/token_inputs.py`
    no_target_bytes: str = "they are not counted"  # why the targets have no bytes; "": they have


def default_packing(objective: Objective) -> Packing:
    """Returns how the texts of an objective fill rows where the config does not say."""
    if objective.unit == "tokens":
        return Windows()
    return BestFit() if objective.packs else OneEach()


def text_lengths(objectives: Sequence[Objective], packing: Optional[Packing], names: Iterable[str]) -> Example:
    """Returns what the template of a batch has beside names of its examples: lengths, where each row has one text."""
    if not all(one.one_text and (packing or default_packing(one)).one_piece for one in objectives):
        return {}
    return {name: np.array(0, np.int32) for name, ids in LENGTH_FIELDS.items() if ids in names}


class RowStream:
    """`examples(n, …)`: those of row n.

    Args:
      objective: bound to the tokenizer, and no mixture.
      number: of this stream among those of a run: it has random numbers of its own.
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
        # What the weights of a mixture count: pairs, however many share a row; of text, rows.
        self.examples_per_row = self.plan.pieces_per_row if objective.unit == "pairs" else 1.0
        self._across_documents = not packing.cuts
        self.draws_text = objective.pairs_documents  # of other documents, while an example is made
        self._counter = options.text and TextCounter(
            options.text, bytes_per_spelled(options.text, corpus), vocabulary.separator, not options.no_target_bytes
        )
        batch = options.global_batch_size if len(self.lengths) > 1 else None  # of which each is of one bucket
        raw = tuple(lengths.raw for lengths in self.lengths)
        self.plan_key = (corpus, objective.unit, str(packing), raw, batch)  # streams with the same have the same rows
        if objective.pairs_documents and corpus.num_documents < 2:
            raise UserError(
                f"{type(objective).__name__} takes text from other documents, and a split of this corpus has one: give "
                "more in config.data.source, or a larger valid_fraction of it"
            )

    def row(self, n: int) -> tuple[list[tuple[int, int]], Lengths]:
        """Returns the pieces (start, length) of row n, and the lengths it is padded to."""
        epoch, place = divmod(n, self.plan.rows_per_epoch)
        if self.options.shuffle:
            seed = self.options.seed
            offset, keys = epoch_draws(seed, self.number, epoch, self.plan.offsets)
            if self.objective.static:  # the same windows in each epoch, in another order
                offset, _ = epoch_draws(seed, self.number, 0, self.plan.offsets)
        else:
            offset, keys = 0, None
        pieces, bucket = self.plan.row(place, keys, offset)
        return pieces, self.lengths[bucket]

    def hold(self, rows: Iterable[int]) -> None:
        """Reads the text of some rows at once, where it is in a store alone."""
        if self.corpus.is_in_store:
            self.corpus.held = self.corpus.read(window for n in rows for window in self.row(n)[0])

    def examples(self, n: int, progress: float, draws: CounterRng) -> list[Example]:
        """Makes the examples of row n, not padded. progress: of the training at this row, from 0 to 1."""
        return [example for example, _ in self._made(n, progress, draws)]

    def counted(self, n: int, progress: float, draws: CounterRng) -> list[Example]:
        """Makes the same with the arrays beside them that count text, where `options.text` says what is text."""
        made = self._made(n, progress, draws)
        return [self._counter.counted(*each) for each in made] if self._counter else [example for example, _ in made]

    def _made(self, n: int, progress: float, draws: CounterRng) -> Iterator[tuple[Example, np.ndarray]]:
        """Yields each example of row n, and the tokens of its text."""
        pieces, _ = self.row(n)
        rng = draws.at(2 * self.number, n)
        for start, length in pieces:
            if self.objective.static:
                rng = draws.at(2 * self.number + 1, start)
            text = self._text(start, length, progress)
            example = self.objective.example(text, rng, self.vocabulary)
            yield with_token_inputs(example, self.options.token_inputs), text.tokens

    def _text(self, start: int, length: int, progress: float) -> Text:
        corpus, unit = self.corpus, self.objective.unit
        if self._across_documents:
            return Text(*corpus.window(start, length), progress=progress)
        if unit == "pairs":
            return self._pair(start, length, progress)
        if unit == "records":
            note = corpus.note(self._document_at(start))
            tokens = corpus.tokens(start, length)
            return Text(tokens, np.ones(length, np.int32), np.array(note["parts"]), progress, note=note)
        parts = elsewhere = None
        if unit == "sentences":
            first, last = corpus.part_ends.searchsorted((start, start + length - 1), "right")
            parts = np.minimum(corpus.part_ends[first : last + 1] - start, length)
            elsewhere = lambda rng: self._text(*self._another(start, rng), progress)  # noqa: E731
        return Text(corpus.tokens(start, length), np.ones(length, np.int32), parts, progress, elsewhere)

    def record(self, n: int) -> Text:
        """Returns the record that row n is made of."""
        (start, length), *_ = self.row(n)[0]
        return self._text(start, length, progress=1.0)

    def note(self, n: int) -> Note:
        """Returns what is noted of the record that row n is made of."""
        (start, _), *_ = self.row(n)[0]
        return self.corpus.note(self._document_at(start))

    def _document_at(self, start: int) -> int:
        return int(self.corpus.document_ends.searchsorted(start, "right"))

    def _pair(self, start: int, length: int, progress: float) -> Text:
        """Returns source and target, each cut to its room, its end kept."""
        tokens = self.corpus.tokens(start, length)
        middle = int(self.corpus.part_ends[self.corpus.part_ends.searchsorted(start, "right")]) - start
        cut = []
        for part, room in zip(
            (tokens[:middle], tokens[middle:]), self.objective.pair_room(self.lengths[-1]), strict=True
        ):
            cut.append(part if len(part) <= room else np.append(part[: room - 1], part[-1]))
        tokens = np.concatenate(cut)
        return Text(tokens, np.ones(len(tokens), np.int32), np.cumsum([len(part) for part in cut]), progress)

    def _another(self, start: int, rng: np.random.Generator) -> tuple[int, int]:
        """Draws a text of another document than the one around `start`: from one of the places where, but for the
        ends of sentences, rows would begin; long documents come up as often as they are long."""
        ends, raw = self.corpus.document_ends, self.lengths[-1].raw
        first, last = _around(ends, start)
        place = int(rng.integers(self.corpus.num_tokens - (last - first)))  # among the tokens of all others
        place += last - first if place >= first else 0
        first, last = _around(ends, place)
        begin, _ = _around(self.corpus.part_ends, first + (place - first) // raw * raw)
        return begin, min(last - begin, raw)


def _around(ends: np.ndarray, place: int) -> tuple[int, int]:
    """Returns the first token of what ends at one of `ends` and holds `place`, and the one behind its last."""
    number = int(ends.searchsorted(place, "right"))
    return int(ends[number - 1]) if number else 0, int(ends[number])
