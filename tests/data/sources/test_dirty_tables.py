"""Tests that a stray quote or a wrong byte costs one record, and that the log counts lost records and names lines."""

import collections
import csv
import gzip
import io
import json
import random

import pandas
import pyarrow.csv
import pytest

from pretrainax.config import Choice, UserError
from pretrainax.config.validation import validate
from pretrainax.data import files
from pretrainax.data.sources import Csv, JsonLines, Tsv
from pretrainax.data.sources.delimited import SUSPICIOUS
from tests.support import tiny
from tests.support.reading import texts


def fields_of(source):
    """Returns the fields of all records in a source's file, and the 0-based first lines of the broken records."""
    rows, broken = [], []
    for number, row in source.rows(files.FileShard(source.path, 0, None)):
        try:
            rows.append(list(source.parse(row).values()))
        except ValueError:
            broken.append(number)
    return rows, broken


def write(path, content, encoding="utf-8"):
    path.write_bytes(content.encode(encoding))
    return str(path)


# --- quotes -----------------------------------------------------------------------------------------------------------


def random_rows(rng, columns, letters):
    rows = [["".join(rng.choices(letters, k=rng.randint(0, 6))) for _ in range(columns)] for _ in range(20)]
    return [[cell or "x" for cell in row] if columns == 1 else row for row in rows]  # An empty line is no record.


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "¦"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_clean_tables_are_those_of_the_csv_module(delimiter, line_end, tmp_path):
    rng, letters = random.Random(len(line_end)), f'ab"\n {delimiter}é😀' + "\r" * (line_end != "\n")
    for _ in range(60):
        columns = rng.randint(1, 4)
        rows, out = random_rows(rng, columns, letters), io.StringIO(newline="")
        quoting = rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
        writer = csv.writer(out, delimiter=delimiter, lineterminator=line_end, quoting=quoting)
        writer.writerows([[f"column {i}" for i in range(columns)], *rows])
        path = write(tmp_path / "a.csv", out.getvalue())
        assert fields_of(Csv(path, delimiter=delimiter)) == (rows, [])
        assert list(csv.reader(io.StringIO(out.getvalue(), newline=""), delimiter=delimiter))[1:] == rows


def test_clean_tables_are_those_of_pandas_and_pyarrow(tmp_path):
    rng = random.Random(0)
    for _ in range(30):
        rows, path = random_rows(rng, 3, 'ab"\n ,é'), str(tmp_path / "a.csv")
        pandas.DataFrame(rows, columns=["a", "b", "c"]).to_csv(path, index=False)
        found, broken = fields_of(Csv(path))
        arrow = pyarrow.csv.read_csv(
            path,
            parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(column_types=dict.fromkeys("abc", pyarrow.string())),
        )
        assert not broken and found == rows == [list(row.values()) for row in arrow.to_pylist()]
        assert found == pandas.read_csv(path, dtype=str, keep_default_na=False).to_numpy().tolist()


DIRT = {  # Rows from programs that ignore quotes; True: the reader can still read them.
    "in a field without quotes": ('5" pipe {},1', True),
    "at the end of a field without quotes": ('pipe of 5" {}",1', True),
    "before the field": ('" pipe {},1', False),
    "inside of a quoted field": ('"5" pipe, {}",1', False),
    "at the end of a quoted field": ('"pipe {}, of 5"",1', False),
    "after a quoted field": ('"pipe" {},1', False),
    "before the last field": ('pipe {},"1', False),
}
CLEAN = ("plain {},0", '"quoted, {}",0', '"said ""{}"", twice",0')


@pytest.mark.parametrize("name", DIRT)
@pytest.mark.parametrize("seed", range(6))
def test_five_stray_quotes_cost_five_of_a_thousand_records(name, seed, tmp_path):
    """An earlier version lost 104 to 923 records, and counted three."""
    rng, (dirty, is_read) = random.Random(seed), DIRT[name]
    strays = set(rng.sample(range(999), 5))  # A stray quote in the last record is no different.
    lines = [(dirty if i in strays else rng.choice(CLEAN)).format(i) for i in range(1000)]
    path = write(tmp_path / "a.csv", "text,label\n" + "\n".join(lines) + "\n")
    found, broken = fields_of(Csv(path))
    assert len(found) + len(broken) == 1000
    assert broken == ([] if is_read else [i + 1 for i in sorted(strays)])


