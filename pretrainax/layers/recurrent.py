"""Two stacks of LSTMs with projected outputs: one reads from left to right, the other from right to left.

This is the architecture of ELMo (Peters et al. 2018, arXiv 1802.05365, section 3.1).
"""

from typing import Optional

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig, Recurrent
from pretrainax.layers.attention import Mask
from pretrainax.layers.block import AuxOutputs, Block, Context, Layer
from pretrainax.layers.compute import Compute, blocks_per_iteration
from pretrainax.layers.convolution import Branch
from pretrainax.layers.dropout import Dropout
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.layers.positions import PositionTerms
from pretrainax.layers.stack import layer_flags, scan_blocks
from pretrainax.sharding.arrays import constrain
from pretrainax.sharding.axes import FSDP_AXIS, add_axis, logical_spec
from pretrainax.sharding.param_paths import PyTree
from pretrainax.sharding.rules import add_partition_rules

add_partition_rules(
    (
        (r"blocks/(forward|backward)/input/kernel", "layers d_model gates d_ff"),
        (r"blocks/(forward|backward)/input/bias", "layers gates d_ff"),
        (r"blocks/(forward|backward)/cell/hidden/kernel", "layers d_model gates d_ff"),
        (r"blocks/(forward|backward)/cell/projection/kernel", "layers d_ff d_model"),
    )
)
add_axis("filters", FSDP_AXIS)
add_axis("gates", None)
_GATES = 4  # input gate, candidate, forget gate, output gate: i, j, f, o
# Added to the forget gate's logit, so that the gate is open initially (Jozefowicz et al. 2015, section 2.3; TensorFlow
# also adds this constant to the sum)
_FORGET_BIAS = 1.0
_DIRECTIONS = ("forward", "backward")

State = tuple[jax.Array, jax.Array]  # cell state [B, F] float32, and output [B, D]


def recurrent_of(config: ModelConfig) -> Recurrent:
    """Returns the `Recurrent` settings in the config of a recurrent model, such as ELMo."""
    settings = config.part(Recurrent)
    assert settings is not None  # only modules of recurrent models call this function
    return settings


