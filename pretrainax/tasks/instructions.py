"""Implements instruction tuning: a decoder learns the assistant messages of conversations in a chat template."""

import collections
import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import ClassVar, Optional

import numpy as np

from pretrainax.config import UserError, nearest
from pretrainax.data.batch import Lengths
from pretrainax.data.preparation.shards import Encoded
from pretrainax.data.sources.base import Note, Record
from pretrainax.data.sources.records import value_of
from pretrainax.tasks import text_metrics
from pretrainax.tasks.base import text_in
from pretrainax.tasks.writing import WritingTask, answer_note, decoder_example, decoder_inputs
from pretrainax.tokenization.base import Tokenizer
from pretrainax.tokenization.chat import (
    PLAIN,
    Chat,
    Message,
    cached_chat,
    check_template,
    read_template,
    write_template,
)

_SYSTEM = ("system", "developer")
_ROLES = (*_SYSTEM, "user", "assistant", "tool")
# The parts of a message that templates render, but this task does not read.
_UNREAD = ("tool_calls", "function_call", "reasoning_content", "thinking")


def _is_empty(value: object) -> bool:
    return value is None or value is False or (isinstance(value, Sized) and not len(value))  # also for Parquet's arrays


@dataclasses.dataclass
class Instructions(WritingTask):
    """Trains a decoder on conversations, with a loss only for assistant messages and their end-of-turn tokens.

    Sources: Wei et al. 2021, arXiv 2109.01652; Ouyang et al. 2022, arXiv 2203.02155.

    A record has a list of messages of any length, {"messages": [{"role": "user", "content": "Hi"}, {"role":
    "assistant", "content": "Hello"}]}. With messages_field=None, a record has the fields of Alpaca (Taori et al. 2023):
    instruction and input form the user's message, and output is the assistant's message. With ChatML as the template,
    the record above becomes

        tokens        <|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎     Hello      <|im_end|>
        targets       user         ⏎ Hi  … ⏎ <|im_start|> assistant    ⏎         Hello <|im_end|> ⏎
        loss_weights  0            0 0   … 0 0            0            0         1     1          0

    The token ids equal the output of transformers' apply_chat_template. If `template` is None, the task uses the
    template of the tokenizer in `config.tokenizer.path`. If this tokenizer has no template, the format is plain text
    ("User:", a new line, …). An export writes the template to tokenizer_config.json. Conversations are truncated to
    config.data.sequence_length.
    """

    messages_field: Optional[str] = "messages"  # the field of the list of messages; None: use the next three fields
    instruction_field: str = "instruction"  # the field of the user's instruction
    input_field: Optional[str] = "input"  # the field of the input, which may be empty or missing; None: no input
    output_field: str = "output"  # the field of the answer
    template: Optional[str] = None  # Jinja template, like chat_template in tokenizer_config.json; None: see above

    families: ClassVar[tuple[str, ...]] = ("decoder",)
    _tokenizer: ClassVar[Optional[Tokenizer]] = None  # set by `bind`

    @property
    def fields(self) -> tuple[str, ...]:
        if self.messages_field is not None:
            return (self.messages_field,)
        return tuple(filter(None, (self.instruction_field, self.input_field, self.output_field)))

    @property
    def optional_fields(self) -> tuple[str, ...]:
        return () if self.input_field is None else (self.input_field,)

    def complete(self, experiment) -> None:
        super().complete(experiment)
        path = getattr(experiment.tokenizer, "path", None)
        if self.template is None and path is not None and os.path.isdir(os.path.expanduser(path)):
            self.template = read_template(os.path.expanduser(path))

    def bind(self, tokenizer):
        task = super().bind(tokenizer)
        task._tokenizer = tokenizer  # pyright: ignore[reportAttributeAccessIssue]
        return task

    @property
    def _chat(self) -> Chat:
        """Returns the template for the bound tokenizer; `plan` binds a tokenizer of bytes, which has no template."""
        assert self._tokenizer is not None
        return cached_chat(self.template or PLAIN, self._tokenizer)

    def read(self, record: Mapping) -> Record:
        messages = (
            self._alpaca_messages(record)
            if self.messages_field is None
            else self._read_messages(record, self.messages_field)
        )
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        if not answers:
            raise ValueError("no message is of the assistant: there is no answer to learn")
        if any(not answer.strip() for answer in answers):
            raise ValueError("an answer of the assistant is empty")
        note = {"roles": [message["role"] for message in messages], **answer_note(answers[-1])}
        return Record(tuple(message["content"] for message in messages), note)

    def _alpaca_messages(self, record: Mapping) -> list[Message]:
        instruction = text_in(record, self.instruction_field, "instruction_field")
        if self.input_field is not None:
            try:
                has_input = not _is_empty(value_of(record, self.input_field, ""))
            except ValueError:  # the record has no such field
                has_input = False
            if has_input:
                instruction += "\n\n" + text_in(record, self.input_field, "input_field")
        answer = text_in(record, self.output_field, "output_field")
        return [{"role": "user", "content": instruction}, {"role": "assistant", "content": answer}]

    def _read_messages(self, record: Mapping, field: str) -> list[Message]:
        """Reads the list of messages of a record; raises ValueError if the list or a message is invalid."""
        values, messages = value_of(record, field, "config.objective.messages_field"), []
        if not isinstance(values, (list, tuple, np.ndarray)) or not len(values):
            raise ValueError(f"field {field!r} holds {type(values).__name__}, it must be a list of messages, not empty")
        for number, message in enumerate(values, 1):
            role, content = (message.get(key) if isinstance(message, Mapping) else None for key in ("role", "content"))
            if not isinstance(role, str) or not isinstance(content, str):
                raise ValueError(
                    f"message {number} of field {field!r} must be an object with strings 'role' and 'content'"
                )
            if role not in _ROLES:
                raise ValueError(f"message {number} of field {field!r} has the role {role!r}, {nearest(role, _ROLES)}")
            if unread := [key for key in _UNREAD if not _is_empty(message.get(key))]:
                raise ValueError(
                    f"message {number} of field {field!r} has {unread[0]!r}, which the template does not receive: "
                    "write it into 'content', as the template formats it"
                )
            if role == "assistant" and message.get("weight") not in (None, 1):  # OpenAI's format for fine-tuning
                raise ValueError(
                    f"message {number} of field {field!r} has the weight {message['weight']!r}, but all answers are "
                    "trained: end the conversation before this message, or remove its weight"
                )
            messages.append({"role": role, "content": content})
        return messages

    def encode(self, record, tokenizer):
        roles = record.note["roles"]
        messages = [{"role": r, "content": text} for r, text in zip(roles, record.texts, strict=True)]
        ids, is_answer = cached_chat(self.template or PLAIN, tokenizer).encode(messages)
        # The parts of the document alternate between prompts and answers.
        boundaries = np.flatnonzero(np.diff(is_answer, prepend=False))
        yield Encoded(np.split(ids, boundaries), {"answer": record.note["answer"]})

    def example(self, text, rng, vocabulary):
        is_answer = np.zeros(len(text.tokens), bool)
        for start, end in _answer_ranges(text.parts, len(text.tokens)):
            is_answer[start:end] = True
        return decoder_example(text.tokens[: self._length + 1], is_answer[: self._length + 1])

    def prompt(self, tokens, vocabulary):
        return decoder_inputs(tokens)

    def prompt_example(self, text, vocabulary):
        """Builds a decoder example without targets from all tokens before the last answer of a conversation.

        If these tokens and `answer_capacity` generated tokens do not fit into a row, tokens are dropped from the start.
        """
        *_, (start, _) = _answer_ranges(text.parts, len(text.tokens))
        capacity = max(self._length - self.answer_capacity, 1)
        return decoder_inputs(text.tokens[max(start - capacity, 0) : start])

    @property
    def answer_capacity(self) -> int:
        return self.max_new_tokens or self._length // 2

    @property
    def stop(self):
        return (self._chat.end_before_text,) if self._chat.end_before_text else ()

    @property
    def end_id(self) -> Optional[int]:
        """The special token, other than the end of the text, that ends an answer."""
        return self._chat.end_id

    def lengths(self, sequence_length: int) -> Lengths:
        return Lengths(sequence_length, sequence_length, sequence_length)

    def measure(self, raw: int) -> Lengths:
        """Computes upper bounds on the lengths of an example, given `raw`, the number of tokens in the document."""
        length = min(max(raw - 1, 1), self._length)
        return Lengths(raw, length, length)

    def is_cut(self, encoded: Encoded) -> bool:
        return sum(map(len, encoded.parts)) > self._length + 1

    def sample_note(self):
        return {"answer": ""}

    def group(self, record: Record) -> str:
        """Returns the first text that is not a system message; all conversations may have the same system message."""
        texts = (text for role, text in zip(record.note["roles"], record.texts, strict=True) if role not in _SYSTEM)
        return next(filter(str.strip, texts))

    def corpus_settings(self):
        return super().corpus_settings() | {"by_group": True}  # earlier versions split by the system message

    def source_text(self, record: Record) -> str:
        """Returns the last message before the last answer of the assistant."""
        roles = record.note["roles"]
        last = len(roles) - 1 - roles[::-1].index("assistant")
        return record.texts[last - 1] if last else ""

    def save_assets(self, tokenizer_folder):
        write_template(tokenizer_folder, self.template or PLAIN)

    def field_problems(self):
        yield from super().field_problems()
        if self.template is not None and "{{" not in self.template:  # a name or a file, which Jinja renders as itself
            yield (
                f"config.objective.template is {self.template[:80]!r}, which writes no message: set it to the text of "
                "a Jinja template, as in chat_template.jinja"
            )
        try:
            check_template(self.template or PLAIN)
        except UserError as e:
            yield str(e)

    def warnings(self, notes: Iterable[Note]) -> Iterator[str]:
        if self._chat.lacking:
            yield (
                f"MISSING SPECIAL TOKENS: the vocabulary lacks {', '.join(self._chat.lacking)} of "
                "config.objective.template; the model reads each of them as several text tokens"
            )
        yield from self._stop_warnings(self._chat)
        num_cut, no_answer, count, wordless = 0, 0, 0, collections.Counter()
        for note in notes:
            ends = note["parts"]
            num_cut += ends[-1] > self._length + 1
            no_answer += all(start > self._length for start, _ in _answer_ranges(ends, ends[-1]))
            count += 1
            wordless.update(text_metrics.wordless_scores(note["answer"], self.scores))
        yield from text_metrics.wordless_warnings(wordless, count)
        if num_cut:
            yield (
                f"TRUNCATED CONVERSATIONS: {num_cut:,} of {count:,} lose their end, and {no_answer:,} of them all "
                f"answers: config.data.sequence_length is {self._length}"
            )

    def _stop_warnings(self, chat: Chat) -> Iterator[str]:
        """Yields a warning if an exported model would not stop after an answer."""
        if not chat.end_of_turn:
            yield (
                "ANSWERS HAVE NO END in config.objective.template, so generation does not stop after them: use a "
                "template that ends answers with eos_token"
            )
        elif chat.end_of_turn != chat.end_of_text and chat.end_id is None:
            yield (
                f"ANSWERS END WITH {chat.end_of_turn!r}, which is not one special token: exported models stop only at "
                f"{chat.end_of_text!r}; use a config.objective.template that ends answers with eos_token"
            )


def _answer_ranges(ends: Iterable[int], length: int) -> list[tuple[int, int]]:
    """Computes the token range (start, end) of each non-empty answer in a document.

    Args:
      ends: end offset of each part of the document; the parts alternate between prompts and answers.
      length: number of tokens of the document.
    """
    bounds = [0, *map(int, ends), length]
    return [
        token_range
        for i, token_range in enumerate(itertools.pairwise(bounds))
        if i % 2 and token_range[0] < token_range[1]
    ]
