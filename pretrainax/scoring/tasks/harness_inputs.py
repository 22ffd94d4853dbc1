"""Converts text to model inputs, and ids to text, as the class `hf` of the lm-evaluation-harness does.

Special tokens in a text ("</s>", or the role tokens of a chat template) are encoded as special ids. An imported
model reads the special tokens that its tokenizer adds. A model that was trained with PretrainAX reads its training
format. The encoder of an encoder-decoder reads the context, and the decoder predicts the continuation.
"""

import functools
import hashlib
import logging
import os
import re
from collections.abc import Sequence
from typing import Optional, Union

import numpy as np
import tokenizers

from pretrainax.config import UserError, nearest
from pretrainax.data.batch import Example, is_encoder_decoder
from pretrainax.data.leading_tokens import is_imported, leading_token_ids
from pretrainax.data.objectives import CausalLM
from pretrainax.data.objectives.spans import encoder_decoder_example, encoder_decoder_prompt
from pretrainax.files.json_files import JsonObject, read_object
from pretrainax.inference.framing import frame_of, framed_prompt, max_input_length
from pretrainax.inference.loaded import LoadedModel, check_language_model
from pretrainax.scoring.scoring_examples import causal_example, context_length, start_token
from pretrainax.tokenization.chat import Chat, Message, read_templates
from pretrainax.tokenization.tokenizer_json import special_tokenizer

Tokens = list[int]
# The maximum input length of `hf` is the first of these fields of config.json, or else model_max_length of
# tokenizer_config.json.
_LENGTH_FIELDS = ("n_positions", "max_position_embeddings", "n_ctx")
_UNKNOWN_LENGTH = 2048  # maximum input length of `hf` for a directory that defines none
_NO_LIMIT = 10**9  # a larger model_max_length means that there is no limit (transformers writes 10^30)
_log = logging.getLogger(__name__)


