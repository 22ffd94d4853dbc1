"""Computes the metrics that commands print again, with transformers, scikit-learn, SciPy and NumPy.

The models of transformers read exported directories, and the tests read the numbers from the output of the commands.
"""

import contextlib
import io
import json
import math
import re
import sys

import numpy as np
import pytest
from scipy import special, stats
from sklearn import metrics

from pretrainax.config import Classify
from pretrainax.config.config_file import read_config_file
from pretrainax.data.packing import OneEach
from pretrainax.data.sources import JsonLines, TextFiles
from pretrainax.runs.train import open_run, train
from pretrainax.tasks import Classification
from tests.golden.case import needs_transformers
from tests.support.runs import exporting, run

pytestmark = [pytest.mark.slow, needs_transformers]

RNG = np.random.default_rng(0)
WORDS = ["".join(RNG.choice(list("aeioustrnlkm"), 4)) for _ in range(60)]


def printed(output: str, label: str, count: int) -> list[float]:
    """Returns the first `count` numbers of the row of a table that begins with `label`."""
    (row,) = [line for line in output.splitlines() if re.match(rf"\s*{re.escape(label)}\s\s", line)]
    numbers = re.findall(r"[-+]?\d[\d,]*\.?\d*%?", row[row.index(label) + len(label) :])
    values = [float(x.rstrip("%").replace(",", "")) / (100 if x.endswith("%") else 1) for x in numbers]
    return values[:count]


def trained(experiment, folder) -> str:
    """Trains a model, exports it to transformers, and returns the output of the run."""
    with contextlib.redirect_stderr(io.StringIO()) as output:
        assert train(experiment, str(folder / "run")) == 0
    done = run(exporting(folder / "run", folder / "exported"))
    assert done.returncode == 0, done.stderr
    return output.getvalue()


def small(name: str, folder, **sizes):
    experiment = read_config_file(f"{name}:tiny")
    experiment.model.d_model, experiment.model.d_ff, experiment.model.num_heads = 64, 128, 1
    experiment.tokenizer.vocab_size, experiment.data.sequence_length = sizes["vocab_size"], 32
    experiment.data.cache_dir, experiment.data.prepare_workers = str(folder / "cache"), 1
    experiment.train.steps, experiment.train.log_every = sizes["steps"], 20
    experiment.schedule.warmup_steps = 10
    experiment.evaluate.every = experiment.checkpoint.every = sizes["steps"]
    return experiment


def write_documents(folder, count: int) -> None:
    """Writes documents in which one of two words follows each word, so that the context predicts a token."""
    folder.mkdir()
    for number in range(count):
        numbers = [int(RNG.integers(60))]
        for _ in range(int(RNG.integers(10, 40))):
            numbers.append((3 * numbers[-1] + int(RNG.integers(2))) % 60)
        sentences = [" ".join(WORDS[i] for i in numbers[k : k + 5]) for k in range(0, len(numbers), 5)]
        (folder / f"{number:03d}.txt").write_text(" ".join(f"{x.capitalize()}." for x in sentences))


# --- masked language model -------------------------------------------------------------------------------------------


class Masked:
    """A small BERT, its output, and the logits and states of transformers for the rows of the last validation."""

    def __init__(self, folder):
        import torch
        import transformers

        write_documents(folder / "train", 600)
        write_documents(folder / "valid", 60)
        experiment = small("bert_base", folder, vocab_size=150, steps=200)
        experiment.objective, experiment.model.pair_head = experiment.objective.masking, False
        experiment.data.source = TextFiles(path=str(folder / "train"), valid_path=str(folder / "valid"))
        experiment.evaluate.batches = 4
        self.output = trained(experiment, folder)
        model = transformers.AutoModelForMaskedLM.from_pretrained(str(folder / "exported")).eval()
        self.batches, self.logits, self.states = [], [], []
        with open_run(experiment) as opened, torch.no_grad():
            self.vocabulary = opened.prepared.tokenizer.vocabulary
            (corpus,), (train_corpus,) = opened.prepared.valid, opened.prepared.train
            lengths = np.diff(np.concatenate([[0], np.array(corpus.document_ends)]))
            self.document_of_token = np.repeat(np.arange(len(lengths)), lengths)
            self.counts = np.array(train_corpus.token_counts)
            self.raw = opened.validation.valid_batches.lengths.raw
            for batch in opened.validation.batches():
                ids, real = (torch.tensor(batch[name]).long() for name in ("tokens", "segment_ids"))
                found = model(input_ids=ids, attention_mask=(real > 0).long(), output_hidden_states=True)
                self.batches.append(batch)
                self.logits.append(found.logits.double().numpy())
                self.states.append(found.hidden_states[-1].double().numpy())

    def predictions(self):
        """Yields (kind, nats, whether the prediction is correct, target, document) of each target."""
        number = 0
        for batch, logits in zip(self.batches, self.logits, strict=True):
            for row, positions in enumerate(batch["masked_positions"]):
                for slot in np.flatnonzero(batch["loss_weights"][row]):
                    position, target = positions[slot], batch["targets"][row, slot]
                    seen, own = batch["tokens"][row, position], logits[row, position]
                    kind = "[MASK]" if seen == self.vocabulary.mask else "unchanged" if seen == target else "random"
                    document = self.document_of_token[number * self.raw + position - 1]  # after [CLS]
                    nats = special.logsumexp(own) - own[target]
                    yield kind, nats, own.argmax() == target, target, document
                number += 1


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    return Masked(tmp_path_factory.mktemp("masked"))


