"""Tests the contract of a batch: its table in the documentation, the errors of its check, and its kinds."""

import jax
import numpy as np
import pytest

from pretrainax.config import NUM_CHARACTERS, WORD_LENGTH, LearnedPositions, ModelConfig, UserError
from pretrainax.data import batch as contract
from pretrainax.data.batch import FIELDS, Lengths, check_batch
from pretrainax.data.collate import collate
from pretrainax.data.objectives import (
    BidirectionalLM,
    CausalLM,
    FillInTheMiddle,
    MaskedLM,
    NextSentencePrediction,
    ObjectiveInput,
    ObjectiveMixture,
    PrefixLM,
    SpanCorruption,
)
from pretrainax.data.token_inputs import with_token_inputs
from pretrainax.layers import characters  # noqa: F401  which registers their field
from pretrainax.tokenization.base import Vocabulary

VOCABULARY = Vocabulary(size=5000, pad=0, eos=1, unk=2, cls=3, sep=4, mask=5, sentinels=tuple(range(6, 106)))
CHARACTERS = np.ones((VOCABULARY.size, WORD_LENGTH), np.int16)
OBJECTIVES = [CausalLM(), MaskedLM(), SpanCorruption(), PrefixLM(), NextSentencePrediction(), BidirectionalLM()]


def made(objective):
    """Makes a batch of 4 rows of 31 inputs."""
    lengths, rng = objective.lengths(31), np.random.default_rng(0)

    def text(*_):
        tokens = np.arange(200, 200 + lengths.raw, dtype=np.int32)
        return ObjectiveInput(
            tokens, np.ones(lengths.raw, np.int32), np.array([9, lengths.raw]), draw_other_document=text
        )

    tables = {"characters": CHARACTERS} if "recurrent" in objective.families else {}
    examples = [with_token_inputs(objective.example(text(), rng, VOCABULARY), tables) for _ in range(4)]
    return collate([[example] for example in examples], lengths, 0)


# --- the check


def model(family):
    return ModelConfig(family=family, vocab_size=VOCABULARY.size)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_batches_of_every_objective_pass_the_check(objective):
    check_batch(made(objective), model(objective.families[0]), objective.lengths(31), 4)


def broken(name, change):
    batch = made(MaskedLM())
    batch[name] = change(batch[name])
    return batch


@pytest.mark.parametrize(
    "batch, message",
    [
        ({}, r"batch has no 'tokens', the encoder expects int32 \[4, 31\]"),
        (broken("tokens", lambda x: x[:2]), r"batch\['tokens'\] is int32 \[2, 31\], not int32 \[4, 31\]"),
        (broken("tokens", lambda x: x.astype(np.int64)), r"batch\['tokens'\] is int64 \[4, 31\], not int32 \[4, 31\]"),
        (broken("targets", lambda x: x[:, :1]), r"batch\['targets'\] is int32 \[4, 1\], not int32 \[4, 5\]"),
        (broken("tokens", lambda x: x + 5000), r"batch\['tokens'\] has ids from .* config.model.vocab_size 5000"),
        (broken("segment_ids", lambda x: x - 2), r"batch\['segment_ids'\] has -1; it must not be negative"),
        (broken("masked_positions", lambda x: x + 31), r"batch\['masked_positions'\] has \d+; rows have 31 tokens"),
        (broken("loss_weights", lambda x: x * 0), "loss_weights.* not all 0"),
        (broken("loss_weights", lambda x: x * np.float32(np.nan)), "loss_weights.* finite"),
    ],
)
def test_a_wrong_batch_is_named(batch, message):
    with pytest.raises(UserError, match=message):
        check_batch(batch, model("encoder"), MaskedLM().lengths(31), 4)


def test_characters_are_checked():
    objective = BidirectionalLM()
    batch = made(objective)
    for wrong, message in (
        (batch["characters"][..., 1:], r"batch\['characters'\] is int32 \[4, 31, 49\], not int32 \[4, 31, 50\]"),
        (batch["characters"] + NUM_CHARACTERS, r"batch\['characters'\] has 263; it must be below 262"),
    ):
        with pytest.raises(UserError, match=message):
            check_batch(batch | {"characters": wrong}, model("recurrent"), objective.lengths(31), 4)


def test_labels_of_pairs_are_checked():
    objective = NextSentencePrediction()
    batch = made(objective)
    for wrong, message in (
        (batch["pair_labels"][:, None], r"batch\['pair_labels'\] is int32 \[4, 1\], not int32 \[4\]"),
        (batch["pair_labels"] + 2, r"batch\['pair_labels'\] has \d; labels must be 0 or 1"),
    ):
        with pytest.raises(UserError, match=message):
            check_batch(batch | {"pair_labels": wrong}, model("encoder"), objective.lengths(31), 4)


