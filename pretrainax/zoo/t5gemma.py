"""T5Gemma (Zhang et al. 2025, arXiv 2504.06225): an encoder-decoder whose two stacks have Gemma 2's architecture."""

import dataclasses

from pretrainax.config import DecoderSizes, ModelConfig, RotaryPositions, UserError
from pretrainax.zoo import gemma
from pretrainax.zoo.family import ConfigJson, Family, HuggingFace, NameRow, config_variants, differences, linear
from pretrainax.zoo.variants import pick

# size of a stack -> (layers, width, feed-forward, heads, key heads, head dimension). The sizes come from T5 1.1 and
# Gemma 2.
_STACKS = {
    "s": (8, 512, 1024, 8, 8, 64),
    "b": (12, 768, 2048, 12, 12, 64),
    "l": (24, 1024, 2816, 16, 16, 64),
    "ml": (26, 1152, 6912, 4, 4, 256),
    "xl": (24, 2048, 5120, 32, 32, 64),
    "2b": gemma.SIZES_2["2_2b"],
    "9b": gemma.SIZES_2["2_9b"],
}
# variant -> (size of the encoder, size of the decoder)
SIZES = {
    f"{encoder}_{decoder}": (_STACKS[encoder], _STACKS[decoder])
    for encoder, decoder in (*((size, size) for size in _STACKS), ("9b", "2b"))
}
_DECODER_FIELDS = tuple(field.name for field in dataclasses.fields(DecoderSizes))  # may differ between the stacks


def t5gemma(variant: str = "2b_2b") -> ModelConfig:
    """Builds the model config of T5Gemma; raises UserError for an unknown variant.

    Args:
      variant: size of the encoder and size of the decoder: "9b_2b".
    """
    return _combine(*map(_gemma2, pick("t5gemma", variant, SIZES)))


def _gemma2(sizes: tuple[int, ...]) -> ModelConfig:
    """Builds the model config of a Gemma 2 decoder with sizes from `_STACKS`."""
    fields = dict(zip(("num_layers", *_DECODER_FIELDS), sizes, strict=True))
    return dataclasses.replace(gemma.gemma("2_2b"), position=RotaryPositions(8192), **fields)


def _combine(encoder: ModelConfig, decoder: ModelConfig) -> ModelConfig:
    """Combines the configs of two Gemma 2 models into the config of an encoder-decoder.

    In local layers of the encoder, a token attends to a window of tokens before it and after it.

    NOTE Each of the two windows has 4,096 tokens, as in transformers 5. In earlier versions of transformers, each
    window has one token fewer.
    """
    encoder_sizes, decoder_sizes = (
        DecoderSizes(**{name: getattr(stack, name) for name in _DECODER_FIELDS}) for stack in (encoder, decoder)
    )
    return dataclasses.replace(
        encoder,
        family="encoder_decoder",
        num_decoder_layers=None if decoder.num_layers == encoder.num_layers else decoder.num_layers,
        decoder=None if decoder_sizes == encoder_sizes else decoder_sizes,
        encoder_window=None if encoder.window is None else 2 * encoder.window,
        separate_embeddings=True,
    )


def huggingface_names(config: ModelConfig) -> list[NameRow]:
    """Builds the table of tensor names in transformers' T5GemmaForConditionalGeneration."""
    rows = [
        NameRow("token_embedding/embedding", "model.encoder.embed_tokens.weight"),
        NameRow("decoder_token_embedding/embedding", "model.decoder.embed_tokens.weight"),
    ]
    attentions = {"encoder": {"self": "self_attn"}, "decoder": {"self": "self_attn", "cross": "cross_attn"}}
    for stack, modules in attentions.items():
        block, layer = f"{stack}/blocks", f"model.{stack}.layers.{{layer}}"
        for ours, theirs in modules.items():
            rows += _norms(f"{block}/{ours}_attention", f"{layer}.{{side}}_{theirs}_layernorm")
            for name, letter in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o")):
                rows += linear(f"{block}/{ours}_attention/{name}", f"{layer}.{theirs}.{letter}_proj", bias=False)
        rows += _norms(f"{block}/mlp", f"{layer}.{{side}}_feedforward_layernorm")
        for name in ("gate", "up", "down"):
            rows += linear(f"{block}/mlp/{name}", f"{layer}.mlp.{name}_proj", bias=False)
        rows.append(NameRow(f"{stack}/final_norm/scale", f"model.{stack}.norm.weight"))
    return rows if config.tie_embeddings else [*rows, *linear("unembedding", "lm_head.out_proj", bias=False)]


