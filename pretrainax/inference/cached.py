"""Runs a model with a KV cache: prefill reads the prompts, then each step reads one token per row.

This is the only module of `inference` that depends on the models' KV cache.
"""

import dataclasses
import functools
from typing import Optional

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pretrainax.config import DisentangledPositions, LongRopeScaling, UserError
from pretrainax.data.batch import Batch
from pretrainax.inference.loaded import LoadedModel
from pretrainax.layers.cache import BlockKVCache, KVCache
from pretrainax.layers.stack import EncoderOutput, layer_by_layer
from pretrainax.sharding.arrays import constrain
from pretrainax.sharding.axes import LENGTH_AXIS, PIPELINE_AXIS, logical_spec
from pretrainax.sharding.param_paths import BETWEEN, FIRST, PyTree
from pretrainax.sharding.rules import named_sharding, tree_shardings


@flax.struct.dataclass
class State:
    """The KV cache, the position and segment of each row's last token, and the tokens that may be read again."""

    memory: KVCache
    positions: jax.Array  # [B] int32, position of the last token in its document
    segment_ids: jax.Array  # [B] int32, segment of the last token
    encoded_segment_ids: Optional[jax.Array] = None  # [B, S] int32, segments of the encoder input; None: decoder
    # The first N tokens of each row's last segment, as batch arrays [B, N]. LongRoPE changes the rotation of all tokens
    # of a segment that reaches N tokens. None: the rotation does not change.
    history: Optional[dict[str, jax.Array]] = None


