"""Tests the filling of masks: as in transformers' pipeline, one by one or all at once, and with whole words."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers

from pretrainax import models
from pretrainax.config import UserError
from pretrainax.inference.fill import _masked_row, fill
from pretrainax.inference.holes import Holes
from pretrainax.layers.compute import Compute
from pretrainax.tokenization import ByteBPE, WordPiece
from pretrainax.tokenization.huggingface_export import write_tokenizer
from tests.golden import CASES, make
from tests.golden.case import needs_transformers, weights
from tests.golden.electra import joint
from tests.support.loaded import loaded_case

TEXT = ["the cat sat on the mat and the dog walked in the park, (a walk).", "a quick brown fox jumps; we cook rice"]


def with_config(name: str, **changes: Any):
    """Returns the loaded model of a case with changed fields and random parameters."""
    loaded = loaded_case(name)
    tokenizer = changes.pop("tokenizer", loaded.tokenizer)
    config = dataclasses.replace(loaded.experiment.model, **changes)
    experiment = dataclasses.replace(loaded.experiment, model=config)
    model, params = models.build(config, Compute()), jax.tree.map(np.asarray, weights(config))
    return dataclasses.replace(loaded, experiment=experiment, model=model, params=params, tokenizer=tokenizer)


def best(filled) -> list[str]:
    return [candidates[0].text for candidates in filled.holes]


# --- as transformers --------------------------------------------------------------------------------------------------

KINDS = {
    "bert_masked_lm": WordPiece(vocab_size=90),
    "roberta": ByteBPE(vocab_size=300, special_pieces="roberta"),
}


@pytest.mark.first(1)
@needs_transformers
@pytest.mark.parametrize("name, rows_without_token", [*((name, 0) for name in KINDS), ("bert_masked_lm", 6)])
def test_candidates_are_those_of_the_fill_mask_pipeline(name, rows_without_token, tmp_path):
    import transformers

    tokenizer = KINDS[name].build(iter(TEXT * 20))
    loaded = with_config(name, tokenizer=tokenizer, vocab_size=tokenizer.vocabulary.size + rows_without_token)
    write_tokenizer(tokenizer, str(tmp_path), loaded.model.config)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    pipeline = transformers.FillMaskPipeline(
        model=make.oracle(CASES[name]._replace(config=loaded.model.config)), tokenizer=theirs
    )
    for text in ("the cat [MASK] the", "[MASK] (cat) sat [MASK] the [MASK]."):
        own = text.replace("[MASK]", theirs.mask_token)
        row, _ = _masked_row(loaded, Holes(tokenizer, text))
        assert row.tolist() == theirs(own).input_ids
        said = pipeline(own, top_k=40)
        filled = fill(loaded, text, top=20, order="at_once")
        for candidates, holes in zip(filled.holes, said if text.count("[MASK]") > 1 else [said], strict=True):
            spelled = tokenizer.spellings()
            is_text = lambda i: i not in tokenizer.special_pieces and i < tokenizer.vocabulary.size  # noqa: E731
            wanted = [hole for hole in holes if is_text(hole["token"])][:20]
            probabilities = [candidate.probability for candidate in candidates]
            # The float32 sums have another order, and a softmax follows.
            np.testing.assert_allclose(probabilities, [hole["score"] for hole in wanted], rtol=1e-4)
            for candidate, hole in zip(candidates, wanted, strict=True):
                assert spelled[hole["token"]].decode("utf-8", "replace").strip() in candidate.text


# --- order of filling ------------------------------------------------------------------------------------------------

LETTERS = "ab[MASK]d e[MASK]g"  # each letter is a token


def test_the_most_certain_mask_is_filled_first_and_the_others_asked_again():
    loaded = loaded_case("bert")
    at_once, one_by_one = (fill(loaded, LETTERS, top=3, order=order) for order in ("at_once", "most_certain"))
    surest = max((0, 1), key=lambda hole: at_once.holes[hole][0].probability)
    letter = at_once.text[(2, 6)[surest]]
    parts = LETTERS.split("[MASK]")
    parts[surest : surest + 2] = [letter.join(parts[surest : surest + 2])]
    again = fill(loaded, "[MASK]".join(parts), top=3)
    assert [c.probability for c in one_by_one.holes[surest]] == pytest.approx(
        [c.probability for c in at_once.holes[surest]]
    )
    other = [c.probability for c in one_by_one.holes[1 - surest]]
    assert other == pytest.approx([c.probability for c in again.holes[0]], rel=1e-4)
    assert other != pytest.approx([c.probability for c in at_once.holes[1 - surest]], rel=1e-4)
    assert one_by_one.text == again.text
    assert fill(loaded, LETTERS, top=3) == one_by_one  # the default


def test_from_left_to_right_a_mask_is_asked_about_with_those_before_it_filled_in():
    loaded = loaded_case("bert")
    filled = fill(loaded, LETTERS, order="left_to_right")
    at_once = fill(loaded, LETTERS, order="at_once")
    second = fill(loaded, f"{at_once.text[:6]}[MASK]g")
    assert filled.holes[1][0].probability == pytest.approx(second.holes[0][0].probability, rel=1e-4)
    assert filled.text == second.text


def test_eight_devices_fill_in_as_one():
    one, eight = (fill(loaded_case("bert", **mesh), LETTERS) for mesh in ({}, {"data": 4, "fsdp": 2}))
    assert one.text == eight.text and best(one) == best(eight)


# --- whole words ------------------------------------------------------------------------------------------------------

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "we", "walk", "##ing", "##s", "home", ",", "[X]"]


class Says:
    """A model that predicts a mask from the token before it, with logits from `after`. It has more rows than pieces."""

    def __init__(self, config, after: dict[str, dict[str, float]]):
        self.config, rows = config, len(PIECES) + 3
        self.logits = np.full((len(PIECES), rows), -20.0, np.float32)
        self.logits[:, len(PIECES) :] = 50.0
        self.logits[:, PIECES.index("[SEP]")] = 40.0
        for before, said in after.items():
            for piece, logit in said.items():
                self.logits[PIECES.index(before), PIECES.index(piece)] = logit

    def apply(self, variables, batch, *, deterministic):
        before = jax.numpy.take_along_axis(batch["tokens"], batch["masked_positions"] - 1, axis=1)
        head = type("Head", (), {"logits": lambda _: jax.numpy.asarray(self.logits)[before]})()
        return models.Outputs({"lm": head})


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory):
    file = tmp_path_factory.mktemp("pieces") / "tokenizer.json"
    model = tokenizers.models.WordPiece({piece: i for i, piece in enumerate(PIECES)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.save(str(file))
    assert json.loads(file.read_text())["model"]["vocab"]["##ing"] == 7
    return WordPiece(path=str(file)).load()


def saying(tokenizer, after):
    loaded = loaded_case("bert")
    return dataclasses.replace(loaded, model=Says(loaded.model.config, after), params={}, tokenizer=tokenizer)


def test_candidates_are_the_words_that_they_make_in_the_text(wordpiece):
    after = {"walk": {"##ing": 4.0, "home": 3.0, ",": 2.0, "##s": 1.0}}
    filled = fill(saying(wordpiece, after), "We WALK [MASK] , we", top=4)
    assert [candidate.text for candidate in filled.holes[0]] == ["walking", "home", ",", "walks"]
    assert filled.text == "We WALKing , we"


def test_masks_of_one_word_are_a_word(wordpiece):
    after = {"we": {"walk": 3.0, "home": 2.0}, "walk": {"##ing": 3.0}, "[MASK]": {"home": -10.0}}
    filled = fill(saying(wordpiece, after), "we [MASK][MASK]", top=1)
    assert filled.text == "we walking" and best(filled) == ["walking", "walking"]


def test_no_candidate_is_special_or_beyond_the_vocabulary(wordpiece):
    filled = fill(saying(wordpiece, {}), "we [MASK]", top=6)
    assert {candidate.text for candidate in filled.holes[0]}.isdisjoint(PIECES[:5])


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, text, options, said",
    [
        ("bert", "no mask", {}, "no hole to fill in: write <mask>"),
        ("bert", "", {}, "no hole to fill in"),
        ("bert", "a <extra_id_0>", {}, "<extra_id_0>, which the model was not trained to fill in: write \\[MASK\\]"),
        ("bert", "abc" * 6 + "[MASK]", {}, "the text is 19 tokens, .* reads at most 18 and 2 special ones"),
        ("bert", "[MASK]", {"top": 0}, "top is 0, it must be a whole number from 1 to 29"),
        ("bert", "[MASK]", {"top": 2.0}, "top is 2.0, it must be a whole number from 1 to 29"),
        ("bert", "[MASK]", {"top": 99}, "top is 99, it must be a whole number from 1 to 29"),
        (
            "bert",
            "[MASK]",
            {"order": "best"},
            "order is 'best', it must be one of most_certain, left_to_right, at_once",
        ),
        ("electra_small", "[MASK]", {}, "is a discriminator, .* take its generator"),
    ],
)
def test_a_mistake_is_one_line(name, text, options, said):
    with pytest.raises(UserError, match=said) as e:
        fill(loaded_case(name), text, **options)
    assert "\n" not in str(e.value)


def test_an_encoder_whose_tokenizer_has_no_mask_is_told_so():
    loaded = loaded_case("gpt2")
    vocabulary = dataclasses.replace(loaded.tokenizer.vocabulary, mask=None)
    tokenizer = type(loaded.tokenizer)(loaded.tokenizer.model, vocabulary, loaded.tokenizer.special_pieces)
    with pytest.raises(UserError, match="has no mask"):
        fill(dataclasses.replace(loaded_case("bert"), tokenizer=tokenizer), "[MASK]")


@pytest.mark.slow
def test_of_a_run_of_electra_the_generator_fills_in():
    run = with_config("electra_small", **{f.name: getattr(joint(), f.name) for f in dataclasses.fields(joint())})
    config, params = models.electra.generator(run.model.config, run.params)
    alone = dataclasses.replace(run, model=models.build(config, Compute()), params=params)
    assert best(fill(run, "a c[MASK]t")) == best(fill(alone, "a c[MASK]t"))
