"""Tests NextSentencePrediction and SentenceOrderPrediction: the paper's examples, BERT's lengths, balanced labels."""

import dataclasses
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrainax.config import DataConfig, Experiment, ModelConfig, UserError
from pretrainax.data.framing import special_token_frame
from pretrainax.data.objectives import (
    CausalLM,
    Lengths,
    MaskedLM,
    NextSentencePrediction,
    ObjectiveInput,
    SentenceOrderPrediction,
)
from pretrainax.data.objectives.sentence_pairs import truncate_pair
from pretrainax.data.preparation.sentences import split
from pretrainax.tokenization import Unigram
from pretrainax.tokenization.base import Vocabulary
from pretrainax.tokenization.frames import RowFrame, SpecialTokenFrame

PAD, UNK, CLS, SEP, MASK = range(5)
VOCABULARY = Vocabulary(size=1000, pad=PAD, unk=UNK, cls=CLS, sep=SEP, mask=MASK)
BOTH = (NextSentencePrediction, SentenceOrderPrediction)
SENTENCES = st.lists(st.lists(st.integers(5, 999), min_size=1, max_size=9), min_size=1, max_size=8)


def text(*sentences, others=()):
    """Makes a text of sentences of ids; its `draw_other_document` returns a text of `others`."""
    tokens = np.array([i for sentence in sentences for i in sentence], np.int32)
    ends = np.cumsum([len(sentence) for sentence in sentences])
    return ObjectiveInput(
        tokens, np.ones(len(tokens), np.int32), ends, 1.0, (lambda rng: text(*others)) if others else None
    )


def example(objective, text, seed=0, vocabulary=VOCABULARY):
    return objective.example(text, np.random.default_rng(seed), vocabulary)


def random_text(rng, sentences, longest, first=5):
    """Draws sentences of 1 to `longest` ids from `first` on.

    Other documents have ids below 500 and up to three times as many sentences.
    """

    def draw_other_document(rng):
        return random_text(rng, rng.integers(1, 3 * sentences + 1), longest)

    parts = [rng.integers(first, first + 495, rng.integers(1, longest + 1)) for _ in range(sentences)]
    return text(*parts)._replace(draw_other_document=draw_other_document)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "vocabulary, between",
    [(VOCABULARY, [SEP]), (Vocabulary(size=1000, pad=PAD, bos=CLS, cls=CLS, eos=SEP, sep=SEP, mask=MASK), [SEP, SEP])],
    ids=("BERT", "RoBERTa"),
)
def test_pairs_have_the_special_tokens_of_tasks(vocabulary, between, kind):
    objective = kind(short_fraction=0.0).bind(types.SimpleNamespace(vocabulary=vocabulary))
    lengths = objective.lengths(16)
    given = text(*[[10 + i] for i in range(lengths.raw)], others=[[20 + i] for i in range(lengths.raw)])
    row = example(objective, given, vocabulary=vocabulary)
    first, second = objective.segments(row)
    tokens = row["tokens"].copy()
    tokens[row["masked_positions"]] = row["targets"]
    assert tokens.tolist() == [CLS, *first, *between, *second, SEP]
    assert tokens.tolist() == special_token_frame("encoder", vocabulary).wrap([first, second])[0].tolist()
    assert len(tokens) == 16 == objective.measure(lengths.raw).inputs


# --- the papers' examples ------------------------------------------------------------------------------------------

WORDS = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] the man went to store he bought a gallon of milk "
    "penguin ##s are flight ##less birds"
).split()
STORE, MILK, PENGUINS = (
    [WORDS.index(word) for word in sentence.split()]
    for sentence in ("the man went to the store", "he bought a gallon of milk", "penguin ##s are flight ##less birds")
)


@pytest.mark.parametrize(
    "kind, row, label",
    [
        (
            NextSentencePrediction,
            "[CLS] the man went to [MASK] store [SEP] he bought a gallon [MASK] milk [SEP]",
            0,
        ),
        (
            NextSentencePrediction,
            "[CLS] the man [MASK] to the store [SEP] penguin [MASK] are flight ##less birds [SEP]",
            1,
        ),
        (
            SentenceOrderPrediction,
            "[CLS] he bought a gallon [MASK] milk [SEP] the man went to [MASK] store [SEP]",
            1,
        ),
    ],
)
def test_the_examples_of_the_paper(kind, row, label):
    """Reproduces Devlin et al. 2018, appendix A.1.

    One of the seeds draws the paper's masks, one of 55 pairs of positions, and the paper's replacements.
    """
    vocabulary = dataclasses.replace(VOCABULARY, size=len(WORDS))
    pair = text(STORE, MILK, others=[PENGUINS])
    rows = (example(kind(), pair, seed, vocabulary) for seed in range(20_000))
    found = next(found for found in rows if " ".join(WORDS[i] for i in found["tokens"]) == row)
    assert found["pair_labels"] == label
    assert found["token_types"].tolist() == [0] * 8 + [1] * 7
    assert found["segment_ids"].tolist() == [1] * 15
    assert found["positions"].tolist() == list(range(15))
    masked = [place for place, word in enumerate(row.split()) if word == "[MASK]"]
    assert found["masked_positions"].tolist() == masked
    unmasked = found["tokens"].copy()
    unmasked[masked] = found["targets"]
    second = MILK if label == 0 else PENGUINS if kind is NextSentencePrediction else STORE
    first = MILK if second is STORE else STORE
    assert unmasked.tolist() == [CLS, *first, SEP, *second, SEP]