class Cell(nn.Module):
    """One step of an LSTM with a projected output (Sak et al. 2014, arXiv 1402.1128), without peephole connections.

    The gates are sigmoid(x · W + h · U + b) in float32. The config's `clip` limits the cell state and the output. If it
    is None, neither is clipped.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, state: State, gates: jax.Array, starts: jax.Array) -> tuple[State, jax.Array]:
        """Computes the next state and the output [B, D].

        Args:
          state: cell state and output of the previous step.
          gates: [B, 4, F], the input's contribution to the gates (x · W + b).
          starts: [B] bool, True where a segment begins; the state of these rows is reset to 0.
        """
        config, max_abs = self.config, recurrent_of(self.config).clip
        clip = lambda x: x if max_abs is None else jnp.clip(x, -max_abs, max_abs)  # noqa: E731
        cell, output = (jnp.where(starts[:, None], 0, x) for x in state)
        init = normal_init(config, 2 * config.d_model)
        axes = ("d_model", "gates", "d_ff")
        # [B, D] -> [B, 4, F]
        gates = gates + Linear((_GATES, config.d_ff), axes, init, use_bias=False, name="hidden")(output)
        input_gate, candidate, forget_gate, output_gate = jnp.moveaxis(gates.astype(jnp.float32), 1, 0)
        candidate, forget_gate = jnp.tanh(candidate), jax.nn.sigmoid(forget_gate + _FORGET_BIAS)
        cell = clip(forget_gate * cell + jax.nn.sigmoid(input_gate) * candidate)
        hidden = (jax.nn.sigmoid(output_gate) * jnp.tanh(cell)).astype(output.dtype)
        init = normal_init(config, config.d_ff)
        # [B, F] -> [B, D]
        output = clip(Linear((config.d_model,), ("d_ff", "d_model"), init, use_bias=False, name="projection")(hidden))
        output = constrain(output, logical_spec("batch"))
        return (cell, output), output


class Direction(nn.Module):
    """Applies one LSTM to each segment of a row, [B, T, D] -> [B, T, D].

    The LSTM reads from left to right, or from right to left if `backward`.
    """

    config: ModelConfig
    backward: bool

    @nn.compact
    def __call__(self, x: jax.Array, segment_ids: jax.Array) -> jax.Array:
        config, rows = self.config, x.shape[0]
        chex.assert_shape(segment_ids, x.shape[:2], custom_message="segment_ids are [B, T] where x is [B, T, D]")
        init = normal_init(config, 2 * config.d_model)
        axes = ("d_model", "gates", "d_ff")
        # [B, T, D] -> [B, T, 4, F]
        gates = Linear((_GATES, config.d_ff), axes, init, name="input")(x)
        is_boundary = segment_ids[:, 1:] != segment_ids[:, :-1]
        starts = jnp.pad(is_boundary, ((0, 0), (0, 1) if self.backward else (1, 0)), constant_values=True)
        scan_cell = nn.scan(
            Cell,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
            reverse=self.backward,
        )
        state = jnp.zeros((rows, config.d_ff), jnp.float32), jnp.zeros((rows, config.d_model), x.dtype)
        _, y = scan_cell(config, name="cell")(state, gates, starts)
        return constrain(y)


class RecurrentBlock(Block):
    """A bidirectional layer of two LSTMs, [B, T, 2 D] -> [B, T, 2 D].

    The first D features of the hidden states belong to the forward LSTM, and the last D features to the backward LSTM.
    Neither LSTM reads the features of the other. All layers except the first have a residual connection (Peters et al.
    2018, section 3.4).
    """

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        layer: Layer,
        context: Context,
        state: PyTree = None,
        branch: Optional[Branch] = None,
        source: Optional[jax.Array] = None,
    ) -> tuple[jax.Array, AuxOutputs]:
        """Returns the hidden states after this layer, as the output and as the `state` of the auxiliary outputs.

        A task head needs the hidden states of all layers, because its input is their weighted mean (`ScalarMix`).
        """
        dropout = Dropout(self.config.dropout_rate, deterministic=context.deterministic)
        x = dropout(constrain(x))
        outputs = [
            Direction(self.config, backward=name == "backward", name=name)(features, context.mask.query_segment_ids)
            for name, features in zip(_DIRECTIONS, jnp.split(x, 2, axis=-1), strict=True)
        ]
        x = jnp.concatenate(outputs, axis=-1) + jnp.where(layer.is_first, 0, x)
        self.sow("intermediates", "hidden", x)
        return x, AuxOutputs(x)

    @staticmethod
    def flops(config: ModelConfig, length: int) -> int:
        """Returns the number of floating-point operations in one layer's forward pass for `length` tokens."""
        return 2 * length * len(_DIRECTIONS) * config.d_model * config.d_ff * (2 * _GATES + 1)


class RecurrentStack(nn.Module):
    """Computes the hidden states of both directions [B, T, 2 D] from word vectors [B, T, D]."""

    config: ModelConfig
    compute: Compute
    num_layers: int

    @nn.compact
    def __call__(self, x: jax.Array, segment_ids: jax.Array, *, deterministic: bool) -> tuple[jax.Array, AuxOutputs]:
        """Returns the hidden states after the last layer, and the auxiliary outputs.

        The `state` of the auxiliary outputs contains the hidden states of each layer, [L, B, T, 2 D].
        """
        context = Context(Mask(False, segment_ids, segment_ids), PositionTerms(), deterministic=deterministic)
        config, compute, num_layers = self.config, self.compute, self.num_layers
        blocks = scan_blocks(RecurrentBlock, config, compute, num_layers, blocks_per_iteration(compute, num_layers))
        stream = jnp.concatenate([x, x], axis=-1)
        x, outputs = blocks(config, compute, name="blocks")(
            stream, layer_flags(config, num_layers), context, None, None
        )
        self.sow("intermediates", "output", x)
        return x, outputs
