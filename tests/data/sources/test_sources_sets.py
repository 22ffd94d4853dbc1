"""Tests datasets with named splits, TFDS and Hugging Face, which the tests write and read without a network."""

import collections
import gzip
import importlib
import os
import sys

import datasets
import pytest

from pretrainax.config import UserError
from pretrainax.data import files
from pretrainax.data.sources import TFDS, HuggingFace
from tests.support.huggingface_datasets import without_network
from tests.support.reading import texts, write_lines

# --- TFDS ----------------------------------------------------------------------------------------------------------

BUILDER = """
import numpy as np
import tensorflow_datasets as tfds

class TinyTexts(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(
            {"text": tfds.features.Text(), "upper": tfds.features.Text(), "number": np.int64,
             "parity": tfds.features.ClassLabel(names=["even", "odd"]), "half": np.float32}
        ))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(250), "validation": self._generate_examples(7)}

    def _generate_examples(self, count):
        for i in range(count):
            text = f"text {i} of {count}"
            yield i, {"text": text, "upper": text.upper(), "number": i, "parity": i % 2, "half": i / 2}
"""


@pytest.fixture(scope="module")
def tfds_dir(tmp_path_factory):
    """Writes a dataset to disk, as its author would."""
    pytest.importorskip("tensorflow_datasets")
    root = tmp_path_factory.mktemp("tfds")
    package = root / "tiny_texts_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tiny_texts.py").write_text(BUILDER)
    sys.path.insert(0, str(root))
    try:
        builder = importlib.import_module("tiny_texts_package.tiny_texts").TinyTexts(data_dir=str(root / "data"))
        builder.download_and_prepare(file_format="array_record")
    finally:
        sys.path.remove(str(root))
    return str(root / "data")


def test_tfds_gives_every_record_of_each_split(tfds_dir):
    source = TFDS("tiny_texts", data_dir=tfds_dir)
    assert sorted(texts(source, "train")) == sorted(f"text {i} of 250" for i in range(250))
    assert sorted(texts(source, "valid")) == [f"text {i} of 7" for i in range(7)]


def test_tfds_fingerprint_is_repeatable(tfds_dir):
    assert TFDS("tiny_texts", data_dir=tfds_dir).fingerprint() == TFDS("tiny_texts", data_dir=tfds_dir).fingerprint()


def test_tfds_unknown_set_is_named(tfds_dir):
    with pytest.raises(UserError, match=r"config\.data\.source\.name is 'no_such_set': TFDS has no such dataset"):
        TFDS("no_such_set", data_dir=tfds_dir).fingerprint()


def test_tfds_unknown_split_is_named(tfds_dir):
    with pytest.raises(UserError, match=r"config\.data\.source\.valid_split is 'valid', did you mean 'validation'\?"):
        TFDS("tiny_texts", data_dir=tfds_dir, valid_split="valid").shards("valid")


def test_tfds_unknown_field_is_named(tfds_dir):
    with pytest.raises(UserError, match=r"config\.data\.source\.text_field is 'txt', did you mean 'text'\?"):
        texts(TFDS("tiny_texts", data_dir=tfds_dir, text_field="txt"), "train")


def test_tfds_holds_out_a_fraction_where_no_split_is_named(tfds_dir):
    source = TFDS("tiny_texts", data_dir=tfds_dir, valid_split=None, valid_fraction=0.2)
    train, valid = texts(source, "train"), texts(source, "valid")
    assert sorted(train + valid) == sorted(f"text {i} of 250" for i in range(250))
    assert 18 < len(valid) < 82  # 50 expected, standard deviation 6.3


def test_tfds_gives_pairs(tfds_dir):
    source = TFDS("tiny_texts", data_dir=tfds_dir, text_field="text", target_field="upper", prefix="shout: ")
    assert ("shout: text 3 of 7", "TEXT 3 OF 7") in texts(source, "valid")


def test_tfds_record_of_the_wrong_type_names_the_row(tfds_dir):
    source = TFDS("tiny_texts", data_dir=tfds_dir, text_field="half")
    with pytest.raises(UserError, match=r"tiny_texts validation, row 0 \(from 0\): field 'half' holds float"):
        texts(source, "valid")
    source.on_error, skipped = "skip", collections.Counter()
    assert texts(source, "valid", skipped) == [] and skipped == {"broken records": 7}


def test_tfds_whole_number_is_its_decimal_text(tfds_dir):
    assert sorted(texts(TFDS("tiny_texts", data_dir=tfds_dir, text_field="number"), "valid")) == list("0123456")


def test_tfds_shards_are_ranges_of_records(tfds_dir, monkeypatch):
    monkeypatch.setattr(files, "SHARD_BYTES", 1000)
    source = TFDS("tiny_texts", data_dir=tfds_dir)
    assert len(source.shards("train")) > 3
    assert len(texts(source, "train")) == 250


