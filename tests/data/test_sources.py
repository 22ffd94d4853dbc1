"""Each source gives its documents, splits them, notices changes, and says what is wrong with its input."""

import collections
import gzip
import importlib
import json
import pickle
import subprocess
import sys

import pytest

from pretrainax.config import UserError
from pretrainax.data import files, sources
from pretrainax.data.sources import TFDS, JsonLines, PythonDocs, TextFiles


def texts(source, split, skipped=None):
    skipped = collections.Counter() if skipped is None else skipped
    return [text for shard in source.shards(split) for text in source.read(shard, skipped)]


def write_lines(path, lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)


# --- PythonDocs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def docs():
    """A few modules in place of 1,500: (source, shard)."""
    modules = {m.name: m for split in ("train", "valid") for shard in PythonDocs().shards(split) for m in shard}
    return modules


def test_python_docs_covers_the_library_and_the_packages(docs):
    assert {"json.decoder", "pydoc_data.topics", "numpy.linalg", "scipy.stats", "jax", "flax.core", "optax"} <= set(
        docs
    )


def test_python_docs_leaves_tests_out(docs):
    parts = {part for name in docs for part in name.split(".")}
    assert not parts & {"test", "tests", "conftest", "idle_test", "site-packages"}


def test_python_docs_gives_names_and_docstrings(docs):
    (text,) = PythonDocs().read([docs["json.decoder"]], collections.Counter())
    assert "json.decoder.JSONDecoder.raw_decode\n\nDecode a JSON document from" in text


def test_python_docs_gives_each_topic_of_the_language_reference(docs):
    topics = list(PythonDocs().read([docs["pydoc_data.topics"]], collections.Counter()))
    assert len(topics) > 50 and any(topic.startswith('The "while" statement') for topic in topics)


def test_python_docs_validation_is_about_three_percent_of_the_modules(docs):
    valid = [m for shard in PythonDocs().shards("valid") for m in shard]
    assert 0.015 < len(valid) / len(docs) < 0.045  # 0.03 of 2,000 modules has a standard deviation of 0.004


def test_python_docs_splits_share_no_module():
    train, valid = ({m.name for shard in PythonDocs().shards(s) for m in shard} for s in ("train", "valid"))
    assert not train & valid


def test_python_docs_order_is_fixed():
    assert PythonDocs().shards("train") == PythonDocs().shards("train")


def test_python_docs_counts_a_module_that_does_not_parse(tmp_path):
    broken, good = tmp_path / "a.py", tmp_path / "b.py"
    broken.write_text("print 'no'")
    good.write_text('"""Good."""')
    skipped = collections.Counter()
    shard = [sources.Module("a", str(broken)), sources.Module("b", str(good))]
    assert list(PythonDocs().read(shard, skipped)) == ["b\n\nGood."]
    assert skipped == {"modules that do not parse": 1}


def test_python_docs_runs_nothing_of_what_it_reads(tmp_path):
    module = tmp_path / "a.py"
    module.write_text('"""Doc."""\nraise SystemExit(3)')
    assert list(PythonDocs().read([sources.Module("a", str(module))], collections.Counter())) == ["a\n\nDoc."]


def test_python_docs_survives_a_lone_surrogate(tmp_path):
    module = tmp_path / "a.py"
    module.write_text('"""Doc \\ud800."""')
    assert list(PythonDocs().read([sources.Module("a", str(module))], collections.Counter())) == ["a\n\nDoc ?."]


# --- text files ----------------------------------------------------------------------------------------------------


