"""Implements token classification: predicts a tag for each word, for example its part of speech or entity type."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from pretrainax.config import Experiment, HeadConfig, Tag
from pretrainax.data.preparation.shards import Encoded
from pretrainax.data.sources.base import Note, Record, WordError
from pretrainax.data.sources.records import value_of
from pretrainax.files.json_files import JsonObject
from pretrainax.tasks import label_metrics
from pretrainax.tasks.base import Task, rounded
from pretrainax.tasks.baselines import Baseline
from pretrainax.tasks.labels import UNKNOWN, infer_labels, label_number, uneven_selection, unused_label_warnings

if TYPE_CHECKING:
    from pretrainax.tokenization.base import Tokenizer

REPAIRED = "wrong beginnings of spans, mended"  # name in the counts of repairs


@dataclasses.dataclass
class TokenClassification(Task):
    """Predicts a tag for each word (Devlin et al. 2018, section 5.3; CoNLL-2003, Tjong Kim Sang and De Meulder 2003).

    With labels=("O", "B-LOC", "I-LOC") the record {"tokens": ["in", "New", "Jersey"], "tags": ["O", "B-LOC", "I-LOC"]}
    becomes, for a BERT whose vocabulary has no "Jersey",

        tokens       [CLS] in New Jer ##sey [SEP]
        words        0     1  2   3   0     0
        word_labels  0     1  2

    `words` contains the word number, from 1, of each classified token, and 0 for all other tokens. With subword="mean",
    `words` is 0 1 2 3 3 0, and the head classifies the mean hidden state of the two tokens of "Jersey". The tags of a
    record are names, or numbers from 0. Numbers are valid only if no tag name is a number.

    If a text is too long for a row, the model does not read the last words. Span metrics use the tag O for these words,
    and the accuracy counts them as wrong. The metric "unread" is the fraction of these words.
    """

    words_field: str = "tokens"  # the field of the list of words
    tags_field: str = "tags"  # the field of the list of tags, of the same length
    # names of the tags, in the order of their numbers; (): the tags of the training records, sorted: O, B-X, I-X, …
    labels: tuple[str, ...] = ()
    # the token of a word that is classified; mean: the mean of all tokens; auto: the last token in a decoder, which has
    # not read the rest of a word at its first token, otherwise the first token
    subword: Literal["auto", "first", "last", "mean"] = "auto"
    # span scheme of the tags. iob2: a span of type X begins with B-X and continues with I-X. iob1: a span begins with
    # I-X, or with B-X directly after a span of the same type. none: no spans. auto: iob2 if all labels are O, B-X or
    # I-X, otherwise none
    scheme: Literal["auto", "iob2", "iob1", "none"] = "auto"
    repair: bool = False  # replaces a tag that cannot begin a span by the correct tag; False: the record is invalid

    @property
    def fields(self) -> tuple[str, ...]:
        return self.words_field, self.tags_field

    @property
    def spans(self) -> str:
        """Returns the span scheme of the tags, "iob1" or "iob2", or "" if the tags do not define spans."""
        if self.scheme != "auto":
            return "" if self.scheme == "none" else self.scheme
        is_span = [name[:2] in ("B-", "I-") for name in self.labels]
        return "iob2" if any(is_span) and len(self.labels) - sum(is_span) == self.labels.count("O") else ""

    @property
    def _other_labels(self) -> list[str]:
        """Returns the labels that are not tags of IOB2 and IOB1."""
        return [name for name in self.labels if name != "O" and name[:2] not in ("B-", "I-")]

    @property
    def packages(self) -> tuple[str, ...]:
        return ("seqeval",) if self.spans else ()

    @property
    def metric_names(self) -> tuple[str, ...]:
        return (*(label_metrics.OF_SPANS if self.spans else ("accuracy",)), "unread")

    @property
    def select_by(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "f1" if self.spans else "accuracy"

    # --- records ------------------------------------------------------------------------------------------------------

    def read(self, record: Mapping) -> Record:
        words = [_read_word(i, word) for i, word in enumerate(self._read_list(record, "words_field"))]
        values = self._read_list(record, "tags_field")
        if len(values) != len(words):
            raise ValueError(
                f"field {self.words_field!r} holds {len(words)} words and {self.tags_field!r} {len(values)} tags; the "
                "numbers must be equal"
            )
        tags = [self._tag_index(i, word, tag) for i, (word, tag) in enumerate(zip(words, values, strict=True))]
        num_repaired = self._repair_tags(words, tags) if self.spans else 0
        note = {"words": words, "tags": tags}
        return Record((" ".join(words),), note, {REPAIRED: num_repaired} if num_repaired else {})

    def read_unlabeled(self, record: Mapping) -> Record:
        """Converts an entry without tags to a `Record`; words that are a single string are split at white space."""
        values = value_of(record, self.words_field, "config.objective.words_field")
        values = values.split() if isinstance(values, str) else self._read_list(record, "words_field")
        words = [_read_word(i, word) for i, word in enumerate(values)]
        if not words:
            raise ValueError(f"field {self.words_field!r} holds no words")
        return Record((" ".join(words),), {"words": words})

    def _read_list(self, record: Mapping, setting: str) -> Sequence:
        name = getattr(self, setting)
        value = value_of(record, name, f"config.objective.{setting}")
        if not isinstance(value, (list, tuple, np.ndarray)):
            raise ValueError(f"field {name!r} holds {type(value).__name__}, it must be a list with one item per word")
        return list(value)

    def _tag_index(self, i: int, word: str, tag: object) -> int:
        try:
            return label_number(tag, self.tags_field, self.labels)
        except ValueError as e:
            raise WordError(i, f"word {i + 1}, {word!r}: {e}") from e

    def _repair_tags(self, words: Sequence[str], tags: list[int]) -> int:
        """Replaces tags that cannot begin a span in the scheme, in place; returns the number of replacements.

        Args:
          words: the words, for the error message.
          tags: the numbers of the tags.

        Raises:
          WordError: a tag cannot begin a span, and `repair` is False.
        """
        num_repaired, begin, previous = 0, {"iob2": "B", "iob1": "I"}[self.spans], "O"
        for i, tag in enumerate(tags):
            name = self.labels[tag]
            position, _, kind = name.partition("-")
            continues = previous in (f"B-{kind}", f"I-{kind}")
            if not continues and name != "O" and position != begin:
                if not self.repair:
                    after = f"after {previous!r}" if i else "at the beginning"
                    raise WordError(
                        i,
                        f"word {i + 1}, {words[i]!r}, has the tag {name!r} {after}, where {self.spans.upper()} has "
                        f"'{begin}-{kind}': set config.objective.repair=True to replace the tag, or "
                        f"config.objective.scheme to another scheme ('iob1', 'iob2', 'none')",
                    )
                name, num_repaired = f"{begin}-{kind}", num_repaired + 1
                tags[i] = self.labels.index(name)
            previous = name
        return num_repaired

    def encode(self, record: Record, tokenizer: "Tokenizer") -> Iterator[Encoded]:
        """Yields one document with the token ids of each word, tokenized as in a text with spaces between the words."""
        space = "" if tokenizer.text_table.adds_space else " "
        words = [space * (i > 0) + word for i, word in enumerate(record.note["words"])]
        yield Encoded(tokenizer.encode_batch(words), {k: v for k, v in record.note.items() if k == "tags"})

    def is_cut(self, encoded: Encoded) -> bool:
        return sum(map(len, encoded.parts)) > self.text_capacity(1)

    # --- examples -----------------------------------------------------------------------------------------------------

    def example(self, text, rng, vocabulary):
        example = self.framed([text.tokens], vocabulary)
        sizes, capacity = np.diff(text.parts, prepend=0), len(example["tokens"]) - self._frame.count(1)
        starts, ends = text.parts - sizes, text.parts
        subword = ("last" if self._model.family == "decoder" else "first") if self.subword == "auto" else self.subword
        is_read = (sizes > 0) & ((starts < capacity) if subword == "first" else (ends <= capacity))
        numbers = np.where(is_read, np.cumsum(is_read), 0)
        word_of_token = np.repeat(numbers, sizes)
        if subword != "mean":
            positions = starts if subword == "first" else ends - 1
            word_of_token[np.setdiff1d(np.arange(len(word_of_token)), positions[sizes > 0])] = 0
        words = np.zeros(len(example["tokens"]), np.int32)
        words[len(self._frame.single.before) :][:capacity] = word_of_token[:capacity]
        tags = {"word_labels": np.array(text.note["tags"], np.int32)[is_read]} if "tags" in text.note else {}
        return {**example, "words": words, **tags}

    def sample_note(self):
        return {"tags": [0, 0]}

    # --- the head -----------------------------------------------------------------------------------------------------

    def complete(self, experiment: Experiment) -> None:
        self.labels = self.labels or infer_labels(
            experiment, self.tags_field, lambda record: self._read_list(record, "tags_field")
        )
        experiment.model.head = experiment.model.head or Tag()
        super().complete(experiment)

    def head(self, model):
        prefix = {"iob2": "I-", "iob1": "B-", "": None}[self.spans]
        follows = [
            tuple(self.labels.index(x) for x in (f"B-{name[2:]}", f"I-{name[2:]}") if x in self.labels)
            if name[:2] == prefix
            else ()
            for name in self.labels
        ]
        return Tag(len(self.labels) or UNKNOWN, follows=tuple(follows))

    def head_problems(self, head: HeadConfig) -> Iterator[str]:
        num_labels = len(self.labels) or UNKNOWN
        if not isinstance(head, Tag) or head.num_labels != num_labels:
            yield (
                f"config.model.head is {head}, TokenClassification of {num_labels} labels needs "
                f"Tag(num_labels={num_labels})"
            )

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if experiment.model.family == "encoder_decoder":
            yield (
                "config.model.family is 'encoder_decoder', whose decoder has not read the word that it would tag: use "
                "--config=finetune, which takes the encoder, or set config.model.family to 'encoder'"
            )

    def field_problems(self):
        if len(self.labels) == 1 or len(set(self.labels)) < len(self.labels):
            yield f"config.objective.labels is {self.labels}, it must name all tags, as ('O', 'B-LOC', 'I-LOC')"
        if self.spans and (others := self._other_labels):
            yield (
                f"config.objective.scheme is {self.spans!r}, but config.objective.labels has {others[0]!r}: labels "
                "must be O, B-X and I-X; convert other schemes (BIOES) to IOB2, and use scheme 'none' for tags of "
                "single words"
            )
        if self.repair and self.labels and not self.spans:
            yield "config.objective.repair is True, but the tags define no spans (scheme): set it to False"
        begin_prefix, other_prefix = {"iob2": ("B-", "I-"), "iob1": ("I-", "B-"), "": ("", " ")}[self.spans]
        missing = [
            name for x in self.labels if x[:2] == other_prefix and (name := begin_prefix + x[2:]) not in self.labels
        ]
        if missing:
            other = "iob1" if self.spans == "iob2" else "iob2"
            yield (
                f"config.objective.labels has no {missing[0]!r}, with which spans of {self.spans.upper()} begin: "
                f"add it, or set config.objective.scheme to {other!r} or 'none'"
            )

    # --- metrics ------------------------------------------------------------------------------------------------------

    def metrics(self, answers: Mapping[str, np.ndarray], notes: Sequence[Note]) -> dict[str, float]:  # pyright: ignore
        predicted = [_tags_by_word(row, note) for row, note in zip(answers["tags"], notes, strict=True)]
        truth = [np.array(note["tags"]) for note in notes]
        predicted_tags = np.concatenate(predicted)
        scores = {"accuracy": float((predicted_tags == np.concatenate(truth)).mean())}
        if self.spans:
            names = np.array([*self.labels, "O"])  # index -1, of words that the model did not read, is O
            scores |= label_metrics.span_metrics(
                [names[x].tolist() for x in predicted], [names[x].tolist() for x in truth], self.spans
            )
        return scores | {"unread": float((predicted_tags < 0).mean())}

    def record_sums(self, answers, notes):
        predicted = [_tags_by_word(row, note) for row, note in zip(answers["tags"], notes, strict=True)]
        truth = [np.array(note["tags"]) for note in notes]
        correct, words = ([float((a == b).sum()) for a, b in zip(x, truth, strict=True)] for x in (predicted, truth))
        sums = {"accuracy": (np.array(correct), np.array(words))}
        if self.spans:
            names = np.array([*self.labels, "O"])
            sums["f1"] = label_metrics.span_sums(*([names[x].tolist() for x in tags] for tags in (predicted, truth)))
        return sums

    def baselines(self, train, valid, notes):
        counts = np.zeros(len(self.labels))
        by_word = collections.defaultdict(lambda: np.zeros(len(self.labels)))
        for record in train:
            for word, tag in zip(record.note["words"], record.note["tags"], strict=True):
                by_word[word][tag] += 1
                counts[tag] += 1
        most_frequent = int(counts.argmax())
        best = {word: int(word_counts.argmax()) for word, word_counts in by_word.items()}
        words = [record.note["words"] for record in valid]
        constant = [[most_frequent] * len(row) for row in words]
        frequent = [[best.get(word, most_frequent) for word in row] for row in words]
        yield Baseline("most frequent tag", _padded_tags(constant, notes), is_constant=True)
        yield Baseline("most frequent tag of each word", _padded_tags(frequent, notes))

    def selection(self, notes):
        if self.spans:
            return super().selection(notes)
        return uneven_selection(self.select_by, "loss", (self.labels[tag] for note in notes for tag in note["tags"]))

    def prediction(self, answers: Mapping[str, np.ndarray], notes: Sequence[Note]) -> JsonObject:  # pyright: ignore
        """Computes each word's predicted tag and its probability.

        Both are None for words that the model did not read.
        """
        (note,), (tags,), (probabilities,) = notes, answers["tags"], answers["probabilities"]
        numbers = _tags_by_word(tags, note)
        remaining_probabilities = iter(map(rounded, probabilities))
        return {
            "prediction": [self.labels[number] if number >= 0 else None for number in numbers],
            "probabilities": [next(remaining_probabilities) if number >= 0 else None for number in numbers],
        }

    def warnings(self, notes: Iterable[Note]) -> Iterator[str]:
        if self.scheme == "auto" and self._other_labels and any(name[:2] in ("B-", "I-") for name in self.labels):
            yield (
                f"NO F1 OF SPANS: config.objective.labels has {self._other_labels[0]!r}, and the tags of spans are O, "
                "B-X and I-X. Convert other schemes (BIOES) to IOB2, or set config.objective.scheme to 'none'"
            )
        counts = collections.Counter(tag for note in notes for tag in note["tags"])
        yield from unused_label_warnings(counts, self.labels)


def _read_word(i: int, word: object) -> str:
    """Converts word `i` of a record to a str; raises WordError if the word is neither a str nor bytes."""
    word = word.decode() if isinstance(word, bytes) else word
    if not isinstance(word, str):
        raise WordError(i, f"word {i + 1} is {word!r}, it must be a string")
    return word


def _padded_tags(tags: Sequence[Sequence[int]], notes: Sequence[Note]) -> dict[str, np.ndarray]:
    """Converts the tags of all words of each record to head outputs: the words with tokens, padded with -1."""
    rows = [np.array(row)[np.diff(note["parts"], prepend=0) > 0] for row, note in zip(tags, notes, strict=True)]
    padded = np.full((len(rows), max(map(len, rows))), -1)
    for out, row in zip(padded, rows, strict=True):
        out[: len(row)] = row
    return {"tags": padded}


def _tags_by_word(tags: np.ndarray, note: Note) -> np.ndarray:
    """Returns the index of the predicted tag of each word in a record, [words].

    The index is -1 for words that the model did not read and for words without tokens.

    Args:
      tags: predicted tags of the words that the model read, padded with -1.
    """
    sizes, tags = np.diff(note["parts"], prepend=0), tags[tags >= 0]
    predicted = np.full(len(sizes), -1)
    predicted[np.flatnonzero(sizes)[: len(tags)]] = tags
    return predicted
