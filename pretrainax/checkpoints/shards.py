"""Arrays of checkpoints without a shared disk: each process writes its own shards, and process 0 joins them.

Below the folder of a part (`params/`) each process has its own OCDBT store: values in `d/`, and their locations in
`manifest.ocdbt` and `nodes/`. A join needs no values: the store of the whole part refers to the values in the stores of
the processes. Readers such as Orbax see the same arrays as from a single process.
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
_INLINE = 4096  # maximum bytes of a value inside a node: the shape and chunks of an array, a step


class OwnArray(NamedTuple):
    """The blocks of an array that one process writes."""

    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]  # shape of a shard
    blocks: list[tuple[Index, np.ndarray]]


def own_shards(tree: PyTree) -> dict[str, OwnArray]:
    """Copies to the host the shards of a tree that this process writes; of replicated shards, one device writes."""
    leaves = jax.tree.leaves(tree)
    owned = [[shard for shard in x.addressable_shards if shard.replica_id == 0] for x in leaves]
    for shard in (shard for shards in owned for shard in shards):
        shard.data.copy_to_host_async()
    return {
        name: OwnArray(
            x.shape, x.dtype.name, x.sharding.shard_shape(x.shape), [(s.index, _on_host(s.data)) for s in shards]
        )
        for name, x, shards in zip(parameter_names(tree), leaves, owned, strict=True)
        if shards
    }


def _on_host(shard: jax.Array) -> np.ndarray:
    """Returns a copy of a shard in host memory; on CPU, NumPy shares the buffer, which the next step overwrites."""
    array = np.asarray(shard)
    return array.copy() if shard.device.platform == "cpu" else array


def write_shards(part: str, owner: str, arrays: Mapping[str, OwnArray]) -> None:
    """Writes the shards of a process to its own store in the folder of a part."""
    store, context = _store(os.path.join(part, owner)), ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    with ts.Transaction(atomic=True) as transaction:  # arrays with separate contexts would have separate nodes
        for path, array in arrays.items():
            spec = array_spec(store, path)
            del spec["context"]
            target = ts.open(
                # Otherwise blocks of zeros are not written, and Orbax fails without them.
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
    """Joins the stores of all processes into the store of a part; their values need not be local."""
    context = ts.Context()  # shared: with separate contexts, values would be copied
    whole = ts.KvStore.open(_store(part), context=context).result()
    with ts.Transaction(atomic=True) as transaction:
        for owner in owners:
            if os.path.isdir(os.path.join(part, owner)):  # this process has shards of the part
                store = ts.KvStore.open(_store(os.path.join(part, owner)), context=context).result()
                store.experimental_copy_range_to(whole.with_transaction(transaction)).result()


def _store(folder: str) -> dict:
    nodes = {"btree_node_data_prefix": "nodes/", "version_tree_node_data_prefix": "nodes/", "value_data_prefix": "d/"}
    base = {"driver": "file", "path": f"{folder}/"}
    return {"driver": "ocdbt", "base": base, "config": {"max_inline_value_bytes": _INLINE}, **nodes}


# --- files that a restore needs --------------------------------------------------------------------------------------


def are_values(name: str) -> bool:
    """Returns True if a file, by its name in a checkpoint, contains values that one of several processes wrote."""
    return _VALUES.fullmatch(name) is not None


def regions(arrays: Mapping[str, OwnArray]) -> dict[str, list[Bounds]]:
    """Returns the bounds of the blocks of each array that a process writes."""
    return {name: [_bounds(index, x.shape) for index, _ in x.blocks] for name, x in arrays.items()}


def needed_here(
    parts: Mapping[str, PyTree], written: Mapping[str, Mapping[str, Mapping[str, Sequence[Bounds]]]]
) -> Callable[[str], bool]:
    """Returns a predicate for files of a checkpoint: True if a restore into the shards of this process reads the file.

    Args:
      parts: trees of jax.ShapeDtypeStructs with shardings, by name.
      written: blocks by store name of each process: part -> array -> blocks.
    """
    wanted: dict[tuple[str, str], list[Bounds]] = {}
    for part, tree in parts.items():
        for name, x in zip(parameter_names(tree), jax.tree.leaves(tree), strict=True):
            indices = x.sharding.addressable_devices_indices_map(x.shape).values()
            wanted[part, name] = [_bounds(index, x.shape) for index in indices]
    needed = {
        (part, owner)
        for owner, owned in written.items()
        for part, arrays in owned.items()
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