def _norms(path: str, name: str) -> list[NameRow]:
    """Builds the name-table rows of the norms before and after a sublayer.

    Args:
      path: our path to the sublayer.
      name: transformers' tensor name, with the placeholder "{side}" for "pre" or "post".
    """
    before, after = (name.replace("{side}", position) + ".weight" for position in ("pre", "post"))
    return [NameRow(f"{path}_norm/scale", before), NameRow(f"{path}_post_norm/scale", after)]


# --- config.json: contains a Gemma 2 config.json for each stack -------------------------------------------------------

_FIELDS = {  # keys that both stacks share
    "tie_word_embeddings": "tie_embeddings",
    "dropout_rate": "dropout_rate",
    "attention_dropout": "attention_dropout_rate",
}
_UNUSED = {"architectures": None, "tie_word_embeddings": True}  # keys of a stack that transformers does not use
_, _GEMMA, _ = (family.huggingface for family in gemma.FAMILIES)


def _read(json: ConfigJson, config: ModelConfig) -> None:
    """Sets the fields that each stack has; raises UserError if the stacks differ in fields other than sizes."""
    assert _GEMMA is not None
    stacks = [_GEMMA.read_config({**(json.get(stack) or {}), **_UNUSED}) for stack in ("encoder", "decoder")]
    if differing_fields := [name for name in differences(*stacks) if name not in ("num_layers", *_DECODER_FIELDS)]:
        raise UserError(
            f"config.json has an encoder and a decoder that differ in {', '.join(differing_fields)}; only num_layers, "
            f"{', '.join(_DECODER_FIELDS)} may"
        )
    combined = _combine(*stacks)
    for field in dataclasses.fields(config):
        if field.name not in _FIELDS.values():
            setattr(config, field.name, getattr(combined, field.name))


def _write(config: ModelConfig) -> ConfigJson:
    """Returns the config.json keys: a Gemma 2 config.json for each stack, and the keys that both share."""
    assert _GEMMA is not None
    json: ConfigJson = {
        name: {
            **_GEMMA.write_config(dataclasses.replace(stack, family="decoder", window=config.window)),
            "model_type": "t5_gemma_module",
            "architectures": None,
            "is_decoder": name == "decoder",
        }
        for name, stack in config.stacks.items()
    }
    return json | {
        "vocab_size": config.vocab_size,
        "initializer_range": config.init_stddev,
    }


FAMILIES = (
    Family(
        name="T5Gemma",
        prefix="t5gemma_",
        preset=t5gemma,
        sizes=SIZES,
        paper="Zhang et al. 2025, arXiv 2504.06225",
        objective="mixture of denoisers, or prefix language modelling",
        configs=config_variants("t5gemma", SIZES),
        huggingface=HuggingFace(
            model_type="t5gemma",
            architecture="T5GemmaForConditionalGeneration",
            base=t5gemma,
            fields=_FIELDS,
            table=huggingface_names,
            constants={"is_encoder_decoder": True},
            read=_read,
            write=_write,
            tied=lambda config: (
                {"lm_head.out_proj.weight": "model.decoder.embed_tokens.weight"} if config.tie_embeddings else {}
            ),
        ),
    ),
)
