"""Tests filling holes with text of any length; the reference is plain forward passes over all fillings."""

import dataclasses

import jax
import numpy as np
import pytest

from pretrainax.config import UserError
from pretrainax.data.objectives import (
    UL2R,
    CausalLM,
    DecoderOnly,
    Denoising,
    FillInTheMiddle,
    MixtureOfDenoisers,
    SequenceToSequence,
    SpanCorruption,
    TextToText,
)
from pretrainax.inference.fill import fill
from pretrainax.inference.fill_spans import _prompt_builder
from pretrainax.inference.holes import Holes
from tests.support.loaded import letters, loaded_case

TRAINED = {
    "t5": ("t5_1_1", SpanCorruption(), 10),
    "bart": ("bart", Denoising(), 0),
    "middle": ("gpt2", FillInTheMiddle(), 3),
    "decoder_only": ("gpt2", DecoderOnly(), 3),
}
KINDS = pytest.mark.parametrize("kind", TRAINED)
TEXT = "a [MASK]b c"  # each letter is a token
ALL = {"top": 29, "max_new_tokens": 1}  # as many beams as letters, so the search considers all fillings


def trained(name, objective, sentinels=3):
    """Returns the loaded model of a case as if an objective had trained it."""
    loaded = loaded_case(name)
    experiment = dataclasses.replace(loaded.experiment, objective=objective)
    pad_id = loaded.tokenizer.vocabulary.pad
    return dataclasses.replace(loaded, experiment=experiment, tokenizer=letters(pad_id, sentinels))


@pytest.fixture(scope="module")
def models():
    return {kind: trained(*of) for kind, of in TRAINED.items()}


def asked(kind: str, loaded) -> tuple[list[int], list[int], int]:
    """Returns the tokens for TEXT by the papers: encoder input, decoder input before the span, end of the span."""
    v, (before, after) = loaded.tokenizer.vocabulary, (loaded.tokenizer.encode(x).tolist() for x in ("a ", "b c"))
    x, y, z = v.sentinels[:3] or (None, None, None)
    return {
        "t5": ([*before, x, *after, v.eos], [v.pad, x], y),
        "bart": ([v.bos, *before, v.mask, *after, v.eos], [v.eos, v.bos, *before], after[0]),
        "middle": ([], [v.bos, x, *before, y, *after, z], v.eos),
        "decoder_only": ([], [*before, x, *after, v.eos, x], y),
    }[kind]


def logs_after(loaded, read: list[int], rows: list[list[int]], prefix: int = 0) -> np.ndarray:
    """Returns the log-probabilities after each token of each row, [B, T, V]."""

    def side(rows, name=""):
        tokens = np.array(rows, np.int32)
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        return {f"{name}tokens": tokens, f"{name}segment_ids": np.ones_like(tokens), f"{name}positions": positions}

    batch = side(rows) | (side([read] * len(rows), "encoder_") if read else {})
    if prefix:
        batch["prefix_mask"] = (batch["positions"] < prefix).astype(np.int32)
    return np.asarray(jax.nn.log_softmax(loaded(batch).heads["lm"].logits()))


@pytest.mark.slow
@KINDS
def test_the_candidates_are_the_likeliest_of_all_fillings(kind, models):
    loaded = models[kind]
    read, given, end = asked(kind, loaded)
    vocabulary = loaded.tokenizer.vocabulary
    letters = [i for i in range(vocabulary.size) if i not in vocabulary.special_ids and i != end]
    prefix = len(given) - 1 if kind == "decoder_only" else 0
    logs = logs_after(loaded, read, [[*given, i] for i in letters], prefix)
    wanted = {"": logs[0, len(given) - 1, end]}
    for row, i in enumerate(letters):
        wanted[loaded.tokenizer.decode([i])] = logs[row, len(given) - 1, i] + logs[row, len(given), end]
    filled = fill(loaded, TEXT, **ALL)
    found = filled.holes[0]
    best = sorted(wanted, key=wanted.__getitem__, reverse=True)
    for text, candidate in zip(best[:5], found, strict=False):
        # Two sums in float32. The text of a space alone is empty.
        assert (candidate.text, candidate.probability) == (text.strip(), pytest.approx(np.exp(wanted[text]), rel=1e-3))
    assert filled.text == TEXT.replace("[MASK]", best[0])
    probabilities = [candidate.probability for candidate in found]
    assert len(found) == 29 and probabilities == sorted(probabilities, reverse=True)


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_hole_is_filled_given_those_before_it(kind, models):
    loaded = models[kind]
    v, encode = loaded.tokenizer.vocabulary, lambda text: loaded.tokenizer.encode(text).tolist()
    first, second = (hole[0] for hole in fill(loaded, "a[MASK]bc[MASK]d", **ALL).holes)
    a, bc, d = map(encode, ("a", "bc", "d"))
    if kind == "t5":
        x, y, z = v.sentinels[:3]
        read, given = [*a, x, *bc, y, *d, v.eos], [v.pad, x, *encode(first.text), y]
    else:
        z, read = d[0], [v.bos, *a, v.mask, *bc, v.mask, *d, v.eos]
        given = [v.eos, v.bos, *a, *encode(first.text), *bc]
    said = encode(second.text)
    logs = logs_after(loaded, read, [[*given, *said]])[0]
    total = sum(logs[len(given) - 1 + n, i] for n, i in enumerate([*said, z]))
    assert second.probability == pytest.approx(np.exp(total), rel=1e-3)


