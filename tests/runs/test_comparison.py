"""Compares a run with its baseline; the reference computes all metrics again from logits, document by document."""

import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from pretrainax.config import Generator
from pretrainax.data.baseline import Baseline
from pretrainax.data.objectives import NextSentencePrediction, ReplacedTokenDetection
from pretrainax.data.pipeline import batches_of
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import TextFiles
from pretrainax.runs import comparison
from pretrainax.runs.cluster_sums import Sums
from pretrainax.runs.comparison import compare, gains_of
from pretrainax.runs.learned import warning_of
from pretrainax.runs.train import train
from pretrainax.runs.validation_errors import DocumentErrors
from pretrainax.runtime.watchdog import Watchdog
from pretrainax.sharding.mesh import make_mesh
from pretrainax.tokenization import Characters
from pretrainax.training.metrics import read_metrics
from tests.support import tiny
from tests.support.built import build_run


def config(variant, folder, cache):
    experiment = tiny.get_config("bert" if variant in ("pairs", "electra") else variant)
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(folder)), str(cache)
    experiment.evaluate.batches, experiment.mesh.data, experiment.schedule.warmup_steps = 6, 8, 1
    if hasattr(experiment.tokenizer, "vocab_size"):
        experiment.tokenizer.vocab_size = {"gpt": 280, "t5": 330}.get(variant, 100)
    if variant == "pairs":
        experiment.objective, experiment.model.pair_head = NextSentencePrediction(), True
    if variant == "electra":
        experiment.objective = ReplacedTokenDetection()
        experiment.model.masked_lm_head, experiment.model.replaced_token_head = False, True
        experiment.model.generator = Generator(num_layers=2, d_model=16, d_ff=32, num_heads=2)
    return experiment


