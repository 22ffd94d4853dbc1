"""Tests FillInTheMiddle: the rates of split documents, the room for their sentinels, and `restore`."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pretrainax.config import DataConfig, Experiment, ModelConfig, UserError
from pretrainax.data.objectives import (
    CausalLM,
    FillInTheMiddle,
    Lengths,
    NextSentencePrediction,
    ObjectiveInput,
    ObjectiveMixture,
)
from pretrainax.data.sources import JsonLines, TextFiles
from pretrainax.runs.train import train
from pretrainax.tokenization import ByteBPE
from pretrainax.tokenization.base import Vocabulary
from pretrainax.tokenization.huggingface import read_tokenizer
from tests.data.conftest import CHINESE, ENGLISH, TEXTS
from tests.support import tiny
from tests.support.huggingface_directories import old

EOT, PRE, SUF, MID = 1, 900, 901, 902
VOCABULARY = Vocabulary(size=903, bos=EOT, eos=EOT, sentinels=(PRE, SUF, MID))
DOCUMENTS = st.lists(st.lists(st.integers(2, 899), max_size=12), min_size=1, max_size=8)
RATES = [FillInTheMiddle(), FillInTheMiddle(fim_rate=0.9, spm_rate=0.0), FillInTheMiddle(spm_rate=1.0)]


def text_of(documents, is_cut=False):
    """Joins documents that end with EOT; if `is_cut`, the last document lacks it."""
    ended = [[*document, EOT] for document in documents]
    ended[-1] = ended[-1][:-1] if is_cut and documents[-1] else ended[-1]
    segment_ids = np.repeat(np.arange(1, len(ended) + 1, dtype=np.int32), [len(document) for document in ended])
    return ObjectiveInput(np.array(sum(ended, []), np.int32), segment_ids)


def example(objective, text, seed=0, vocabulary=VOCABULARY):
    return objective.example(text, np.random.default_rng(seed), vocabulary)


def stream(objective, text, seed=0):
    """Returns the tokens that the model reads and predicts, from the first to the last."""
    return CausalLM().restore(example(objective, text, seed), VOCABULARY).tolist()


def examples(objective, count, mean=400):
    """Yields examples of windows of about 1,000 tokens, with documents of `mean` tokens on average."""
    rng, raw = np.random.default_rng(7), objective.lengths(1024).raw
    for seed in range(count):
        tokens = rng.integers(2, 900, raw, dtype=np.int32)
        tokens[rng.random(raw) < 1 / mean] = EOT
        segment_ids = 1 + np.cumsum(np.append(0, tokens[:-1] == EOT), dtype=np.int32)
        yield example(objective, ObjectiveInput(tokens, segment_ids), seed)


def off(objective, rows):
    return [s.name for s in objective.statistics(rows, VOCABULARY) if s.is_off]


# --- the paper -----------------------------------------------------------------------------------------------------

THE_CAT = "the cat sat on the mat <eot>"


@pytest.mark.parametrize(
    "spm_rate, wanted",
    [
        (0.0, "<PRE> the cat <SUF> the mat <MID> sat on <eot>"),  # section 3, equation of PSM
        (1.0, "<PRE> <SUF> the mat <MID> the cat sat on <eot>"),  # appendix D, SPM of joint training
    ],
)
def test_a_document_is_moved_as_in_the_paper(spm_rate, wanted):
    words = "<eot> <PRE> <SUF> <MID> the cat sat on mat".split()
    vocabulary = Vocabulary(size=len(words), eos=0, sentinels=(1, 2, 3))
    tokens = np.array([words.index(word) for word in THE_CAT.split()], np.int32)
    text, objective = ObjectiveInput(tokens, np.ones(7, np.int32)), FillInTheMiddle(fim_rate=1.0, spm_rate=spm_rate)
    seen = set()
    for seed in range(500):
        row = example(objective, text, seed, vocabulary)
        np.testing.assert_array_equal(row["tokens"][1:], row["targets"][:-1])
        assert (row["loss_weights"] == 1).all()  # The sentinels are targets too.
        seen.add(" ".join(words[i] for i in [row["tokens"][0], *row["targets"]]))
    assert wanted in seen
    assert len(seen) == (7 if spm_rate else 28)  # Two ordered places from 0 to 6; SPM shows only the second.


@pytest.mark.slow
def test_places_are_drawn_alike():
    prefixes = []
    for seed in range(6000):
        tokens = stream(FillInTheMiddle(fim_rate=1.0, spm_rate=0.0), text_of([range(10, 19)]), seed)
        prefixes.append((tokens.index(SUF) - 1, tokens.index(MID) - tokens.index(SUF) - 1))
    first, last = np.array(prefixes).T
    # The lower of two places from 0 to 9 is k with probability (2 (9 - k) + 1) / 100. The length of the suffix has the
    # same distribution.
    chances = (2 * (9 - np.arange(10)) + 1) / 100
    for counts in (np.bincount(first, minlength=10), np.bincount(last, minlength=10)):
        assert (np.abs(counts - 6000 * chances) < 5 * np.sqrt(6000 * chances)).all()  # 5 standard deviations


@pytest.mark.first(1)
@pytest.mark.parametrize("objective", RATES, ids=str)
def test_published_rates_on_a_million_tokens(objective):
    rows = list(examples(objective, 1000))
    found = {s.name: s for s in objective.statistics(rows, VOCABULARY)}
    assert found["documents taken apart"].expected == objective.fim_rate
    # 5 standard deviations for more than 1,000 documents, and for half of them.
    assert found["documents taken apart"].tolerance < 0.08 and found["suffix first"].tolerance < 0.12
    assert found["suffix first"].expected == pytest.approx(objective.spm_rate, abs=0.05)  # Some prefixes are empty.
    assert off(objective, rows) == []


@pytest.mark.parametrize(
    "wrong, name",
    [(FillInTheMiddle(fim_rate=0.4), "documents taken apart"), (FillInTheMiddle(spm_rate=0.35), "suffix first")],
)
def test_a_wrong_objective_is_found_out_by_its_statistics(wrong, name):
    assert name in off(FillInTheMiddle(), list(examples(wrong, 1500)))


# --- nothing lost --------------------------------------------------------------------------------------------------


@given(DOCUMENTS, st.booleans(), st.booleans(), st.integers(2, 20), st.integers(0, 2**32))
def test_the_text_can_be_restored_and_is_no_longer_than_announced(documents, is_cut, mask_documents, spacing, seed):
    objective = FillInTheMiddle(mask_documents, fim_rate=0.8, tokens_per_document=spacing)
    text = text_of(documents, is_cut)
    assume(len(text.tokens) > 1)
    row = example(objective, text, seed)
    np.testing.assert_array_equal(objective.restore(row, VOCABULARY), text.tokens)
    assert len(row["tokens"]) <= objective.measure(len(text.tokens)).inputs


def documents_of_targets(objective, row, text, vocabulary=VOCABULARY):
    """Returns the index of each target's document: by offsets, and by the number of separators before the target."""
    offsets = objective.token_offsets(row, vocabulary)
    ends = CausalLM().restore(row, vocabulary)[:-1] == vocabulary.separator
    return (text.segment_ids[offsets] - 1).tolist(), np.cumsum(ends).tolist()


