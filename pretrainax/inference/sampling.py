"""Selects the next token of each row: processes the logits, then takes the argmax or draws a sample.

All functions are pure and can be jitted. They take float32 logits [B, V]. The operations are in the same order as
transformers' logits processors, so that results are comparable: penalties, allowed tokens, temperature, top-k, top-p,
min-p, typical-p. Removed tokens get the logit -inf. Each truncation keeps at least one token. All truncations except
typical-p keep the most likely token.
"""

from typing import NamedTuple, Optional, TypeAlias, Union

import jax
import jax.numpy as jnp

from pretrainax.inference.constraints import Automaton, allowed_next

Number: TypeAlias = Union[float, jax.Array]


class Rules(NamedTuple):
    """The options of token selection, as a pytree. An option that is None adds no computation."""

    allowed: jax.Array  # [V] bool: True for ids that may be generated
    ends: jax.Array  # [E] int32: the ids that end a generated text; [0]: none
    automata: tuple[Automaton, ...] = ()  # constraints on the next token
    repetition_penalty: Optional[Number] = None
    frequency_penalty: Optional[Number] = None
    presence_penalty: Optional[Number] = None
    temperature: Optional[Number] = None  # None: argmax, which ignores the options below
    top_k: Optional[Union[int, jax.Array]] = None
    top_p: Optional[Number] = None
    min_p: Optional[Number] = None
    typical_p: Optional[Number] = None

    def is_end(self, tokens: jax.Array) -> jax.Array:
        """Returns a bool array with the shape of `tokens`, True for ids that end a text."""
        return jnp.isin(tokens, self.ends)

    @property
    def counts(self) -> bool:
        """Returns True if a penalty is set, so that `History` must count the tokens read and generated so far."""
        return any(x is not None for x in (self.repetition_penalty, self.frequency_penalty, self.presence_penalty))


class History(NamedTuple):
    """The state of token selection for each row: the tokens read and generated so far, and the automata states."""

    used: Optional[jax.Array]  # [B, V] bool: True for ids in the prompt or the generated text; None: no penalty
    counts: Optional[jax.Array]  # [B, V] int32: number of times each id was generated; None: no penalty
    states: tuple[jax.Array, ...]  # state of each automaton in `Rules.automata`, [B] int32

    def take(self, rows: jax.Array) -> "History":
        """Returns the history of the rows at the indices `rows` [B'], which may repeat."""
        return jax.tree.map(lambda x: x[rows], self)

    def after(self, tokens: jax.Array, rules: Rules) -> "History":
        """Returns the history after each row has generated its next token, `tokens` [B]."""
        states = tuple(a.step(state, tokens) for a, state in zip(rules.automata, self.states, strict=True))
        if self.used is None or self.counts is None:
            return History(None, None, states)
        rows = jnp.arange(len(tokens))
        return History(self.used.at[rows, tokens].set(True), self.counts.at[rows, tokens].add(1), states)


def history_of(tokens: jax.Array, is_read: jax.Array, rules: Rules) -> History:
    """Computes the history of B prompts, before any token is generated.

    Args:
      tokens: token ids of the prompts [B, T], with padding.
      is_read: [B, T] bool, False for padding.
    """
    rows = jnp.arange(len(tokens))
    states = tuple(jnp.zeros(len(tokens), jnp.int32) for _ in rules.automata)
    if not rules.counts:
        return History(None, None, states)
    is_used = jnp.zeros((len(tokens), len(rules.allowed)), jnp.int32).at[rows[:, None], tokens].max(is_read.astype(int))
    return History(is_used > 0, jnp.zeros_like(is_used), states)


# --- penalties and constraints ---------------------------------------------------------------------------------------


def processed_logits(logits: jax.Array, rules: Rules, history: History) -> jax.Array:
    """Applies the penalties to logits or log-probabilities [B, V], and sets tokens that are not allowed to -inf."""
    if rules.repetition_penalty is not None:
        assert history.used is not None
        logits = penalize_repetition(logits, history.used, rules.repetition_penalty)
    if rules.frequency_penalty is not None or rules.presence_penalty is not None:
        assert history.counts is not None
        frequency, presence = (0.0 if x is None else x for x in (rules.frequency_penalty, rules.presence_penalty))
        logits = penalize_counts(logits, history.counts, frequency, presence)
    allowed = rules.allowed[None]
    for automaton, states in zip(rules.automata, history.states, strict=True):
        allowed = allowed & allowed_next(automaton, states)
    return jnp.where(allowed, logits, -jnp.inf)


