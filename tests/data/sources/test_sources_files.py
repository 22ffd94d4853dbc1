"""Tests text files and JSON Lines: their documents, their splits, and the errors of broken files."""

import collections
import gzip
import lzma
import os

import pytest
import zstandard

from pretrainax.config import UserError
from pretrainax.data import files, long_lines
from pretrainax.data.sources import JsonLines, Parquet, TextFiles
from tests.support.reading import texts, write_lines

# --- text files ----------------------------------------------------------------------------------------------------


def test_text_holds_out_the_last_characters_of_each_file(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    (tmp_path / "b.txt").write_text("äöü€" * 25)  # characters, not bytes
    source = TextFiles(str(tmp_path), valid_fraction=0.1)
    assert texts(source, "train") == ["0123456789" * 9, ("äöü€" * 25)[:90]]
    assert texts(source, "valid") == ["0123456789", ("äöü€" * 25)[90:]]


def test_text_file_without_training_characters_is_only_for_validation(tmp_path):
    (tmp_path / "a.txt").write_text("x")  # 0.9 characters round to 0.
    source = TextFiles(str(tmp_path), valid_fraction=0.1)
    assert (texts(source, "train"), texts(source, "valid")) == ([], ["x"])


def test_text_valid_path_holds_nothing_out(tmp_path):
    (tmp_path / "a.txt").write_text("train")
    (tmp_path / "b.txt").write_text("valid")
    source = TextFiles(str(tmp_path / "a.txt"), valid_path=str(tmp_path / "b.txt"))
    assert (texts(source, "train"), texts(source, "valid")) == (["train"], ["valid"])


@pytest.mark.parametrize("path, valid_path", [("", "valid"), ("", "valid/../valid/b.txt"), ("**/*.txt", "*/b.txt")])
def test_files_for_validation_are_no_training_files(tmp_path, path, valid_path):
    (tmp_path / "valid").mkdir()
    (tmp_path / "a.txt").write_text("train")
    (tmp_path / "valid" / "b.txt").write_text("valid")
    source = TextFiles(str(tmp_path / path), valid_path=str(tmp_path / valid_path))
    assert (texts(source, "train"), texts(source, "valid")) == (["train"], ["valid"])


@pytest.mark.parametrize("path", ["**/en/**/*.txt", ""])
def test_file_that_several_paths_reach_is_read_once(tmp_path, path):
    (tmp_path / "en" / "en").mkdir(parents=True)
    for folder in ("en", "en/en"):
        (tmp_path / folder / "a.txt").write_text(folder)
    (tmp_path / "en" / "loop").symlink_to(tmp_path)
    source = TextFiles(str(tmp_path / path), valid_path=str(tmp_path / "en" / "en" / "a.txt"))
    assert texts(source, "train") == ["en"]


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
    with pytest.raises(UserError, match=r"config\.data\.source\.path is .*: no \.txt file below the folder$"):
        TextFiles(str(tmp_path)).fingerprint()


@pytest.mark.parametrize(
    "name, hint",
    [("a.md", "to read other files, set a glob: '{}/**/*.md'"), ("a.csv", "Csv(path='{}') reads its files")],
)
def test_a_folder_of_other_files_says_how_to_read_them(name, hint, tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / name).write_text("text\na\n")
    with pytest.raises(UserError) as caught:
        TextFiles(str(tmp_path)).fingerprint()
    assert str(caught.value).endswith(f"no .txt file below the folder; {hint.format(tmp_path)}")
    if "glob" in hint:
        assert len(TextFiles(f"{tmp_path}/**/*.md").shards("train")) == 1


def test_text_glob_without_match_says_so(tmp_path):
    with pytest.raises(UserError, match=r"config\.data\.source\.valid_path is .*: no such file"):
        (tmp_path / "a.txt").write_text("x")
        TextFiles(str(tmp_path), valid_path=str(tmp_path / "*.md")).fingerprint()


COMPRESS = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: zstandard.ZstdCompressor().compress(content),
}