def test_dirt_at_random_loses_no_more_records_than_it_is_in(tmp_path):
    """Inserts quotes at random places of quoted records; the reader returns each record or reports it as broken."""
    num_lost = num_dirty = 0
    for seed in range(300):
        rng = random.Random(seed)
        rows = [f'"some, text {i}","label {i % 2}"' for i in range(50)]
        for i in rng.sample(range(49), 3):
            at = rng.randrange(1, len(rows[i]) - 1)
            rows[i] = rows[i][:at] + '"' + rows[i][at:]
        path = write(tmp_path / "a.csv", "text,label\n" + "\n".join(rows) + "\n")
        found, broken = fields_of(Csv(path))
        assert len(found) + len(broken) == 50
        num_lost, num_dirty = num_lost + len(broken), num_dirty + 3
    assert num_lost <= num_dirty


def test_a_quote_that_is_never_closed_costs_one_record(tmp_path):
    path = write(tmp_path / "a.csv", 'text,label\n"never,1\n' + "".join(f"line {i},0\n" for i in range(2000)))
    assert fields_of(Csv(path)) == ([[f"line {i}", "0"] for i in range(2000)], [1])
    assert fields_of(Csv(path, max_record_bytes=100)) == fields_of(Csv(path))


def test_lines_that_look_like_records_inside_of_quotes_are_counted(tmp_path):
    """The quotes are valid, so the reader keeps the record; its lines may be records that two stray quotes join."""
    path = write(tmp_path / "a.csv", 'text,label\n"5 inch,1\na,0\nb,1\nof 7",0\nc,1\n')
    skipped = collections.Counter()
    assert texts(Csv(path, valid_path=path), "train", skipped) == ["5 inch,1\na,0\nb,1\nof 7", "c"]
    assert skipped == {SUSPICIOUS: 2}


def test_lost_records_are_counted_and_the_first_are_shown(tmp_path, capsys):
    bad = {5, 17, 30, 31, 200, 300, 400}
    path = write(tmp_path / "a.csv", "text\n" + "".join('"x" y\n' if i in bad else f"row {i}\n" for i in range(2, 500)))
    skipped = collections.Counter()
    source = Csv(path, on_error="skip")
    found = [text for split in ("train", "valid") for text in texts(source, split, skipped)]
    assert len(found) == 498 - 7 and skipped == {"broken records": 7}
    shown = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in shown[:-1]] == [f"skipped {path}:{n}" for n in sorted(bad)[:5]]
    assert shown[-1] == "skipped more broken records; the summary of the data has their number"


def test_corpora_of_tables_that_earlier_versions_lost_records_of_are_prepared_again(tmp_path):
    path = write(tmp_path / "a.csv", "text\nx\n")
    settings = files.settings_of(Csv(path))
    assert Csv(path).fingerprint() == files.fingerprint(Csv(path), settings, Csv.endings)
    skipping = Csv(path, on_error="skip")
    assert skipping.fingerprint() != files.fingerprint(skipping, files.settings_of(skipping), Csv.endings)


# --- encodings --------------------------------------------------------------------------------------------------------

ROWS = [["Größe – naïve", "1"], ["“quoted”, und\nzwei Zeilen", "0"]]
ENCODINGS = ["utf-8", "utf-8-sig", "cp1252", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]


def table(rows):
    out = io.StringIO(newline="")
    csv.writer(out).writerows([["text", "label"], *rows])
    return out.getvalue()


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_records_are_the_same_in_every_encoding(encoding, ending, tmp_path):
    path = tmp_path / f"a.csv{ending}"
    content = table(ROWS).encode(encoding)
    path.write_bytes(gzip.compress(content) if ending else content)
    assert fields_of(Csv(str(path), encoding=encoding)) == (ROWS, [])
    tsv = write(tmp_path / "a.tsv", "text\tlabel\r\nÄ\t1\r\n", encoding)
    assert fields_of(Tsv(tsv, encoding=encoding)) == ([["Ä", "1"]], [])
    lines = write(
        tmp_path / "a.jsonl", "".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t, _ in ROWS), encoding
    )
    assert texts(JsonLines(lines, valid_path=lines, encoding=encoding), "train") == [text for text, _ in ROWS]


