"""Tests that preparation preserves the text, the note and the number of each record."""

import collections
import json

import numpy as np
import pytest

from pretrainax.config import DataConfig, Experiment, ModelConfig, UserError, to_json
from pretrainax.data.corpus import Corpus
from pretrainax.data.files import digest
from pretrainax.data.objectives import CausalLM
from pretrainax.data.preparation import duplicates, shards
from pretrainax.data.preparation.cache import FORMAT
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.preparation.tokenizer import prepare_tokenizer, sample_split
from pretrainax.data.sources import JsonLines
from pretrainax.data.sources.base import Record
from pretrainax.tasks import Classification
from pretrainax.tokenization import Characters

TOKENIZER = Characters().build(iter(["abcdefghijklmnopqrstuvwxyz"]))
SIZE = TOKENIZER.vocabulary.size


class Halves(Classification):
    """Makes two documents of each record."""

    def encode(self, record, tokenizer):
        (encoded,) = super().encode(record, tokenizer)
        for half in range(2):
            yield shards.Encoded([ids[half::2] for ids in encoded.parts], {**record.note, "half": half})


RECORDS = [
    [Record(("abc", "de"), {"label": 0}), Record(("", "f"), {"label": 1, "why": "größe"})],
    [Record(("", " "), {"label": 1})],
    [Record(("abc", "de"), {"label": 1}), Record(("abc", "de"), {"label": 0}), Record(("zz", ""), {"label": 0})],
]


def write(directory, task, drop=False):
    whole = directory / "whole" if drop else directory
    whole.mkdir(exist_ok=True)
    for i, records in enumerate(RECORDS):
        skipped = collections.Counter()
        with shards.ShardWriter(str(whole), i, TOKENIZER, "records", task) as writer:
            written = writer.write(iter(records), skipped)
            collections.deque(duplicates.write_hashes(written, str(whole), i) if drop else written, maxlen=0)
    if drop:
        for i, numbers in enumerate(duplicates.find_duplicates(str(whole), 3)):
            duplicates.copy_shard_without(
                str(whole), str(directory), i, {"duplicates": numbers}, shards.token_dtype(SIZE)
            )
    shards.write_index(str(directory), 3, SIZE, "fingerprint", "records")
    return Corpus(str(directory))


def documents(corpus):
    """Returns the text parts of each document, and its note."""
    found = []
    for i in range(corpus.num_documents):
        note = corpus.note(i)
        ends = note.pop("parts")
        found.append((tuple(map(TOKENIZER.decode, np.split(corpus.document(i), ends[:-1]))), note))
    return found


TASK = Classification(labels=("a", "b"))
WHOLE = [(r.texts, r.note) for records in RECORDS for r in records if any(t.strip() for t in r.texts)]


def test_each_record_is_there_with_its_note(tmp_path):
    corpus = write(tmp_path, TASK)
    assert documents(corpus) == WHOLE
    assert corpus.parts == "records" and corpus.skipped == {"empty documents": 1}
    assert corpus.num_bytes == sum(len(text) for texts, _ in WHOLE for text in texts)


def test_records_with_another_label_are_no_duplicates(tmp_path):
    corpus = write(tmp_path, TASK, drop=True)
    repeated = [WHOLE[0], WHOLE[1], WHOLE[2], WHOLE[4]]
    assert documents(corpus) == repeated and corpus.skipped["duplicates"] == 1


def test_a_record_may_become_several_documents(tmp_path):
    corpus = write(tmp_path, Halves(labels=("a", "b")))
    found = documents(corpus)
    assert found[:2] == [(("ac", "d"), {"label": 0, "half": 0}), (("b", "e"), {"label": 0, "half": 1})]
    assert found[2] == (("", "f"), {"label": 1, "why": "größe", "half": 0})  # The other half is empty.
    assert (corpus.num_records, corpus.num_documents) == (len(WHOLE), len(found)) and len(found) > len(WHOLE)
    assert corpus.num_bytes == sum(len(text.encode()) for texts, _ in WHOLE for text in texts)


@pytest.mark.parametrize("name", [shards.NOTES, shards.NOTE_ENDS])
def test_notes_have_checksums(name, tmp_path):
    corpus = write(tmp_path, TASK)
    content = bytearray((tmp_path / name).read_bytes())
    content[3] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} is damaged"):
        corpus.check(name)


def test_a_damaged_shard_is_made_anew(tmp_path):
    write(tmp_path, TASK)
    assert shards.missing_shards(str(tmp_path), 3, SIZE) == []
    totals = json.loads((tmp_path / "00000.json").read_text())
    arrays = shards.read_arrays(str(tmp_path / "00000"), totals)
    np.savez(tmp_path / "00000.npz", **arrays | {"notes": arrays["notes"][::-1]})
    assert shards.missing_shards(str(tmp_path), 3, SIZE) == [0]


# --- the tokenizer of a task


def experiment(tmp_path, objective, **fields):
    """Writes records with a word of the letters a to e in `x` and of v to z in `y`; returns their config."""
    words = [("".join(chr(ord("a") + (i * k) % 5) for k in range(1, 6)), "vwxyz"[i % 5 :] + "vwxyz") for i in range(40)]
    lines = [json.dumps({"x": x, "y": y, "label": "ab"[i % 2]}) + "\n" for i, (x, y) in enumerate(words)]
    (tmp_path / "records.jsonl").write_text("".join(lines))
    source = JsonLines(str(tmp_path / "records.jsonl"), valid_fraction=0.3, **fields)
    data = DataConfig(source, sequence_length=16, cache_dir=str(tmp_path / "cache"), prepare_workers=1)
    return Experiment(ModelConfig(vocab_size=512), Characters(), data, objective, optimizer=None, schedule=None)


def reading(field):
    return Classification(text_field=field, labels=("a", "b"))


def test_each_field_has_its_own_tokenizer(tmp_path):
    for field, letters in (("x", "abcde"), ("y", "vwxyz"), ("x", "abcde")):
        tokenizer = prepare(experiment(tmp_path, reading(field)), report=lambda _: None).tokenizer
        assert set(tokenizer.decode(np.arange(tokenizer.vocabulary.size))) >= set(letters)
        assert tokenizer.vocabulary.unk not in tokenizer.encode(letters)


def test_the_tokenizer_of_a_task_is_that_of_its_run(tmp_path):
    made, reports = experiment(tmp_path, reading("y")), []
    first = prepare_tokenizer(made, report=reports.append)
    assert first.fingerprint == prepare(made, report=reports.append).tokenizer.fingerprint
    assert reports.count("training the tokenizer") == 1


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_sample_for_a_task_has_the_text_that_it_reads(split, tmp_path):
    assert set("".join(sample_split(experiment(tmp_path, reading("y")), split, 10_000))) == set("vwxyz")


def test_tokenizers_of_documents_keep_their_folder(tmp_path):
    made = experiment(tmp_path, CausalLM(), text_field="x")
    prepare_tokenizer(made, report=lambda _: None)
    key = digest([made.data.source.fingerprint()], [1.0], to_json(made.tokenizer), FORMAT)  # as in version 0.6
    assert [path.name for path in (tmp_path / "cache" / "tokenizers").iterdir() if path.is_dir()] == [key]
