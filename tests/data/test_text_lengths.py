"""Tests that batches contain the length of each text only if each row has one text."""

import collections

import numpy as np
import pytest

from pretrainax.config.config_file import read_config_file
from pretrainax.data.batch import LENGTH_FIELDS
from pretrainax.data.corpus import Corpus
from pretrainax.data.objectives import CausalLM, MaskedLM, ObjectiveMixture, PrefixLM, SpanCorruption
from pretrainax.data.packing import BestFit, OneEach
from pretrainax.data.pipeline import Batches
from pretrainax.data.preparation import shards
from pretrainax.data.row_stream import RowOptions
from pretrainax.planning.shapes import batch_shapes
from pretrainax.tokenization import Characters
from pretrainax.tokenization.base import Vocabulary

VOCABULARY = Vocabulary(size=5000, pad=0, eos=1, unk=2, cls=3, sep=4, mask=5, sentinels=tuple(range(6, 106)))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Writes 300 documents of 4 to 36 letters."""
    folder, tokenizer = str(tmp_path_factory.mktemp("letters")), Characters().build(iter(["abcd"]))
    with shards.ShardWriter(folder, 0, tokenizer) as writer:
        list(writer.write(["abcd" * (1 + i % 9) for i in range(300)], collections.Counter()))
    shards.write_index(folder, 1, tokenizer.vocabulary.size, "letters")
    return Corpus(folder)


def batch_of(corpus, objective, packing=None):
    options = RowOptions(sequence_length=31, global_batch_size=4, seed=3, packing=packing)
    return Batches([corpus], objective, VOCABULARY, options)[0]


@pytest.mark.parametrize(
    "objective, packing, told",
    [
        (CausalLM(), None, True),
        (CausalLM(mask_documents=True), None, False),
        (MaskedLM(), None, True),
        (SpanCorruption(), None, True),
        (ObjectiveMixture((CausalLM(), PrefixLM()), (1, 1)), None, True),
        (ObjectiveMixture((CausalLM(), PrefixLM(mask_documents=True)), (1, 1)), None, False),
        (SpanCorruption(), OneEach(), True),
        (SpanCorruption(), BestFit(), False),
        (CausalLM(mask_documents=True), OneEach(), False),
    ],
)
def test_a_batch_has_them_where_each_row_has_one_text(corpus, objective, packing, told):
    batch = batch_of(corpus, objective, packing)
    for name, ids in LENGTH_FIELDS.items():
        assert (name in batch) == (told and ids in batch)
        if name in batch:
            lengths = batch[name]
            assert lengths.dtype == np.int32 and lengths.min() > 0
            np.testing.assert_array_equal(batch[ids], np.arange(batch[ids].shape[1]) < lengths[:, None])


def test_an_objective_that_has_several_texts_after_all_is_refused(corpus):
    class Wrong(CausalLM):
        single_segment = True

    with pytest.raises(ValueError, match="a row has several segments, but its objective sets one_text"):
        batch_of(corpus, Wrong(mask_documents=True))


@pytest.mark.parametrize("packing, told", [(None, True), (BestFit(), False)])
def test_a_plan_knows_of_them(packing, told):
    experiment = read_config_file("t5_base")
    experiment.data.packing = packing
    assert [name in batch_shapes(experiment) for name in LENGTH_FIELDS] == [told, told]