# --- lengths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
def test_lengths_leave_room_for_cls_and_two_sep(kind):
    assert kind().lengths(512) == Lengths(raw=509, inputs=512, targets=77)  # 0.15 * 512 = 76.8


@pytest.mark.parametrize("kind", BOTH)
@given(sentences=SENTENCES, seed=st.integers(0, 2**32), short=st.booleans())
def test_examples_are_no_longer_than_announced(kind, sentences, seed, short):
    whole = text(*sentences, others=[[5, 6, 7]] * 20)
    if kind is SentenceOrderPrediction and len(whole.tokens) == 1:
        return
    objective = kind(short_fraction=float(short))
    lengths = objective.measure(len(whole.tokens))
    row = example(objective, whole, seed)
    assert 5 <= len(row["tokens"]) <= lengths.inputs
    assert len(row["targets"]) <= lengths.targets


def test_a_single_token_has_no_order():
    assert SentenceOrderPrediction().measure(1).targets == 0


def test_next_and_other_pairs_are_equally_long():
    rng, lengths = np.random.default_rng(0), ([], [])
    for seed in range(3000):
        row = example(NextSentencePrediction(), random_text(rng, 8, 20), seed)
        lengths[int(row["pair_labels"])].append(len(row["tokens"]))
    following, other = map(np.array, lengths)
    deviation = np.sqrt(following.var() / len(following) + other.var() / len(other))
    assert abs(following.mean() - other.mean()) < 5 * deviation


def test_the_first_segment_ends_after_any_sentence():
    ten = text(*[[i] for i in range(5, 15)], others=[[500]] * 20)  # Sentences of one token are not truncated.
    rows = [example(NextSentencePrediction(short_fraction=0.0), ten, seed) for seed in range(4500)]
    counts = np.bincount([np.count_nonzero(row["token_types"] == 0) - 2 for row in rows], minlength=10)
    assert counts[0] == 0
    assert np.abs(counts[1:10] - 500).max() < 5 * np.sqrt(4500 * 1 / 9 * 8 / 9)  # 5 standard deviations


def test_one_in_ten_is_short():
    hundred = text(*[[i] for i in range(5, 105)])
    pairs = np.array([len(example(SentenceOrderPrediction(), hundred, s)["tokens"]) - 3 for s in range(5000)])
    short = pairs[pairs < 100]
    assert abs(len(short) - 500) < 5 * np.sqrt(5000 * 0.1 * 0.9)  # 5 standard deviations
    assert (short.min(), short.max()) == (2, 99)
    assert abs(short.mean() - 50.5) < 5 * np.sqrt(98**2 / 12 / len(short))  # 5 standard deviations of a uniform mean


def test_short_texts_begin_with_any_sentence():
    hundred = text(*[[i] for i in range(5, 105)])
    objective = SentenceOrderPrediction(short_fraction=1.0)
    firsts = [objective.restore(example(objective, hundred, seed), VOCABULARY)[0] for seed in range(300)]
    assert len(set(firsts)) > 50


def truncate_one_by_one(first, second, room, rng):
    """Truncates a pair as BERT's code does, one token at a time."""
    first, second = list(first), list(second)
    while len(first) + len(second) > room:
        longer = first if len(first) > len(second) else second
        longer.pop(0 if rng.random() < 0.5 else -1)
    return first, second


@given(st.integers(1, 12), st.integers(1, 12), st.integers(2, 30))
def test_a_pair_is_truncated_to_the_lengths_of_one_by_one(first, second, room):
    one, other = (
        truncate(np.arange(first), np.arange(second), room, np.random.default_rng(0))
        for truncate in (truncate_pair, truncate_one_by_one)
    )
    assert list(map(len, one)) == list(map(len, other))


def test_a_pair_is_truncated_at_both_ends_alike():
    rng = np.random.default_rng(0)
    cut = [truncate_pair(np.arange(20), np.arange(3), 15, rng)[0] for _ in range(2000)]  # Removes 8 of 20.
    assert all((np.diff(c) == 1).all() and len(c) == 12 for c in cut)
    fronts = np.array([c[0] for c in cut])
    assert abs(fronts.mean() - 4) < 5 * np.sqrt(8 * 0.25 / 2000)  # 5 standard deviations of a binomial mean
    assert abs(fronts.var() - 2) < 5 * 2 * np.sqrt(2 / 2000)  # about 5 of the variance


