"""Writes Hugging Face directories with small tokenizers of every kind; transformers is the reference."""

import functools
import io
import json
import pathlib
import random
import shutil
import tempfile
import textwrap
import unicodedata

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from pretrainax.tokenization import WordPiece

FIELDS = ("pad", "bos", "eos", "unk", "cls", "sep", "mask")
NASTY = [
    "",
    "\n",
    "\n\n",
    "a b",
    "Hello World. It's 1234 o'clock!",
    "  two  spaces  ",
    "\tx\ty\r\n z\n\nend",
    "    def f(x):\n        return {'a': x[0]}  # 10 %\n",
    "héllo wörld ﬁ ½ İstanbul e\u0301",
    "漢字かな交じり文。，年年歲歲花相似",
    "😀👩‍👩‍👧 \U0001f1e9\U0001f1ea",
    "\0 \u200b\u3000\u2028x",
    "x" * 300,
    "a\u2581b \u2581",
]


@functools.cache
def lines() -> list[str]:
    """Returns words of a made-up language, some Python code and some Chinese."""
    rng = random.Random(0)
    words = ["".join(rng.choices("aeioustrnlkm", k=rng.randint(1, 7))) for _ in range(400)]
    prose = [" ".join(rng.choices(words, k=9)).capitalize() + ".\n" for _ in range(600)]
    code = pathlib.Path(textwrap.__file__).read_text().splitlines(keepends=True)
    return prose + code + ["漢字かな交じり文。\n", "年年歲歲花相似，歲歲年年人不同。\n"] * 9


TEXTS = [*NASTY, *lines()[::7], "".join(lines()[600:650])]


def directory(path: pathlib.Path, **files) -> str:
    """Writes files by name ("__" replaces "."); the content is bytes, a string, or an object that is stored as JSON."""
    path.mkdir()
    for name, content in files.items():
        content = json.dumps(content) if isinstance(content, (dict, list)) else content
        path.joinpath(name.replace("__", ".")).write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@functools.cache
def pieces_of_words() -> str:
    vocabulary = json.loads(WordPiece(vocab_size=400).build(iter(lines())).model)["model"]["vocab"]
    return "".join(f"{piece}\n" for piece in sorted(vocabulary, key=vocabulary.get))


@functools.cache
def pieces_of_bytes(*special: str) -> dict:
    """Returns vocab.json and merges.txt of a byte-level BPE."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = {"special_tokens": list(special), "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(lines(), trainers.BpeTrainer(vocab_size=500, **options))
    model = json.loads(tokenizer.to_str())["model"]
    merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
    return {"vocab__json": model["vocab"], "merges__txt": f"#version: 0.2\n{merges}"}


@functools.cache
def spiece(**options) -> bytes:
    model = io.BytesIO()
    options = {"vocab_size": 500, "minloglevel": 2, "num_threads": 1} | options
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines()), model_writer=model, **options)
    return model.getvalue()


def t5_spiece(**options) -> bytes:
    return spiece(pad_id=0, eos_id=1, unk_id=2, bos_id=-1, **options)


def llama_spiece() -> bytes:
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
    return spiece(model_type="bpe", vocab_size=700, allow_whitespace_only_pieces=True, **plain)


def llama3() -> str:
    """Returns a tokenizer.json whose special pieces are not in the vocabulary of its model."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    pattern = tokenizers.Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(lines(), trainer)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", pair=None, special_tokens=[("<|begin_of_text|>", 500)]
    )
    return tokenizer.to_str(pretty=True)


