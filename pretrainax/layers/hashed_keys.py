"""Keys of random numbers for dropout, of which each number is a hash of its place and the key.

JAX's own numbers (Threefry2x32, Salmon et al. 2011) take some 110 operations each, on a GPU more than all else of a
kernel, and as many for the key of each dropout of each layer: of BERT's compile time for a GPU they were half. Here a
number takes 20. What draws words to predict, ELECTRA's, and what starts parameters stays with JAX's.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

_FAR_APART = np.uint32(0x9E3779B9)  # 2^32 by the golden ratio


def hashed_key(key: jax.Array) -> jax.Array:
    """Returns a key of this kind, drawn by a key of any kind; `jax.random` and Flax take it as any other."""
    return jax.random.wrap_key_data(jax.random.bits(key, (2,), jnp.uint32), impl=_HASHED)


def _random_bits(words: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    """Returns unsigned numbers of so many bits. The place within the last two axes, and the place of these, are mixed
    in one after the other."""
    if bit_width > 32:
        raise ValueError(f"a hashed key draws numbers of 8, 16 or 32 bits, not {bit_width}")
    rows, last = shape[:-2], shape[-2:]
    place = _places(last).reshape(*(1 for _ in rows), *last)
    outer = _places(rows).reshape(*rows, *(1 for _ in last))
    bits = _mixed(_mixed(place ^ words[0]) + (outer * _FAR_APART ^ words[1]))
    return (bits >> np.uint32(32 - bit_width)).astype(f"uint{bit_width}")


def _fold_in(words: jax.Array, number: jax.Array) -> jax.Array:
    """Returns the words of another key: those of different numbers, and of different keys, differ."""
    a = _mixed(words[0] ^ number.astype(jnp.uint32))
    b = _mixed(words[1] + a)
    a = _mixed(a ^ b)
    return jnp.stack([a, _mixed(b + a)])


def _split(words: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.vmap(_fold_in, (None, 0))(words, _places(shape).reshape(-1)).reshape(*shape, 2)


def _seed(seed: jax.Array) -> jax.Array:
    return _fold_in(jnp.zeros(2, jnp.uint32), seed)


def _places(shape: tuple[int, ...]) -> jax.Array:
    return jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)


def _mixed(x: jax.Array) -> jax.Array:
    """Returns `lowbias32` of x (Wellons 2018, "Prospecting for hash functions", with the constants found since): a
    change of any bit of x changes each bit of it half of the times, to a thousandth."""
    x = (x ^ (x >> 16)) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * np.uint32(0xD35A2D97)
    return x ^ (x >> 15)


_HASHED = define_prng_impl(
    key_shape=(2,), seed=_seed, split=_split, random_bits=_random_bits, fold_in=_fold_in, name="hashed", tag="hash"
)
