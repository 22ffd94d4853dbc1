"""The options of text generation: length, sampling, beam search and constraints."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, Optional, TypeGuard, Union

import numpy as np

from pretrainax.config import UserError

EarlyStopping = Union[bool, Literal["never"]]
SAMPLING_ONLY = "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"
BEAMS_ONLY = "length_penalty", "early_stopping", "renormalize_logits"


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The options of text generation, which are also the flags of `python -m pretrainax.generate`."""

    max_new_tokens: int = 64  # maximum number of generated tokens per text
    max_length: Optional[int] = None  # the same, with the tokens of the prompt; encoder-decoder: with the start token
    min_new_tokens: Optional[int] = None  # number of generated tokens before which a text does not end
    min_length: Optional[int] = None  # the same, with the tokens of the prompt; encoder-decoder: with the start token
    temperature: float = 0.0  # sampling temperature; 1: the distribution of the model; 0: greedy decoding
    top_k: Optional[int] = None  # samples only from this number of most likely tokens
    top_p: Optional[float] = None  # samples only from the most likely tokens with this total probability
    min_p: Optional[float] = None  # samples only from tokens with at least this fraction of the highest probability
    typical_p: Optional[float] = None  # samples only from the most typical tokens with this total probability
    epsilon_cutoff: Optional[float] = None  # samples only from tokens with at least this probability
    eta_cutoff: Optional[float] = None  # the same, with a lower probability where the model is uncertain
    repetition_penalty: Optional[float] = None  # above 1: tokens of the prompt and the new text are less likely
    frequency_penalty: Optional[float] = None  # above 0: a token is less likely with each occurrence in the new text
    presence_penalty: Optional[float] = None  # above 0: all tokens of the new text are less likely
    no_repeat_ngram_size: Optional[int] = None  # no sequence of this number of tokens occurs twice
    num_beams: int = 1  # number of beams; above 1: beam search
    length_penalty: float = 1.0  # beam search: values above 0 favor longer sequences, below 0 shorter sequences
    # beam search ends when num_beams texts are finished (True), when the current score of no other text is higher
    # (False, the default), or when no other text can reach a higher score ("never")
    early_stopping: Optional[EarlyStopping] = None
    renormalize_logits: Optional[bool] = None  # beam search: scores use the probabilities among the allowed tokens
    num_return: int = 1  # number of sequences per prompt: the best beams, or samples
    seed: int = 0  # sampling seed; the samples of a prompt do not depend on other prompts
    stop: tuple[str, ...] = ()  # strings that end a text; they are not part of the text
    allowed_tokens: tuple[
        Union[int, str], ...
    ] = ()  # if set, the only tokens that may occur: ids (not in flags) or strings of one or more tokens
    banned_tokens: tuple[
        Union[int, str], ...
    ] = ()  # tokens that never occur: ids (not in flags) or strings of one token
    banned_first_tokens: tuple[
        Union[int, str], ...
    ] = ()  # tokens that are not the first token of a text: ids (not in flags) or strings of one token
    banned_sequences: tuple[tuple[int, ...], ...] = ()  # sequences of token ids that never occur (not a flag)
    # first token of a text, for example the language of mBART; a decoder ignores it after a prompt of several tokens
    forced_bos_token_id: Optional[int] = None
    forced_eos_token_id: tuple[int, ...] = ()  # last token of a text that reaches its maximum length
    banned_strings: tuple[str, ...] = ()  # strings that never occur, at any token boundaries
    regex: Optional[str] = None  # regular expression for the whole text (pip install 'pretrainax[regex]')

    def check(self) -> None:
        """Raises UserError if an option is invalid; the message lists all problems on one line."""
        if problems := list(self.problems()):
            raise UserError("; ".join(problems))

    def problems(self) -> Iterator[str]:
        """Yields a message for each invalid option, with its value and the allowed values."""
        invalid = list(invalid_values(dataclasses.asdict(self)))
        yield from invalid or self._contradictions()

    def _contradictions(self) -> Iterator[str]:
        """Yields a message for each option that is unsupported or has no effect in combination with other options."""
        samples, uses_beams = self.temperature > 0, self.num_beams > 1
        for name in SAMPLING_ONLY:
            if not samples and getattr(self, name) is not None:
                yield f"{name} is {getattr(self, name)} and temperature 0, which is greedy: set temperature above 0"
        if samples and uses_beams:
            yield f"num_beams is {self.num_beams} and temperature {self.temperature}: beam search does not sample"
        for name in BEAMS_ONLY:
            if not uses_beams and getattr(self, name) != DEFAULTS[name]:
                yield f"{name} is {getattr(self, name)} and num_beams 1: set num_beams above 1"
        for name, forced in (("bos", (self.forced_bos_token_id,)), ("eos", self.forced_eos_token_id)):
            if forced and {*forced} <= {*self.banned_tokens}:
                yield f"forced_{name}_token_id is {forced[-1]}, which banned_tokens has: leave it out of one of them"
        if self.min_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            yield f"min_new_tokens is {self.min_new_tokens}, it must be at most max_new_tokens, {self.max_new_tokens}"
        if uses_beams and self.num_return > self.num_beams:
            yield f"num_return is {self.num_return}, it must be at most num_beams, {self.num_beams}"
        if not uses_beams and not samples and self.num_return > 1:
            yield f"num_return is {self.num_return} and all would be equal: set temperature above 0, or num_beams"


