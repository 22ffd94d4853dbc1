"""Tests that any number of machines prepares the same files, byte for byte, also if documents are dropped."""

import json
import pathlib

import pytest

from pretrainax.config import DataConfig, Experiment, ModelConfig, UserError
from pretrainax.data.objectives import CausalLM
from pretrainax.data.preparation.prepare import prepare, prepare_share
from pretrainax.data.sources import JsonLines
from pretrainax.prepare import _parse_shard
from pretrainax.tokenization import ByteBPE

LINE = (
    "{} went out of the harbour of the old town with number {} and never came back to where the others were waiting\n"
)


@pytest.fixture
def lines(tmp_path):
    """Writes six files of ten documents.

    The five documents with an even number are the same in all files. Documents with the same odd number are nearly
    equal. The last document is blank.
    """
    folder = tmp_path / "lines"
    folder.mkdir()
    for i in range(6):
        documents = [LINE.format(i if j % 2 else "A ship", j) * 2 + f"the end of {i * (j % 2)} {j}" for j in range(9)]
        (folder / f"{i}.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in [*documents, " "]))
    return folder


def experiment(cache, lines, workers=1, **options):
    data = DataConfig(
        JsonLines(str(lines), valid_fraction=0.3), cache_dir=str(cache), prepare_workers=workers, **options
    )
    tokenizer = ByteBPE(vocab_size=270)
    return Experiment(ModelConfig(vocab_size=512), tokenizer, data, CausalLM(), optimizer=None, schedule=None)


def quietly(*_):
    pass


def contents(folder):
    files = [f for f in pathlib.Path(folder).rglob("*") if f.is_file() and f.suffix != ".lock"]
    return {str(f.relative_to(folder)): f.read_bytes() for f in files}


@pytest.mark.first(1)
@pytest.mark.parametrize("options", [{}, {"drop_duplicates": True}], ids=["all", "without duplicates"])
def test_shares_in_any_order_write_what_one_call_writes(tmp_path, lines, options):
    plain = prepare(experiment(tmp_path / "plain", lines, workers=2, **options), quietly)
    for index in (2, 0, 1):
        prepare_share(experiment(tmp_path / "shares", lines, **options), index, 3, quietly)
    assert not list((tmp_path / "shares").rglob("index.json"))
    prepare(experiment(tmp_path / "shares", lines, **options), quietly)
    assert contents(tmp_path / "plain") == contents(tmp_path / "shares")
    assert plain.train[0].num_documents > 20


def test_share_writes_its_own_shards_and_no_others(tmp_path, lines):
    said = prepare_share(experiment(tmp_path / "cache", lines), 1, 4, quietly)
    assert {f.stem for f in (tmp_path / "cache").rglob("*.tokens")} == {"00001", "00005"}
    assert said == "share 1 of 4 is done; after all shares, run the same command once without --shard"


def test_what_a_share_left_out_is_written_by_the_last_call(tmp_path, lines):
    prepare(experiment(tmp_path / "plain", lines), quietly)
    prepare_share(experiment(tmp_path / "shares", lines), 0, 2, quietly)
    before = {f: f.stat().st_mtime_ns for f in (tmp_path / "shares").rglob("*.tokens")}
    prepare(experiment(tmp_path / "shares", lines), quietly)
    assert before.items() <= {f: f.stat().st_mtime_ns for f in (tmp_path / "shares").rglob("*.tokens")}.items()
    assert contents(tmp_path / "plain") == contents(tmp_path / "shares")


def test_share_removes_only_what_its_own_shards_left(tmp_path, lines):
    prepare_share(experiment(tmp_path / "cache", lines), 0, 2, quietly)
    (directory,) = {f.parent for f in (tmp_path / "cache").rglob("train/00000.tokens")}
    for name in ("00001.tokens.tmp-a-1", "00003.tokens.tmp-b-1", "00004.json"):
        (directory / name).touch()
    (directory / "00003.json").unlink(missing_ok=True)
    prepare_share(experiment(tmp_path / "cache", lines), 1, 6, quietly)
    assert not (directory / "00001.tokens.tmp-a-1").exists() and (directory / "00003.tokens.tmp-b-1").exists()


def test_duplicates_are_dropped_and_counted(tmp_path, lines):
    every = prepare(experiment(tmp_path / "cache", lines), quietly)
    once = prepare(experiment(tmp_path / "cache", lines, drop_duplicates=True), quietly)
    dropped = sum(split[0].skipped.get("duplicates", 0) for split in (once.train, once.valid))
    # The five documents with an even number are the same in all six files, so each has five duplicates.
    assert dropped == 25
    for a, b in ((every.train[0], once.train[0]), (every.valid[0], once.valid[0])):
        assert b.num_documents + b.skipped.get("duplicates", 0) == a.num_documents
        texts = [tuple(a.document(i)) for i in range(a.num_documents)]
        assert [tuple(b.document(i)) for i in range(b.num_documents)] == list(dict.fromkeys(texts))
    assert f"skipped {dropped} duplicates; skipped 6 empty documents" in once.summary
    assert not list((tmp_path / "cache").rglob("whole"))


@pytest.mark.slow
def test_near_duplicates_and_bad_text_are_dropped_by_any_number_of_shares(tmp_path, lines):
    pytest.importorskip("datatrove", reason="datatrove is not installed: pip install 'pretrainax[filters]'")
    pytest.importorskip("spacy", reason="spacy is not installed: pip install 'pretrainax[filters]'")
    from pretrainax.data.preparation.filters import NearDuplicates, QualityFilter

    with open(lines / "3.jsonl", "a") as f:
        f.write('{"text": "no text"}\n')
    options = {"drop_duplicates": True, "near_duplicates": NearDuplicates(ngram=3)}
    options["quality"] = QualityFilter(gopher_repetition=False)
    plain = prepare(experiment(tmp_path / "plain", lines, workers=2, **options), quietly)
    for index in range(2):
        prepare_share(experiment(tmp_path / "shares", lines, **options), index, 2, quietly)
    prepare(experiment(tmp_path / "shares", lines, **options), quietly)
    assert contents(tmp_path / "plain") == contents(tmp_path / "shares")
    skipped = {k: n + plain.valid[0].skipped.get(k, 0) for k, n in plain.train[0].skipped.items()}
    assert skipped["duplicates"] == 25 and skipped["near-duplicates"] > 0
    assert skipped["documents by gopher_short_doc"] == 1 + 6  # 6 of them blank
    kept = plain.train[0].num_documents + plain.valid[0].num_documents
    assert kept + sum(skipped.values()) == 61


@pytest.mark.parametrize("text", ["3/3", "a/2", "1", "-1/2", "1/0", "/"])
def test_bad_share_is_an_error(text):
    with pytest.raises(UserError, match=r"it must be i/n with i from 0 to n - 1, such as 0/8"):
        _parse_shard(text)
