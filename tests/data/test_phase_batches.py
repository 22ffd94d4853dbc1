"""Tests the batches of a run in phases: functions of (seed, step), with streams that continue across phases."""

import pickle
import types

import numpy as np
import pytest

from pretrainax.config import Phase
from pretrainax.data.objectives import CausalLM, MaskedLM, SpanCorruption
from pretrainax.data.pipeline import batches_of, iterate, phase_batches
from pretrainax.data.preparation.prepare import Prepared, prepare
from pretrainax.data.sources import SourceMixture, TextFiles
from pretrainax.tokenization.base import Vocabulary
from pretrainax.training.loop_state import Rollback
from pretrainax.training.loss_spikes import SkippingBatches
from tests.data.test_pipeline import CountingCorpus, same
from tests.support import tiny

VOCABULARY = Vocabulary(size=9000, pad=0, eos=1, unk=2, cls=3, sep=4, mask=5, sentinels=tuple(range(6, 106)))
TOKENIZER = types.SimpleNamespace(vocabulary=VOCABULARY, text_table=None)


@pytest.fixture(autouse=True)
def _no_text_is_counted(monkeypatch):
    monkeypatch.setattr("pretrainax.data.pipeline.text_loss_reason", lambda tokenizer, corpora: "corpora of numbers")


def run(*phases: Phase, steps: int = 20, corpora=None, **changes):
    """Returns the config of a run of 4 rows of 32 tokens per step, and its data."""
    corpora = corpora or (CountingCorpus(2000),)
    experiment = tiny.get_config("gpt")
    experiment.data.sequence_length, experiment.train.global_batch_size, experiment.train.steps = 31, 4, steps
    experiment.phases = phases
    for name, value in changes.items():
        setattr(experiment, name, value)
    if len(corpora) > 1:
        experiment.data.source = SourceMixture(sources=tuple(map(TextFiles, "ab")), weights=(1.0, 1.0))
    for corpus in corpora:
        corpus.num_documents = 1
    return experiment, Prepared(TOKENIZER, corpora, corpora, "", phases=(corpora,) * len(phases))


def windows(experiment, prepared, steps=None, **processes):
    """Returns the first tokens of the rows of each step, which show the positions of the rows in the corpus."""
    batches = phase_batches(experiment, prepared, **processes)
    every = range(experiment.train.steps) if steps is None else steps
    return [batches.at(step)[step]["tokens"][:, 0].tolist() for step in every]


def flat(rows):
    return [start for of_step in rows for start in of_step]


# --- streams across phases -------------------------------------------------------------------------------------------


def test_phases_that_change_no_row_have_the_batches_of_a_run_without_them():
    changed = (Phase(share=0.5), Phase(share=0.1, dropout_rate=0.0, learning_rate=1e-5), Phase(accumulate=2))
    plain, phased = run(), run(*changed)
    one, other = batches_of(*plain, "train"), phase_batches(*phased)
    assert all(same(one[step], other.at(step)[step]) for step in range(20))


@pytest.mark.parametrize("size", [1, 2, 8])
def test_another_batch_size_goes_through_the_same_epoch(size):
    plain = flat(windows(*run(steps=40)))
    phased = flat(windows(*run(Phase(steps=7), Phase(steps=5, global_batch_size=size), Phase(), steps=20)))
    assert phased == plain[: len(phased)]


def test_rows_of_another_length_are_in_an_order_of_their_own_and_go_on_when_they_come_again():
    plain = flat(windows(*run()))
    between = Phase(steps=3, sequence_length=63)
    phased = windows(*run(Phase(steps=5), between, Phase(steps=4), between, Phase()))
    short, long = flat([*phased[:5], *phased[8:12], *phased[15:]]), flat([*phased[5:8], *phased[12:15]])
    assert short == plain[: len(short)]
    assert len(set(long)) == len(long) == 24  # No window repeats in an epoch of 31.
    alone = flat(windows(*run(Phase(sequence_length=63), steps=6)))
    assert alone != long  # It has its own random numbers.


def test_a_change_of_weights_reads_each_corpus_on():
    corpora = (CountingCorpus(2000), CountingCorpus(5000))
    experiment, prepared = run(Phase(share=0.5), Phase(weights=(1.0, 3.0)), corpora=corpora)
    first, second = (part.schedule.before(part.stop * 4) for part in phase_batches(experiment, prepared).phases)
    batches = phase_batches(experiment, prepared)
    rows = {0: [], 1: []}
    for step in range(20):
        part = batches.at(step)
        for row in range(4 * step, 4 * step + 4):
            stream, n = part._stream_row(row)
            rows[part.streams.index(stream)].append(n)
    assert first.tolist() == [20, 20] and rows[0] == list(range(30)) and rows[1] == list(range(50))
    sizes = [stream.plan.rows_per_epoch for stream in part.streams]
    assert part.epochs == (10 / sizes[0], 30 / sizes[1]) and second.sum() == 80


