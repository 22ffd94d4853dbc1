"""Encoder-decoders, at sizes for tests. Rows reach past the last bucket of relative distance."""

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
    """The model in transformers. Version 5 ties the output matrix of a fresh T5, whatever config.json says, and unties
    it where a file has another one."""
    import transformers

    json = family.huggingface.write_config(config)
    theirs = transformers.AutoConfig.for_model(**json)
    theirs._attn_implementation, theirs.tie_word_embeddings = "eager", config.tie_embeddings
    model = getattr(transformers, json["architectures"][0])(theirs)
    if not config.tie_embeddings and not config.separate_embeddings:
        model.set_input_embeddings(model.shared)  # which both stacks share, tied or not
    return model


def case(family, variant, sizes, **changes):
    """A preset at a size for tests."""
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
    # Two turns of two layers. No expert gets more tokens than it has room for in transformers, and each gets some, as
    # torch neither moves nor decays one that gets none.
    "switch": case(
        SWITCH, "base_8", BUCKETS, num_layers=4, d_model=24, experts=mixture(SWITCH, "base_8", num_experts=2)
    ),
    # Experts in all layers, of which the encoder has fewer. The class has no output matrix of its own, as C has one.
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
    # The rows are longer than what local layers see, and the pattern starts again.
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
    # A decoder that is narrower than its encoder, with other heads.
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
