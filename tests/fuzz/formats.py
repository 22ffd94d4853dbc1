"""All formats of input files: a valid file, its damage, and its reader.

A reader uses its file like a run (it tokenizes, it iterates over all rows), so that every damage has an effect.
"""

import collections
import csv
import functools
import gzip
import json
import lzma
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from tests.fuzz.mutate import mutate_bytes, mutate_header, mutate_json, mutate_lines, within

Mutate = Callable[..., bytes]
TEXTS = ["The chef cooked the meal.", "  two  spaces\n", "漢字 😀 \u2581 \0", "<extra_id_0> [MASK] </s>", ""]


class Format(NamedTuple):
    make: Callable[[pathlib.Path], None]  # writes good files into a folder
    damage: Mapping[str, Mutate]  # by file name; one file is damaged at a time
    read: Callable[[pathlib.Path], None]


# --- tokenizers ----------------------------------------------------------------------------------------------------


def _use(tokenizer) -> None:
    for ids in tokenizer.encode_batch(TEXTS):
        assert ids.dtype == np.int32
        tokenizer.decode(ids)
    tokenizer.word_edges  # noqa: B018


def _saved(kind: str) -> Callable[[pathlib.Path], None]:
    def make(folder: pathlib.Path) -> None:
        from pretrainax.tokenization import ByteBPE, Characters, Unigram, WordPiece
        from tests.support.huggingface_directories import lines

        choice = {
            "unigram": Unigram(vocab_size=455),
            "wordpiece": WordPiece(vocab_size=360),
            "byte_bpe": ByteBPE(vocab_size=440),
            "characters": Characters(),
        }[kind]
        choice.build(iter(lines())).save(str(folder))

    return make


def _read_saved(folder: pathlib.Path) -> None:
    from pretrainax.tokenization.base import load_tokenizer

    _use(load_tokenizer(str(folder)))


def _read_model(name: str, file: str) -> Callable[[pathlib.Path], None]:
    """Returns a reader that passes a model file as `config.tokenizer.path`."""

    def read(folder: pathlib.Path) -> None:
        from pretrainax import tokenization

        _use(getattr(tokenization, name)(path=str(folder / file)).load())

    return read


def _old(name: str) -> Callable[[pathlib.Path], None]:
    def make(folder: pathlib.Path) -> None:
        from tests.support.huggingface_directories import old

        shutil.copytree(old(name), folder, dirs_exist_ok=True)

    return make


def _read_directory(folder: pathlib.Path) -> None:
    from pretrainax.tokenization.huggingface import read_tokenizer
    from pretrainax.tokenization.tokenizer_json import tokenizer_json

    tokenizer = read_tokenizer(str(folder))
    _use(tokenizer)
    tokenizer_json(tokenizer)  # as in an export


_OF_JSON = dict.fromkeys(
    ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "tokenizer.json"),
    mutate_json,
)


def _tokenizers() -> dict[str, Format]:
    def directory(name: str, *files: str) -> Format:
        return Format(_old(name), {f: _OF_JSON.get(f, mutate_bytes) for f in files}, _read_directory)

    model, described = {"spiece.model": mutate_bytes}, {"vocabulary.json": mutate_json}
    huggingface = {"tokenizer.json": mutate_json}
    return {
        "sentencepiece": Format(_saved("unigram"), model, _read_model("Unigram", "spiece.model")),
        "saved_sentencepiece": Format(_saved("unigram"), model | described, _read_saved),
        "saved_wordpiece": Format(_saved("wordpiece"), huggingface | described, _read_saved),
        "saved_characters": Format(_saved("characters"), {"characters.json": mutate_json} | described, _read_saved),
        "tokenizer_json": Format(_saved("byte_bpe"), huggingface, _read_model("ByteBPE", "tokenizer.json")),
        "directory_bert": directory("bert_cased", "vocab.txt", "tokenizer_config.json"),
        "directory_gpt2": directory("gpt2_padded", "vocab.json", "merges.txt", *list(_OF_JSON)[1:3]),
        "directory_t5": directory("t5", "spiece.model", *list(_OF_JSON)[:2]),
        "directory_llama": directory("llama", "tokenizer.model", "tokenizer_config.json"),
        "directory_llama3": directory("llama3", "tokenizer.json", "tokenizer_config.json"),
    }


