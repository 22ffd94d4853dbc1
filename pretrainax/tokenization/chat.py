"""Applies chat templates: renders conversations as text, and finds the tokens of the assistant's answers."""

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
    """A conversation rendered as text, and the character spans of the assistant's answers."""

    text: str
    answers: list[tuple[int, int]]  # (index of the first character, index after the last character) of each answer


class Chat:
    """Encodes conversations with a Jinja chat template and a tokenizer.

    The template has the format of `chat_template` in the tokenizer_config.json of transformers. Special tokens in the
    rendered text are encoded as special ids, even within a message, as in apply_chat_template of transformers.
    """

    def __init__(self, template: str, tokenizer: Tokenizer):
        check_template(template)
        self._template, self.marks_answers = template, "{% generation" in template.replace("{%-", "{%")
        pieces, vocabulary = tokenizer.special_pieces, tokenizer.vocabulary
        special_ids = {f"{field}_token": getattr(vocabulary, field) for field in FIELDS}
        self._tokens = {name: pieces[i] for name, i in special_ids.items() if i is not None}
        self.end_of_text = pieces.get(vocabulary.separator, "")  # piece at which generation stops; "": none
        self._encoder = tokenizers.Tokenizer.from_str(tokenizer_json(tokenizer).decode())
        added_tokens = {token.content for token in self._encoder.get_added_tokens_decoder().values()}
        self.lacking = sorted(set(_TOKEN.findall(template)) - added_tokens - set(pieces.values()))

    def encode(self, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token ids of a conversation, int32 [T], and a mask of the assistant's answers, bool [T].

        Raises:
          UserError: the template raises an error for the conversation, or the answers cannot be located in the text.
        """
        text, answers = self.render(messages)
        encoding = self._encoder.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        is_answer = np.zeros(len(offsets), bool)
        for start, end in answers:
            is_answer |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
        return np.array(encoding.ids, np.int32), is_answer

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Renders a conversation as text; returns the text and the character spans of the answers.

        The spans include end-of-turn tokens. A template can mark answers with {% generation %}. For templates without
        these marks, the spans are found by rendering the conversation up to the start and up to the end of each answer.
        """
        if self.marks_answers:
            return _parse_marks(*self._render_prefixes(messages, [(len(messages), False)]))
        assistant_turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        prefixes = [prefix for i in assistant_turns for prefix in ((i, True), (i + 1, False))]
        full_text, *prefix_texts = self._render_prefixes(messages, [(len(messages), False), *prefixes])
        answers = []
        for i, text_before, text_with_answer in zip(
            assistant_turns, prefix_texts[::2], prefix_texts[1::2], strict=True
        ):
            if not (text_with_answer.startswith(text_before) and full_text.startswith(text_with_answer)):
                raise UserError(
                    "config.objective.template renders the start of a conversation differently than the whole: put "
                    f"{{% generation %}} around the answers in it ({_describe(messages)})"
                )
            answer = text_with_answer[len(text_before) :]
            # White space after an end-of-turn token is not part of the answer.
            has_end = not answer.rstrip().endswith(messages[i]["content"].rstrip())
            answers.append((len(text_before), len(text_before) + len(answer.rstrip() if has_end else answer)))
        return Rendered(full_text, answers)

    def end_of_turn(self) -> str:
        """Returns the piece of the token that ends an answer, for example "<|im_end|>"."""
        ids, is_answer = self.encode([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        return self._encoder.id_to_token(int(ids[is_answer][-1])) or ""

    def _render_prefixes(self, messages: Sequence[Message], prefixes: Sequence[tuple[int, bool]]) -> list[str]:
        """Renders several prefixes of a conversation; returns one string per prefix.

        Args:
          messages: the full conversation.
          prefixes: for each prefix, (number of messages, whether to append the generation prompt).
        """
        requests = [
            {"messages": [*messages[:count]], "add_generation_prompt": has_prompt, **self._tokens}
            for count, has_prompt in prefixes
        ]
        try:
            return _renderer().call("config.objective.template", template=self._template, requests=requests)
        except UserError as e:
            raise UserError(f"{e}: {_describe(messages)}") from e


@functools.lru_cache(maxsize=2)
def cached_chat(template: str, tokenizer: Tokenizer) -> Chat:
    """Returns a `Chat` for a template and a tokenizer, caching the two most recently used ones."""
    return Chat(template, tokenizer)


def check_template(template: str) -> None:
    """Raises UserError if `template` is not a valid Jinja template."""
    _renderer().call("config.objective.template", template=template, requests=[])


@functools.cache
def _renderer() -> Confined:
    """Returns the sandboxed process in which templates, which are untrusted code, are rendered."""
    return Confined(chat_templates.__file__, "render", seconds=10, gib=1)


def read_template(directory: str) -> Optional[str]:
    """Reads the chat template from a Hugging Face directory, or from the tokenizer directory of a run.

    Returns None if the directory has no template. If it has several named templates, the one named "default" is
    returned.

    Raises:
      UserError: a file cannot be read.
    """
    template_file, config = (os.path.join(directory, name) for name in (_TEMPLATE_FILE, "tokenizer_config.json"))
    if os.path.isfile(template_file):
        return read_bytes(template_file).decode("utf-8", "replace")
    value = read_object(config).get("chat_template") if os.path.isfile(config) else None
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}.get("default")
    return value if isinstance(value, str) else None


def write_template(directory: str, template: str) -> None:
    """Writes a chat template to a tokenizer's directory, from which `read_template` can read it."""
    write_atomically(os.path.join(directory, _TEMPLATE_FILE), template)


def _parse_marks(text: str) -> Rendered:
    """Removes the BEGIN and END marks from a rendered text; returns the text and the spans between the marks."""
    parts, answers, length = re.split(f"{chat_templates.BEGIN}(.*?){chat_templates.END}", text, flags=re.DOTALL), [], 0
    for i, part in enumerate(parts):
        answers += [(length, length + len(part))] if i % 2 else []
        length += len(part)
    return Rendered("".join(parts), answers)


def _describe(messages: Sequence[Message]) -> str:
    return f"the conversation that begins with {messages[0]['content'][:60]!r}" if messages else "no conversation"
