"""Tests the examples for scoring a text: they predict each token once, with the context that the options set."""

import dataclasses
import types

import numpy as np
import pytest

from pretrainax.config import UserError
from pretrainax.data.leading_tokens import leading_token_ids
from pretrainax.data.objectives import (
    CausalLM,
    Denoising,
    MaskedLM,
    ObjectiveMixture,
    PrefixLM,
    SequenceToSequence,
    SpanCorruption,
)
from pretrainax.data.objectives.prefix import DecoderOnly
from pretrainax.data.packing import BestFit
from pretrainax.data.sources import TextFiles
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.prompts import read_prompt
from pretrainax.interop.directories import evaluation_of
from pretrainax.scoring.scoring_examples import (
    LeftToRight,
    PseudoLikelihood,
    Scoring,
    Targets,
    context_length,
    method_of,
    start_token,
)
from tests.support.loaded import loaded_case

TEXT = "the cat sat on the mat, and then it went away."  # one token per letter


def trained(name: str, objective=None, **data) -> LoadedModel:
    """Makes the model of a case look as if a run here had trained it, instead of an import."""
    loaded = loaded_case(name)
    experiment = loaded.experiment
    data = dataclasses.replace(experiment.data, source=TextFiles(path="x"), **data)
    return dataclasses.replace(
        loaded, experiment=dataclasses.replace(experiment, data=data, objective=objective or experiment.objective)
    )


@pytest.mark.parametrize("context, stride", [(1, 1), (4, 1), (5, 2), (5, 5), (7, 3), (16, 8), (20, 20), (20, 13)])
@pytest.mark.parametrize("length", [1, 4, 5, 6, 19, 46])
def test_each_token_is_predicted_once_from_enough_before_it(context, stride, length):
    method = LeftToRight(loaded_case("gpt2"), Scoring(context, stride))
    ids = method.tokenizer.encode(TEXT[:length])
    asked, read, first = method.examples_for(TEXT[:length]), np.append(method.start, ids), 0
    predicted = []
    for example in asked.examples:
        assert len(example["tokens"]) <= context and set(example["segment_ids"].tolist()) == {1}
        assert example["positions"].tolist() == list(range(len(example["tokens"])))
        assert example["loss_weights"].any()  # Each window predicts a new token.
        for place in np.flatnonzero(example["loss_weights"]):
            number = first + place  # the index of the token in the text
            assert example["targets"][place] == ids[number]
            assert example["tokens"][: place + 1].tolist() == read[first : number + 1].tolist()
            assert first == 0 or place >= context - stride
            predicted.append(number)
        first += stride
    assert predicted == list(range(length)) and asked.bytes == length


def test_what_stood_before_a_text_in_training_stands_there():
    vocabulary = loaded_case("gpt2").tokenizer.vocabulary
    assert start_token(loaded_case("gpt2")) == vocabulary.bos  # an import
    mixture = ObjectiveMixture((CausalLM(mask_documents=True), PrefixLM()), (1, 1))
    for objective in (CausalLM(), PrefixLM(), mixture):
        assert start_token(trained("gpt2", objective)) == vocabulary.separator != vocabulary.bos
    assert start_token(trained("gpt2", CausalLM(mask_documents=True))) is None
    assert start_token(trained("gpt2", packing=BestFit())) is None
    assert read_prompt("", trained("gpt2", mixture).experiment, loaded_case("gpt2").tokenizer)["tokens"].tolist() == [
        vocabulary.separator  # also before a prompt
    ]


def test_an_import_without_a_begin_of_text_has_its_end_before_a_score_and_before_an_empty_prompt_alone():
    loaded = loaded_case("gpt2")
    of = lambda bos, is_needed: leading_token_ids(  # noqa: E731
        loaded.experiment, dataclasses.replace(loaded.tokenizer.vocabulary, bos=bos), is_needed
    )
    bos, eos = loaded.tokenizer.vocabulary.bos, loaded.tokenizer.vocabulary.eos
    assert of(bos, True) == of(bos, False) == [bos]  # LLaMA
    assert of(eos, True) == [eos] and of(eos, False) == []  # GPT-2
    assert of(None, True) == [eos] and of(None, False) == []  # Qwen
    vocabulary = dataclasses.replace(loaded.tokenizer.vocabulary, bos=eos)
    ends = dataclasses.replace(loaded, tokenizer=types.SimpleNamespace(vocabulary=vocabulary))
    assert start_token(ends) == eos


