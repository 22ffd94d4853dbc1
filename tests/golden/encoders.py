"""Defines cases of the encoders after BERT, at test size."""

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
    """Returns a preset at test size."""
    return dataclasses.replace(family.preset(variant), **SIZES | {"position": POSITIONS} | changes)


BLOCKS = tiny(BIGBIRD, sparse_attention=RandomBlocks(size=1, random=2))


def bigbird_oracle():
    """Returns the class of transformers without its pooler, which nothing uses."""
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
    # Rows are longer than the range of all layers together.
    "longformer": Case(tiny(LONGFORMER, window=4, position=LearnedPositions(20, offset=2)), LONGFORMER, pad_id=1),
    "bigbird": Case(BLOCKS, BIGBIRD, oracle=bigbird_oracle),
    # The rows have so few blocks that each block attends to all blocks.
    "bigbird_pairs": Case(tiny(BIGBIRD, sparse_attention=RandomBlocks(size=2, random=1), pair_head=True), BIGBIRD),
    "albert_v1": Case(tiny(ALBERT, "v1_base", embedding_dim=12), ALBERT),
    "albert": Case(tiny(ALBERT, embedding_dim=12), ALBERT),
    # Rows are longer than the range of all local layers together, and the pattern repeats.
    "modernbert": Case(
        tiny(MODERNBERT, num_layers=5, window=4, position=RotaryPositions(20, theta=40.0, local_theta=10.0)),
        MODERNBERT,
    ),
    "eurobert": Case(tiny(EUROBERT, "610m", num_kv_heads=2, position=RotaryPositions(20, theta=40.0)), EUROBERT),
}
