"""Tests that text gets the same special tokens as from the tokenizer in transformers, also after an export."""

import dataclasses
import itertools
import json
import pathlib
import shutil

import numpy as np
import pytest
import tokenizers

from pretrainax.config import ModelConfig, UserError
from pretrainax.data.framing import special_token_frame
from pretrainax.tokenization import ByteBPE, PretrainedTokenizer, Unigram
from pretrainax.tokenization.base import load_tokenizer
from pretrainax.tokenization.frames import RowFrame, SpecialTokenFrame, post_processor, probe_frame
from pretrainax.tokenization.huggingface import read_tokenizer
from pretrainax.tokenization.huggingface_export import write_tokenizer
from tests.support.huggingface_directories import NEW, OLD, auto, lines, new, old

A, B = "a b", "b"


def framed(tokenizer, *texts):
    """Returns the ids and token types of our frame."""
    row, types = tokenizer.vocabulary.frame.wrap(tokenizer.encode_batch(list(texts)))
    return row.tolist(), types.tolist()


def assert_as_transformers(directory, tokenizer=None):
    ours, theirs = tokenizer or read_tokenizer(str(directory)), auto(directory)
    for texts in ((A,), (B,), (A, B), (B, A), ("Hello world", "x")):
        ids, types = framed(ours, *texts)
        found = theirs(*texts)
        assert ids == found.input_ids, texts
        assert types == found.get("token_type_ids", types), texts


def edited(source, path, config=None, template="unchanged", remove=()):
    """Copies a directory with other fields in tokenizer_config.json, and another post-processor."""
    shutil.copytree(source, path)
    file = path / "tokenizer_config.json"
    content = json.loads(file.read_text()) if file.exists() else {}
    content = {name: value for name, value in (content | (config or {})).items() if name not in remove}
    file.write_text(json.dumps(content))
    if template != "unchanged":
        file = path / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": template}))
    return path


@pytest.mark.parametrize("name", OLD)
def test_old_files_have_the_frame_of_transformers(name):
    assert_as_transformers(old(name))


@pytest.mark.parametrize("name", NEW)
def test_new_files_have_the_frame_of_transformers(name):
    assert_as_transformers(new(name))


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma", "t5", "roberta", "llama3"])
def test_flags_of_old_files_decide_as_in_transformers(name, tmp_path):
    for bos, eos in itertools.product((True, False), repeat=2):
        flags = {"add_bos_token": bos, "add_eos_token": eos}
        assert_as_transformers(edited(old(name), tmp_path / f"{bos}{eos}", flags))


@pytest.mark.parametrize("name", NEW)
def test_flags_next_to_a_tokenizer_json_change_nothing(name, tmp_path):
    assert_as_transformers(edited(new(name), tmp_path / "flags", {"add_bos_token": True, "add_eos_token": True}))


def templates(tokenizer):
    """Returns post-processors, some unusual, with the first special tokens of a vocabulary."""
    pieces = list(tokenizer.special_pieces.items()) * 3
    (x, _), (y, _), (z, _) = pieces[:3]
    plain = RowFrame()
    frames = {
        "nothing": SpecialTokenFrame(plain, plain),
        "before": SpecialTokenFrame(RowFrame((x,)), RowFrame((x,), (x,))),
        "after": SpecialTokenFrame(RowFrame((), (), (y,)), RowFrame((), (y,), (y,))),
        "around": SpecialTokenFrame(RowFrame((x,), (), (y,)), RowFrame((x,), (y, y), (y,), (0,) * 6)),
        "typed": SpecialTokenFrame(RowFrame((x,), (), (y,)), RowFrame((x,), (y, z), (y,), (0, 0, 0, 1, 1, 1))),
        "several": SpecialTokenFrame(RowFrame((x, y), (), (z, z)), RowFrame((y, x), (z,), ())),
        "only single": SpecialTokenFrame(RowFrame((x,), (), (y,)), plain),
    }
    described = {name: post_processor(frame, tokenizer.special_pieces) for name, frame in frames.items()}
    nested = {"type": "Sequence", "processors": [BYTES, described["around"]]}
    return described | {"null": None, "bytes": BYTES, "nested": nested}


BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
KINDS = ["nothing", "before", "after", "around", "typed", "several", "only single", "null", "bytes", "nested"]
GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.mark.first(3)
@pytest.mark.parametrize("kind", KINDS)
def test_mutated_templates_are_read_and_written_as_transformers_reads_them(kind, tmp_path):
    """Checks the model's tokenizer class, which may replace the template, and the generic class, which applies it."""
    for name in ("bert", "roberta", "gpt2", "t5", "llama", "albert", "xlm_roberta", "qwen2"):
        template = templates(read_tokenizer(new(name)))[kind]
        for number, config in enumerate(({}, GENERIC)):
            directory = edited(new(name), tmp_path / f"{name}{number}", config, template)
            ours = read_tokenizer(str(directory))
            assert_as_transformers(directory, ours)
            write_tokenizer(ours, str(tmp_path / f"out{name}{number}"), ModelConfig(num_token_types=2))
            assert_as_transformers(tmp_path / f"out{name}{number}", ours)
            assert_as_transformers(tmp_path / f"out{name}{number}")


@pytest.mark.parametrize("name", OLD)
def test_an_export_keeps_the_frame(name, tmp_path):
    ours = read_tokenizer(old(name))
    write_tokenizer(ours, str(tmp_path / "out"), ModelConfig(family="encoder_decoder"))
    theirs, again = auto(old(name)), auto(tmp_path / "out")
    for texts in ((A,), (A, B)):
        assert again(*texts).input_ids == theirs(*texts).input_ids == framed(ours, *texts)[0]


def test_a_bert_that_names_bos_and_eos_keeps_them(tmp_path):
    tokenizer = read_tokenizer(new("roberta"))
    frame = SpecialTokenFrame(RowFrame((0,), (), (2,)), RowFrame((0,), (2,), (2,)))
    template = post_processor(frame, {0: "<s>", 2: "</s>"})
    directory = edited(new("roberta"), tmp_path / "x", GENERIC, template, ("cls_token", "sep_token"))
    ours = read_tokenizer(str(directory))
    assert (ours.vocabulary.cls, ours.vocabulary.bos, tokenizer.vocabulary.cls) == (None, 0, 0)
    for family in ("encoder", "decoder", "encoder_decoder"):  # Every family uses the tokenizer's own frame.
        row, types = special_token_frame(family, ours.vocabulary).wrap([np.array([9]), np.array([8])])
        assert (row.tolist(), types.tolist()) == ([0, 9, 2, 8, 2], [0, 0, 0, 1, 1])


def sequence(text):
    return {"Sequence": {"id": text, "type_id": 0}}


def special(piece):
    return {"SpecialToken": {"id": piece, "type_id": 0}}


def template_of(single, pair):
    piece = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {"<|endoftext|>": piece}}


END = special("<|endoftext|>")


REVERSED, LOST = [sequence("B"), END, sequence("A")], [END, sequence("A"), END]


@pytest.mark.parametrize("pair", [REVERSED, LOST], ids=["reversed", "lost"])
def test_an_odd_template_for_pairs_is_refused_where_a_pair_is_needed(pair, tmp_path):
    directory = edited(new("gpt2"), tmp_path / "x", template=template_of([END, sequence("A")], pair))
    ours = read_tokenizer(str(directory))
    assert framed(ours, A)[0] == auto(directory)(A).input_ids
    with pytest.raises(UserError, match='change "pair" in the post_processor of tokenizer.json'):
        framed(ours, A, B)
    write_tokenizer(ours, str(tmp_path / "out"), ModelConfig(family="decoder"))
    assert auto(tmp_path / "out")(A, B).input_ids == auto(directory)(A, B).input_ids


@pytest.mark.parametrize("single", [[END], [sequence("A"), END, sequence("A")]], ids=["lost", "twice"])
def test_a_template_that_does_not_keep_a_text_is_refused(single, tmp_path):
    directory = edited(new("gpt2"), tmp_path / "x", template=template_of(single, [sequence("A"), sequence("B")]))
    with pytest.raises(UserError, match="must add the same special tokens before and after every text"):
        read_tokenizer(str(directory))


def test_a_token_outside_the_vocabulary_is_refused(tmp_path):
    template = template_of([END, sequence("A")], [sequence("A"), sequence("B")])
    template["special_tokens"]["<|endoftext|>"]["ids"] = [777]
    directory = edited(new("gpt2"), tmp_path / "x", template=template)
    with pytest.raises(UserError, match="adds id 777, which the vocabulary lacks"):
        read_tokenizer(str(directory))