def test_tfds_class_is_given_by_its_name(tfds_dir):
    pairs = texts(TFDS("tiny_texts", data_dir=tfds_dir, target_field="parity"), "valid")
    assert sorted(pairs)[:2] == [("text 0 of 7", "even"), ("text 1 of 7", "odd")]


# --- Hugging Face --------------------------------------------------------------------------------------------------

ROWS = [{"text": f"document {i} é字", "n": i} for i in range(300)]


@pytest.fixture(scope="module", autouse=True)
def no_network(tmp_path_factory):
    """Gives `datasets` a separate cache and no access to the hub."""
    with pytest.MonkeyPatch.context() as patch:
        without_network(patch, tmp_path_factory.mktemp("huggingface"))
        yield


def write_parquet(folder):
    folder.mkdir()
    for i in range(3):
        datasets.Dataset.from_list(ROWS[i * 100 : i * 100 + 100]).to_parquet(str(folder / f"{i}.parquet"))
    return {"path": str(folder)}


def write_json(folder):
    folder.mkdir()
    for i in range(3):
        write_lines(folder / f"{i}.jsonl", ROWS[i * 100 : i * 100 + 100])
    return {"path": "json", "data_files": (str(folder / "*.jsonl"),)}


def write_text(folder):
    folder.mkdir()
    for i in range(3):
        lines = (row["text"] + "\n" for row in ROWS[i * 100 : i * 100 + 100])
        (folder / f"{i}.txt").write_text("".join(lines))
    return {"path": str(folder)}


def write_arrow(folder):
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder), num_shards=3)
    return {"path": str(folder)}


def write_arrow_splits(folder):
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(folder), num_shards={"train": 3})
    return {"path": str(folder)}


FORMATS = [write_parquet, write_json, write_text, write_arrow, write_arrow_splits]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("write", FORMATS)
def test_hugging_face_splits_hold_every_document_once(tmp_path, write, streaming):
    source = HuggingFace(**write(tmp_path / "set"), streaming=streaming, valid_fraction=0.2)
    train, valid = texts(source, "train"), texts(source, "valid")
    assert sorted(train + valid) == sorted(row["text"] for row in ROWS)
    assert 25 < len(valid) < 95  # 60 expected, standard deviation 6.9
    assert source.fingerprint() == source.fingerprint()


def test_hugging_face_shards_of_a_stream_are_files(tmp_path):
    source = HuggingFace(**write_parquet(tmp_path / "set"), streaming=True)
    assert source.shards("train") == [("train", i, i + 1, "train") for i in range(3)]


def test_hugging_face_shards_are_ranges_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SHARD_BYTES", 1000)
    source = HuggingFace(**write_parquet(tmp_path / "set"))
    assert len(source.shards("train")) > 3
    assert len(texts(source, "train") + texts(source, "valid")) == 300


@pytest.mark.parametrize("streaming", [False, True])
def test_hugging_face_files_for_validation(tmp_path, streaming):
    files_of = {name: (write_lines(tmp_path / f"{name}.jsonl", [{"text": name}]),) for name in ("a", "b")}
    source = HuggingFace(
        "json",
        data_files=files_of["a"],
        valid_data_files=files_of["b"],
        valid_split="validation",
        streaming=streaming,
    )
    assert (texts(source, "train"), texts(source, "valid")) == (["a"], ["b"])


@pytest.mark.parametrize(
    "data_files, valid_data_files",
    [(("*.jsonl", "a.*"), ()), (("*.jsonl",), ("a.jsonl",)), (("b.jsonl",), ("a*", "a*"))],
)
def test_hugging_face_file_that_two_patterns_select_is_an_error(tmp_path, data_files, valid_data_files):
    for name in ("a", "b"):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": name}])
    source = HuggingFace(str(tmp_path), data_files=data_files, valid_data_files=valid_data_files)
    with pytest.raises(UserError, match=r"data_files and valid_data_files select .*/a\.jsonl 2 times, it must be once"):
        source.fingerprint()


@pytest.mark.parametrize("streaming", [False, True])
def test_hugging_face_gives_pairs_in_a_field_of_a_field(tmp_path, streaming):
    path = write_lines(tmp_path / "a.jsonl", [{"translation": {"en": "a", "de": "x"}}] * 3)
    source = HuggingFace(
        "json", data_files=(path,), streaming=streaming, text_field="translation.en", target_field="translation.de"
    )
    source.prefix = "to German: "
    assert texts(source, "train") + texts(source, "valid") == [("to German: a", "x")] * 3