# --- configs and weights -------------------------------------------------------------------------------------------


def _config(folder: pathlib.Path) -> None:
    from pretrainax import config
    from tests.support import tiny

    (folder / "config.json").write_text(config.dump(tiny.get_config("t5")))


def _read_config(folder: pathlib.Path) -> None:
    from pretrainax import config
    from tests.support import tiny

    config.dump(config.load(str(folder / "config.json")))
    config.differences(config.load(str(folder / "config.json")), tiny.get_config("t5"))


_FAMILIES = ("bert", "gpt2", "llama3_1", "gemma3", "t5_1_1", "deberta_v3", "modernbert", "bart", "electra_small")


def _weights(name: str) -> Callable[[pathlib.Path], None]:
    def make(folder: pathlib.Path) -> None:
        from tests.support.huggingface_weights import write_directory

        write_directory(folder / "hf", name)
        for file in (folder / "hf").iterdir():
            file.rename(folder / file.name)
        (folder / "hf").rmdir()

    return make


def _read_weights(folder: pathlib.Path) -> None:
    import jax

    from pretrainax.interop.architectures import is_huggingface_directory
    from pretrainax.interop.weights import DirectoryWeights
    from pretrainax.sharding.param_paths import parameter_names

    if is_huggingface_directory(str(folder)):
        source = DirectoryWeights(str(folder))
        source.verify()
        for path, x in zip(parameter_names(source.abstract), jax.tree.leaves(source.abstract), strict=True):
            source.read(path, tuple(map(slice, x.shape)))


def _several(folder: pathlib.Path) -> None:
    from pretrainax.interop.safetensors_files import Writer

    tensors = {f"layer.{i}.weight": (np.dtype(np.float32), (4, 8)) for i in range(6)}
    Writer(str(folder), tensors, shard_bytes=300)


def _read_tensors(folder: pathlib.Path) -> None:
    from pretrainax.interop.safetensors_files import Reader

    reader = Reader(str(folder))
    for name in reader.shapes:
        np.asarray(reader[name], np.float32).sum()


# --- text ----------------------------------------------------------------------------------------------------------

_RECORDS = [{"text": f"document {i} é字 😀", "n": i, "in": {"side": [i, None]}} for i in range(40)]
_PACKERS: dict[str, tuple[Callable, Callable]] = {
    ".gz": (gzip.decompress, functools.partial(gzip.compress, mtime=0)),
    ".xz": (lzma.decompress, lzma.compress),
}


def _pack(ending: str, content: bytes) -> bytes:
    if ending == ".zst":
        import zstandard

        return zstandard.compress(content)
    return _PACKERS[ending][1](content) if ending else content


def _unpack(ending: str, content: bytes) -> bytes:
    if ending == ".zst":
        import zstandard

        return zstandard.ZstdDecompressor().decompressobj().decompress(content)
    return _PACKERS[ending][0](content)


def _json_lines(ending: str) -> Format:
    name = f"a.jsonl{ending}"

    def make(folder: pathlib.Path) -> None:
        content = "".join(json.dumps(r, ensure_ascii=i % 2 == 0) + "\n" for i, r in enumerate(_RECORDS))
        (folder / name).write_bytes(_pack(ending, content.encode()))

    packer = functools.partial(_unpack, ending), functools.partial(_pack, ending)
    return Format(make, {name: within(*packer, mutate_lines) if ending else mutate_lines}, _reader("JsonLines", name))


def _squad(folder: pathlib.Path) -> None:
    asked = [
        {"id": str(i), "question": f"what is é{i}?", "answers": [{"text": "é", "answer_start": 0}]} for i in range(40)
    ]
    paragraphs = [{"context": "é字", "qas": asked[i::4]} for i in range(4)]
    (folder / "a.json").write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}], "version": "1"}))