# --- labels --------------------------------------------------------------------------------------------------------


def test_half_of_the_pairs_follow():
    rng = np.random.default_rng(0)
    rows = [example(NextSentencePrediction(), random_text(rng, 5, 9, first=500), seed) for seed in range(4000)]
    assert abs(np.mean([row["pair_labels"] for row in rows]) - 0.5) < 2.5 / np.sqrt(4000)  # 5 standard deviations


def test_another_document_is_elsewhere():
    rng = np.random.default_rng(0)
    objective = NextSentencePrediction()
    for seed in range(200):
        row = example(objective, random_text(rng, 5, 9, first=500), seed)
        first, second = objective.segments(row)
        assert (first >= 500).all()
        assert ((second < 500) == row["pair_labels"]).all()


def test_a_single_sentence_is_followed_by_another_document():
    alone = text(range(500, 530), others=[range(5, 25)])
    rows = [example(NextSentencePrediction(), alone, seed) for seed in range(50)]
    assert {int(row["pair_labels"]) for row in rows} == {1}
    assert {len(row["tokens"]) for row in rows} == {33}


def test_half_of_the_segments_are_swapped():
    pair = text([5, 6], [7, 8, 9])
    rows = [example(SentenceOrderPrediction(), pair, seed) for seed in range(4000)]
    assert abs(np.mean([row["pair_labels"] for row in rows]) - 0.5) < 2.5 / np.sqrt(4000)  # 5 standard deviations


def test_a_single_sentence_is_parted_anywhere():
    rows = [example(SentenceOrderPrediction(), text(range(5, 10)), seed) for seed in range(200)]
    assert {int(np.count_nonzero(row["token_types"])) for row in rows} == {2, 3, 4, 5}  # including a [SEP]
    assert {int(row["pair_labels"]) for row in rows} == {0, 1}


# --- masks ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def million():
    """Makes examples from 1,000,000 tokens of random sentences, by objective."""
    rng = np.random.default_rng(1)
    texts = [random_text(rng, 25, 39) for _ in range(2000)]  # 500 tokens on average
    return {kind: [example(kind(), t, seed) for seed, t in enumerate(texts)] for kind in BOTH}


@pytest.mark.parametrize("kind", BOTH)
def test_published_fractions(million, kind):
    examples = million[kind]
    ordinary = sum(len(e["tokens"]) - 3 for e in examples)
    masked = sum(len(e["targets"]) for e in examples)
    shown = np.concatenate([e["tokens"][e["masked_positions"]] for e in examples])
    kept = np.mean(shown == np.concatenate([e["targets"] for e in examples]))
    # 5 standard deviations. A row's count is its length times the rate, rounded up or down, with a variance below 1/4.
    assert abs(masked - 0.15 * ordinary) < 5 * np.sqrt(len(examples) / 4)
    assert abs(np.mean(shown == MASK) - 0.8) < 5 * np.sqrt(0.8 * 0.2 / masked)
    assert abs(kept - 0.1) < 5 * np.sqrt(0.1 * 0.9 / masked) + 0.1 / 995  # A random token may equal the original.


@pytest.mark.parametrize("kind", BOTH)
def test_the_frame_is_never_masked(million, kind):
    for row in million[kind][:200]:
        assert row["tokens"][0] == CLS
        assert np.flatnonzero(row["tokens"] == SEP)[-1] == len(row["tokens"]) - 1
        assert not {CLS, SEP} & set(row["targets"].tolist())


@pytest.mark.parametrize("kind", BOTH)
def test_statistics_are_as_asked(million, kind):
    assert not [s for s in kind().statistics(million[kind], VOCABULARY) if s.is_off]


# --- nothing lost --------------------------------------------------------------------------------------------------


@given(sentences=SENTENCES.filter(lambda sentences: sum(map(len, sentences)) > 1), seed=st.integers(0, 2**32))
def test_what_was_parted_can_be_restored(sentences, seed):
    whole, objective = text(*sentences), SentenceOrderPrediction(short_fraction=0.0)
    np.testing.assert_array_equal(objective.restore(example(objective, whole, seed), VOCABULARY), whole.tokens)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), seed=st.integers(0, 2**32))
def test_a_run_of_the_document_can_be_restored_on_each_side(lengths, seed):
    """Checks that truncation leaves the tokens of A, and of a B that follows A, in order and without gaps."""
    ends = 500 + np.cumsum(lengths)
    whole = text(*map(np.arange, ends - lengths, ends), others=[np.arange(5, 400)])
    objective = NextSentencePrediction()
    row = example(objective, whole, seed)
    restored = objective.restore(row, VOCABULARY)
    steps = np.diff(restored)
    assert np.isin(restored, whole.tokens).all()
    assert (steps >= 1).all()
    assert np.count_nonzero(steps > 1) <= (row["pair_labels"] == 0)


