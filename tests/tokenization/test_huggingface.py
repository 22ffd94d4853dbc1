"""Tests that tokenizers of Hugging Face directories, from transformers 4 and 5, return the ids of transformers."""

import json
import re
import shutil

import numpy as np
import pytest
import tokenizers
from tokenizers import pre_tokenizers

from pretrainax.config import Choice, DataConfig, Experiment, ModelConfig, UserError, from_json, to_json
from pretrainax.data.objectives import CausalLM, MaskedLM, SpanCorruption
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import TextFiles
from pretrainax.tokenization import ByteBPE, PretrainedTokenizer, WordPiece
from pretrainax.tokenization.base import load_tokenizer
from pretrainax.tokenization.huggingface import read_tokenizer
from pretrainax.tokenization.huggingface_export import loader, write_tokenizer
from tests.support.huggingface_directories import (
    FIELDS,
    MADE,
    NEW,
    OLD,
    TEXTS,
    assert_places,
    auto,
    directory,
    gemma_spiece,
    lines,
    llama3,
    llama_spiece,
    new,
    old,
    same_ids,
    spiece,
    t5_spiece,
    unigram_scores,
)

SPECIAL_TEXT = "a <s> </s><pad> <mask> [MASK] [CLS]b<extra_id_0> <|endoftext|> <|begin_of_text|><unk2> z"