def _conll(folder: pathlib.Path) -> None:
    (folder / "a.conll").write_text("".join(f"word{i} X B-A\né字 Y I-A\n\n" for i in range(40)))


def _table(name: str, kind: str) -> Format:
    def make(folder: pathlib.Path) -> None:
        with open(folder / name, "w", newline="", encoding="utf-8") as f:
            delimiter = "\t" if kind == "Tsv" else ","
            rows = [(i, text.replace("\n", " ").replace("\t", " ")) for i, text in enumerate(TEXTS * 40)]
            csv.writer(f, delimiter=delimiter).writerows([("id", "text"), *rows])

    return Format(make, {name: mutate_bytes}, _reader(kind, name))


def _reader(kind: str, name: str, **fields) -> Callable[[pathlib.Path], None]:
    def read(folder: pathlib.Path) -> None:
        from pretrainax.data import sources

        source = getattr(sources, kind)(str(folder / name), **fields)
        source.fingerprint()
        for split in ("train", "valid"):
            for shard in source.shards(split):
                for document in source.read(shard, collections.Counter()):
                    (document.decode() if isinstance(document, bytearray) else document).encode()

    return read


def _parquet(folder: pathlib.Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: [r[name] for r in _RECORDS] for name in ("text", "n")}
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=15)


def _array_record(folder: pathlib.Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(folder / "a.array_record"), "group_size:4")
    for record in _RECORDS:
        writer.write(json.dumps(record).encode())
    writer.close()


# --- files written by a run ----------------------------------------------------------------------------------------


def _checkpoint(folder: pathlib.Path) -> None:
    from tests.support.checkpoints import save_all

    save_all(folder / "checkpoints", [10])


def _read_checkpoint(folder: pathlib.Path) -> None:
    from tests.support.checkpoints import restore

    restore(folder / "checkpoints")


def _read_resealed(folder: pathlib.Path) -> None:
    """Reads a checkpoint whose manifest matches its damaged run.json."""
    from pretrainax.checkpoints import manifest

    (folder / "checkpoints" / "10" / manifest.MANIFEST).unlink()
    manifest.write_manifest(str(folder / "checkpoints" / "10"))
    _read_checkpoint(folder)


def formats() -> dict[str, Format]:
    """Returns all formats by name."""
    text = {f"json_lines{e.replace('.', '_')}": _json_lines(e) for e in ("", ".gz", ".zst", ".xz")}
    of_config = {f"config_{n}": Format(_weights(n), {"config.json": mutate_json}, _read_weights) for n in _FAMILIES}
    run_json, manifest = "checkpoints/10/run.json", "checkpoints/10/manifest.sha256"
    index, first = "model.safetensors.index.json", "model-00001-of-00003.safetensors"
    return {
        **_tokenizers(),
        "config": Format(_config, {"config.json": mutate_json}, _read_config),
        **of_config,
        "safetensors": Format(
            _weights("bert"),
            {"model.safetensors": lambda c, r: r.choice((mutate_bytes, mutate_header))(c, r)},
            _read_weights,
        ),
        "safetensors_index": Format(_several, {index: mutate_json, first: mutate_header}, _read_tensors),
        **text,
        "tsv": _table("a.tsv", "Tsv"),
        "csv": _table("a.csv", "Csv"),
        "parquet": Format(_parquet, {"a.parquet": mutate_bytes}, _reader("Parquet", "a.parquet")),
        "array_record": Format(
            _array_record, {"a.array_record": mutate_bytes}, _reader("ArrayRecord", "a.array_record", text_field="text")
        ),
        "conll": Format(_conll, {"a.conll": mutate_bytes}, _reader("ConllFiles", "a.conll")),
        "squad": Format(_squad, {"a.json": mutate_json}, _reader("SquadFiles", "a.json", text_field="question")),
        "checkpoint": Format(_checkpoint, {run_json: mutate_json, manifest: mutate_bytes}, _read_checkpoint),
        "checkpoint_resealed": Format(_checkpoint, {run_json: mutate_json}, _read_resealed),
    }
