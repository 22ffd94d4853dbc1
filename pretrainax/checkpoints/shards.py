"""Arrays of a checkpoint whose processes share no disk: each writes its own shards, and one joins what they wrote.

Below the folder of a part (`params/`) each process has an OCDBT store of its own: values in `d/`, and what says where
each of them is in `manifest.ocdbt` and `nodes/`. To join them takes no values: the store of the whole part refers to
them where they are. Who reads it, Orbax too, finds what one process would have written.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
import tensorstore as ts

from pretrainax.checkpoints.params import CODEC, Index, array_spec
from pretrainax.sharding.param_paths import PyTree, parameter_names

Bounds = list[list[int]]  # [start, stop] of each axis
_VALUES = re.compile(r"[^/]+/(?P<owner>[0-9a-f]+-\d+\.\d+)/d/.*")
_INLINE = 4096  # bytes of a value that lies in a node: the shape and chunks of an array, a step


class OwnArray(NamedTuple):
    """Holds what a process writes of an array."""

    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]  # shape of a shard
    blocks: list[tuple[Index, np.ndarray]]


def own_shards(tree: PyTree) -> dict[str, OwnArray]:
    """Copies to the host the shards of a tree that this process writes: of copies on several devices, one does."""
    leaves = jax.tree.leaves(tree)
    own = [[shard for shard in x.addressable_shards if shard.replica_id == 0] for x in leaves]
    for shard in (shard for shards in own for shard in shards):
        shard.data.copy_to_host_async()
    return {
        name: OwnArray(
            x.shape, x.dtype.name, x.sharding.shard_shape(x.shape), [(s.index, _on_host(s.data)) for s in shards]
        )
        for name, x, shards in zip(parameter_names(tree), leaves, own, strict=True)
        if shards
    }


def _on_host(shard: jax.Array) -> np.ndarray:
    """Returns a copy of a shard: of a CPU's NumPy sees the memory itself, which the next step writes to."""
    seen = np.asarray(shard)
    return seen.copy() if shard.device.platform == "cpu" else seen


def write_shards(part: str, owner: str, arrays: Mapping[str, OwnArray]) -> None:
    """Writes the shards of a process to its store in the folder of a part."""
    store, context = _store(os.path.join(part, owner)), ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    with ts.Transaction(atomic=True) as transaction:  # one context for all, or each array had nodes of its own
        for path, array in arrays.items():
            spec = array_spec(store, path)
            del spec["context"]
            target = ts.open(
                # Orbax misses a block that is not there, as one of zeros else is
                {**spec, "store_data_equal_to_fill_value": True},
                context=context,
                create=True,
                shape=array.shape,
                dtype=array.dtype,
                chunk_layout=ts.ChunkLayout(chunk_shape=array.chunk),
                codec=ts.CodecSpec(CODEC),
                transaction=transaction,
            ).result()
            for index, block in array.blocks:
                target[index].write(block).result()


def join_shards(part: str, owners: Iterable[str]) -> None:
    """Makes the store of a whole part of those of all processes, whose values need not be here."""
    context = ts.Context()  # one for all: else values would be copied
    whole = ts.KvStore.open(_store(part), context=context).result()
    with ts.Transaction(atomic=True) as transaction:
        for owner in owners:
            if os.path.isdir(os.path.join(part, owner)):  # it has shards of this part
                store = ts.KvStore.open(_store(os.path.join(part, owner)), context=context).result()
                store.experimental_copy_range_to(whole.with_transaction(transaction)).result()


def _store(folder: str) -> dict:
    nodes = {"btree_node_data_prefix": "nodes/", "version_tree_node_data_prefix": "nodes/", "value_data_prefix": "d/"}
    base = {"driver": "file", "path": f"{folder}/"}
    return {"driver": "ocdbt", "base": base, "config": {"max_inline_value_bytes": _INLINE}, **nodes}


# --- which of them a process needs -----------------------------------------------------------------------------------


def are_values(name: str) -> bool:
    """Tells of a file, by its name in a checkpoint, whether it has values that one of several processes wrote."""
    return _VALUES.fullmatch(name) is not None


def regions(arrays: Mapping[str, OwnArray]) -> dict[str, list[Bounds]]:
    """Returns which blocks of each array a process writes."""
    return {name: [_bounds(index, x.shape) for index, _ in x.blocks] for name, x in arrays.items()}


def needed_here(
    parts: Mapping[str, PyTree], written: Mapping[str, Mapping[str, Mapping[str, Sequence[Bounds]]]]
) -> Callable[[str], bool]:
    """Returns what tells of a file of a checkpoint whether a restore into the shards of this process reads it.

    Args:
      parts: trees of jax.ShapeDtypeStructs with shardings, by name.
      written: of each process, by the name of its stores: part -> array -> its blocks.
    """
    wanted: dict[tuple[str, str], list[Bounds]] = {}
    for part, tree in parts.items():
        for name, x in zip(parameter_names(tree), jax.tree.leaves(tree), strict=True):
            indices = x.sharding.addressable_devices_indices_map(x.shape).values()
            wanted[part, name] = [_bounds(index, x.shape) for index in indices]
    needed = {
        (part, owner)
        for owner, of_parts in written.items()
        for part, arrays in of_parts.items()
        for name, blocks in arrays.items()
        if any(_overlap(a, b) for a in wanted.get((part, name), ()) for b in blocks)
    }

    def is_needed(name: str) -> bool:
        match = _VALUES.fullmatch(name)
        return match is None or (name.partition("/")[0], match["owner"]) in needed

    return is_needed


def _bounds(index: Index, shape: Sequence[int]) -> Bounds:
    return [list(each.indices(n)[:2]) for each, n in zip(index, shape, strict=True)]


def _overlap(a: Bounds, b: Bounds) -> bool:
    return all(start < b_stop and b_start < stop for (start, stop), (b_start, b_stop) in zip(a, b, strict=True))
