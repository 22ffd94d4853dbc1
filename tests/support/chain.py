"""A Markov chain over words with known conditional entropies, and models of each family that compute it exactly.

The models return the exact probabilities of the chain, as sums over all paths from one word to another. They replace
trained models, so that the tests run the code that scores trained models.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import MeshConfig
from pretrainax.inference.loaded import LoadedModel
from pretrainax.models import Outputs
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.sharding.mesh import make_mesh
from pretrainax.tokenization import ByteBPE, WordPiece
from pretrainax.tokenization.base import Tokenizer
from tests.support.tiny import get_config

WORDS = ("ka", "lo", "mi", "tu", "se", "ro")
# The next word is one of three, with these probabilities. The columns add up to 1 too, so all words are equally
# frequent.
TRANSITIONS = sum(share * np.roll(np.eye(len(WORDS)), shift, axis=1) for share, shift in ((0.6, 1), (0.3, 2), (0.1, 4)))
LONGEST = 40  # maximum number of words of a span; longer spans do not occur


def text_of(rng: np.random.Generator, count: int) -> str:
    """Draws a text of `count` words."""
    steps = rng.choice((1, 2, 4), size=count, p=(0.6, 0.3, 0.1))
    return " ".join(WORDS[i] for i in steps.cumsum() % len(WORDS))


def texts(count: int, length: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [text_of(rng, length) for _ in range(count)]


def states(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


@functools.cache
def ways(steps: int, doubt: float = 0.0) -> np.ndarray:
    """Returns the probability of each word `steps` words after another, [W, W].

    Each step is uniform over all words with probability `doubt`.
    """
    return np.linalg.matrix_power((1 - doubt) * TRANSITIONS + doubt / len(WORDS), steps)


# --- bits of a span for a model that knows the chain ------------------------------------------------------------------


def path(*words: int) -> float:
    """Returns the probability of the words after the first one."""
    return float(np.prod([TRANSITIONS[a, b] for a, b in zip(words, words[1:], strict=False)]))


def bits_given_left(left: str, span: str) -> float:
    return -np.log2(path(states(left)[-1], *states(span)))


def bits_given_both(left: str, span: str, right: str) -> float:
    """Returns the bits of a span, given both neighbors and the number of words."""
    a, s, b = states(left)[-1], states(span), states(right)[0]
    return -np.log2(path(a, *s, b) / ways(len(s) + 1)[a, b])


def bits_with_end(left: str, span: str, right: str) -> float:
    """Returns the bits of a span and its number of words.

    The number is geometric, because each word is the last one with probability `STOP`.
    """
    a, s, b = states(left)[-1], states(span), states(right)[0]
    law = [STOP * (1 - STOP) ** (k - 1) for k in range(1, LONGEST + 1)]
    return -np.log2(
        law[len(s) - 1] * path(a, *s, b) / sum(law[k - 1] * ways(k + 1)[a, b] for k in range(1, LONGEST + 1))
    )


def entropy(family: str, words: int) -> float:
    """Returns the expected number of bits of a span of `words` words, given the context that a family sees.

    Let a be the word before the span, s1, …, sk the span, and b the word after it. H(s | a) is k times the entropy of a
    step. H(s | a, b) = H(s, b | a) - H(b | a). If the number of words is coded too, the entropy of the geometric
    distribution is added, and b follows after any number of words.
    """
    step, law = _entropy(TRANSITIONS[0]), np.array([STOP * (1 - STOP) ** (k - 1) for k in range(1, LONGEST + 1)])
    if family == "decoder":
        return words * step
    if family == "encoder":
        return (words + 1) * step - _entropy(ways(words + 1)[0])
    behind = sum(p * ways(k + 1)[0] for k, p in enumerate(law, start=1))
    return _entropy(law) + (1 / STOP + 1) * step - _entropy(behind)


def _entropy(chances: np.ndarray) -> float:
    chances = chances[chances > 0]
    return float(-(chances * np.log2(chances)).sum())


# --- models that know the chain ---------------------------------------------------------------------------------------


STOP = 0.5  # probability that a word is the last one of a span; the models below use it to predict the end of the span


@functools.cache
def tokenizer_of(family: str) -> Tokenizer:
    """Returns a tokenizer that encodes each word, with the space before it, as one id."""
    kinds = {
        "decoder": ByteBPE(vocab_size=269, num_sentinels=3),
        "encoder": WordPiece(vocab_size=33),
        "encoder_decoder": ByteBPE(vocab_size=273, num_sentinels=10, special_pieces="roberta"),
    }
    return kinds[family].build(iter(texts(20, 100, seed=99)))


@dataclasses.dataclass(frozen=True)
class Knowing:
    """A model whose predictions are the probabilities of the chain."""

    family: str
    tokenizer: Tokenizer
    doubt: float  # probability with which the model takes each step for uniform

    def apply(self, variables, batch, *, deterministic, rngs=None) -> Outputs:
        logits = getattr(self, self.family)(batch)  # [B, N, V]
        return Outputs({"lm": LanguageModelOutput(logits, jnp.eye(logits.shape[-1]))})

    @functools.cached_property
    def ids(self) -> np.ndarray:
        """The id of each word after another word, [W]."""
        return np.array([self.tokenizer.encode(f"ka {word}")[-1] for word in WORDS])

    @functools.cached_property
    def words(self) -> np.ndarray:
        """The word of each id, [V]; 0 for ids that are not words."""
        words = np.zeros(self.tokenizer.vocabulary.size, np.int32)
        for word, text in enumerate(WORDS):
            words[self.tokenizer.encode(text)[0]] = words[self.ids[word]] = word
        return words

    def logits(self, chances: jax.Array, end: int | None = None) -> jax.Array:
        """Converts probabilities of words [..., W], or of words and the end [..., W + 1], to logits [..., V]."""
        ids = self.ids if end is None else np.append(self.ids, end)
        nothing = jnp.full((*chances.shape[:-1], self.tokenizer.vocabulary.size), -1e4)
        return nothing.at[..., ids].set(jnp.log(jnp.maximum(chances, 1e-30)))

    def decoder(self, batch):
        return self.logits(jnp.asarray(ways(1, self.doubt))[jnp.asarray(self.words)[batch["tokens"]]])

    def encoder(self, batch):
        tokens, place = batch["tokens"], batch["masked_positions"]  # [B, T], [B, 1]
        masks = (tokens == self.tokenizer.vocabulary.mask).sum(axis=1, keepdims=True)
        at = lambda places: jnp.asarray(self.words)[jnp.take_along_axis(tokens, places, axis=1)]  # noqa: E731
        onwards = jnp.stack([ways(n, self.doubt) for n in range(LONGEST)])  # [n, W, W]
        chances = jnp.asarray(ways(1, self.doubt))[at(place - 1)] * onwards[masks, :, at(place + masks)]  # [B, 1, W]
        return self.logits(chances / chances.sum(axis=-1, keepdims=True))

    def encoder_decoder(self, batch):
        source, said = batch["encoder_tokens"], jnp.asarray(self.words)[batch["tokens"]]  # [B, S], [B, T]
        hole = (source == self.tokenizer.vocabulary.sentinels[0]).argmax(axis=1, keepdims=True)
        before, after = (jnp.asarray(self.words)[jnp.take_along_axis(source, hole + d, axis=1)] for d in (-1, 1))
        place = jnp.arange(said.shape[1])[None]
        # Number of words of the span before this token; the sentinel comes first.
        count = jnp.clip(place - 1, 0, LONGEST - 1)
        chances = jnp.asarray(filling(self.doubt))[count, after, jnp.where(count > 0, said, before)]  # [B, T, W + 1]
        return self.logits(chances, end=self.tokenizer.vocabulary.sentinels[1])


@functools.cache
def filling(doubt: float) -> np.ndarray:
    """Returns probabilities of the next word of a span and of its end, [words so far, word after, last word, W + 1]."""
    count = len(WORDS)
    chances = np.zeros((LONGEST, count, count, count + 1))
    for said in range(LONGEST):
        law = {k: STOP * (1 - STOP) ** (k - 1) for k in range(max(said, 1), LONGEST + 1)}
        on = sum((law[k] * ways(k - said, doubt) for k in law if k > said), np.zeros((count, count)))  # [next, after]
        for after in range(count):
            chances[said, after, :, :-1] = ways(1, doubt) * on[:, after]
            if said:
                chances[said, after, :, -1] = law[said] * ways(1, doubt)[:, after]
    return chances / np.maximum(chances.sum(axis=-1, keepdims=True), 1e-300)


@functools.cache
def knowing(family: str, doubt: float = 0.0) -> LoadedModel:
    """Returns a `LoadedModel` that computes the chain exactly."""
    experiment = get_config({"decoder": "gpt", "encoder": "bert", "encoder_decoder": "t5"}[family])
    experiment.data.sequence_length = 64
    tokenizer = tokenizer_of(family)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    model: Any = Knowing(family, tokenizer, doubt)
    return LoadedModel(experiment, model, {}, tokenizer, mesh, f"a {family} that knows the chain")
