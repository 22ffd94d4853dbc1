"""Writes released models in their published format: config.json with all its keys, and the names of the tensors.

config.json is tests/golden/released/NAME.json. A `Release` of `releases/` has the names, and the sizes with which a
test writes such files. The names are abbreviated: "#" is the number of a layer, {a,b} is a or b, and "!" marks a name
that the file does not have. They differ from the names that `save_pretrained` writes today: names without prefix, old
names of norms, copies of tied tensors, buffers, heads that a class omits.

None of the files was available. Configs and names are quotes from public code, logs and documentation. The names marked
"by class" follow from the tensors that the class of that time registered and saved.
"""

import itertools
import json
import pathlib
import re

import numpy as np
import safetensors.numpy

from pretrainax import zoo
from pretrainax.config import ModelConfig
from pretrainax.interop.architectures import described_model
from pretrainax.zoo.convert import to_huggingface
from pretrainax.zoo.family import ConfigJson
from tests.golden.case import Case, weights
from tests.support.huggingface_weights import write_tokenizer
from tests.support.releases.decoders import DECODERS
from tests.support.releases.encoder_decoders import ENCODER_DECODERS
from tests.support.releases.encoders import ENCODERS
from tests.support.releases.release import Release

CONFIGS = pathlib.Path(__file__).parents[1] / "golden" / "released"
RELEASED = ENCODERS | DECODERS | ENCODER_DECODERS


def names_of(release: Release, layers: int) -> list[str]:
    """Returns the names of all tensors of a file with `layers` layers."""
    names = []
    for short in release.names.split():
        parts = [part.split(",") for part in re.split("[{}]", short)]  # odd parts are choices
        assert all(len(part) == 1 for part in parts[::2]), short
        for spelled in map("".join, itertools.product(*parts)):
            names += [spelled.replace("#", str(i)) for i in range(layers)] if "#" in spelled else [spelled]
    gone = {name[1:] for name in names if name.startswith("!")}
    return [name for name in names if name not in gone and not name.startswith("!")]


def config_of(name: str, tiny: bool = False) -> ConfigJson:
    """Returns the released config.json, with the sizes of a test if `tiny`."""
    released = json.loads((CONFIGS / f"{name}.json").read_text())
    return released | RELEASED[name].tiny if tiny else released


def case_of(name: str) -> Case:
    """Returns the case that matches the files of `write_release`."""
    release, config_json = RELEASED[name], config_of(name, tiny=True)
    family, config = described_model(config_json)
    (of_zoo,) = [x for x in zoo.FAMILIES if x.huggingface is family and release.preset.startswith(x.prefix)][:1]
    return Case(config, of_zoo, pad_id=config_json.get("pad_token_id", 0))


def write_release(directory: pathlib.Path, name: str) -> Case:
    """Writes config.json, tensors with their released names, and a tokenizer."""
    release, case = RELEASED[name], case_of(name)
    family, config = case.family.huggingface, case.config
    state = to_huggingface(family.names(config), weights(config))
    state |= {name: np.zeros(shape, np.float32) for name, shape in family.zeros(config).items()}
    state |= {copy: state[original] for copy, original in family.tied(config).items()}
    tensors = {}
    for theirs in names_of(release, config.num_layers):
        ours = re.sub("gamma$", "weight", re.sub("beta$", "bias", release.base + theirs))
        tensors[theirs] = np.ascontiguousarray(state[ours] if ours in state else _no_weight(theirs, config))
    directory.mkdir()
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config_of(name, tiny=True)))
    write_tokenizer(directory, case.pad_id)
    return case


def _no_weight(name: str, config: ModelConfig) -> np.ndarray:
    """Returns a tensor that is not a weight of the class: a buffer, or a part of another class."""
    length = config.position.max_length or 20
    if name.endswith("embed_positions.weight"):  # Marian's table, which Marian can also compute
        angles = np.arange(length)[:, None] / 10_000 ** (np.arange(config.d_model // 2) * 2 / config.d_model)
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
    buffers = {
        "attn.bias": np.tril(np.ones((1, 1, length, length), np.float32)),
        "attention.bias": np.tril(np.ones((1, 1, length, length), np.uint8)),
        "masked_bias": np.array(-1e9, np.float32),
        "position_ids": np.arange(length)[None],
        "version": np.array([3.0], np.float32),
        "inv_freq": 10_000.0 ** -np.linspace(0, 1, config.dim_per_head // 2, endpoint=False, dtype=np.float32),
    }
    known = [x for end, x in buffers.items() if name.endswith(end)]
    return known[0] if known else np.ones(config.d_model, np.float32)