class HarnessInputs:
    """The tokenizer, the special tokens, the input length and the chat templates of a model, for the harness."""

    def __init__(self, loaded: LoadedModel, max_length: Optional[int] = None):
        """Reads the settings of a model; `max_length` is as in `harness.PretrainAX`.

        Raises:
          UserError: the model does not predict text from left to right, or `max_length` is out of range.
        """
        family = loaded.experiment.model.family
        if family not in ("decoder", "encoder_decoder"):
            raise UserError(
                f"{loaded.origin} is of the family {family}, but the harness needs a decoder or an encoder-decoder: "
                "give such a model, or use the tasks of all families with `python -m pretrainax.evaluate --tasks=…`"
            )
        check_language_model(loaded)
        self.loaded, self.is_imported = loaded, is_imported(loaded.experiment)
        self._vocabulary = loaded.tokenizer.vocabulary
        self._library = special_tokenizer(loaded.tokenizer)
        prompt = framed_prompt(np.array([0], np.int32), loaded.experiment, loaded.tokenizer)
        self._decoder_start = int(prompt["tokens"][0]) if is_encoder_decoder(prompt) else None
        self._frame = frame_of(loaded)
        start = self._vocabulary.bos if self.is_imported else start_token(loaded)
        self._prefix = self._vocabulary.separator if start is None else start
        self.max_length = self._default_length() if max_length is None else max_length
        limit = max_input_length(loaded)
        if type(self.max_length) is not int or not 1 <= self.max_length <= (limit or self.max_length):
            allowed = f" to {limit}, the positions that the model has" if limit else ""
            raise UserError(f"max_length is {max_length!r}, it must be a whole number from 1{allowed}")

    @property
    def is_encoder_decoder(self) -> bool:
        return self._decoder_start is not None

    @property
    def prefix(self) -> int:
        """The id that precedes a text without context: BOS, or else EOS; for a run, the token that starts a text.

        Raises:
          UserError: the vocabulary has neither.
        """
        if self._prefix is None:
            raise UserError(f"{self.loaded.origin}: the tokenizer has no bos or eos token to read before a text")
        return self._prefix

    def encode(self, text: str, adds_special: Optional[bool] = None) -> Tokens:
        """Tokenizes a text.

        Args:
          adds_special: whether to add the special tokens around the text. If None, they are added unless the text
            begins with `prefix`, for example as the result of a chat template.
        """
        ids = self._library.encode(text, add_special_tokens=False).ids
        if self._starts_rows:
            return ids  # `example` and `prompt` add the token
        if adds_special is None:
            adds_special = not self._begins_with(text, self._prefix)
        return [*self._frame.before, *ids, *self._frame.after] if adds_special else ids

    def decode(self, ids: Sequence[int], stop: Sequence[str]) -> str:
        """Decodes generated ids without special tokens, up to the tokenizer's EOS token or the first stop string."""
        end = self._vocabulary.separator
        ids = list(ids[: ids.index(end)] if end in ids else ids)
        text = self._library.decode(ids, skip_special_tokens=True)
        if self._settings.get("clean_up_tokenization_spaces") and not isinstance(
            self._library.model, tokenizers.models.BPE
        ):  # as in transformers
            text = re.sub(r" ([.?!,])", r"\1", text).replace(" ' ", "'")
            text = re.sub(r" (n't|'m|'s|'ve|'re)", r"\1", text)
        for string in filter(None, stop):
            text = text.partition(string)[0]
        return text

    def example(self, context: Tokens, continuation: Tokens) -> Example:
        """Builds an example that predicts the ids `continuation` after `context`, which is cut from the left if needed.

        Raises:
          UserError: the continuation is empty or exceeds `max_length`.
        """
        if not 1 <= len(continuation) <= self.max_length:
            raise UserError(
                f"a continuation has {len(continuation)} tokens, it must have 1 to {self.max_length}: shorten it, or "
                "set max_length"
            )
        if self._starts_rows:
            start = leading_token_ids(self.loaded.experiment, self._vocabulary, is_needed=False)
            context = context if context[:1] == start else start + context
        context = context or [self.prefix]
        kept, targets = np.array(context[-self.room(continuation) :], np.int32), np.array(continuation, np.int32)
        if self._decoder_start is None:
            return causal_example(kept, targets)
        return encoder_decoder_example(kept, targets, self._scoring_start)

    def room(self, continuation: Tokens) -> int:
        """Returns the maximum number of context tokens before a continuation."""
        # A decoder does not read the last id, and the two stacks of an encoder-decoder read separate inputs.
        return self.max_length - (0 if self.is_encoder_decoder else len(continuation) - 1)

    def prompt(self, text: str, max_new_tokens: int) -> tuple[Example, int]:
        """Builds the input from which the model generates, and returns it with the maximum number of new tokens.

        NOTE: Both limits are the same as in `hf` with one prompt per batch. The prompt of a decoder is cut from the
        left to leave room for the new tokens. An encoder-decoder generates up to `max_new_tokens` plus the length of
        its encoder input minus one. The reason is that the harness adds the length of the input to the limit, and
        transformers counts the start token.

        Raises:
          UserError: a decoder's prompt would have no room.
        """
        ids = self.encode(text, self.is_encoder_decoder or not self._begins_with(text, self._vocabulary.bos))
        room = self.max_length - (0 if self.is_encoder_decoder else max_new_tokens)
        room -= sum(map(len, self._frame)) if self._starts_rows else 0
        if room < 1:
            raise UserError(
                f"max_gen_toks is {max_new_tokens}, but the model reads {self.max_length} tokens: reduce it"
            )
        if len(ids) > room:
            _log.warning("a prompt of %d tokens was cut from the left to %d", len(ids), room)
        row = np.array(ids[-room:], np.int32)
        if self._starts_rows:
            return framed_prompt(row, self.loaded.experiment, self.loaded.tokenizer), max_new_tokens
        row = row if len(row) else np.array([self.prefix], np.int32)
        if self._decoder_start is not None:
            return encoder_decoder_prompt(row, self._decoder_start), max_new_tokens + len(row) - 1
        return CausalLM().prompt(row, self._vocabulary), max_new_tokens

    # --- chat templates

    @functools.cached_property
    def _templates(self) -> dict[str, str]:
        folder = getattr(self.loaded.experiment.tokenizer, "path", None)
        return read_templates(folder) if folder else {}

    def select_template(self, name: Union[bool, str] = True) -> str:
        """Selects the chat template for `render_chat`, and returns it.

        Args:
          name: the name of a template. If True, or if the model has a single template, it is the default template.

        Raises:
          UserError: the model has no such template.
        """
        templates, where = self._templates, "chat_template.jinja, or chat_template in tokenizer_config.json"
        if not templates:
            raise UserError(
                f"{self.loaded.origin} has no chat template ({where}): add one, or leave out apply_chat_template"
            )
        key = name if isinstance(name, str) and [*templates] != ["default"] else "default"
        if key not in templates:
            raise UserError(f"{self.loaded.origin} has no chat template {key!r}, {nearest(key, sorted(templates))}")
        self._chat = Chat(templates[key], self.loaded.tokenizer, f"the chat template of {self.loaded.origin}")
        return templates[key]

    _chat: Optional[Chat] = None

    def render_chat(self, messages: Sequence[Message], continues: bool) -> str:
        """Renders a conversation as in `Chat.prompt`; if the template fails, renders it without system messages."""
        if self._chat is None:
            self.select_template()
        assert self._chat is not None
        others = [message for message in messages if message["role"] != "system"]
        try:
            return self._chat.prompt(messages, continues)
        except UserError as e:
            if len(others) == len(messages):
                raise
            _log.warning("%s; the prompts have no system message", e)
            return self._chat.prompt(others, continues)

    @property
    def fingerprint(self) -> str:
        """A hash of the tokenizer and the chat templates, which the harness adds to the names of cached prompts."""
        templates = hashlib.sha256(repr(sorted(self._templates.items())).encode()).hexdigest()[:16]
        return f"{self.loaded.tokenizer.fingerprint}-{templates}"

    # --- helpers

    @property
    def _starts_rows(self) -> bool:
        """Returns True for a decoder that was trained with PretrainAX, whose rows begin with a start token."""
        return not self.is_imported and not self.is_encoder_decoder

    @functools.cached_property
    def _scoring_start(self) -> int:
        """The first decoder token for a log-likelihood, which config.json sets; generation_config.json is ignored."""
        config = self._read("config.json")
        decoder = config.get("decoder")  # T5Gemma's decoder starts with the BOS token
        start = decoder.get("bos_token_id") if isinstance(decoder, dict) else config.get("decoder_start_token_id")
        assert self._decoder_start is not None
        return self._decoder_start if start is None else int(start)

    @functools.cached_property
    def _settings(self) -> JsonObject:
        return self._read("tokenizer_config.json")

    def _read(self, name: str) -> JsonObject:
        """Reads a JSON file of an imported model's directory; returns {} if there is none."""
        path = os.path.join(getattr(self.loaded.experiment.tokenizer, "path", None) or "", name)
        return read_object(path) if self.is_imported and os.path.isfile(path) else {}

    def _default_length(self) -> int:
        limit = max_input_length(self.loaded)
        if not self.is_imported or limit is not None and not self.is_encoder_decoder:
            return limit or context_length(self.loaded)
        config = self._read("config.json")
        lengths = [*map(config.get, _LENGTH_FIELDS), self._settings.get("model_max_length")]
        length = next((int(x) for x in lengths if x is not None and x < _NO_LIMIT), _UNKNOWN_LENGTH)
        return min(length, limit or length)

    def _begins_with(self, text: str, token: Optional[int]) -> bool:
        return token is not None and text.startswith(self._library.decode([token], skip_special_tokens=False))
