"""Holds what a user asks of a text that is generated: how long, how it is drawn or searched, what it may say."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Optional, TypeGuard, Union

from pretrainax.config import UserError


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Says how texts are generated. The fields are the flags of `python -m pretrainax.generate`."""

    max_new_tokens: int = 64  # of each text, at most
    temperature: float = 0.0  # 1: drawn from what the model says, lower: nearer to the likeliest; 0: always that one
    top_k: Optional[int] = None  # draws from so many of the likeliest tokens
    top_p: Optional[float] = None  # draws from the likeliest tokens of this probability together
    min_p: Optional[float] = None  # draws from tokens at least so likely, as a share of the likeliest
    typical_p: Optional[float] = None  # draws from the most typical tokens of this probability together
    repetition_penalty: Optional[float] = None  # above 1: less of what the prompt or the text has
    frequency_penalty: Optional[float] = None  # above 0: less of a token for each time that the text has it
    presence_penalty: Optional[float] = None  # above 0: less of every token that the text has
    num_beams: int = 1  # above 1: beam search
    length_penalty: float = 1.0  # of beam search: above 0 longer texts are worth more, below 0 shorter ones
    num_return: int = 1  # texts of each prompt: the best of the beams, or so many draws
    seed: int = 0  # of the draws: the same texts again, whatever other prompts there are
    stop: tuple[str, ...] = ()  # strings that end a text, and are not part of it
    allowed_tokens: tuple[Union[int, str], ...] = ()  # nothing else is said; ids, or text of which all tokens are
    banned_tokens: tuple[Union[int, str], ...] = ()  # are not said: ids, or text that is one token
    banned_strings: tuple[str, ...] = ()  # are not in the text, however tokens meet in them
    regex: Optional[str] = None  # a regular expression that the whole text matches (pip install 'pretrainax[regex]')

    def check(self) -> None:
        """Raises UserError, one line with every problem."""
        if found := list(self.problems()):
            raise UserError("; ".join(found))

    def problems(self) -> Iterator[str]:
        """Yields what is wrong with each option: the value got, and what is allowed."""
        wrong = False
        for name, (is_right, allowed) in _ALLOWED.items():
            value = getattr(self, name)
            if not (value is None and _DEFAULTS[name] is None) and not is_right(value):
                wrong = True
                yield f"{name} is {value!r}, it must be {allowed}"
        if not wrong:
            yield from self._contradictions()

    def _contradictions(self) -> Iterator[str]:
        """Yields options that would do nothing beside the others."""
        draws, searches = self.temperature > 0, self.num_beams > 1
        for name in ("top_k", "top_p", "min_p", "typical_p"):
            if not draws and getattr(self, name) is not None:
                yield f"{name} is {getattr(self, name)} and temperature 0, which draws nothing: set temperature above 0"
        if draws and searches:
            yield f"num_beams is {self.num_beams} and temperature {self.temperature}: beam search draws nothing"
        if not searches and self.length_penalty != 1.0:
            yield f"length_penalty is {self.length_penalty} and num_beams 1: it is for beam search"
        if searches and self.num_return > self.num_beams:
            yield f"num_return is {self.num_return}, it must be at most num_beams, {self.num_beams}"
        if not searches and not draws and self.num_return > 1:
            yield f"num_return is {self.num_return} and all would be the same: set temperature above 0, or num_beams"
        if searches and self.stop:
            yield f"stop is {self.stop} and num_beams {self.num_beams}: beam search ends at the end of a text alone"


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are(kind: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, tuple) and all(map(kind, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_token(value: object) -> bool:
    return _is_text(value) or (_is_whole(value) and value >= 0)


_COUNT = (lambda value: _is_whole(value) and value >= 1), "a whole number from 1"
_SHARE = (lambda value: _is_number(value) and 0 < value <= 1), "above 0 and at most 1"
_FINITE = _is_number, "a number"
_TOKENS = _are(_is_token), "a tuple of ids and texts"
_TEXTS = _are(_is_text), "a tuple of texts, none of them empty"
_SEEDS = 1 << 32
_ALLOWED: dict[str, tuple[Callable[[object], bool], str]] = {
    "max_new_tokens": _COUNT,
    "temperature": ((lambda value: _is_number(value) and value >= 0), "0 (always the likeliest token) or above"),
    "top_k": _COUNT,
    "top_p": _SHARE,
    "min_p": _SHARE,
    "typical_p": _SHARE,
    "repetition_penalty": ((lambda value: _is_number(value) and value > 0), "above 0 (1: no penalty)"),
    "frequency_penalty": _FINITE,
    "presence_penalty": _FINITE,
    "num_beams": _COUNT,
    "length_penalty": _FINITE,
    "num_return": _COUNT,
    "seed": ((lambda value: _is_whole(value) and 0 <= value < _SEEDS), f"a whole number from 0 to {_SEEDS - 1}"),
    "stop": _TEXTS,
    "allowed_tokens": _TOKENS,
    "banned_tokens": _TOKENS,
    "banned_strings": _TEXTS,
    "regex": (_is_text, "a regular expression"),
}
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Sampling)}
