"""Applies chat templates: renders conversations as text, and finds the tokens of the assistant's answers."""

import functools
import glob
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import read_object
from pretrainax.files.object_names import path_below
from pretrainax.files.regular_files import read_bytes
from pretrainax.runtime.confined import Confined
from pretrainax.tokenization import chat_templates
from pretrainax.tokenization.base import Tokenizer
from pretrainax.tokenization.huggingface import FIELDS
from pretrainax.tokenization.tokenizer_json import library_tokenizer

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
# The file of the default template, and the folder of further templates, as in transformers.
_TEMPLATE_FILE, _TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
_SETTING = "config.objective.template"  # the origin of a template in error messages, for training
_MARK = "\ufdd2"  # marks a place in a message; this Unicode noncharacter occurs in no text
_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")  # Jinja's tag around an answer
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

    def __init__(self, template: str, tokenizer: Tokenizer, origin: str = _SETTING):
        """Checks the template.

        Args:
          origin: where the template comes from, for error messages.

        Raises:
          UserError: the template is invalid.
        """
        check_template(template, origin)
        self._origin = origin
        self._template, self.marks_answers = template, _GENERATION.search(template) is not None
        pieces, vocabulary = tokenizer.special_pieces, tokenizer.vocabulary
        special_ids = {f"{field}_token": getattr(vocabulary, field) for field in FIELDS}
        self._tokens = {name: pieces[i] for name, i in special_ids.items() if i is not None}
        self.end_of_text = pieces.get(vocabulary.separator, "")  # piece at which generation stops; "": none
        self._encoder = library_tokenizer(tokenizer)
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

        The spans include end-of-turn tokens. A template can mark answers with {% generation %}. If a template lacks
        these marks, `render` finds the spans by rendering the conversation up to the start and up to the end of each
        answer.
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

    def prompt(self, messages: Sequence[Message], continues: bool = False) -> str:
        """Renders a conversation as a prompt, like apply_chat_template of transformers.

        The template can read the current date.

        Args:
          continues: whether the model continues the final message. If False, the prompt ends with the start of a new
            answer (the generation prompt).

        Raises:
          UserError: the template raises an error for the conversation, or changes the message to continue.
        """
        if continues:
            final = messages[-1]["content"]
            messages = [*messages[:-1], {**messages[-1], "content": final + _MARK + " "}]
        (marked,) = self._render_prefixes(messages, [(len(messages), not continues)], has_clock=True)
        text = _parse_marks(marked).text
        if not continues:
            return text
        before, mark, after = text.rpartition(_MARK)
        if not mark or final.strip() not in before:
            raise UserError(f"{self._origin} changes the final message, which the model must continue: {final[:60]!r}")
        return before if after.startswith(" ") else before.rstrip()  # a template that strips messages also strips final

    @functools.cached_property
    def end_of_turn(self) -> str:
        """The text that the template writes after the content of an answer, for example "<|im_end|>"; "": none."""
        text, ((_, end),) = self.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}])
        return text[:end].rpartition(_MARK)[2].strip()

    @property
    def end_before_text(self) -> str:
        """The part of `end_of_turn` before the end-of-text token, for example "<|im_end|>"; "": none."""
        return self.end_of_turn.removesuffix(self.end_of_text).rstrip()

    @property
    def end_id(self) -> Optional[int]:
        """The id of `end_before_text` if this text is a single special token."""
        added = self._encoder.get_added_tokens_decoder().items()
        return next((i for i, token in added if token.content == self.end_before_text and token.special), None)

    def _render_prefixes(
        self, messages: Sequence[Message], prefixes: Sequence[tuple[int, bool]], has_clock: bool = False
    ) -> list[str]:
        """Renders several prefixes of a conversation; returns one string per prefix.

        Args:
          messages: the full conversation.
          prefixes: for each prefix, (number of messages, whether to append the generation prompt).
          has_clock: whether the template can read the current date.
        """
        constants = {"tools": None, "documents": None, **self._tokens}  # transformers defines both, without a value
        requests = [
            {"messages": [*messages[:count]], "add_generation_prompt": has_prompt, **constants}
            for count, has_prompt in prefixes
        ]
        try:
            return _renderer().call(self._origin, template=self._template, requests=requests, has_clock=has_clock)
        except UserError as e:
            raise UserError(f"{e}: {_describe(messages)}") from e


@functools.lru_cache(maxsize=2)
def cached_chat(template: str, tokenizer: Tokenizer) -> Chat:
    """Returns a `Chat` for a template and a tokenizer; caches the two most recently used objects."""
    return Chat(template, tokenizer)


def check_template(template: str, origin: str = _SETTING) -> None:
    """Raises UserError if `template` is not a valid Jinja template; the message begins with `origin`."""
    _renderer().call(origin, template=template, requests=[])


@functools.cache
def _renderer() -> Confined:
    """Returns the sandboxed process in which templates, which are untrusted code, are rendered."""
    return Confined(chat_templates.__file__, "render", seconds=10, gib=1)


def read_template(directory: str) -> Optional[str]:
    """Reads the default chat template of a directory, as in `read_templates`; returns None if there is none."""
    return read_templates(directory).get("default")


def read_templates(directory: str) -> dict[str, str]:
    """Reads the chat templates of a Hugging Face directory, or of the tokenizer directory of a run, by name.

    If a directory has a single template, its name is "default". Template files take precedence over
    tokenizer_config.json.

    Raises:
      UserError: a file cannot be read.
    """
    files = {"default": os.path.join(directory, _TEMPLATE_FILE)}
    for path in sorted(glob.glob(os.path.join(glob.escape(directory), _TEMPLATE_FOLDER, "*.jinja"))):
        files[os.path.basename(path).removesuffix(".jinja")] = path
    found = {name: path for name, path in files.items() if os.path.isfile(path)}
    if found:
        return {name: read_bytes(path).decode("utf-8", "replace") for name, path in found.items()}
    config = os.path.join(directory, "tokenizer_config.json")
    value = read_object(config).get("chat_template") if os.path.isfile(config) else None
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    templates = value if isinstance(value, dict) else {"default": value}
    return {str(name): template for name, template in templates.items() if isinstance(template, str)}


def write_template(directory: str, template: str) -> None:
    """Writes a chat template to a tokenizer's directory, from which `read_template` can read it."""
    write_atomically(os.path.join(directory, _TEMPLATE_FILE), template)


def copy_templates(directory: str, to: str) -> None:
    """Copies all chat templates of a directory to another directory, as files; both are as in `read_templates`.

    Raises:
      UserError: the name of a template is not a valid file name.
    """
    for name, template in read_templates(directory).items():
        if name == "default":
            write_template(to, template)
        else:
            path = path_below(to, f"{_TEMPLATE_FOLDER}/{name}.jinja")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_atomically(path, template)


def _parse_marks(text: str) -> Rendered:
    """Removes the BEGIN and END marks from a rendered text; returns the text and the spans between the marks."""
    parts, answers, length = re.split(f"{chat_templates.BEGIN}(.*?){chat_templates.END}", text, flags=re.DOTALL), [], 0
    for i, part in enumerate(parts):
        answers += [(length, length + len(part))] if i % 2 else []
        length += len(part)
    return Rendered("".join(parts), answers)


def _describe(messages: Sequence[Message]) -> str:
    return f"the conversation that begins with {messages[0]['content'][:60]!r}" if messages else "no conversation"
