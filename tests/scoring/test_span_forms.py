"""Tests the input forms for span prediction: the rows of each objective, and the costs of real models per family."""

import dataclasses

import numpy as np
import pytest

from pretrainax.config import UserError
from pretrainax.data.objectives import (
    UL2R,
    CausalLM,
    DecoderOnly,
    Denoising,
    FillInTheMiddle,
    PrefixLM,
    SequenceToSequence,
    SequentialDenoising,
    SpanCorruption,
    TextToText,
)
from pretrainax.data.sources import JsonLines
from pretrainax.scoring.scoring_examples import context_length
from pretrainax.scoring.span_choice import SpanChoice
from pretrainax.scoring.span_forms import BOTH, LEFT, Ids, SpanFormat, span_formats
from pretrainax.scoring.spans import score_spans
from pretrainax.tasks import Instructions, TextGeneration
from tests.support import chain
from tests.support.loaded import loaded_case
from tests.support.tiers import few

IDS = Ids(*(np.array(ids, np.int32) for ids in ([11, 12], [21, 22], [31, 32, 33])))


def forms(loaded, objective=None):
    """Returns the forms of a model, by the context that they use, as if `objective` had trained the model."""
    experiment = dataclasses.replace(loaded.experiment, objective=objective or loaded.experiment.objective)
    return {form.given: form for form in span_formats(dataclasses.replace(loaded, experiment=experiment))}


def written(tokenizer, example):
    """Formats a row: ids, special tokens by name, "|" at the end of a prefix, and the targets in brackets."""
    piece = lambda i: tokenizer.special_pieces.get(int(i), str(i))  # noqa: E731
    read = list(map(piece, example["tokens"]))
    if "prefix_mask" in example:
        read.insert(int(example["prefix_mask"].sum()), "|")
    asked = [piece(i) for i, w in zip(example["targets"], example["loss_weights"], strict=True) if w]
    source = [" ".join(map(piece, example["encoder_tokens"])) + " ->"] if "encoder_tokens" in example else []
    return f"{' '.join(source + read)} [{' '.join(asked)}]".replace("extra_id_", "")


def rows(loaded, objective, given, ids=IDS):
    return [written(loaded.tokenizer, example) for example in forms(loaded, objective)[given].examples_for(ids)]


