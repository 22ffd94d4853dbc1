"""Recomputes each metric and its interval from the file of transcripts alone, with NumPy, SciPy and scikit-learn."""

import collections
import dataclasses
import json
import math

import numpy as np
import pytest
from scipy import stats

import pretrainax
from pretrainax.data.sources import JsonLines, SourceMixture
from pretrainax.scoring.corpus_scores import score_source
from pretrainax.scoring.record_scores import score_records
from pretrainax.scoring.results import Result
from pretrainax.scoring.span_choice import SpanChoice
from pretrainax.scoring.spans import score_spans
from pretrainax.scoring.tasks.run import load_tasks, run_tasks
from pretrainax.scoring.transcripts import write_transcripts
from pretrainax.tasks import Classification
from tests.support import chain
from tests.support.classifiers import with_head
from tests.support.huggingface_weights import write_directory
from tests.support.loaded import loaded_case

LINES = ["the cat sat on the mat.", "it went", "a mat, a cat, and no more than that, but all of it.", "up and down it"]


def reread(path, transcripts) -> list[dict]:
    """Writes transcripts, and returns the lines of the file."""
    message = write_transcripts(str(path), transcripts)
    assert message == f"{len(transcripts)} transcripts in {path}"
    return [json.loads(line) for line in path.read_text().splitlines()]


def jackknife_interval(sums, counts) -> tuple[float, tuple[float, float]]:
    """Returns a ratio and its jackknife interval, which omits one document at a time."""
    sums, counts = np.array(sums), np.array(counts)
    n, value = len(sums), sums.sum() / counts.sum()
    without = [np.delete(sums, i).sum() / np.delete(counts, i).sum() for i in range(n)]
    error = math.sqrt((n - 1) / n * np.square(np.subtract(without, value)).sum())
    # Satterthwaite: the variance is a quadratic form x' A x of independent x with variances `counts`.
    rows = np.eye(n) - np.outer(counts / counts.sum(), np.ones(n))
    form = rows.T @ np.diag(1 / np.square(1 - counts / counts.sum())) @ rows @ np.diag(counts)
    degrees = np.trace(form) ** 2 / np.trace(form @ form)
    return value, stats.t.interval(0.95, degrees, value, error)


def source(path, lines) -> JsonLines:
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return JsonLines(path=str(path))


def test_scores_of_texts_follow_from_the_sums_of_their_documents(tmp_path):
    mixture = SourceMixture(sources=(source(tmp_path / "a.jsonl", LINES), source(tmp_path / "b.jsonl", LINES[::-1])))
    lines: list[dict] = []
    results = score_source(loaded_case("gpt2"), mixture, "all", record=lines.append)
    lines = reread(tmp_path / "out.jsonl", lines)
    for result in results:
        rows = [line for line in lines if result.part in ("", line["part"])]
        unit = "bytes" if result.measure == "bits_per_byte" else "tokens"
        value, interval = jackknife_interval([row["nats"] for row in rows], [row[unit] for row in rows])
        change = np.exp if result.measure == "perplexity" else lambda x: x / np.log(2)
        assert result.value == pytest.approx(change(value))
        assert result.interval == pytest.approx(tuple(change(np.array(interval))))
    assert len(results) == 9


def test_the_interval_of_one_document_follows_from_its_pieces(tmp_path):
    lines: list[dict] = []
    one = source(tmp_path / "a.jsonl", [" ".join(LINES * 9)])
    result = score_source(loaded_case("gpt2"), one, "all", record=lines.append)[1]
    (line,) = reread(tmp_path / "out.jsonl", lines)
    nats, tokens = (np.array(line["pieces"][name]) for name in ("nats", "tokens"))
    assert nats.sum() == pytest.approx(line["nats"]) and set(tokens[:-1]) <= set(range(1, 17))
    middles = (tokens.cumsum() - tokens / 2) / tokens.sum()
    block = np.floor(middles * 20).astype(int)
    sums = [[values[block == b].sum() for b in sorted(set(block))] for values in (nats, tokens)]
    value, interval = jackknife_interval(*sums)
    assert result.interval == pytest.approx(tuple(np.array(interval) / np.log(2)))
    assert result.clusters == "blocks within documents"


def wilson(hits) -> tuple[float, float]:
    return tuple(stats.binomtest(sum(hits), len(hits)).proportion_ci(method="wilson"))


def recomputed(lines: list[dict]) -> dict[tuple[str, str], list[bool]]:
    """Decides if each example is correct, by metric and part, from the scores and outputs of the model."""
    hits = collections.defaultdict(list)
    for line in lines:
        match line["kind"]:
            case "minimal_pairs":
                good, bad = line["log_likelihoods"]
                hits["accuracy", ""].append(good > bad)
                hits["accuracy", line["group"]].append(good > bad)
            case "multiple_choice":
                given, alone = np.array(line["log_likelihoods"]), np.array(line["unconditional"])
                sizes = [len(choice.encode()) for choice in line["choices"]]
                measures = {
                    "accuracy": given,
                    "accuracy_per_byte": given / sizes,
                    "accuracy_unconditional": given - alone,
                }
                for measure, scores in measures.items():
                    hits[measure, ""].append(int(np.argmax(scores)) == line["answer"])
            case "exact_match":
                hits["exact_match", ""].append(line["answer"] == line["target"])
                hits["answered", ""].append(line["answer"] is not None)
            case "cloze":
                hits["accuracy", ""].append(line["correct"])
    return hits


