"""Tests the loop, in this process: patience, the best checkpoint, skipped updates, parameters of another run."""

import contextlib
import json
import shutil
from types import SimpleNamespace

import chex
import numpy as np
import pytest

from pretrainax.checkpoints.run_json import read_run_json
from pretrainax.config import RunFailed, UserError
from pretrainax.data.corpus_check import CorpusCheck
from pretrainax.data.objectives import Statistic
from pretrainax.data.packing import FirstFit, OneEach
from pretrainax.data.pipeline import Batches, batches_of
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import JsonLines, TextFiles
from pretrainax.interop.origin import find_origin
from pretrainax.runs.train import train
from pretrainax.sharding.mesh import make_mesh
from pretrainax.training import train as core
from pretrainax.training.loop import Loop
from pretrainax.training.loop_state import LoopState
from pretrainax.training.run import Run
from pretrainax.training.validation import Validation
from pretrainax.training.work import Work
from tests.support import tiny
from tests.support.runs import lines as untimed
from tests.support.traces import limit_traces


@pytest.fixture
def experiment(text, cache):
    experiment = tiny.get_config("gpt")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.mesh.data = 8
    experiment.train.steps, experiment.evaluate.every, experiment.evaluate.batches = 6, 2, 1
    experiment.schedule.warmup_steps = 1
    return experiment


def lines(workdir, split):
    every = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [line for line in every if line["split"] == split]


def steps(workdir):
    return sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdecimal())


def validating(monkeypatch, losses, accuracies=(0.0, 0.0, 0.0, 0.0)):
    """Patches the validations of a run to return these losses and accuracies, in order."""
    figures = ({"loss": loss, "accuracy": accuracy} for loss, accuracy in zip(losses, accuracies, strict=False))
    monkeypatch.setattr(Run, "validate", lambda run, params: next(figures))


@pytest.mark.slow
def test_patience_ends_a_run_and_the_best_checkpoint_stays(experiment, tmp_path, monkeypatch):
    validating(monkeypatch, [3.0, 4.0, 5.0, 5.0])
    experiment.train.steps, experiment.evaluate.patience = 20, 2
    experiment.checkpoint.every, experiment.checkpoint.keep = 1, 1
    assert train(experiment, str(tmp_path)) == 0
    assert [line["step"] for line in lines(tmp_path, "valid")] == [2, 4, 6]
    assert steps(tmp_path) == [2, 6]  # the best and the newest checkpoint