def test_another_rate_of_an_objective_reads_the_text_on():
    lower = MaskedLM(rate=0.15)
    plain, phased = (run(*p, objective=MaskedLM(rate=0.3)) for p in ((), (Phase(share=0.5), Phase(objective=lower))))
    one, other = batches_of(*plain, "train"), phase_batches(*phased)
    for step in (9, 10, 19):
        found = [[text.tokens[0] for text in texts(part, step)] for part in (one, other.at(step))]
        assert found[0] == found[1]
    assert [part.template["targets"].size for part in other.phases] == [8, 4]


def texts(batches, step):
    """Yields the inputs of the rows of a step."""
    for row in range(4 * step, 4 * step + 4):
        yield from batches.inputs(row)


def test_progress_is_that_of_the_whole_run():
    first, second = phase_batches(*run(Phase(share=0.5), Phase(global_batch_size=16))).phases
    assert [first.progress(4 * step) for step in (0, 5, 10)] == [0.0, 0.25, 0.5]
    assert [second.progress(16 * step) for step in (10, 15, 20)] == [0.5, 0.75, 1.0]


def test_epochs_are_counted_by_phase():
    parts = phase_batches(*run(Phase(steps=15), Phase(sequence_length=63))).phases
    sizes = [part.streams[0].plan.rows_per_epoch for part in parts]
    assert [part.epochs for part in parts] == [(60 / sizes[0],), (20 / sizes[1],)]


# --- functions of (seed, step) ---------------------------------------------------------------------------------------

PHASES = (Phase(steps=5, sequence_length=15, global_batch_size=8), Phase(objective=SpanCorruption()))


def test_any_step_may_be_asked_for_first_by_any_number_of_processes():
    experiment, prepared = run(*PHASES, objective=CausalLM())
    whole = windows(experiment, prepared)
    assert [windows(experiment, prepared, [step])[0] for step in (19, 5, 4, 0)] == [whole[i] for i in (19, 5, 4, 0)]
    halves = [windows(experiment, prepared, process_index=i, process_count=2) for i in (0, 1)]
    assert [a + b for a, b in zip(*halves, strict=True)] == whole


def test_the_loader_crosses_the_boundary_and_its_workers_get_all_of_it(text, cache):
    experiment = tiny.get_config("gpt")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.train.steps, experiment.phases = 6, (Phase(steps=3, sequence_length=16, global_batch_size=2), Phase())
    batches = SkippingBatches(phase_batches(experiment, prepare(experiment)), [])
    found, sent = list(iterate(batches, 1, 6)), pickle.loads(pickle.dumps(batches))
    assert [batch["tokens"].shape for batch in found] == [(2, 16)] * 2 + [(8, 32)] * 3
    assert all(same(batch, batches[step]) and same(batch, sent[step]) for step, batch in enumerate(found, 1))


def test_batches_left_out_by_a_rollback_leave_a_step_in_its_phase():
    experiment, prepared = run(Phase(steps=10, sequence_length=15), Phase())
    batches = SkippingBatches(phase_batches(experiment, prepared), [Rollback(spike=7, step=6, skipped=5)])
    assert [batches[step]["tokens"].shape[1] for step in (5, 6, 9, 10)] == [15, 15, 15, 31]
    rows = [tuple(batches[step]["tokens"][:, 0]) for step in range(10)]
    left_out = windows(*run(Phase(steps=20, sequence_length=15), Phase(), steps=40))
    assert rows == [tuple(left_out[step]) for step in (*range(6), *range(11, 15))]


# --- phases with their own text --------------------------------------------------------------------------------------


def test_a_phase_with_another_source_reads_that_with_the_tokenizer_of_the_run(tmp_path, text, cache):
    (tmp_path / "other.txt").write_text("Zebras quiz. " * 2000)
    experiment = tiny.get_config("gpt")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    plain = prepare(experiment)
    experiment.phases = (Phase(share=0.5), Phase(source=TextFiles(path=str(tmp_path))))
    prepared = prepare(experiment)
    assert prepared.tokenizer.fingerprint == plain.tokenizer.fingerprint
    assert [c.fingerprint for c in (*prepared.train, *prepared.valid)] == [
        c.fingerprint for c in (*plain.train, *plain.valid)
    ]
    assert len(prepared.corpora) == 3 and plain.corpora == (*plain.train, *plain.valid)
    first, second = phase_batches(experiment, prepared).phases
    assert "quiz" in prepared.tokenizer.decode(second[20]["tokens"][0]) and second.streams[0].number == 1
    assert np.array_equal(first[0]["tokens"], batches_of(experiment, plain, "train")[0]["tokens"])