class Compared:
    """A run with its initial parameters, compared with the baseline."""

    def __init__(self, variant, folder, cache, change=lambda params, frequencies: params):
        experiment = config(variant, folder, cache)
        mesh = make_mesh(experiment.mesh)
        with jax.set_mesh(mesh):
            self.run = build_run(experiment, prepare(experiment, report=lambda line: None), mesh, Watchdog())
            (self.corpus,), (self.train_corpus,) = self.run.prepared.valid, self.run.prepared.train
            self.vocabulary = self.run.prepared.tokenizer.vocabulary
            self.counts = np.array(self.train_corpus.token_counts)
            self.baseline = Baseline(self.counts, [self.run.train_batches[0]], self.vocabulary)
            self.params = change(self.run.fresh_state().params, self.counts / self.counts.sum())
            self.valid = batches_of(experiment, self.run.prepared, "valid")
            self.comparisons, self.observations = compare(self.run, self.params, self.baseline)
            self.run.validation.observe = observer = DocumentErrors(self.run.validation)
            self.run.validate(jax.tree.map(jnp.zeros_like, self.params))  # the next validation discards its values
            self.metrics = self.run.validate(self.params)
            self.errors = observer.errors()


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Writes a folder of 60 documents of different lengths, with sentences."""
    folder, rng = tmp_path_factory.mktemp("documents"), np.random.default_rng(0)
    for number in range(60):
        words = [f"w{i}" for i in rng.integers(0, 80, int(rng.integers(30, 400)))]
        sentences = [" ".join(words[i : i + 8]) for i in range(0, len(words), 8)]
        (folder / f"{number:02d}.txt").write_text(". ".join(sentences) + ".")
    return folder


@pytest.fixture(scope="module")
def bert(documents, cache):
    return Compared("bert", documents, cache)


def clustered(values, counts, documents):
    """Returns the ratio of the sums, and its jackknife error from the ratios without each document."""
    ids = sorted({int(i) for i, n in zip(documents, counts, strict=True) if n > 0})
    ratio = sum(values) / sum(counts)
    without = []
    for document in ids:
        rest = [(v, c) for v, c, i in zip(values, counts, documents, strict=True) if i != document]
        without.append(sum(v for v, _ in rest) / sum(c for _, c in rest))
    return ratio, math.sqrt((len(ids) - 1) / len(ids) * sum((x - ratio) ** 2 for x in without))


@pytest.mark.slow
def test_a_comparison_that_reads_a_part_of_the_validation_says_so(bert, monkeypatch):
    assert "batches" not in bert.observations
    monkeypatch.setattr(comparison, "_TARGETS", 1)
    with jax.set_mesh(bert.run.mesh):
        observations = compare(bert.run, bert.params, bert.baseline).observations
    assert observations.endswith(" in the first 1 of 6 batches, as the baseline and the gain")


@pytest.mark.slow
def test_losses_of_masked_random_and_unchanged_targets_are_those_of_the_logits(bert):
    lengths = np.diff(np.concatenate([[0], np.array(bert.corpus.document_ends)]))
    document_of_token = np.repeat(np.arange(len(lengths)), lengths)
    raw = bert.valid.lengths.raw
    mask, found = bert.vocabulary.mask, {"": [], "masked": [], "random": [], "unchanged": []}
    is_text = np.ones(bert.vocabulary.size, bool)
    is_text[list(bert.vocabulary.special_ids - {bert.vocabulary.unk})] = False
    smoothed = np.where(is_text, bert.counts + 1 / is_text.sum(), 0) / (bert.counts[is_text].sum() + 1)
    for number in range(bert.run.validation.sizes[0]):
        batch = bert.valid[number]
        with jax.set_mesh(bert.run.mesh):
            outputs = bert.run.model.apply({"params": bert.params}, batch, deterministic=True)
        logits = np.array(outputs.heads["lm"].logits(), np.float64)
        nats = -log_softmax(logits, axis=-1)
        for row, slot in zip(*np.nonzero(batch["loss_weights"]), strict=True):
            position, target = batch["masked_positions"][row, slot], batch["targets"][row, slot]
            seen = batch["tokens"][row, position]
            kind = "masked" if seen == mask else "unchanged" if seen == target else "random"
            document = document_of_token[(8 * number + row) * raw + position - 1]  # after [CLS]
            values = nats[row, slot, target], -np.log(smoothed[target]), document
            found[""].append(values)
            found[kind].append(values)
    for kind, rows in found.items():
        name = f"{kind}_loss".lstrip("_")
        model, baseline, documents = map(np.array, zip(*rows, strict=True))
        value, error = clustered(model, np.ones(len(rows)), documents)
        assert bert.metrics[name] == pytest.approx(value, rel=1e-5), name  # float32
        assert bert.comparisons[name].model[:2] == pytest.approx((value, error), rel=1e-4), name
        if kind == "masked":
            gain = clustered(baseline - model, np.ones(len(rows)), documents)
            # The baseline also predicts the kind of each target, from about 36 targets and one smoothing count.
            assert bert.comparisons[name].gain[:2] == pytest.approx(gain, abs=0.05)
            assert bert.comparisons[name].baseline == pytest.approx(baseline.mean(), abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["bert", "pairs", "electra", "t5", "gpt", "elmo"])
def test_the_compared_figures_are_those_of_the_validation(variant, documents, cache):
    compared = Compared(variant, documents, cache)
    names = set(compared.comparisons) - {"total_loss"}
    assert {"loss", "perplexity", "bits_per_token", "accuracy"} <= names
    for name in compared.comparisons:
        assert compared.comparisons[name].model.value == pytest.approx(compared.metrics[name], rel=1e-4), name
    missing = {name for name in compared.metrics if not name.endswith("spread")}
    missing -= {*compared.comparisons, "loss_tokens", "replaced_fraction"}
    assert missing == set()
    errors = {name: x.model.standard_error for name, x in compared.comparisons.items()}
    assert compared.errors == pytest.approx(errors, rel=1e-6)  # the same sums in another order
    if variant == "electra":
        original = 1 - compared.metrics["replaced_fraction"]
        entropy = -original * math.log(original) - (1 - original) * math.log(1 - original)
        assert compared.comparisons["replaced_loss"].baseline == pytest.approx(entropy, rel=1e-6)


@pytest.mark.slow
def test_pairs_of_a_document_are_one_observation(documents, cache):
    compared = Compared("pairs", documents, cache)
    (stream,) = compared.valid.streams
    nats, clusters = [], []
    for number in range(compared.run.validation.sizes[0]):
        batch = compared.valid[number]
        with jax.set_mesh(compared.run.mesh):
            outputs = compared.run.model.apply({"params": compared.params}, batch, deterministic=True)
        rows = -log_softmax(np.array(outputs.heads["pair"], np.float64), axis=-1)
        nats += [row[label] for row, label in zip(rows, batch["pair_labels"], strict=True)]
        starts = [stream.row(8 * number + row)[0][0][0] for row in range(8)]
        clusters += [int((np.array(compared.corpus.document_ends) <= start).sum()) for start in starts]
    expected = clustered(nats, np.ones(len(nats)), clusters)
    assert compared.comparisons["pair_loss"].model[:2] == pytest.approx(
        expected, rel=1e-3
    )  # losses of 0.69 nats in float32


@pytest.mark.slow
def test_with_few_documents_every_row_is_one_observation(text, cache):
    compared = Compared("gpt", text, cache)
    nats = []
    for number in range(compared.run.validation.sizes[0]):
        batch = compared.valid[number]
        with jax.set_mesh(compared.run.mesh):
            outputs = compared.run.model.apply({"params": compared.params}, batch, deterministic=True)
        logits = log_softmax(np.array(outputs.heads["lm"].logits(), np.float64), axis=-1)
        nats += (-np.take_along_axis(logits, batch["targets"][..., None], 2)[..., 0]).sum(1).tolist()
    assert compared.observations.startswith(f"{len(nats)} rows of ")
    expected = clustered(nats, np.full(len(nats), 32.0), range(len(nats)))
    assert compared.comparisons["loss"].model[:2] == pytest.approx(expected, rel=1e-3)  # float32
    assert compared.errors["loss"] == pytest.approx(expected[1], rel=1e-3)


def test_the_sum_of_two_losses_has_the_error_of_their_sum():
    """With equal weights, the sum of two means is the mean of the sums, with Cochran's error (1977, section 6.4)."""
    rng = np.random.default_rng(0)
    weights, first, second = rng.integers(1, 9, 50) * 1.0, rng.random(50), rng.random(50)
    total = comparison._total([Sums(x, None, weights) for x in (first, second)])
    value = (first + second).sum() / weights.sum()
    error = math.sqrt(50 / 49 * np.square(first + second - value * weights).sum()) / weights.sum()
    assert comparison._comparison(total, False, "documents").model[:2] == pytest.approx((value, error), rel=1e-9)


