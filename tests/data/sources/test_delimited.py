"""Tests reading delimited text files, as GLUE and spreadsheets write them, and the errors of broken files."""

import collections
import gzip

import pytest

from pretrainax.config import Choice, UserError, kinds
from pretrainax.config.validation import validate
from pretrainax.data.sources import Csv, JsonLines, Tsv
from pretrainax.data.sources.base import Record
from pretrainax.tasks import Classification, Regression
from pretrainax.tasks.glue import TASKS
from tests.support import tiny


def records(source, task, split="train", skipped=None):
    skipped = collections.Counter() if skipped is None else skipped
    source = source.reading(task)
    return [record for shard in source.shards(split) for record in source.read(shard, skipped)]


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


SENTENCE = Classification(text_field="sentence", labels=("negative", "positive"))


def test_quotes_of_a_tsv_are_letters(tmp_path):
    path = write(tmp_path / "train.tsv", 'sentence\tlabel\n"a fine film\t1\n\nsays "no"\t0\n')
    assert records(Tsv(path, valid_path=path), SENTENCE) == [
        Record(('"a fine film',), {"label": 1}),
        Record(('says "no"',), {"label": 0}),
    ]


def test_quotes_of_a_csv_hold_commas_quotes_and_line_ends(tmp_path):
    path = write(tmp_path / "a.csv", 'label,"sentence"\r\n1,"one, ""two""\r\nthree"\r\nnegative,plain\r\n')
    assert records(Csv(path, valid_path=path), SENTENCE) == [
        Record(('one, "two"\nthree',), {"label": 1}),
        Record(("plain",), {"label": 0}),
    ]


@pytest.mark.parametrize("content", ["\ufeffsentence;label\nÄ;1\n", "sentence;label\r\nÄ;1"], ids=["mark", "windows"])
def test_marks_and_line_ends_are_no_part_of_a_record(content, tmp_path):
    path = write(tmp_path / "a.csv", content)
    assert records(Csv(path, delimiter=";", valid_path=path), SENTENCE) == [Record(("Ä",), {"label": 1})]


def test_columns_are_named_where_no_line_does(tmp_path):
    path = write(tmp_path / "train.tsv", "gj04\t1\t\tIt is.\ngj04\t0\t*\tIs it it.\n")
    source = Tsv(path, valid_path=path, columns=("source", "label", "mark", "sentence"))
    assert [r.note["label"] for r in records(source, TASKS["cola"].task)] == [1, 0]


def test_a_folder_is_read_and_some_of_it_held_out(tmp_path):
    (tmp_path / "b").mkdir()
    rows = "".join(f"word{i}\t{i % 2}\n" for i in range(200))
    write(tmp_path / "a.tsv", "sentence\tlabel\n" + rows)
    write(tmp_path / "b" / "b.tsv.gz", gzip.compress(b"label\tsentence\n1\tlast\n"))
    write(tmp_path / "notes.txt", "x")
    source = Tsv(str(tmp_path), valid_fraction=0.2)
    found = {split: records(source, SENTENCE, split) for split in ("train", "valid")}
    assert sum(map(len, found.values())) == 201 and 20 < len(found["valid"]) < 60
    before = source.fingerprint()
    write(tmp_path / "a.tsv", "sentence\tlabel\nanother\t1\n")
    assert source.fingerprint() != before