def penalize_repetition(logits: jax.Array, seen: jax.Array, penalty: Number) -> jax.Array:
    """Divides the positive logits of seen tokens by `penalty`, and multiplies their negative logits by it.

    Source: Keskar et al. 2019, arXiv 1909.05858, section 4.1. The paper divides all logits; this variant is common in
    libraries.

    Args:
      seen: [B, V] bool, True for ids in the prompt or the generated text.
    """
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def penalize_counts(logits: jax.Array, said: jax.Array, frequency: Number, presence: Number) -> jax.Array:
    """Subtracts the frequency and presence penalties from the logits of generated tokens; ignores prompt tokens.

    The penalty of a token that was generated n > 0 times is n * `frequency` + `presence`. These penalties come from the
    OpenAI API.

    Args:
      said: [B, V] int32, number of times each id was generated.
    """
    return logits - frequency * said.astype(logits.dtype) - presence * (said > 0).astype(logits.dtype)


# --- truncation of the distribution ----------------------------------------------------------------------------------


def keep_top_k(logits: jax.Array, k: Union[int, jax.Array]) -> jax.Array:
    """Keeps the k most likely tokens, and all tokens with the same probability as the k-th token.

    Source: Fan et al. 2018, arXiv 1805.04833, section 5.1.
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    threshold = jax.lax.dynamic_index_in_dim(ordered, jnp.minimum(k, logits.shape[-1]) - 1, axis=-1)
    return jnp.where(logits < threshold, -jnp.inf, logits)


def keep_top_p(logits: jax.Array, p: Number) -> jax.Array:
    """Keeps the nucleus: the smallest set of most likely tokens with a total probability of at least p.

    Source: Holtzman et al. 2020, arXiv 1904.09751, section 3.1.
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probability = jax.nn.softmax(ordered, axis=-1)
    nucleus = (jnp.cumsum(probability, axis=-1) - probability < p).at[:, 0].set(True)
    threshold = jnp.min(jnp.where(nucleus, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < threshold, -jnp.inf, logits)


def keep_min_p(logits: jax.Array, p: Number) -> jax.Array:
    """Keeps the tokens that are at least p times as likely as the most likely token.

    Source: Nguyen et al. 2024, arXiv 2407.01082, section 3.
    """
    highest = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(logits - highest < jnp.log(p), -jnp.inf, logits)


def keep_typical(logits: jax.Array, mass: Number) -> jax.Array:
    """Keeps the smallest set of most typical tokens with a total probability of at least `mass`.

    The most typical token is the token whose information content, -log p, is closest to the entropy of the
    distribution. Source: Meister et al. 2023, arXiv 2202.00666, section 4.
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
    """Applies temperature and truncation (top-k, top-p, min-p, typical-p) to logits [B, V], for sampling."""
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
    """Computes random keys [B] that depend only on the seed, the prompt index and the sample index, not on the batch.

    Args:
      prompts: [B] prompt index of each row.
      copies: [B] index of each row among the samples of its prompt.
    """
    key = jax.random.key(seed)
    return jax.vmap(lambda prompt, copy: jax.random.fold_in(jax.random.fold_in(key, prompt), copy))(prompts, copies)


def choose(logits: jax.Array, rules: Rules, history: History, keys: jax.Array, number: jax.Array) -> jax.Array:
    """Selects the next token of each row, int32 [B]: the most likely token, or a sample if `rules.temperature` is set.

    Args:
      keys: [B] random key of each row.
      number: [] index of the token in the generated text. The key and this index determine the random numbers.
    """
    logits = processed_logits(logits, rules, history)
    if rules.temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    sample = lambda key, row: jax.random.categorical(jax.random.fold_in(key, number), row)  # noqa: E731
    return jax.vmap(sample)(keys, truncate_logits(logits, rules)).astype(jnp.int32)