# --- learned or not -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_that_predicts_the_frequencies_everywhere_is_warned_of(documents, cache):
    """All states are zero, so only the output bias remains: the baseline without copying of unchanged tokens."""

    def collapsed(params, frequencies):
        params = jax.tree.map(jnp.zeros_like, params)
        bias = jnp.full(params["unembedding"]["bias"].shape, -30.0)
        params["unembedding"]["bias"] = bias.at[: len(frequencies)].set(jnp.log(frequencies + 1e-9))
        return params

    compared = Compared("bert", documents, cache, collapsed)
    (gain,) = gains_of(compared.comparisons)
    assert gain.metric == "loss at [MASK], nats per target" and abs(gain.estimate.value) < 0.2
    assert warning_of([gain]).startswith("WARNING: the model does not beat its baseline\n  loss at [MASK]")
    assert compared.comparisons["unchanged_loss"].gain.value < -1  # the model copies nothing


def unigram(rng, truth):
    counts = np.bincount(rng.choice(40, 2000, p=truth), minlength=40) + 1
    return -np.log(counts / counts.sum())


def test_a_model_that_equals_its_baseline_is_warned_of_in_95_percent_of_runs():
    """For each document, a coin assigns two sets of frequencies to model and baseline: their mean difference is 0."""
    rng, truth = np.random.default_rng(0), np.arange(1, 41) / np.arange(1, 41).sum()
    warned = 0
    for _ in range(200):
        tokens = rng.choice(40, (60, 50), p=truth)
        losses = np.stack([unigram(rng, truth)[tokens].sum(1) for _ in range(2)])
        losses = rng.permuted(losses, axis=0)
        sums = Sums(*losses, np.full(60, 50.0))
        compared = {"loss": comparison._comparison(sums, False, "documents")}
        warned += warning_of(gains_of(compared)) is not None
    assert warned >= 190


