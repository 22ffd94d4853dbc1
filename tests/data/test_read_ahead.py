"""Tests that the text of later batches is read from a store during earlier batches, and is the same text."""

import pickle
import threading
import time

import chex
import pytest

from pretrainax.config import RunFailed
from pretrainax.data.objectives import CausalLM, ObjectiveMixture, PrefixLM
from pretrainax.data.pipeline import batches_of
from pretrainax.data.preparation.prepare import prepare
from pretrainax.storage.store import Store
from tests.support.text_in_store import STEPS, bucket, experiment, made


@pytest.fixture
def asked(monkeypatch):
    """Lists the number of ranges of each request to the store."""
    counts, original = [], Store.read_ranges
    monkeypatch.setattr(Store, "read_ranges", lambda s, ranges: (counts.append(len(ranges)), original(s, ranges))[1])
    return counts


def in_store(lines, another_machine, kind="windows", objective=None, steps=STEPS):
    """Returns the config of a corpus that exists only in a store, and the prepared data."""
    of = experiment(lines, bucket(), kind)
    of.objective, of.train.steps = objective or of.objective, steps
    prepare(of, print)
    another_machine()
    return of, prepare(of, print)


def settled(counts):
    """Returns the list when 0.2 s have passed without a new item."""
    size = -1
    while size != len(counts):
        size = len(counts)
        time.sleep(0.2)
    return counts


def test_each_request_is_of_twice_as_many_steps_as_the_one_before(lines, another_machine, asked):
    batches = batches_of(*in_store(lines, another_machine, steps=20), "train")
    _ = batches.template  # Reads only the first row, to find the arrays of a batch.
    del asked[:]
    for step in range(20):
        _ = batches[step]
    rows = 4  # Per step; a window may span two shards.
    assert [count // rows for count in settled(asked)] == pytest.approx([1, 2, 4, 8, 5], rel=0.3)


def test_the_next_text_is_asked_for_while_a_batch_is_used(lines, another_machine, asked):
    batches = batches_of(*in_store(lines, another_machine), "train")
    _ = batches[0]
    before = len(settled(asked))
    _ = batches[1]  # already read
    assert len(settled(asked)) == before + 1  # for the steps after it


def test_of_a_loader_worker_the_steps_that_are_its_own_are_read(lines, another_machine, asked):
    of, prepared = in_store(lines, another_machine, steps=30)
    whole, batches = batches_of(of, prepared, "train"), pickle.loads(pickle.dumps(batches_of(of, prepared, "train")))
    expected = [whole[step] for step in range(1, 30, 3)]
    _ = settled(asked), batches.template
    del asked[:]
    chex.assert_trees_all_equal([batches[step] for step in range(1, 30, 3)], expected)
    assert len(settled(asked)) <= 6  # Two of them before the reader knows the distance of the steps.


def test_several_objectives_over_one_corpus_are_read_at_once(lines, another_machine, asked):
    of, prepared = in_store(lines, another_machine, objective=ObjectiveMixture((CausalLM(), PrefixLM()), (1.0, 1.0)))
    batches = batches_of(of, prepared, "train")
    assert len(batches.streams) == 2
    _ = batches.template
    del asked[:]
    _ = [batches[step] for step in range(STEPS)]
    assert len(settled(asked)) == 3  # requests of 1, 2 and 3 steps


def test_a_rollback_reads_what_it_goes_back_to(lines, another_machine):
    of, prepared = in_store(lines, another_machine)
    batches, expected = batches_of(of, prepared, "train"), made(prepared, of)
    for step in (0, 1, 2, 3, 1, 2, 5, 3, 4):
        chex.assert_trees_all_equal(batches[step], expected[step])


def test_what_fails_is_raised_by_the_batch_that_needs_it(lines, another_machine, monkeypatch):
    batches = batches_of(*in_store(lines, another_machine), "train")
    _ = batches.template
    original, later = Store.read_ranges, threading.Event()

    def read(store, ranges):
        if later.is_set():
            raise RunFailed("the store has not answered")
        later.set()
        return original(store, ranges)

    monkeypatch.setattr(Store, "read_ranges", read)
    _ = batches[0]
    with pytest.raises(RunFailed, match="has not answered"):
        _ = batches[1]


@pytest.mark.slow
def test_texts_that_rows_draw_are_waited_for_together(lines, another_machine, monkeypatch):
    of, prepared = in_store(lines, another_machine, "sentences")
    expected, waiting, most = made(prepared, of)[0], [0], [0]
    original = Store.read_ranges

    def slow(store, ranges):
        waiting[0] += 1
        most[0] = max(most[0], waiting[0])
        time.sleep(0.1)
        waiting[0] -= 1
        return original(store, ranges)

    batches = batches_of(of, prepared, "train")
    monkeypatch.setattr(Store, "read_ranges", slow)
    chex.assert_trees_all_equal(batches[0], expected)
    assert most[0] > 2  # Two more may read ahead.
