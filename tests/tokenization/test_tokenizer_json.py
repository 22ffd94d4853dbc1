"""Tests tokenizers exported to transformers: they have the same ids there, and importing them restores them."""

import functools
import json
import pathlib
import shutil
import sys

import pytest

from pretrainax.config import ModelConfig, UserError
from pretrainax.tokenization import ByteBPE, Characters, Unigram, WordPiece
from pretrainax.tokenization.huggingface import read_tokenizer
from pretrainax.tokenization.huggingface_export import write_tokenizer
from pretrainax.tokenization.tokenizer_json import tokenizer_json
from tests.support.huggingface_directories import (
    FIELDS,
    NEW,
    OLD,
    auto,
    directory,
    lines,
    new,
    old,
    same_ids,
    t5_spiece,
    unigram_scores,
)

OURS = {
    "unigram": (Unigram(vocab_size=600, num_sentinels=5), ModelConfig(family="encoder_decoder")),
    "wordpiece": (WordPiece(vocab_size=400), ModelConfig(family="encoder", num_token_types=2)),
    "bpe": (ByteBPE(vocab_size=400), ModelConfig(family="decoder")),
    "roberta_bpe": (ByteBPE(vocab_size=400, special_pieces="roberta"), ModelConfig(family="encoder")),
    "characters": (Characters(), ModelConfig(family="decoder")),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Returns a function that writes one of our tokenizers, and returns it with its directory."""

    @functools.cache
    def write(name):
        config, model = OURS[name]
        tokenizer, path = config.build(iter(lines())), str(tmp_path_factory.mktemp("written") / name)
        write_tokenizer(tokenizer, path, model)
        return tokenizer, path

    return write


# --- writing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
def test_transformers_gives_our_ids(name, written):
    tokenizer, path = written(name)
    scores = unigram_scores(tokenizer.model) if name == "unigram" else None
    same_ids(tokenizer, auto(path), scores=scores)
    assert len(auto(path)) == tokenizer.vocabulary.size


@pytest.mark.parametrize("name", OURS)
def test_transformers_knows_our_special_ids(name, written):
    tokenizer, path = written(name)
    theirs = auto(path)
    assert {f: getattr(theirs, f"{f}_token_id") for f in FIELDS} == {
        f: getattr(tokenizer.vocabulary, f) for f in FIELDS
    }
    sentinels = [theirs.convert_tokens_to_ids(f"<extra_id_{n}>") for n in range(len(tokenizer.vocabulary.sentinels))]
    assert sentinels == list(tokenizer.vocabulary.sentinels)
    assert theirs.model_max_length == 512 and theirs.decode(tokenizer.encode("sa ke")).strip() == "sa ke"


@pytest.mark.parametrize("name", OURS)
def test_what_was_written_is_read_back(name, written):
    tokenizer, path = written(name)
    back = read_tokenizer(path)
    assert (back.fingerprint, back.vocabulary) == (tokenizer.fingerprint, tokenizer.vocabulary)


@pytest.mark.parametrize("name", ["unigram", "bpe"])
def test_a_newer_tokenizer_json_is_what_counts(name, written, tmp_path):
    shutil.copytree(written(name)[1], tmp_path / "more")
    more = auto(tmp_path / "more")
    more.add_tokens(["<tool>"], special_tokens=True)
    more.save_pretrained(tmp_path / "more")
    assert read_tokenizer(str(tmp_path / "more")).vocabulary.size == written(name)[0].vocabulary.size + 1


AROUND = {
    "unigram": ("a</s>", "a</s>b</s>"),
    "wordpiece": ("[CLS]a[SEP]", "[CLS]a[SEP]b[SEP]"),
    "bpe": ("a", "ab"),
    "roberta_bpe": ("<s>a</s>", "<s>a</s></s>b</s>"),
    "characters": ("a", "ab"),
}


@pytest.mark.parametrize("name", OURS)
def test_transformers_puts_the_usual_around_a_text(name, written):
    theirs = auto(written(name)[1])
    single, pair = theirs("a"), theirs("a", "b")
    assert ("".join(single.tokens()), "".join(pair.tokens())) == AROUND[name]
    assert pair.get("token_type_ids", "none") == ([0, 0, 0, 1, 1] if name == "wordpiece" else "none")


def test_a_mask_takes_the_space_before_it(written):
    theirs = auto(written("roberta_bpe")[1])
    assert theirs.convert_ids_to_tokens(theirs("a <mask>").input_ids) == ["<s>", "a", "<mask>", "</s>"]


@pytest.mark.parametrize("model_type", ["bert", "modernbert", "t5", "gpt2", "llama", "mistral", "gemma3_text", "qwen3"])
def test_the_class_of_the_model_changes_no_id(model_type, written, tmp_path):
    tokenizer, path = written("bpe")
    shutil.copytree(path, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": model_type}))
    same_ids(tokenizer, auto(tmp_path / "model"))


@pytest.mark.parametrize("name", OLD)
def test_a_tokenizer_that_was_read_is_written(name, tmp_path):
    tokenizer = read_tokenizer(old(name))
    write_tokenizer(tokenizer, str(tmp_path), ModelConfig(family="encoder_decoder"))
    same_ids(tokenizer, auto(tmp_path), scores=unigram_scores(t5_spiece()) if name == "t5" else None)
    back = read_tokenizer(str(tmp_path))
    assert (back.fingerprint, back.vocabulary) == (tokenizer.fingerprint, tokenizer.vocabulary)


@pytest.mark.parametrize("name", NEW)
def test_tokenizer_json_is_kept_byte_for_byte(name, tmp_path):
    write_tokenizer(read_tokenizer(new(name)), str(tmp_path), ModelConfig())
    assert (tmp_path / "tokenizer.json").read_bytes() == (pathlib.Path(new(name)) / "tokenizer.json").read_bytes()


def test_a_sentencepiece_model_without_a_counterpart_is_refused(tmp_path):
    tokenizer = read_tokenizer(directory(tmp_path / "word", spiece__model=t5_spiece(model_type="word")))
    with pytest.raises(UserError, match="it must be unigram or BPE"):
        write_tokenizer(tokenizer, str(tmp_path / "out"), ModelConfig())


# --- SentencePiece's classes ---------------------------------------------------------------------------------------


def test_a_protobuf_that_is_too_old_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", None)
    with pytest.raises(UserError, match="requires a newer protobuf: pip install -U protobuf"):
        tokenizer_json(OURS["unigram"][0].build(iter(lines())))


def test_a_damaged_model_is_an_error():
    tokenizer = OURS["unigram"][0].build(iter(lines()))
    tokenizer.model = tokenizer.model[:-3]
    with pytest.raises(UserError, match="the SentencePiece model is damaged"):
        tokenizer_json(tokenizer)


@pytest.mark.parametrize("kind", ["WORD", "CHAR"])
def test_models_that_are_neither_unigram_nor_bpe_are_refused(kind):
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    tokenizer = OURS["unigram"][0].build(iter(lines()))
    model = ModelProto.FromString(tokenizer.model)
    model.trainer_spec.model_type = model.trainer_spec.ModelType.Value(kind)
    tokenizer.model = model.SerializeToString()
    with pytest.raises(UserError, match="it must be unigram or BPE"):
        tokenizer_json(tokenizer)