@pytest.mark.parametrize("ending", COMPRESS)
def test_text_archive_holds_what_the_plain_file_does(tmp_path, monkeypatch, ending):
    monkeypatch.setattr(files, "SHARD_BYTES", 100)
    content = "äö line\n" * 500
    plain, packed = tmp_path / "plain" / "a.txt", tmp_path / "packed" / f"a.txt{ending}"
    for path, written in ((plain, content.encode()), (packed, COMPRESS[ending](content.encode()))):
        path.parent.mkdir()
        path.write_bytes(written)
    a, b = TextFiles(str(plain.parent), valid_fraction=0.25), TextFiles(str(packed.parent), valid_fraction=0.25)
    assert len(b.shards("train")) == 1 < len(texts(b, "train"))
    assert (texts(b, "train"), texts(b, "valid")) == (texts(a, "train"), texts(a, "valid"))
    assert "".join(texts(b, "train") + texts(b, "valid")) == content


def test_text_archive_that_is_not_utf8_names_file_and_line(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"fine\nfine\nbad \xff here\n" + b"fine\n" * 100))
    with pytest.raises(UserError, match=r"a\.txt\.gz:3: byte 0xff is not UTF-8"):
        texts(TextFiles(str(tmp_path)), "train")


def test_text_archive_that_is_cut_off_is_named(tmp_path):
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"fine\n" * 1000)[:-20])
    with pytest.raises(UserError, match=r"a\.txt\.xz:\d+: the xz file is broken here"):
        texts(TextFiles(str(tmp_path)), "train")


# --- all files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [TextFiles, JsonLines])
def test_missing_path_is_a_problem_of_the_config(source):
    (problem,) = source("/no/such/folder").problems(None)
    assert problem == "config.data.source.path is '/no/such/folder', which does not exist"


@pytest.mark.parametrize("fraction", [0, 1, -0.5])
def test_impossible_fraction_is_a_problem_of_the_config(tmp_path, fraction):
    (problem,) = TextFiles(str(tmp_path), valid_fraction=fraction).problems(None)
    assert problem == f"config.data.source.valid_fraction is {fraction}, it must be between 0 and 1"


def test_fingerprint_notices_a_change_of_one_byte_with_the_same_time(tmp_path):
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


@pytest.mark.parametrize(
    "source, name, content, reader",
    [
        (TextFiles, "a.jsonl", '{"text": "x"}\n', "JsonLines"),
        (TextFiles, "a.jsonl.gz", "", "JsonLines"),
        (TextFiles, "a.json", '{"text": "x"}\n', "JsonLines"),
        (TextFiles, "a.parquet", "", "Parquet"),
        (JsonLines, "a.txt", "some text\n", "TextFiles"),
        (JsonLines, "a.parquet", "", "Parquet"),
        (Parquet, "a.jsonl", '{"text": "x"}\n', "JsonLines"),
    ],
)
def test_file_that_another_source_reads_is_a_problem_of_the_config(tmp_path, source, name, content, reader):
    path = tmp_path / name
    path.write_text(content)
    (problem,) = source(str(path)).problems(None)
    field = "config.data.source"
    assert problem == f"{field}.path is '{path}', which is for {reader}: set {field} to {reader}(path='{path}')"


@pytest.mark.parametrize(
    "source, name, content",
    [
        (TextFiles, "a.txt", '{"text": "x"}\n'),  # The text may itself be JSON.
        (TextFiles, "a.md", "some text"),
        (TextFiles, "a.json", "[1, 2]"),
        (JsonLines, "a.txt", '{"text": "x"}\n'),
        (JsonLines, "a.json", '{"text": "x"}\n'),
    ],
)
def test_file_of_an_unusual_name_is_no_problem(tmp_path, source, name, content):
    (tmp_path / name).write_text(content)
    assert not list(source(str(tmp_path / name)).problems(None))


