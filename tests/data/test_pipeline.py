"""Tests that batches are pure functions of (seed, step), in any process."""

import collections
import dataclasses
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from pretrainax.config import UserError
from pretrainax.data.corpus import Corpus
from pretrainax.data.objectives import CausalLM, MaskedLM, ObjectiveMixture, PrefixLM, RateChange, SpanCorruption
from pretrainax.data.packing import BestFit, OneEach
from pretrainax.data.pipeline import Batches, batches_of, iterate
from pretrainax.data.preparation import shards
from pretrainax.data.row_stream import RowOptions
from pretrainax.data.text_counts import text_loss_reason
from pretrainax.tokenization import Characters
from pretrainax.tokenization.base import Vocabulary
from tests.support import tiny
from tests.support.rows import row_options
from tests.support.runs import ROOT

VOCABULARY = Vocabulary(size=5000, pad=0, eos=1, unk=2, cls=3, sep=4, mask=5, sentinels=tuple(range(6, 106)))
TOKENIZER = Characters().build(iter(["abcd"]))
OBJECTIVES = [CausalLM(), MaskedLM(), SpanCorruption()]


class CountingCorpus:
    """A corpus in which token i is 200 + i, so that the tokens of a window show its position."""

    directory, parts, num_documents = "train", None, 1

    is_in_store = False

    def __init__(self, num_tokens):
        self.num_tokens = num_tokens

    def window(self, start, length):
        assert 0 <= start <= start + length <= self.num_tokens
        return np.arange(200 + start, 200 + start + length, dtype=np.int32), np.ones(length, np.int32)


def make(objective=None, num_tokens=1000, **kwargs):
    options, others = row_options(dict(sequence_length=31, global_batch_size=4, seed=3) | kwargs)
    return Batches([CountingCorpus(num_tokens)], objective or CausalLM(), VOCABULARY, options, **others)


def start(batches, row):
    """Returns the start of the window of a row."""
    ((place, _),), _ = batches.streams[0].row(row)
    return place


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


# --- how often a corpus is read


def test_epochs_count_how_often_a_run_reads_each_corpus():
    options, _ = row_options(dict(sequence_length=31, global_batch_size=4, seed=3))
    stages = [(0.0, (3.0, 1.0)), (0.5, (0.0, 1.0))]
    corpora = [CountingCorpus(1000), CountingCorpus(300)]
    batches = Batches(corpora, CausalLM(), VOCABULARY, options, weight_stages=stages, steps=50)
    rows = collections.Counter(batches.schedule[row][0] for row in range(200))
    assert batches.epochs == tuple(rows[i] / batches.streams[i].plan.rows_per_epoch for i in (0, 1))


def test_epochs_of_several_objectives_over_one_corpus_add_up():
    mixture = ObjectiveMixture((CausalLM(), CausalLM()), (1.0, 3.0))
    batches, alone = make(mixture, steps=50), make(CausalLM(), steps=50)
    assert batches.epochs == pytest.approx(alone.epochs)


# --- the order of windows


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_tokens", [32, 33, 63, 64, 95, 1000])
def test_every_window_is_used_once_an_epoch(shuffle, num_tokens):
    batches = make(num_tokens=num_tokens, shuffle=shuffle)  # rows of 32 tokens
    windows = batches.rows_per_epoch
    for epoch in range(3):
        starts = sorted(start(batches, epoch * windows + i) for i in range(windows))
        assert starts == [starts[0] + 32 * i for i in range(windows)]
        assert 0 <= starts[0] and starts[-1] + 32 <= num_tokens


def test_an_epoch_leaves_out_less_than_two_windows():
    for num_tokens in range(32, 400):
        assert num_tokens - 32 * make(num_tokens=num_tokens).rows_per_epoch < 2 * 32
        assert num_tokens - 32 * make(num_tokens=num_tokens, shuffle=False).rows_per_epoch < 32


