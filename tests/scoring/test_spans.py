"""Tests span costs: exact for a known entropy, for the same bytes with every tokenizer, with no part for free."""

import dataclasses
import functools
import math

import numpy as np
import pytest

from pretrainax.config import UserError
from pretrainax.data.objectives import ObjectiveMixture, SpanCorruption
from pretrainax.data.sources import NoSource, TextFiles
from pretrainax.scoring.results import results_table, with_verdicts
from pretrainax.scoring.span_choice import Span, SpanChoice
from pretrainax.scoring.span_forms import span_formats
from pretrainax.scoring.spans import difference, difference_results, encode, length_bits, score_chosen, score_spans
from pretrainax.tokenization import BPE, ByteBPE, Characters, PretrainedTokenizer, Unigram, WordPiece
from tests.support import chain
from tests.support import huggingface_directories as directories

CHOICE = SpanChoice(share=0.2, mean_bytes=6, context=24)
FAMILIES = ("decoder", "encoder", "encoder_decoder")


@pytest.fixture(scope="module")
def scores():
    """Returns the scores of one model per family that knows the Markov chain."""
    texts = chain.texts(100, 60)
    return {family: score_spans(chain.knowing(family), texts, CHOICE)[0] for family in FAMILIES}


# --- a source of known entropy --------------------------------------------------------------------------------------