def gpt_neox() -> str:
    """Returns a byte-level tokenizer.json with added tokens of 2 to 8 spaces; GPT-NeoX has up to 24 spaces."""
    files = pieces_of_bytes("<|endoftext|>", "<|padding|>")
    merges = [tuple(line.split(" ")) for line in files["merges__txt"].splitlines()[1:]]
    tokenizer = tokenizers.Tokenizer(models.BPE(files["vocab__json"], merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|padding|>"])
    tokenizer.add_tokens([tokenizers.AddedToken(" " * n, normalized=True) for n in range(8, 1, -1)])
    return tokenizer.to_str(pretty=True)


def gemma_spiece() -> bytes:
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False}
    special = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "pad_piece": "<pad>", "bos_piece": "<bos>"}
    special |= {"eos_piece": "<eos>", "user_defined_symbols": "<mask>,\n,\n\n,<start_of_turn>"}
    plain |= {"byte_fallback": True, "allow_whitespace_only_pieces": True}
    return spiece(model_type="bpe", vocab_size=700, **plain, **special)


ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
EXTRA = [f"<extra_id_{n}>" for n in range(100)]
OLD = {  # as transformers 4 saved them on the hub
    "bert": lambda: {"vocab__txt": pieces_of_words(), "config__json": {"model_type": "bert"}},
    "bert_cased": lambda: {
        "vocab__txt": pieces_of_words(),
        "tokenizer_config__json": {"do_lower_case": False},
        "config__json": {"model_type": "bert"},
    },
    "roberta": lambda: pieces_of_bytes(*ROBERTA) | {"config__json": {"model_type": "roberta"}},
    "gpt2": lambda: pieces_of_bytes("<|endoftext|>") | {"config__json": {"model_type": "gpt2"}},
    "gpt2_padded": lambda: (
        pieces_of_bytes("<|endoftext|>")
        | {
            "added_tokens__json": {"[PAD]": 500},
            "special_tokens_map__json": {
                "bos_token": {"content": "<|endoftext|>", "lstrip": False},
                "eos_token": "<|endoftext|>",
                "unk_token": "<|endoftext|>",
                "pad_token": "[PAD]",
            },
            "config__json": {"model_type": "gpt2"},
        }
    ),
    "t5": lambda: {
        "spiece__model": t5_spiece(),
        "special_tokens_map__json": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        "tokenizer_config__json": {"extra_ids": 100, "additional_special_tokens": EXTRA},
        "config__json": {"model_type": "t5"},
    },
    "byt5": lambda: {
        "tokenizer_config__json": {"tokenizer_class": "ByT5Tokenizer"},
        "config__json": {"model_type": "byt5"},
    },
    "llama": lambda: {
        "tokenizer__model": llama_spiece(),
        "tokenizer_config__json": {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
        | {"unk_token": {"__type": "AddedToken", "content": "<unk>"}},
        "config__json": {"model_type": "llama"},
    },
    "gemma": lambda: {
        "tokenizer__model": gemma_spiece(),
        "tokenizer_config__json": {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>"}
        | {"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"},
        "config__json": {"model_type": "gemma"},
    },
    "llama3": lambda: {
        "tokenizer__json": llama3(),
        "tokenizer_config__json": {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
        | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": {"501": {"content": "<|end_of_text|>"}},
        },
        "config__json": {"model_type": "llama"},
    },
    "gpt_neox": lambda: {
        "tokenizer__json": gpt_neox(),
        "tokenizer_config__json": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
        | {"tokenizer_class": "PreTrainedTokenizerFast"},
        "config__json": {"model_type": "olmo2"},
    },
}


def scored_pieces(**options) -> list[tuple[str, float]]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=spiece(**options))
    return [(processor.id_to_piece(i), processor.get_score(i)) for i in range(processor.get_piece_size())]


def words_with_ends() -> dict:
    """Returns pieces like GPT-1's: the last piece of a word ends with </w>."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    options = {"special_tokens": ["<unk>"], "end_of_word_suffix": "</w>", "show_progress": False}
    tokenizer.train_from_iterator(map(str.lower, lines()), trainers.BpeTrainer(vocab_size=600, **options))
    model = json.loads(tokenizer.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(pair) for pair in model["merges"]]}


def qwen() -> dict:
    files = pieces_of_bytes("<|endoftext|>")
    merges = [tuple(line.split(" ")) for line in files["merges__txt"].splitlines()[1:]]
    return {"vocab": files["vocab__json"], "merges": merges}


MADE = {  # classes of transformers 5 that need a tokenizer.json, and the functions that create it
    "qwen2": ("Qwen2Tokenizer", qwen),
    "gpt1": ("OpenAIGPTTokenizer", words_with_ends),
    "albert": (
        "AlbertTokenizer",
        lambda: {
            "vocab": scored_pieces(pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, control_symbols="[CLS],[SEP],[MASK]")
        },
    ),
    "xlm_roberta": (
        "XLMRobertaTokenizer",
        lambda: {"vocab": [*scored_pieces(bos_id=0, pad_id=1, eos_id=2, unk_id=3), ("<mask>", 0.0)]},
    ),
}
NEW = [*(name for name in OLD if name != "byt5"), *MADE]

_FOLDER = tempfile.TemporaryDirectory(prefix="huggingface")  # deleted when this process ends


def auto(path):
    """Returns the AutoTokenizer of a path, which is the reference."""
    transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")
    return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)


@functools.cache
def old(name: str) -> str:
    """Writes a directory of `OLD`."""
    return directory(pathlib.Path(_FOLDER.name) / name, **OLD[name]())


@functools.cache
def new(name: str) -> str:
    """Writes the directory that transformers 5 saves, from the old files or from its own class."""
    path = pathlib.Path(_FOLDER.name) / f"{name}-new"
    if name in OLD:
        auto(old(name)).save_pretrained(path)
        shutil.copy(pathlib.Path(old(name)) / "config.json", path)
    else:
        transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")
        of_class, pieces = MADE[name]
        getattr(transformers, of_class)(**pieces()).save_pretrained(path)
    return str(path)


def same_ids(ours, theirs, texts=TEXTS, scores=None):
    for text, ids in zip(texts, theirs(texts, add_special_tokens=False).input_ids, strict=True):
        mine = ours.encode(text).tolist()
        if mine != ids and scores is not None:  # SentencePiece rounds to float32, 2^-24 of the score of a text
            assert sum(scores(mine)) == pytest.approx(sum(scores(ids)), rel=1e-6), text
            continue
        assert mine == ids, text


def assert_places(tokenizer, text: str):
    """Asserts that `locate` returns the ids of `encode` in order, and that a token covers each letter and digit."""
    ids, places = tokenizer.locate(text)
    np.testing.assert_array_equal(ids, tokenizer.encode(text))
    assert ids.dtype == places.dtype == np.int32 and places.shape == (len(ids), 2)
    assert (places[:, 0] <= places[:, 1]).all() and (np.diff(places[:, 0]) >= 0).all()
    assert not places.size or (places.min() >= 0 and places.max() <= len(text))
    held = {i for start, end in places.tolist() for i in range(start, end)}
    assert not [c for i, c in enumerate(text) if i not in held and unicodedata.category(c)[0] in "LN"], text


def unigram_scores(model: bytes):
    """Returns a function that scores ids, so that tests can compare two segmentations."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return lambda ids: [processor.get_score(i) for i in ids]
