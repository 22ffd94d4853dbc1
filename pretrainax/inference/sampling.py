"""Chooses the next token of each row: logits processors, then argmax or sampling.

These are pure, jittable functions of float32 logits [B, V]. They apply in the order of transformers' logits processors,
so that results are comparable: penalties, allowed tokens, temperature, top-k, top-p, min-p, typical-p. Removed tokens
get the logit -inf. The most likely token always remains.
"""

from typing import NamedTuple, Optional, TypeAlias, Union

import jax
import jax.numpy as jnp

from pretrainax.inference.constraints import Automaton, allowed_next

Number: TypeAlias = Union[float, jax.Array]


class Rules(NamedTuple):
    """Options of token selection, a pytree. An option that is None adds no computation."""

    allowed: jax.Array  # [V] bool: ids that may be generated
    end: Union[int, jax.Array]  # the id that ends a text; -1: no id
    automata: tuple[Automaton, ...] = ()  # constraints on the next token
    repetition_penalty: Optional[Number] = None
    frequency_penalty: Optional[Number] = None
    presence_penalty: Optional[Number] = None
    temperature: Optional[Number] = None  # None: argmax, which ignores the options below
    top_k: Optional[Union[int, jax.Array]] = None
    top_p: Optional[Number] = None
    min_p: Optional[Number] = None
    typical_p: Optional[Number] = None

    @property
    def counts(self) -> bool:
        """Returns True if a rule depends on the tokens so far."""
        return any(x is not None for x in (self.repetition_penalty, self.frequency_penalty, self.presence_penalty))


class History(NamedTuple):
    """The state of the rules for each row: the tokens read and generated so far."""

    seen: Optional[jax.Array]  # [B, V] bool: ids of the prompt and the generated text; None: no rule needs it
    said: Optional[jax.Array]  # [B, V] int32: number of times that each id was generated
    states: tuple[jax.Array, ...]  # [B] int32 each: states of the rules' automata

    def take(self, rows: jax.Array) -> "History":
        """Returns the history of rows [B'], indices into B that may repeat."""
        return jax.tree.map(lambda x: x[rows], self)

    def after(self, tokens: jax.Array, rules: Rules) -> "History":
        """Returns the history after each row generates its token of `tokens` [B]."""
        states = tuple(a.step(state, tokens) for a, state in zip(rules.automata, self.states, strict=True))
        if self.seen is None or self.said is None:
            return History(None, None, states)
        rows = jnp.arange(len(tokens))
        return History(self.seen.at[rows, tokens].set(True), self.said.at[rows, tokens].add(1), states)


def history_of(tokens: jax.Array, is_read: jax.Array, rules: Rules) -> History:
    """Returns the history of prompts: rows that have read `tokens` [B, T] where `is_read` [B, T] is True."""
    rows = jnp.arange(len(tokens))
    states = tuple(jnp.zeros(len(tokens), jnp.int32) for _ in rules.automata)
    if not rules.counts:
        return History(None, None, states)
    seen = jnp.zeros((len(tokens), len(rules.allowed)), jnp.int32).at[rows[:, None], tokens].max(is_read.astype(int))
    return History(seen > 0, jnp.zeros_like(seen), states)


# --- penalties and constraints ---------------------------------------------------------------------------------------


def processed_logits(logits: jax.Array, rules: Rules, history: History) -> jax.Array:
    """Returns the logits or log-probabilities [B, V] after penalties, with -inf for forbidden tokens."""
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
    """Divides the positive logits of seen tokens by `penalty` and multiplies the negative ones by it.

    Source: Keskar et al. 2019, arXiv 1909.05858, section 4.1, in the common variant; the paper only divides.
    """
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def penalise_counts(logits: jax.Array, said: jax.Array, frequency: Number, presence: Number) -> jax.Array:
    """Subtracts `frequency` from the logit of a token for each time it was generated, and `presence` once.

    The prompt does not count. These are the penalties of the OpenAI API, which other libraries adopted.
    """
    return logits - frequency * said.astype(logits.dtype) - presence * (said > 0).astype(logits.dtype)


# --- truncation of the distribution ----------------------------------------------------------------------------------


def keep_top_k(logits: jax.Array, k: Union[int, jax.Array]) -> jax.Array:
    """Keeps the k most likely tokens, and ties with the last one.

    Source: Fan et al. 2018, arXiv 1805.04833, section 5.1.
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    least = jax.lax.dynamic_index_in_dim(ordered, jnp.minimum(k, logits.shape[-1]) - 1, axis=-1)
    return jnp.where(logits < least, -jnp.inf, logits)


def keep_top_p(logits: jax.Array, p: Number) -> jax.Array:
    """Keeps the nucleus: the smallest set of most likely tokens with a total probability of at least p.

    Source: Holtzman et al. 2020, arXiv 1904.09751, section 3.1.
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probability = jax.nn.softmax(ordered, axis=-1)
    nucleus = (jnp.cumsum(probability, axis=-1) - probability < p).at[:, 0].set(True)
    least = jnp.min(jnp.where(nucleus, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < least, -jnp.inf, logits)


def keep_min_p(logits: jax.Array, p: Number) -> jax.Array:
    """Keeps tokens that are at least p times as likely as the most likely token.

    Source: Nguyen et al. 2024, arXiv 2407.01082, section 3.
    """
    highest = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(logits - highest < jnp.log(p), -jnp.inf, logits)


def keep_typical(logits: jax.Array, mass: Number) -> jax.Array:
    """Keeps the smallest set of typical tokens with a total probability of at least `mass`.

    Tokens whose information content is closest to the entropy of the distribution come first. Source: Meister et al.
    2023, arXiv 2202.00666, section 4.
    """
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    probability = jnp.exp(log_probs)
    entropy = -jnp.sum(jnp.where(probability > 0, probability * log_probs, 0.0), axis=-1, keepdims=True)
    distance = jnp.abs(-log_probs - entropy)  # infinite for removed tokens
    order = jnp.argsort(distance, axis=-1)
    total = jnp.cumsum(jnp.take_along_axis(probability, order, axis=-1), axis=-1)
    last = jnp.minimum(jnp.sum(total < mass, axis=-1, keepdims=True), logits.shape[-1] - 1)
    farthest = jnp.take_along_axis(distance, jnp.take_along_axis(order, last, axis=-1), axis=-1)
    return jnp.where(distance > farthest, -jnp.inf, logits)


def truncate_logits(logits: jax.Array, rules: Rules) -> jax.Array:
    """Returns the logits [B, V] to sample from, after temperature and truncation."""
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


# --- selection -------------------------------------------------------------------------------------------------------


def row_keys(seed: int, prompts: jax.typing.ArrayLike, copies: jax.typing.ArrayLike) -> jax.Array:
    """Returns random keys [B] that depend on the numbers of the prompt and the copy, and not on the batch."""
    key = jax.random.key(seed)
    return jax.vmap(lambda prompt, copy: jax.random.fold_in(jax.random.fold_in(key, prompt), copy))(prompts, copies)


def choose(logits: jax.Array, rules: Rules, history: History, keys: jax.Array, number: jax.Array) -> jax.Array:
    """Returns the next token of each row, int32 [B]: argmax, or a sample with the row's key for token `number`."""
    logits = processed_logits(logits, rules, history)
    if rules.temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    sample = lambda key, row: jax.random.categorical(jax.random.fold_in(key, number), row)  # noqa: E731
    return jax.vmap(sample)(keys, truncate_logits(logits, rules)).astype(jnp.int32)
