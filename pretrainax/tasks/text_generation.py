"""Text to text: what a model writes after an input that a prefix or a template says the task of."""

import collections
import dataclasses
import string
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Optional

import numpy as np

from pretrainax.data.batch import Lengths
from pretrainax.data.objectives.spans import encoder_decoder_example, encoder_decoder_prompt
from pretrainax.data.preparation.shards import Encoded
from pretrainax.data.sources.base import Note, Record
from pretrainax.data.sources.records import value_of
from pretrainax.tasks import text_figures
from pretrainax.tasks.base import label_number, never_seen, text_in
from pretrainax.tasks.writing import WritingTask, predicting, reading


@dataclasses.dataclass
class TextGeneration(WritingTask):
    """A text from another one, as T5 has every task (Raffel et al. 2020, arXiv 1910.10683, section 2.4).

    With input="summarize: {document}" and target_field="summary" the record {"document": "It rains.", "summary":
    "Rain."} becomes, for a T5,

        encoder_tokens  summarize : It rains . </s>
        targets         Rain . </s>
        tokens          <pad> Rain .

    and for a decoder, with the loss on the answer alone,

        tokens        summarize : It rains . Rain .
        targets       :         It rains . Rain . </s>
        loss_weights  0         0  0     0 1    1 1

    What stands around both is what stood there in pretraining. A template's fields may be inside of others,
    "{translation.de}"; what comes after the last of them ("\\nTL;DR:") is kept where an input is too long, whose last
    field loses its end.

    With `labels`, the answer is the word of a label: input="sst2 sentence: {sentence}", target_field="label",
    labels=("negative", "positive"), as T5 has GLUE.
    """

    input: str = "{text}"  # what the model reads, with the names of fields in braces
    target_field: str = "target"  # the field of what it is to write
    labels: tuple[str, ...] = ()  # words of the classes, in the order of their numbers; (): any text
    # most tokens of a target, its end included. None: config.data.sequence_length; of a decoder, whose row has both,
    # half of it, and what an input leaves
    target_length: Optional[int] = None

    families: ClassVar[tuple[str, ...]] = ("encoder_decoder", "decoder")

    @property
    def fields(self) -> tuple[str, ...]:
        return (*(name for _, name, _, _ in string.Formatter().parse(self.input) if name), self.target_field)

    @property
    def figures(self) -> tuple[str, ...]:
        of_labels = ("label_accuracy", "no_label") if self.labels and self.answers != 0 else ()
        return (*of_labels, *super().figures)

    def read(self, record: Mapping) -> Record:
        pieces, last = [], 0
        for literal, name, _, _ in string.Formatter().parse(self.input):
            pieces.append(literal)
            if name is not None:
                pieces.append(text_in(record, name, "input"))
                last = len(pieces)
        if self.labels:
            value = value_of(record, self.target_field, "config.objective.target_field")
            target = self.labels[label_number(value, self.target_field, self.labels)]
        else:
            target = text_in(record, self.target_field, "target_field")
        if not target.strip():
            raise ValueError(f"field {self.target_field!r} is empty: there is nothing to write")
        return Record(("".join(pieces[:last]), "".join(pieces[last:]), target), {"answer": target})

    def encode(self, record, tokenizer):
        body, tail, target = record.texts
        source, begun, answer = tokenizer.encode_batch([body + tail, body, target])
        yield Encoded([source, answer], {**record.note, "tail": len(source) - common_start(source, begun)})

    def example(self, text, rng, vocabulary):
        source, target = self._kept(text)
        if self._model.family == "encoder_decoder":
            rows = [self._frame.around([ids])[0] for ids in (source, target)]
            return encoder_decoder_example(*rows, self._start(vocabulary))
        row = np.concatenate([self._frame.before, source, target, self._frame.after])
        is_answer = np.arange(len(row)) >= len(self._frame.before) + len(source)
        return predicting(row, is_answer)

    def prompt(self, tokens, vocabulary):
        if self._model.family == "encoder_decoder":
            return encoder_decoder_prompt(self._frame.around([tokens])[0], self._start(vocabulary))
        return reading(np.concatenate([self._frame.before, tokens]))

    def asked(self, text, vocabulary):
        return self.prompt(self._kept(text, answer=self.room_for_answer)[0], vocabulary)

    def _start(self, vocabulary) -> int:
        start = self.decoder_start(vocabulary)
        assert start is not None  # of a vocabulary with an end of text
        return start

    # --- lengths ------------------------------------------------------------------------------------------------------

    def _kept(self, text, answer: Optional[int] = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of input and target that there is room for; answer: tokens to leave for another target."""
        source, target = np.split(text.tokens, text.parts[:1])
        tail = text.note["tail"]
        first, last, rest = self._room(len(source) - tail, tail, len(target) if answer is None else answer)
        return np.concatenate([source[:first], source[len(source) - last :]]), target[:rest]

    def _room(self, body: int, tail: int, target: int) -> tuple[int, int, int]:
        """Returns how many tokens are kept, of those of the input to its last field, behind that, and of the target."""
        if self._model.family == "encoder_decoder":
            room = self._length - self._frame.count(1)
            target = min(target, (self.target_length or self._length) - self._frame.count(1))
        else:
            room = self._length + 1 - self._frame.count(1)  # the last token is not read
            most = max(room // 2, room - body - tail) if self.target_length is None else self.target_length - 1
            target = min(target, most, room)
            room -= target
        tail = min(tail, room)
        return min(body, room - tail), tail, target

    @property
    def room_for_answer(self) -> int:
        is_decoder = self._model.family == "decoder"
        return self.max_new_tokens or self.target_length or self._length // (2 if is_decoder else 1)

    def lengths(self, sequence_length: int) -> Lengths:
        if self._model.family == "decoder":
            return Lengths(sequence_length, sequence_length, sequence_length)
        targets = self.target_length or sequence_length
        return Lengths(sequence_length + targets, sequence_length, targets)

    def is_cut(self, encoded: Encoded) -> bool:
        source, target = map(len, encoded.parts)
        return any(self._loses(source, target, encoded.note["tail"]))

    def _loses(self, source: int, target: int, tail: int) -> tuple[bool, bool]:
        """Tells of which of input and target, of so many tokens, some are not kept."""
        first, last, rest = self._room(source - tail, tail, target)
        return first + last < source, rest < target

    def measure(self, raw: int) -> Lengths:
        """Returns lengths that no example exceeds."""
        length, most = raw + self._frame.count(1), self.lengths(self._length)
        return Lengths(raw, min(length, most.inputs), min(length, most.targets))

    # --- what is told -------------------------------------------------------------------------------------------------

    def metrics(self, answers, notes):
        truth = [note["answer"] for note in notes]
        of_labels = text_figures.of_labels(answers, truth, self.labels) if self.labels else {}
        return of_labels | super().metrics(answers, notes)

    def warnings(self, notes: Iterable[Note]) -> Iterator[str]:
        cut, count, said = np.zeros(2, int), 0, collections.Counter()
        for note in notes:
            source, end = note["parts"]
            cut += self._loses(source, end - source, note["tail"])
            count += 1
            said[note["answer"]] += 1
        if cut.any():
            yield (
                f"CUT TO THEIR ROOM: {cut[0]:,} inputs and {cut[1]:,} targets of {count:,} records lose their end: "
                "config.data.sequence_length and config.objective.target_length say how much there is"
            )
        yield from never_seen({i: said[label] for i, label in enumerate(self.labels)}, self.labels)

    def sample_note(self):
        return {"answer": "", "tail": 0}

    def field_problems(self):
        yield from super().field_problems()
        try:
            parsed = list(string.Formatter().parse(self.input))
        except ValueError as e:
            yield f"config.objective.input is {self.input!r}, which is no template ({e}): write braces as {{{{ and }}}}"
            return
        plain = all(name != "" and not spec and not form for _, name, spec, form in parsed)
        if not plain or not any(name for _, name, _, _ in parsed):
            example = "'summarize: {document}'"
            yield f"config.objective.input is {self.input!r}, it must name fields in braces, as {example}"
        if len(set(self.labels)) < len(self.labels):
            yield f"config.objective.labels is {self.labels}, a word stands there twice"
        if self.target_length is not None and self.target_length < 2:
            yield f"config.objective.target_length is {self.target_length}, it must be at least 2"


def common_start(a: np.ndarray, b: np.ndarray) -> int:
    """Returns how many ids two rows begin with that are the same."""
    same = a[: len(b)] == b[: len(a)]
    return len(same) if same.all() else int(same.argmin())
