"""Tests checkpoints of processes without a shared disk: written files, joining, and fetched files."""

import os
import random
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from pretrainax.checkpoints import shards
from pretrainax.checkpoints.hosts import HostCheckpoints
from pretrainax.checkpoints.params import _open, _store, read_params
from pretrainax.checkpoints.shards import (
    HostShards,
    host_shards,
    is_value_file,
    join_shards,
    read_by_process,
    regions,
    write_shards,
)
from pretrainax.config import UserError
from pretrainax.storage import places
from tests.support.checkpoints import abstract, make_state

# With this width, OCDBT stores the blocks in value files, not inside nodes.
WIDTH = 2000
OWNERS = ["0a-1.0", "0a-1.1"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Yields the mirror of a run in an in-memory store, while the run holds its lease."""
    pytest.importorskip("fsspec", reason="fsspec is not installed: pip install 'pretrainax[test]'")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(places, "_mirrors", {})
    with places.working_copy(f"memory://bucket/{random.random()}") as folder:
        yield folder


def open_checkpoints(folder, keep=2):
    return HostCheckpoints(os.path.join(folder, "checkpoints"), keep)


def store_of(folder):
    return places._mirrors[folder].store


def halves():
    """Returns an array, and the shards of two processes: a half each, and a scalar that only the first one has."""
    whole = np.arange(4000, dtype=np.float32).reshape(40, 100)
    own = [
        HostShards((40, 100), "float32", (20, 100), [((slice(i, i + 20),) * 1 + (slice(None),), whole[i : i + 20])])
        for i in (0, 20)
    ]
    step = HostShards((), "int32", (), [((), np.array(7, np.int32))])
    return whole, [{"a/b": own[0], "step": step}, {"a/b": own[1]}]


def test_what_two_processes_wrote_is_joined_without_their_values(tmp_path):
    whole, written = halves()
    part = str(tmp_path / "params")
    for owner, arrays in zip(OWNERS, written, strict=True):
        write_shards(part, owner, arrays)
    values = os.path.join(part, OWNERS[1], "d")
    os.rename(values, tmp_path / "elsewhere")
    join_shards(part, OWNERS)
    a, step = (_open(_store(str(tmp_path)), name) for name in ("a/b", "step"))
    # The other half is not available yet.
    np.testing.assert_array_equal(a[:20].read().result(), whole[:20])
    assert step.read().result() == 7
    os.rename(tmp_path / "elsewhere", values)
    np.testing.assert_array_equal(_open(_store(str(tmp_path)), "a/b").read().result(), whole)


def test_a_process_needs_what_its_shards_overlap(tmp_path):
    _, written = halves()
    reports = {owner: {"params": regions(arrays)} for owner, arrays in zip(OWNERS, written, strict=True)}
    mesh = jax.make_mesh((1,), ("x",))

    def needed(x, spec):
        tree = {"a": {"b": jax.ShapeDtypeStruct(x, np.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))}}
        return [owner for owner in OWNERS if read_by_process({"params": tree}, reports)(f"params/{owner}/d/1")]

    assert needed((40, 100), ()) == OWNERS
    assert needed((20, 100), ()) == OWNERS[:1]  # as in a process that has only the first rows
    assert not read_by_process({"optimizer": {}}, reports)(f"params/{OWNERS[0]}/d/1")
    for name in ("run.json", f"params/{OWNERS[0]}/manifest.ocdbt", f"params/{OWNERS[0]}/nodes/1", "params/d/1"):
        assert read_by_process({}, reports)(name) and not is_value_file(name)


def test_each_block_has_one_process_that_writes_it():
    mesh = jax.make_mesh((2, 4), ("copies", "split"))
    x = jax.device_put(np.arange(16.0), NamedSharding(mesh, PartitionSpec("split")))
    (array,) = host_shards({"x": x}).values()
    assert array.chunk == (4,) and len(array.blocks) == 4
    assert regions({"x": array}) == {"x": [[[0, 4]], [[4, 8]], [[8, 12]], [[12, 16]]]}


def test_a_shard_is_copied_once(monkeypatch):
    """The copy goes from a GPU to the host. On a CPU, NumPy would share memory that the next step overwrites."""
    on_cpu = jax.numpy.arange(4.0)
    assert not np.shares_memory(shards._on_host(on_cpu), np.asarray(on_cpu))

    class OnGPU:
        device, on_host = SimpleNamespace(platform="gpu"), np.arange(4.0)

        def __array__(self, dtype=None, copy=None):
            return self.on_host

    assert shards._on_host(OnGPU()) is OnGPU.on_host


@pytest.mark.parametrize("devices", [1, 8])
def test_a_state_comes_back_bit_for_bit_and_as_orbax_reads_it(folder, devices):
    checkpoints = open_checkpoints(folder)
    checkpoints.save(7, make_state(7, devices), {"note": "x"})
    step, state, extra = checkpoints.restore_newest(abstract(make_state(0)))
    assert (step, extra) == (7, {"note": "x"})
    chex.assert_trees_all_equal(state, make_state(7))
    path = os.path.join(folder, "checkpoints", "7")
    found = ocp.load_checkpointables(path, {"params": abstract(make_state(0)).params})["params"]
    chex.assert_trees_all_equal(found, make_state(7).params)
    assert {name for name, _, _ in read_params(path)} >= {"blocks/kernel"}
    checkpoints.close()


def test_another_machine_brings_the_newest_whose_files_are_as_they_were(folder, monkeypatch, tmp_path, caplog):
    checkpoints = open_checkpoints(folder)
    for step in (10, 20):
        checkpoints.save(step, make_state(step, width=WIDTH), {})
    checkpoints.close()
    places.synchronize(folder)
    store = store_of(folder)
    (values,) = [name for name in store.objects("checkpoints/20/params") if is_value_file(name.split("/", 2)[2])]
    content = bytearray(store.read(values))
    content[len(content) // 2] ^= 1
    store.write(values, bytes(content))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    with places.working_copy(store.url, process=1) as other:
        step, state, _ = open_checkpoints(other).restore_newest(abstract(make_state(0, width=WIDTH)))
    assert step == 10
    chex.assert_trees_all_equal(state, make_state(10, width=WIDTH))
    assert "checkpoint 20 is not used" in caplog.text


def test_where_all_are_damaged_that_is_said_and_nothing_deleted(folder):
    checkpoints = open_checkpoints(folder)
    checkpoints.save(10, make_state(10), {})
    checkpoints.wait()
    for name in os.listdir(os.path.join(folder, "checkpoints", "10", "hosts")):
        open(os.path.join(folder, "checkpoints", "10", "hosts", name), "w").close()
    with pytest.raises(UserError, match="every checkpoint in .* is damaged .step 10: hosts/.* changed"):
        checkpoints.restore_newest(abstract(make_state(0)))
    assert os.path.exists(os.path.join(folder, "checkpoints", "10", "run.json"))


def test_what_an_earlier_attempt_has_sent_is_deleted(folder):
    store = store_of(folder)
    store.write("checkpoints/20/optimizer/0b-1.1/d/1", b"values")
    checkpoints = open_checkpoints(folder)
    checkpoints.save(20, make_state(20), {})
    checkpoints.close()
    places.synchronize(folder)
    sums = store.read("checkpoints/20/manifest.sha256").decode()
    names = {name.removeprefix("checkpoints/20/") for name in store.objects("checkpoints/20")}
    assert names == {line.split("  ")[1] for line in sums.splitlines()} | {"manifest.sha256"}


def test_old_ones_are_deleted_here_and_there(folder):
    checkpoints = open_checkpoints(folder, keep=1)
    for step in (10, 20, 30):
        checkpoints.save(step, make_state(step), {})
    checkpoints.close()
    places.synchronize(folder)
    assert os.listdir(os.path.join(folder, "checkpoints")) == ["30"]
    assert {name.split("/")[1] for name in store_of(folder).objects("checkpoints")} == {"30"}