@pytest.mark.parametrize("streaming", [False, True])
def test_hugging_face_class_is_given_by_its_name(tmp_path, streaming):
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    rows = {"text": ["a", "b", "c"], "label": [1, 0, None]}
    datasets.Dataset.from_dict(rows, features).save_to_disk(str(tmp_path / "set"))
    source = HuggingFace(str(tmp_path / "set"), target_field="label", streaming=streaming, valid_fraction=1e-9)
    source.on_error, skipped = "skip", collections.Counter()
    assert texts(source, "train", skipped) == [("a", "good"), ("b", "bad")] and skipped == {"broken records": 1}


def test_hugging_face_sees_a_file_that_changes_while_it_runs(tmp_path):
    path = tmp_path / "a.jsonl"
    source = HuggingFace("json", data_files=(write_lines(path, [{"text": "one"}]),), valid_fraction=1e-9)
    assert texts(source, "train") == ["one"]
    write_lines(path, [{"text": "another"}])
    os.utime(path, ns=(0, 0))
    assert texts(source, "train") == ["another"]


@pytest.mark.parametrize("streaming", [False, True])
def test_hugging_face_row_of_the_wrong_type_is_named_or_counted(tmp_path, streaming):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {"text": None}])
    source = HuggingFace("json", data_files=(path,), streaming=streaming, valid_fraction=1e-9)
    place = "json train shard 0" if streaming else "json train"
    with pytest.raises(UserError, match=rf"{place}, row 1 \(from 0\): field 'text' holds NoneType"):
        texts(source, "train")
    source.on_error, skipped = "skip", collections.Counter()
    assert texts(source, "train", skipped) == ["a"] and skipped == {"broken records": 1}


BROKEN = {
    "bad.jsonl": ("json", b'{"text": "x"}\n{"tex\n'),
    "bad.parquet": ("parquet", b"PAR1 and no more"),
    "bad.txt": ("text", b"good\nbad \xff\n"),
    "bad.jsonl.gz": ("json", gzip.compress(b'{"text": "x"}\n' * 1000)[:-20]),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_hugging_face_broken_file_gets_one_line(tmp_path, name, streaming):
    kind, content = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    source = HuggingFace(kind, data_files=(str(tmp_path / name),), streaming=streaming)
    said = rf"config\.data\.source\.path is '{kind}', data_files .*/{name}: datasets cannot read it \(.+\)$"
    with pytest.raises(UserError, match=said):
        texts(source, "train")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/no/such/folder", r"datasets cannot read it \(Could"),
        (
            "nobody/nothing",
            r"the hub does not respond \(Could.*and the cache of datasets does not have it",
        ),  # no network
    ],
)
def test_hugging_face_what_is_not_there_gets_one_line(path, said, streaming):
    source = HuggingFace(path, streaming=streaming)
    for ask in (source.fingerprint, lambda: source.shards("train")):
        with pytest.raises(UserError, match=rf"config\.data\.source\.path is '{path}': {said}"):
            ask()


def test_hugging_face_unknown_names_suggest_the_nearest(tmp_path):
    there = write_parquet(tmp_path / "set")
    with pytest.raises(UserError, match=r"config\.data\.source\.text_field is 'txt', did you mean 'text'\?"):
        texts(HuggingFace(**there, text_field="txt"), "train")
    with pytest.raises(UserError, match=r"config\.data\.source\.train_split is 'trian', did you mean 'train'\?"):
        HuggingFace(**there, train_split="trian").shards("train")
    with pytest.raises(UserError, match=r"cannot read it \(BuilderConfig 'en' not found"):
        HuggingFace(**there, name="en").shards("train")


def test_hugging_face_fingerprint_knows_how_a_file_is_read(tmp_path):
    (tmp_path / "x").write_text('{"text": "a"}\n')
    kinds = [HuggingFace(kind, data_files=(str(tmp_path / "x"),)).fingerprint() for kind in ("json", "text", "csv")]
    assert len(set(kinds)) == 3


def test_hugging_face_fingerprint_is_of_the_content_not_of_its_place(tmp_path):
    paths = [tmp_path / name / "x.jsonl" for name in "abc"]
    for path, text in zip(paths, ("one", "one", "two"), strict=True):
        path.parent.mkdir()
        write_lines(path, [{"text": text}])
    a, b, c = (HuggingFace("json", data_files=(str(path),)).fingerprint() for path in paths)
    assert a == b != c


def test_hugging_face_fields_that_need_others_are_problems():
    assert list(HuggingFace("json", data_files="a.jsonl").problems(None)) == [
        "config.data.source.data_files is 'a.jsonl', it must be a tuple of names"
    ]
    assert list(HuggingFace("json", valid_data_files=("a",)).problems(None)) == [
        "config.data.source.valid_data_files needs config.data.source.data_files",
        "config.data.source.valid_data_files needs config.data.source.valid_split='validation'",
    ]


def test_hugging_face_missing_package_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"which needs the package datasets: pip install 'pretrainax\[data\]'"):
        HuggingFace("json").fingerprint()
