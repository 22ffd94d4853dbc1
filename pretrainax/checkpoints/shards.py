"""Writes the arrays of checkpoints without a shared disk: each process writes its shards, and process 0 joins them.

A part of a checkpoint is a folder, for example `params/`. In this folder, each process has its own OCDBT store (a
TensorStore database): the array values in `d/`, and the locations of the values in `manifest.ocdbt` and `nodes/`.
Process 0 joins the stores into one store for the complete part. The joined store refers to the values in the
processes' stores, so process 0 need not read the values. Orbax and other readers find the same arrays as if a single
process had saved them.
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

Bounds = list[list[int]]  # bounds of a block of an array: [start, stop] on each axis
_VALUES = re.compile(r"[^/]+/(?P<owner>[0-9a-f]+-\d+\.\d+)/d/.*")
# Maximum bytes of a value (for example the metadata of an array) that OCDBT stores in a node instead of in `d/`.
_INLINE = 4096


class HostShards(NamedTuple):
    """The blocks of one array that this process writes."""

    shape: tuple[int, ...]  # shape of the complete array
    dtype: str
    chunk: tuple[int, ...]  # shape of a shard
    blocks: list[tuple[Index, np.ndarray]]  # (location in the array, values) of each shard of this process


def host_shards(tree: PyTree) -> dict[str, HostShards]:
    """Copies to host memory the shards that this process must write; returns {path of the array: shards}.

    If a shard is replicated, only its first replica is written. Arrays without a shard to write are omitted.
    """
    leaves = jax.tree.leaves(tree)
    shards_by_leaf = [[shard for shard in x.addressable_shards if shard.replica_id == 0] for x in leaves]
    for shard in (shard for shards in shards_by_leaf for shard in shards):
        shard.data.copy_to_host_async()
    return {
        name: HostShards(
            x.shape, x.dtype.name, x.sharding.shard_shape(x.shape), [(s.index, _on_host(s.data)) for s in shards]
        )
        for name, x, shards in zip(parameter_names(tree), leaves, shards_by_leaf, strict=True)
        if shards
    }


def _on_host(shard: jax.Array) -> np.ndarray:
    """Returns a copy of a shard in host memory.

    On CPU, `np.asarray` does not copy, and the next training step would overwrite the shared buffer.
    """
    array = np.asarray(shard)
    return array.copy() if shard.device.platform == "cpu" else array


def write_shards(part: str, owner: str, arrays: Mapping[str, HostShards]) -> None:
    """Writes this process's shards to its own OCDBT store in the folder of a checkpoint part.

    Args:
      part: path of the part's folder, for example `params/`.
      owner: name of this process's store.
      arrays: {path of the array: its shards}.
    """
    store, context = _store(os.path.join(part, owner)), ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    with ts.Transaction(atomic=True) as transaction:  # one context: separate contexts would write separate nodes
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
    """Joins all processes' OCDBT stores into one store for a checkpoint part; the values need not be local.

    Args:
      part: path of the part's folder, for example `params/`.
      owners: names of the processes' stores.
    """
    context = ts.Context()  # one context: with separate contexts, TensorStore would copy the values
    joined_store = ts.KvStore.open(_store(part), context=context).result()
    with ts.Transaction(atomic=True) as transaction:
        for owner in owners:
            if os.path.isdir(os.path.join(part, owner)):  # False if the process has no shards of the part
                store = ts.KvStore.open(_store(os.path.join(part, owner)), context=context).result()
                store.experimental_copy_range_to(joined_store.with_transaction(transaction)).result()


def _store(folder: str) -> dict:
    nodes = {"btree_node_data_prefix": "nodes/", "version_tree_node_data_prefix": "nodes/", "value_data_prefix": "d/"}
    base = {"driver": "file", "path": f"{folder}/"}
    return {"driver": "ocdbt", "base": base, "config": {"max_inline_value_bytes": _INLINE}, **nodes}


# --- files that a restore needs --------------------------------------------------------------------------------------


def is_value_file(name: str) -> bool:
    """Returns True if a file contains array values written by one process of a multi-process run.

    Args:
      name: path of the file relative to the checkpoint folder.
    """
    return _VALUES.fullmatch(name) is not None


def regions(arrays: Mapping[str, HostShards]) -> dict[str, list[Bounds]]:
    """Returns the bounds of all blocks that a process writes, as {path of the array: bounds}."""
    return {name: [_bounds(index, x.shape) for index, _ in x.blocks] for name, x in arrays.items()}


def read_by_process(
    parts: Mapping[str, PyTree], written: Mapping[str, Mapping[str, Mapping[str, Sequence[Bounds]]]]
) -> Callable[[str], bool]:
    """Returns a predicate that accepts the files that this process reads to restore its shards.

    The predicate takes a file path relative to the checkpoint folder.

    Args:
      parts: {name of the part: tree of jax.ShapeDtypeStructs with the target shardings}.
      written: the blocks that each process wrote: {OCDBT store of the process: {part: {array: bounds}}}.
    """
    target_bounds: dict[tuple[str, str], list[Bounds]] = {}
    for part, tree in parts.items():
        for name, x in zip(parameter_names(tree), jax.tree.leaves(tree), strict=True):
            indices = x.sharding.addressable_devices_indices_map(x.shape).values()
            target_bounds[part, name] = [_bounds(index, x.shape) for index in indices]
    needed_stores = {
        (part, owner)
        for owner, blocks_by_part in written.items()
        for part, arrays in blocks_by_part.items()
        for name, blocks in arrays.items()
        if any(_overlap(a, b) for a in target_bounds.get((part, name), ()) for b in blocks)
    }

    def is_needed(name: str) -> bool:
        match = _VALUES.fullmatch(name)
        return match is None or (name.partition("/")[0], match["owner"]) in needed_stores

    return is_needed


def _bounds(index: Index, shape: Sequence[int]) -> Bounds:
    return [list(axis_slice.indices(n)[:2]) for axis_slice, n in zip(index, shape, strict=True)]


def _overlap(a: Bounds, b: Bounds) -> bool:
    return all(start < b_stop and b_start < stop for (start, stop), (b_start, b_stop) in zip(a, b, strict=True))