def test_metrics_of_tasks_follow_from_their_examples(tmp_path):
    words = [
        {"sentence_good": f"a {x} is", "sentence_bad": f"an {x} are", "UID": x[:1]} for x in ("ab", "ac", "b", "cd")
    ]
    choices = [{"prompt": p, "choices": ["sky", "a cave", "sea"], "answer": i % 3} for i, p in enumerate(("up", "wet"))]
    texts = [{"text": text} for text in ("we saw it", "up and down", "the sea is wide")]
    sums = [{"prompt": "a:", "answer": "x"}, {"prompt": "b:", "answer": "y"}, {"prompt": "c" * 30, "answer": "z"}]
    fields = {"multiple_choice": {"unconditional": "so"}, "exact_match": {"max_new_tokens": 4, "shots": 1}}
    kinds = {"minimal_pairs": words, "multiple_choice": choices, "cloze": texts, "exact_match": sums}
    for kind, records in kinds.items():
        (tmp_path / f"{kind}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        description = {"kind": kind, "examples": f"{kind}.jsonl"} | fields.get(kind, {})
        (tmp_path / f"{kind}.json").write_text(json.dumps(description))
    lines: list[dict] = []
    tasks = load_tasks([str(tmp_path / f"{kind}.json") for kind in kinds])
    results = [r for found in run_tasks(loaded_case("gpt2"), tasks, record=lines.append) for r in found]
    lines = reread(tmp_path / "out.jsonl", lines)
    assert [line["asked"] for line in lines] == [True] * 11 + [False]
    for kind in kinds:
        asked = [line for line in lines if line["kind"] == kind and line["asked"]]
        hits = recomputed(asked)
        shares = [r for r in results if r.source == kind and r.measure != "perplexity"]
        assert {(r.measure, r.part) for r in shares} == hits.keys()
        for result in shares:
            of = hits[result.measure, result.part]
            assert result.value == pytest.approx(np.mean(of)) and result.counts["examples"] == len(of)
            assert result.interval == pytest.approx(wilson(of), abs=1e-6)
    (perplexity,) = (r for r in results if r.measure == "perplexity")
    nats = [-line["log_likelihood"] for line in lines if line["kind"] == "cloze"]
    assert perplexity.value == pytest.approx(np.exp(np.mean(nats)))
    assert perplexity.interval == pytest.approx(
        tuple(np.exp(stats.t.interval(0.95, 2, np.mean(nats), stats.sem(nats))))
    )


def test_the_bits_of_spans_follow_from_their_costs(tmp_path):
    (scores,) = score_spans(
        chain.knowing("encoder"), chain.texts(5, 60), SpanChoice(share=0.2, mean_bytes=6, context=24)
    )
    lines = reread(tmp_path / "out.jsonl", [*scores.transcripts("a chain")])
    bits, sizes = collections.Counter(), collections.Counter()
    for line in lines:
        bits[line["document"]] += line["token_bits"] + line["length"] + line["unknown"]
        sizes[line["document"]] += len(line["text"].encode())
    value, interval = jackknife_interval([*bits.values()], [*sizes.values()])
    result = scores.results("a chain")[0]
    assert (result.value, result.interval) == (pytest.approx(value), pytest.approx(interval))


@pytest.mark.slow
def test_metrics_of_records_follow_from_the_outputs_of_the_head(tmp_path):
    from sklearn import metrics

    loaded = pretrainax.load(write_directory(tmp_path / "bert", with_head("bert")))
    task = Classification(text_field="text", label_field="label", labels=("a", "b", "c"))
    experiment = dataclasses.replace(loaded.experiment, objective=task)
    records = [{"text": f"{LINES[i % 4]} {i}", "label": "abc"[i % 3]} for i in range(30)]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    lines: list[dict] = []
    results: dict[str, Result] = {
        result.measure: result
        for result in score_records(
            loaded, experiment, JsonLines(path=str(path), valid_path=str(path)), record=lines.append
        )
    }
    lines = reread(tmp_path / "out.jsonl", lines)
    predicted = np.array([np.argmax(line["outputs"][0]) for line in lines])
    truth = np.array([line["notes"][0]["label"] for line in lines])
    assert results["accuracy"].value == pytest.approx(metrics.accuracy_score(truth, predicted))
    for name, function in {
        "f1": lambda a, b: metrics.f1_score(a, b, average="macro"),
        "matthews": metrics.matthews_corrcoef,
    }.items():
        kept = [np.arange(30) % 20 != group for group in range(20)]
        without = np.array([function(truth[rows], predicted[rows]) for rows in kept])
        error = np.sqrt(19 / 20 * np.square(without - without.mean()).sum())
        value = function(truth, predicted)
        assert results[name].value == pytest.approx(value)
        if error:
            assert results[name].interval == pytest.approx(stats.t.interval(0.95, 19, value, error))
