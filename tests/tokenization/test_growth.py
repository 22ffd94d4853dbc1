"""Tests that reading rejects a tokenizer.json that makes text grow without bound, and accepts published ones."""

import json

import pytest
import tokenizers
from tokenizers import normalizers

from pretrainax.config import UserError
from pretrainax.tokenization import ByteBPE
from pretrainax.tokenization.growth import check_growth
from pretrainax.tokenization.huggingface import read_tokenizer
from pretrainax.tokenization.huggingface_export import write_tokenizer
from tests.support import tiny

TIMES = {
    "one letter": {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1001},
    "an expression": {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "a" * 1000},
    "an empty text": {"type": "Replace", "pattern": {"String": ""}, "content": "a" * 1000},
    "in front": {"type": "Prepend", "prepend": "a" * 1000},
    "again and again": {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40,
    },
    "nested": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [{"type": "NFKC"}] * 5}]},
}


@pytest.mark.parametrize("name", TIMES)
def test_a_tokenizer_that_makes_texts_endless_is_refused_in_one_line(name, tmp_path):
    ours = ByteBPE(vocab_size=265).build(iter(["Hello you and me"] * 30))
    write_tokenizer(ours, str(tmp_path), tiny.get_config("gpt").model)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(described | {"normalizer": TIMES[name]}))
    with pytest.raises(UserError, match=r"the normalizer of tokenizer\.json makes up to .* bytes of one byte"):
        read_tokenizer(str(tmp_path))


def test_a_decoder_that_does_so_is_refused_too():
    decoder = {"type": "Sequence", "decoders": [TIMES["one letter"]]}
    with pytest.raises(UserError, match="the decoder"):
        check_growth({"decoder": decoder})


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.StripAccents()]),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        normalizers.Sequence([normalizers.Replace("''", '"'), normalizers.Replace("``", '"'), normalizers.NFKD()]),
        normalizers.Replace(tokenizers.Regex(" {2,}"), "▁"),
        normalizers.BertNormalizer(),
        normalizers.ByteLevel(),
    ],
)
@pytest.mark.parametrize("text", ["\ufdfa", "aa ``İ字", "  x", "\u1f82\ufb2c"])
def test_what_is_published_is_read_and_grows_no_more_than_the_bound(normalizer, text):
    from pretrainax.tokenization.growth import _max_growth

    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.normalizer = normalizer
    described = json.loads(model.to_str())
    check_growth(described)
    grown = len(normalizer.normalize_str(text).encode())
    assert grown <= _max_growth(described["normalizer"]) * len(text.encode())
