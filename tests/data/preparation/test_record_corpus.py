"""A corpus of records keeps each text, each note, and which record is which, through all that preparation does."""

import collections
import json

import numpy as np
import pytest

from pretrainax.config import UserError
from pretrainax.data.corpus import Corpus
from pretrainax.data.preparation import duplicates, shards
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
    """The texts of each document, and its note."""
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
    assert found[2] == (("", "f"), {"label": 1, "why": "größe", "half": 0})  # whose other half is empty
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