def test_a_model_with_a_smaller_loss_in_all_documents_is_not_warned_of():
    rng = np.random.default_rng(0)
    baseline = 100 + rng.random(60)
    sums = Sums(baseline - 5 - rng.random(60), baseline, np.full(60, 50.0))
    assert warning_of(gains_of({"text_loss": comparison._comparison(sums, False, "documents")})) is None


@pytest.mark.slow
@pytest.mark.parametrize("rate, is_warned", [(1e-2, False), (1e-9, True)])
def test_a_run_ends_with_a_warning_only_if_it_has_learned_nothing(rate, is_warned, tmp_path, capsys):
    folder = tmp_path / "text"
    folder.mkdir()
    letters = "abcdefghijklmnopqrst"
    for number in range(40):  # each letter determines the next letter
        (folder / f"{number}.txt").write_text("".join(letters[(number + i) % 20] for i in range(400)))
    experiment = config("gpt", folder, tmp_path / "cache")
    experiment.tokenizer, experiment.optimizer.learning_rate, experiment.train.steps = Characters(), rate, 60
    assert train(experiment, str(tmp_path / "run")) == 0
    said = capsys.readouterr().err
    assert ("WARNING: the model does not beat its baseline" in said) == is_warned
    assert "gain" in said.partition("unigram baseline")[2].splitlines()[0]
    written = json.loads((tmp_path / "run" / "comparison.json").read_text())
    assert written["observations"].endswith(" documents")
    gain = written["metrics"]["text_loss"]["gain"]
    assert (gain["value"] > 2 * gain["standard_error"] > 0) == (not is_warned)
    last = [line for line in read_metrics(str(tmp_path / "run" / "metrics.jsonl")) if line["split"] == "valid"][-1]
    assert written["metrics"]["loss"]["value"] == pytest.approx(last["loss"], rel=1e-5)  # float32


@pytest.mark.parametrize("targets, most", [(8, 50), (2**18, 3)])
def test_the_baseline_counts_the_text_of_all_phases_and_takes_few_large_batches(targets, most, monkeypatch):
    made = []

    class Batches:
        global_batch_size, lengths = 1, SimpleNamespace(targets=targets)

        def __getitem__(self, i):
            made.append(i)
            return {}

    monkeypatch.setattr(comparison, "batches_of", lambda *args: Batches())
    monkeypatch.setattr(comparison, "Baseline", lambda counts, seen, vocabulary: (counts, len(list(seen))))
    experiment = tiny.get_config("gpt")
    experiment.train.steps = 1000
    one, other = (SimpleNamespace(parts="text", token_counts=np.array(counts)) for counts in ((4, 0), (0, 8)))
    phases = (one,), (one, other)
    run = SimpleNamespace(
        experiment=experiment,
        prepared=SimpleNamespace(phases=phases, tokenizer=SimpleNamespace(vocabulary=SimpleNamespace(size=2))),
        parts=[SimpleNamespace(train_batches=SimpleNamespace(epochs=times)) for times in ((2.0,), (1.0, 0.5))],
    )
    counts, seen = comparison.baseline_of(run)
    assert seen == most == len(made) and counts.tolist() == [12, 4]
