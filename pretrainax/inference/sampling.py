"""Chooses the next token of each row: penalties, limits and cuts of the logits, then the best or a draw.

Pure functions that jit takes, of logits [B, V] in float32, in the order of transformers' processors, so that results
can be compared: penalties for what was said, what may be said at all, temperature, top-k, top-p, min-p, typical.
What is cut has the logit -inf, and the most likely token always stays.
"""

from typing import NamedTuple, Optional, TypeAlias, Union

import jax
import jax.numpy as jnp

from pretrainax.inference.constraints import Automaton, allowed_next

Number: TypeAlias = Union[float, jax.Array]


class Rules(NamedTuple):
    """Says how tokens are chosen; a pytree. Where an option is None nothing is computed for it."""

    allowed: jax.Array  # [V] bool: ids that may be said at all
    end: Union[int, jax.Array]  # the id that ends a text; -1: none does
    automata: tuple[Automaton, ...] = ()  # each allows what may come next
    repetition_penalty: Optional[Number] = None
    frequency_penalty: Optional[Number] = None
    presence_penalty: Optional[Number] = None
    temperature: Optional[Number] = None  # None: the best is taken, and what follows here is not looked at
    top_k: Optional[Union[int, jax.Array]] = None
    top_p: Optional[Number] = None
    min_p: Optional[Number] = None
    typical_p: Optional[Number] = None

    @property
    def counts(self) -> bool:
        """Returns True if what was said before counts."""
        return any(x is not None for x in (self.repetition_penalty, self.frequency_penalty, self.presence_penalty))


class History(NamedTuple):
    """Holds what rules need to know of what each row has read and said so far."""

    seen: Optional[jax.Array]  # [B, V] bool: ids of the prompt and of what was said; None: no rule counts
    said: Optional[jax.Array]  # [B, V] int32: how often an id was said
    states: tuple[jax.Array, ...]  # [B] int32 each: where the rules' automata are

    def take(self, rows: jax.Array) -> "History":
        """Returns that of rows [B'] (indices into B; repeated ones too)."""
        return jax.tree.map(lambda x: x[rows], self)

    def after(self, tokens: jax.Array, rules: Rules) -> "History":
        """Returns the history once each row has said its token of `tokens` [B]."""
        states = tuple(a.step(state, tokens) for a, state in zip(rules.automata, self.states, strict=True))
        if self.seen is None or self.said is None:
            return History(None, None, states)
        rows = jnp.arange(len(tokens))
        return History(self.seen.at[rows, tokens].set(True), self.said.at[rows, tokens].add(1), states)


def history_of(tokens: jax.Array, is_read: jax.Array, rules: Rules) -> History:
    """Returns the history of rows that have read `tokens` [B, T] where `is_read` [B, T], and said nothing."""
    rows = jnp.arange(len(tokens))
    states = tuple(jnp.zeros(len(tokens), jnp.int32) for _ in rules.automata)
    if not rules.counts:
        return History(None, None, states)
    seen = jnp.zeros((len(tokens), len(rules.allowed)), jnp.int32).at[rows[:, None], tokens].max(is_read.astype(int))
    return History(seen > 0, jnp.zeros_like(seen), states)


# --- what a row may say ----------------------------------------------------------------------------------------------


def limited(logits: jax.Array, rules: Rules, history: History) -> jax.Array:
    """Returns logits (or log-probabilities) after the penalties, -inf where a rule forbids a token: [B, V]."""
    if rules.repetition_penalty is not None:
        assert history.seen is not None
        logits = penalise_repetition(logits, history.seen, rules.repetition_penalty)
    if rules.frequency_penalty is not None or rules.presence_penalty is not None:
        assert history.said is not None
        frequency, presence = (0.0 if x is None else x for x in (rules.frequency_penalty, rules.presence_penalty))
        logits = penalise_counts(logits, history.said, frequency, presence)
    allowed = rules.allowed[None]
    for automaton, states in zip(rules.automata, history.states, strict=True):
        allowed = allowed & allowed_next(automaton, states)
    return jnp.where(allowed, logits, -jnp.inf)