@given(DOCUMENTS, st.booleans(), st.sampled_from(RATES), st.integers(0, 2**32))
def test_each_target_is_of_its_document_and_token(documents, is_cut, rates, seed):
    text = text_of(documents, is_cut)
    assume(len(text.tokens) > 1)
    objective = dataclasses.replace(rates, tokens_per_document=4)
    row = example(objective, text, seed)
    found, wanted = documents_of_targets(objective, row, text)
    assert found == wanted
    is_text = row["targets"] < PRE
    found = text.tokens[objective.token_offsets(row, VOCABULARY)][is_text]
    np.testing.assert_array_equal(found, row["targets"][is_text])


@given(st.integers(4, 3000), st.integers(2, 300))
def test_the_longest_text_fills_a_row(length, spacing):
    objective = FillInTheMiddle(tokens_per_document=spacing)
    lengths = objective.lengths(length)
    assert lengths[1:] == (length, length) and lengths.raw >= 2
    assert objective.measure(lengths.raw).inputs <= length < objective.measure(lengths.raw + 1).inputs


def test_a_row_of_1024_has_room_for_4_documents():
    assert FillInTheMiddle().lengths(1024) == Lengths(raw=1013, inputs=1024, targets=1024)  # 1013 + 4 * 3 - 1
    assert FillInTheMiddle().measure(256).inputs == 258


