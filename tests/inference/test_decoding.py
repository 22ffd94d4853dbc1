"""Tests generation from prompts to text, with a model of the alphabet, and with real models on 1 and 8 devices."""

import dataclasses
import re
import string
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from pretrainax.config import LearnedPositions, UserError
from pretrainax.inference import decoding
from pretrainax.inference.constraints import FORBIDDEN
from pretrainax.inference.decoding import Rates, Sampling, generate
from pretrainax.tokenization.base import Vocabulary
from pretrainax.tokenization.subwords import SubwordTokenizer
from pretrainax.tokenization.tokenizer_json import library_tokenizer
from tests.support.bigrams import Bigrams
from tests.support.loaded import loaded_case

LIKELY = 5.0  # logit of the next letter; 0 for all other tokens
CONTEXT = 60


@pytest.fixture(scope="module")
def alphabet():
    """Continues with the alphabet, to z and the end. Its context is 60 tokens; the vocabulary has 36 of the 99 ids."""
    loaded = loaded_case("gpt2")
    ids = [int(loaded.tokenizer.encode(letter)[0]) for letter in string.ascii_lowercase]
    table = np.zeros((99, 99), np.float32)
    table[ids, [*ids[1:], loaded.tokenizer.vocabulary.eos]] = LIKELY
    table[:, 90] = LIKELY + 1  # outside the vocabulary
    model = dataclasses.replace(loaded.experiment.model, position=LearnedPositions(CONTEXT))
    loaded = dataclasses.replace(loaded, experiment=dataclasses.replace(loaded.experiment, model=model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "CachedModel", lambda loaded: Bigrams(jnp.array(table)))
        loaded.cached_across_checkpoints(decoding.Generator), loaded.keep(decoding.stepping_params)
    return loaded


def test_a_text_goes_on_to_its_length_its_end_or_the_context(alphabet):
    by_length, by_end, by_context = generate(alphabet, ["ab", "v", "a" * (CONTEXT - 2)], Sampling(max_new_tokens=5))
    assert (by_length.text, by_length.ended) == ("cdefg", "length")
    assert (by_end.text, by_end.ended) == ("wxyz", "eos") and by_end.ids[-1] == alphabet.tokenizer.vocabulary.eos
    assert (by_context.text, by_context.ended) == ("bc", "context")
    # The softmax includes ids outside the vocabulary.
    chance = LIKELY - np.log(97 + np.exp(LIKELY) + np.exp(LIKELY + 1))
    for text in (by_length, by_end, by_context):
        np.testing.assert_allclose(text.log_probs, [chance] * len(text.ids), rtol=1e-5)


@pytest.mark.parametrize("beams", [1, 2])
def test_each_chunk_of_tokens_is_progress(alphabet, monkeypatch, beams):
    calls = []
    monkeypatch.setitem(vars(alphabet), "progress", lambda: calls.append(1))
    generate(alphabet, ["ab"], Sampling(max_new_tokens=5, num_beams=beams))
    assert len(calls) == 2  # one call for the prompt, and one for a chunk of tokens


@pytest.mark.parametrize("watched", [False, True])
def test_a_string_stops_a_text_across_tokens_and_is_not_shown(alphabet, watched):
    shown = []
    on_text = (lambda number, text: shown.append((number, text))) if watched else None
    sampling = Sampling(max_new_tokens=30, stop=("nop", "klx"))
    first, second = generate(alphabet, ["ab", "n"], sampling, on_text, first=3)
    assert (first.text, first.ended, first.prompt) == ("cdefghijklm", "stop", 3)
    assert alphabet.tokenizer.decode(first.ids) == "cdefghijklmnop" and len(first.log_probs) == len(first.ids)
    assert (second.text, second.ended) == ("opqrstuvwxyz", "eos")
    for text in (first, second) if watched else ():
        assert "".join(piece for number, piece in shown if number == text.prompt) == text.text
    if watched:
        assert len(shown) > 4


def test_a_string_stops_beams_across_tokens(alphabet):
    sampling = Sampling(max_new_tokens=30, num_beams=2, stop=("nop", "klx"))
    first, second = generate(alphabet, ["ab", "n"], sampling)
    assert (first.text, first.ended) == ("cdefghijklm", "stop")
    assert alphabet.tokenizer.decode(first.ids) == "cdefghijklmnop" and len(first.log_probs) == len(first.ids)
    assert (second.text, second.ended) == ("opqrstuvwxyz", "eos")


def test_a_special_token_is_a_stop_string_of_beams_as_of_one_text(alphabet):
    piece = alphabet.tokenizer.special_pieces[alphabet.tokenizer.vocabulary.bos]
    only = (alphabet.tokenizer.vocabulary.bos, "b")
    for beams in (1, 3):
        options = dict(max_new_tokens=9, allowed_tokens=only, banned_tokens=(alphabet.tokenizer.vocabulary.eos,))
        texts = generate(alphabet, ["a"], Sampling(num_beams=beams, num_return=beams, stop=(f"b{piece}",), **options))
        for text in texts:
            decoded = alphabet.tokenizer.decode(text.ids)
            assert (text.ended == "stop") == (f"b{piece}" in decoded) and f"b{piece}" not in text.text


@pytest.mark.parametrize("prompt", ["한국말", "ab한국", "a한é국é"])
def test_a_text_is_decoded_after_whole_characters_of_its_prompt(prompt):
    """A tokenizer with byte pieces decodes adjacent bytes together; one invalid byte makes all of them U+FFFD."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b"]
    library = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = SubwordTokenizer(library.to_str().encode(), Vocabulary(len(pieces), unk=0), {0: "<unk>"})
    job = {"first": 0, "prompts": [{"tokens": tokenizer.encode(prompt)}], "sampling": Sampling()}
    job |= {"loaded": SimpleNamespace(tokenizer=tokenizer), "around": set(), "ends": ()}
    text = decoding._Text(SimpleNamespace(**job), 0, None)
    text.read(tokenizer.encode("한b").tolist(), is_finished=True)
    assert text.text == "한b"


def test_a_text_of_bart_omits_the_tokens_around_its_target():
    """A BART decoder begins each text with <s>, or with the [CLS] of its tokenizer."""
    bart = loaded_case("bart")
    bos, cls = bart.tokenizer.vocabulary.bos, bart.tokenizer.vocabulary.cls
    for first in (bos, cls):
        sampling = Sampling(max_new_tokens=3, forced_bos_token_id=first, allowed_tokens=("a",), banned_tokens=(2,))
        (text,) = generate(bart, ["the cat"], sampling)
        assert text.ids == (first, *bart.tokenizer.encode("aa")) and text.text == "aa"
    (text,) = generate(bart, ["the cat"], Sampling(max_new_tokens=3, allowed_tokens=(bos,), banned_tokens=(2,)))
    assert text.ids == (bos,) * 3 and text.text == ""


@pytest.mark.parametrize("beams, blocked", [(1, "c"), (2, "")])  # beam search finds no complete text
def test_a_text_without_an_allowed_token_is_blocked(alphabet, beams, blocked):
    eos, options = alphabet.tokenizer.vocabulary.eos, {"max_new_tokens": 5, "num_beams": beams}
    sampling = Sampling(
        **options, allowed_tokens=("c", "d"), banned_tokens=(eos,), banned_strings=("cd", "dc", "dd", "cc")
    )
    (text,) = generate(alphabet, ["ab"], sampling)
    assert (text.text, text.ended, text.score) == (blocked, "blocked", None)
    (text,) = generate(alphabet, ["ab"], Sampling(**options, allowed_tokens=("c",), banned_strings=("cc",)))
    assert (text.text, text.ended) == ("c", "eos")  # the end token is always allowed


def test_lengths_count_the_prompt_where_they_are_asked_to(alphabet):
    def texts(**options):
        return [(x.text, x.ended) for x in generate(alphabet, ["ab", "v"], Sampling(max_new_tokens=9, **options))]

    assert texts(max_length=6) == [("cde", "length"), ("wxyz", "length")]  # including <s> and the prompt
    assert texts(min_new_tokens=6)[1][0][:4] == "wxyz" and len(texts(min_new_tokens=6)[1][0]) >= 6
    forced = alphabet.tokenizer.vocabulary.eos
    assert texts(forced_eos_token_id=(forced,)) == [("cdefghij", "length"), ("wxyz", "eos")]
    with pytest.raises(UserError, match="max_length is 3, and the prompt has 3 tokens: set max_new_tokens"):
        texts(max_length=3)


def test_a_text_does_not_depend_on_the_batch(alphabet):
    sampling = Sampling(max_new_tokens=12, temperature=1.5, seed=3, num_return=2)
    prompts = ["ab", "hello there, ", "x", "m", "a"]
    together = generate(alphabet, prompts, sampling)
    assert [text.prompt for text in together] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert len({text.text for text in together}) == 10
    assert generate(alphabet, prompts, sampling, batch_size=2) == together
    assert generate(alphabet, prompts[3:], sampling, first=3) == together[6:]
    assert generate(alphabet, prompts, dataclasses.replace(sampling, seed=4)) != together


@pytest.mark.slow
def test_what_is_asked_for_is_all_that_is_said(alphabet):
    def text(**options):
        return generate(alphabet, ["ab"], Sampling(max_new_tokens=8, **options))[0].text

    assert text() == "cdefghij"
    assert "de" not in text(banned_strings=("de", "zz")) and text(banned_strings=("de",))[:2] == "cd"
    assert "c" not in text(banned_tokens=("c",))
    assert set(text(allowed_tokens=("xyz", 20), temperature=1.0)) <= set("xyz") | {alphabet.tokenizer.decode([20])}
    many = generate(alphabet, ["ab"] * 8, Sampling(max_new_tokens=40, temperature=100.0))
    assert max(max(text.ids) for text in many) < alphabet.tokenizer.vocabulary.size
    assert re.fullmatch(r"c[xyz]{2,3}", text(regex=r"c[xyz]{2,3}"))
    assert text(num_beams=3) == "cdefghij"
    assert text(repetition_penalty=1e6).startswith("cdef") and len(set(text(presence_penalty=9.0))) == 8


def test_special_tokens_of_a_tokenizer_json_match_no_string(alphabet):
    """<|turn|> is not a special piece: no regular expression allows it, and no banned string matches a part of it."""
    letters = alphabet.tokenizer
    library = library_tokenizer(letters)
    library.add_special_tokens(["<|turn|>"])
    turn = library.token_to_id("<|turn|>")
    vocabulary = dataclasses.replace(letters.vocabulary, size=turn + 1)
    tokenizer = type(letters)(library.to_str().encode(), vocabulary, letters.special_pieces)
    loaded = dataclasses.replace(alphabet, tokenizer=tokenizer)
    (banning,) = decoding.rules_of(loaded, Sampling(banned_strings=("<|", "ab"))).automata
    assert banning.moves[:, turn].tolist() == [0] * len(banning.moves)
    assert not decoding.rules_of(loaded, Sampling(banned_tokens=("<|turn|>",))).allowed[turn]
    pytest.importorskip("outlines_core")
    (allowing,) = decoding.rules_of(loaded, Sampling(regex=r"[a-z<|>]*")).automata
    assert (allowing.moves[:, turn] == FORBIDDEN).all()


def test_times_are_added_up(alphabet):
    rates = Rates()
    generate(alphabet, ["ab", "v"], Sampling(max_new_tokens=8), rates=rates)
    assert (rates.prompt_tokens, rates.steps, rates.step_tokens) == (5, 7, 7 + 4)  # with <s> before each prompt
    assert rates.prefill_seconds > 0 and rates.step_seconds > 0
    rates = Rates()
    generate(alphabet, ["ab", "v"], Sampling(max_new_tokens=8, num_beams=2), rates=rates)
    # Each step counts one token per prompt.
    assert (rates.prompt_tokens, rates.steps, rates.step_tokens) == (5, 7, 2 * 7)


@pytest.mark.parametrize(
    "name, prompts, options, message",
    [
        (
            "gpt2",
            ["a" * 21],
            {},
            "the prompt is 21 tokens, tests/golden, gpt2 reads at most 19 and 1 special ones: shorten it",
        ),
        ("gpt2", ["a", "a" * 21], {}, "prompt 2: the prompt is 21 tokens"),
        ("gpt2", ["a", "a" * 9], dict(max_length=5), "prompt 2: max_length is 5, and the prompt has 10 tokens"),
        ("gpt2", ["a <extra_id_0> b"], {}, "the vocabulary lacks <extra_id_0>: it has no sentinels"),
        ("t5_1_1", ["a <extra_id_10> b"], {}, "lacks <extra_id_10>: its sentinels are <extra_id_0> to <extra_id_9>"),
        ("bert", ["a"], {}, "the model is an encoder, which generates no text: it supports fill (masks)"),
        ("gpt2", ["a"], dict(top_p=2.0), "top_p is 2.0, it must be above 0 and at most 1"),
        ("gpt2", ["a"], dict(allowed_tokens=(99,)), "allowed_tokens has 99, the vocabulary has ids from 0 to 35"),
        ("gpt2", ["a"], dict(banned_tokens=("ab",)), "'ab', which is 2 tokens: give it to banned_strings"),
        ("gpt2", ["a"], dict(banned_tokens=tuple(range(36))), "banned_tokens leaves no token to generate"),
        ("gpt2", "a", {}, "prompts is one string, it must be a list of strings: write [text]"),
    ],
)
def test_what_cannot_be_done_is_one_line(name, prompts, options, message):
    with pytest.raises(UserError) as caught:
        generate(loaded_case(name), prompts, Sampling(**options))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
def test_eight_devices_write_what_one_does():
    prompts = ["the cat", "a", "no dog here, "]  # their number is not a multiple of eight
    for sampling in (Sampling(max_new_tokens=6), Sampling(max_new_tokens=6, num_beams=2)):
        with jax.default_matmul_precision("highest"):
            one = generate(loaded_case("gpt2"), prompts, sampling)
            eight = generate(loaded_case("gpt2", data=4, fsdp=2), prompts, sampling)
        assert [text.ids for text in eight] == [text.ids for text in one]
        for a, b in zip(one, eight, strict=True):
            np.testing.assert_allclose(b.log_probs, a.log_probs, atol=1e-4)
