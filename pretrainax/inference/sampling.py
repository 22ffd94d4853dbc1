"""Selects the next token of each row: processes the logits, then takes the argmax or draws a sample.

All functions are pure and can be jitted. They take float32 logits [B, V]. The operations are in the same order as
transformers' logits processors, so that results are comparable: penalties, allowed tokens, forced tokens, temperature,
top-k, top-p, min-p, typical-p, epsilon, eta. Removed tokens get the logit -inf. Each truncation keeps at least one
token. All truncations except typical-p keep the most likely token.
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
    epsilon_cutoff: Optional[Number] = None
    eta_cutoff: Optional[Number] = None
    no_repeat_ngram_size: Optional[Union[int, jax.Array]] = None
    banned_sequences: tuple[jax.Array, ...] = ()  # token sequences that never occur, [W, n] for each length n above 1
    min_new_tokens: Optional[Union[int, jax.Array]] = None
    min_length: Optional[Union[int, jax.Array]] = None  # includes the prompt
    allowed_first: Optional[jax.Array] = None  # [V] bool: ids that may be the first token (after a forced token)
    forced_first: Optional[jax.Array] = None  # [V] bool: the ids that follow a prompt of one token
    forced_last: Optional[jax.Array] = None  # [V] bool: the ids of the last token of a text with the maximum length
    stops: Optional[Automaton] = None  # beam search: its forbidden moves complete a stop string
    renormalizes: Optional[bool] = None  # beam search: scores use log-probabilities of the allowed tokens
    stops_when_full: Optional[bool] = None  # beam search ends when all its sequences are finished
    stops_at_best: Optional[bool] = None  # beam search ends when no sequence can reach a higher score

    def is_end(self, tokens: jax.Array) -> jax.Array:
        """Returns a bool array with the shape of `tokens`, True for ids that end a text."""
        return jnp.isin(tokens, self.ends)

    @property
    def counts(self) -> bool:
        """Returns True if a penalty is set, so that `History` must count the tokens read and generated so far."""
        return any(x is not None for x in (self.repetition_penalty, self.frequency_penalty, self.presence_penalty))

    @property
    def reads_tokens(self) -> bool:
        """Returns True if the next token depends on the previous tokens, so that `History` must store them."""
        return self.no_repeat_ngram_size is not None or bool(self.banned_sequences)

    @property
    def may_block(self) -> bool:
        """Returns True if a text can reach a state in which no token is allowed."""
        options = (self.min_new_tokens, self.min_length, self.allowed_first)
        return bool(self.automata) or self.reads_tokens or any(x is not None for x in options)


class History(NamedTuple):
    """The state of token selection for each row: the tokens read and generated so far, and the automata states."""

    used: Optional[jax.Array]  # [B, V] bool: True for ids in the prompt or the generated text; None: no penalty
    counts: Optional[jax.Array]  # [B, V] int32: number of times each id was generated; None: no penalty
    states: tuple[jax.Array, ...]  # state of each automaton in `Rules.automata`, [B] int32
    stop_states: Optional[jax.Array]  # state of `Rules.stops`, [B] int32; None: no stop strings
    tokens: Optional[jax.Array]  # [B, N] tokens of the prompt and the generated text; None: `Rules` does not read them
    lengths: jax.Array  # [B] number of these tokens
    prompt_lengths: jax.Array  # [B]
    max_lengths: Optional[jax.Array]  # [B] maximum of `lengths`; None: no token is forced at the end

    @property
    def counts_of_new(self) -> jax.Array:
        """The number of generated tokens of each row, [B]."""
        return self.lengths - self.prompt_lengths

    def take(self, rows: jax.Array) -> "History":
        """Returns the history of the rows at the indices `rows` [B'], which may repeat."""
        return jax.tree.map(lambda x: x[rows], self)

    def take_beams(self, parents: jax.Array) -> "History":
        """Returns the history of each prompt's rows at the indices `parents` [B, K], for K rows per prompt.

        Unlike `take`, it needs no communication between devices.
        """
        prompts, beams = parents.shape
        take = lambda x: jax.vmap(lambda x, i: x[i])(x.reshape(prompts, beams, *x.shape[1:]), parents)  # noqa: E731
        return jax.tree.map(lambda x: take(x).reshape(x.shape), self)

    def after(self, tokens: jax.Array, rules: Rules) -> "History":
        """Returns the history after each row has generated its next token, `tokens` [B]."""
        history = self._replace(lengths=self.lengths + 1)
        states = tuple(a.step(state, tokens) for a, state in zip(rules.automata, self.states, strict=True))
        history = history._replace(states=states)
        if self.used is not None and self.counts is not None:
            used = jax.vmap(lambda row, i: row.at[i].set(True))(self.used, tokens)
            counts = jax.vmap(lambda row, i: row.at[i].add(1))(self.counts, tokens)
            history = history._replace(used=used, counts=counts)
        if self.tokens is not None:
            append = jax.vmap(lambda row, i, token: row.at[i].set(token))
            history = history._replace(tokens=append(self.tokens, self.lengths, tokens))
        if self.stop_states is not None and rules.stops is not None:  # a completed stop string has ended the text
            history = history._replace(stop_states=jnp.maximum(rules.stops.step(self.stop_states, tokens), 0))
        return history


def history_of(
    tokens: jax.Array, is_read: jax.Array, rules: Rules, limits: Optional[jax.Array] = None, room: int = 0
) -> History:
    """Computes the history of B prompts, before any token is generated.

    Args:
      tokens: token ids of the prompts [B, T], with padding on the right.
      is_read: [B, T] bool, False for padding.
      limits: [B] maximum number of generated tokens.
      room: at least the maximum of `limits`.
    """
    lengths, start = is_read.sum(1, dtype=jnp.int32), jnp.zeros(len(tokens), jnp.int32)
    used = _any_of(tokens, is_read, len(rules.allowed)) if rules.counts else None
    return History(
        used=used,
        counts=None if used is None else jnp.zeros(used.shape, jnp.int32),
        states=(start,) * len(rules.automata),
        stop_states=None if rules.stops is None else start,
        tokens=jnp.pad(tokens, ((0, 0), (0, room))) if rules.reads_tokens else None,
        lengths=lengths,
        prompt_lengths=lengths,
        max_lengths=None if limits is None or rules.forced_last is None else lengths + limits,
    )


def _any_of(ids: jax.Array, is_set: jax.Array, num_ids: int) -> jax.Array:
    """Returns a bool mask [B, V], True for the ids [B, N] at which `is_set` is True; rows stay on their devices."""
    mark = lambda ids, is_set: jnp.zeros(num_ids, bool).at[ids].max(is_set)  # noqa: E731
    return jax.vmap(mark)(ids, is_set)


# --- penalties and constraints ---------------------------------------------------------------------------------------


def processed_logits(logits: jax.Array, rules: Rules, history: History) -> jax.Array:
    """Applies penalties to logits or log-probabilities [B, V], and sets all but the allowed or forced tokens to -inf.

    A forced token takes precedence over all constraints; its logit is 0, as in transformers.
    """
    if rules.repetition_penalty is not None:
        assert history.used is not None
        logits = penalize_repetition(logits, history.used, rules.repetition_penalty)
    if rules.frequency_penalty is not None or rules.presence_penalty is not None:
        assert history.counts is not None
        frequency, presence = (0.0 if x is None else x for x in (rules.frequency_penalty, rules.presence_penalty))
        logits = penalize_counts(logits, history.counts, frequency, presence)
    logits = jnp.where(_allowed_now(rules, history), logits, -jnp.inf)
    if rules.forced_first is not None:
        logits = _forced(logits, rules.forced_first, history.lengths == 1)
    if rules.forced_last is not None:
        assert history.max_lengths is not None
        logits = _forced(logits, rules.forced_last, history.lengths + 1 == history.max_lengths)
    return logits


def _forced(logits: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    """Sets the logits of the rows [B] to 0 for the ids [V], both bool, and to -inf for all other ids."""
    return jnp.where(rows[:, None], jnp.where(ids, 0.0, -jnp.inf)[None], logits)


def _allowed_now(rules: Rules, history: History) -> jax.Array:
    """Returns a bool mask of the tokens that the constraints allow next, [B, V] or [1, V]."""
    allowed = rules.allowed[None]
    for automaton, states in zip(rules.automata, history.states, strict=True):
        allowed = allowed & allowed_next(automaton, states)
    if rules.no_repeat_ngram_size is not None:
        allowed = allowed & ~repeated_next(history, rules.no_repeat_ngram_size, len(rules.allowed))
    for sequences in rules.banned_sequences:
        allowed = allowed & ~completed_next(history, sequences, len(rules.allowed))
    ends = rules.is_end(jnp.arange(len(rules.allowed)))[None]
    for minimum, lengths in ((rules.min_new_tokens, history.counts_of_new), (rules.min_length, history.lengths)):
        if minimum is not None:
            allowed = allowed & ~((lengths < minimum)[:, None] & ends)
    if rules.allowed_first is not None:
        skipped = 0 if rules.forced_first is None else (history.prompt_lengths == 1).astype(jnp.int32)
        allowed = allowed & ((history.counts_of_new != skipped)[:, None] | rules.allowed_first[None])
    return allowed


def repeated_next(history: History, size: Union[int, jax.Array], num_ids: int) -> jax.Array:
    """Returns a bool mask [B, V] of the tokens that would repeat n consecutive tokens of the prompt and the text.

    Source: Paulus et al. 2017, arXiv 1705.04304, section 2.5, for n = 3.

    Args:
      size: n, from 1.
      num_ids: V.
    """
    tokens, lengths = history.tokens, history.lengths
    assert tokens is not None
    index = jnp.arange(tokens.shape[1])[None]

    def compare(k: jax.Array, matches: jax.Array) -> jax.Array:
        """Compares the token k + 1 places before each token with the token k places before the end of the row."""
        last = jnp.take_along_axis(tokens, jnp.maximum(lengths[:, None] - 1 - k, 0), axis=1)
        return matches & (jnp.roll(tokens, k + 1, axis=1) == last)

    # True for the last token of each n-gram whose first n - 1 tokens are the last n - 1 tokens of the row.
    is_last = (index >= size - 1) & (index < lengths[:, None])
    is_last = jax.lax.fori_loop(0, jnp.asarray(size) - 1, compare, is_last)
    return _any_of(tokens, is_last, num_ids)


def completed_next(history: History, sequences: jax.Array, num_ids: int) -> jax.Array:
    """Returns a bool mask [B, V] of the tokens that would complete one of the sequences [W, n], n above 1."""
    assert history.tokens is not None
    size = sequences.shape[1] - 1
    index = history.lengths[:, None] - size + jnp.arange(size)[None]  # [B, n - 1]
    last = jnp.take_along_axis(history.tokens, jnp.maximum(index, 0), axis=1)
    is_prefix = (last[:, None] == sequences[None, :, :-1]).all(-1) & (history.lengths >= size)[:, None]  # [B, W]
    return _any_of(jnp.broadcast_to(sequences[None, :, -1], is_prefix.shape), is_prefix, num_ids)


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

    If the last tokens of the nucleus have equal probabilities, it keeps only the required number: the tokens with the
    highest ids, as in transformers. Source: Holtzman et al. 2020, arXiv 1904.09751, section 3.1.
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probability = jax.nn.softmax(ordered, axis=-1)
    is_needed = jnp.cumsum(probability, axis=-1) - probability < p
    size = jnp.maximum(jnp.sum(is_needed, axis=-1, keepdims=True), 1)
    threshold = jnp.take_along_axis(ordered, size - 1, axis=-1)
    ties = logits == threshold
    num_ties = size - jnp.sum(logits > threshold, axis=-1, keepdims=True)  # ties in the nucleus
    is_surplus = ties & (jnp.cumsum(ties[:, ::-1], axis=-1)[:, ::-1] > num_ties)
    return jnp.where((logits < threshold) | is_surplus, -jnp.inf, logits)


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
    distance = jnp.abs(-log_probs - _entropy(logits))  # infinite for removed tokens
    order = jnp.argsort(distance, axis=-1)
    total = jnp.cumsum(jnp.take_along_axis(probability, order, axis=-1), axis=-1)
    last = jnp.minimum(jnp.sum(total < mass, axis=-1, keepdims=True), logits.shape[-1] - 1)
    farthest = jnp.take_along_axis(distance, jnp.take_along_axis(order, last, axis=-1), axis=-1)
    return jnp.where(distance > farthest, -jnp.inf, logits)


def _entropy(logits: jax.Array) -> jax.Array:
    """Computes the entropy of each row's distribution in nats, [B, 1]."""
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    terms = jnp.where(log_probs > -jnp.inf, jnp.exp(log_probs) * log_probs, 0.0)
    return -jnp.sum(terms, axis=-1, keepdims=True)


def keep_likely(logits: jax.Array, probability: Number) -> jax.Array:
    """Keeps the tokens with at least this probability, and the most likely token.

    Source: Hewitt et al. 2022, arXiv 2210.15191, section 4.1 (epsilon sampling).

    Args:
      probability: a number, or one number for each row, [B, 1].
    """
    is_best = logits >= jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(is_best | (jax.nn.softmax(logits, axis=-1) >= probability), logits, -jnp.inf)


def keep_eta(logits: jax.Array, epsilon: Number) -> jax.Array:
    """Keeps the tokens with at least the probability min(epsilon, sqrt(epsilon) · exp(-entropy)).

    Source: Hewitt et al. 2022, arXiv 2210.15191, section 4.2 (eta sampling).
    """
    return keep_likely(logits, jnp.minimum(epsilon, jnp.sqrt(epsilon) * jnp.exp(-_entropy(logits))))


def truncate_logits(logits: jax.Array, rules: Rules) -> jax.Array:
    """Applies temperature and truncation (top-k to eta) to logits [B, V], for sampling."""
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
    if rules.epsilon_cutoff is not None:
        logits = keep_likely(logits, rules.epsilon_cutoff)
    if rules.eta_cutoff is not None:
        logits = keep_eta(logits, rules.eta_cutoff)
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
