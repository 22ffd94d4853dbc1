"""Shows what a model has learned at the end of a run: masks and spans it fills in, texts it continues."""

from collections.abc import Iterator
from typing import Optional

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pretrainax.data.batch import HostBatch, has_prefix, is_encoder_decoder, is_gathered
from pretrainax.models import AnyModel
from pretrainax.sharding.arrays import constrain
from pretrainax.sharding.param_paths import PyTree
from pretrainax.tokenization.base import Tokenizer


def samples(model: AnyModel, params: PyTree, batch: HostBatch, tokenizer: Tokenizer, count: int = 4) -> Iterator[str]:
    """Yields a text for each of the first `count` rows of a host batch, of a packed row its first example.

    The names of the batch decide what is asked.
    """
    batch = {name: value[:count] for name, value in batch.items() if name not in ("loss_weights", "targets")} | {
        "targets": batch["targets"][:count] * (batch["loss_weights"][:count] > 0)
    }
    if is_gathered(batch):
        return _fill_masks(model, params, batch, tokenizer)
    return (_write if is_encoder_decoder(batch) else _continue)(model, params, batch, tokenizer)


def _example(batch: HostBatch, row: int, *names: str) -> Iterator[np.ndarray]:
    """Yields the arrays of a row, without the padding and without what is packed behind its first example."""
    for name in names:
        segments = batch.get("encoder_segment_ids" if name.startswith("encoder") else "segment_ids")
        values = batch[name][row]
        yield values if segments is None else values[: np.count_nonzero(segments[row] == 1)]


def _guess(guess: list[int], truth: list[int], tokenizer: Tokenizer) -> str:
    """Writes "[guess]" where it is right, "[guess ≠ truth]" where it is not."""
    right = "" if list(guess) == list(truth) else f" ≠ {tokenizer.decode(truth).strip()}"
    return f" [{tokenizer.decode(guess).strip() or '␣'}{right}] "


def _fill_masks(model, params, batch, tokenizer) -> Iterator[str]:
    @jax.jit
    def guess(params, batch):
        logits = model.apply({"params": params}, batch, deterministic=True).heads["lm"].logits()
        return constrain(jnp.argmax(logits, axis=-1), P())  # [B, K, V] -> [B, K], whole in every process

    guesses = np.asarray(guess(params, batch))
    for row in range(len(guesses)):
        (tokens,) = _example(batch, row, "tokens")
        answers = {
            int(position): ([guess], [target])
            for position, guess, target in zip(
                batch["masked_positions"][row], guesses[row], batch["targets"][row], strict=True
            )
            if target and position < len(tokens)  # empty slots have no weight
        }
        yield _interleave(tokens, answers, tokenizer)


def _write(model, params, batch, tokenizer) -> Iterator[str]:
    """Yields what the decoder says to the encoder's text: its spans, or a text of its own beside the true one.

    It says as much as was taken out: left free, a small model says nothing but sentinels.
    """
    vocabulary = tokenizer.vocabulary
    special = np.isin(np.arange(model.config.vocab_size), [*vocabulary.sentinels, vocabulary.eos, vocabulary.pad])
    kept = special[batch["tokens"]]  # the decoder's input: which spans there are, and where they end
    kept[:, 0] = True
    guesses = _decode(model, params, batch, kept, banned=special)
    for row in range(len(guesses)):
        source, truth = _example(batch, row, "encoder_tokens", "targets")
        # input -> what was predicted: one place to the left; of the last target there is no guess
        said = np.append(guesses[row, 1 : len(truth)], truth[-1])
        if np.isin(source, vocabulary.sentinels).any():
            said, truth = _spans(said, vocabulary), _spans(truth, vocabulary)
            holes = {i: int(token) for i, token in enumerate(source) if int(token) in truth}
            answers = {i: (said.get(token, []), truth[token]) for i, token in holes.items()}
            yield _interleave(source, answers, tokenizer)
        else:
            said, truth = said[~special[said]], truth[~special[truth]]
            yield f"{tokenizer.decode(source).strip()} ⟶{_guess(said.tolist(), truth.tolist(), tokenizer)}".rstrip()


def _spans(ids: np.ndarray, vocabulary) -> dict[int, list[int]]:
    """Reads `<X> for inviting <Y> last </s>` as {X: [for, inviting], Y: [last]}."""
    spans, current = {}, []
    ends = np.flatnonzero(
        ids == vocabulary.eos
    )  # the last one ends the targets; others are ends of documents in a span
    for token in map(int, ids[: ends[-1]] if ends.size else ids):
        if token in vocabulary.sentinels:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    return spans


def _interleave(tokens: np.ndarray, answers: dict[int, tuple[list[int], list[int]]], tokenizer: Tokenizer) -> str:
    """Returns the text of `tokens` with an answer (guess, truth) in place of the token at each key."""
    pieces, start = [], 0
    for place in [*sorted(answers), len(tokens)]:
        pieces.append(tokenizer.decode(tokens[start:place]).strip())
        if place < len(tokens):
            pieces.append(_guess(*answers[place], tokenizer))
        start = place + 1
    return " ".join("".join(pieces).split())


def _continue(model, params, batch, tokenizer) -> Iterator[str]:
    """Yields the first half of each window, or its prefix, then how the model goes on, drawn at temperature 0.8."""
    length = batch["tokens"].shape[1]
    kept = np.broadcast_to(np.arange(length) < length // 2, batch["tokens"].shape)
    if has_prefix(batch):  # what stands in it is seen from before its place, so it cannot be filled in
        kept = (batch["prefix_mask"] > 0) | (np.arange(length) == 0)
    drawn = _decode(model, params, batch, kept, temperature=0.8)
    for row, tokens in enumerate(drawn):
        start = int(kept[row].argmin())
        end = np.count_nonzero(batch["segment_ids"][row] == 1) if has_prefix(batch) else length
        yield f"{tokenizer.decode(tokens[:start]).strip()} ⟶ {tokenizer.decode(tokens[start:end]).strip()}"


def _decode(
    model, params, batch: HostBatch, kept: np.ndarray, banned: Optional[np.ndarray] = None, temperature: float = 0.0
) -> np.ndarray:
    """Returns batch["tokens"] [B, T] with the places that are not `kept` [B, T] filled in, each from those before it.

    Tokens `banned` [V] are not drawn. The whole stack runs again for each place: simple, and enough for a handful of
    short samples.
    """

    @jax.jit
    def extend(params, batch, tokens, kept, place, key):
        said = model.apply({"params": params}, {**batch, "tokens": tokens}, deterministic=True).heads["lm"]
        last = jax.lax.dynamic_slice_in_dim(said.features, place - 1, 1, axis=1)  # [B, T, D] -> [B, 1, D]
        logits = said.replace(features=last).logits()[:, 0]  # [B, V]
        if banned is not None:
            logits = jnp.where(banned[None], -jnp.inf, logits)
        drawn = jax.random.categorical(key, logits / temperature) if temperature else jnp.argmax(logits, axis=-1)
        tokens = jnp.where(kept | (jnp.arange(length)[None] != place), tokens, drawn[:, None].astype(tokens.dtype))
        return constrain(tokens, P())  # whole in every process

    length = kept.shape[1]
    tokens = jnp.where(kept, batch["tokens"], 0)  # what is not yet filled in is not seen: the stack is causal
    keys = jax.random.split(jax.random.key(0), length)
    for place in np.flatnonzero(~kept.all(axis=0)):
        tokens = extend(params, batch, tokens, kept, place, keys[place])
    return np.asarray(tokens)
