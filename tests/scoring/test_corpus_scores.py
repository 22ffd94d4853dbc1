"""Tests the scores of a source: sums over documents, their standard errors, counts and skipped documents."""

import collections
import dataclasses
import gzip
import json
import math

import jax
import numpy as np
import pytest

from pretrainax.config import UserError
from pretrainax.data.sources import JsonLines, SourceMixture, TextFiles
from pretrainax.scoring.corpus_scores import documents_of, read_source, score_source
from pretrainax.scoring.likelihood import score
from pretrainax.scoring.scoring_examples import Scoring
from tests.support.loaded import loaded_case

LINES = ["the cat sat on the mat.", "it went", "   ", "a mat, a cat, and no more than that, but all of it.", "café"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Writes two sources of documents, LINES and another file, and a source of pairs."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "one.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    (folder / "two.jsonl").write_text("".join(json.dumps({"text": line[::-1]}) + "\n" for line in LINES[:2]))
    (folder / "pairs.jsonl").write_text("".join(json.dumps({"text": line, "to": "yes"}) + "\n" for line in LINES[:2]))
    return folder


def by_measure(results, part=""):
    return {result.measure: result for result in results if result.part == part}


def test_figures_are_sums_over_documents_divided_once(texts):
    loaded, source = loaded_case("gpt2"), JsonLines(path=str(texts / "one.jsonl"))
    found = by_measure(score_source(loaded, source, "all", scoring=Scoring(context=16)))
    scores = score(loaded, [line for line in LINES if line.strip()], context=16)
    nats = tokens = size = 0
    for one in scores:
        nats, tokens, size = nats + one.nats, tokens + one.tokens, size + one.bytes
    assert found["perplexity"].value == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert found["bits_per_token"].value == pytest.approx(nats / tokens / math.log(2), rel=1e-5)
    assert found["bits_per_byte"].value == pytest.approx(nats / size / math.log(2), rel=1e-5)
    counts = found["perplexity"].counts
    assert (counts["documents"], counts["tokens"], counts["bytes"]) == (4, tokens, size)
    assert counts["empty documents skipped"] == counts["unknown tokens"] == 1
    assert size == tokens + 1  # é has two bytes.
    assert found["perplexity"].how == "left to right, in windows of 16 tokens every 8"
    assert str(source) in found["perplexity"].source and "both splits" in found["perplexity"].source


def test_uniform_tokens_cost_what_their_entropy_is(texts):
    """A model with zero parameters predicts uniformly, so each token has exactly log2(V) bits."""
    loaded = loaded_case("gpt2")
    nothing = dataclasses.replace(loaded, params=jax.tree.map(np.zeros_like, loaded.params))
    found = by_measure(score_source(nothing, JsonLines(path=str(texts / "two.jsonl")), "all"))
    vocabulary = loaded.experiment.model.vocab_size
    assert found["perplexity"].value == pytest.approx(vocabulary, rel=1e-6)
    assert found["bits_per_byte"].value == pytest.approx(math.log2(vocabulary), rel=1e-6)
    assert found["bits_per_byte"].standard_error == pytest.approx(0, abs=1e-5)


def test_a_mixture_is_scored_by_part_and_as_a_whole(texts):
    loaded = loaded_case("gpt2")
    one, two = (JsonLines(path=str(texts / name)) for name in ("one.jsonl", "two.jsonl"))
    results = score_source(loaded, SourceMixture(sources=(one, two)), "all")
    alone = [by_measure(score_source(loaded, source, "all")) for source in (one, two)]
    parts = [by_measure(results, str(source)) for source in (one, two)]
    for part, expected in zip(parts, alone, strict=True):
        assert part.keys() == expected.keys()
        for measure, r in part.items():
            assert (r.value, r.standard_error) == pytest.approx(
                (expected[measure].value, expected[measure].standard_error)
            )
    whole = by_measure(results)["bits_per_token"]
    weights = [part["bits_per_token"].counts["tokens"] for part in parts]
    assert whole.value == pytest.approx(np.average([p["bits_per_token"].value for p in parts], weights=weights))
    assert whole.counts["documents"] == 6


@pytest.mark.slow
def test_what_is_no_perplexity_is_not_called_so(texts):
    source = JsonLines(path=str(texts / "one.jsonl"))
    encoder = score_source(loaded_case("bert_masked_lm"), source, "all")
    assert {r.measure for r in encoder} == {"pseudo_perplexity", "pseudo_bits_per_token", "pseudo_bits_per_byte"}
    assert "no perplexity" in encoder[0].how and encoder[0].counts["documents in pieces"] == 2
    both = score_source(loaded_case("t5_1_0"), source, "all", scoring=Scoring(context=60))
    assert {r.measure for r in both} == {"target_perplexity", "target_bits_per_token", "target_bits_per_byte"}


def test_pairs_are_scored_by_their_targets(texts):
    source = JsonLines(path=str(texts / "pairs.jsonl"), target_field="to")
    found = by_measure(score_source(loaded_case("t5_1_0"), source, "all"))["target_bits_per_byte"]
    pairs = score(loaded_case("t5_1_0"), [(line, "yes") for line in LINES[:2]])
    assert found.value == pytest.approx(sum(p.nats for p in pairs) / 6 / math.log(2), rel=1e-5)
    assert found.counts == {"documents": 2, "tokens": 8, "bytes": 6}


def test_a_limit_takes_the_first_documents_of_each_part(texts):
    one, two = (JsonLines(path=str(texts / name)) for name in ("one.jsonl", "two.jsonl"))
    results = score_source(loaded_case("gpt2"), SourceMixture(sources=(one, two)), "all", documents=1)
    assert [r.counts["documents"] for r in results if r.measure == "perplexity"] == [1, 1, 2]
    assert results[0].clusters == "blocks within documents" and "at most 1 document" in results[0].source


@pytest.mark.parametrize("name", ["book.txt", "book.txt.gz"])
def test_all_of_a_file_is_one_document(tmp_path, name):
    text = " ".join(LINES) * 5
    content = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    (tmp_path / name).write_bytes(content)
    (result, *_) = score_source(loaded_case("gpt2"), TextFiles(path=str(tmp_path / name)), "all")
    assert (result.counts["documents"], result.counts["bytes"]) == (1, len(text.encode()))


def test_all_of_a_folder_with_a_validation_file_is_both(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    files = TextFiles(path=str(tmp_path / "[ab].txt"), valid_path=str(tmp_path / "c.txt"))
    assert [*documents_of(files, "all", collections.Counter())] == ["a", "b", "c"]


def test_all_records_of_a_file_are_whole(texts):
    source, skipped = JsonLines(path=str(texts / "one.jsonl"), valid_fraction=0.5), collections.Counter()
    assert sorted(documents_of(source, "all", skipped)) == sorted(line for line in LINES if line.strip())
    assert skipped == {"empty documents": 1}


def test_a_source_without_text_is_one_line(texts, tmp_path):
    (tmp_path / "empty.jsonl").write_text('{"text": "  "}\n')
    with pytest.raises(UserError, match=r"holds no text to score \(both splits: 1 empty documents skipped\)"):
        score_source(loaded_case("gpt2"), JsonLines(path=str(tmp_path / "empty.jsonl")), "all")


@pytest.mark.parametrize(
    "given, said",
    [
        ("TextFile(path='x')", "unknown Source 'TextFile'"),
        ("TextFiles(path='no/such')", "--source.path is 'no/such', which does not exist"),
        ("SourceMixture(sources=(TextFiles(path='no/such'),))", "--source.sources[0].path is 'no/such'"),
        ("NoSource()", "is not chosen"),
        ("TextFiles(path=", "cannot read"),
    ],
)
def test_a_source_that_cannot_be_read_is_one_line(given, said):
    with pytest.raises(UserError) as error:
        read_source(given, loaded_case("gpt2").experiment)
    assert said in str(error.value)


def test_a_missing_field_is_one_of_the_value_of_the_flag(tmp_path):
    (tmp_path / "a.tsv").write_text("sentence\tlabel\nit rains\t1\n")
    loaded = loaded_case("gpt2")
    source = read_source(f"Tsv(path='{tmp_path}/a.tsv')", loaded.experiment)
    with pytest.raises(UserError, match=r"no field 'text', allowed: label, sentence \(set text_field in --source\);"):
        score_source(loaded, source, "all")


def test_a_path_alone_says_what_reads_it(texts):
    with pytest.raises(UserError, match="did you mean JsonLines"):
        read_source(str(texts), loaded_case("gpt2").experiment)
    assert isinstance(read_source(f"TextFiles(path='{texts}/*')", loaded_case("gpt2").experiment), TextFiles)