def question(loaded, text: str, *spans: str):
    """Returns the model's input for the hole after these spans, and the token that ends the span."""
    encode = loaded.tokenizer.encode
    example, end = _prompt_builder(loaded, Holes(loaded.tokenizer, text))([encode(span).tolist() for span in spans])
    return {name: x.tolist() for name, x in example.items()}, end


def test_sentinels_and_masks_are_the_same_holes(models):
    plain, numbered, own = (question(models["t5"], f"a {hole}b c") for hole in ("[MASK]", "<extra_id_0>", "<mask>"))
    assert plain == numbered == own


def test_a_hole_that_ends_a_text_is_over_at_the_end_of_the_targets(models):
    v = models["t5"].tokenizer.vocabulary
    assert question(models["t5"], "a[MASK]b[MASK]")[1] == v.sentinels[1]
    assert question(models["t5"], "a[MASK]b[MASK]", "c")[1] == v.eos
    assert question(models["t5"], "a[MASK]b[MASK]c", "c")[1] == v.sentinels[2]
    last = [question(models["t5"], "a[MASK]b[MASK]c[MASK]", *said)[1] for said in ((), ("c",), ("c", "d"))]
    assert last == [*v.sentinels[1:3], v.eos]
    assert question(models["t5"], "a[MASK]")[1] == v.eos
    assert question(models["bart"], "a[MASK]")[1] == v.eos


@pytest.mark.parametrize("spm_rate, order", [(0.5, "<PRE> a <SUF> b <MID>"), (1.0, "<PRE> <SUF> b <MID> a")])
def test_a_middle_is_asked_for_in_an_order_of_training(spm_rate, order):
    loaded = trained("gpt2", FillInTheMiddle(spm_rate=spm_rate))
    v, encode = loaded.tokenizer.vocabulary, loaded.tokenizer.encode
    ids = dict(zip(("<PRE>", "<SUF>", "<MID>"), v.sentinels, strict=True)) | {c: encode(c)[0] for c in "ab"}
    assert question(loaded, "a[MASK]b")[0]["tokens"] == [v.bos, *map(ids.get, order.split())]


@pytest.mark.parametrize("objective", [UL2R(), MixtureOfDenoisers(), TextToText(), SpanCorruption(mode="b")])
def test_of_a_mixture_the_first_part_that_takes_out_spans_is_asked_for(objective):
    loaded, both = trained("t5_1_1", objective), trained("gpt2", DecoderOnly(objective=objective))
    read = question(loaded, "a[MASK]c")[0]["encoder_tokens"]
    mode = next(getattr(part, "mode", "") for _, part in objective.components() if isinstance(part, SpanCorruption))
    v, encode = loaded.tokenizer.vocabulary, lambda text: loaded.tokenizer.encode(text).tolist()
    assert read == [*encode(mode), *encode("a"), v.sentinels[0], *encode("c"), v.eos]
    joined = question(both, "a[MASK]c")[0]
    assert joined["tokens"] == [*read, v.sentinels[0]] and joined["prefix_mask"] == [1] * len(read) + [0]


@pytest.mark.parametrize(
    "name, objective, text, options, said",
    [
        ("gpt2", CausalLM(), TEXT, {}, "is a decoder trained by CausalLM, which fills no holes: it generates"),
        ("t5_1_1", SequenceToSequence(), TEXT, {}, "is an encoder-decoder trained by SequenceToSequence"),
        ("gpt2", FillInTheMiddle(), "[MASK] a [MASK]", {}, "the text has 2 holes, .* leave one"),
        ("gpt2", FillInTheMiddle(), "ab" * 9 + "[MASK]", {}, "the text is 18 tokens, .* at most 16 and 4 special ones"),
        ("bart", Denoising(), "a[MASK][MASK]b", {}, "two holes of the text stand side by side"),
        ("bart", Denoising(), "a <extra_id_0>", {}, "not trained to fill in: write \\[MASK\\]"),
        ("t5_1_1", SpanCorruption(), "<extra_id_5>", {}, "the tokenizer has <extra_id_0> to <extra_id_2>"),
        ("t5_1_1", SpanCorruption(), TEXT, {"order": "at_once"}, "fills holes from left to right: leave it out"),
        ("t5_1_1", SpanCorruption(), TEXT, {"max_new_tokens": 0}, "max_new_tokens is 0, it must be"),
        ("t5_1_1", SpanCorruption(), "text", {}, "no hole to fill in"),
        ("bert", None, "[MASK]", {"max_new_tokens": 3}, "fills each mask with one token: leave it out"),
    ],
)
def test_a_mistake_is_one_line(name, objective, text, options, said):
    loaded = loaded_case(name) if objective is None else trained(name, objective)
    with pytest.raises(UserError, match=said) as e:
        fill(loaded, text, **options)
    assert "\n" not in str(e.value)
