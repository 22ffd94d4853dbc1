"""Tests the input files of records, in all supported formats, and the output files, which are complete or absent."""

import csv
import gzip
import io
import json
import re
import shlex
import subprocess
import sys

import pytest

from pretrainax.config import UserError
from pretrainax.inference.prediction_files import Input, InputRecord, check_output, output_format, writing
from pretrainax.tasks import Classification
from pretrainax.tokenization import Characters
from tests.support import tiny

TASK = Classification(labels=("a", "b"))  # without special tokens, as with a GPT-2 from the hub
TOKENIZER = Characters().build(iter(["abcx"]))
ROWS = [{"id": "1", "text": "one, two"}, {"id": "2", "text": 'says "no"'}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def read(given, skip_bad=False):
    records = Input(str(given), tiny.get_config("bert"), skip_bad)
    return [(asked.where, asked.fields, asked.record.texts) for asked in records.records(TASK, TOKENIZER)], records


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.jsonl", LINES),
        ("a.json", LINES),
        ("a.txt", LINES),
        ("a.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)),
        ("A.JSONL.GZ", gzip.compress(LINES.encode(), mtime=0)),
        ("a.tsv", 'id\ttext\n1\tone, two\n2\tsays "no"\n'),
        ("A.CSV", 'id,text\n1,"one, two"\n2,"says ""no"""\n'),
        ("a.csv", 'id,text\n1,"one, two"\n2,"says ""no"""\n'),
    ],
)
def test_a_file_is_read_by_its_ending(name, content, tmp_path):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    found, _ = read(tmp_path / name)
    assert [fields for _, fields, _ in found] == ROWS
    assert [texts for _, _, texts in found] == [(row["text"],) for row in ROWS]
    first = 2 if name.lower().endswith(("tsv", "csv")) else 1
    assert [where for where, _, _ in found] == [f"{tmp_path / name}:{first + i}" for i in range(2)]


def test_a_source_may_be_given_and_a_folder(tmp_path):
    for name in ("b.csv", "a.csv"):
        (tmp_path / name).write_text(f"{name};text\n1;x\n")
    found, _ = read(f"Csv(path='{tmp_path}', delimiter=';')")
    assert [fields for _, fields, _ in found] == [{"a.csv": "1", "text": "x"}, {"b.csv": "1", "text": "x"}]


def test_a_folder_has_files_of_one_kind_and_others_that_are_not_read(tmp_path):
    for name, content in (("README.txt", "these"), ("b.CSV", "text\nx\n"), ("c.csv", "text\na\n")):
        (tmp_path / name).write_text(content)
    found, _ = read(tmp_path)
    assert [fields["text"] for _, fields, _ in found] == ["x", "a"]
    (tmp_path / "d.jsonl").write_text(LINES)
    with pytest.raises(UserError, match=r"has files for JsonLines and Csv, .*: set it to \"JsonLines\(path="):
        read(tmp_path)


def test_a_text_file_is_no_input(tmp_path):
    (tmp_path / "a.txt").write_text("one, two\n")
    with pytest.raises(UserError, match="a.txt needs TextFiles, which predict does not support: give JSON lines"):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize("given, content", [("-", LINES), ("Tsv(path='-')", 'id\ttext\n1\tone, two\n2\tsays "no"\n')])