def penalise_repetition(logits: jax.Array, seen: jax.Array, penalty: Number) -> jax.Array:
    """Divides the logits of tokens that were read or said by `penalty`, or multiplies them where they are negative
    (Keskar et al. 2019, arXiv 1909.05858, section 4.1, as it is used everywhere: there they are only divided)."""
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def penalise_counts(logits: jax.Array, said: jax.Array, frequency: Number, presence: Number) -> jax.Array:
    """Takes `frequency` off the logit of a token for each time that it was said, and `presence` once.

    The prompt does not count. (The penalties of OpenAI's interface, which other programs took over.)
    """
    return logits - frequency * said.astype(logits.dtype) - presence * (said > 0).astype(logits.dtype)


# --- what a draw leaves out ------------------------------------------------------------------------------------------


def keep_top_k(logits: jax.Array, k: Union[int, jax.Array]) -> jax.Array:
    """Keeps the k most likely tokens, and those as likely as the last of them (Fan et al. 2018, arXiv 1805.04833,
    section 5.1)."""
    ordered = jnp.sort(logits, axis=-1, descending=True)
    least = jax.lax.dynamic_index_in_dim(ordered, jnp.minimum(k, logits.shape[-1]) - 1, axis=-1)
    return jnp.where(logits < least, -jnp.inf, logits)


def keep_top_p(logits: jax.Array, p: Number) -> jax.Array:
    """Keeps the nucleus: the fewest tokens, likeliest first, of at least the probability p together (Holtzman et al.
    2020, arXiv 1904.09751, section 3.1)."""
    ordered = jnp.sort(logits, axis=-1, descending=True)
    chance = jax.nn.softmax(ordered, axis=-1)
    kept = (jnp.cumsum(chance, axis=-1) - chance < p).at[:, 0].set(True)
    least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < least, -jnp.inf, logits)


def keep_min_p(logits: jax.Array, p: Number) -> jax.Array:
    """Keeps tokens at least p times as likely as the likeliest (Nguyen et al. 2024, arXiv 2407.01082, section 3)."""
    highest = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(logits - highest < jnp.log(p), -jnp.inf, logits)


def keep_typical(logits: jax.Array, mass: Number) -> jax.Array:
    """Keeps the fewest tokens of at least the probability `mass` together, those first whose information is nearest to
    the entropy of the distribution (Meister et al. 2023, arXiv 2202.00666, section 4)."""
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    chance = jnp.exp(log_probs)
    entropy = -jnp.sum(jnp.where(chance > 0, chance * log_probs, 0.0), axis=-1, keepdims=True)
    distance = jnp.abs(-log_probs - entropy)  # of what is cut already, infinite
    order = jnp.argsort(distance, axis=-1)
    total = jnp.cumsum(jnp.take_along_axis(chance, order, axis=-1), axis=-1)
    last = jnp.minimum(jnp.sum(total < mass, axis=-1, keepdims=True), logits.shape[-1] - 1)
    farthest = jnp.take_along_axis(distance, jnp.take_along_axis(order, last, axis=-1), axis=-1)
    return jnp.where(distance > farthest, -jnp.inf, logits)


def cut(logits: jax.Array, rules: Rules) -> jax.Array:
    """Returns the logits that a draw is made from, [B, V]: at the temperature, without what the rules leave out."""
    assert rules.temperature is not None
    logits = logits / rules.temperature
    if rules.top_k is not None:
        logits = keep_top_k(logits, rules.top_k)
    if rules.top_p is not None:
        logits = keep_top_p(logits, rules.top_p)
    if rules.min_p is not None:
        logits = keep_min_p(logits, rules.min_p)
    if rules.typical_p is not None:
        logits = keep_typical(logits, rules.typical_p)
    return logits


# --- the choice ------------------------------------------------------------------------------------------------------


def row_keys(seed: int, prompts: jax.typing.ArrayLike, copies: jax.typing.ArrayLike) -> jax.Array:
    """Returns the key of each row, [B], of the numbers of its prompt and of its copy: whatever the batch, the same."""
    key = jax.random.key(seed)
    return jax.vmap(lambda prompt, copy: jax.random.fold_in(jax.random.fold_in(key, prompt), copy))(prompts, copies)


def choose(logits: jax.Array, rules: Rules, history: History, keys: jax.Array, number: jax.Array) -> jax.Array:
    """Returns the next token of each row, int32 [B]: the best, or one drawn with the row's key for token `number`."""
    logits = limited(logits, rules, history)
    if rules.temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    draw = lambda key, row: jax.random.categorical(jax.random.fold_in(key, number), row)  # noqa: E731
    return jax.vmap(draw)(keys, cut(logits, rules)).astype(jnp.int32)