def test_documents_beyond_the_room_stay_as_they_are():
    objective = FillInTheMiddle(fim_rate=1.0, tokens_per_document=10)
    text = text_of([[5, 6], [7, 8], [9, 10], [11, 12], [13, 14]])  # 15 tokens
    taken = [stream(objective, text, seed) for seed in range(50)]
    assert {tokens.count(PRE) for tokens in taken} == {2}
    assert len({tokens.index(PRE) for tokens in taken}) > 1  # The split documents differ.


def test_too_little_room_is_found_out():
    objective = FillInTheMiddle()
    text = text_of([range(10, 50)] * 12)
    assert off(objective, [example(objective, text, seed) for seed in range(300)]) == ["drawn documents without room"]


def test_a_single_token_stays_as_it_is():
    objective = FillInTheMiddle(fim_rate=1.0)
    assert objective.measure(1) == Lengths(1, 0, 0)
    assert len(example(objective, text_of([[5]], is_cut=True))["tokens"]) == 0


def test_documents_apart_have_their_own_segments():
    objective = FillInTheMiddle(mask_documents=True, fim_rate=1.0, tokens_per_document=5)
    row = example(objective, text_of([[5, 6, 7], [8, 9]]))
    ends = np.flatnonzero(row["tokens"] == EOT)
    assert row["segment_ids"].tolist() == [1] * 7 + [2] * 5  # 4 tokens + 3 sentinels; 3 + 3, without the last token
    assert ends[0] == 6 and row["loss_weights"].tolist() == [1] * 6 + [0] + [1] * 5


@pytest.mark.parametrize("kind", ["ByteBPE", "Unigram"])
def test_the_texts_of_real_tokenizers_can_be_restored(kind, tokenizers_of_all_kinds):
    tokenizer = tokenizers_of_all_kinds[kind]
    if kind == "ByteBPE":
        tokenizer = ByteBPE(vocab_size=400, num_sentinels=3).build(iter([ENGLISH, CHINESE] * 4))
    vocabulary, objective = tokenizer.vocabulary, FillInTheMiddle(fim_rate=1.0)
    for seed, ids in enumerate(tokenizer.encode_batch(TEXTS)):
        ids = np.append(ids, np.int32(vocabulary.separator))
        row = example(objective, ObjectiveInput(ids, np.ones_like(ids)), seed, vocabulary)
        assert vocabulary.sentinels[0] == row["tokens"][0]
        np.testing.assert_array_equal(objective.restore(row, vocabulary), ids)


# --- between characters --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bpe():
    return ByteBPE(vocab_size=400, num_sentinels=3).build(iter([ENGLISH, CHINESE] * 4))


@pytest.fixture(scope="module")
def by_characters(bpe):
    return FillInTheMiddle(fim_rate=1.0, spm_rate=0.0, split="characters").bind(bpe)


def parts_of(row, vocabulary):
    """Splits a PSM example of one document into prefix, suffix and middle, which begin with their sentinels."""
    tokens = CausalLM().restore(row, vocabulary)
    marks = [int(np.flatnonzero(tokens == mark)[0]) for mark in vocabulary.sentinels[:3]]
    return np.split(tokens[: len(tokens) - 1], marks)[1:]


def test_a_document_is_parted_between_characters_and_each_part_is_tokenized_by_itself(bpe, by_characters):
    document = "The cat sat on the mat, believe it or not."
    ids = np.append(bpe.encode(document), np.int32(bpe.vocabulary.separator))
    within = 0
    for seed in range(50):
        row = example(by_characters, ObjectiveInput(ids, np.ones_like(ids)), seed, bpe.vocabulary)
        prefix, suffix, middle = (bpe.decode(part[1:]) for part in parts_of(row, bpe.vocabulary))
        assert prefix + middle + suffix == document
        for part, text in zip(parts_of(row, bpe.vocabulary), (prefix, suffix, middle), strict=True):
            np.testing.assert_array_equal(part[1:], bpe.encode(text))
        within += len(np.concatenate(parts_of(row, bpe.vocabulary))) - 3 > len(ids) - 1
        np.testing.assert_array_equal(by_characters.restore(row, bpe.vocabulary), ids)
    assert within > 25  # Most cuts are within a token.