@pytest.mark.parametrize(
    "name, said", [("gpt2", "in windows of 700 "), ("bert_masked_lm", "most 700 tokens at a time")]
)
def test_an_import_is_scored_with_all_its_positions_and_a_run_as_it_was_trained(name, said):
    loaded = trained(name)
    model = loaded.experiment.model
    model = dataclasses.replace(model, position=dataclasses.replace(model.position, max_length=700))
    run = dataclasses.replace(loaded, experiment=dataclasses.replace(loaded.experiment, model=model))
    imported = dataclasses.replace(loaded, experiment=evaluation_of(model, loaded.tokenizer.vocabulary, ""))
    assert imported.experiment.data.sequence_length == 512
    assert context_length(imported) == 700 and context_length(run) == run.experiment.data.sequence_length == 20
    assert said in method_of(imported, Scoring()).description
    assert "most 30 tokens at a time" in method_of(loaded_case("t5_1_0"), Scoring(context=30)).description
    assert context_length(loaded_case("t5_1_0")) == 512  # It has no limit of positions.


def test_where_nothing_stood_there_the_first_token_is_given_and_not_counted():
    method = method_of(trained("gpt2", CausalLM(mask_documents=True)), Scoring())
    (example,) = (asked := method.examples_for("cat")).examples
    assert asked.bytes == 2 and "the first token given" in method.description
    assert example["loss_weights"].sum() == 2 and len(example["tokens"]) == 2
    assert list(method.examples_for("c").examples) == [] and method.examples_for("c").bytes == 0
    method._spellings = [b"four", *[b"x"] * (len(method._spellings) - 1)]
    ids = np.array([0, 1, 2], np.int32)  # The first id is four bytes.
    assert method._examples_for_text("fourxx", ids).bytes == 2 and method._examples_for_text("xx", ids[1:]).bytes == 1


def test_an_encoder_is_asked_for_each_token_with_that_one_masked():
    method = PseudoLikelihood(loaded_case("bert_masked_lm"), Scoring())
    vocabulary, ids = method.vocabulary, method.tokenizer.encode("a cat sat").tolist()
    examples = list(method.examples_for("a cat sat").examples)
    for number, example in enumerate(examples):
        row = [vocabulary.cls, *ids, vocabulary.sep]
        row[number + 1] = vocabulary.mask
        assert example["tokens"].tolist() == row and example["masked_positions"].tolist() == [number + 1]
        assert example["targets"].tolist() == [ids[number]]
    assert len(examples) == 9


def test_word_by_word_masks_the_rest_of_the_word():
    """Checks Kauf and Ivanova 2023, figure 1: in so-uv-en-ir, `uv` is predicted from `so`, without `en` and `ir`."""
    method = PseudoLikelihood(loaded_case("bert_masked_lm"), Scoring(by_word=True))
    mask = method.vocabulary.mask
    shown = [
        "".join("_" if i == mask else method.tokenizer.decode([i]) for i in example["tokens"][1:-1])
        for example in method.examples_for("a cat, no").examples
    ]
    assert shown == [
        *("_ cat, no", "a____, no", "a ___, no", "a c__, no", "a ca_, no"),
        *("a cat_ no", "a cat,___", "a cat, __", "a cat, n_"),
    ]
    assert "word by word" in method.description


def test_a_text_that_an_encoder_cannot_take_at_once_is_asked_about_in_pieces():
    method = PseudoLikelihood(loaded_case("bert_masked_lm"), Scoring(context=12))
    asked = method.examples_for(TEXT)
    examples = list(asked.examples)
    assert asked.pieces == 5 and asked.bytes == len(TEXT) == len(examples)
    assert max(len(example["tokens"]) for example in examples) == 12
    ids = np.concatenate([example["targets"] for example in examples])
    assert ids.tolist() == method.tokenizer.encode(TEXT).tolist()


def test_the_holes_of_a_text_follow_from_it_and_the_seed():
    method = Targets(loaded_case("t5_1_0"), Scoring(context=30))
    first, again = method.examples_for(TEXT), method.examples_for(TEXT)
    other = Targets(loaded_case("t5_1_0"), Scoring(context=30, seed=1)).examples_for(TEXT)
    assert first.pieces == len(first.examples) > 1
    for a, b in zip(first.examples, again.examples, strict=True):
        assert all((a[name] == b[name]).all() for name in a)
    assert any((a["targets"] != b["targets"]).any() for a, b in zip(first.examples, other.examples, strict=True))
    raw = SpanCorruption().lengths(method.context).raw
    restored = [SpanCorruption().restore(example, method.vocabulary) for example in first.examples]
    assert method.tokenizer.decode(np.concatenate(restored)) == TEXT and len(restored[0]) == raw