@pytest.mark.parametrize(
    "name, content, source, said",
    [
        ("a.tsv", "sentence\tlabel\na\t1\tmore\n", {}, r"a\.tsv:2: 3 columns, expected 2: sentence, label"),
        ("a.tsv", "sentence\tlabel\na\t1\nb\n", {}, r"a\.tsv:3: 1 columns, expected 2"),
        ("a.tsv", "a film\t1\na\t1\n", {}, r"a\.tsv:2: no field 'sentence', allowed: 1, a film"),
        (
            "a.tsv",
            "x\tx\na\t1\n",
            {},
            r"a\.tsv:1: two columns have the name 'x'; if this line is a record, set their names, for example columns="
            r"\('label', 'text'\) in config.data.source",
        ),
        ("a.tsv", "sentence\tlabel\na\t1\nb\t7\n", {}, r"a\.tsv:3: .* the label '7'"),
        ("a.tsv", b"sentence\tlabel\na\t1\n\xff\t1\n", {}, r"a\.tsv:3: 'utf-8' codec can't decode byte 0xff"),
        ("a.tsv", b"sent\xffence\tlabel\na\t1\n", {}, r"a\.tsv:1: the names of the columns cannot be read"),
        ("a.csv", 'sentence,label\na,1\n"b\n,1\nc,1\n', {}, r"a\.csv:3: a quote is not closed"),
        ("a.csv", 'sentence,label\n"a" b,1\n', {}, r"a\.csv:2: a quote"),
        ("a.tsv", "sentence\tlabel\n" + "a" * 100 + "\t1\n", {"max_record_bytes": 50}, r"a\.tsv:2: a record of"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_with_its_place(name, content, source, said, tmp_path):
    path = write(tmp_path / name, content)
    with pytest.raises(UserError, match=said):
        records((Csv if name.endswith("csv") else Tsv)(path, valid_path=path, **source), SENTENCE)


def test_broken_records_are_skipped_and_counted_and_what_follows_is_read(tmp_path):
    path, skipped = write(tmp_path / "a.tsv", "sentence\tlabel\na\nb\t1\nc\t2\n"), collections.Counter()
    found = records(Tsv(path, valid_path=path, on_error="skip"), SENTENCE, skipped=skipped)
    assert [r.texts for r in found] == [("b",)] and skipped == {"broken records": 2}


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"delimiter": ""}, "config.data.source.delimiter is '', it must be one character"),
        ({"delimiter": "||"}, "delimiter is '||'"),
        ({"columns": ("a", "b", "a")}, "config.data.source.columns has 'a' twice"),
    ],
)
def test_fields_that_cannot_work_are_refused(fields, said, tmp_path):
    experiment = tiny.get_config("bert")
    experiment.data.source = Tsv(write(tmp_path / "a.tsv", "text\nx\n"), **fields)
    with pytest.raises(UserError) as e:
        validate(experiment)
    assert said in str(e.value)


def test_a_path_of_a_table_names_its_source(tmp_path):
    for name, reader in (("a.tsv", "Tsv"), ("a.csv.gz", "Csv"), ("a.jsonl", "JsonLines")):
        path = write(tmp_path / name, "text\nx\n")
        with pytest.raises(UserError, match=rf"did you mean {reader}\(path="):
            kinds.Source.parse(path)
        assert type(JsonLines(path)).taking_path(path) == [reader]  # called on the class of a field's value
    source = Tsv("a", columns=("x", "y"), quoting=True)
    assert Choice.parse(str(source)) == source


RELEASED = {  # the first lines of GLUE's own files, and the flags that read them
    "sst2": ("sentence\tlabel\nhide new secretions \t0\n", {}, {}),
    "cola": ("gj04\t0\t*\tThey drank the pub.\n", {"columns": ("source", "label", "mark", "sentence")}, {}),
    "mrpc": (
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t7\t8\tHe said "so.\tHe did.\n',
        {},
        {"text_field": "#1 String", "pair_field": "#2 String", "label_field": "Quality"},
    ),
    "stsb": ("index\tsentence1\tsentence2\tscore\n0\ta\tb\t2.50\n", {}, {"label_field": "score"}),
    "qqp": ("id\tquestion1\tquestion2\tis_duplicate\n1\ta?\tb?\t0\n", {}, {"label_field": "is_duplicate"}),
    "mnli": (
        "index\tsentence1\tsentence2\tgold_label\n0\ta\tb\tentailment\n",
        {},
        {"text_field": "sentence1", "pair_field": "sentence2", "label_field": "gold_label"},
    ),
    "qnli": ("index\tquestion\tsentence\tlabel\n0\ta?\tb\tentailment\n", {}, {}),
    "rte": ("index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n", {}, {}),
    "wnli": ("index\tsentence1\tsentence2\tlabel\n0\ta\tb\t0\n", {}, {}),
}


@pytest.mark.parametrize("name", TASKS)
def test_the_released_files_of_glue_are_read(name, tmp_path):
    content, columns, fields = RELEASED[name]
    path, task = write(tmp_path / "train.tsv", content), TASKS[name].task
    (found,) = records(Tsv(path, valid_path=path, **columns), type(task)(**vars(task) | fields))
    assert found.note == ({"score": 2.5} if isinstance(task, Regression) else {"label": 0})
    assert len(found.texts) == (2 if task.pair_field else 1)