WORTH = {
    "decoder": lambda span: chain.bits_given_left(span.left, span.text),
    "encoder": lambda span: chain.bits_given_both(span.left, span.text, span.right),
    "encoder_decoder": lambda span: chain.bits_with_end(span.left, span.text, span.right),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_who_knows_the_chain_pays_for_each_span_what_it_is_worth(scores, family):
    of = scores[family]
    np.testing.assert_allclose(of.token_bits, [WORTH[family](span) for span in of.spans], atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_who_knows_the_chain_pays_its_conditional_entropy_on_average(scores, family):
    of = scores[family]
    entropy = [chain.entropy(family, len(span.text.split())) for span in of.spans]
    left_over = of.per_byte(of.token_bits - entropy)
    assert abs(left_over.value) < 3 * left_over.standard_error < 0.1


@pytest.mark.first(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_who_believes_something_else_pays_more_than_the_entropy(scores, family):
    doubting = score_spans(chain.knowing(family, doubt=0.2), chain.texts(100, 60), CHOICE)[0]
    more = difference(doubting, scores[family])
    assert more.value > 3 * more.standard_error > 0


# --- counts ---------------------------------------------------------------------------------------------------------


def test_all_families_are_asked_for_the_same_bytes(scores):
    assert len({of.fingerprint for of in scores.values()}) == 1
    assert len({(int(of.bytes.sum()), len(of.spans)) for of in scores.values()}) == 1
    of = scores["decoder"]
    assert of.bytes.tolist() == [len(span.text.encode()) for span in of.spans]


def test_the_figure_is_all_bits_over_all_bytes_with_its_error_over_documents(scores):
    of = scores["encoder"]
    figure, length = of.results("a chain")
    assert figure.value == pytest.approx((of.token_bits.sum() + of.length.sum()) / of.bytes.sum())
    assert (figure.measure, length.measure) == ("span_bits_per_byte", "span_bits_per_byte_for_length")
    assert length.value == pytest.approx(of.length.sum() / of.bytes.sum())
    halves = [of.documents % 2 == half for half in (0, 1)]
    apart = [of.bits[half].sum() / of.bytes[half].sum() for half in halves]
    assert abs(apart[0] - apart[1]) < 3 * 2 * figure.standard_error
    assert figure.counts == {"documents": 100, "spans": len(of.spans), "bytes": of.bytes.sum()}
    (own,) = scores["encoder_decoder"].results("a chain")
    assert "the model predicts its end" in own.how and "with the cost of its number" in figure.how


def test_the_number_of_tokens_is_paid_by_how_often_it_comes_in_other_documents():
    bits = length_bits(np.array([1, 1, 2, 1, 5]), np.array([0, 0, 0, 1, 2]))
    # One of the two spans of other documents has 1 token. A pseudo-count of 1 adds the weight 1 / (k (k + 1)) to k.
    np.testing.assert_allclose(2.0 ** -bits[:3], [(1 + 1 / 2) / 3, (1 + 1 / 2) / 3, (0 + 1 / 6) / 3])
    np.testing.assert_allclose(2.0 ** -bits[3:], [(2 + 1 / 2) / 5, (0 + 1 / 30) / 5])


def test_all_numbers_of_tokens_together_have_a_chance_of_one():
    chances = 2.0 ** -np.array(
        [length_bits(np.array([1, 3, 3, k]), np.array([0, 0, 1, 2]))[-1] for k in range(1, 2000)]
    )
    assert chances.sum() == pytest.approx(1, abs=1e-3)


def test_a_difference_is_of_the_same_spans_and_its_error_is_smaller_than_that_of_either(scores):
    between = difference(scores["decoder"], scores["encoder"])
    apart = [scores[family].bits_per_byte for family in ("decoder", "encoder")]
    assert between.value == pytest.approx(apart[0].value - apart[1].value)
    assert between.standard_error < math.hypot(*(figure.standard_error for figure in apart))
    others = score_spans(chain.knowing("decoder"), chain.texts(3, 60), CHOICE)[0]
    with pytest.raises(UserError, match="scored on different spans"):
        difference(others, scores["encoder"])


def test_a_tokenizer_that_changes_the_text_is_a_caveat_of_its_cost_and_of_differences(scores):
    exact, changed = scores["encoder"], np.zeros(len(scores["encoder"].spans), bool)
    changed[: len(changed) // 2] = True
    lossy = dataclasses.replace(exact, is_changed=changed, origin="runs/lossy")
    share = exact.bytes[changed].sum() / exact.bytes.sum()
    caveat = f"{share:.1%} of the bytes do not round-trip in runs/lossy: its cost is too low"
    assert exact.caveat == exact.results("x")[0].note == "" and lossy.results("x")[0].note == caveat
    (between,) = difference_results([exact], [lossy], "x")
    assert between.note == caveat and caveat in results_table(with_verdicts([between]))
    assert with_verdicts([between])[0].note.startswith("not distinguishable; ")  # equal costs


def test_a_small_share_of_changed_text_is_not_0_percent(scores):
    exact = scores["encoder"]
    few = [exact.spans[0]._replace(text="a" * 50_000), exact.spans[1]]
    is_changed = np.array([False, True])
    arrays = {name: x[:2] for name, x in vars(exact).items() if isinstance(x, np.ndarray)}
    lossy = dataclasses.replace(exact, **arrays | {"spans": few, "is_changed": is_changed})
    assert 0 < lossy.bytes[1] / lossy.bytes.sum() < 0.0005
    assert lossy.caveat.startswith("0.1% of the bytes do not round-trip")


@pytest.mark.parametrize(
    "objective, source, longest",
    [
        (SpanCorruption(), "books", 8),  # 10 of 70 tokens, in 3 spans.
        (SpanCorruption(noise_density=0.3, mean_span_length=8.0), "books", 24),  # 26 of 86 tokens in 3 spans.
        (ObjectiveMixture((SpanCorruption(), SpanCorruption(0.3, 8.0)), (1.0, 1.0)), "books", 24),
        (SpanCorruption(), None, None),  # an imported model
    ],
)
def test_spans_longer_than_each_span_of_the_training_are_a_caveat(objective, source, longest):
    knowing = chain.knowing("encoder_decoder")
    source = NoSource() if source is None else TextFiles(source)
    data = dataclasses.replace(knowing.experiment.data, sequence_length=64, source=source)
    experiment = dataclasses.replace(knowing.experiment, data=data, objective=objective)
    (form,) = span_formats(dataclasses.replace(knowing, experiment=experiment))
    assert form.longest == longest
    of = score_spans(dataclasses.replace(knowing, experiment=experiment), chain.texts(20, 60), CHOICE)[0]
    tokens = np.array([len(ids.span) for ids in encode(knowing.tokenizer, of.spans)])
    assert of.is_long.tolist() == (tokens > (longest or 1000)).tolist()
    share = of.bytes[of.is_long].sum() / of.bytes.sum()
    note = f"{share:.1%} of the bytes are in spans that have, in {of.origin}, more than the {longest} tokens of"
    assert of.results("x")[0].note.startswith(note if share else "") and bool(share) == (longest == 8)


def test_a_word_that_the_tokenizer_does_not_know_is_paid_for_in_full():
    texts = [text.replace("mi", "né") for text in chain.texts(5, 60)]
    of = score_spans(chain.knowing("encoder"), texts, CHOICE)[0]
    assert of.unknown.tolist() == [8 * len(" né".encode()) * span.text.count("né") for span in of.spans]
    assert of.is_changed.tolist() == ["né" in span.text for span in of.spans]
    assert [result.measure for result in of.results("")][2:] == [
        "span_bits_per_byte_for_unknown_words",
        "span_share_changed",
    ]


def test_a_word_that_the_tokenizer_drops_has_the_length_cost_of_one_id():
    """WordPiece drops U+FFFD, which replaces bytes that are not UTF-8, and zero-width spaces."""
    loaded, spans = chain.knowing("encoder"), [Span(i, "ka", " lo", " tu", True) for i in range(3)]
    dropped = score_chosen(loaded, [spans[0]._replace(text=" \ufffd"), *spans[1:]])[0]
    assert dropped.token_bits[0] == 0 and dropped.is_changed.tolist() == [True, False, False]
    np.testing.assert_array_equal(dropped.length, score_chosen(loaded, spans)[0].length)


def test_surroundings_that_are_longer_than_the_model_reads_are_cut_and_counted():
    wide = SpanChoice(share=0.05, mean_bytes=6, context=500)
    of = score_spans(chain.knowing("decoder"), chain.texts(2, 300), wide)[0]
    assert of.is_cut.any() and not of.is_cut.all()
    np.testing.assert_allclose(of.token_bits, [WORTH["decoder"](span) for span in of.spans], atol=1e-4)
    assert of.results("")[0].counts["spans with surroundings cut"] == of.is_cut.sum()


def test_what_cannot_be_asked_is_one_clear_line():
    with pytest.raises(UserError, match="a span of .* tokens leaves no room .* in the 64 tokens .*mean_bytes"):
        score_spans(chain.knowing("encoder"), chain.texts(1, 900), SpanChoice(share=0.9, mean_bytes=900))
    with pytest.raises(UserError, match="no text is long enough for a span"):
        score_spans(chain.knowing("encoder"), ["two words"])


# --- tokenizers -----------------------------------------------------------------------------------------------------

TEXT = (
    "The cat sat\n\non the mat.  Two  spaces, \tand a tab.\nhéllo wörld ½ 😀 İstanbul, "
    "漢字かな交じり文。 and 年年歲歲花相似 x1234's [MASK] <extra_id_0> end. " * 3
)


@functools.cache
def tokenizers(name, folder):
    sample = [*directories.lines(), TEXT]
    kinds = {
        "byte BPE": ByteBPE(vocab_size=600),
        "unigram": Unigram(vocab_size=700),
        "BPE": BPE(vocab_size=700),
        "characters": Characters(),
    }
    if name in kinds:
        return kinds[name].build(iter(sample))
    files = {
        "bytes": {"tokenizer_config__json": {"tokenizer_class": "ByT5Tokenizer"}},
        "LLaMA": {"tokenizer__model": directories.llama_spiece()},
        "LLaMA 3": {"tokenizer__json": directories.llama3()},
        "Gemma": {"tokenizer__model": directories.gemma_spiece()},
    }
    return PretrainedTokenizer(path=directories.directory(folder / name.replace(" ", "_"), **files[name])).load()


LOSSLESS = ("byte BPE", "unigram", "BPE", "characters", "bytes", "LLaMA", "LLaMA 3", "Gemma")


@pytest.mark.parametrize("name", LOSSLESS)
def test_the_ids_of_a_span_and_its_sides_spell_the_text_to_the_byte(name, tmp_path_factory):
    tokenizer = tokenizers(name, tmp_path_factory.mktemp("tokenizers"))
    spans = list(SpanChoice(share=0.4, mean_bytes=8, context=30).spans([TEXT]))
    assert len(spans) > 10
    spellings = tokenizer.spellings()
    for span, ids in zip(spans, encode(tokenizer, spans), strict=True):
        for text, part in zip(span[1:4], ids[:3], strict=True):
            spelled = b"".join(spellings[i] for i in part)
            assert spelled.removeprefix(b" " * (span.is_start and text is span.left)) == text.encode()


def test_a_tokenizer_that_changes_a_text_is_asked_for_its_pieces_between_the_others():
    tokenizer = WordPiece(vocab_size=300).build(iter([TEXT, *directories.lines()]))
    spans = list(SpanChoice(share=0.4, mean_bytes=8, context=30).spans([TEXT]))
    for span, ids in zip(spans, encode(tokenizer, spans), strict=True):
        joined = tokenizer.encode(span.left + span.text + span.right)
        np.testing.assert_array_equal(np.concatenate(ids[:3]), joined)