# --- the table


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_an_objective_makes_names_of_the_table_and_all_that_its_family_needs(objective):
    of_family = [field for field in FIELDS if field.belongs_to(objective.families[0])]
    assert made(objective).keys() <= {field.name for field in of_family}
    needed = {field.name for field in of_family if not field.optional} - {"token_types"}
    assert needed <= made(objective).keys()


def test_a_name_that_is_not_of_the_table_is_as_long_as_the_text():
    example = {"tokens": np.arange(3, dtype=np.int32), "targets": np.arange(3, dtype=np.int32)}
    batch = collate([[example | {"weather": np.ones(3, np.float32)}]], Lengths(5, 5, 5), pad=7)
    np.testing.assert_array_equal(batch["weather"], [[1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(batch["tokens"], [[0, 1, 2, 7, 7]])


# --- which kind

KINDS = {
    "is_gathered": (MaskedLM, NextSentencePrediction),
    "has_pairs": (NextSentencePrediction,),
    "has_prefix": (PrefixLM,),
    "is_encoder_decoder": (SpanCorruption,),
    "has_replaced": (),
    "has_previous": (BidirectionalLM,),
    "has_loss": tuple(map(type, OBJECTIVES)),
}


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_which_kind_a_batch_is(kind, objective):
    batch = made(objective)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    for names in (batch, shapes):
        assert getattr(contract, kind)(names) == isinstance(objective, KINDS[kind])


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_lengths_and_tokens_of_a_batch(objective):
    batch, lengths = made(objective), objective.lengths(31)
    assert contract.lengths_of(batch)[1:] == lengths[1:]
    decoder = lengths.targets if contract.is_encoder_decoder(batch) else 0
    assert contract.tokens_read(batch) == 4 * (lengths.inputs + decoder)


def test_padding_is_counted_on_both_sides():
    ids = {"encoder_segment_ids": np.array([[1, 1, 1, 0]]), "segment_ids": np.array([[1, 0]])}
    assert contract.padding(ids) == (2, 6)


@pytest.mark.parametrize(
    "objective, expected",
    [
        (CausalLM(), True),
        (PrefixLM(), False),
        (FillInTheMiddle(), False),
        (MaskedLM(), False),
        (SpanCorruption(), False),
        (ObjectiveMixture((CausalLM(), PrefixLM()), (1.0, 1.0)), False),
        (ObjectiveMixture((CausalLM(), PrefixLM()), (1.0, 0.0)), True),  # No row is from PrefixLM.
        (ObjectiveMixture((CausalLM(), ObjectiveMixture((CausalLM(),), (1.0,))), (1.0, 1.0)), True),
    ],
)
def test_the_loss_of_a_causal_lm_alone_is_a_likelihood_of_the_text(objective, expected):
    assert objective.is_likelihood is expected


# --- the bounds of each array --------------------------------------------------------------------------------------


def bounded(name, highest):
    """Makes a batch of pairs, which has most arrays of an encoder, with `highest` in the array `name`."""
    batch = dict(made(NextSentencePrediction()))
    batch[name] = np.array(batch[name])
    batch[name].flat[-1] = highest
    return batch


@pytest.mark.parametrize(
    "name, largest, message",
    [
        ("tokens", 4999, r"batch\['tokens'\] has ids from \d+ to 5000; config.model.vocab_size 5000 allows 0 to 4999"),
        ("targets", 4999, r"batch\['targets'\] has ids from \d+ to 5000; config.model.vocab_size 5000 allows"),
        ("positions", 63, r"batch\['positions'\] has 64; config.model.position.max_length 64 allows 0 to 63"),
        ("token_types", 1, r"batch\['token_types'\] has 2; config.model.num_token_types 2 allows 0 to 1"),
        ("masked_positions", 30, r"batch\['masked_positions'\] has 31; rows have 31 tokens"),
        ("pair_labels", 1, r"batch\['pair_labels'\] has 2; labels must be 0 or 1"),
        ("segment_ids", 1000, None),
    ],
)
def test_an_array_may_hold_what_it_is_below_and_nothing_negative(name, largest, message):
    config = ModelConfig(vocab_size=5000, family="encoder", num_token_types=2, position=LearnedPositions(64))
    lengths = NextSentencePrediction().lengths(31)
    check_batch(bounded(name, largest), config, lengths, 4)
    if message:
        with pytest.raises(UserError, match=message):
            check_batch(bounded(name, largest + 1), config, lengths, 4)
    below_zero = "has ids from -1 to" if largest == 4999 else "has -1; it must not be negative"
    with pytest.raises(UserError, match=rf"batch\['{name}'\] {below_zero}"):
        check_batch(bounded(name, -1), config, lengths, 4)


def test_a_model_without_types_of_tokens_takes_any():
    config = ModelConfig(vocab_size=5000, family="encoder", num_token_types=0, position=LearnedPositions(64))
    check_batch(bounded("token_types", 7), config, NextSentencePrediction().lengths(31), 4)


@pytest.mark.parametrize("name", ["encoder_tokens", "encoder_positions"])
def test_what_the_encoder_reads_is_bounded_too(name):
    objective = SpanCorruption()
    config = ModelConfig(vocab_size=5000, family="encoder_decoder", position=LearnedPositions(64))
    batch = dict(made(objective))
    check_batch(batch, config, objective.lengths(31), 4)
    batch[name] = batch[name] + 5000
    with pytest.raises(UserError, match=rf"batch\['{name}'\] has .* allows 0 to"):
        check_batch(batch, config, objective.lengths(31), 4)


@pytest.mark.parametrize("weight, fits", [(0.0, True), (2.5, True), (-0.5, False), (np.inf, False)])
def test_weights_are_finite_and_not_negative(weight, fits):
    batch = dict(made(MaskedLM()))
    batch["loss_weights"] = np.where(np.arange(batch["loss_weights"].shape[1]) == 0, np.float32(weight), np.float32(1))
    batch["loss_weights"] = np.broadcast_to(batch["loss_weights"], batch["targets"].shape)
    if fits:
        check_batch(batch, model("encoder"), MaskedLM().lengths(31), 4)
        return
    with pytest.raises(UserError, match="finite, not negative"):
        check_batch(batch, model("encoder"), MaskedLM().lengths(31), 4)


@pytest.mark.parametrize(
    "objective, name", [(MaskedLM(), "masked_positions"), (PrefixLM(), "prefix_mask"), (MaskedLM(), "replaced")]
)
def test_an_optional_name_that_is_there_is_checked(objective, name):
    batch = dict(made(objective))
    wrong = {name: np.zeros((4, 3), np.int32)}
    with pytest.raises(UserError, match=rf"batch\['{name}'\] is int32 \[4, 3\], not int32 \[4, \d+\]"):
        check_batch(batch | wrong, model(objective.families[0]), objective.lengths(31), 4)
    without = {key: array for key, array in batch.items() if key != name}
    if name != "masked_positions":  # Without them, each position has a target.
        check_batch(without, model(objective.families[0]), objective.lengths(31), 4)


def test_the_highest_id_is_of_what_is_read_or_predicted_and_a_negative_one_is_very_high():
    batch = {name: np.array([[1, 2]], np.int32) for name in ("tokens", "targets", "encoder_tokens", "positions")}
    assert contract.highest_id(batch) == 2
    for name in ("tokens", "targets", "encoder_tokens"):
        assert contract.highest_id(batch | {name: np.array([[0, 9]], np.int32)}) == 9
        assert contract.highest_id(batch | {name: np.array([[0, -1]], np.int32)}) == 2**32 - 1
    assert contract.highest_id(batch | {"positions": np.array([[0, 9]], np.int32)}) == 2


def test_one_side_alone_is_counted_too():
    one = {"tokens": np.array([[1, 9]], np.int32), "segment_ids": np.array([[1, 0]], np.int32)}
    assert contract.highest_id(one) == 9 and contract.padding(one) == (1, 2)


def test_an_encoder_may_be_asked_at_each_place():
    batch = {name: array for name, array in made(MaskedLM()).items() if name != "masked_positions"}
    batch |= {"targets": batch["tokens"], "loss_weights": np.ones((4, 31), np.float32)}
    check_batch(batch, model("encoder"), MaskedLM().lengths(31), 4)
    with pytest.raises(UserError, match=r"batch\['targets'\] is int32 \[4, 5\], not int32 \[4, 31\]"):
        check_batch(batch | {"targets": batch["targets"][:, :5]}, model("encoder"), MaskedLM().lengths(31), 4)


def test_a_denominator_is_summed_over_a_row_and_by_default_that_of_its_weights():
    own = {"tokens": np.ones(2, np.int32), "loss_weights": np.float32([0.5, 2.0]), "denominator": np.float32(7.0)}
    other = {"tokens": np.ones(3, np.int32), "loss_weights": np.float32([1.0, 1.0, 0.0])}  # from another objective
    batch = collate([[own, other], [other]], Lengths(8, 8, 8), pad=0, template=own)
    assert batch["denominator"].tolist() == [9.0, 2.0] and batch["denominator"].dtype == np.float32