@pytest.mark.parametrize(
    "case, objective, given, row",
    [
        ("t5_1_0", SpanCorruption(), BOTH, "11 12 <0> 31 32 33 <1> </s> -> <pad> <0> 21 22 <1> </s> [21 22 <1>]"),
        ("t5_1_0", TextToText(), BOTH, "11 12 <0> 31 32 33 <1> </s> -> <pad> <0> 21 22 <1> </s> [21 22 <1>]"),
        ("t5_1_0", SequentialDenoising(), LEFT, "11 12 </s> -> <pad> 21 [21 22]"),
        (
            "bart",
            Denoising(),
            BOTH,
            "<s> 11 12 <mask> 31 32 33 </s> -> </s> <s> 11 12 21 22 31 32 33 [21 22 31 32 33 </s>]",
        ),
        ("gpt2", CausalLM(), LEFT, "<s> 11 12 21 [21 22]"),  # imported models always read <s> first
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_row_is_as_in_training(case, objective, given, row):
    assert rows(loaded_case(case), objective, given) == [row]


@pytest.mark.parametrize(
    "objective, given, row",
    [
        (CausalLM(), LEFT, "11 12 21 [21 22]"),
        (PrefixLM(), LEFT, "11 12 | 21 [21 22]"),
        (FillInTheMiddle(), BOTH, "<0> 11 12 <1> 31 32 33 <2> 21 22 [21 22 <|endoftext|>]"),
        (FillInTheMiddle(spm_rate=1.0), BOTH, "<0> <1> 31 32 33 <2> 11 12 21 22 [21 22 <|endoftext|>]"),
        (FillInTheMiddle(), LEFT, "11 12 21 [21 22]"),
        (
            DecoderOnly(SpanCorruption()),
            BOTH,
            "11 12 <0> 31 32 33 <1> <|endoftext|> | <0> 21 22 <1> <|endoftext|> [21 22 <1>]",
        ),
        (DecoderOnly(SequentialDenoising()), LEFT, "11 12 <|endoftext|> | 21 [21 22]"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_row_of_a_decoder_is_as_in_training(objective, given, row):
    assert rows(chain.knowing("decoder"), objective, given) == [row]


@pytest.mark.parametrize("task, start", [(TextGeneration(), "<s> "), (Instructions(), "")])
def test_a_decoder_that_learned_to_write_answers_goes_on(task, start):
    """The start is the same as before a prompt: the template of a conversation has its own special tokens."""
    loaded = loaded_case("gpt2")
    source = dataclasses.replace(loaded.experiment.data, source=JsonLines(path="answers"))
    trained = dataclasses.replace(loaded, experiment=dataclasses.replace(loaded.experiment, data=source))
    starting = IDS._replace(is_start=True)
    assert rows(trained, task, LEFT, starting) == [f"{start}11 12 21 [21 22]"]


def test_a_document_begins_behind_the_separator():
    starting = IDS._replace(is_start=True)
    assert rows(chain.knowing("decoder"), CausalLM(), LEFT, starting) == ["<|endoftext|> 11 12 21 [21 22]"]


def test_an_encoder_is_asked_for_one_token_after_the_other():
    asked = rows(chain.knowing("encoder"), None, BOTH)
    assert asked == [
        "[CLS] 11 12 [MASK] [MASK] 31 32 33 [SEP] [21]",
        "[CLS] 11 12 21 [MASK] 31 32 33 [SEP] [22]",
    ]


def test_a_mixture_is_asked_in_its_first_form_for_each_side_with_its_mode():
    both = forms(chain.knowing("encoder_decoder"), UL2R())
    assert set(both) == {BOTH, LEFT}
    tokenizer = chain.tokenizer_of("encoder_decoder")
    modes = {given: tokenizer.decode(both[given].examples_for(IDS)[0]["encoder_tokens"])[:5] for given in both}
    assert modes == {BOTH: "[NLU]", LEFT: "[S2S]"}


@pytest.mark.parametrize(
    "case, objective",
    [
        ("electra_small", None),
        ("transformer", SequenceToSequence()),
        ("t5_1_0", TextGeneration()),
        ("bart", Denoising(infilling_rate=0.0, masking_rate=0.1)),
    ],
)
def test_a_model_that_fills_no_spans_is_refused_by_name(case, objective):
    with pytest.raises(UserError, match=f"tests/golden, {case}, of the family .* cannot fill a span: use a decoder"):
        forms(loaded_case(case), objective)


def test_the_generator_of_electra_is_asked():
    assert set(forms(loaded_case("electra_small_generator"))) == {BOTH}


# --- room -----------------------------------------------------------------------------------------------------------


def sizes(given, longest, left=10, span=3, right=10):
    ids = Ids(*(np.arange(n) for n in (left, span, right)), is_start=True)
    fitted = SpanFormat(given, 2, False, lambda ids: []).fitted(ids, longest)
    assert fitted.left.tolist() == list(range(left))[left - len(fitted.left) :]
    assert fitted.right.tolist() == list(range(right))[: len(fitted.right)]
    assert fitted.is_start == (len(fitted.left) == left)
    return len(fitted.left), len(fitted.right)


def test_each_side_has_half_of_the_room_and_what_the_other_leaves():
    assert sizes(BOTH, 64) == (10, 10)
    assert sizes(BOTH, 15) == (5, 5)
    assert sizes(BOTH, 16) == (6, 5)
    assert sizes(BOTH, 15, left=2) == (2, 8)
    assert sizes(BOTH, 15, right=1) == (9, 1)
    assert sizes(LEFT, 15) == (10, 0)
    assert sizes(LEFT, 12) == (7, 0)
    with pytest.raises(UserError, match="a span of 3 tokens leaves no room for its context in the 6 tokens"):
        sizes(BOTH, 6)


@pytest.mark.parametrize(
    "form",
    [
        *forms(chain.knowing("encoder")).values(),
        *forms(chain.knowing("encoder_decoder"), UL2R()).values(),
        *forms(loaded_case("bart"), Denoising()).values(),
        *forms(chain.knowing("decoder"), FillInTheMiddle(fim_rate=0.5)).values(),
        *forms(chain.knowing("decoder"), DecoderOnly(SpanCorruption())).values(),
    ],
    ids=lambda form: form.given,
)
def test_a_row_is_never_longer_than_the_model_reads(form):
    ids = Ids(*(np.arange(10, 10 + n, dtype=np.int32) for n in (40, 3, 40)))
    fitted = form.fitted(ids, 30)
    examples = form.examples_for(fitted)
    rows = [len(example[name]) for example in examples for name in ("tokens", "encoder_tokens") if name in example]
    assert max(rows) <= 30 and len(fitted.left) > 3


# --- real models ----------------------------------------------------------------------------------------------------

TEXTS = ["the cat sat on the mat and the dog ran, so it is.", "a long day in june. we all went home by train."]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", few(("gpt2", "bert", "roberta", "deberta", "t5_1_0", "bart"), ("gpt2", "bert", "t5_1_0"))
)
def test_what_a_model_pays_is_what_its_logits_say(case):
    """Compares scores computed row by row, without padding, with the scores in batches."""
    loaded = loaded_case(case)
    (of,) = score_spans(loaded, TEXTS, SpanChoice(share=0.2, mean_bytes=5, context=12))
    assert len(of.spans) > 3
    for span, said in list(zip(of.spans, of.token_bits, strict=True))[:2]:
        parts = [loaded.tokenizer.encode(text) for text in (span.left, span.text, span.right)]
        nats = 0.0
        ids = of.form.fitted(Ids(*parts, is_start=span.is_start), context_length(loaded))
        for example in of.form.examples_for(ids):
            batch = {name: array[None] for name, array in example.items() if name != "loss_weights"}
            logits = np.asarray(loaded(batch).heads["lm"].logits(), np.float64)[0]
            logp = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            nats -= (logp[np.arange(len(logp)), example["targets"]] * example["loss_weights"]).sum()
        assert said == pytest.approx(nats / np.log(2), rel=1e-4)
