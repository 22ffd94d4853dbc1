"""The methods of `LanguageModel` call the functions behind the commands with the right part of the model."""

import dataclasses

import numpy as np
import pytest

from pretrainax.config import UserError
from pretrainax.inference.decoding import generate
from pretrainax.inference.embed import embed
from pretrainax.inference.fill import fill
from pretrainax.inference.language_model import LanguageModel
from pretrainax.inference.load import load
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.request import Sampling
from pretrainax.scoring.likelihood import score
from tests.golden.electra import tiny
from tests.support.huggingface_weights import write_run
from tests.support.loaded import loaded_case


def face(name: str) -> LanguageModel:
    fields = dataclasses.fields(LoadedModel)
    return LanguageModel(**{field.name: getattr(loaded_case(name), field.name) for field in fields})


@pytest.mark.slow
def test_a_decoder_generates_scores_and_embeds():
    gpt2 = face("gpt2")
    drawn = dict(max_new_tokens=4, temperature=1.0, seed=3)
    (one,) = gpt2.generate("a t", **drawn)
    assert [one] == generate(gpt2, ["a t"], Sampling(**drawn)) and len(one.ids) == 4
    assert gpt2.generate(["a t", "b"], **drawn)[0].ids == one.ids
    assert gpt2.score(["a text", "b c"]) == score(gpt2, ["a text", "b c"])
    np.testing.assert_array_equal(gpt2.embed(["a text"], "last"), embed(gpt2, ["a text"], "last"))
    with pytest.raises(UserError, match="generate has no option 'max_tokens', did you mean"):
        gpt2.generate("a", max_tokens=3)


@pytest.mark.slow
def test_of_electra_the_generator_fills_in_and_scores_and_the_discriminator_embeds(tmp_path):
    model = load(write_run(tmp_path / "run", tiny("small")))
    assert model.fill("a <mask>xt", top=2) == fill(model.generator, "a <mask>xt", top=2)
    assert model.score(["a b"]) == score(model.generator, ["a b"])
    assert model.embed(["a text"]).shape == (1, model.config.d_model) != (1, model.generator.config.d_model)


def test_an_encoder_generates_nothing():
    with pytest.raises(UserError, match="fill"):
        face("bert_masked_lm").generate("a")


def test_texts_are_encoded_as_in_training():
    letters = lambda name, *texts: {k: x.tolist() for k, x in face(name).encode(texts).items()}  # noqa: E731
    bos, cls, sep, a, b, pad = 1, 5, 6, 7, 8, 0
    bert = letters("bert", "ab", "a")
    assert bert["tokens"] == [[cls, a, b, sep, *[pad] * 12], [cls, a, sep, *[pad] * 13]]
    assert bert["segment_ids"] == [[1] * 4 + [0] * 12, [1] * 3 + [0] * 13]
    gpt = letters("gpt2", "a" * 17)
    # 20 positions. For an imported model, the tokenizer determines the first token.
    assert gpt["tokens"] == [[bos, *[a] * 17, pad, pad]]
    assert gpt["positions"][0][:18] == list(range(18))
    t5 = letters("t5_1_1", "ab")
    assert t5["encoder_tokens"] == [[a, b, 2, *[pad] * 13]] and t5["tokens"] == [[pad]] and t5["segment_ids"] == [[1]]
    with pytest.raises(UserError, match=r"texts\[1\] is 20 tokens, .* reads at most 19 and 1 special ones"):
        face("gpt2").encode(["a", "a" * 20])
    with pytest.raises(UserError, match=r"texts is one string, it must be a list of strings: write \[text\]"):
        face("gpt2").encode("a")


@pytest.mark.parametrize(
    "name, method, argument, said",
    [
        ("gpt2", "embed", ["a", None], r"texts\[1\] is None, it must be a string$"),
        ("gpt2", "encode", [3], r"texts\[0\] is 3, it must be a string$"),
        ("gpt2", "encode", [], r"texts is empty, it must have at least one string$"),
        ("gpt2", "generate", [("a", "b")], r"prompts\[0\] is \('a', 'b'\), it must be a string$"),
        ("gpt2", "score", [["a", "b"]], r"\['a', 'b'\], it must be a string or a tuple of two strings"),
        ("bert_masked_lm", "fill", ["a [MASK]"], "text is .*, it must be a string: fill takes one text at a time"),
    ],
)
def test_what_is_not_a_text_is_named(name, method, argument, said):
    with pytest.raises(UserError, match=said):
        getattr(face(name), method)(argument)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5_1_1"])
def test_what_is_encoded_is_what_the_model_takes(name):
    assert np.isfinite(face(name)(face(name).encode(["a text", "b"])).logits).all()
