"""Chat templates: a conversation as the text that a model is trained on, and which of its tokens are answers."""

import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

import numpy as np
import tokenizers

from pretrainax.config import UserError
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import read_object
from pretrainax.files.regular_files import read_bytes
from pretrainax.runtime.confined import Confined
from pretrainax.tokenization import chat_templates
from pretrainax.tokenization.base import Tokenizer
from pretrainax.tokenization.huggingface import FIELDS
from pretrainax.tokenization.tokenizer_json import tokenizer_json

# For vocabularies without tokens of roles: these are plain text, and an answer ends with the end of a text.
PLAIN = """\
{% for message in messages %}
{{ message['role'] | capitalize + ':\n' }}
{%- if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{% else %}
{{- message['content'] }}
{%- endif %}
{{ '\n\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ 'Assistant:\n' }}
{%- endif %}
"""
_ALONE = "chat_template.jinja"  # the file that transformers writes it to
_TOKEN = re.compile(r"<\|\w+\|>|<\w+_of_\w+>")  # what looks like a token of its own in a template

Message = Mapping[str, str]  # {"role": …, "content": …}


class Rendered(NamedTuple):
    """A conversation as text, and where its answers begin and end."""

    text: str
    answers: list[tuple[int, int]]


class Chat:
    """A template in Jinja, as `chat_template` of transformers' tokenizer_config.json, for a tokenizer.

    Special tokens in the text are ids of their own, as in transformers' apply_chat_template, also within a message.
    """

    def __init__(self, template: str, tokenizer: Tokenizer):
        check_template(template)
        self._template, self.marks_answers = template, "{% generation" in template.replace("{%-", "{%")
        pieces, vocabulary = tokenizer.special_pieces, tokenizer.vocabulary
        named = {f"{field}_token": getattr(vocabulary, field) for field in FIELDS}
        self._tokens = {name: pieces[i] for name, i in named.items() if i is not None}
        self.end_of_text = pieces.get(vocabulary.separator, "")  # where generation ends
        self._encoder = tokenizers.Tokenizer.from_str(tokenizer_json(tokenizer).decode())
        added = {token.content for token in self._encoder.get_added_tokens_decoder().values()}
        self.lacking = sorted(set(_TOKEN.findall(template)) - added - set(pieces.values()))

    def encode(self, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of a conversation, int32 [n], and which of them are of answers, bool [n].

        Raises:
          UserError: the template refuses the conversation, or does not tell where its answers are.
        """
        text, answers = self.render(messages)
        encoded = self._encoder.encode(text, add_special_tokens=False)
        offsets = np.array(encoded.offsets, np.int64).reshape(-1, 2)
        is_answer = np.zeros(len(offsets), bool)
        for start, end in answers:
            is_answer |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
        return np.array(encoded.ids, np.int32), is_answer

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Returns the text of a conversation, with the end of the turn in each answer.

        A template that says what is an answer, by {% generation %}, is believed. Of another one the answers are found
        by rendering the conversation up to each of them, and up to its end.
        """
        if self.marks_answers:
            return _unmarked(*self._rendered(messages, [(len(messages), False)]))
        of_assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        parts = [part for i in of_assistant for part in ((i, True), (i + 1, False))]
        whole, *texts = self._rendered(messages, [(len(messages), False), *parts])
        answers = []
        for i, before, after in zip(of_assistant, texts[::2], texts[1::2], strict=True):
            if not (after.startswith(before) and whole.startswith(after)):
                raise UserError(
                    "config.objective.template renders the beginning of a conversation otherwise than the whole: put "
                    f"{{% generation %}} around what answers are in it ({_shown(messages)})"
                )
            turn = after[len(before) :]
            has_end = not turn.rstrip().endswith(messages[i]["content"].rstrip())  # behind which white space is none
            answers.append((len(before), len(before) + len(turn.rstrip() if has_end else turn)))
        return Rendered(whole, answers)

    def end_of_turn(self) -> str:
        """Returns the last token of an answer, as it is written."""
        ids, is_answer = self.encode([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        return self._encoder.id_to_token(int(ids[is_answer][-1])) or ""

    def _rendered(self, messages: Sequence[Message], parts: Sequence[tuple[int, bool]]) -> list[str]:
        """Returns the text of parts of a conversation: so many of its messages, and whether the next is prompted."""
        requests = [
            {"messages": [*messages[:count]], "add_generation_prompt": prompted, **self._tokens}
            for count, prompted in parts
        ]
        try:
            return _renderer().call("config.objective.template", template=self._template, requests=requests)
        except UserError as e:
            raise UserError(f"{e}: {_shown(messages)}") from e


@functools.lru_cache(maxsize=2)
def chat_of(template: str, tokenizer: Tokenizer) -> Chat:
    """Returns the same object for the same template and tokenizer."""
    return Chat(template, tokenizer)


def check_template(template: str) -> None:
    """Raises UserError where a template is none."""
    _renderer().call("config.objective.template", template=template, requests=[])


@functools.cache
def _renderer() -> Confined:
    """Returns the process that renders templates, which come from others."""
    return Confined(chat_templates.__file__, "render", seconds=10, gib=1)


def read_template(directory: str) -> Optional[str]:
    """Returns the chat template of a Hugging Face directory, or of the tokenizer of a run; None where it has none.

    Of several with names it is the default one.

    Raises:
      UserError: a file of it that cannot be read.
    """
    alone, config = (os.path.join(directory, name) for name in (_ALONE, "tokenizer_config.json"))
    if os.path.isfile(alone):
        return read_bytes(alone).decode("utf-8", "replace")
    found = read_object(config).get("chat_template") if os.path.isfile(config) else None
    if isinstance(found, list):
        found = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}.get("default")
    return found if isinstance(found, str) else None


def write_template(directory: str, template: str) -> None:
    """Puts a chat template beside a tokenizer, where `read_template` finds it."""
    write_atomically(os.path.join(directory, _ALONE), template)


def _unmarked(text: str) -> Rendered:
    """Returns a text without the marks around its answers, and where these are."""
    parts, answers, length = re.split(f"{chat_templates.BEGIN}(.*?){chat_templates.END}", text, flags=re.DOTALL), [], 0
    for i, part in enumerate(parts):
        answers += [(length, length + len(part))] if i % 2 else []
        length += len(part)
    return Rendered("".join(parts), answers)


def _shown(messages: Sequence[Message]) -> str:
    return f"the conversation that begins with {messages[0]['content'][:60]!r}" if messages else "no conversation"
