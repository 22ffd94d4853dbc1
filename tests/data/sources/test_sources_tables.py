"""Tests Parquet and ArrayRecord files: their documents, their splits, and the errors of broken files."""

import collections
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from pretrainax.config import UserError
from pretrainax.data import files
from pretrainax.data.sources import ArrayRecord, Parquet
from tests.support.reading import texts

DOCUMENTS = [f"document {i} é字" for i in range(500)]


def write_parquet(path, columns, **options):
    pq.write_table(pa.table(columns), path, **options)
    return str(path)


def write_array_record(path, records, options="group_size:1"):
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record if isinstance(record, bytes) else record.encode())
    writer.close()
    return str(path)


def both(tmp_path, fields):
    """Writes the same records to a file of each kind: [(source class, path)]. fields: name -> values."""
    rows = [dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=True)]
    return [
        (Parquet, write_parquet(tmp_path / "a.parquet", fields, row_group_size=100)),
        (ArrayRecord, write_array_record(tmp_path / "a.array_record", map(json.dumps, rows))),
    ]


@pytest.mark.parametrize("kind", [0, 1], ids=["Parquet", "ArrayRecord"])
def test_splits_hold_every_document_once(tmp_path, kind):
    source, path = both(tmp_path, {"text": DOCUMENTS, "n": range(500)})[kind]
    train, valid = (texts(source(path, valid_fraction=0.2, text_field="text"), s) for s in ("train", "valid"))
    assert sorted(train + valid) == sorted(DOCUMENTS)
    assert 60 < len(valid) < 140  # 100 expected, standard deviation 9


def test_both_hold_out_the_same_documents(tmp_path):
    parquet, record = (s(p, valid_fraction=0.2, text_field="text") for s, p in both(tmp_path, {"text": DOCUMENTS}))
    assert texts(parquet, "valid") == texts(record, "valid")


