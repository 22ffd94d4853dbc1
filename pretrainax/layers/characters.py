"""Word vectors from characters: convolutions, highway layers and a projection.

Sources: Jozefowicz et al. 2016, arXiv 1602.02410, section 3.1; Kim et al. 2015, arXiv 1508.06615.
"""

import math

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import NUM_CHARACTERS, WORD_LENGTH, ModelConfig
from pretrainax.data.batch import Field, register_fields
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.layers.recurrent import recurrent_of
from pretrainax.sharding.arrays import constrain
from pretrainax.sharding.rules import add_partition_rules

register_fields(
    Field(
        "characters",
        "BTC",
        ("recurrent",),
        "the characters of a token, from 1; 0: no character",
        below=NUM_CHARACTERS,
        width=WORD_LENGTH,
    )
)
add_partition_rules(
    (
        (r"character_embedding/embedding", "rows features"),
        (r"character_embedding/convolution_\d+/kernel", "offsets features filters"),
        (r"character_embedding/highway_\d+/(carry|transform)/kernel", "filters features"),
        (r"character_embedding/projection/kernel", "filters features"),
        (r"character_embedding/(\w+/)+bias", "features"),
    )
)
_CARRY_BIAS = -2.0  # a highway layer initially passes on its input (bilm-tf; Srivastava et al. 2015, section 2.2)


class CharacterEmbedding(nn.Module):
    """Maps the characters of words [B, T, C] to word vectors [B, T, D], in `dtype`.

    Each filter gives its maximum over the positions of the word. The maxima of all filter sizes are concatenated.
    """

    config: ModelConfig
    dtype: str

    @nn.compact
    def __call__(self, characters: jax.Array) -> jax.Array:
        chex.assert_shape(characters, (None, None, WORD_LENGTH), custom_message="characters are [B, T, C]")
        config, settings = self.config, recurrent_of(self.config)
        width, total = settings.character_dim, sum(settings.filters)
        table = self.param("embedding", normal_init(config, fan_in=1), (NUM_CHARACTERS, width), jnp.float32)
        # [B, T, C] -> [B, T, C, E]
        x = jnp.take(table, characters, axis=0, mode="clip").astype(self.dtype)
        maxima = []
        for size, count in enumerate(settings.filters, start=1):
            init = normal_init(config, size * width, gain=math.sqrt(2))  # He et al. 2015, for a ReLU
            responses = Convolution(size, count, init, name=f"convolution_{size}")(x)
            maxima.append(responses.max(axis=2))  # [B, T, P, n] -> [B, T, n]
        x = jax.nn.relu(constrain(jnp.concatenate(maxima, axis=-1)))  # [B, T, F]
        init = normal_init(config, total)
        for i in range(settings.highways):
            x = Highway(total, init, name=f"highway_{i}")(x)
        # [B, T, F] -> [B, T, D]
        return Linear((config.d_model,), ("filters", "features"), init, name="projection")(x)

    @staticmethod
    def flops(config: ModelConfig, length: int) -> int:
        """Returns the floating-point operations of one example's forward pass."""
        settings = recurrent_of(config)
        total = sum(settings.filters)
        windows = sum(n * size * (WORD_LENGTH - size + 1) for size, n in enumerate(settings.filters, start=1))
        above = total * (2 * settings.highways * total + config.d_model)
        return 2 * length * (windows * settings.character_dim + above)


class Convolution(nn.Module):
    """Filters over `size` adjacent characters, [B, T, C, E] -> [B, T, C - size + 1, n], without padding.

    NOTE This uses XLA's convolution. XLA cannot compile products of windows with the kernels for GPUs once several
    products read the same characters.
    """

    size: int
    features: int
    init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", self.init, (self.size, x.shape[-1], self.features), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        words = x.reshape(-1, *x.shape[2:])  # [B, T, C, E] -> [B · T, C, E]
        layout = ("NWC", "WIO", "NWC")
        y = jax.lax.conv_general_dilated(words, kernel.astype(x.dtype), (1,), "VALID", dimension_numbers=layout)
        # [B · T, P, n] -> [B, T, P, n]
        return y.reshape(*x.shape[:2], *y.shape[1:]) + bias.astype(x.dtype)[None, None, None]


class Highway(nn.Module):
    """c · relu(transform(x)) + (1 - c) · x with c = sigmoid(carry(x)), [B, T, F] -> [B, T, F] (Srivastava et al. 2015).

    NOTE bilm-tf names the gate of the transformed input `carry`; this class does the same.
    """

    features: int
    init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        axes, bias = ("filters", "features"), nn.initializers.constant(_CARRY_BIAS)
        carry = jax.nn.sigmoid(Linear((self.features,), axes, self.init, bias_init=bias, name="carry")(x))
        return carry * jax.nn.relu(Linear((self.features,), axes, self.init, name="transform")(x)) + (1 - carry) * x
