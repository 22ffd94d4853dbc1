"""Encoders after BERT, at sizes for tests."""

import dataclasses

from pretrainax.config import LearnedPositions, RandomBlocks, RotaryPositions
from pretrainax.zoo import albert, bert, bigbird, eurobert, longformer, modernbert, roberta
from tests.golden.case import VOCABULARY, Case

SIZES = dict(vocab_size=VOCABULARY, num_layers=3, d_model=16, d_ff=48, num_heads=4)
POSITIONS = LearnedPositions(20)
BERT, MACBERT, DISTILBERT = bert.FAMILIES
ROBERTA, XLM_ROBERTA = roberta.FAMILIES
(ALBERT,), (MODERNBERT,), (EUROBERT,) = albert.FAMILIES, modernbert.FAMILIES, eurobert.FAMILIES
(LONGFORMER,), (BIGBIRD,) = longformer.FAMILIES, bigbird.FAMILIES


def tiny(family, variant="base", **changes):
    """A preset at a size for tests."""
    return dataclasses.replace(family.preset(variant), **SIZES | {"position": POSITIONS} | changes)


BLOCKS = tiny(BIGBIRD, sparse_attention=RandomBlocks(size=1, random=2))


def bigbird_oracle():
    """The class of transformers without the pooler that nothing there reads."""
    import transformers

    model = transformers.BigBirdForMaskedLM(transformers.BigBirdConfig(**BIGBIRD.huggingface.write_config(BLOCKS)))
    model.bert.pooler = model.bert.activation = None
    return model


CASES = {
    "bert": Case(tiny(BERT), BERT),
    "bert_masked_lm": Case(tiny(BERT, pair_head=False), BERT),
    "macbert": Case(tiny(MACBERT), MACBERT),
    "distilbert": Case(tiny(DISTILBERT), DISTILBERT),
    "roberta": Case(tiny(ROBERTA, position=LearnedPositions(20, offset=2)), ROBERTA, pad_id=1),
    "xlm_roberta": Case(tiny(XLM_ROBERTA, position=LearnedPositions(20, offset=2)), XLM_ROBERTA, pad_id=1),
    # Rows are longer than all layers together reach.
    "longformer": Case(tiny(LONGFORMER, window=4, position=LearnedPositions(20, offset=2)), LONGFORMER, pad_id=1),
    "bigbird": Case(BLOCKS, BIGBIRD, oracle=bigbird_oracle),
    # Of so few blocks, each meets all.
    "bigbird_pairs": Case(tiny(BIGBIRD, sparse_attention=RandomBlocks(size=2, random=1), pair_head=True), BIGBIRD),
    "albert_v1": Case(tiny(ALBERT, "v1_base", embedding_dim=12), ALBERT),
    "albert": Case(tiny(ALBERT, embedding_dim=12), ALBERT),
    # Rows are longer than all local layers together reach, and the pattern starts again.
    "modernbert": Case(
        tiny(MODERNBERT, num_layers=5, window=4, position=RotaryPositions(20, theta=40.0, local_theta=10.0)),
        MODERNBERT,
    ),
    "eurobert": Case(tiny(EUROBERT, "610m", num_kv_heads=2, position=RotaryPositions(20, theta=40.0)), EUROBERT),
}