# --- saved tokenizers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "roberta", "t5", "llama3", "gpt2"])
def test_a_saved_tokenizer_keeps_its_frame_and_an_older_one_has_none(name, tmp_path):
    ours = read_tokenizer(old(name))
    ours.vocabulary = dataclasses.replace(ours.vocabulary, decoder_start=7)
    ours.save(str(tmp_path))
    back = load_tokenizer(str(tmp_path))
    assert (back.vocabulary.frame, back.vocabulary.decoder_start) == (ours.vocabulary.frame, 7)
    described = json.loads((tmp_path / "vocabulary.json").read_text())
    del described["vocabulary"]["frame"], described["vocabulary"]["decoder_start"]  # an older version's file
    (tmp_path / "vocabulary.json").write_text(json.dumps(described))
    older = load_tokenizer(str(tmp_path))
    assert older.vocabulary.frame is older.vocabulary.decoder_start is None
    assert older.fingerprint == back.fingerprint == ours.fingerprint  # Text has the same ids.


def test_a_new_tokenizer_has_no_frame_and_its_description_is_that_of_older_versions(tmp_path):
    for number, config in enumerate((Unigram(vocab_size=400), ByteBPE(vocab_size=400))):
        tokenizer = config.build(iter(lines()))
        tokenizer.save(str(tmp_path / str(number)))
        fields = json.loads((tmp_path / str(number) / "vocabulary.json").read_text())["vocabulary"]
        assert tokenizer.vocabulary.frame is None and not {"frame", "decoder_start"} & fields.keys()


def test_fingerprints_are_those_of_versions_without_frames():
    """ByT5's tokenizer consists of constants, so its fingerprint never changes."""
    assert read_tokenizer(old("byt5")).fingerprint == "028e089ac749f052d3077efb3f4d4da6"


def test_damaged_frames_are_one_line(tmp_path):
    read_tokenizer(old("bert")).save(str(tmp_path))
    file = tmp_path / "vocabulary.json"
    described = json.loads(file.read_text())
    for frame in ([1], [[[9999], [], [], []], None], "x", [[["a"], [], [], []], None], 5):
        described["vocabulary"]["frame"] = frame
        file.write_text(json.dumps(described))
        with pytest.raises(UserError, match="is damaged"):
            load_tokenizer(str(tmp_path))


def test_a_run_continues_with_its_own_frame(tmp_path, text):
    """A run of an older version has no frame, so its rows keep the special tokens of the model family."""
    from pretrainax.config import DataConfig, Experiment
    from pretrainax.data.objectives import CausalLM
    from pretrainax.data.preparation.prepare import prepare
    from pretrainax.data.sources import TextFiles

    read_tokenizer(old("bert")).save(str(tmp_path / "new"))
    older = read_tokenizer(old("bert"))
    older.vocabulary = dataclasses.replace(older.vocabulary, frame=None)
    older.save(str(tmp_path / "older"))
    sizes = {"sequence_length": 32, "cache_dir": str(tmp_path / "cache"), "prepare_workers": 1}
    model, tokenizer = ModelConfig(vocab_size=800, family="decoder"), PretrainedTokenizer(path=old("bert"))
    experiment = Experiment(model, tokenizer, DataConfig(TextFiles(path=str(text)), **sizes), CausalLM(), None, None)

    def frame_after(saved):
        tokenizer = prepare(experiment, lambda line: None, saved_tokenizer=saved).tokenizer
        assert tokenizer.fingerprint == older.fingerprint
        return tokenizer.vocabulary.frame

    assert frame_after(None) == frame_after(str(tmp_path / "new")) == read_tokenizer(old("bert")).vocabulary.frame
    assert frame_after(str(tmp_path / "older")) is None
    assert frame_after(str(tmp_path / "missing")) is not None


def test_a_probe_ignores_padding_and_truncation():
    tokenizer = tokenizers.Tokenizer.from_file(str(pathlib.Path(new("bert")) / "tokenizer.json"))
    expected = probe_frame(tokenizer)
    tokenizer.enable_padding(length=9)
    tokenizer.enable_truncation(3)
    assert probe_frame(tokenizer) == expected == read_tokenizer(new("bert")).vocabulary.frame