@pytest.mark.slow
def test_a_run_out_of_patience_trains_no_further_when_started_again(experiment, tmp_path, monkeypatch):
    validating(monkeypatch, [3.0, 4.0, 5.0, 6.0])
    experiment.evaluate.patience, experiment.checkpoint.every = 1, 2
    for _ in range(2):
        assert train(experiment, str(tmp_path)) == 0
        assert [line["step"] for line in lines(tmp_path, "train")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_first_validation_loss_that_is_no_number_is_not_the_best(experiment, tmp_path, monkeypatch):
    validating(monkeypatch, [float("nan"), 4.0, 5.0, 5.0])
    experiment.checkpoint.every, experiment.checkpoint.keep = 2, 1
    assert train(experiment, str(tmp_path)) == 0
    assert steps(tmp_path) == [4, 6]


@pytest.mark.slow
def test_a_run_that_selects_by_accuracy_keeps_the_highest(experiment, tmp_path, monkeypatch, capsys):
    validating(monkeypatch, [3.0, 4.0, 5.0, 6.0], [0.1, 0.3, 0.2, 0.25])
    experiment.evaluate.select_by, experiment.evaluate.patience, experiment.train.steps = "accuracy", 2, 20
    experiment.checkpoint.every, experiment.checkpoint.keep = 2, 1
    assert train(experiment, str(tmp_path)) == 0
    assert steps(tmp_path) == [4, 8] and lines(tmp_path, "train")[-1]["step"] == 8
    assert find_origin(f"{tmp_path}@best").description.endswith("step 4, the best by validation accuracy: 0.3000")
    assert "no better validation accuracy in 2 evaluations: stopping" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_selects_by_another_figure_from_now_on_says_so_and_begins_anew(
    experiment, tmp_path, monkeypatch, capsys
):
    """A run from before version 0.5 does this if its objective selects by another metric than the loss."""
    validating(monkeypatch, [3.0, 4.0, 5.0, 6.0], [0.5, 0.1, 0.2, 0.15])
    experiment.checkpoint.every, experiment.checkpoint.keep, experiment.train.steps = 2, 1, 4
    assert train(experiment, str(tmp_path)) == 0
    experiment.evaluate.select_by, experiment.train.steps = "accuracy", 8
    assert train(experiment, str(tmp_path), extend=True) == 0
    assert steps(tmp_path) == [2, 8]  # Step 2 is the best: its run.json has the accuracy.
    said = "until now validation loss selected the best checkpoint; from this step on accuracy selects it, among"
    assert said in capsys.readouterr().err
    state = read_run_json(str(tmp_path / "checkpoints" / "8"))["extra"]
    assert (state["best_loss"], state["evaluations_since_best"], state["select_by"]) == (0.2, 1, "accuracy")


# --- the actions after a step, without a model


def simulated(monkeypatch, steps=400, evaluate=100, checkpoint=1000, patience=None, best=()):
    """Returns a loop without a model, and the list of what it does; the validations after the steps `best` improve."""
    config, actions = tiny.get_config("gpt"), []
    config.train.steps, config.train.log_every = steps, 150
    config.evaluate.every, config.evaluate.patience, config.checkpoint.every = evaluate, patience, checkpoint
    writer = SimpleNamespace(check=lambda *_: None, note=lambda line: actions.append(line))
    validation = SimpleNamespace(sizes=(20, 20))
    peers = SimpleNamespace(agree=lambda is_stopping: is_stopping)
    run = SimpleNamespace(experiment=config, stop=steps, phase=None, peers=peers, batches=None, validation=validation)
    run.at = lambda step: run
    goodput = SimpleNamespace(on=lambda part: contextlib.nullcontext())
    checkpoints = SimpleNamespace(wait=lambda: None)
    state = LoopState(tokenizer="t", corpora=[])
    signals = SimpleNamespace(requested=False)
    loop = Loop(run, checkpoints, writer, goodput, signals, state, None, SimpleNamespace(call=lambda *_: []))

    def evaluate_(state):
        actions.append(("evaluate", loop.step))
        loop.loop_state.evaluations_since_best = 0 if loop.step in best else loop.loop_state.evaluations_since_best + 1
        return loop.step in best

    monkeypatch.setattr(loop, "_log", lambda state: actions.append(("log", loop.step)))
    monkeypatch.setattr(loop, "_save", lambda state, is_scheduled: actions.append(("save", loop.step)))
    monkeypatch.setattr(loop, "_evaluate", evaluate_)
    return loop, actions


def step_to(loop, step):
    loop.loop_state.step = step
    return loop._run_due_actions(None)


def test_the_step_at_which_the_patience_ends_is_logged_and_saved(monkeypatch):
    loop, actions = simulated(monkeypatch, patience=1, best=(100,))
    for step in (100, 200):
        assert not loop._stop_reason()
        step_to(loop, step)
    assert actions == [("evaluate", 100), ("save", 100), ("evaluate", 200), ("log", 200), ("save", 200)]
    assert loop._stop_reason()


def test_a_stop_ends_the_run_as_its_last_step_does(monkeypatch):
    for step, is_stopped in ((130, True), (400, False)):
        loop, actions = simulated(monkeypatch)
        if is_stopped:
            loop.stop("as good as it gets")
        step_to(loop, step)
        assert actions == [("log", step), ("evaluate", step), ("save", step)]


def test_a_signal_at_the_step_of_a_stop_changes_nothing(monkeypatch):
    loop, actions = simulated(monkeypatch)
    loop.preemption.requested = True
    loop.stop("as good as it gets")
    assert not step_to(loop, 130) and actions == [("log", 130), ("evaluate", 130), ("save", 130)]
    loop._requested_stop = ""
    assert step_to(loop, 131) and actions[3:] == [("save", 131), "saved step 131; the same command resumes here"]


def test_a_metric_of_a_callback_that_selects_may_be_an_array(monkeypatch):
    loop, _ = simulated(monkeypatch)
    loop.run.experiment.evaluate.select_by, loop.run.validated = "accuracy", lambda state: None
    loop.run.validate, loop.writer.log = lambda params: {"loss": 3.0}, lambda *_: None
    results = {"evaluation_metrics": [("Own.evaluation_metrics", {"accuracy": np.float32(0.5)})]}
    loop.callbacks = SimpleNamespace(call=lambda method, *_: results.get(method, []))
    assert Loop._evaluate(loop, None)
    assert json.loads(json.dumps(loop.loop_state.to_json()))["best_loss"] == 0.5


def test_after_a_rollback_the_run_forgets_what_later_steps_requested(monkeypatch):
    loop, actions = simulated(monkeypatch)
    loop.stop("as good as it gets")
    loop.request("checkpoint")
    loop._reset()
    step_to(loop, 130)
    assert not actions and not loop._stop_reason()


@pytest.mark.parametrize(("before", "is_reset"), [(10, True), (20, False), (None, False)])
def test_a_best_value_of_other_validation_rows_is_discarded_with_a_note(monkeypatch, before, is_reset):
    loop, actions = simulated(monkeypatch)
    state = loop.loop_state
    state.best_loss, state.evaluations_since_best, state.valid_batches = 3.0, 2, before
    loop._reset()
    assert (state.best_loss, state.evaluations_since_best) == ((None, 0) if is_reset else (3.0, 2))
    note = "until now a validation had 10 batches; from this step on it has 20, "
    note += "and the best loss and the patience begin again"
    assert actions == [note] * is_reset and state.valid_batches == 20


def flip(path):
    """Changes one token of a file to another token of the vocabulary."""
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)