def test_latin_1_and_long_files_are_read(tmp_path):
    rows = [[f"é{i}" * 10, str(i % 2)] for i in range(20_000)]  # more than one chunk of the decoder
    for encoding in ("latin-1", "utf-16", "shift_jis"):
        written = rows if encoding != "shift_jis" else [[text.replace("é", "語"), label] for text, label in rows]
        assert fields_of(Csv(write(tmp_path / "a.csv", table(written), encoding), encoding=encoding)) == (written, [])


@pytest.mark.parametrize(
    "written, read, said",
    [
        ("cp1252", "utf-8", r"a\.csv:2: 'utf-8' codec can't decode .*; config.data.source.encoding is 'utf-8': set it"),
        (
            "utf-16",
            "utf-8",
            r"a\.csv begins with the byte-order mark of UTF-16; config.data.source.encoding is 'utf-8'",
        ),
        ("utf-8-sig", "cp1252", r"the byte-order mark of UTF-8; config.data.source.encoding is 'cp1252': set it"),
        ("utf-16", "latin-1", r"the byte-order mark of UTF-16; config.data.source.encoding is 'latin-1'"),
        ("utf-32", "utf-16", r"the byte-order mark of UTF-32; config.data.source.encoding is 'utf-16'"),
        ("utf-8", "ascii", r"a\.csv:2: a byte that ascii does not define; config.data.source.encoding is 'ascii'"),
        ("utf-8", "utf-16", r"config.data.source.encoding is 'utf-16'"),
    ],
)
def test_a_wrong_encoding_names_the_field(written, read, said, tmp_path):
    path = write(tmp_path / "a.csv", table(ROWS), written)
    with pytest.raises(UserError, match=said) as e:
        texts(Csv(path, valid_path=path, encoding=read), "train")
    assert "\n" not in str(e.value)


def test_a_wrong_encoding_of_json_lines_names_the_field(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "Größe"}\n', "latin-1")
    with pytest.raises(UserError, match=r"a\.jsonl:1: 'utf-8' codec.*config.data.source.encoding is 'utf-8'"):
        texts(JsonLines(path, valid_path=path), "train")


def test_a_byte_that_the_encoding_lacks_costs_one_record(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"text\nx\n\x81\n\xe9\n")  # cp1252 does not define 0x81.
    skipped = collections.Counter()
    found = texts(Csv(str(path), valid_path=str(path), encoding="cp1252", on_error="skip"), "train", skipped)
    assert found == ["x", "é"] and skipped == {"broken records": 1}


def test_half_a_character_is_one_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(table(ROWS).encode("utf-16")[:-1])
    with pytest.raises(UserError, match=r"a\.csv: 'utf-16.*' codec.*; config.data.source.encoding is 'utf-16'"):
        texts(Csv(str(path), valid_path=str(path), encoding="utf-16"), "train")


@pytest.mark.parametrize("encoding", ["utf8x", "", "rot13", "hex", "a\0b"])
def test_an_unknown_encoding_is_refused(encoding, tmp_path):
    experiment = tiny.get_config("bert")
    experiment.data.source = Csv(write(tmp_path / "a.csv", "text\nx\n"), encoding=encoding)
    with pytest.raises(
        UserError, match="config.data.source.encoding is .*, it must be a text encoding such as 'utf-8'"
    ):
        validate(experiment)


def test_the_default_encoding_keeps_the_corpora_of_earlier_versions(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "x"}\n')
    assert "encoding" not in files.settings_of(JsonLines(path))
    assert JsonLines(path).fingerprint() != JsonLines(path, encoding="latin-1").fingerprint()
    assert Choice.parse(str(Csv(path, encoding="cp1252"))) == Csv(path, encoding="cp1252")