def test_the_standard_input_is_read_as_it_comes(given, content, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    found, _ = read(given)
    assert [fields for _, fields, _ in found] == ROWS and found[0][0].startswith("-:")


def test_bad_records_end_it_or_are_named_and_counted(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    bad = ['{"txt": "b"}', "no", '{"text": 1.5}', "[]", '{"text": "\\ud800"}', "[" * 100_000, *"x" * 30]
    path.write_text("\n".join(['{"text": "a"}', *bad, '{"text": "c"}\n']))
    with pytest.raises(UserError, match=r"a\.jsonl:2: no field 'text', did you mean 'txt'.*--skip_bad leaves out"):
        read(path)
    found, records = read(path, skip_bad=True)
    assert [fields for _, fields, _ in found] == [{"text": "a"}, {"text": "c"}] and records.bad == 36
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 21 and said[1].startswith(f"left out: {path}:3: broken JSON at column 1")
    assert said[-1] == "left out: more records; the end of the output has their number"


def test_a_record_without_a_token_is_a_bad_record(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": ""}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2: the texts \(''.* have no tokens.*--skip_bad leaves out"):
        read(tmp_path / "a.jsonl")
    found, records = read(tmp_path / "a.jsonl", skip_bad=True)
    assert len(found) == 1 and records.bad == 1


@pytest.mark.parametrize(
    "given, said",
    [
        ("no/such.jsonl", "--input.path is 'no/such.jsonl', which does not exist"),
        ("a.parquet", "--input=a.parquet needs Parquet, which predict does not support: give JSON lines"),
        ("Parquet(path='x')", "is Parquet, which predict does not support"),
        ("Csv(path='x', delimter=';')", "Csv has no field 'delimter', did you mean 'delimiter'"),
        ("TextFiles(path='x')", "is TextFiles, which predict does not support"),
    ],
)
def test_what_is_not_read_is_one_line(given, said):
    with pytest.raises(UserError) as e:
        read(given)
    assert said in str(e.value)


# --- output files -----------------------------------------------------------------------------------------------------


def asked(tmp_path, rows=ROWS):
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(Input(str(path), tiny.get_config("bert"), False).records(TASK, TOKENIZER))


SAID = {"prediction": ["a", "b"], "probabilities": {"a": 0.75, "b": 0.5}}


def test_a_line_has_the_fields_of_its_record_and_what_is_said(tmp_path):
    with writing(str(tmp_path / "out.jsonl"), "jsonl") as output:
        for each in asked(tmp_path):
            output.add(each, SAID)
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [r | SAID for r in ROWS]


def test_what_no_file_can_hold_is_written_as_it_was_escaped(tmp_path):
    with writing(str(tmp_path / "out.jsonl"), "jsonl") as output:
        output.add(asked(tmp_path, [{"text": "a", "id": "\ud800"}])[0], SAID)
    assert json.loads((tmp_path / "out.jsonl").read_text())["id"] == "\ud800"


def test_a_table_has_a_column_for_each(tmp_path):
    rows = [
        {"id": 1, "text": "Ä, ö", "more": {"x": None}, "none": None},
        {"none": 1, "more": [1], "text": "a\nb", "id": 2},
    ]
    with writing(str(tmp_path / "out.csv"), "csv") as output:
        for each in asked(tmp_path, rows):
            output.add(each, SAID)
    with open(tmp_path / "out.csv", newline="", encoding="utf-8") as f:
        found = list(csv.DictReader(f))
    said = {"prediction": '["a", "b"]', "probabilities.a": "0.75", "probabilities.b": "0.5"}
    assert found[0] == {"id": "1", "text": "Ä, ö", "more": '{"x": null}', "none": ""} | said
    assert found[1] == {"id": "2", "text": "a\nb", "more": "[1]", "none": "1"} | said


def test_an_output_is_there_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("before")
    with pytest.raises(KeyError), writing(str(path), "jsonl") as output:
        output.add(asked(tmp_path)[0], SAID)
        raise KeyError
    assert path.read_text() == "before" and sorted(x.name for x in tmp_path.iterdir()) == ["asked.jsonl", "out.jsonl"]


@pytest.mark.parametrize(
    "rows, format, said",
    [
        ([{"text": "a", "prediction": "x"}], "jsonl", "asked.jsonl:1: the record has a field 'prediction' already"),
        (
            [{"text": "a", "probabilities.b": 1}],
            "csv",
            "asked.jsonl:1: the record has a field 'probabilities.b' already",
        ),
        ([{"text": "a"}, {"text": "a", "id": 1}], "csv", "asked.jsonl:2: the field 'id' is not in all records"),
        ([{"text": "a", "id": 1}, {"text": "a"}], "csv", "asked.jsonl:2: the field 'id' is not in all records"),
    ],
)
def test_fields_that_cannot_be_written_are_named(rows, format, said, tmp_path):
    with pytest.raises(UserError, match=said), writing(str(tmp_path / "out"), format) as output:
        for each in asked(tmp_path, rows):
            output.add(each, SAID)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(UserError, match="--output=.*/none/out cannot be written: No such file"):
        with writing(str(tmp_path / "none" / "out"), "jsonl"):
            pass


def test_a_cell_that_a_spreadsheet_would_run_is_marked_and_a_number_is_not(tmp_path):
    fields = {"id": "=1+1", "a": "@SUM(A1)", "b": "-2+3", "c": "-1.5e-3", "d": "+7", "e": "\tx", "f": "plain", "g": "-"}
    with writing(str(tmp_path / "out.csv"), "csv") as output:
        output.add(InputRecord("in.csv:2", fields, None), {"label": "=x"})
    with open(tmp_path / "out.csv", newline="") as f:
        _, row = csv.reader(f)
    assert row == ["'=1+1", "'@SUM(A1)", "'-2+3", "-1.5e-3", "+7", "'\tx", "plain", "'-", "'=x"]


def test_a_reader_of_the_output_that_has_read_enough_ends_it_quietly():
    code = (
        "from pretrainax.inference.prediction_files import InputRecord, writing\n"
        "with writing('-', 'jsonl') as output:\n"
        "    for i in range(10**6): output.add(InputRecord('x', {'id': i}, None), {})\n"
    )
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} | head -n 2; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ['{"id": 0}', '{"id": 1}', "141"] and done.stderr == ""


@pytest.mark.parametrize(
    "name, given, wanted",
    [
        ("a.jsonl", None, "jsonl"),
        ("a.json", None, "jsonl"),
        ("a.csv", None, "csv"),
        ("A.CSV", None, "csv"),
        ("a.csv", "csv", "csv"),
        ("a", None, "jsonl"),
        ("a", "csv", "csv"),
        ("a.txt", "csv", "csv"),
        ("-", None, "jsonl"),
        ("-", "csv", "csv"),
        ("v1.2", None, "jsonl"),
    ],
)
def test_the_ending_of_an_output_is_its_format(name, given, wanted):
    assert output_format(f"some.csv/{name}" if name != "-" else name, given) == wanted


@pytest.mark.parametrize(
    "name, given, said",
    [
        ("a.csv", "jsonl", "--output=a.csv ends in .csv, but --format is jsonl: change one of them"),
        ("a.jsonl", "csv", "--output=a.jsonl ends in .jsonl, but --format is csv: change one of them"),
        ("a.tsv", None, r"--output=a.tsv: predict writes JSON lines \(.jsonl\) or CSV \(.csv\), not .tsv"),
        ("a.csv.gz", None, r"predict writes JSON lines \(.jsonl\) or CSV \(.csv\), not .gz"),
        ("a.parquet", "csv", r"not .parquet"),
        ("a.xlsx", "csv", r"not .xlsx"),
    ],
)
def test_an_ending_of_another_format_is_refused(name, given, said):
    with pytest.raises(UserError, match=said):
        output_format(name, given)


def test_an_output_that_exists_is_replaced_only_if_asked(tmp_path):
    path = tmp_path / "out.jsonl"
    check_output(str(path), overwrite=False)
    check_output("-", overwrite=False)
    path.write_text("precious")
    with pytest.raises(UserError, match=r"--output=.*out.jsonl exists: choose another file, or add --overwrite"):
        check_output(str(path), overwrite=False)
    check_output(str(path), overwrite=True)
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match="link exists"):
        check_output(str(tmp_path / "link"), overwrite=False)
    for other in (str(tmp_path), "/dev/null", "/dev/full"):  # an atomic write would replace the device with a file
        with pytest.raises(UserError, match="it must be a regular file"):
            check_output(other, overwrite=True)


FULL = (
    "import resource\n"
    "from pretrainax import cli\n"
    "from pretrainax.inference.prediction_files import InputRecord, writing\n"
    "def main():\n"
    "    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    "    with writing({path!r}, 'jsonl') as output:\n"
    "        for i in range(10**5): output.add(InputRecord('x', {{'id': i}}, None), {{}})\n"
    "    print('not reached')\n"
    "cli.run(main)\n"
)


def test_a_full_disk_is_one_line_with_the_file_and_its_size(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("before")
    done = subprocess.run([sys.executable, "-c", FULL.format(path=str(path))], capture_output=True, text=True)
    said = rf"pretrainax: --output={path} cannot be written: File too large after \d\d,\d\d\d bytes|after 100,000 bytes"
    assert re.search(said, done.stderr) and done.stderr.count("\n") == 1 and done.returncode == 2, done.stderr
    assert path.read_text() == "before" and [x.name for x in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_full_standard_output_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", FULL.format(path="-")], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.stderr == "pretrainax: the standard output cannot be written: No space left on device\n"
    assert done.returncode == 2
