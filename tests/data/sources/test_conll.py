"""Tests reading CoNLL files: columns, sentences, skipped lines, and errors in a line."""

import collections
import gzip

import pytest

from pretrainax.config import UserError
from pretrainax.data import files
from pretrainax.data.line_ends import MARKS
from pretrainax.data.sources import ConllFiles
from pretrainax.tasks import TokenClassification
from pretrainax.tasks.token_classification import REPAIRED
from tests.support.reading import texts

NAMES = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O

Peter NNP B-NP B-PER
Blackburn NNP I-NP I-PER
"""
TREES = """# sent_id = 1
# text = don't go
1-2\tdon't\t_\t_\t_
1\tdo\tdo\tAUX\t_
2\tn't\tnot\tPART\t_
2.1\tgone\tgo\tVERB\t_
3\tNew York\tgo\tVERB\t_

# text = go
1\tgo\tgo\tVERB\t_
"""
ENTITIES = TokenClassification(labels=("O", "B-ORG", "I-ORG", "B-PER", "I-PER"))


def source(tmp_path, content, name="train.conll", **fields):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return ConllFiles(path=str(path), valid_path=str(path), **fields)


def records(found, task=ENTITIES, skipped=None):
    read = texts(found.reading(task), "train", skipped)
    return [(record.note["words"], [task.labels[i] for i in record.note["tags"]]) for record in read]


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("line", ["\n", "\r\n"])
def test_sentences_are_parted_by_blank_lines(tmp_path, ending, line):
    content = NAMES.replace("\n", line).encode()
    found = source(tmp_path, gzip.compress(content) if ending else content, f"train.conll{ending}")
    assert records(found) == [(["EU", "rejects"], ["B-ORG", "O"]), (["Peter", "Blackburn"], ["B-PER", "I-PER"])]
    assert texts(found, "train") == ["EU rejects", "Peter Blackburn"]


def test_a_column_is_taken_by_its_number(tmp_path):
    found = source(tmp_path, NAMES, tag_column=1)
    task = TokenClassification(labels=("NNP", "VBZ"))
    assert records(found, task) == [(["EU", "rejects"], ["NNP", "VBZ"]), (["Peter", "Blackburn"], ["NNP", "NNP"])]


@pytest.mark.parametrize("space", "\u00a0\u2009\u3000\u0085\u2028")
def test_a_word_may_contain_spaces_outside_of_ascii(space, tmp_path):
    found = source(tmp_path, f"10{space}000\tO\nEU \x0b\x0c B-ORG \r\n")
    assert records(found) == [([f"10{space}000", "EU"], ["O", "B-ORG"])]
    assert texts(found, "train") == [f"10{space}000 EU"]


def test_trees_have_comments_ranges_and_words_with_spaces(tmp_path):
    found = source(tmp_path, TREES, conllu=True, separator="tab", word_column=1, tag_column=3)
    task = TokenClassification(labels=("AUX", "PART", "VERB"))
    assert records(found, task) == [(["do", "n't", "New York"], ["AUX", "PART", "VERB"]), (["go"], ["VERB"])]


def test_a_byte_order_mark_is_taken_off_and_counted(tmp_path):
    skipped = collections.Counter()
    found = source(tmp_path, b"\xef\xbb\xbfEU B-ORG\n")
    assert records(found, skipped=skipped) == [(["EU"], ["B-ORG"])] and skipped == {MARKS: 1}


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_another_encoding_is_a_field(tmp_path, encoding):  # the German file of CoNLL-2003 is Latin-1
    found = source(tmp_path, "Köln B-ORG\r\n\r\nPeter B-PER\r\n".encode(encoding), encoding=encoding)
    assert records(found) == [(["Köln"], ["B-ORG"]), (["Peter"], ["B-PER"])]


def test_a_wrong_encoding_names_the_field(tmp_path):
    latin = "Köln B-ORG\n".encode("latin-1")
    with pytest.raises(UserError, match=r"train.conll:1: 'utf-8' codec.*data.source.encoding is 'utf-8': set it to"):
        records(source(tmp_path, latin))
    with pytest.raises(UserError, match=r"begins with the byte-order mark of UTF-16; config.data.source.encoding is"):
        records(source(tmp_path, "Köln B-ORG\n".encode("utf-16")))


def test_a_folder_is_all_of_its_files_and_a_share_is_held_out(tmp_path):
    for i in range(3):
        sentences = "".join(f"w{i}x{j} O\nx O\n\n" for j in range(30))
        (tmp_path / f"{i}.conll").write_text(sentences)
    (tmp_path / "README.md").write_text("no sentence")
    found = ConllFiles(path=str(tmp_path), valid_fraction=0.2).reading(ENTITIES)
    train, valid = texts(found, "train"), texts(found, "valid")
    assert len(train) + len(valid) == 90 and 5 < len(valid) < 35  # 18 expected, standard deviation 3.8
    assert not {x.texts for x in train} & {x.texts for x in valid}


@pytest.mark.parametrize(
    "content, said",
    [
        ("EU B-ORG\n\nPeter\n", r"train.conll:3: line 3 has 1 column, config.data.source.word_column is 0"),
        ("EU B-ORG\n\nPeter B-PRE\n", r"train.conll:3: line 3, word 1, 'Peter': .*'B-PRE', did you mean 'B-PER'"),
        ("EU O\n\n\nat O\nPeter I-PER\n", r"train.conll:4: line 5, word 2, 'Peter', has the tag 'I-PER' after 'O'"),
        (b"EU O\n\n\xff\xfe O\n", r"train.conll:3: .*codec can't decode byte"),
    ],
)
def test_a_broken_sentence_is_named_by_its_line_or_counted(tmp_path, content, said):
    found = source(tmp_path, content)
    with pytest.raises(UserError, match=f"{said}.*on_error='skip'"):
        records(found)
    found.on_error, skipped = "skip", collections.Counter()
    assert len(records(found, skipped=skipped)) == 1 and skipped == {"broken sentences": 1}


def test_what_is_repaired_is_counted(tmp_path):
    skipped = collections.Counter()
    task = TokenClassification(labels=ENTITIES.labels, repair=True)
    found = source(tmp_path, "EU I-ORG\nPeter I-PER\nBlackburn I-PER\n")
    assert records(found, task, skipped) == [(["EU", "Peter", "Blackburn"], ["B-ORG", "B-PER", "I-PER"])]
    assert skipped == {REPAIRED: 2}


def test_other_columns_are_another_text(tmp_path):
    found = source(tmp_path, NAMES)
    before = found.fingerprint()
    found.tag_column = 1
    assert found.fingerprint() != before


def test_the_corpora_of_versions_that_split_at_other_spaces_are_not_reused(tmp_path):
    for separator, is_equal in (("whitespace", False), ("tab", True)):
        found = source(tmp_path, NAMES, separator=separator)
        assert (found.fingerprint() == files.fingerprint(found, files.settings_of(found), found.endings)) == is_equal
