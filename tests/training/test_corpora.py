"""Tests the message about the part of a run's text that was not compared with its checksums."""

import pytest

from pretrainax.data.preparation.prepare import prepare
from pretrainax.training.corpora import checked_corpora
from tests.support.text_in_store import another_machine, bucket, experiment, lines  # noqa: F401


@pytest.mark.slow
def test_shards_that_stay_in_a_store_are_said_not_to_be_compared(lines, another_machine):  # noqa: F811
    of = experiment(lines, bucket(), "windows")
    prepare(of, print)
    another_machine()
    prepared, said = prepare(of, print), []
    valid, train = prepared.valid_first
    sizes = [size for corpus in (valid, train) for size in corpus.shard_sizes().values()]
    for kept in (len(valid.shard_sizes()), 0):
        of.data.keep_bytes = sum(sizes[:kept])
        with checked_corpora(of.data, prepared.valid_first, said.append) as check:
            check.wait()
        beyond = sum(size > 0 for size in sizes[kept:])  # An empty shard needs no room.
        assert said.pop() == (
            f"{beyond} token files are beyond config.data.keep_bytes={of.data.keep_bytes:,}: they stay in "
            f"{of.data.cache_dir}, where the run read them by range without verifying their checksums"
        )
        assert not said