DOCUMENTS = "The man went to the store. He bought a gallon of milk.", "床前明月光，疑是地上霜。举头望明月，低头思故乡。"


@pytest.mark.parametrize("kind", ["WordPiece", "ByteBPE", "Unigram"])
def test_the_text_can_be_restored(tokenizers_of_all_kinds, kind):
    tokenizer = tokenizers_of_all_kinds[kind]
    if kind == "Unigram":  # The shared Unigram tokenizer has T5's special tokens.
        tokenizer = Unigram(vocab_size=305, special_pieces="albert").build(iter(DOCUMENTS * 20))
    objective = SentenceOrderPrediction(short_fraction=0.0).bind(tokenizer)
    for document in DOCUMENTS:
        sentences = tokenizer.encode_batch(split(document))
        whole = text(*sentences[:-1], [*sentences[-1], tokenizer.vocabulary.separator])
        restored = objective.restore(example(objective, whole, 0, tokenizer.vocabulary), tokenizer.vocabulary)
        np.testing.assert_array_equal(restored, whole.tokens[:-1])
        if kind != "WordPiece":  # WordPiece is lossy
            assert tokenizer.decode(restored) == document


@pytest.mark.parametrize("kind", BOTH)
def test_the_separator_of_the_document_is_left_out(kind):
    objective = kind(short_fraction=0.0)
    for seed in range(50):
        row = example(objective, text([10, 11, 12], [13, SEP], [SEP], others=[[20, 21], [22, SEP]]), seed)
        first, second = objective.segments(row)
        assert len(first) and len(second)
        assert np.count_nonzero(row["tokens"] == SEP) in (2, 3)  # 3: the first segment contains a SEP.


@pytest.mark.parametrize("kind", BOTH)
def test_the_same_seed_gives_the_same_example(kind):
    whole = random_text(np.random.default_rng(0), 9, 9)
    one, same, other = (example(kind(), whole, seed) for seed in (0, 0, 1))
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", BOTH)
def test_dtypes(kind):
    row = example(kind(), text([5, 6], [7, 8], others=[[9]]))
    assert row["pair_labels"].shape == ()
    dtypes = {name: str(array.dtype) for name, array in row.items()}
    assert dtypes.pop("loss_weights") == "float32"
    assert set(dtypes.values()) == {"int32"}


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "fields, model, line",
    [
        ({"short_fraction": -0.1}, {}, "config.objective.short_fraction is -0.1, it must be in [0, 1]"),
        ({"masking": MaskedLM(rate=0.0)}, {}, "config.objective.masking.rate is 0.0, it must be in (0, 1]"),
        ({"masking": CausalLM()}, {}, "config.objective.masking is CausalLM, it must be a MaskedLM"),
        ({}, {"pair_head": False}, "config.model.pair_head is False, {} trains it: set it to True"),
        (
            {},
            {"num_token_types": 1},
            "config.model.num_token_types is 1, {} has 2 types: set it to 2, or to 0 for none",
        ),
    ],
)
def test_fields_out_of_range(kind, fields, model, line):
    model = ModelConfig(**{"family": "encoder", "pair_head": True, "num_token_types": 2} | model)
    objective = kind(**fields)
    experiment = Experiment(model, None, DataConfig(None), objective, None, None)
    assert list(objective.problems(experiment)) == [line.format(kind.__name__)]


def test_a_vocabulary_without_mask_is_refused():
    with pytest.raises(UserError, match="no mask token, NextSentencePrediction needs mask, cls, sep"):
        NextSentencePrediction().check_vocabulary(dataclasses.replace(VOCABULARY, mask=None), 512)


def test_rows_have_room_for_the_special_tokens_and_a_token_of_each_text():
    roberta = Vocabulary(size=1000, pad=PAD, bos=CLS, cls=CLS, eos=SEP, sep=SEP, mask=MASK)
    with pytest.raises(UserError, match="sequence_length is 5, NextSentencePrediction with .* needs at least 6"):
        NextSentencePrediction().check_vocabulary(roberta, 5)
    NextSentencePrediction().check_vocabulary(roberta, 6)
    NextSentencePrediction().check_vocabulary(VOCABULARY, 5)
    framed = dataclasses.replace(VOCABULARY, frame=SpecialTokenFrame(RowFrame((CLS, CLS), (), (SEP, SEP)), None))
    with pytest.raises(UserError, match="sequence_length is 4, MaskedLM with .* needs at least 5"):
        MaskedLM().check_vocabulary(framed, 4)
    MaskedLM().check_vocabulary(framed, 5)