def test_epochs_have_their_own_order_and_offset():
    batches = make(num_tokens=4000)
    windows = batches.rows_per_epoch
    epochs = [[start(batches, epoch * windows + i) for i in range(windows)] for epoch in range(8)]
    offsets = [min(starts) for starts in epochs]
    orders = {tuple((s - o) // 32 for s in starts) for starts, o in zip(epochs, offsets, strict=True)}
    assert len(orders) == 8
    assert len(set(offsets)) > 4  # 8 draws from 32 places: fewer than 5 distinct ones have a probability below 1e-4.


def test_without_shuffle_windows_come_in_order_and_start_again():
    batches = make(num_tokens=32 * 3 + 5, shuffle=False)
    assert [start(batches, i) for i in range(5)] == [0, 32, 64, 0, 32]


# --- purity


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_a_batch_depends_on_nothing_asked_before(objective):
    one, other = make(objective), make(objective)
    [one[step] for step in (5, 2, 9)]
    assert same(one[7], other[7])


@pytest.mark.parametrize("objective", [MaskedLM(), SpanCorruption()], ids=lambda o: type(o).__name__)
def test_masks_are_drawn_anew_each_epoch(objective):
    batches = make(objective, num_tokens=100, shuffle=False, global_batch_size=1)
    one, other = batches[0], batches[batches.rows_per_epoch]
    assert start(batches, 0) == start(batches, batches.rows_per_epoch)
    assert not same(one, other)


def test_seeds_give_other_batches():
    assert not same(make(seed=0)[0], make(seed=1)[0])


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_the_same_global_batch(objective, processes):
    whole = make(objective, global_batch_size=8)
    parts = [make(objective, global_batch_size=8, process_index=p, process_count=processes) for p in range(processes)]
    for step in (0, 11):
        locals_ = [part[step] for part in parts]
        assert same(whole[step], {name: np.concatenate([x[name] for x in locals_]) for name in locals_[0]})


def test_masks_and_order_have_seeds_of_their_own():
    def rows(**seeds):
        batch = make(MaskedLM(), num_tokens=4000, **seeds)[5]
        unmasked = batch["tokens"].copy()
        np.put_along_axis(unmasked, batch["masked_positions"], batch["targets"], axis=1)
        return unmasked[:, 1:].tolist(), batch["masked_positions"].tolist()  # Unused slots have position 0.

    text, masks = rows(seed=3)
    assert rows(seed=3, mask_seed=3) == (text, masks)
    other = rows(seed=3, mask_seed=4)
    assert other[0] == text and other[1] != masks
    other = rows(seed=4, mask_seed=3)
    assert other[0] != text and other[1] == masks  # the same number of tokens, so the same positions


def test_masks_may_have_a_negative_seed():
    assert same(make(MaskedLM(), seed=-1)[2], make(MaskedLM(), seed=-1, mask_seed=-1)[2])


# --- ids


def corpus_with(folder, bad, characters="abcd"):
    """Writes two shards of the tokenizer's ids, one id replaced by `bad`; returns the corpus and the changed file."""
    size = TOKENIZER.vocabulary.size
    for i in range(2):
        with shards.ShardWriter(str(folder), i, TOKENIZER) as writer:
            list(writer.write([characters * 20], collections.Counter()))
    shards.write_index(str(folder), 2, size, "fingerprint")
    path = folder / "00001.tokens"
    tokens = np.fromfile(path, np.uint16)
    tokens[30] = bad
    tokens.tofile(path)
    return Corpus(str(folder)), path


@pytest.mark.parametrize("more", [0, 1, 60_000])
@pytest.mark.parametrize("objective", [CausalLM(), SpanCorruption()], ids=lambda o: type(o).__name__)
def test_an_id_beyond_the_vocabulary_ends_the_run_and_names_the_file(tmp_path, more, objective):
    vocabulary = TOKENIZER.vocabulary if isinstance(objective, CausalLM) else VOCABULARY
    corpus, path = corpus_with(tmp_path, vocabulary.size + more)
    options, others = row_options(dict(sequence_length=15, global_batch_size=2, seed=3, shuffle=False))
    batches = Batches([corpus], objective, vocabulary, options, **others)
    with pytest.raises(UserError, match=rf"a batch has the id {vocabulary.size + more}.*: {path} is damaged: delete"):
        for step in range(batches.rows_per_epoch // 2):
            batches[step]


def test_the_last_id_of_the_vocabulary_is_one(tmp_path):
    corpus, _ = corpus_with(tmp_path, TOKENIZER.vocabulary.size - 1)
    options, others = row_options(dict(sequence_length=15, global_batch_size=2, seed=3, shuffle=False))
    batches = Batches([corpus], CausalLM(), TOKENIZER.vocabulary, options, **others)
    assert max(batches[step]["tokens"].max() for step in range(5)) == TOKENIZER.vocabulary.size - 1


# --- mixtures


def of(corpus):
    """Makes a corpus in which every token is `corpus`."""
    counting = CountingCorpus(1000)
    counting.window = lambda start, length: (np.full(length, corpus, np.int32), np.ones(length, np.int32))
    return counting


def mixed(stages, **settings):
    options, others = row_options(dict(sequence_length=31, global_batch_size=8, seed=3, steps=10) | settings)
    return Batches([of(300), of(301)], CausalLM(), VOCABULARY, options, weight_stages=stages, **others)


def test_corpora_come_in_their_shares_in_each_batch():
    batches = mixed([(0.0, (3.0, 1.0))])
    for step in range(10):
        assert (batches[step]["tokens"][:, 0] == 301).sum() == 2


def test_shares_change_with_the_stage_of_training():
    batches = mixed([(0.0, (1.0, 0.0)), (0.5, (0.0, 1.0))])
    assert [set(batches[step]["tokens"].ravel().tolist()) for step in (0, 4, 5, 9)] == [{300}, {300}, {301}, {301}]


def test_processes_share_the_same_mixed_batch():
    whole = mixed([(0.0, (2.0, 1.0))])
    parts = [mixed([(0.0, (2.0, 1.0))], process_index=p, process_count=4) for p in range(4)]
    for step in (0, 7):
        assert same(whole[step], {name: np.concatenate([part[step][name] for part in parts]) for name in whole[step]})


def test_the_objectives_of_a_mixture_take_turns():
    objective = ObjectiveMixture((SpanCorruption(0.15), SpanCorruption(0.5)), (3.0, 1.0))
    batches = make(objective, num_tokens=4000)
    densities = [batches.examples(row)[0].noise_density for row in range(400)]
    assert densities.count(0.5) == 100
    assert batches[0]["targets"].shape == (4, objective.lengths(31).targets)


def test_the_progress_of_the_training_reaches_the_objective():
    batches = make(MaskedLM(rate=0.5, rate_change=RateChange(to=0.1)), steps=100, num_tokens=4000)
    counts = [batches[step]["loss_weights"].sum(1).mean() for step in (0, 50, 99)]
    np.testing.assert_allclose(counts, [0.5 * 29, 0.3 * 29, 0.1 * 29], atol=0.6)  # 4 rows, each rounded at random


def test_static_masks_are_those_of_the_epoch_before():
    batches = make(MaskedLM(static=True), num_tokens=400)
    epochs = [
        [batches.examples(e * batches.rows_per_epoch + i)[1][0] for i in range(batches.rows_per_epoch)] for e in (0, 1)
    ]
    first, second = ({tuple(x["tokens"].tolist()) for x in epoch} for epoch in epochs)
    assert first == second and [x["tokens"][1] for x in epochs[0]] != [x["tokens"][1] for x in epochs[1]]


# --- the loader


@pytest.mark.parametrize("start, stop", [(0, 6), (4, 6), (10, 11), (6, 6)])
def test_the_thread_gives_batches_in_order(start, stop):
    batches = make(MaskedLM())
    made = list(iterate(batches, start, stop))
    assert len(made) == stop - start
    assert all(same(batch, batches[start + i]) for i, batch in enumerate(made))


@pytest.mark.slow
def test_two_processes_give_the_same_batches_in_the_same_order():
    batches = make(SpanCorruption())
    made = list(iterate(batches, 3, 10, workers=2))
    assert len(made) == 7
    assert all(same(batch, batches[3 + i]) for i, batch in enumerate(made))


@pytest.mark.slow
def test_two_processes_give_the_same_packed_and_mixed_batches(tmp_path):
    batches = packed_and_mixed(str(tmp_path))
    made = list(iterate(batches, 3, 10, workers=2))
    assert all(same(batch, batches[3 + i]) for i, batch in enumerate(made))


def packed_and_mixed(directory):
    with shards.ShardWriter(directory, 0, TOKENIZER) as writer:
        list(writer.write(["abcd" * (1 + i % 9) for i in range(300)], collections.Counter()))
    shards.write_index(directory, 1, TOKENIZER.vocabulary.size, "letters")
    corpora, stages = [Corpus(directory)] * 2, [(0.0, (2.0, 1.0)), (0.5, (0.0, 1.0))]
    options = RowOptions(sequence_length=31, global_batch_size=4, seed=3, packing=BestFit())
    return Batches(corpora, CausalLM(), TOKENIZER.vocabulary, options, weight_stages=stages, steps=12)


def test_making_batches_does_not_import_jax():
    code = "import sys, pretrainax.data.pipeline, pretrainax.data.baseline; print({'jax', 'grain'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


# --- mistakes


def test_a_corpus_shorter_than_a_row_is_refused():
    with pytest.raises(UserError, match="has 31 tokens, but one row of config.data.sequence_length 31 takes 32"):
        make(num_tokens=31)


def test_processes_that_do_not_divide_the_batch_are_refused():
    with pytest.raises(UserError, match="config.train.global_batch_size 4 is not a multiple of the 3 processes"):
        make(process_count=3)


def test_a_vocabulary_that_does_not_fit_is_refused():
    with pytest.raises(UserError, match="100 sentinels, .* have 399 spans"):
        make(SpanCorruption(mean_span_length=1.0, noise_density=0.5), sequence_length=800, num_tokens=5000)


LOADING = """
import signal
from pretrainax.data.pipeline import iterate

class Numbers:
    def __getitem__(self, index):
        return {"index": index}

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: None)
    for batch in iterate(Numbers(), 0, 1000, workers=1):
        print(batch["index"], flush=True)
        input()
"""


@pytest.mark.slow
def test_a_loader_process_leaves_signals_to_its_parent_and_ends_with_it(tmp_path):
    (tmp_path / "loading.py").write_text(LOADING)
    pipe = subprocess.PIPE
    command = [sys.executable, str(tmp_path / "loading.py")]
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, start_new_session=True, text=True) as parent:
        assert parent.stdout.readline() == "0\n"
        os.killpg(parent.pid, signal.SIGTERM)  # SLURM sends SIGTERM to the group.
        for index in range(1, 20):  # More than the workers prefetched.
            parent.stdin.write("\n")
            parent.stdin.flush()
            assert parent.stdout.readline() == f"{index}\n"
        parent.kill()
        assert parent.stdout.read() == ""  # Returns when no process has the pipe open.


# --- of a run


@pytest.mark.parametrize("split, process", [("train", 0), ("train", 1), ("valid", 1)])
def test_the_batches_of_a_run_are_those_of_its_config(split, process, tmp_path):
    experiment = tiny.get_config("gpt")
    experiment.train.seed, experiment.train.steps, experiment.data.packing = 7, 12, BestFit()
    for name, size in (("train", 200), ("valid", 300)):
        (tmp_path / name).mkdir()
        with shards.ShardWriter(str(tmp_path / name), 0, TOKENIZER) as writer:
            list(writer.write(["abcd" * (1 + i % 9) for i in range(size)], collections.Counter()))
        shards.write_index(str(tmp_path / name), 1, TOKENIZER.vocabulary.size, name)
    corpora = {name: [Corpus(str(tmp_path / name))] for name in ("train", "valid")}
    prepared = SimpleNamespace(tokenizer=TOKENIZER, **corpora)
    made = batches_of(experiment, prepared, split, process, 2)
    training = split == "train"
    options = RowOptions(
        32,
        8,
        seed=7 if training else 0,
        shuffle=training,
        packing=BestFit(),
        text=TOKENIZER.text_table,
        no_target_bytes=text_loss_reason(TOKENIZER, corpora[split]),
    )
    steps = 12 if training else None
    expected = Batches(
        corpora[split],
        experiment.objective.bind(TOKENIZER),
        TOKENIZER.vocabulary,
        options,
        steps=steps,
        process_index=process,
        process_count=2,
    )
    assert (made.rows, made.local_batch_size, made.first_row, made.mask_seed) == (
        12 * 8 * training,
        4,
        4 * process,
        7 * training,
    )
    assert all(same(made[step], expected[step]) for step in (0, 5))
    if not process:
        assert same(batches_of(experiment, prepared, split)[0], batches_of(experiment, prepared, split, 0, 1)[0])


def test_a_seed_may_be_negative():
    assert same(make(MaskedLM(), seed=-1)[2], make(MaskedLM(), seed=2**64 - 1)[2])
    assert not same(make(MaskedLM(), seed=-1)[2], make(MaskedLM(), seed=1)[2])


def test_each_batch_of_a_mixture_has_the_names_of_all_its_objectives():
    batches = make(ObjectiveMixture((CausalLM(), PrefixLM()), (7.0, 1.0)), num_tokens=4000)
    rows = [{type(batches.examples(step * 4 + i)[0]) for i in range(4)} for step in range(8)]
    assert {CausalLM} in rows and any(PrefixLM in row for row in rows)
    assert all("prefix_mask" in batches[step] for step in range(8))


def test_rows_of_a_mixture_cannot_have_buckets(tmp_path):
    corpora = [corpus_with(tmp_path, 0)[0]] * 2
    options = RowOptions(sequence_length=31, global_batch_size=1, seed=3, packing=OneEach(buckets=(16,)))
    Batches(corpora[:1], CausalLM(), TOKENIZER.vocabulary, options)
    with pytest.raises(UserError, match=r"config\.data\.packing has buckets, which the rows of a mixture cannot share"):
        Batches(corpora, CausalLM(), TOKENIZER.vocabulary, options)


class Inventing(CausalLM):
    """An objective that makes an id outside of the vocabulary."""

    def example(self, text, rng, vocabulary):
        made = super().example(text, rng, vocabulary)
        return made | {"targets": np.full_like(made["targets"], vocabulary.size)}


def test_an_id_that_no_text_has_is_the_objectives(tmp_path):
    corpus, _ = corpus_with(tmp_path, 0)
    options, others = row_options(dict(sequence_length=15, global_batch_size=2, seed=3))
    size = TOKENIZER.vocabulary.size
    with pytest.raises(
        UserError, match=rf"id {size}; the tokenizer has {size} ids: config.objective creates an invalid"
    ):
        Batches([corpus], Inventing(), TOKENIZER.vocabulary, options, **others)[0]


def test_progress_goes_from_nothing_to_all_and_no_further():
    batches = make(steps=10)  # 4 rows per step
    assert [batches.progress(row) for row in (0, 20, 40, 80)] == [0.0, 0.5, 1.0, 1.0]
    assert make().progress(5) == 1.0


def test_statistics_of_streams_are_added_but_for_the_fill():
    batches = make()
    batches.streams = [
        SimpleNamespace(plan=SimpleNamespace(statistics={"fill": fill, "documents cut": cut}))
        for fill, cut in ((0.5, 2), (0.75, 3), (0.25, 4))
    ]
    assert batches.statistics() == {"fill": 0.75, "documents cut": 9}


@pytest.mark.parametrize("pad, written", [(3, 3), (None, 0)])
def test_rows_are_padded_with_the_id_of_the_vocabulary(tmp_path, pad, written):
    corpus, _ = corpus_with(tmp_path, 0)
    options, others = row_options(dict(sequence_length=127, global_batch_size=1, seed=3, packing=OneEach()))
    vocabulary = dataclasses.replace(TOKENIZER.vocabulary, pad=pad)
    batch = Batches([corpus], CausalLM(), vocabulary, options, **others)[0]
    padding = batch["segment_ids"] == 0
    assert padding.sum() > 20 and set(batch["tokens"][padding].tolist()) == {written}


def test_the_weights_of_a_run_are_those_of_its_source(tmp_path):
    experiment = tiny.get_config("gpt")
    asked = []
    stages = SimpleNamespace(weight_stages=lambda documents: asked.append(documents) or [(0.0, (3.0, 1.0))])
    experiment.data = SimpleNamespace(source=stages, sequence_length=15, packing=None)
    corpora = [corpus_with(tmp_path, 0)[0]] * 2
    prepared = SimpleNamespace(tokenizer=TOKENIZER, train=corpora)
    batches = batches_of(experiment, prepared, "train")
    assert [batches.schedule[row][0] for row in range(8)].count(0) == 6
    assert asked == [[corpus.num_documents for corpus in corpora]]


def test_seeds_that_are_far_apart_give_other_batches():
    assert not same(make(MaskedLM(), seed=5)[0], make(MaskedLM(), seed=5 + 2**40)[0])


def test_workers_ask_for_shared_memory_before_they_start(monkeypatch):
    def refuse(field, count, *, alone):
        raise UserError(f"{field} {count} {alone}")

    monkeypatch.setattr("pretrainax.data.pipeline.check_shared_memory", refuse)
    with pytest.raises(UserError, match="^workers 2 0$"):
        next(iterate(make(), 0, 4, workers=2))
    assert same(next(iterate(make(), 0, 4)), make()[0])
