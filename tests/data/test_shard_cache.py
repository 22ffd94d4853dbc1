"""Tests that a corpus in a store gives the same batches as on a disk, with a local cache of any size."""

import os
import pathlib

import chex
import pytest

from pretrainax.data.corpus_check import CorpusCheck
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.shard_cache import ShardCache
from pretrainax.tokenization import ByteBPE
from tests.support.text_in_store import bucket, experiment, made


def tokens_here(prepared):
    return sorted(path for c in prepared.train for path in map(str, pathlib.Path(c.directory).glob("*.tokens")))


@pytest.mark.parametrize("kind", ["windows", "sentences"])
def test_batches_are_the_same_with_any_number_of_shards_on_this_machine(lines, tmp_path, kind, another_machine):
    on_disk = experiment(lines, tmp_path / "disk", kind)
    expected = made(prepare(on_disk, print), on_disk)
    of = experiment(lines, bucket(), kind)
    chex.assert_trees_all_equal(made(prepare(of, print), of), expected)
    another_machine()
    prepared = prepare(of, print)
    assert prepared.summary.split("; ")[-1].startswith("from ") and not tokens_here(prepared)
    chex.assert_trees_all_equal(made(prepared, of), expected)
    sizes = prepared.train[0].shard_sizes()
    for count in (1, len(sizes)):
        limit = sum(list(sizes.values())[:count])
        with CorpusCheck(prepared.train, fetch=ShardCache(prepared.train, limit).fetch) as check:
            check.wait()
        assert len(tokens_here(prepared)) == count and check.elsewhere == len(sizes) - count
        chex.assert_trees_all_equal(made(prepare(of, print), of), expected)


@pytest.mark.slow
def test_room_is_made_where_nobody_has_looked_for_longest(lines, another_machine):
    of = experiment(lines, bucket(), "windows")
    first = prepare(of, print)
    of.tokenizer = ByteBPE(vocab_size=290)
    second = prepare(of, print)
    for age, path in enumerate(tokens_here(first)):
        os.utime(path, ns=(1000 + age, os.stat(path).st_mtime_ns))
    own, last = second.train[0].shard_sizes(), tokens_here(first)[-1]
    valid_of_both = sum(sum(c.shard_sizes().values()) for p in (first, second) for c in p.valid)
    ShardCache(second.train, sum(own.values()) + valid_of_both + os.path.getsize(last))
    assert tokens_here(second) == sorted(own) and tokens_here(first) == [last]
    ShardCache(second.train, 0)
    assert not tokens_here(second) and not tokens_here(first)
    chex.assert_trees_all_equal(made(prepare(of, print), of), made(second, of))
