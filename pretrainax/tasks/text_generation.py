"""Implements text-to-text tasks: the model reads an input text, filled into a template, and generates a target text."""

import collections
import dataclasses
import string
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Optional

import numpy as np

from pretrainax.data.batch import Lengths
from pretrainax.data.framing import special_token_frame
from pretrainax.data.objectives.spans import encoder_decoder_example, encoder_decoder_prompt
from pretrainax.data.preparation.shards import Encoded
from pretrainax.data.sources.base import Note, Record
from pretrainax.data.sources.records import value_of
from pretrainax.files.errors import counted
from pretrainax.tasks import text_metrics
from pretrainax.tasks.base import text_in
from pretrainax.tasks.baselines import Baseline, bag_of_words_classifier
from pretrainax.tasks.labels import label_number, unused_label_warnings
from pretrainax.tasks.writing import WritingTask, answer_note, decoder_example, decoder_inputs


@dataclasses.dataclass
class TextGeneration(WritingTask):
    """Generates a target text from an input text, as in T5 (Raffel et al. 2020, arXiv 1910.10683, section 2.4).

    With input="summarize: {document}" and target_field="summary" the record {"document": "It rains.", "summary":
    "Rain."} becomes, for a T5,

        encoder_tokens  summarize : It rains . </s>
        targets         Rain . </s>
        tokens          <pad> Rain .

    and for a decoder, with a loss only for the target,

        tokens        summarize : It rains . Rain .
        targets       :         It rains . Rain . </s>
        loss_weights  0         0  0     0 1    1 1

    Input and target have the same special tokens as in pretraining. A template can contain nested fields,
    "{translation.de}". If an input is too long, the text up to the end of its last field is truncated. The text after
    that field (for example "\\nTL;DR:") remains.

    With `labels`, the target is the name of a label, as in T5's format of GLUE: input="sst2 sentence: {sentence}",
    target_field="label", labels=("negative", "positive").
    """

    input: str = "{text}"  # template of the model input, with names of record fields in braces
    target_field: str = "target"  # the field of the target text or, with `labels`, of the label
    labels: tuple[str, ...] = ()  # names of the classes, in the order of their numbers; (): any target text
    # maximum number of tokens of a target, EOS included. None: config.data.sequence_length for an encoder-decoder. For
    # a decoder, whose row contains input and target, None: half of the row, or more if the input leaves more room
    target_length: Optional[int] = None

    families: ClassVar[tuple[str, ...]] = ("encoder_decoder", "decoder")

    @property
    def fields(self) -> tuple[str, ...]:
        return (*(name for _, name, _, _ in string.Formatter().parse(self.input) if name), self.target_field)

    def filled_template(self, text: str) -> str:
        """Returns the template with `text` in place of each field."""
        pieces = string.Formatter().parse(self.input)
        return "".join(literal + text * (name is not None) for literal, name, _, _ in pieces)

    @property
    def packages(self) -> tuple[str, ...]:
        return (*super().packages, *(("sklearn",) if self.labels else ()))

    @property
    def metric_names(self) -> tuple[str, ...]:
        label_metrics = ("label_accuracy", "no_label") if self.labels and self.answers != 0 else ()
        return (*label_metrics, *super().metric_names)

    def read(self, record: Mapping) -> Record:
        strings, body_size = [], 0
        for literal, name, _, _ in string.Formatter().parse(self.input):
            strings.append(literal)
            if name is not None:
                strings.append(text_in(record, name, "input"))
                body_size = len(strings)
        if self.labels:
            value = value_of(record, self.target_field, "config.objective.target_field")
            target = self.labels[label_number(value, self.target_field, self.labels)]
        else:
            target = text_in(record, self.target_field, "target_field")
        if not target.strip():
            raise ValueError(f"field {self.target_field!r} is empty: there is nothing to generate")
        return Record(("".join(strings[:body_size]), "".join(strings[body_size:]), target), answer_note(target))

    def encode(self, record, tokenizer):
        body, tail, target = record.texts
        source, source_body, answer = tokenizer.encode_batch([body + tail, body, target])
        yield Encoded([source, answer], {**record.note, "tail": len(source) - common_start(source, source_body)})

    def example(self, text, rng, vocabulary):
        source, target = self._truncate(text)
        if self._model.family == "encoder_decoder":
            source_row, target_row = self._frame.wrap([source])[0], self._target_frame.wrap([target])[0]
            return encoder_decoder_example(source_row, target_row, self._start_token(vocabulary))
        frame = self._target_frame.single
        row = np.concatenate([frame.before, source, target, frame.after])
        is_answer = np.arange(len(row)) >= len(frame.before) + len(source)
        return decoder_example(row, is_answer)

    def prompt(self, tokens, vocabulary):
        if self._model.family == "encoder_decoder":
            return encoder_decoder_prompt(self._frame.wrap([tokens])[0], self._start_token(vocabulary))
        return decoder_inputs(np.concatenate([self.prompt_start(vocabulary), tokens]))

    def prompt_start(self, vocabulary):
        return special_token_frame("decoder", vocabulary).single.before

    def prompt_example(self, text, vocabulary):
        return self.prompt(self._truncate(text, answer=self.answer_capacity)[0], vocabulary)

    def _start_token(self, vocabulary) -> int:
        start = self.decoder_start(vocabulary)
        assert start is not None  # because the vocabulary has an EOS token
        return start

    # --- lengths ------------------------------------------------------------------------------------------------------

    def _truncate(self, text, answer: Optional[int] = None) -> tuple[np.ndarray, np.ndarray]:
        """Truncates the token ids of input and target to the row length.

        Args:
          answer: number of tokens to reserve for a generated answer. The default is the length of the target.
        """
        source, target = np.split(text.tokens, text.parts[:1])
        tail = text.note["tail"]
        body_length, tail_length, target_length = self._truncated_lengths(
            len(source) - tail, tail, len(target) if answer is None else answer
        )
        return np.concatenate([source[:body_length], source[len(source) - tail_length :]]), target[:target_length]

    def _truncated_lengths(self, body: int, tail: int, target: int) -> tuple[int, int, int]:
        """Computes the lengths (body, tail, target) after truncation, given a record's lengths in tokens.

        Args:
          body: length of the input up to the end of its last field.
          tail: length of the rest of the input.
          target: length of the target.
        """
        if self._model.family == "encoder_decoder":
            capacity = self._length - self._frame.count(1)
            target = min(target, (self.target_length or self._length) - self._target_frame.count(1))
        else:
            capacity = self._length + 1 - self._target_frame.count(1)  # the last token is only a target
            max_target = (
                max(capacity // 2, capacity - body - tail) if self.target_length is None else self.target_length - 1
            )
            target = min(target, max_target, capacity)
            capacity -= target
        tail = min(tail, capacity)
        return min(body, capacity - tail), tail, target

    @property
    def answer_capacity(self) -> int:
        is_decoder = self._model.family == "decoder"
        return self.max_new_tokens or self.target_length or self._length // (2 if is_decoder else 1)

    def lengths(self, sequence_length: int) -> Lengths:
        if self._model.family == "decoder":
            return Lengths(sequence_length, sequence_length, sequence_length)
        targets = self.target_length or sequence_length
        return Lengths(sequence_length + targets, sequence_length, targets)

    def is_cut(self, encoded: Encoded) -> bool:
        source, target = map(len, encoded.parts)
        return any(self._is_truncated(source, target, encoded.note["tail"]))

    def _is_truncated(self, source: int, target: int, tail: int) -> tuple[bool, bool]:
        """Checks whether the input and the target of a record with these lengths in tokens are truncated.

        `source` is the length of the input, which includes its last `tail` tokens.
        """
        body_length, tail_length, target_length = self._truncated_lengths(source - tail, tail, target)
        return body_length + tail_length < source, target_length < target

    def measure(self, raw: int) -> Lengths:
        """Computes upper bounds on the lengths of an example, given `raw`, the number of tokens in the document."""
        length, maximum = raw + self._target_frame.count(1), self.lengths(self._length)
        return Lengths(raw, min(length, maximum.inputs), min(length, maximum.targets))

    # --- metrics and messages -----------------------------------------------------------------------------------------

    def metrics(self, answers, notes):
        truth = [note["answer"] for note in notes]
        label_metrics = text_metrics.label_accuracy(answers, truth, self.labels) if self.labels else {}
        return label_metrics | super().metrics(answers, notes)

    def source_text(self, record: Record) -> str:
        body, tail, _ = record.texts
        return body + tail

    def baselines(self, train, valid, notes):
        if not self.labels:
            yield from super().baselines(train, valid, notes)
            return
        constant, _ = super().baselines(train, valid, notes)
        yield constant
        labels = np.eye(len(self.labels))[[self.labels.index(record.note["answer"]) for record in train]]
        if (labels != labels[0]).any():
            texts, valid_texts = ([(self.source_text(record),) for record in records] for records in (train, valid))
            logits = bag_of_words_classifier(texts, labels, valid_texts, is_multi_label=False)
            yield Baseline("bag of words", [self.labels[i] for i in logits.argmax(1)], has_loss=False)

    def warnings(self, notes: Iterable[Note]) -> Iterator[str]:
        num_cut, count, targets, wordless = np.zeros(2, int), 0, collections.Counter(), collections.Counter()
        for note in notes:
            source, length = note["parts"]
            num_cut += self._is_truncated(source, length - source, note["tail"])
            count += 1
            targets[note["answer"]] += 1
            wordless.update(text_metrics.wordless_scores(note["answer"], self.scores))
        if num_cut.any():
            remedy = " or config.objective.target_length" if num_cut[1] else ""  # it shortens a decoder's inputs
            inputs, targets_cut = counted(num_cut[0], "input"), counted(num_cut[1], "target")
            yield (
                f"TRUNCATED RECORDS: {inputs} and {targets_cut} of {counted(count, 'record')} lose their end; "
                f"raise config.data.sequence_length{remedy}"
            )
        yield from text_metrics.wordless_warnings(wordless, count)
        yield from unused_label_warnings({i: targets[label] for i, label in enumerate(self.labels)}, self.labels)

    def sample_note(self):
        return {"answer": "", "tail": 0}

    def field_problems(self):
        yield from super().field_problems()
        try:
            parsed = list(string.Formatter().parse(self.input))
        except ValueError as e:
            yield f"config.objective.input is {self.input!r}, which is no template ({e}): write braces as {{{{ and }}}}"
            return
        is_plain = all(name != "" and not spec and not conversion for _, name, spec, conversion in parsed)
        if not is_plain or not any(name for _, name, _, _ in parsed):
            example = "'summarize: {document}'"
            yield f"config.objective.input is {self.input!r}, it must name fields in braces, as {example}"
        if len(set(self.labels)) < len(self.labels):
            yield f"config.objective.labels is {self.labels}, but each word must occur only once"
        if self.target_length is not None and self.target_length < 2:
            yield f"config.objective.target_length is {self.target_length}, it must be at least 2"


def common_start(a: np.ndarray, b: np.ndarray) -> int:
    """Computes the length of the longest common prefix of two arrays of token ids."""
    same = a[: len(b)] == b[: len(a)]
    return len(same) if same.all() else int(same.argmin())
