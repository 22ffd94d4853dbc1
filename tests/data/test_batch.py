"""The contract of a batch: what its table says, what the check refuses, and which kind a batch is."""

import jax
import numpy as np
import pytest

from pretrainax.config import ModelConfig, UserError
from pretrainax.data import batch as contract
from pretrainax.data.batch import FIELDS, Lengths, check_batch
from pretrainax.data.collate import collate
from pretrainax.data.objectives import (
    CausalLM,
    FillInTheMiddle,
    MaskedLM,
    NextSentencePrediction,
    ObjectiveMixture,
    PrefixLM,
    SpanCorruption,
    Text,
)
from pretrainax.tokenization.base import Vocabulary

VOCABULARY = Vocabulary(size=5000, pad=0, eos=1, unk=2, cls=3, sep=4, mask=5, sentinels=tuple(range(6, 106)))
OBJECTIVES = [CausalLM(), MaskedLM(), SpanCorruption(), PrefixLM(), NextSentencePrediction()]


def made(objective):
    """A batch of 4 rows of 31 inputs."""
    lengths, rng = objective.lengths(31), np.random.default_rng(0)

    def text(*_):
        tokens = np.arange(200, 200 + lengths.raw, dtype=np.int32)
        return Text(tokens, np.ones(lengths.raw, np.int32), np.array([9, lengths.raw]), elsewhere=text)

    return collate([[objective.example(text(), rng, VOCABULARY)] for _ in range(4)], lengths, 0)


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
        ({}, r"batch has no 'tokens', the encoder needs int32 \[4, 31\]"),
        (broken("tokens", lambda x: x[:2]), r"batch\['tokens'\] is int32 \[2, 31\], not int32 \[4, 31\]"),
        (broken("tokens", lambda x: x.astype(np.int64)), r"batch\['tokens'\] is int64 \[4, 31\], not int32 \[4, 31\]"),
        (broken("targets", lambda x: x[:, :1]), r"batch\['targets'\] is int32 \[4, 1\], not int32 \[4, 5\]"),
        (broken("tokens", lambda x: x + 5000), r"batch\['tokens'\] has ids from .* config.model.vocab_size 5000"),
        (broken("segment_ids", lambda x: x - 2), r"batch\['segment_ids'\] has -1, it must not be negative"),
        (broken("masked_positions", lambda x: x + 31), r"batch\['masked_positions'\] has \d+, rows have 31 tokens"),
        (broken("loss_weights", lambda x: x * 0), "loss_weights.* not all 0"),
        (broken("loss_weights", lambda x: x * np.float32(np.nan)), "loss_weights.* finite"),
    ],
)
def test_a_wrong_batch_is_named(batch, message):
    with pytest.raises(UserError, match=message):
        check_batch(batch, model("encoder"), MaskedLM().lengths(31), 4)


def test_labels_of_pairs_are_checked():
    objective = NextSentencePrediction()
    batch = made(objective)
    for wrong, message in (
        (batch["pair_labels"][:, None], r"batch\['pair_labels'\] is int32 \[4, 1\], not int32 \[4\]"),
        (batch["pair_labels"] + 2, r"batch\['pair_labels'\] has \d, the labels are 0 and 1"),
    ):
        with pytest.raises(UserError, match=message):
            check_batch(batch | {"pair_labels": wrong}, model("encoder"), objective.lengths(31), 4)


# --- the table


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_an_objective_makes_names_of_the_table_and_all_that_its_family_needs(objective):
    of_family = [field for field in FIELDS if objective.families[0] in field.families]
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
    ],
)
def test_the_loss_of_a_causal_lm_alone_is_a_likelihood_of_the_text(objective, expected):
    assert objective.is_likelihood is expected