@pytest.mark.first(1)
@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_flipped_bit_of_the_corpus_ends_the_run_before_a_checkpoint_has_seen_it(experiment, tmp_path, split):
    experiment.data.cache_dir, experiment.checkpoint.every = str(tmp_path / "cache"), 1
    prepare(experiment)
    (path,) = (tmp_path / "cache").rglob(f"{split}/00000.tokens")
    flip(path)
    with pytest.raises(UserError, match=rf"{split}/00000\.tokens is damaged: delete .* and prepare again$"):
        train(experiment, str(tmp_path / "run"))
    assert not steps(tmp_path / "run")


@pytest.mark.slow
def test_damage_that_is_found_later_names_the_checkpoints_that_may_have_seen_it(experiment, tmp_path, monkeypatch):
    """The run looks for damage only after three steps."""
    experiment.data.cache_dir, experiment.checkpoint.every = str(tmp_path / "cache"), 2
    prepare(experiment)
    flip(next((tmp_path / "cache").rglob("train/00000.tokens")))
    look, looks = CorpusCheck.raise_if_damaged, []

    def late(self):
        looks.append(1)
        if len(looks) > 3:
            self._thread.join()
            look(self)

    monkeypatch.setattr(CorpusCheck, "raise_if_damaged", late)
    with pytest.raises(UserError, match=r"prepare again; checkpoints after step 0 may have seen it: delete them too"):
        train(experiment, str(tmp_path / "run"))
    assert steps(tmp_path / "run") == [2]