def jackknife(values, documents) -> tuple[float, float]:
    """Returns the mean and its standard error, from the means without each document."""
    values, documents = np.array(values), np.array(documents)
    ids = np.unique(documents)
    without = np.array([values[documents != i].mean() for i in ids])
    return values.mean(), math.sqrt((len(ids) - 1) / len(ids) * np.square(without - values.mean()).sum())


# The tables print four decimals; the logits of both models are float32.
PRECISION = 2e-4


def test_the_validation_loss_and_accuracy(masked):
    rows = list(masked.predictions())
    assert printed(masked.output, "validation loss", 1) == pytest.approx([np.mean([r[1] for r in rows])], abs=PRECISION)
    assert printed(masked.output, "token accuracy", 1) == pytest.approx([np.mean([r[2] for r in rows])], abs=PRECISION)


@pytest.mark.parametrize("kind, label", [("[MASK]", "masked loss"), ("unchanged", "unchanged loss")])
def test_the_loss_of_a_kind_of_position_and_its_error_over_documents(masked, kind, label):
    rows = [row for row in masked.predictions() if row[0] == kind]
    value, error = jackknife([row[1] for row in rows], [row[4] for row in rows])
    assert printed(masked.output, label, 2) == pytest.approx([value, error], abs=PRECISION)


def test_the_baseline_and_the_gain_at_masked_positions(masked):
    rows = [row for row in masked.predictions() if row[0] == "[MASK]"]
    special_ids = list(masked.vocabulary.special_ids - {masked.vocabulary.unk})
    counts = masked.counts.astype(float)
    counts[special_ids] = 0
    possible = len(counts) - len(special_ids)
    nats = [-math.log((counts[row[3]] + 1 / possible) / (counts.sum() + 1)) for row in rows]
    gain, error = jackknife([b - row[1] for b, row in zip(nats, rows, strict=True)], [row[4] for row in rows])
    found = printed(masked.output, "masked loss", 5)
    # The baseline also predicts that the target is text, with a probability that it learns from training batches.
    assert found[2:] == pytest.approx([np.mean(nats), gain, error], abs=5e-3)


def test_the_spread_of_the_hidden_states(masked):
    spreads = []
    for batch, states in zip(masked.batches, masked.states, strict=True):
        for row, own in zip(batch["segment_ids"], states, strict=True):
            unit = own[row > 0] / np.linalg.norm(own[row > 0], axis=1, keepdims=True)
            cosines = unit @ unit.T
            spreads.append(1 - cosines[~np.eye(len(unit), dtype=bool)].mean())
    assert printed(masked.output, "hidden spread", 1) == pytest.approx([np.mean(spreads)], abs=PRECISION)


# --- classification ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classified(tmp_path_factory):
    """Trains a small BERT that classifies by words; returns its output, the records, and the logits of transformers."""
    import torch
    import transformers

    folder, records = tmp_path_factory.mktemp("classified"), {}
    for split, count in (("train", 300), ("valid", 200)):
        rows = []
        for number in range(count):
            words = RNG.choice(WORDS, int(RNG.integers(4, 12)))
            label = "yes" if RNG.random() < 0.2 + 0.6 * (words < "n").mean() else "no"
            rows.append({"text": f"{number} {' '.join(words)}", "label": label})
        records[split] = rows
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    experiment = small("bert_base", folder, vocab_size=100, steps=60)
    experiment.model.masked_lm_head, experiment.model.pair_head = False, False
    experiment.model.head, experiment.objective = Classify(), Classification(labels=("no", "yes"))
    experiment.data.packing, experiment.evaluate.batches = OneEach(), 0
    experiment.data.source = JsonLines(path=str(folder / "train.jsonl"), valid_path=str(folder / "valid.jsonl"))
    experiment.objective.complete(experiment)
    output = trained(experiment, folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(str(folder / "exported")).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder / "exported"))
    with torch.no_grad():
        encoded = tokenizer(
            [row["text"] for row in records["valid"]], padding=True, truncation=True, return_tensors="pt"
        )
        logits = model(**encoded).logits.double().numpy()
    return folder, output, records, logits


def test_the_metrics_of_a_classifier_and_of_label_frequencies(classified):
    _, output, records, logits = classified
    truth = np.array([int(row["label"] == "yes") for row in records["valid"]])
    share = np.mean([row["label"] == "yes" for row in records["train"]])
    constant = np.full(len(truth), int(share > 0.5))
    nats = special.logsumexp(logits, axis=1) - logits[np.arange(len(truth)), truth]
    prior = -np.log([1 - share, share])[truth]
    table = output.partition("baselines, from ")[2]
    assert printed(table, "validation loss", 2) == pytest.approx([nats.mean(), prior.mean()], abs=PRECISION)
    for label, metric in (("accuracy", metrics.accuracy_score), ("macro f1", macro_f1)):
        expected = metric(truth, logits.argmax(1)), metric(truth, constant)
        assert printed(table, label, 2) == pytest.approx(expected, abs=PRECISION), label


def macro_f1(truth, said) -> float:
    return metrics.f1_score(truth, said, average="macro", zero_division=0.0)


def test_evaluate_prints_the_interval_of_the_loss_over_records(classified):
    folder, _, records, logits = classified
    done = run([sys.executable, "-m", "pretrainax.evaluate", f"--from={folder / 'run'}"])
    assert done.returncode == 0, done.stderr
    truth = [int(row["label"] == "yes") for row in records["valid"]]
    nats = special.logsumexp(logits, axis=1) - logits[np.arange(len(truth)), truth]
    expected = stats.t.interval(0.95, len(nats) - 1, nats.mean(), stats.sem(nats))
    assert printed(done.stdout, "loss", 3) == pytest.approx([nats.mean(), *expected], abs=PRECISION)
