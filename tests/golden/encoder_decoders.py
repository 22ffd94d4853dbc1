"""Defines cases of encoder-decoders at test size. Rows exceed the last bucket of relative distances."""

import dataclasses

from pretrainax.config import DecoderSizes, LearnedPositions, RelativePositionBuckets, RotaryPositions
from pretrainax.zoo import bart, switch, t5, t5gemma, transformer
from tests.golden.case import VOCABULARY, Case, mixture

SIZES = dict(vocab_size=VOCABULARY, num_layers=3, d_model=16, d_ff=48, num_heads=4)
BUCKETS = SIZES | {"head_dim": 8, "position": RelativePositionBuckets(num_buckets=8, max_distance=10)}
T5, FLAN_T5, MT5, BYT5, UL2 = t5.FAMILIES
(BART,), (TRANSFORMER,) = bart.FAMILIES, transformer.FAMILIES
(T5GEMMA,), (SWITCH,) = t5gemma.FAMILIES, switch.FAMILIES


def fresh(family, config):
    """Returns the model in transformers.

    transformers 5 ties the output matrix of a new T5, whatever config.json states, and unties it if a file has a
    different matrix.
    """
    import transformers

    json = family.huggingface.write_config(config)
    theirs = transformers.AutoConfig.for_model(**json)
    theirs._attn_implementation, theirs.tie_word_embeddings = "eager", config.tie_embeddings
    model = getattr(transformers, json["architectures"][0])(theirs)
    if not config.tie_embeddings and not config.separate_embeddings:
        model.set_input_embeddings(model.shared)  # both stacks share the input embeddings, tied or not
    return model


def case(family, variant, sizes, **changes):
    """Returns a case of a preset at test size."""
    config = dataclasses.replace(family.preset(variant), **sizes | changes)
    return Case(config, family, lambda: fresh(family, config))


CASES = {
    "transformer": case(TRANSFORMER, "base", SIZES),
    "transformer_deep": case(TRANSFORMER, "base", SIZES, num_decoder_layers=2),
    "bart": case(BART, "base", SIZES, position=LearnedPositions(20, offset=2))._replace(pad_id=1),
    "bart_scaled": case(
        BART, "large", SIZES, position=LearnedPositions(20, offset=2), scale_embeddings=True, num_decoder_layers=2
    )._replace(pad_id=1),
    "t5_1_0": case(T5, "v1_0_base", BUCKETS),
    "t5_1_1": case(T5, "base", BUCKETS),
    "flan_t5": case(FLAN_T5, "base", BUCKETS, num_layers=2),
    "mt5": case(MT5, "base", BUCKETS, num_layers=2, num_heads=6, head_dim=4),
    "byt5": case(BYT5, "base", BUCKETS, num_decoder_layers=1),
    "ul2": case(UL2, "20b", BUCKETS),
    # Two periods of two layers. No expert exceeds its capacity in transformers. Each expert gets some tokens, because
    # torch neither moves nor decays an expert without tokens.
    "switch": case(
        SWITCH, "base_8", BUCKETS, num_layers=4, d_model=24, experts=mixture(SWITCH, "base_8", num_experts=2)
    ),
    # Experts in all layers, and fewer layers in the encoder. The class has no separate output matrix, unlike Switch-C.
    "switch_c": case(
        SWITCH,
        "c_2048",
        BUCKETS,
        num_layers=2,
        num_decoder_layers=3,
        experts=mixture(SWITCH, "c_2048", num_experts=3),
        tie_embeddings=True,
        scale_tied_logits=True,
    ),
    # The rows are longer than the window of local layers, and the pattern repeats.
    "t5gemma": case(
        T5GEMMA,
        "2b_2b",
        SIZES,
        num_kv_heads=2,
        head_dim=8,
        window=4,
        encoder_window=8,
        num_decoder_layers=4,
        position=RotaryPositions(20, theta=40.0),
    ),
    # The decoder is narrower than the encoder, and has other heads.
    "t5gemma_9b_2b": case(
        T5GEMMA,
        "9b_2b",
        SIZES,
        num_kv_heads=2,
        head_dim=8,
        window=4,
        encoder_window=8,
        num_decoder_layers=2,
        decoder=DecoderSizes(d_model=12, d_ff=40, num_heads=6, num_kv_heads=3, head_dim=4),
        position=RotaryPositions(20, theta=40.0),
    ),
}
