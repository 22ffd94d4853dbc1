"""A Markov chain over words, whose conditional entropies are known, and models of each family that know it.

The models are exact: their answers are the chain's own probabilities, by sums over all ways from one word to another.
They stand where a trained model does, so that what is made of their answers is the code that scores trained ones.
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
# The next word is one of three with these chances; the columns add up to 1 too, so that all words are as frequent.
TRANSITIONS = sum(share * np.roll(np.eye(len(WORDS)), shift, axis=1) for share, shift in ((0.6, 1), (0.3, 2), (0.1, 4)))
LONGEST = 40  # words of a span; longer ones do not come up


def text_of(rng: np.random.Generator, count: int) -> str:
    """Draws a text of so many words."""
    steps = rng.choice((1, 2, 4), size=count, p=(0.6, 0.3, 0.1))
    return " ".join(WORDS[i] for i in steps.cumsum() % len(WORDS))


def texts(count: int, length: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [text_of(rng, length) for _ in range(count)]


def states(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


@functools.cache
def ways(steps: int, doubt: float = 0.0) -> np.ndarray:
    """The chance to be at a word so many steps after another, [W, W]; who doubts thinks that some go anywhere."""
    return np.linalg.matrix_power((1 - doubt) * TRANSITIONS + doubt / len(WORDS), steps)


# --- what a span costs who knows the chain ----------------------------------------------------------------------------


def path(*words: int) -> float:
    """The chance of words after the first of them."""
    return float(np.prod([TRANSITIONS[a, b] for a, b in zip(words, words[1:], strict=False)]))


def bits_given_left(left: str, span: str) -> float:
    return -np.log2(path(states(left)[-1], *states(span)))


def bits_given_both(left: str, span: str, right: str) -> float:
    """The number of words is known too."""
    a, s, b = states(left)[-1], states(span), states(right)[0]
    return -np.log2(path(a, *s, b) / ways(len(s) + 1)[a, b])


def bits_with_end(left: str, span: str, right: str) -> float:
    """The number of words is told with the span: it is geometric, each word being the last one with a chance."""
    a, s, b = states(left)[-1], states(span), states(right)[0]
    law = [STOP * (1 - STOP) ** (k - 1) for k in range(1, LONGEST + 1)]
    return -np.log2(
        law[len(s) - 1] * path(a, *s, b) / sum(law[k - 1] * ways(k + 1)[a, b] for k in range(1, LONGEST + 1))
    )


def entropy(family: str, words: int) -> float:
    """Returns the bits of a span of so many words that nobody can spare on average, given what a family is given.

    Of words a, s1, …, sk, b: H(s | a) is k steps, H(s | a, b) = H(s, b | a) - H(b | a); and where the number of words
    is told with them, that of geometric numbers is added, and b is what stands behind any number of words.
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


STOP = 0.5  # the chance that a word is the last of a span, by which the models below expect its end


@functools.cache
def tokenizer_of(family: str) -> Tokenizer:
    """A tokenizer in which each word with the space before it is one id."""
    kinds = {
        "decoder": ByteBPE(vocab_size=269, num_sentinels=3),
        "encoder": WordPiece(vocab_size=33),
        "encoder_decoder": ByteBPE(vocab_size=273, num_sentinels=10, special_pieces="roberta"),
    }
    return kinds[family].build(iter(texts(20, 100, seed=99)))


@dataclasses.dataclass(frozen=True)
class Knowing:
    """Stands for a model whose answers are the chain's probabilities."""

    family: str
    tokenizer: Tokenizer
    doubt: float  # how much of each step it believes to be to any word

    def apply(self, variables, batch, *, deterministic, rngs=None) -> Outputs:
        logits = getattr(self, self.family)(batch)  # [B, N, V]
        return Outputs({"lm": LanguageModelOutput(logits, jnp.eye(logits.shape[-1]))})

    @functools.cached_property
    def ids(self) -> np.ndarray:
        """The id of each word behind another, [W]."""
        return np.array([self.tokenizer.encode(f"ka {word}")[-1] for word in WORDS])

    @functools.cached_property
    def words(self) -> np.ndarray:
        """The word of each id, [V]; 0 for those that are none."""
        words = np.zeros(self.tokenizer.vocabulary.size, np.int32)
        for word, text in enumerate(WORDS):
            words[self.tokenizer.encode(text)[0]] = words[self.ids[word]] = word
        return words

    def logits(self, chances: jax.Array, end: int | None = None) -> jax.Array:
        """[..., W] chances of the words, or [..., W + 1] of them and the end, as logits [..., V]."""
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
        count = jnp.clip(place - 1, 0, LONGEST - 1)  # words of the span that are said; the sentinel comes first
        chances = jnp.asarray(filling(self.doubt))[count, after, jnp.where(count > 0, said, before)]  # [B, T, W + 1]
        return self.logits(chances, end=self.tokenizer.vocabulary.sentinels[1])


@functools.cache
def filling(doubt: float) -> np.ndarray:
    """The chances of the next word of a span, and of its end, [words said, word after, last word, W + 1]."""
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
    """A model that is asked like a trained one."""
    experiment = get_config({"decoder": "gpt", "encoder": "bert", "encoder_decoder": "t5"}[family])
    experiment.data.sequence_length = 64
    tokenizer = tokenizer_of(family)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    model: Any = Knowing(family, tokenizer, doubt)
    return LoadedModel(experiment, model, {}, tokenizer, mesh, f"a {family} that knows the chain")
