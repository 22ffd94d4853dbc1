"""Word vectors computed from characters with convolutions, highway layers and a linear projection.

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
_CARRY_BIAS = -2.0  # initially, a highway layer mostly copies its input (bilm-tf; Srivastava et al. 2015, section 2.2)


class CharacterEmbedding(nn.Module):
    """Computes word vectors [B, T, D] in `dtype` from the characters of words [B, T, C].

    The output of each filter is max-pooled over the positions in the word. The pooled outputs of all filter sizes are
    concatenated, and pass through the highway layers and the projection.
    """

    config: ModelConfig
    dtype: str

    @nn.compact
    def __call__(self, characters: jax.Array) -> jax.Array:
        chex.assert_shape(characters, (None, None, WORD_LENGTH), custom_message="characters are [B, T, C]")
        config, settings = self.config, recurrent_of(self.config)
        width, num_filters = settings.character_dim, sum(settings.filters)
        table = self.param("embedding", normal_init(config, fan_in=1), (NUM_CHARACTERS, width), jnp.float32)
        # [B, T, C] -> [B, T, C, E]
        x = jnp.take(table, characters, axis=0, mode="clip").astype(self.dtype)
        maxima = []
        for size, count in enumerate(settings.filters, start=1):
            init = normal_init(config, size * width, gain=math.sqrt(2))  # He et al. 2015, for a ReLU
            filter_outputs = Convolution(size, count, init, name=f"convolution_{size}")(x)
            maxima.append(filter_outputs.max(axis=2))  # [B, T, P, n] -> [B, T, n]
        x = jax.nn.relu(constrain(jnp.concatenate(maxima, axis=-1)))  # [B, T, F]
        init = normal_init(config, num_filters)
        for i in range(settings.highways):
            x = Highway(num_filters, init, name=f"highway_{i}")(x)
        # [B, T, F] -> [B, T, D]
        return Linear((config.d_model,), ("filters", "features"), init, name="projection")(x)

    @staticmethod
    def flops(config: ModelConfig, length: int) -> int:
        """Returns the number of floating-point operations in the forward pass for one sequence of `length` words."""
        settings = recurrent_of(config)
        num_filters = sum(settings.filters)
        convolutions = sum(n * size * (WORD_LENGTH - size + 1) for size, n in enumerate(settings.filters, start=1))
        upper_layers = num_filters * (2 * settings.highways * num_filters + config.d_model)
        return 2 * length * (convolutions * settings.character_dim + upper_layers)


class Convolution(nn.Module):
    """A convolution over `size` adjacent characters without padding, [B, T, C, E] -> [B, T, C - size + 1, n].

    NOTE This module uses XLA's convolution. A matmul of windows would be an alternative, but XLA cannot compile it with
    its GPU kernels if several of these matmuls read the same characters.
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
    """A highway layer [B, T, F] -> [B, T, F]: c · relu(transform(x)) + (1 - c) · x with c = sigmoid(carry(x)).

    Source: Srivastava et al. 2015.

    NOTE `carry` is the gate of the transformed input. The name follows bilm-tf.
    """

    features: int
    init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        axes, bias = ("filters", "features"), nn.initializers.constant(_CARRY_BIAS)
        carry = jax.nn.sigmoid(Linear((self.features,), axes, self.init, bias_init=bias, name="carry")(x))
        return carry * jax.nn.relu(Linear((self.features,), axes, self.init, name="transform")(x)) + (1 - carry) * x
