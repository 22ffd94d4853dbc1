"""Makes rows for more tokens, and for more positions."""

import dataclasses
from collections.abc import Iterator
from typing import Literal, Optional

import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import Experiment, ModelConfig
from pretrainax.interop.adaptations.base import Adaptation, Making, Way

# What has an entry for each token of the vocabulary, and along which axis.
_OF_TOKENS = {
    "token_embedding/embedding": 0,
    "decoder_token_embedding/embedding": 0,
    "unembedding/kernel": 1,
    "unembedding/bias": 0,
}
_OF_POSITIONS = ("position_embedding/embedding", "decoder_position_embedding/embedding")
_LONGER = ("max_length", "theta", "scaling")  # fields of positions in which a longer context may differ


@dataclasses.dataclass
class WiderVocabulary(Adaptation):
    """Makes each new row of embeddings and output the mean of the old ones (Hewitt 2021)."""

    fields = ("vocab_size",)
    # ids of the start's tokenizer: rows after these are padding there, and new ones here; None: its rows are all tokens
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
                f"{name}, and config.model.vocab_size is {ours.vocab_size:,}, where there are {theirs.vocab_size:,} "
                "rows: set it to at least as many"
            )
        if (self.tokens or 1) > theirs.vocab_size:
            yield f"{name}, and there are {theirs.vocab_size:,} rows: set tokens to at most as many"

    def way(self, path: str, before: ModelConfig, ours: ModelConfig) -> Way:
        old, axis = self._old(before), _OF_TOKENS.get(path)
        if axis is None or old == ours.vocab_size:
            return Way(path)
        how = f"{ours.vocab_size - old:,} new rows, each the mean of {old:,}"
        return Way(path, (Making(how, lambda x: _with_mean(x, old, ours.vocab_size, axis)),))

    def effect(self, before: ModelConfig, ours: ModelConfig) -> str:
        old = self._old(before)
        if old == ours.vocab_size:
            return "there are as many rows as before"
        return f"logits of the {old:,} old tokens stay, those of the {ours.vocab_size - old:,} new ones are their mean"

    def _old(self, before: ModelConfig) -> int:
        """Returns how many rows are kept."""
        return before.vocab_size if self.tokens is None else self.tokens


@dataclasses.dataclass
class LongerContext(Adaptation):
    """Makes rows for more positions where they are learned; rotary ones may turn slower (`scaling`, `theta`)."""

    fields = ("position",)
    # repeat: the old ones again and again (Beltagy et al. 2020, section 5) | interpolate: all are stretched
    rows: Literal["repeat", "interpolate"] = "repeat"

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        if (position := experiment.model.position).max_length is None:
            yield (
                f"config.checkpoint.adapt has {self}, and config.model.position is {position}, which has no longest "
                "row: leave it out"
            )

    def before(self, ours: ModelConfig, theirs: ModelConfig) -> ModelConfig:
        there = {name: getattr(theirs.position, name) for name in self._changed(ours, theirs)}
        return dataclasses.replace(ours, position=dataclasses.replace(ours.position, **there))

    def mismatches(self, ours: ModelConfig, theirs: ModelConfig) -> Iterator[str]:
        name = f"config.checkpoint.adapt has {self}"
        if type(ours.position) is not type(theirs.position):
            yield f"{name}, and config.model.position is {ours.position}, there {theirs.position}: set it to that kind"
            return
        fixed = [field for field in vars(ours.position) if field not in _LONGER]
        for field in fixed:
            if (here := getattr(ours.position, field)) != (there := getattr(theirs.position, field)):
                yield f"{name}, and config.model.position.{field} is {here}, there {there}: set it to that"
        if theirs.position.max_length is None:
            yield f"{name}, and there is no longest row: leave it out"
            return
        old, new = _lengths(theirs, ours)
        if new < old:
            yield f"{name}, and config.model.position.max_length is {new:,}, there {old:,}: set it to at least that"

    def way(self, path: str, before: ModelConfig, ours: ModelConfig) -> Way:
        if path not in _OF_POSITIONS or before.position == ours.position:
            return Way(path)
        unused, old, new = (getattr(ours.position, "offset", 0), *_lengths(before, ours))
        how = f"{old:,} positions repeated" if self.rows == "repeat" else f"{old:,} positions stretched"
        lengthen = _repeated if self.rows == "repeat" else _stretched
        # [offset + T, D] -> [offset + T', D]; the rows that no position uses stay the first
        rows = Making(how, lambda x: jnp.concatenate([x[:unused], lengthen(x[unused:], new)]))
        return Way(path, (rows,))

    def effect(self, before: ModelConfig, ours: ModelConfig) -> str:
        said = [
            f"{name} {getattr(before.position, name)} -> {getattr(ours.position, name)}"
            for name in self._changed(before, ours)
        ]
        return "; ".join(said) or "there are as many positions as before"

    def _changed(self, a: ModelConfig, b: ModelConfig) -> list[str]:
        """Names the fields that this adaptation changes, and in which positions of one kind differ."""
        known = (name for name in _LONGER if name in vars(a.position))
        return [name for name in known if getattr(a.position, name) != getattr(b.position, name)]


def _with_mean(x: jax.Array, old: int, new: int, axis: int) -> jax.Array:
    """Returns x with `old` entries along an axis, and as many of their mean behind as make it `new`."""
    kept = jax.lax.slice_in_dim(x, 0, old, axis=axis)
    mean = kept.mean(axis=axis, keepdims=True)
    return jnp.concatenate([kept, jnp.repeat(mean, new - old, axis=axis)], axis=axis)


def _lengths(before: ModelConfig, ours: ModelConfig) -> tuple[int, int]:
    old, new = before.position.max_length, ours.position.max_length
    assert isinstance(old, int) and isinstance(new, int)  # a table is made once the numbers are known
    return old, new


def _repeated(x: jax.Array, rows: int) -> jax.Array:
    # [T, D] -> [T', D]
    return x[np.arange(rows) % len(x)]


def _stretched(x: jax.Array, rows: int) -> jax.Array:
    """Returns rows between those of x [T, D], so that the first and the last one stay the first and the last."""
    places = np.linspace(0, len(x) - 1, rows)
    left = np.minimum(places.astype(int), max(len(x) - 2, 0))
    right, share = np.minimum(left + 1, len(x) - 1), (places - left)[:, None].astype(np.float32)
    # [T, D] -> [T', D]
    return x[left] * (1 - share) + x[right] * share
