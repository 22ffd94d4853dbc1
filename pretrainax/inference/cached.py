"""The prompt and the steps of a model that writes: what was read is kept, and each further token is read alone.

This is the one file of the package that knows how models keep keys and values.
"""

import dataclasses
import functools
from typing import Optional

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pretrainax.config import DisentangledPositions, UserError
from pretrainax.data.batch import Batch
from pretrainax.inference.loaded import LoadedModel
from pretrainax.layers.cache import BlockMemory, Memory
from pretrainax.layers.stack import Encoded, layer_by_layer
from pretrainax.sharding.arrays import constrain
from pretrainax.sharding.axes import LENGTH_AXIS, PIPELINE_AXIS, logical_spec
from pretrainax.sharding.param_paths import BETWEEN, FIRST, PyTree
from pretrainax.sharding.rules import named_sharding, tree_shardings


@flax.struct.dataclass
class State:
    """Holds what was read of each row. `step` changes no shape of it."""

    memory: Memory
    positions: jax.Array  # [B] int32, of the last token in its text
    segment_ids: jax.Array  # [B] int32, of that text
    encoded_segment_ids: Optional[jax.Array] = None  # [B, S] int32


@dataclasses.dataclass(frozen=True)
class CachedModel:
    """Steps through text with a decoder, or an encoder-decoder.

    `start`, `step` and `take` are to be called within `jax.jit`, under `jax.set_mesh(loaded.mesh)`; a state that is
    passed on from one jitted function to the next should be donated, or it is copied.

    Raises:
      UserError: a model that does not write, or whose positions need more than keys and values.
    """

    loaded: LoadedModel

    def __post_init__(self):
        config, mesh = self.loaded.model.config, self.loaded.mesh
        self.loaded.check_plain("write text")
        if why := config.unsupported("generation"):
            raise UserError(f"{self.loaded.origin} {why}; generation takes a decoder or an encoder-decoder")
        if config.family == "encoder":
            raise UserError(
                f"{self.loaded.origin} is an encoder, which writes no text: it fills masks, embeds and scores; "
                "generation takes a decoder or an encoder-decoder"
            )
        for field, is_set in (
            ("position", isinstance(config.position, DisentangledPositions)),
            ("input_convolution", config.input_convolution is not None),
        ):
            if is_set:
                raise UserError(
                    f"{self.loaded.origin} has config.model.{field} {getattr(config, field)}, which generation does "
                    "not know: a token of it needs more of those before than keys and values"
                )
        for axis, why in ((LENGTH_AXIS, "it reads one token at a time"), (PIPELINE_AXIS, "a token needs all layers")):
            if mesh.shape[axis] > 1:
                raise UserError(
                    f"config.mesh.{axis} is {mesh.shape[axis]}, generation needs 1: {why}; set config.mesh.tensor "
                    "instead"
                )

    @functools.cached_property
    def params(self) -> PyTree:
        """Returns the parameters as `start` and `step` take them, in their shards: matrices in the dtype of
        activations, those of each layer apart, and the output matrix [D, V] on its own where it is the transposed
        embedding. Made once, and kept beside the loaded ones."""
        config, compute, mesh = self.loaded.model.config, self.loaded.model.compute, self.loaded.mesh
        shardings = tree_shardings(mesh, self.loaded.params)
        params = dict(jax.device_put(self.loaded.params, shardings))  # copies nothing that lies there already
        for stack in {"encoder", "decoder"} & params.keys():
            params[stack] = self._apart(params[stack], shardings[stack])
        if config.tie_embeddings:
            spread = named_sharding(mesh, logical_spec("d_model", "vocab_size"))
            turn = jax.jit(lambda table: table.T.astype(compute.dtype), out_shardings=spread)
            table = "decoder_token_embedding" if config.separate_embeddings else "token_embedding"
            kernel = turn(params[table]["embedding"])
            params["unembedding"] = {**params.get("unembedding", {}), "kernel": kernel}
        return params

    def _apart(self, stack: PyTree, shardings: PyTree) -> PyTree:
        """Returns the parameters of a stack with those of each layer apart."""
        mesh, dtype = self.loaded.mesh, self.loaded.model.compute.dtype
        of_layer = jax.tree.map(lambda s: named_sharding(mesh, P(*s.spec[1:])), shardings["blocks"])
        spread = (of_layer,) * len(jax.tree.leaves(stack["blocks"])[0])
        cut = jax.jit(lambda blocks: layer_by_layer(_in_dtype(blocks, dtype)), out_shardings=spread)
        parts = {part: self._apart(stack[part], shardings[part]) for part in (FIRST, BETWEEN) if part in stack}
        return {**stack, **parts, "blocks": cut(stack["blocks"])}

    def start(self, params: PyTree, batch: Batch, room: int) -> tuple[jax.Array, State]:
        """Returns what the model says after the last token of each prompt, [B, V] float32 logits, and the state.

        Args:
          params: `self.params`.
          batch: prompts as data/batch.py has them, padded on the right with segment 0; without targets.
          room: how many tokens may follow.
        """
        config = self.loaded.model.config
        length = batch["tokens"].shape[1]
        lengths = (batch["segment_ids"] > 0).sum(1, dtype=jnp.int32)
        last = jnp.maximum(lengths - 1, 0)[:, None]  # [B, 1]
        encoded, encoded_segment_ids = None, None
        if config.family == "encoder_decoder":
            encoded = self._apply(params, batch, method="encode")
            encoded_segment_ids = encoded.segment_ids
        stack, most = config.last_stack, length + room
        memory = Memory((BlockMemory(),) * stack.num_layers, reach=most)
        logits, memory = self._decode(params, {**batch, "masked_positions": last}, encoded, memory)
        kinds = [stack.layer_pattern[i % len(stack.layer_pattern)] for i in range(stack.num_layers)]
        sizes = [min(stack.window, most) if kind == "local" else most for kind in kinds]
        at_last = lambda x: jnp.take_along_axis(x, last, axis=1, mode="clip")[:, 0]  # noqa: E731
        state = State(
            memory.rings(lengths, sizes),
            at_last(batch["positions"]),
            at_last(batch["segment_ids"]),
            encoded_segment_ids,
        )
        return logits, state

    def step(self, params: PyTree, state: State, tokens: jax.Array) -> tuple[jax.Array, State]:
        """Reads one token more of each row, [B]; returns what the model says after it, [B, V] float32 logits, and the
        state."""
        positions = state.positions + 1
        batch = {"tokens": tokens, "positions": positions, "segment_ids": state.segment_ids}
        ids = state.encoded_segment_ids
        encoded = None if ids is None else Encoded(None, ids)
        logits, memory = self._decode(params, {name: x[:, None] for name, x in batch.items()}, encoded, state.memory)
        return logits, state.replace(memory=memory, positions=positions)

    def take(self, state: State, rows: jax.Array) -> State:
        """Returns the state of `rows` [B'], indices into B; the same one may be there more than once."""
        of_rows = lambda x: jnp.take(x, rows, axis=0, mode="clip")  # noqa: E731
        return state.replace(
            memory=state.memory.take(rows),
            positions=of_rows(state.positions),
            segment_ids=of_rows(state.segment_ids),
            encoded_segment_ids=jax.tree.map(of_rows, state.encoded_segment_ids),
        )

    def _decode(
        self, params: PyTree, batch: Batch, encoded: Optional[Encoded], memory: Memory
    ) -> tuple[jax.Array, Memory]:
        """Returns the logits of the one place that is asked for, [B, V] float32, the vocabulary of a row whole; and
        what the decoder remembers."""
        read = () if encoded is None else (encoded,)
        outputs = self._apply(params, batch, *read, memory, method="decode")
        output = outputs.heads["lm"].replace(unembedding=params["unembedding"]["kernel"])
        return constrain(output.logits()[:, 0], logical_spec("batch")), outputs.state

    def _apply(self, params: PyTree, *arguments: object, method: str) -> PyTree:
        return self.loaded.model.apply({"params": params}, *arguments, deterministic=True, method=method)


def _in_dtype(params: PyTree, dtype: str) -> PyTree:
    """Returns parameters whose matrices are of the dtype that products cast them to: all but a router's."""

    def cast(path, x):
        *_, module, name = (key.key for key in path)
        return x.astype(dtype) if name == "kernel" and module != "router" else x

    return jax.tree_util.tree_map_with_path(cast, params)