def test_each_place_between_characters_is_drawn_alike(bpe, by_characters):
    document = "unbelievab"
    ids = np.append(bpe.encode(document), np.int32(bpe.vocabulary.separator))
    assert len(ids) < 10
    rows = [
        example(by_characters, ObjectiveInput(ids, np.ones_like(ids)), seed, bpe.vocabulary) for seed in range(1000)
    ]
    prefixes = [len(bpe.decode(parts_of(row, bpe.vocabulary)[0][1:])) for row in rows]
    chances = (2 * (10 - np.arange(11)) + 1) / 121  # as above, for 11 places
    deviations = np.sqrt(1000 * chances)
    assert (np.abs(np.bincount(prefixes, minlength=11) - 1000 * chances) < 5 * deviations).all()
    assert [s.name for s in by_characters.statistics(rows, bpe.vocabulary) if s.is_off] == []


@given(st.sampled_from(TEXTS), st.integers(0, 60), st.integers(2, 60), st.integers(0, 2**32))
def test_the_text_of_any_window_is_restored_and_no_longer_than_announced(bpe, by_characters, text, start, size, seed):
    ids = np.append(bpe.encode(text), np.int32(bpe.vocabulary.separator))[start : start + size]
    assume(len(ids) > 1)
    row = example(by_characters, ObjectiveInput(ids, np.ones_like(ids)), seed, bpe.vocabulary)
    assert len(row["tokens"]) <= by_characters.measure(len(ids)).inputs
    spellings = bpe.spellings()
    written = [b"".join(spellings[i] for i in tokens) for tokens in (by_characters.restore(row, bpe.vocabulary), ids)]
    assert written[0] == written[1]


@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4), st.integers(0, 2**32))
def test_each_target_is_of_its_document_if_its_parts_have_more_tokens(bpe, by_characters, texts, seed):
    documents = [[*bpe.encode(text).tolist(), bpe.vocabulary.separator] for text in texts]
    segment_ids = np.repeat(np.arange(1, len(documents) + 1), [len(document) for document in documents])
    text = ObjectiveInput(np.array(sum(documents, []), np.int32), segment_ids)
    assume(len(text.tokens) > 1)
    row = example(dataclasses.replace(by_characters, tokens_per_document=2).bind(bpe), text, seed, bpe.vocabulary)
    found, wanted = documents_of_targets(by_characters, row, text, bpe.vocabulary)
    assert found == wanted


def test_a_bound_one_makes_the_same_in_another_process(bpe, by_characters):
    ids = bpe.encode(ENGLISH)
    again = pickle.loads(pickle.dumps(by_characters))
    first, other = (
        example(o, ObjectiveInput(ids, np.ones_like(ids)), 3, bpe.vocabulary) for o in (by_characters, again)
    )
    np.testing.assert_array_equal(first["targets"], other["targets"])


def test_tokens_that_cuts_add_are_no_room_for_more_documents(bpe, by_characters):
    objective = dataclasses.replace(by_characters, tokens_per_document=48).bind(bpe)
    raw, separator = objective.lengths(128).raw, bpe.vocabulary.separator
    documents = [[*bpe.encode(TEXTS[seed % len(TEXTS)]).tolist()[:48], separator] for seed in range(400)]
    tokens = np.array(sum(documents, []), np.int32)
    segment_ids = np.repeat(np.arange(len(documents), dtype=np.int32), [len(document) for document in documents])
    windows = [slice(start, start + raw) for start in range(0, len(tokens) - raw, raw)]
    rows = [
        example(objective, ObjectiveInput(tokens[w], segment_ids[w] - segment_ids[w][0] + 1), seed, bpe.vocabulary)
        for seed, w in enumerate(windows)
    ]
    found = {statistic.name: statistic for statistic in objective.statistics(rows, bpe.vocabulary)}
    assert found["documents taken apart"].measured == 1.0


