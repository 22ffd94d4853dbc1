"""Writes Hugging Face directories with the tiny models of tests/golden, in the format of transformers."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import decoders, pre_tokenizers, processors

from pretrainax import config as config_lib
from pretrainax import models
from pretrainax.checkpoints.params import load_steps, write_params
from pretrainax.checkpoints.steps import find_checkpoint
from pretrainax.interop import directories
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.tokenization.huggingface import read_tokenizer
from pretrainax.zoo.convert import to_huggingface
from tests.golden import CASES
from tests.golden.case import weights

# transformers has no class that computes the logits of DeBERTa as its authors pretrain it.
PUBLISHED = [name for name in CASES if not name.startswith("deberta_v")]


# The special tokens that the tokenizers of transformers add to a text and to a pair, by the kind of model.
TEMPLATES = {
    "encoder": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "bart": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
    "encoder_decoder": ("$A </s>", "$A </s> $B </s>"),
    "decoder": ("<s> $A", "<s> $A <s> $B"),
}


def write_tokenizer(directory, pad_id, sentinels=0, template=None):
    """Writes a tokenizer with a token for each letter, the special tokens of all objectives, and `sentinels` sentinels.

    The tokenizer adds no special tokens to a text, unless `template` is a key of `TEMPLATES`.
    """
    special = ["<s>", "</s>", "<unk>", "<mask>", "[CLS]", "[SEP]"]
    numbered = [f"<extra_id_{n}>" for n in range(sentinels)]
    pieces = [*special, *"abcdefghijklmnopqrstuvwxyz .,", *numbered]
    pieces += [f"piece{i}" for i in range(len(pieces), pad_id)]
    pieces.insert(pad_id, "<pad>")
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*special, *numbered, "<pad>"])
    if template is not None:
        (single, pair), ids = TEMPLATES[template], [(piece, vocabulary[piece]) for piece in special]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = dict(pad="<pad>", bos="<s>", eos="</s>", unk="<unk>", cls="[CLS]", sep="[SEP]", mask="<mask>")
    named = {f"{name}_token": piece for name, piece in names.items()}
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | named))


def without_frame(tokenizer):
    """Removes the special tokens that the tokenizer adds, so that the model's family determines them.

    Tokenizers trained by this package behave like that.
    """
    tokenizer.vocabulary = dataclasses.replace(tokenizer.vocabulary, frame=None, decoder_start=None)
    return tokenizer


def write_directory(directory, case="bert", dtype=np.float32):
    """Writes the tiny model of a case (a name or a `Case`) in the format of transformers, without transformers."""
    case, directory = CASES[case] if isinstance(case, str) else case, pathlib.Path(directory)
    directory.mkdir()
    family = case.family.huggingface
    state = to_huggingface(family.names(case.config), weights(case.config))
    state |= {name: np.zeros(shape, np.float32) for name, shape in family.zeros(case.config).items()}
    state = {name: np.ascontiguousarray(x.astype(dtype)) for name, x in state.items()}
    safetensors.numpy.save_file(state, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(family.write_config(case.config)))
    write_tokenizer(directory, case.pad_id, template="bart" if case.family.name == "BART" else case.config.family)
    return directory


def stored(directory):
    """Returns all tensors in the files of a directory."""
    tensors = {}
    for file in sorted(pathlib.Path(directory).glob("*.safetensors")):
        tensors |= safetensors.numpy.load_file(file)
    return tensors


def params_of(workdir, config):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = models.abstract_params(config)
    return load_steps(
        (find_checkpoint(str(workdir)),),
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes),
    )


def assert_same(a, b):
    for path, x, y in zip(parameter_names(a), jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), path


def write_run(workdir, config, objective=None, pad_id=0, sentinels=0):
    """Writes a workdir like a run of `config`: config.json, a tokenizer, a checkpoint of the case's weights."""
    tree = weights(config)
    by_path = dict(zip(parameter_names(tree), jax.tree.leaves(tree), strict=True))
    workdir.mkdir()
    write_tokenizer(workdir, pad_id, sentinels)
    tokenizer = without_frame(read_tokenizer(str(workdir)))
    tokenizer.save(str(workdir / "tokenizer"))
    write_params(str(workdir), models.abstract_params(config), lambda path, index: by_path[path][index], {})
    experiment = directories.evaluation_of(config, tokenizer.vocabulary, str(workdir / "tokenizer"))
    experiment.objective = objective or experiment.objective
    (workdir / "config.json").write_text(config_lib.dump(experiment))
    return workdir
