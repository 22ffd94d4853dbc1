"""The options of text generation: length, sampling, beam search and constraints."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Optional, TypeGuard, Union

from pretrainax.config import UserError


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The options of text generation, which are also the flags of `python -m pretrainax.generate`."""

    max_new_tokens: int = 64  # maximum number of generated tokens per text
    temperature: float = 0.0  # sampling temperature; 1: the distribution of the model; 0: greedy decoding
    top_k: Optional[int] = None  # samples only from this number of most likely tokens
    top_p: Optional[float] = None  # samples only from the most likely tokens with this total probability
    min_p: Optional[float] = None  # samples only from tokens with at least this fraction of the highest probability
    typical_p: Optional[float] = None  # samples only from the most typical tokens with this total probability
    repetition_penalty: Optional[float] = None  # above 1: tokens of the prompt and the new text are less likely
    frequency_penalty: Optional[float] = None  # above 0: a token is less likely with each occurrence in the new text
    presence_penalty: Optional[float] = None  # above 0: all tokens of the new text are less likely
    num_beams: int = 1  # number of beams; above 1: beam search
    length_penalty: float = 1.0  # beam search: values above 0 favor longer sequences, below 0 shorter sequences
    num_return: int = 1  # number of sequences per prompt: the best beams, or samples
    seed: int = 0  # sampling seed; the samples of a prompt do not depend on other prompts
    stop: tuple[str, ...] = ()  # strings that end a text; they are not part of the text
    allowed_tokens: tuple[
        Union[int, str], ...
    ] = ()  # if set, the only tokens that may occur: ids (not in flags) or strings of one or more tokens
    banned_tokens: tuple[
        Union[int, str], ...
    ] = ()  # tokens that never occur: ids (not in flags) or strings of one token
    banned_strings: tuple[str, ...] = ()  # strings that never occur, at any token boundaries
    regex: Optional[str] = None  # regular expression for the whole text (pip install 'pretrainax[regex]')

    def check(self) -> None:
        """Raises UserError if an option is invalid; the message lists all problems on one line."""
        if problems := list(self.problems()):
            raise UserError("; ".join(problems))

    def problems(self) -> Iterator[str]:
        """Yields a message for each invalid option, with its value and the allowed values."""
        is_invalid = False
        for name, (is_valid, allowed) in _ALLOWED.items():
            value = getattr(self, name)
            if not (value is None and _DEFAULTS[name] is None) and not is_valid(value):
                is_invalid = True
                yield f"{name} is {value!r}, it must be {allowed}"
        if not is_invalid:
            yield from self._contradictions()

    def _contradictions(self) -> Iterator[str]:
        """Yields a message for each option that is unsupported or has no effect in combination with other options."""
        samples, uses_beams = self.temperature > 0, self.num_beams > 1
        for name in ("top_k", "top_p", "min_p", "typical_p"):
            if not samples and getattr(self, name) is not None:
                yield f"{name} is {getattr(self, name)} and temperature 0, which is greedy: set temperature above 0"
        if samples and uses_beams:
            yield f"num_beams is {self.num_beams} and temperature {self.temperature}: beam search does not sample"
        if not uses_beams and self.length_penalty != 1.0:
            yield f"length_penalty is {self.length_penalty} and num_beams 1: set num_beams above 1"
        if uses_beams and self.num_return > self.num_beams:
            yield f"num_return is {self.num_return}, it must be at most num_beams, {self.num_beams}"
        if not uses_beams and not samples and self.num_return > 1:
            yield f"num_return is {self.num_return} and all would be equal: set temperature above 0, or num_beams"
        if uses_beams and self.stop:
            yield f"stop is {self.stop} and num_beams {self.num_beams}: beam search supports no stop strings"


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


_COUNT = (lambda value: _is_whole(value) and value >= 1), "a whole number from 1"
_FRACTION = (lambda value: _is_number(value) and 0 < value <= 1), "above 0 and at most 1"
_FINITE = _is_number, "a number"
_TOKENS = _is_tuple_of(_is_token), "a tuple of ids and strings"
_STRINGS = _is_tuple_of(_is_text), "a tuple of strings that are not empty"
_SEEDS = 1 << 32
_ALLOWED: dict[str, tuple[Callable[[object], bool], str]] = {
    "max_new_tokens": _COUNT,
    "temperature": ((lambda value: _is_number(value) and value >= 0), "0 (always the likeliest token) or above"),
    "top_k": _COUNT,
    "top_p": _FRACTION,
    "min_p": _FRACTION,
    "typical_p": _FRACTION,
    "repetition_penalty": ((lambda value: _is_number(value) and value > 0), "above 0 (1: no penalty)"),
    "frequency_penalty": _FINITE,
    "presence_penalty": _FINITE,
    "num_beams": _COUNT,
    "length_penalty": _FINITE,
    "num_return": _COUNT,
    "seed": ((lambda value: _is_whole(value) and 0 <= value < _SEEDS), f"a whole number from 0 to {_SEEDS - 1}"),
    "stop": _STRINGS,
    "allowed_tokens": _TOKENS,
    "banned_tokens": _TOKENS,
    "banned_strings": _STRINGS,
    "regex": (_is_text, "a regular expression"),
}
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Sampling)}
