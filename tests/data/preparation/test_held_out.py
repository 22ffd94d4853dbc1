"""Tests that both splits have documents: if a source's rule leaves one empty, a document is held out and reported."""

import itertools
import json
import random

import pytest

from pretrainax.config import UserError
from pretrainax.data.files import fraction
from pretrainax.data.preparation.prepare import prepare, prepare_share
from pretrainax.data.sources import JsonLines, SourceMixture, TextFiles
from pretrainax.tokenization import ByteBPE
from tests.data.preparation.test_prepare import experiment
from tests.support.runs import files


def write(folder, documents, parts=1):
    """Writes the documents to `parts` JSON Lines files."""
    folder.mkdir(parents=True)
    for i in range(parts):
        lines = (json.dumps({"text": text}) + "\n" for text in documents[i::parts])
        (folder / f"{i}.jsonl").write_text("".join(lines))
    return folder


def texts(prepared):
    """Returns the documents of each split, without their separators."""
    decode = prepared.tokenizer.decode
    return [
        sorted(
            decode(corpus.document(i)).removesuffix("</s>") for corpus in corpora for i in range(corpus.num_documents)
        )
        for corpora in (prepared.train, prepared.valid)
    ]


def run(cache, source, said=None, **options):
    return prepare(experiment(cache, source, **options), report=(said if said is not None else []).append)


def one_sided(count):
    """Returns `count` documents, none of which valid_fraction 0.01 holds out."""
    tried = ([f"document {seed} {i}" for i in range(count)] for seed in itertools.count())
    return next(documents for documents in tried if min(map(_place, documents)) >= 0.01)


def _place(text):
    return fraction(text.encode())


@pytest.mark.parametrize("count", [2, 5, 201])
def test_few_documents_have_one_for_validation_and_it_is_said(tmp_path, count):
    documents, said = one_sided(count), []
    prepared = run(tmp_path, JsonLines(str(write(tmp_path / "lines", documents))), said)
    train, valid = texts(prepared)
    assert len(valid) == 1 and sorted(train + valid) == sorted(documents)
    assert said[-1].endswith(
        "leaves train or validation empty: the document with the smallest hash becomes the validation split"
    )


def test_split_that_leaves_nothing_to_train_on_is_made_anew_too(tmp_path):
    documents = one_sided(5)
    source = JsonLines(str(write(tmp_path / "lines", documents)), valid_fraction=0.999999)
    for tokenizer in (None, ByteBPE(vocab_size=258)):
        train, valid = texts(run(tmp_path, source, tokenizer=tokenizer))
        assert (len(train), len(valid)) == (4, 1)


def test_of_the_only_document_the_end_is_for_validation(tmp_path):
    text, said = " ".join(f"word{i}" for i in range(100)), []
    source = JsonLines(str(write(tmp_path / "lines", [text, text])))
    (train, again), (valid, _) = texts(run(tmp_path, source, said))
    assert train == again and train + valid == text and 0.05 < len(valid) / len(text) < 0.15
    assert said[-1].endswith(
        "leaves train or validation empty: the end of the only document becomes the validation split"
    )


def test_text_whose_end_is_blank_has_validation_text(tmp_path):
    (tmp_path / "a.txt").write_text("some words and a few more of them\n" * 3 + "\n" * 500)
    train, valid = texts(run(tmp_path, TextFiles(str(tmp_path / "a.txt"))))
    assert train[0].strip() and valid[0].strip()


def test_split_depends_on_the_documents_alone(tmp_path):
    """Checks that the held-out document is independent of the files, the order, the processes and the shares."""
    documents = one_sided(60)
    shuffled = random.Random(0).sample(documents, len(documents))
    one = texts(run(tmp_path / "1", JsonLines(str(write(tmp_path / "a", documents)))))
    seven = JsonLines(str(write(tmp_path / "b", shuffled, parts=7)))
    assert texts(run(tmp_path / "7", seven, workers=2)) == one
    for index in range(2):
        prepare_share(experiment(tmp_path / "shares", seven), index, 2, lambda line: None)
    run(tmp_path / "shares", seven)
    assert files(tmp_path / "shares" / "cache") == files(tmp_path / "7" / "cache")


def test_split_with_both_sides_stays_as_it_was(tmp_path):
    documents = [f"document {i}" for i in range(1000)]
    said = []
    prepared = run(tmp_path, JsonLines(str(write(tmp_path / "lines", documents))), said)
    assert prepared.valid[0].num_documents > 1
    assert texts(prepared)[1] == sorted(text for text in documents if _place(text) < 0.01)
    assert not [line for line in said if "side" in line] and not list((tmp_path / "cache").rglob("held_out.json"))


def test_found_again_in_the_cache(tmp_path):
    source = JsonLines(str(write(tmp_path / "lines", one_sided(5))))
    first = run(tmp_path, source)
    before = {f: f.stat().st_mtime_ns for f in (tmp_path / "cache").rglob("*")}
    again = run(tmp_path, source)
    assert texts(again) == texts(first) and again.valid[0].fingerprint == first.valid[0].fingerprint
    assert {f: f.stat().st_mtime_ns for f in (tmp_path / "cache").rglob("*")} == before


def test_each_source_of_a_mixture_has_both_sides(tmp_path):
    parts = [JsonLines(str(write(tmp_path / name, one_sided(count)))) for name, count in (("a", 3), ("b", 4))]
    prepared = run(tmp_path, SourceMixture(tuple(parts), weights=(1.0, 1.0)))
    assert [corpus.num_documents for corpus in (*prepared.train, *prepared.valid)] == [2, 3, 1, 1]


def test_validation_text_of_its_own_is_not_replaced(tmp_path):
    path = str(write(tmp_path / "lines", one_sided(5)))
    blank = str(write(tmp_path / "blank", [" "]))
    with pytest.raises(UserError, match="holds no document for valid; set config.data.source.valid_path"):
        run(tmp_path, JsonLines(path, valid_path=blank))


def test_a_single_pair_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "target": "two"}\n')
    with pytest.raises(UserError, match="holds no document for train"):
        run(tmp_path, JsonLines(str(path), target_field="target"))