def plain_value(value: object) -> object:
    """Converts a list to a tuple, and a NumPy scalar to a Python number; returns other values unchanged."""
    if isinstance(value, (list, tuple)):
        return tuple(map(plain_value, value))
    return value.item() if isinstance(value, np.generic) else value


def invalid_values(options: Mapping[str, object]) -> Iterator[str]:
    """Yields a message for each option, by name, whose value is out of range."""
    for name, value in options.items():
        is_valid, allowed = _ALLOWED[name]
        if not (value is None and DEFAULTS[name] is None) and not is_valid(value):
            yield f"{name} is {value!r}, it must be {allowed}"


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_tuple_of(kind: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, tuple) and all(map(kind, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_token(value: object) -> bool:
    return _is_text(value) or (_is_whole(value) and value >= 0)


def _is_sequence(value: object) -> bool:
    return _is_tuple_of(lambda i: _is_whole(i) and i >= 0)(value) and value != ()


_COUNT = (lambda value: _is_whole(value) and value >= 1), "a whole number from 1"
_FRACTION = (lambda value: _is_number(value) and 0 < value <= 1), "above 0 and at most 1"
_FINITE = _is_number, "a number"
_TOKENS = _is_tuple_of(_is_token), "a tuple of ids and strings"
_STRINGS = _is_tuple_of(_is_text), "a tuple of strings that are not empty"
_SEEDS = 1 << 32
_ALLOWED: dict[str, tuple[Callable[[object], bool], str]] = {
    "max_new_tokens": _COUNT,
    "max_length": _COUNT,
    "min_new_tokens": _COUNT,
    "min_length": _COUNT,
    "temperature": ((lambda value: _is_number(value) and value >= 0), "0 (always the likeliest token) or above"),
    "top_k": _COUNT,
    "top_p": _FRACTION,
    "min_p": _FRACTION,
    "typical_p": _FRACTION,
    "epsilon_cutoff": _FRACTION,
    "eta_cutoff": _FRACTION,
    "repetition_penalty": ((lambda value: _is_number(value) and value > 0), "above 0 (1: no penalty)"),
    "frequency_penalty": _FINITE,
    "presence_penalty": _FINITE,
    "no_repeat_ngram_size": _COUNT,
    "num_beams": _COUNT,
    "length_penalty": _FINITE,
    "early_stopping": ((lambda value: isinstance(value, bool) or value == "never"), "True, False or 'never'"),
    "renormalize_logits": ((lambda value: isinstance(value, bool)), "True or False"),
    "num_return": _COUNT,
    "seed": ((lambda value: _is_whole(value) and 0 <= value < _SEEDS), f"a whole number from 0 to {_SEEDS - 1}"),
    "stop": _STRINGS,
    "allowed_tokens": _TOKENS,
    "banned_tokens": _TOKENS,
    "banned_first_tokens": _TOKENS,
    "banned_sequences": (_is_tuple_of(_is_sequence), "a tuple of tuples of ids"),
    "forced_bos_token_id": ((lambda value: _is_whole(value) and value >= 0), "an id"),
    "forced_eos_token_id": (_is_tuple_of(lambda value: _is_whole(value) and value >= 0), "a tuple of ids"),
    "banned_strings": _STRINGS,
    "regex": (_is_text, "a regular expression"),
}
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Sampling)}
