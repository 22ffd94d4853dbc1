"""Applies chat templates: renders a conversation as text and marks the tokens of the assistant's answers."""

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

# Template for vocabularies without role tokens: roles are plain text, and an answer ends with the EOS token.
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
_TEMPLATE_FILE = "chat_template.jinja"  # as in transformers
_TOKEN = re.compile(r"<\|\w+\|>|<\w+_of_\w+>")  # strings in a template that look like special tokens

Message = Mapping[str, str]  # {"role": …, "content": …}


class Rendered(NamedTuple):
    """A conversation as text, and the positions of the assistant's answers in the text."""

    text: str
    answers: list[tuple[int, int]]  # (index of the first character, index after the last character) of each answer


class Chat:
    """Encodes conversations with a Jinja chat template and a tokenizer.

    The template has the format of `chat_template` in the tokenizer_config.json of transformers. Special tokens in the
    rendered text are encoded as special ids, even within a message, as in transformers' apply_chat_template.
    """

    def __init__(self, template: str, tokenizer: Tokenizer):
        check_template(template)
        self._template, self.marks_answers = template, "{% generation" in template.replace("{%-", "{%")
        pieces, vocabulary = tokenizer.special_pieces, tokenizer.vocabulary
        named = {f"{field}_token": getattr(vocabulary, field) for field in FIELDS}
        self._tokens = {name: pieces[i] for name, i in named.items() if i is not None}
        self.end_of_text = pieces.get(vocabulary.separator, "")  # generation stops at this piece; "": no such piece
        self._encoder = tokenizers.Tokenizer.from_str(tokenizer_json(tokenizer).decode())
        added = {token.content for token in self._encoder.get_added_tokens_decoder().values()}
        self.lacking = sorted(set(_TOKEN.findall(template)) - added - set(pieces.values()))

    def encode(self, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of a conversation, int32 [n], and a mask of the assistant's answers, bool [n].

        Raises:
          UserError: the template raises an error for the conversation, or the positions of the answers are unknown.
        """
        text, answers = self.render(messages)
        encoded = self._encoder.encode(text, add_special_tokens=False)
        offsets = np.array(encoded.offsets, np.int64).reshape(-1, 2)
        is_answer = np.zeros(len(offsets), bool)
        for start, end in answers:
            is_answer |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
        return np.array(encoded.ids, np.int32), is_answer

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Returns a conversation as text, and the positions of its answers, end-of-turn tokens included.

        A template can mark answers with {% generation %}. For a template without these marks, the positions are
        computed by rendering the conversation up to the start and up to the end of each answer.
        """
        if self.marks_answers:
            return _split_marks(*self._rendered(messages, [(len(messages), False)]))
        of_assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        parts = [part for i in of_assistant for part in ((i, True), (i + 1, False))]
        whole, *texts = self._rendered(messages, [(len(messages), False), *parts])
        answers = []
        for i, before, after in zip(of_assistant, texts[::2], texts[1::2], strict=True):
            if not (after.startswith(before) and whole.startswith(after)):
                raise UserError(
                    "config.objective.template renders the start of a conversation differently than the whole: put "
                    f"{{% generation %}} around the answers in it ({_described(messages)})"
                )
            answer = after[len(before) :]
            # White space after an end-of-turn token is not part of the answer.
            has_end = not answer.rstrip().endswith(messages[i]["content"].rstrip())
            answers.append((len(before), len(before) + len(answer.rstrip() if has_end else answer)))
        return Rendered(whole, answers)

    def end_of_turn(self) -> str:
        """Returns the piece of the last token of an answer, for example "<|im_end|>"."""
        ids, is_answer = self.encode([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        return self._encoder.id_to_token(int(ids[is_answer][-1])) or ""

    def _rendered(self, messages: Sequence[Message], parts: Sequence[tuple[int, bool]]) -> list[str]:
        """Renders prefixes of a conversation; returns one string per prefix.

        Args:
          messages: the whole conversation.
          parts: for each prefix, (number of messages, True to add the generation prompt at the end).
        """
        requests = [
            {"messages": [*messages[:count]], "add_generation_prompt": has_prompt, **self._tokens}
            for count, has_prompt in parts
        ]
        try:
            return _renderer().call("config.objective.template", template=self._template, requests=requests)
        except UserError as e:
            raise UserError(f"{e}: {_described(messages)}") from e


@functools.lru_cache(maxsize=2)
def cached_chat(template: str, tokenizer: Tokenizer) -> Chat:
    """Returns the `Chat` of a template and a tokenizer, cached for the two latest pairs."""
    return Chat(template, tokenizer)


def check_template(template: str) -> None:
    """Raises UserError if `template` is not a valid Jinja template."""
    _renderer().call("config.objective.template", template=template, requests=[])


@functools.cache
def _renderer() -> Confined:
    """Returns the confined process that renders templates, which are untrusted code."""
    return Confined(chat_templates.__file__, "render", seconds=10, gib=1)


def read_template(directory: str) -> Optional[str]:
    """Returns the chat template of a Hugging Face directory or of the tokenizer directory of a run.

    Returns None if the directory has no template. If the directory has several named templates, returns the template
    with the name "default".

    Raises:
      UserError: a file cannot be read.
    """
    template_file, config = (os.path.join(directory, name) for name in (_TEMPLATE_FILE, "tokenizer_config.json"))
    if os.path.isfile(template_file):
        return read_bytes(template_file).decode("utf-8", "replace")
    value = read_object(config).get("chat_template") if os.path.isfile(config) else None
    if isinstance(value, list):
        value = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}.get("default")
    return value if isinstance(value, str) else None


def write_template(directory: str, template: str) -> None:
    """Writes a chat template to the directory of a tokenizer, where `read_template` finds it."""
    write_atomically(os.path.join(directory, _TEMPLATE_FILE), template)


def _split_marks(text: str) -> Rendered:
    """Removes the characters BEGIN and END around answers from a rendered text; returns text and answer positions."""
    parts, answers, length = re.split(f"{chat_templates.BEGIN}(.*?){chat_templates.END}", text, flags=re.DOTALL), [], 0
    for i, part in enumerate(parts):
        answers += [(length, length + len(part))] if i % 2 else []
        length += len(part)
    return Rendered("".join(parts), answers)


def _described(messages: Sequence[Message]) -> str:
    return f"the conversation that begins with {messages[0]['content'][:60]!r}" if messages else "no conversation"
