"""Extends embedding tables to more tokens or more positions."""

import dataclasses
from collections.abc import Iterator
from typing import Literal, Optional

import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import Experiment, ModelConfig
from pretrainax.interop.adaptations.base import Adaptation, Operation, ParameterRule

# Parameters with a vocabulary axis -> the index of this axis.
_TOKEN_AXES = {
    "token_embedding/embedding": 0,
    "decoder_token_embedding/embedding": 0,
    "unembedding/kernel": 1,
    "unembedding/bias": 0,
}
_POSITION_TABLES = ("position_embedding/embedding", "decoder_position_embedding/embedding")
_CHANGEABLE = ("max_length", "theta", "scaling")  # fields of config.model.position that LongerContext may change


@dataclasses.dataclass
class WiderVocabulary(Adaptation):
    """Adds tokens to the embeddings and the output layer; each new row is the mean of the old rows (Hewitt 2021)."""

    fields = ("vocab_size",)
    # number of ids in the old tokenizer. Later rows are padding and are replaced. None: all old rows are tokens
    tokens: Optional[int] = None

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if self.tokens is not None and self.tokens < 1:
            yield f"config.checkpoint.adapt has {self}: tokens must be at least 1; None: all rows are tokens"

    def before(self, ours: ModelConfig, theirs: ModelConfig) -> ModelConfig:
        return dataclasses.replace(ours, vocab_size=theirs.vocab_size)

    def mismatches(self, ours: ModelConfig, theirs: ModelConfig) -> Iterator[str]:
        name = f"config.checkpoint.adapt has {self}"
        if ours.vocab_size < theirs.vocab_size:
            yield (
                f"{name}, and config.model.vocab_size is {ours.vocab_size:,}, and the start has {theirs.vocab_size:,} "
                "rows: set it to at least this number"
            )
        if (self.tokens or 1) > theirs.vocab_size:
            yield f"{name}, and the start has {theirs.vocab_size:,} rows: set tokens to at most this number"

    def parameter_rule(self, path: str, before: ModelConfig, ours: ModelConfig) -> ParameterRule:
        old, axis = self._num_old_tokens(before), _TOKEN_AXES.get(path)
        if axis is None or old == ours.vocab_size:
            return ParameterRule(path)
        how = f"{ours.vocab_size - old:,} new rows, each the mean of {old:,}"
        return ParameterRule(path, (Operation(how, lambda x: _append_mean(x, old, ours.vocab_size, axis)),))

    def effect(self, before: ModelConfig, ours: ModelConfig) -> str:
        old = self._num_old_tokens(before)
        if old == ours.vocab_size:
            return "the number of rows is unchanged"
        return f"the {old:,} old tokens keep their logits, the {ours.vocab_size - old:,} new tokens get their mean"

    def _num_old_tokens(self, before: ModelConfig) -> int:
        """Returns the number of tokens before the conversion; the new model keeps their embedding rows."""
        return before.vocab_size if self.tokens is None else self.tokens


@dataclasses.dataclass
class LongerContext(Adaptation):
    """Extends the context length of a model, and adds rows to its position embeddings if they are learned.

    Rotary positions have no parameters. Their `scaling` and `theta` may differ between the trained and the new model.
    """

    fields = ("position",)
    # repeat: copies the old rows repeatedly (Beltagy et al. 2020, section 5) | interpolate: linear interpolation
    rows: Literal["repeat", "interpolate"] = "repeat"

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if (position := experiment.model.position).max_length is None:
            yield (
                f"config.checkpoint.adapt has {self}, and config.model.position is {position}, which has no maximum "
                "length: leave it out"
            )

    def before(self, ours: ModelConfig, theirs: ModelConfig) -> ModelConfig:
        their_values = {name: getattr(theirs.position, name) for name in self._changed_fields(ours, theirs)}
        return dataclasses.replace(ours, position=dataclasses.replace(ours.position, **their_values))

    def mismatches(self, ours: ModelConfig, theirs: ModelConfig) -> Iterator[str]:
        name = f"config.checkpoint.adapt has {self}"
        if type(ours.position) is not type(theirs.position):
            yield f"{name}, and config.model.position is {ours.position}, there {theirs.position}: set it to that kind"
            return
        fixed = [field for field in vars(ours.position) if field not in _CHANGEABLE]
        for field in fixed:
            if (our_value := getattr(ours.position, field)) != (their_value := getattr(theirs.position, field)):
                yield f"{name}, and config.model.position.{field} is {our_value}, there {their_value}: set it to that"
        if theirs.position.max_length is None:
            yield f"{name}, and the positions of the start have no maximum length: leave it out"
            return
        old, new = _max_lengths(theirs, ours)
        if new < old:
            yield f"{name}, and config.model.position.max_length is {new:,}, there {old:,}: set it to at least that"

    def parameter_rule(self, path: str, before: ModelConfig, ours: ModelConfig) -> ParameterRule:
        if path not in _POSITION_TABLES or before.position == ours.position:
            return ParameterRule(path)
        unused, old, new = (getattr(ours.position, "offset", 0), *_max_lengths(before, ours))
        how = f"{old:,} positions repeated" if self.rows == "repeat" else f"{old:,} positions interpolated"
        lengthen = _repeat if self.rows == "repeat" else _interpolate
        # [offset + T, D] -> [offset + T', D]; the first `offset` rows are unused, and copied
        rows = Operation(how, lambda x: jnp.concatenate([x[:unused], lengthen(x[unused:], new)]))
        return ParameterRule(path, (rows,))

    def effect(self, before: ModelConfig, ours: ModelConfig) -> str:
        changes = [
            f"{name} {getattr(before.position, name)} -> {getattr(ours.position, name)}"
            for name in self._changed_fields(before, ours)
        ]
        return "; ".join(changes) or "the number of positions is unchanged"

    def _changed_fields(self, a: ModelConfig, b: ModelConfig) -> list[str]:
        """Returns the names of position fields that differ between two models and that this adaptation may change."""
        names = (name for name in _CHANGEABLE if name in vars(a.position))
        return [name for name in names if getattr(a.position, name) != getattr(b.position, name)]


def _append_mean(x: jax.Array, old: int, new: int, axis: int) -> jax.Array:
    """Extends the first `old` entries of an array along `axis` to `new` entries; each new entry is their mean."""
    old_entries = jax.lax.slice_in_dim(x, 0, old, axis=axis)
    mean = old_entries.mean(axis=axis, keepdims=True)
    return jnp.concatenate([old_entries, jnp.repeat(mean, new - old, axis=axis)], axis=axis)


def _max_lengths(before: ModelConfig, ours: ModelConfig) -> tuple[int, int]:
    old, new = before.position.max_length, ours.position.max_length
    assert isinstance(old, int) and isinstance(new, int)  # "auto" values were replaced earlier
    return old, new


def _repeat(x: jax.Array, rows: int) -> jax.Array:
    """Repeats the rows of a table x [T, D] in order, up to `rows` rows."""
    return x[np.arange(rows) % len(x)]


def _interpolate(x: jax.Array, rows: int) -> jax.Array:
    """Interpolates a table x [T, D] linearly to `rows` rows; the first and the last row are unchanged."""
    positions = np.linspace(0, len(x) - 1, rows)
    lower = np.minimum(positions.astype(int), max(len(x) - 2, 0))
    upper, fraction = np.minimum(lower + 1, len(x) - 1), (positions - lower)[:, None].astype(np.float32)
    # [T, D] -> [T', D]
    return x[lower] * (1 - fraction) + x[upper] * fraction