@pytest.mark.parametrize("number, text", [(3, "3"), (-12, "-12"), (2**70, str(2**70))])
def test_json_whole_number_is_its_decimal_text(tmp_path, number, text):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "x", "label": number}])
    assert texts(JsonLines(path, valid_path=path, target_field="label"), "train") == [("x", text)]
    assert texts(JsonLines(path, valid_path=path, text_field="label"), "train") == [text]


# --- JSON lines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", COMPRESS)
def test_json_archive_holds_what_the_plain_file_does(tmp_path, ending):
    plain = write_lines(tmp_path / "a.jsonl", [{"text": f"document {i}"} for i in range(500)])
    with open(plain, "rb") as f:
        (tmp_path / f"b.jsonl{ending}").write_bytes(COMPRESS[ending](f.read()))
    a, b = (JsonLines(str(tmp_path / name)) for name in ("a.jsonl", f"b.jsonl{ending}"))
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
    '["text"]\n': "a JSON object is needed, not list; a file of JSON lines has one object per line",
    "[\n": r"broken JSON at column 2 \(Expecting value\); a file of JSON lines has one object per line",
    '[{"text": "x"},\n': r"broken JSON at column 16 \(Expecting value\); a file of JSON lines has one object per line",
    "{\n": r"broken JSON at column 2 \(Expecting property name enclosed in double quotes\); a file of JSON lines has",
    '{"txet": "x"}\n': r"no field 'text', did you mean 'txet'\? \(set config.data.source.text_field\)",
    '{"text": 3.5}\n': "field 'text' holds float, it must be a string or a whole number",
    '{"text": true}\n': "field 'text' holds bool, it must be a string or a whole number",
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


def test_json_pairs_with_a_prefix(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"en": "That is good.", "de": "Das ist gut."}])
    source = JsonLines(
        path, valid_path=path, text_field="en", target_field="de", prefix="translate English to German: "
    )
    assert source.pairs and not JsonLines(path).pairs
    assert texts(source, "train") == [("translate English to German: That is good.", "Das ist gut.")]


def test_json_pairs_of_one_source_are_in_one_split(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": f"{i % 50}", "target": f"{i}"} for i in range(200)])
    source = JsonLines(path, target_field="target", valid_fraction=0.5)
    train, valid = ({pair[0] for pair in texts(source, split)} for split in ("train", "valid"))
    assert len(train | valid) == 50 and not train & valid


def test_json_prefix_changes_no_split(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": f"document {i}"} for i in range(200)])
    plain, prefixed = (texts(JsonLines(path, prefix=prefix, valid_fraction=0.5), "valid") for prefix in ("", "x "))
    assert ["x " + text for text in plain] == prefixed


@pytest.mark.parametrize(
    "record, message",
    [
        ({"text": "x", "tagret": "y"}, r"no field 'target', did you mean 'tagret'.*\? \(set .*\.target_field\)"),
        ({"text": "x", "target": 0.5}, "field 'target' holds float, it must be a string"),
        ({"text": None, "target": "y"}, "field 'text' holds NoneType, it must be a string"),
    ],
)
def test_json_broken_pair_is_named_or_counted(tmp_path, record, message):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a", "target": "b"}, record])
    source, skipped = JsonLines(path, valid_path=path, target_field="target"), collections.Counter()
    with pytest.raises(UserError, match=rf"a\.jsonl:2: {message}"):
        texts(source, "train")
    source.on_error = "skip"
    assert texts(source, "train", skipped) == [("a", "b")] and skipped == {"broken lines": 1}


LONG = "aé😀" * 10


@pytest.mark.parametrize("target_field, wanted", [(None, f"say: {LONG}"), ("target", (f"say: {LONG}", "short"))])
def test_json_long_lines_hold_the_same(tmp_path, monkeypatch, target_field, wanted):
    monkeypatch.setattr(long_lines, "LONG_LINE_BYTES", 10)
    path = write_lines(tmp_path / "a.jsonl", [{"text": LONG, "target": "short"}] * 2)
    source = JsonLines(path, valid_path=path, prefix="say: ", target_field=target_field)
    assert [d.decode() if isinstance(d, bytearray) else d for d in texts(source, "train")] == [wanted] * 2
