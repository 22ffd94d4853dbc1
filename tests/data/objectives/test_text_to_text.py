"""Tests TextToText: pairs are supervised, documents are not, and a row has only one of the two."""

import json

import numpy as np
import pytest

from pretrainax.config import (
    DataConfig,
    Experiment,
    ModelConfig,
    RelativePositionBuckets,
    UserError,
    from_json,
    to_json,
)
from pretrainax.data.objectives import (
    CausalLM,
    Lengths,
    MixtureOfDenoisers,
    ObjectiveInput,
    ObjectiveMixture,
    SequenceToSequence,
    SpanCorruption,
    TextToText,
)
from pretrainax.data.pipeline import batches_of
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import JsonLines, SourceMixture
from pretrainax.tokenization import Unigram
from pretrainax.tokenization.base import Vocabulary

VOCABULARY = Vocabulary(size=1000, pad=0, eos=1, unk=2, sentinels=tuple(range(999, 899, -1)))


def problems(objective):
    model = ModelConfig(family="encoder_decoder", position=RelativePositionBuckets())
    experiment = Experiment(model, None, DataConfig(None), objective, None, None)
    return list(objective.problems(experiment))


def test_pairs_are_a_sequence_to_sequence_task():
    assert TextToText(target_length=64).components(pairs=True) == [(1.0, SequenceToSequence(target_length=64))]


def test_texts_are_corrupted():
    unsupervised = SpanCorruption(noise_density=0.5)
    assert TextToText(unsupervised).components() == [(1.0, unsupervised)]


def test_the_examples_of_the_paper():
    """Reproduces Raffel et al. 2020, figures 1 and 2: every task is text with a prefix that names the task."""
    words = (
        "<pad> </s> <unk> translate English to German : That is good . Das ist gut summarize state authorities six "
        "people hospitalized after a storm cola sentence The course jumping well not acceptable"
    ).split()
    ids = {word: i for i, word in enumerate(words)}
    ((_, objective),) = TextToText().components(pairs=True)
    for source, target in (
        ("translate English to German : That is good .", "Das ist gut ."),
        ("cola sentence : The course is jumping well .", "not acceptable"),
        ("summarize : state authorities", "six people hospitalized after a storm ."),
    ):
        parts = [[ids[word] for word in f"{text} </s>".split()] for text in (source, target)]
        text = ObjectiveInput(np.array(sum(parts, []), np.int32), None, np.cumsum([len(part) for part in parts]))
        row = objective.example(text, np.random.default_rng(0), VOCABULARY)
        read = [" ".join(words[i] for i in row[name]) for name in ("encoder_tokens", "targets", "tokens")]
        assert read == [f"{source} </s>", f"{target} </s>", f"<pad> {target}"]


@pytest.mark.parametrize("target_length, targets", [(64, 114), (114, 114), (200, 200)])
def test_a_row_has_room_for_the_targets_of_either(target_length, targets):
    lengths = TextToText(target_length=target_length).lengths(512)
    assert lengths == Lengths(raw=max(568, 512 + target_length), inputs=512, targets=targets)


def test_the_unsupervised_objective_is_bound_to_the_tokenizer(tokenizers_of_all_kinds):
    objective = TextToText(SpanCorruption(mode="[NLU]"))
    bound = objective.bind(tokenizers_of_all_kinds["Unigram"])
    assert bound == objective  # The bound tokenizer is not part of the config.
    text = ObjectiveInput(np.arange(100, 200, dtype=np.int32), None)
    ((_, of_texts),) = bound.components()
    row = of_texts.example(text, np.random.default_rng(0), tokenizers_of_all_kinds["Unigram"].vocabulary)
    assert tokenizers_of_all_kinds["Unigram"].decode(row["encoder_tokens"]).startswith("[NLU]")


def test_it_survives_json():
    objective = TextToText(SpanCorruption(mean_span_length=2.0), target_length=30)
    assert from_json(TextToText, to_json(objective)) == objective


def lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize(
    "unsupervised",
    [SpanCorruption(), ObjectiveMixture((SpanCorruption(), SpanCorruption(0.5)), (3.0, 1.0)), MixtureOfDenoisers()],
)
def test_texts_have_the_weight_of_their_source_for_any_weights_of_a_mixture_of_objectives(unsupervised):
    components = TextToText(unsupervised).components()
    assert sum(weight for weight, _ in components) == pytest.approx(1.0)
    expected = unsupervised.components()
    assert [part for _, part in components] == [part for _, part in expected]
    assert [weight / components[0][0] for weight, _ in components] == [
        weight / expected[0][0] for weight, _ in expected
    ]


def test_a_run_mixes_the_tasks_by_weight(tmp_path):
    sentences = [f"The number {i} comes after {i - 1} and before {i + 1}." for i in range(400)]
    texts = lines(tmp_path / "texts.jsonl", ({"text": sentence} for sentence in sentences))
    pairs = lines(tmp_path / "pairs.jsonl", ({"text": s, "reversed": s[::-1]} for s in sentences))
    source = SourceMixture(
        sources=(JsonLines(path=texts), JsonLines(path=pairs, target_field="reversed", prefix="reverse: ")),
        weights=(1.0, 3.0),
    )
    experiment = Experiment(
        ModelConfig(family="encoder_decoder", vocab_size=600, position=RelativePositionBuckets()),
        Unigram(vocab_size=320),
        DataConfig(source=source, sequence_length=100, cache_dir=str(tmp_path / "cache"), prepare_workers=1),
        TextToText(target_length=20),
        None,
        None,
    )
    prepared = prepare(experiment, report=lambda line: None)
    batches, vocabulary = batches_of(experiment, prepared, "train"), prepared.tokenizer.vocabulary
    made = {"SpanCorruption": 0, "SequenceToSequence": 0}
    for row in range(400):
        objective, examples = batches.examples(row)
        made[type(objective).__name__] += len(examples)
        for example in examples:
            is_pair = prepared.tokenizer.decode(example["encoder_tokens"]).startswith("reverse: The number")
            assert is_pair == isinstance(objective, SequenceToSequence)
            assert example["encoder_tokens"][-1] == example["targets"][-1] == vocabulary.eos
            assert len(example["targets"]) <= (20 if is_pair else 100)
    # The weights count examples, not rows, and one row has several pairs. The 400 rows may end anywhere in the order of
    # the mixture, so the ratio is approximate.
    assert made["SequenceToSequence"] / made["SpanCorruption"] == pytest.approx(3, rel=0.03)
    batch = batches[0]
    assert batch["encoder_tokens"].shape == (32, 100)
    assert batch["targets"].shape == (32, max(20, SpanCorruption().lengths(100).targets))


def test_it_is_sound_as_it_comes():
    assert problems(TextToText()) == []


@pytest.mark.parametrize(
    "objective, line",
    [
        (TextToText(target_length=0), "config.objective.target_length is 0, it must be at least 2"),
        (
            TextToText(SpanCorruption(noise_density=2.0)),
            "config.objective.unsupervised.noise_density is 2.0, it must be in (0, 1)",
        ),
        (
            TextToText(CausalLM()),
            "config.objective.unsupervised is CausalLM, it must read documents and support encoder_decoder",
        ),
        (
            TextToText(SequenceToSequence()),
            "config.objective.unsupervised is SequenceToSequence, it must read documents and support encoder_decoder",
        ),
    ],
)
def test_fields_out_of_range(objective, line):
    assert problems(objective) == [line]


def test_a_length_too_short_for_the_mode_is_refused():
    model = ModelConfig(family="encoder_decoder", position=RelativePositionBuckets())
    for objective in (TextToText(SpanCorruption(mode="[NLU]")), TextToText(MixtureOfDenoisers())):
        experiment = Experiment(model, None, DataConfig(None, sequence_length=5), objective, None, None)
        assert "config.data.sequence_length is 5" in next(objective.problems(experiment))


def test_a_vocabulary_without_sentinels_is_refused():
    with pytest.raises(UserError, match="the tokenizer has 0 sentinels"):
        TextToText().check_vocabulary(Vocabulary(size=1000, pad=0, eos=1, unk=2), 512)