def test_the_bytes_of_targets_are_those_of_what_was_dropped():
    method = Targets(loaded_case("t5_1_0"), Scoring(context=30))
    asked = method.examples_for(TEXT)
    special = method.vocabulary.special_ids
    assert asked.bytes == sum(int(i) not in special for example in asked.examples for i in example["targets"]) > 0


def test_of_a_pair_the_target_is_scored_given_the_source():
    method = Targets(loaded_case("t5_1_0"), Scoring(context=30))
    asked = method.examples_for(("that is good", "das ist gut"))
    (example,) = asked.examples
    end = [method.vocabulary.eos]
    assert example["encoder_tokens"].tolist() == [*method.tokenizer.encode("that is good"), *end]
    assert example["targets"].tolist() == [*method.tokenizer.encode("das ist gut"), *end]
    assert asked.bytes == 11 and not asked.is_cut
    cut = method.examples_for((TEXT, "kurz"))
    assert cut.is_cut and len(cut.examples[0]["encoder_tokens"]) == method.context and cut.bytes == 4


def test_a_text_with_more_holes_than_there_are_sentinels_is_one_line():
    with pytest.raises(UserError, match="sentinel"):
        Targets(loaded_case("t5_1_0"), Scoring()).examples_for(TEXT * 5)


def test_a_decoder_that_fills_holes_is_asked_for_what_was_in_them():
    loaded = dataclasses.replace(
        trained("gpt2", DecoderOnly(SpanCorruption())), tokenizer=loaded_case("t5_1_0").tokenizer
    )
    method = method_of(loaded, Scoring())
    (example,) = (asked := method.examples_for("the cat sat")).examples
    assert isinstance(method, Targets) and "DecoderOnly" in method.description
    dropped = [int(i) for i in example["targets"][example["loss_weights"] > 0]]
    assert asked.bytes == sum(i not in method.vocabulary.special_ids for i in dropped) == 2


REFUSED = [
    ("gpt2", Scoring(context=10, stride=11), "stride=11: it must be a whole number from 1"),
    ("gpt2", Scoring(stride=0), "stride=0: it must be a whole number from 1"),
    ("gpt2", Scoring(stride=2.0), "stride=2.0: it must be a whole number from 1"),
    ("gpt2", Scoring(context=0), "context=0: it must be a whole number from 1"),
    ("gpt2", Scoring(context=4.0), "context=4.0: it must be a whole number from 1"),
    ("gpt2", Scoring(context=999), "the positions that this model has"),
    ("gpt2", Scoring(by_word=True), "by_word=True changes nothing for this decoder, which is scored left to right"),
    ("gpt2", Scoring(seed=3), "seed=3 changes nothing for this decoder"),
    ("bert_masked_lm", Scoring(stride=3), "stride=3 changes nothing for this encoder, which is scored pseudo-log"),
    ("bert_masked_lm", Scoring(context=2), "context=2: a token between [CLS] and [SEP] needs at least 3"),
    ("t5_1_0", Scoring(stride=3), "stride=3 changes nothing for this encoder-decoder"),
    ("electra_small", Scoring(), "it cannot score a text"),
]


@pytest.mark.parametrize("name, scoring, said", REFUSED)
def test_an_option_that_cannot_be_or_does_nothing_is_one_line(name, scoring, said):
    with pytest.raises(UserError, match="^[^\n]*$") as error:
        method_of(loaded_case(name), scoring)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "name, objective, document, said",
    [
        ("gpt2", CausalLM(), ("a", "b"), "a pair of source and target needs a model that reads pairs"),
        ("bert_masked_lm", MaskedLM(), ("a", "b"), "is scored pseudo-log-likelihood: give texts"),
        (
            "t5_1_0",
            SequenceToSequence(),
            "a text",
            "by SequenceToSequence, on pairs: give (source, target)",
        ),
        ("bart", None, ("a", "b"), "was trained by Denoising, which does not support pairs"),
    ],
)
def test_a_document_that_the_model_does_not_read_is_one_line(name, objective, document, said):
    method = method_of(trained(name, objective or Denoising()), Scoring())
    with pytest.raises(UserError) as error:
        method.examples_for(document)
    assert said in str(error.value)
