"""Lists all families of published models, and builds the model config of a preset by its name."""

import os

from pretrainax.config import ModelConfig, UserError, nearest
from pretrainax.zoo import (
    albert,
    bart,
    bert,
    bigbird,
    deberta,
    deepseek,
    electra,
    elmo,
    eurobert,
    gemma,
    gpt,
    gpt_oss,
    grok,
    llama,
    longformer,
    mistral,
    mixtral,
    modernbert,
    neobert,
    olmo,
    palm,
    phi,
    qwen,
    roberta,
    smollm,
    st_moe,
    switch,
    t5,
    t5gemma,
    transformer,
)
from pretrainax.zoo.family import Family

_ENCODERS = (bert, roberta, longformer, bigbird, albert, electra, deberta, modernbert, eurobert, neobert)
_DECODERS = (gpt, llama, mistral, mixtral, qwen, gemma, olmo, palm, grok, deepseek, gpt_oss, phi, smollm)
FAMILIES: tuple[Family, ...] = tuple(
    family
    for module in (elmo, transformer, *_ENCODERS, t5, switch, st_moe, t5gemma, bart, *_DECODERS)
    for family in module.FAMILIES
)

# Name of a preset ("bert_base") -> (family, variant).
PRESETS: dict[str, tuple[Family, str]] = {
    family.prefix + variant: (family, variant) for family in FAMILIES for variant in family.sizes
}


def preset(name: str) -> ModelConfig:
    """Builds the model config of a published model, for example "bert_base".

    Raises:
      UserError: no preset has this name. The message lists the most similar names.
    """
    if name not in PRESETS:
        raise UserError(f"the zoo has no model {name!r}, {nearest(name, PRESETS)}")
    family, variant = PRESETS[name]
    return family.preset(variant)


def sources_path(name: str) -> str:
    """Returns the path of the TOML file that lists the source of each number in a preset.

    The file is next to the module that defines the preset's family, and has the module's name.
    """
    module = PRESETS[name][0].preset.__module__.rpartition(".")[2]
    return os.path.join(os.path.dirname(__file__), f"{module}.toml")