def test_text_holds_out_the_last_characters_of_each_file(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    (tmp_path / "b.txt").write_text("äöü€" * 25)  # characters, not bytes
    source = TextFiles(str(tmp_path), valid_fraction=0.1)
    assert texts(source, "train") == ["0123456789" * 9, ("äöü€" * 25)[:90]]
    assert texts(source, "valid") == ["0123456789", ("äöü€" * 25)[90:]]


def test_text_valid_path_holds_nothing_out(tmp_path):
    (tmp_path / "a.txt").write_text("train")
    (tmp_path / "b.txt").write_text("valid")
    source = TextFiles(str(tmp_path / "a.txt"), valid_path=str(tmp_path / "b.txt"))
    assert (texts(source, "train"), texts(source, "valid")) == (["train"], ["valid"])


def test_text_folder_is_read_in_depth_and_order(tmp_path):
    (tmp_path / "z").mkdir()
    for name in ("b.txt", "a.txt", "z/c.txt", "notes.md"):
        (tmp_path / name).write_text(f"{name:.<20}")
    train = texts(TextFiles(str(tmp_path), valid_path=str(tmp_path)), "train")
    assert [t.rstrip(".") for t in train] == ["a.txt", "b.txt", "z/c.txt"]


def test_text_glob_names_other_endings(tmp_path):
    (tmp_path / "notes.md").write_text("hello")
    assert texts(TextFiles(str(tmp_path / "*.md"), valid_path=str(tmp_path / "*.md")), "valid") == ["hello"]


@pytest.mark.parametrize("line", ["äö line\n", "€"], ids=["lines", "no line end"])
def test_text_big_file_is_cut_without_loss(tmp_path, monkeypatch, line):
    monkeypatch.setattr(files, "SHARD_BYTES", 100)
    (tmp_path / "a.txt").write_text(line * 1000)
    shards = list(files.ranges(str(tmp_path / "a.txt"), 0, (tmp_path / "a.txt").stat().st_size, longest_line=50))
    parts = [next(TextFiles("").read(shard, collections.Counter())) for shard in shards]
    assert "".join(parts) == line * 1000 and len(parts) > 10


def test_text_that_is_not_utf8_names_file_and_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\nfine\nbad \xff here\n" + b"fine\n" * 100)
    with pytest.raises(UserError, match=r"a\.txt:3: byte 0xff is not UTF-8"):
        texts(TextFiles(str(tmp_path)), "train")


def test_text_folder_without_text_says_so(tmp_path):
    with pytest.raises(UserError, match=r"config\.data\.source\.path is .*: no \.txt file below the folder"):
        TextFiles(str(tmp_path)).fingerprint()


def test_text_glob_without_match_says_so(tmp_path):
    with pytest.raises(UserError, match=r"config\.data\.source\.valid_path is .*: no such file"):
        (tmp_path / "a.txt").write_text("x")
        TextFiles(str(tmp_path), valid_path=str(tmp_path / "*.md")).fingerprint()


# --- what files share ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [TextFiles, JsonLines])
def test_missing_path_is_a_problem_of_the_config(source):
    (problem,) = source("/no/such/folder").problems(None)
    assert problem == "config.data.source.path is '/no/such/folder', which does not exist"


@pytest.mark.parametrize("fraction", [0, 1, -0.5])
def test_impossible_fraction_is_a_problem_of_the_config(tmp_path, fraction):
    (problem,) = TextFiles(str(tmp_path), valid_fraction=fraction).problems(None)
    assert problem == f"config.data.source.valid_fraction is {fraction}, it must be between 0 and 1"


def test_fingerprint_notices_a_change_of_one_byte_with_the_same_time(tmp_path):
    import os

    path = tmp_path / "a.txt"
    path.write_text("abc")
    before, stat = TextFiles(str(path)).fingerprint(), path.stat()
    path.write_text("abd")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert TextFiles(str(path)).fingerprint() != before


def test_fingerprint_is_of_the_content_not_of_its_place(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("abc")
    assert TextFiles(str(tmp_path / "a.txt")).fingerprint() == TextFiles(str(tmp_path / "b.txt")).fingerprint()


def test_fingerprint_depends_on_the_settings(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    a, b = (TextFiles(str(tmp_path), valid_fraction=f).fingerprint() for f in (0.1, 0.2))
    assert a != b


# --- JSON lines ----------------------------------------------------------------------------------------------------


def test_json_plain_and_gzip_hold_the_same_documents(tmp_path):
    plain = write_lines(tmp_path / "a.jsonl", [{"text": f"document {i}"} for i in range(500)])
    with open(plain, "rb") as f, gzip.open(tmp_path / "b.jsonl.gz", "wb") as g:
        g.write(f.read())
    a, b = (JsonLines(str(tmp_path / name)) for name in ("a.jsonl", "b.jsonl.gz"))
    assert texts(a, "train") == texts(b, "train")
    assert texts(a, "valid") == texts(b, "valid")


def test_json_splits_hold_every_document_once(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": f"document {i}"} for i in range(500)])
    source = JsonLines(path, valid_fraction=0.2)
    train, valid = texts(source, "train"), texts(source, "valid")
    assert sorted(train + valid) == sorted(f"document {i}" for i in range(500))
    assert 60 < len(valid) < 140  # 100 expected, standard deviation 9


def test_json_equal_documents_are_in_one_split(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": f"document {i % 50}"} for i in range(200)])
    source = JsonLines(path, valid_fraction=0.5)
    assert not set(texts(source, "train")) & set(texts(source, "valid"))


def test_json_reads_the_named_field(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "no", "body": "yes"}])
    assert texts(JsonLines(path, valid_path=path, text_field="body"), "train") == ["yes"]


def test_json_big_file_is_cut_without_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SHARD_BYTES", 100)
    path = write_lines(tmp_path / "a.jsonl", [{"text": f"document {i}"} for i in range(200)])
    source = JsonLines(path, valid_path=path)
    assert len(source.shards("train")) > 10
    assert texts(source, "train") == [f"document {i}" for i in range(200)]


BROKEN = {
    '{"text": "x"\n': "broken JSON at column 13 ",
    '["text"]\n': "a JSON object is needed, not list",
    '{"txet": "x"}\n': r"no field 'text', did you mean 'txet'\? \(set config.data.source.text_field\)",
    '{"text": 3}\n': "field 'text' holds int, it must be a string",
    '{"text": "\\ud800"}\n': "'utf-8' codec can't encode",
}


@pytest.mark.parametrize("line", BROKEN)
def test_json_broken_line_is_named(tmp_path, line):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "x"}, "\n", line, {"text": "y"}])
    with pytest.raises(UserError, match=rf"a\.jsonl:3: {BROKEN[line]}"):
        texts(JsonLines(path, valid_path=path), "train")


