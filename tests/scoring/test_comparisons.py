"""Compares paired differences with SciPy's paired tests on the same documents or examples."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from scipy import stats

from pretrainax.config import UserError
from pretrainax.data.sources import JsonLines
from pretrainax.scoring.comparisons import paired_differences
from pretrainax.scoring.corpus_scores import score_source
from pretrainax.scoring.results import Result, with_verdicts
from pretrainax.scoring.tasks.run import load_tasks, run_tasks
from tests.support.loaded import loaded_case


def untrained(loaded):
    return dataclasses.replace(loaded, params=jax.tree.map(np.zeros_like, loaded.params), origin="zeros")


def scored(loaded, source) -> tuple[list[Result], list[dict]]:
    transcripts: list[dict] = []
    return score_source(loaded, source, "all", record=transcripts.append), transcripts


def source(path, *texts) -> JsonLines:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return JsonLines(path=str(path))


def test_a_difference_of_texts_is_paired_by_document(tmp_path):
    """The documents have equal lengths, so the ratio is a mean, and SciPy's paired t test has the same interval."""
    texts = source(tmp_path / "x.jsonl", *(f"the {word} sat down" for word in ("cat", "dog", "ant", "bee", "cow")))
    model = loaded_case("gpt2")
    (results, one), (other_results, other) = (scored(of, texts) for of in (model, untrained(model)))
    (found,) = paired_differences(one, other, results, other_results, "zeros")
    bits = [[line["nats"] / line["bytes"] / np.log(2) for line in lines] for lines in (one, other)]
    expected = stats.ttest_rel(*bits)
    assert (found.measure, found.part) == ("bits_per_byte_difference", "difference from zeros")
    assert found.value == pytest.approx(np.mean(np.subtract(*bits)))
    assert found.interval == pytest.approx(tuple(expected.confidence_interval()))
    (verdict,) = with_verdicts([found])
    assert verdict.note == ("distinguishable" if expected.pvalue < 0.05 else "not distinguishable")


def test_a_difference_of_one_document_is_paired_by_its_pieces(tmp_path):
    model, texts = loaded_case("gpt2"), source(tmp_path / "x.jsonl", "up and down the sea " * 20)
    (results, one), (other_results, other) = (scored(of, texts) for of in (model, untrained(model)))
    (found,) = paired_differences(one, other, results, other_results, "zeros")
    assert found.clusters == "blocks within documents" and found.interval is not None


def test_a_model_does_not_differ_from_itself(tmp_path):
    results, lines = scored(loaded_case("gpt2"), source(tmp_path / "x.jsonl", "it went", "up", "a cat"))
    (found,) = with_verdicts(paired_differences(lines, lines, results, results, "itself"))
    assert found.value == 0 and found.note == "not distinguishable"


def test_models_that_are_scored_in_other_ways_are_refused(tmp_path):
    texts = source(tmp_path / "x.jsonl", "it went", "up", "a cat")
    (results, one), (other_results, other) = (scored(loaded_case(name), texts) for name in ("gpt2", "bert_masked_lm"))
    with pytest.raises(UserError, match="scored in another way; --bytes-of-spans compares all models"):
        paired_differences(one, other, results, other_results, "bert")


def test_a_difference_of_tasks_is_paired_by_example(tmp_path):
    words = ("ab", "ac", "b", "cd", "de", "f", "gh")
    records = [{"sentence_good": f"a {x} is", "sentence_bad": f"an {x} are", "UID": x[:1]} for x in words]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tasks, model = load_tasks([f"blimp:{tmp_path}/x.jsonl"]), loaded_case("gpt2")
    lines: list[list[dict]] = [[], []]
    results, _ = (
        next(run_tasks(of, tasks, record=x.append)) for of, x in zip((model, untrained(model)), lines, strict=True)
    )
    found = paired_differences(*lines, results, results, "zeros")
    hits = [[line["correct"] for line in of] for of in lines]
    assert found[0].value == pytest.approx(np.mean(hits[0]) - np.mean(hits[1])) and found[0].counts == {"examples": 7}
    first, second = (sum(a and not b for a, b in zip(*pair, strict=True)) for pair in (hits, hits[::-1]))
    error = np.sqrt(first + second + 1 - (first - second) ** 2 / 9) / 9  # of 7 examples and 2 pseudo-observations
    assert found[0].interval == pytest.approx(stats.norm.interval(0.95, (first - second) / 9, error), abs=1e-6)
    assert len(found) == len(results)