@pytest.mark.slow
def test_a_run_that_is_over_before_the_corpus_is_compared_says_so(experiment, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(CorpusCheck, "_run", lambda self: None)
    assert train(experiment, str(tmp_path)) == 0
    assert "corpus files were verified" in capsys.readouterr().err


def test_a_run_whose_objective_is_not_as_asked_does_not_start(experiment, tmp_path, monkeypatch):
    off = [Statistic("noise density", 0.3, expected=0.15, tolerance=0.01)]
    monkeypatch.setattr(type(experiment.objective), "statistics", lambda *_: iter(off))
    with pytest.raises(RunFailed, match=r"noise density 0\.3000 \(of 1,024 examples\), expected 0\.15 ± 0\.01"):
        train(experiment, str(tmp_path))
    assert not (tmp_path / "metrics.jsonl").exists() or not lines(tmp_path, "train")


# --- the metrics of a line: since the previous line, and of all steps


@pytest.fixture(scope="module")
def packed(cache, tmp_path_factory):
    """Makes configs of runs of six steps, whose batches differ in their numbers of targets and in their padding."""
    path = tmp_path_factory.mktemp("packed") / "texts.jsonl"
    texts = [f"{i} words {'more ' * (20 if i % 2 else 3)}" for i in range(400)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def make(log_every):
        experiment = tiny.get_config("gpt")
        experiment.data.source, experiment.data.cache_dir = JsonLines(path=str(path), valid_fraction=0.2), str(cache)
        experiment.data.packing, experiment.tokenizer.vocab_size, experiment.mesh.data = FirstFit(), 260, 8
        experiment.train.steps, experiment.train.log_every = 6, log_every
        experiment.evaluate.every, experiment.evaluate.batches = 3, 1
        experiment.checkpoint.every, experiment.checkpoint.keep = 1, 6
        return experiment

    return make


@pytest.fixture(scope="module")
def logged(packed, tmp_path_factory):
    """Trains two runs and returns their folders: one logs each step, the other logs steps 4 and 6."""
    folders = {every: tmp_path_factory.mktemp(f"every_{every}") for every in (1, 4)}
    for every, folder in folders.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core, "finish", lambda *_: None)
            assert train(packed(every), str(folder)) == 0
    return folders


def test_the_means_of_a_line_are_those_of_all_steps_since_the_line_before(logged):
    each, (first, second) = lines(logged[1], "train"), lines(logged[4], "train")
    assert len({line["loss_tokens"] for line in each}) > 1  # Else a mean of means would also pass.
    for line, steps in ((first, each[:4]), (second, each[4:])):
        weights = [step["loss_tokens"] for step in steps]
        assert line["loss_tokens"] == sum(weights)
        for name in ("loss", "accuracy"):
            # rel: float64 sums of float32 numbers that are the same in both runs.
            assert line[name] == pytest.approx(np.average([step[name] for step in steps], weights=weights), rel=1e-12)
        padding = np.mean([step["padding_fraction"] for step in steps])
        assert line["padding_fraction"] == pytest.approx(padding, rel=1e-12) and padding > 0
        assert line["gradient_norm"] == steps[-1]["gradient_norm"]


def test_lines_count_what_all_steps_have_taken(logged, packed):
    experiment = packed(1)
    prepared = prepare(experiment)
    batches, eos = batches_of(experiment, prepared, "train"), prepared.tokenizer.vocabulary.eos
    spellings = prepared.tokenizer.spellings()
    tokens = bytes_ = 0
    for step, line in enumerate(lines(logged[1], "train")):
        read = [example["tokens"] for row in range(8 * step, 8 * step + 8) for example in batches.examples(row)[1]]
        ids = [i for i in np.concatenate(read).tolist() if i != eos]
        tokens, bytes_ = tokens + len(ids), bytes_ + sum(len(spellings[i]) for i in ids)
        assert (line["text_tokens"], line["text_bytes"]) == (tokens, bytes_)
        assert line["tokens"] == (step + 1) * 8 * 32
        assert line["flops"] == pytest.approx((step + 1) * lines(logged[1], "train")[0]["flops"], rel=1e-12)
    for split, at in (("valid", 3), ("train", 4)):
        for name in ("text_tokens", "text_bytes", "tokens", "flops"):
            (found,) = [line[name] for line in lines(logged[4], split) if line["step"] == at]
            assert found == lines(logged[1], "train")[at - 1][name]


def test_speeds_are_of_the_text_and_of_what_the_devices_read(logged):
    first, second = lines(logged[4], "train")
    for name, of in (("tokens_per_second", "text_tokens"), ("padded_tokens_per_second", "tokens")):
        seconds = second["step_seconds"] * 2
        assert second[name] * seconds == pytest.approx(second[of] - first[of], rel=1e-9)


def resumed(folder, tmp_path, experiment):
    """Copies a run without its last checkpoint, and resumes it."""
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    assert train(experiment, str(tmp_path / "run")) == 0
    return tmp_path / "run"


def test_a_run_that_is_resumed_between_two_lines_goes_on_with_its_means_and_counts(logged, packed, tmp_path, finished):
    again = resumed(logged[4], tmp_path, packed(4))
    assert untimed(again) == untimed(logged[4]) and len(untimed(again)) == 4


def test_a_run_that_an_older_version_began_goes_on_and_says_what_it_does_not_know(
    logged, packed, tmp_path, finished, monkeypatch, capsys
):
    read = LoopState.from_json
    older = lambda stored: {name: x for name, x in stored.items() if name not in ("counts", "sums")}  # noqa: E731
    monkeypatch.setattr(LoopState, "from_json", lambda stored, default: read(older(stored), default))
    line = lines(resumed(logged[4], tmp_path, packed(4)), "train")[-1]
    assert line["step"] == 6 and line["loss"] > 0 and line["compile_seconds"] > 0
    assert [line[name] for name in ("text_tokens", "text_bytes", "tokens", "flops")] == [None] * 4
    assert (
        "the version that started this run did not count text_tokens, text_bytes, tokens and flops"
        in capsys.readouterr().err
    )


@pytest.fixture
def poisoned(monkeypatch):
    """Sets the loss weights of the third batch to 1e38, so that its gradient overflows."""
    whole = Batches.__getitem__

    def batch(batches, step):
        rows = whole(batches, step)
        return rows | {"loss_weights": rows["loss_weights"] * (1e38 if step == 2 and batches.rows else 1.0)}

    monkeypatch.setattr(Batches, "__getitem__", batch)


@pytest.mark.slow
def test_an_update_that_is_not_finite_stops_the_run(experiment, tmp_path, poisoned):
    with pytest.raises(RunFailed, match=r"not finite at step 3 \(examples 16 to 23\)"):
        train(experiment, str(tmp_path))


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_left_out_and_counted(experiment, tmp_path, poisoned):
    experiment.train.on_nonfinite = "skip"
    assert train(experiment, str(tmp_path)) == 0
    assert [line["skipped_updates"] for line in lines(tmp_path, "train")] == [0, 0, 1, 1, 1, 1]
    assert [line["loss"] is None for line in lines(tmp_path, "train")] == [False, False, True, False, False, False]
    assert all(line["loss"] is not None for line in lines(tmp_path, "valid"))


@pytest.mark.slow
def test_init_from_takes_the_parameters_of_another_run(experiment, tmp_path):
    assert train(experiment, str(tmp_path / "first")) == 0
    experiment.checkpoint.init_from, experiment.train.steps = str(tmp_path / "first"), 1
    experiment.optimizer.learning_rate = 1e-30
    assert train(experiment, str(tmp_path / "second")) == 0
    before, after = (lines(tmp_path / name, "valid")[-1]["loss"] for name in ("first", "second"))
    assert after == pytest.approx(before, rel=1e-6)  # the same parameters, on the same batches


def test_init_from_a_folder_without_checkpoints_is_an_error(experiment, tmp_path):
    experiment.checkpoint.init_from = str(tmp_path)
    with pytest.raises(UserError, match="is neither a run, .* nor a Hugging Face directory"):
        train(experiment, str(tmp_path / "run"))


def test_a_batch_that_the_mesh_does_not_divide_is_an_error(experiment, tmp_path):
    experiment.train.global_batch_size = 12
    with pytest.raises(UserError, match="config.train.global_batch_size 12 is not a multiple of 8"):
        train(experiment, str(tmp_path))


@pytest.mark.slow
def test_validation_batches_are_added_before_they_are_divided(experiment):
    """The batches have 1 token with loss 4, and 3 tokens with loss 0. The mean is 1; the mean of means would be 2."""
    mesh = make_mesh(experiment.mesh)
    batches = [{"loss": np.full(8, loss, np.float32), "n": np.full(8, n, np.float32)} for loss, n in ((4, 1), (0, 3))]
    validation = SimpleNamespace(
        experiment=experiment,
        mesh=mesh,
        iterate_parts=lambda: (((), batch) for batch in batches),
        frozen=None,
        observe=None,
        eval_step=lambda params, batch, _: (
            {name: (batch["loss"][0], batch["n"][0]) for name in ("loss", "accuracy")},
            {},
        ),
    )
    assert Validation.metrics(validation, None)["loss"] == 1.0


@pytest.mark.parametrize(("parts", "count"), [([()], 20), ([("source=a",), ("source=b",)], 20)])
def test_each_validation_batch_is_progress(parts, count):
    config, calls = tiny.get_config("gpt"), []
    rows = 20 * config.train.global_batch_size
    batches = SimpleNamespace(rows_per_epoch=rows, stream_batch=lambda *_: {}, __getitem__=lambda *_: {})
    batches.schedule = SimpleNamespace(before=lambda rows: np.array([rows // len(parts)] * len(parts)))
    config.evaluate.batches = 20
    validation = Validation(config, batches, None, None, None, SimpleNamespace(progress=lambda: calls.append(1)))
    vars(validation)["parts"] = parts
    if len(parts) == 1:
        validation.valid_batches = type("Rows", (), vars(batches))()
    assert len(list(validation.iterate_parts())) == len(calls) == count


# --- each program compiles once --------------------------------------------------------------------------------------


@pytest.fixture
def finished(monkeypatch):
    """Lists the runs that ended, and skips their samples and plots."""
    runs = []
    monkeypatch.setattr(core, "finish", lambda ended, _: runs.append(ended.run))
    return runs


def compiled(run):
    """Returns the numbers of compilations of step and evaluation; a state with other sharding would add one."""
    return run.step.jitted._cache_size(), run.validation.eval_step._cache_size()


@pytest.mark.slow
def test_steps_evaluations_and_a_resumption_compile_once(experiment, tmp_path, finished, monkeypatch):
    limit_traces(monkeypatch)
    experiment.evaluate.batches, experiment.checkpoint.every, experiment.checkpoint.keep = 2, 2, 9
    assert train(experiment, str(tmp_path)) == 0
    for step in (4, 6):
        shutil.rmtree(tmp_path / "checkpoints" / str(step))
    chex.clear_trace_counter()  # A resumed run is normally another process.
    assert train(experiment, str(tmp_path)) == 0
    assert [compiled(run) for run in finished] == [(1, 1), (1, 1)]


@pytest.mark.slow
def test_a_last_batch_of_a_shorter_bucket_compiles_once_more(experiment, tmp_path, finished, monkeypatch):
    texts = [f"{i} words {'more ' * (20 if i % 2 else 0)}" for i in range(400)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    experiment.data.source = JsonLines(path=str(tmp_path / "texts.jsonl"), valid_fraction=0.2)
    experiment.data.packing, experiment.tokenizer.vocab_size = OneEach(buckets=(16,)), 260
    batches = batches_of(experiment, prepare(experiment), "train")
    lengths = [batches.lengths_of(step).inputs for step in range(40)]
    last = next(step for step in range(2, 40) if lengths[step] == 16 and 32 in lengths[:step])
    experiment.train.steps = experiment.evaluate.every = last + 1
    limit_traces(monkeypatch, 2)
    assert train(experiment, str(tmp_path / "run")) == 0
    assert compiled(finished[0])[0] == 2


@pytest.mark.slow
def test_mfu_is_of_the_flops_since_the_last_line_counted_and_done(experiment, tmp_path, monkeypatch):
    monkeypatch.setattr("pretrainax.training.work.peak_flops", lambda kind: 1e12)
    monkeypatch.setattr(Work, "flops_of", lambda run, step: 4e9)
    monkeypatch.setattr(Work, "flops_done_of", lambda run, step: 3e9)
    experiment.train.steps, experiment.train.log_every = 5, 2
    assert train(experiment, str(tmp_path)) == 0
    for line in lines(tmp_path, "train"):  # Lines of two steps; the last is of one step.
        for name, flops in (("mfu", 4e9), ("mfu_executed", 3e9)):
            np.testing.assert_allclose(line[name] * line["step_seconds"] * 1e12 * 8, flops)