def test_a_tokenizer_that_changes_white_space_cannot_split_characters(tokenizers_of_all_kinds):
    with pytest.raises(UserError, match=r"config\.objective\.split is 'characters', which requires a tokenizer that"):
        FillInTheMiddle(split="characters").bind(tokenizers_of_all_kinds["WordPiece"])


def test_a_tokenizer_with_added_tokens_of_spaces_can_split_characters():
    tokenizer = read_tokenizer(old("gpt_neox"))
    bound = FillInTheMiddle(split="characters").bind(tokenizer)
    assert bound._lossless_tokenizer.text(tokenizer.encode("a:\n    b")) == "a:\n    b"


def test_a_row_has_room_for_the_tokens_that_cuts_add():
    objective = FillInTheMiddle(split="characters")
    lengths = objective.lengths(1024)
    assert lengths.inputs == 1024 == lengths.raw - 1 + 4 * (3 + 8)
    line = "config.data.sequence_length is 11, with split='characters' it must be at least 12"
    experiment = Experiment(ModelConfig(family="decoder"), None, DataConfig(None, 11), objective, None, None)
    assert list(objective.problems(experiment)) == [line]


def test_the_same_seed_gives_the_same_example_and_another_one_another():
    text = text_of([range(10, 60)])
    objective = FillInTheMiddle(fim_rate=1.0)
    assert stream(objective, text, 0) == stream(objective, text, 0) != stream(objective, text, 1)


@pytest.mark.parametrize("fim_rate", [0.0, 1.0])
def test_dtypes(fim_rate):
    dtypes = {n: str(a.dtype) for n, a in example(FillInTheMiddle(fim_rate=fim_rate), text_of([[5, 6, 7]])).items()}
    assert dtypes.pop("loss_weights") == "float32"
    assert set(dtypes.values()) == {"int32"}


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, line",
    [
        ({"fim_rate": 1.5}, "config.objective.fim_rate is 1.5, it must be in [0, 1]"),
        ({"spm_rate": -1.0}, "config.objective.spm_rate is -1.0, it must be in [0, 1]"),
        ({"tokens_per_document": 1}, "config.objective.tokens_per_document is 1, it must be at least 2"),
    ],
)
def test_fields_out_of_range_are_a_line(fields, line):
    objective = FillInTheMiddle(**fields)
    model = ModelConfig(family="decoder")
    assert list(objective.problems(Experiment(model, None, DataConfig(None, 64), objective, None, None))) == [line]


@pytest.mark.parametrize(
    "objective",
    [FillInTheMiddle(), NextSentencePrediction(), ObjectiveMixture((CausalLM(), FillInTheMiddle()), (1.0, 1.0))],
)
def test_an_objective_of_documents_refuses_pairs(objective):
    """The source of a pair also ends with the separator, so the parts of a document would contain separators."""
    source = JsonLines(path="pairs.jsonl", target_field="target")
    model = ModelConfig(family=objective.families[0], pair_head=True)
    lines = list(objective.problems(Experiment(model, None, DataConfig(source, 64), objective, None, None)))
    assert any("which needs documents, but JsonLines has pairs" in line for line in lines)


def test_too_few_sentinels_are_an_error():
    line = "the tokenizer has 2 sentinels, FillInTheMiddle needs 3 and an end of text: set config.tokenizer to ByteBPE"
    with pytest.raises(UserError, match=line):
        FillInTheMiddle().check_vocabulary(dataclasses.replace(VOCABULARY, sentinels=(8, 9)), 64)
    FillInTheMiddle().check_vocabulary(VOCABULARY, 64)


@pytest.mark.slow
def test_a_decoder_trains_for_two_steps(text, cache, tmp_path):
    experiment = tiny.get_config("gpt")
    experiment.tokenizer = ByteBPE(vocab_size=400, num_sentinels=20)
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.objective, experiment.schedule.warmup_steps, experiment.mesh.data = FillInTheMiddle(), 1, 8
    experiment.train.steps, experiment.evaluate.every, experiment.evaluate.batches = 2, 2, 1
    assert train(experiment, str(tmp_path)) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    assert len(losses) == 2 and all(abs(loss - np.log(512)) < 0.5 for loss in losses)  # 512 ids, nearly uniform