# --- writing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_the_named_class_loads_an_export_with_the_same_ids(name, model_type, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")
    tokenizer, path = read_tokenizer(new(name)), str(tmp_path)
    write_tokenizer(tokenizer, path, ModelConfig(family="decoder"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    named = loader(path)
    assert named == ("PreTrainedTokenizerFast" if (name, model_type) == ("gpt2", "qwen2") else "AutoTokenizer")
    same_ids(tokenizer, getattr(transformers, named).from_pretrained(path))


@pytest.mark.parametrize("name", ["llama", "gemma", "bert", "gpt2"])  # the first two classes pad on the left
@pytest.mark.parametrize("file", ["tokenizer_config.json", "tokenizer.json", None])
def test_an_export_pads_and_truncates_on_the_side_of_the_imported_tokenizer(name, file, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")
    source, run, export = (tmp_path / folder for folder in ("source", "run", "export"))
    shutil.copytree(new(name), source)
    if file == "tokenizer_config.json":
        changes = {"padding_side": "left", "truncation_side": "left", "tokenizer_class": "PreTrainedTokenizerFast"}
        settings = json.loads((source / file).read_text()) | changes
        (source / file).write_text(json.dumps(settings))
    elif file:
        padded = tokenizers.Tokenizer.from_file(str(source / file))
        padded.enable_truncation(4, direction="left")
        padded.save(str(source / file))
    read_tokenizer(str(source)).save(str(run))
    write_tokenizer(load_tokenizer(str(run)), str(export), ModelConfig(family="decoder"))
    theirs, ours = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (source, export))
    assert (ours.padding_side, ours.truncation_side) == (theirs.padding_side, theirs.truncation_side)


# --- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OLD)
def test_ids_of_old_files_are_those_of_transformers(name):
    differs = {
        "llama": lambda text: text.startswith(" "),  # only transformers 5 drops a leading space
        "gemma": lambda text: (
            "\u2581" in text
        ),  # a space for transformers; three bytes for us, so that decoding restores the text
    }.get(name, lambda text: False)
    texts = [text for text in TEXTS if not differs(text)]
    scores = unigram_scores(t5_spiece()) if name == "t5" else None
    same_ids(read_tokenizer(old(name)), auto(old(name)), texts, scores)


@pytest.mark.parametrize("name", NEW)
def test_ids_of_new_files_are_those_of_transformers(name):
    same_ids(read_tokenizer(new(name)), auto(new(name)))


@pytest.mark.parametrize("name", OLD)
def test_places_are_those_of_the_text_as_it_is_given(name):
    for tokenizer in map(read_tokenizer, (old(name), new(name)) if name in NEW else (old(name),)):
        for text in (*TEXTS, SPECIAL_TEXT, "  Caf\u00e9  Z\u00fcrich \u6771\u4eac ko\u0301n  \U0001f600 kon"):
            assert_places(tokenizer, text)


@pytest.mark.parametrize("name", ["gpt2", "llama3", "gpt_neox"])
def test_tokens_of_bytes_and_of_spaces_spell_the_text(name):
    tokenizer = read_tokenizer(old(name))
    spellings = tokenizer.spellings()
    assert name != "gpt_neox" or spellings[500:] == [b" " * n for n in range(8, 1, -1)]
    for text in TEXTS:
        assert b"".join(spellings[i] for i in tokenizer.encode(text)) == text.encode()


def test_the_last_piece_of_a_word_of_gpt_1_spells_the_space_that_its_decoder_writes():
    tokenizer = read_tokenizer(new("gpt1"))
    ids = tokenizer.encode("the cat sat")
    spelled = [tokenizer.spellings()[i] for i in ids]
    assert b"".join(spelled).decode() == tokenizer.decode(ids) + " " == "the cat sat "
    begins, ends = (edges[ids].tolist() for edges in tokenizer.word_edges)
    assert not any(begins) and ends == [piece.endswith(b" ") for piece in spelled]


@pytest.mark.parametrize("name", OLD)
def test_special_ids_are_those_of_transformers(name):
    vocabulary, theirs = read_tokenizer(old(name)).vocabulary, auto(old(name))
    assert vocabulary.size == len(theirs)
    unk_is_text = theirs.unk_token_id == theirs.eos_token_id  # GPT-2 has no unk, because it has all bytes.
    for field in FIELDS:
        wanted = None if field == "unk" and unk_is_text else getattr(theirs, f"{field}_token_id")
        assert getattr(vocabulary, field) == wanted, field
    sentinels = {"t5": 100, "byt5": 125}.get(name, 0)
    assert list(vocabulary.sentinels) == [theirs.convert_tokens_to_ids(f"<extra_id_{n}>") for n in range(sentinels)]


@pytest.mark.parametrize("name", ["bert", "bert_cased", "roberta", "gpt2", "gpt2_padded", "llama3"])
def test_old_and_new_files_are_one_tokenizer(name):
    assert read_tokenizer(old(name)).fingerprint == read_tokenizer(new(name)).fingerprint
    assert read_tokenizer(old(name)).vocabulary == read_tokenizer(new(name)).vocabulary


def test_other_ids_are_another_fingerprint():
    assert read_tokenizer(old("bert")).fingerprint != read_tokenizer(old("bert_cased")).fingerprint
    assert len({read_tokenizer(old(name)).fingerprint for name in OLD}) == len(OLD)


@pytest.mark.parametrize("name", OLD)
def test_text_never_gives_a_special_id(name):
    tokenizer = read_tokenizer(old(name))
    ids, vocabulary = tokenizer.encode(SPECIAL_TEXT).tolist(), tokenizer.vocabulary
    assert not set(ids) & (vocabulary.special_ids - {vocabulary.unk})


@pytest.mark.parametrize("name", NEW)
def test_text_never_gives_a_special_id_of_new_files(name):
    tokenizer = read_tokenizer(new(name))
    ids, vocabulary = tokenizer.encode(SPECIAL_TEXT).tolist(), tokenizer.vocabulary
    assert not set(ids) & (vocabulary.special_ids - {vocabulary.unk})


@pytest.mark.parametrize("name", MADE)
def test_special_ids_of_new_files_are_those_of_transformers(name):
    vocabulary, theirs = read_tokenizer(new(name)).vocabulary, auto(new(name))
    for field in FIELDS:
        wanted = getattr(theirs, f"{field}_token_id")
        assert getattr(vocabulary, field) == (None if field == "unk" and wanted == vocabulary.eos else wanted), field


def test_special_pieces_among_those_of_a_unigram_model_stay_text():
    tokenizer = read_tokenizer(new("t5"))
    ids = tokenizer.encode("kon </s>kon <extra_id_0>")
    assert not set(ids.tolist()) & tokenizer.vocabulary.special_ids - {tokenizer.vocabulary.unk}
    assert tokenizer.decode(ids[ids != tokenizer.vocabulary.unk]).startswith("kon")


def test_sentinels_may_be_in_the_sentencepiece_model(tmp_path):
    model = t5_spiece(user_defined_symbols="<extra_id_1>,<extra_id_0>")
    tokenizer = read_tokenizer(directory(tmp_path / "mt5", spiece__model=model))
    assert tokenizer.vocabulary.size == 500 and tokenizer.vocabulary.sentinels == (4, 3)
    assert not {3, 4} & set(tokenizer.encode("a <extra_id_0> b").tolist())


def test_deberta_has_its_mask_after_the_pieces(tmp_path):
    pieces = {f"{name}_piece": f"[{name.upper()}]" for name in ("pad", "unk")} | {"bos_piece": "[CLS]"}
    model = spiece(pad_id=0, bos_id=1, eos_id=2, unk_id=3, eos_piece="[SEP]", **pieces)
    vocabulary = read_tokenizer(directory(tmp_path / "deberta", spm__model=model)).vocabulary
    assert (vocabulary.size, vocabulary.mask) == (501, 500)
    assert (vocabulary.pad, vocabulary.cls, vocabulary.sep, vocabulary.unk) == (0, 1, 2, 3)


# --- in a config ---------------------------------------------------------------------------------------------------


def experiment(path, source, objective, family, cache):
    return Experiment(
        model=ModelConfig(vocab_size=800, family=family),
        tokenizer=PretrainedTokenizer(path=path),
        data=DataConfig(TextFiles(path=str(source)), sequence_length=32, cache_dir=str(cache), prepare_workers=1),
        objective=objective,
        optimizer=None,
        schedule=None,
    )


@pytest.mark.parametrize(
    "name, objective, family",
    [
        ("roberta", MaskedLM(), "encoder"),
        ("t5", SpanCorruption(), "encoder_decoder"),
        ("llama3", CausalLM(), "decoder"),
    ],
    ids=["roberta", "t5", "llama3"],
)
def test_a_corpus_is_made_with_it(name, objective, family, text, tmp_path):
    prepared = prepare(experiment(old(name), text, objective, family, tmp_path), report=lambda line: None)
    tokenizer = read_tokenizer(old(name))
    assert prepared.tokenizer.fingerprint == tokenizer.fingerprint
    document = prepared.train[0].document(0)
    assert document[-1] == tokenizer.vocabulary.eos
    np.testing.assert_array_equal(tokenizer.encode(tokenizer.decode(document[:-1])), document[:-1])


def test_an_objective_says_what_it_misses(text, tmp_path):
    with pytest.raises(UserError, match="the tokenizer has no mask and no cls and no sep token, MaskedLM needs"):
        prepare(experiment(old("gpt2"), text, MaskedLM(), "encoder", tmp_path), report=lambda line: None)


def test_it_comes_from_a_flag_and_goes_through_json():
    choice = Choice.parse("PretrainedTokenizer(path='models/roberta')")
    assert choice == PretrainedTokenizer(path="models/roberta") == from_json(Choice, to_json(choice))


def test_a_saved_tokenizer_is_read(tmp_path):
    saved = WordPiece(vocab_size=400).build(iter(lines()))
    saved.save(str(tmp_path))
    assert PretrainedTokenizer(path=str(tmp_path)).load().fingerprint == saved.fingerprint


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, line",
    [
        (None, "config.tokenizer.path is None, it must be"),
        ("/no/such", "config.tokenizer.path: /no/such is not a directory"),
    ],
)
def test_a_missing_directory_is_a_problem(path, line):
    (problem,) = PretrainedTokenizer(path=path).problems(None)
    assert problem.startswith(line)


def test_a_directory_without_a_tokenizer_is_a_problem(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "tokenizer.py").write_text("raise SystemExit")
    (problem,) = PretrainedTokenizer(path=str(tmp_path)).problems(None)
    assert "holds no supported tokenizer file, neither tokenizer.json nor spiece.model" in problem


def changed(edit) -> str:
    described = json.loads(llama3())
    edit(described)
    return json.dumps(described)


LLAMA_CLASS = {"tokenizer_class": "LlamaTokenizer"}
BAD = {
    "broken JSON": ({"tokenizer__json": "{"}, "cannot load tokenizer.json"),
    "broken config": ({"tokenizer__json": "{}", "tokenizer_config__json": "{"}, "tokenizer_config.json is not a JSON"),
    "list as config": ({"vocab__txt": "", "tokenizer_config__json": []}, "tokenizer_config.json is not a JSON object"),
    "broken description": ({"vocabulary__json": "{"}, "is damaged"),
    "bad added tokens": (
        {"vocab__txt": "a", "tokenizer_config__json": {"added_tokens_decoder": {"x": "y"}}},
        "is damaged",
    ),
    "bytes as vocabulary": ({"vocab__txt": b"\xff\xfe"}, "is damaged"),
    "hole": ({"vocab__json": "HOLE", "merges__txt": ""}, "has no piece for 1 of its ids, the first is 256"),
    "hole after added": (
        {"vocab__txt": "[UNK]\na\n", "added_tokens__json": {"<new>": 7}},
        "the added tokens do not fit the vocabulary: '<new>' as 7",
    ),
    "unknown special": (
        {"tokenizer__json": "LLAMA3", "tokenizer_config__json": {"pad_token": "<pad>"}},
        "pad_token '<pad>' is not in the vocabulary",
    ),
    "more in the config": (
        {"tokenizer__json": "LLAMA3", "added_tokens__json": {"<new>": 503}},
        r"adds pieces that tokenizer.json lacks: \['<new>'\]",
    ),
    "merge of nothing": ({"vocab__json": "BYTES", "merges__txt": "zq zz\n"}, "vocab.json and merges.txt do not fit"),
    "no bytes": ({"vocab__json": {"a</w>": 0}, "merges__txt": ""}, "vocab.json is not byte-level"),
    "no SentencePiece": ({"tokenizer__model": b"IQ== 0\n"}, "tokenizer.model is not a SentencePiece model"),
    "ALBERT": ({"spiece__model": "ALBERT"}, "transformers preprocesses text for spiece.model"),
    "another class": (
        {"vocab__txt": "a\n", "tokenizer_config__json": {"tokenizer_class": "BertJapaneseTokenizer"}},
        "vocab.txt does not define how BertJapaneseTokenizer splits text: tokenizer.json is required",
    ),
    "XLM-R": (
        {"sentencepiece__bpe__model": b""},
        "the ids in sentencepiece.bpe.model differ from the ids of the model",
    ),
    "random": ({"tokenizer__json": "RANDOM"}, "samples pieces at random"),
    "contradiction": (
        {"tokenizer__json": "UNCASED", "tokenizer_config__json": {"do_lower_case": False}},
        "tokenizer_config.json has do_lower_case False, but tokenizer.json True",
    ),
    "accents": (
        {"tokenizer__json": "UNCASED", "tokenizer_config__json": {"strip_accents": False}},
        "tokenizer_config.json has strip_accents False, but tokenizer.json None",
    ),
    "Chinese characters": (
        {"tokenizer__json": "UNCASED", "tokenizer_config__json": {"tokenize_chinese_chars": False}},
        "tokenizer_config.json has tokenize_chinese_chars False, but tokenizer.json True",
    ),
    "default of a class": (
        {"tokenizer__json": "CASED", "tokenizer_config__json": {"tokenizer_class": "BertTokenizer"}},
        "has do_lower_case True, the default of BertTokenizer, but tokenizer.json False",
    ),
    "default of the model's class": (
        {"tokenizer__json": "CASED", "config__json": {"model_type": "electra"}},
        "has do_lower_case True, the default of BertTokenizer, but tokenizer.json False",
    ),
    "space of a text": (
        {"tokenizer__model": "LLAMA", "tokenizer_config__json": LLAMA_CLASS | {"add_prefix_space": False}},
        "has add_prefix_space False, but tokenizer.model True: set add_prefix_space",
    ),
    "no space of a text": (
        {"tokenizer__model": "GEMMA", "tokenizer_config__json": LLAMA_CLASS},
        "has add_prefix_space True, the default of LlamaTokenizer, but tokenizer.model False",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gives_one_line(name, tmp_path):
    files, line = BAD[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    stand_for = {
        "HOLE": lambda: {c: i for i, c in enumerate(alphabet)} | {"ab": 257},
        "BYTES": lambda: {c: i for i, c in enumerate(alphabet)},
        "LLAMA3": llama3,
        "LLAMA": llama_spiece,
        "GEMMA": gemma_spiece,
        "ALBERT": lambda: spiece(pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, control_symbols="[CLS],[SEP]"),
        "RANDOM": lambda: changed(lambda described: described["model"].update(dropout=0.1)),
        "UNCASED": lambda: WordPiece(vocab_size=400).build(iter(lines())).model,
        "CASED": lambda: WordPiece(vocab_size=400, lowercase=False).build(iter(lines())).model,
    }
    files = {key: stand_for[c]() if isinstance(c, str) and c in stand_for else c for key, c in files.items()}
    with pytest.raises(UserError, match=line) as caught:
        read_tokenizer(directory(tmp_path / "bad", **files))
    assert re.search(r"/bad\b", str(caught.value))


def test_null_means_that_accents_are_stripped_in_lower_case(tmp_path):
    model = WordPiece(vocab_size=400).build(iter(lines())).model
    config = {"tokenizer_class": "BertTokenizer", "strip_accents": True}
    path = directory(tmp_path / "explicit", tokenizer__json=model, tokenizer_config__json=config)
    assert json.loads(model)["normalizer"]["strip_accents"] is None
    same_ids(read_tokenizer(path), auto(path))


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer"])
def test_a_regular_expression_that_explodes_is_one_line(part, tmp_path):
    ByteBPE(vocab_size=440).build(iter(lines())).save(str(tmp_path))
    (tmp_path / "vocabulary.json").unlink()  # Without this file, the tokenizer is foreign.
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    pattern = {"pattern": {"Regex": "(a+)+$"}}
    described[part] = {
        "normalizer": {"type": "Replace", "content": "b", **pattern},
        "pre_tokenizer": {"type": "Split", "behavior": "Isolated", "invert": False, **pattern},
    }[part]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match="cannot split this text .*retry-limit.*regular expression"):
        read_tokenizer(str(tmp_path)).encode("a" * 40 + "!")