@dataclasses.dataclass(frozen=True)
class CachedModel:
    """A decoder or an encoder-decoder with a KV cache; implements `Stepper`.

    Call `start`, `step` and `take` within `jax.jit`, under `jax.set_mesh(loaded.mesh)`. If a jitted function takes a
    state and returns the next state, donate the state; otherwise JAX copies it.

    Raises:
      UserError: the model cannot generate text, a token depends on more than the keys and values of previous tokens, or
        the mesh shards the sequence axis or the layers.
    """

    loaded: LoadedModel

    def __post_init__(self):
        config, mesh = self.loaded.model.config, self.loaded.mesh
        self.loaded.check_plain("write text")
        if reason := config.unsupported("generation"):
            raise UserError(f"{self.loaded.origin} {reason}; generation needs a decoder or an encoder-decoder")
        if config.family == "encoder":
            raise UserError(
                f"{self.loaded.origin} is an encoder, which writes no text: it fills masks, embeds and scores; "
                "generation needs a decoder or an encoder-decoder"
            )
        for field, is_set in (
            ("position", isinstance(config.position, DisentangledPositions)),
            ("input_convolution", config.input_convolution is not None),
        ):
            if is_set:
                raise UserError(
                    f"{self.loaded.origin} has config.model.{field} {getattr(config, field)}, which generation does "
                    "not support: a token needs more of the previous tokens than keys and values"
                )
        for axis, reason in (
            (LENGTH_AXIS, "it reads one token at a time"),
            (PIPELINE_AXIS, "a token needs all layers"),
        ):
            if mesh.shape[axis] > 1:
                raise UserError(
                    f"config.mesh.{axis} is {mesh.shape[axis]}, generation needs 1: {reason}; set config.mesh.tensor "
                    "instead"
                )

    @functools.cached_property
    def params(self) -> PyTree:
        """Converts the parameters to the layout that `start` and `step` expect; this copy needs additional memory.

        Matrices have the dtype of the activations. Each layer of a stack has separate arrays. A tied output matrix is
        copied to a separate array [D, V].
        """
        config, compute, mesh = self.loaded.model.config, self.loaded.model.compute, self.loaded.mesh
        shardings = tree_shardings(mesh, self.loaded.params)
        params = dict(jax.device_put(self.loaded.params, shardings))  # does not copy arrays that have these shardings
        for stack in {"encoder", "decoder"} & params.keys():
            params[stack] = self._unstack(params[stack], shardings[stack])
        if config.tie_embeddings:
            sharding = named_sharding(mesh, logical_spec("d_model", "vocab_size"))
            transpose = jax.jit(lambda table: table.T.astype(compute.dtype), out_shardings=sharding)
            table = "decoder_token_embedding" if config.separate_embeddings else "token_embedding"
            kernel = transpose(params[table]["embedding"])
            params["unembedding"] = {**params.get("unembedding", {}), "kernel": kernel}
        return params

    def _unstack(self, stack: PyTree, shardings: PyTree) -> PyTree:
        """Converts the parameters of a stack to separate arrays for each layer, with matrices in the compute dtype."""
        mesh, dtype = self.loaded.mesh, self.loaded.model.compute.dtype
        layer_shardings = jax.tree.map(lambda s: named_sharding(mesh, P(*s.spec[1:])), shardings["blocks"])
        out_shardings = (layer_shardings,) * len(jax.tree.leaves(stack["blocks"])[0])
        unstack_blocks = jax.jit(
            lambda blocks: layer_by_layer(_cast_matrices(blocks, dtype)), out_shardings=out_shardings
        )
        substacks = {name: self._unstack(stack[name], shardings[name]) for name in (FIRST, BETWEEN) if name in stack}
        return {**stack, **substacks, "blocks": unstack_blocks(stack["blocks"])}

    def start(self, params: PyTree, batch: Batch, room: int) -> tuple[jax.Array, State]:
        """Runs prefill; returns the logits after the last token of each prompt, [B, V] float32, and the state.

        Args:
          params: `self.params`.
          batch: prompts without targets, in the format of data/batch.py, padded on the right with segment 0.
          room: maximum number of tokens that `step` will read after the prompts.
        """
        config = self.loaded.model.config
        length = batch["tokens"].shape[1]
        lengths = (batch["segment_ids"] > 0).sum(1, dtype=jnp.int32)
        last = jnp.maximum(lengths - 1, 0)[:, None]  # [B, 1]
        encoded, encoded_segment_ids = None, None
        if config.family == "encoder_decoder":
            encoded = self._apply(params, batch, method="encode")
            encoded_segment_ids = encoded.segment_ids
        stack, capacity = config.last_stack, length + room
        memory = KVCache((BlockKVCache(),) * stack.num_layers)
        logits, memory = self._decode(params, {**batch, "masked_positions": last}, encoded, memory)
        kinds = [stack.layer_pattern[i % len(stack.layer_pattern)] for i in range(stack.num_layers)]
        sizes = [min(stack.window, capacity) if kind == "local" else capacity for kind in kinds]
        at_last = lambda x: jnp.take_along_axis(x, last, axis=1, mode="clip")[:, 0]  # noqa: E731
        state = State(
            memory.rings(lengths, sizes, length),
            at_last(batch["positions"]),
            at_last(batch["segment_ids"]),
            encoded_segment_ids,
            self._history(batch, lengths, capacity),
        )
        return logits, state

    def step(self, params: PyTree, state: State, tokens: jax.Array) -> tuple[jax.Array, State]:
        """Reads the next token of each row, `tokens` [B]; returns the next logits [B, V] float32 and the new state."""
        positions = state.positions + 1
        batch = {"tokens": tokens, "positions": positions, "segment_ids": state.segment_ids}
        batch = {name: x[:, None] for name, x in batch.items()}
        logits, memory = self._decode(params, batch, self._encoded(state), state.memory)
        state = state.replace(memory=memory, positions=positions)
        return (logits, state) if state.history is None else self._recompute(params, state, tokens, logits)

    def _history(self, batch: Batch, lengths: jax.Array, capacity: int) -> Optional[dict[str, jax.Array]]:
        """Returns `State.history` of prompts with `lengths` [B] tokens that may grow to `capacity` tokens."""
        scaling = getattr(self.loaded.model.config.last_stack.position, "scaling", None)
        if not isinstance(scaling, LongRopeScaling) or capacity <= scaling.original_length:
            return None
        last_position = jnp.take_along_axis(batch["positions"], jnp.maximum(lengths - 1, 0)[:, None], axis=1)
        columns = lengths[:, None] - 1 - last_position + jnp.arange(scaling.original_length + 1)[None]  # [B, N]
        is_read = columns < lengths[:, None]  # False: a future token
        return {
            name: jnp.where(is_read, jnp.take_along_axis(batch[name], columns, axis=1, mode="clip"), 0)
            for name in ("tokens", "prefix_mask")
            if name in batch
        }

    def _recompute(self, params: PyTree, state: State, tokens: jax.Array, logits: jax.Array) -> tuple[jax.Array, State]:
        """Reads a row again from its first token if the token in `tokens` [B] changes the rotation of all its tokens.

        The reason: the cache stores keys after the rotation, and the keys of every layer except the first depend on
        the rotated keys of the previous layers.

        Args:
          state: the state after reading `tokens`, whose history lacks them.
          logits: the logits after `tokens`, [B, V].

        Returns:
          The logits and the state. Rows whose rotation does not change have the same logits and KV cache as before.
        """
        memory, positions, history = state.memory, state.positions, state.history
        assert history is not None and memory.index is not None
        count, length = history["tokens"].shape
        read = history["tokens"].at[jnp.arange(count), positions].set(tokens, mode="drop")
        history = history | {"tokens": read}
        rows = positions == length - 1

        def read_again() -> tuple[jax.Array, KVCache]:
            batch = {
                **history,
                "positions": jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (count, length)),
                "segment_ids": jnp.broadcast_to(state.segment_ids[:, None], (count, length)),
                "masked_positions": jnp.full((count, 1), length - 1, jnp.int32),
            }
            empty = KVCache(tuple(block.replace(self_attention=None) for block in memory.blocks))
            new_logits, new_memory = self._decode(params, batch, self._encoded(state), empty)
            new_memory = new_memory.rings(jnp.full(count, length), memory.sizes, memory.index)
            return jnp.where(rows[:, None], new_logits, logits), memory.with_rows(rows, new_memory)

        logits, memory = jax.lax.cond(jnp.any(rows), read_again, lambda: (logits, memory))
        return logits, state.replace(memory=memory, history=history)

    def _encoded(self, state: State) -> Optional[EncoderOutput]:
        """Returns the encoder output for a decoder whose KV cache contains its keys and values; None: no encoder."""
        ids = state.encoded_segment_ids
        return None if ids is None else EncoderOutput(None, ids)

    def take(self, state: State, rows: jax.Array) -> State:
        """Selects the state of the rows at the indices `rows` [B'], which may repeat."""
        select_rows = lambda x: jnp.take(x, rows, axis=0, mode="clip")  # noqa: E731
        return state.replace(
            memory=state.memory.take(rows),
            positions=select_rows(state.positions),
            segment_ids=select_rows(state.segment_ids),
            encoded_segment_ids=jax.tree.map(select_rows, state.encoded_segment_ids),
            history=jax.tree.map(select_rows, state.history),
        )

    def _decode(
        self, params: PyTree, batch: Batch, encoded: Optional[EncoderOutput], memory: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Runs the decoder; returns the logits at one position per row, [B, V] float32, and the updated KV cache.

        The position is given by `masked_positions` if the batch has it; otherwise each row has one position. The
        vocabulary axis of the logits is not sharded.
        """
        encoder_args = () if encoded is None else (encoded,)
        outputs = self._apply(params, batch, *encoder_args, memory, method="decode")
        output = outputs.heads["lm"].replace(unembedding=params["unembedding"]["kernel"])
        return constrain(output.logits()[:, 0], logical_spec("batch")), outputs.state

    def _apply(self, params: PyTree, *arguments: object, method: str) -> PyTree:
        return self.loaded.model.apply({"params": params}, *arguments, deterministic=True, method=method)


def _cast_matrices(params: PyTree, dtype: str) -> PyTree:
    """Casts all matrices to `dtype`, the dtype of matrix multiplications, except the matrices of routers."""

    def cast(path, x):
        *_, module, name = (key.key for key in path)
        return x.astype(dtype) if name == "kernel" and module != "router" else x

    return jax.tree_util.tree_map_with_path(cast, params)