@pytest.mark.parametrize("kind", [0, 1], ids=["Parquet", "ArrayRecord"])
def test_big_file_is_cut_without_loss(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(files, "SHARD_BYTES", 2000)
    source, path = both(tmp_path, {"text": DOCUMENTS})[kind]
    source = source(path, valid_path=path, text_field="text")
    assert len(source.shards("train")) > 3
    assert texts(source, "train") == texts(source, "valid") == DOCUMENTS


@pytest.mark.parametrize("kind", [0, 1], ids=["Parquet", "ArrayRecord"])
def test_pairs_with_a_prefix(tmp_path, kind):
    source, path = both(tmp_path, {"en": ["a", "b"], "de": ["x", "y"]})[kind]
    source = source(path, valid_path=path, text_field="en", target_field="de", prefix="to German: ")
    assert source.pairs and texts(source, "train") == [("to German: a", "x"), ("to German: b", "y")]


@pytest.mark.parametrize("kind", [0, 1], ids=["Parquet", "ArrayRecord"])
def test_pairs_in_a_field_of_a_field(tmp_path, kind):
    source, path = both(tmp_path, {"translation": [{"en": "a", "de": "x"}]})[kind]
    source = source(path, valid_path=path, text_field="translation.en", target_field="translation.de")
    assert texts(source, "train") == [("a", "x")]


@pytest.mark.parametrize("kind", [0, 1], ids=["Parquet", "ArrayRecord"])
def test_record_of_the_wrong_type_names_file_and_row(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(files, "SHARD_BYTES", 2000)
    source, path = both(tmp_path, {"text": [*DOCUMENTS[:250], None, *DOCUMENTS[251:]]})[kind]
    source = source(path, valid_path=path, text_field="text")
    name = path.rpartition("/")[2].replace(".", r"\.")
    with pytest.raises(UserError, match=rf"{name}, row 250 \(from 0\): field 'text' holds NoneType, it must be a str"):
        texts(source, "train")
    source.on_error, skipped = "skip", collections.Counter()
    assert len(texts(source, "train", skipped)) == 499 and skipped == {"broken records": 1}


@pytest.mark.parametrize("kind", [0, 1], ids=["Parquet", "ArrayRecord"])
def test_missing_field_suggests_the_nearest(tmp_path, kind):
    source, path = both(tmp_path, {"text": ["a"]})[kind]
    with pytest.raises(UserError, match=r"'txet', did you mean 'text'\?"):
        texts(source(path, valid_path=path, text_field="txet"), "train")


@pytest.mark.parametrize("kind", [0, 1], ids=["Parquet", "ArrayRecord"])
def test_fingerprint_is_of_the_content(tmp_path, kind):
    paths = {}
    for name, content in {"x": "abc", "y": "abc", "z": "abd"}.items():
        (tmp_path / name).mkdir()
        source, paths[name] = both(tmp_path / name, {"text": [content]})[kind]
    x, y, z = (source(paths[name]).fingerprint() for name in paths)
    assert x == y != z


@pytest.mark.parametrize("source", [Parquet, ArrayRecord])
def test_folder_without_files_says_so(tmp_path, source):
    with pytest.raises(UserError, match=rf"config\.data\.source\.path is .*: no {source.endings[0]}"):
        source(str(tmp_path)).shards("train")


@pytest.mark.parametrize("source", [Parquet, ArrayRecord])
def test_missing_path_is_a_problem_of_the_config(source):
    (problem,) = source("/no/such/folder").problems(None)
    assert problem == "config.data.source.path is '/no/such/folder', which does not exist"


# --- Parquet -------------------------------------------------------------------------------------------------------


def test_parquet_small_row_groups_share_a_shard(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"text": DOCUMENTS}, row_group_size=1)
    assert Parquet(path).shards("train") == [(path, 0, 500, "train")]


def test_parquet_invalid_utf8_names_file_and_row(tmp_path):
    column = pa.array([b"good", b"bad \xff"]).view(pa.string())
    path = write_parquet(tmp_path / "a.parquet", {"text": column})
    with pytest.raises(UserError, match=r"a\.parquet, row 1 \(from 0\): 'utf-8' codec can't decode byte 0xff"):
        texts(Parquet(path, valid_path=path), "train")


@pytest.mark.parametrize("column", [pa.array(["a", "b", "a"]).dictionary_encode(), pa.array(["a", "b", "a"], "binary")])
def test_parquet_other_columns_of_text(tmp_path, column):
    path = write_parquet(tmp_path / "a.parquet", {"text": column})
    assert texts(Parquet(path, valid_path=path), "train") == ["a", "b", "a"]


@pytest.mark.parametrize("kept", [0, 5, 0.5, 0.999])
def test_parquet_that_is_cut_off_is_named(tmp_path, kept):
    path = tmp_path / "a.parquet"
    content = open(write_parquet(path, {"text": DOCUMENTS}), "rb").read()
    path.write_bytes(content[: int(kept * len(content)) if kept < 1 else kept])
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read as Parquet \("):
        Parquet(str(path)).shards("train")


def test_parquet_with_damaged_pages_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    content = bytearray(open(write_parquet(path, {"text": DOCUMENTS}, compression="zstd"), "rb").read())
    content[100:300] = b"\xff" * 200
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read as Parquet \("):
        texts(Parquet(str(path)), "train")


# --- ArrayRecord ---------------------------------------------------------------------------------------------------


def test_array_record_without_a_field_is_text(tmp_path):
    path = write_array_record(tmp_path / "a.array_record", DOCUMENTS, "group_size:7")
    assert texts(ArrayRecord(path, valid_path=path), "train") == DOCUMENTS


def test_array_record_prefix_is_of_texts_too(tmp_path):
    path = write_array_record(tmp_path / "a.array_record", ["a"])
    assert texts(ArrayRecord(path, valid_path=path, prefix="say: "), "train") == ["say: a"]


def test_array_record_invalid_utf8_names_file_and_row(tmp_path):
    path = write_array_record(tmp_path / "a.array_record", [b"good", b"bad \xff"])
    with pytest.raises(UserError, match=r"a\.array_record, row 1 \(from 0\): 'utf-8' codec can't decode byte 0xff"):
        texts(ArrayRecord(path, valid_path=path), "train")


def test_array_record_broken_json_names_file_and_row(tmp_path):
    path = write_array_record(tmp_path / "a.array_record", ['{"text": "a"}', '{"text'])
    with pytest.raises(UserError, match=r"a\.array_record, row 1 \(from 0\): broken JSON at column 2"):
        texts(ArrayRecord(path, valid_path=path, text_field="text"), "train")


@pytest.mark.parametrize("kept", [0, 5, 0.5, 0.99])
def test_array_record_that_is_cut_off_is_named(tmp_path, kept):
    path = tmp_path / "a.array_record"
    content = open(write_array_record(path, DOCUMENTS), "rb").read()
    path.write_bytes(content[: int(kept * len(content)) if kept < 1 else kept])
    with pytest.raises(UserError, match=r"a\.array_record: not an ArrayRecord file, damaged"):
        ArrayRecord(str(path)).shards("train")


def test_array_record_with_damaged_records_is_named(tmp_path):
    path = tmp_path / "a.array_record"
    content = bytearray(open(write_array_record(path, DOCUMENTS), "rb").read())
    content[9000:9050] = b"\xff" * 50
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.array_record, rows 63 to 126 \(from 0\): damaged \("):
        texts(ArrayRecord(str(path)), "train")


def test_array_record_target_without_a_text_field_is_a_problem(tmp_path):
    (problem,) = ArrayRecord(str(tmp_path), target_field="de").problems(None)
    assert problem == "config.data.source.target_field is 'de': set config.data.source.text_field too"
