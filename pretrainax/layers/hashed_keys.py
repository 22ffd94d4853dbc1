"""Random keys for dropout, whose random numbers are hashes of the element index and the key.

JAX's generator (Threefry2x32, Salmon et al. 2011) takes about 110 operations per number. On a GPU, this is more than
all other operations of a kernel. Deriving the key of each dropout in each layer takes another 110 operations. These
operations were half of BERT's compile time for a GPU. A hashed number takes 20 operations.

The selection of words to predict, ELECTRA's sampling and parameter initialization still use JAX's generator.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

_GOLDEN_RATIO = np.uint32(0x9E3779B9)  # 2^32 divided by the golden ratio


def hashed_key(key: jax.Array) -> jax.Array:
    """Derives a hashed key from a key of any type.

    `jax.random` and Flax accept a hashed key like any other key.
    """
    return jax.random.wrap_key_data(jax.random.bits(key, (2,), jnp.uint32), impl=_HASHED)


def _random_bits(words: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    """Returns an array of `shape` with random unsigned integers of `bit_width` bits.

    The hash first mixes in the element's index within the last two axes, then its index over the leading axes.

    Args:
      words: [2] uint32, the two words of the key.
    """
    if bit_width > 32:
        raise ValueError(f"hashed keys support numbers of 8, 16 or 32 bits, not {bit_width}")
    leading, trailing = shape[:-2], shape[-2:]
    inner = _indices(trailing).reshape(*(1 for _ in leading), *trailing)
    outer = _indices(leading).reshape(*leading, *(1 for _ in trailing))
    bits = hashed_bits(words[0], inner, leading_seed(words[1], outer))
    return (bits >> np.uint32(32 - bit_width)).astype(f"uint{bit_width}")


def hashed_bits(word: jax.Array, inner: jax.Array, seed: jax.Array) -> jax.Array:
    """Computes the 32 random bits of an element.

    Args:
      word: the first word of the key, uint32.
      inner: the element's index within the last two axes, uint32.
      seed: the result of `leading_seed`.
    """
    return _hash(_hash(inner ^ word) + seed)


def leading_seed(word: jax.Array, outer: jax.Array) -> jax.Array:
    """Combines the second word of a key with an element's index over all axes but the last two, both uint32."""
    return outer * _GOLDEN_RATIO ^ word


def key_words(key: jax.Array) -> jax.Array:
    """Returns the two words [2] uint32 of a hashed key, or of the hashed key derived from a key of another type."""
    is_hashed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and jax.random.key_impl(key) == _HASHED
    return jax.random.key_data(key if is_hashed else hashed_key(key))


def _fold_in(words: jax.Array, number: jax.Array) -> jax.Array:
    """Derives the two words of a new key from the words of a key and a number.

    Different numbers or keys give different words, except for rare collisions.
    """
    a = _hash(words[0] ^ number.astype(jnp.uint32))
    b = _hash(words[1] + a)
    a = _hash(a ^ b)
    return jnp.stack([a, _hash(b + a)])


def _split(words: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.vmap(_fold_in, (None, 0))(words, _indices(shape).reshape(-1)).reshape(*shape, 2)


def _seed(seed: jax.Array) -> jax.Array:
    return _fold_in(jnp.zeros(2, jnp.uint32), seed)


def _indices(shape: tuple[int, ...]) -> jax.Array:
    return jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)


def _hash(x: jax.Array) -> jax.Array:
    """Computes the hash `lowbias32` of x, elementwise.

    Source: Wellons 2018, "Prospecting for hash functions", with better constants that were found later. If any bit of x
    flips, each bit of the hash flips with a probability of 0.5, to within 0.001.
    """
    x = (x ^ (x >> 16)) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * np.uint32(0xD35A2D97)
    return x ^ (x >> 15)


_HASHED = define_prng_impl(
    key_shape=(2,), seed=_seed, split=_split, random_bits=_random_bits, fold_in=_fold_in, name="hashed", tag="hash"
)