def test_json_broken_line_is_named_in_a_later_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SHARD_BYTES", 100)
    path = write_lines(tmp_path / "a.jsonl", [{"text": f"document {i}"} for i in range(200)] + ["{\n"])
    with pytest.raises(UserError, match=r"a\.jsonl:201: broken JSON"):
        texts(JsonLines(path, valid_path=path), "train")


def test_json_invalid_utf8_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2: 'utf-8' codec can't decode byte 0xff"):
        texts(JsonLines(str(tmp_path)), "train")


def test_json_skips_and_counts_broken_lines(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [*BROKEN, {"text": "x"}, {"text": "y"}])
    source, skipped = JsonLines(path, on_error="skip", valid_fraction=0.5), collections.Counter()
    assert sorted(texts(source, "train", skipped) + texts(source, "valid", skipped)) == ["x", "y"]
    assert skipped == {"broken lines": len(BROKEN)}


def test_json_truncated_gzip_is_named(tmp_path):
    content = gzip.compress(b'{"text": "x"}\n' * 1000)
    (tmp_path / "a.jsonl.gz").write_bytes(content[:-20])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz:\d+: the gzip file is broken here"):
        texts(JsonLines(str(tmp_path)), "train")


def test_json_unknown_reaction_is_a_problem_of_the_config(tmp_path):
    (problem,) = JsonLines(str(tmp_path), on_error="skipp").problems(None)
    assert problem == "config.data.source.on_error is 'skipp', did you mean 'skip'?"


# --- TFDS ----------------------------------------------------------------------------------------------------------

BUILDER = """
import tensorflow_datasets as tfds

class TinyTexts(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict({"text": tfds.features.Text()}))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(250), "validation": self._generate_examples(7)}

    def _generate_examples(self, count):
        for i in range(count):
            yield i, {"text": f"text {i} of {count}"}
"""


@pytest.fixture(scope="module")
def tfds_dir(tmp_path_factory):
    """A data set on disk, written as its author would."""
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
    with pytest.raises(UserError, match=r"config\.data\.source\.name is 'no_such_set': TFDS has no such data set"):
        TFDS("no_such_set", data_dir=tfds_dir).fingerprint()


def test_tfds_unknown_split_is_named(tfds_dir):
    with pytest.raises(UserError, match=r"config\.data\.source\.valid_split is 'valid', did you mean 'validation'\?"):
        TFDS("tiny_texts", data_dir=tfds_dir, valid_split="valid").shards("valid")


def test_tfds_unknown_field_is_named(tfds_dir):
    with pytest.raises(UserError, match=r"config\.data\.source\.text_field is 'txt', did you mean 'text'\?"):
        texts(TFDS("tiny_texts", data_dir=tfds_dir, text_field="txt"), "train")


# --- all -----------------------------------------------------------------------------------------------------------


def test_shards_pickle(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    (tmp_path / "a.txt").write_text("x" * 100)
    for source in (PythonDocs(), JsonLines(path), TextFiles(str(tmp_path))):
        shards = source.shards("train")
        assert pickle.loads(pickle.dumps(shards)) == shards


def test_sources_import_neither_jax_nor_tfds():
    heavy = ("jax", "flax", "optax", "tensorflow_datasets")
    code = f"import sys, pretrainax.prepare; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
