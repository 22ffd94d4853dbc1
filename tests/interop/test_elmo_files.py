"""Tests ELMo's released files against AllenNLP's computation in torch, because transformers has no class for ELMo."""

import copy
import dataclasses
import json
import os

import numpy as np
import pytest

from pretrainax.config import Classify, UserError
from pretrainax.data.word_characters import character_table
from pretrainax.inference.load import load
from pretrainax.interop.directories import import_directory
from pretrainax.interop.origin import find_origin
from pretrainax.interop.start import fit_of
from pretrainax.zoo.family import without_heads

h5py = pytest.importorskip("h5py")  # extra elmo

OPTIONS = {  # the released options with small sizes
    "lstm": {
        "use_skip_connections": True,
        "projection_dim": 6,
        "cell_clip": 3,
        "proj_clip": 3,
        "dim": 10,
        "n_layers": 2,
    },
    "char_cnn": {
        "activation": "relu",
        "filters": [[1, 3], [2, 4], [3, 5]],
        "n_highway": 2,
        "embedding": {"dim": 4},
        "n_characters": 262,
        "max_characters_per_token": 50,
    },
}
WORDS = ["</S>", "<S>", "<UNK>", "the", "bank", "of", "rivers"]
TEXT = "the bank of the rivers bank"


def shapes_of(options):
    """Returns the names and shapes of the datasets that bilm-tf writes (training.py: dump_weights)."""
    lstm, cnn = options["lstm"], options["char_cnn"]
    width, total = lstm["projection_dim"], sum(n for _, n in cnn["filters"])
    shapes = {"char_embed": (261, cnn["embedding"]["dim"])}
    for i, (size, count) in enumerate(cnn["filters"]):
        shapes |= {f"CNN/W_cnn_{i}": (1, size, cnn["embedding"]["dim"], count), f"CNN/b_cnn_{i}": (count,)}
    for i in range(cnn["n_highway"]):
        for name in ("carry", "transform"):
            shapes |= {f"CNN_high_{i}/W_{name}": (total, total), f"CNN_high_{i}/b_{name}": (total,)}
    shapes |= {"CNN_proj/W_proj": (total, width), "CNN_proj/b_proj": (width,)}
    for side in range(2):
        for layer in range(lstm["n_layers"]):
            cell = f"RNN_{side}/RNN/MultiRNNCell/Cell{layer}/LSTMCell"
            shapes |= {f"{cell}/W_0": (2 * width, 4 * lstm["dim"]), f"{cell}/B": (4 * lstm["dim"],)}
            shapes[f"{cell}/W_P_0"] = (lstm["dim"], width)
    return shapes


def write_release(directory, options=None, words=WORDS, without=(), **changes):
    """Writes a directory like the release, with random values; replaces datasets by `changes`, omits `without`."""
    options = OPTIONS if options is None else options
    (directory / "options.json").write_text(json.dumps(options))
    (directory / "vocab-2016-09-10.txt").write_text("".join(f"{word}\n" for word in words))
    rng, arrays = np.random.default_rng(0), {}
    for name, shape in shapes_of(OPTIONS).items():
        # The values are large enough that clipping has an effect.
        arrays[name] = (rng.normal(size=shape) * 3 / np.sqrt(shape[0])).astype(np.float32)
    arrays |= changes
    with h5py.File(directory / "elmo_weights.hdf5", "w") as file:
        for name, x in arrays.items():
            if name not in without:
                file[name] = x
    return arrays


def as_allennlp(arrays, characters):
    """Maps one text [T, 50] to the stream after each layer, [L, T, 2 D], as AllenNLP does with the file.

    AllenNLP uses modules of torch: gates in the order i, f, g, o; a forget bias of 1 as part of the bias; a carry gate
    in a highway layer.
    """
    import torch

    t = {name: torch.from_numpy(x) for name, x in arrays.items()}
    table = torch.cat([torch.zeros(1, 4), t["char_embed"]])
    x = torch.nn.functional.embedding(characters, table).transpose(1, 2)  # [T, E, 50]
    found = []
    for i in range(3):
        convolution = torch.nn.functional.conv1d(x, t[f"CNN/W_cnn_{i}"][0].permute(2, 1, 0), t[f"CNN/b_cnn_{i}"])
        found.append(torch.relu(convolution.max(dim=2).values))
    x = torch.cat(found, dim=1)
    for i in range(2):
        high = {name: t[f"CNN_high_{i}/{name}"] for name in ("W_carry", "b_carry", "W_transform", "b_transform")}
        new = torch.relu(torch.nn.functional.linear(x, high["W_transform"].T, high["b_transform"]))
        kept = torch.sigmoid(torch.nn.functional.linear(x, -high["W_carry"].T, -high["b_carry"]))
        x = kept * x + (1 - kept) * new
    words = torch.nn.functional.linear(x, t["CNN_proj/W_proj"].T, t["CNN_proj/b_proj"])
    sides = []
    for side in range(2):
        stream, layers = (words.flip(0) if side else words), []
        for layer in range(2):
            cell = f"RNN_{side}/RNN/MultiRNNCell/Cell{layer}/LSTMCell"
            i, j, f, o = t[f"{cell}/W_0"].T.chunk(4)
            b_i, b_j, b_f, b_o = t[f"{cell}/B"].chunk(4)
            weight, bias = torch.cat([i, f, j, o]), torch.cat([b_i, b_f + 1, b_j, b_o])
            said, memory, out = torch.zeros(6), torch.zeros(10), []
            for word in stream:
                gates = torch.nn.functional.linear(torch.cat([word, said]), weight, bias)
                enters, stays, new, leaves = gates.chunk(4)
                memory = torch.sigmoid(enters) * torch.tanh(new) + torch.sigmoid(stays) * memory
                memory = memory.clamp(-3, 3)
                said = torch.nn.functional.linear(torch.sigmoid(leaves) * torch.tanh(memory), t[f"{cell}/W_P_0"].T)
                said = said.clamp(-3, 3)
                out.append(said)
            stream = torch.stack(out) + (stream if layer else 0)
            layers.append(stream.flip(0) if side else stream)
        sides.append(layers)
    return [torch.cat(pair, dim=1) for pair in zip(*sides, strict=True)]


def test_the_released_files_are_imported_and_computed_as_by_allennlp(tmp_path):
    torch = pytest.importorskip("torch")  # extra parity
    release, workdir = tmp_path / "release", tmp_path / "imported"
    release.mkdir()
    arrays = write_release(release, stray=np.ones(2, np.float32))
    said = import_directory(str(release), str(workdir))
    assert said.endswith("the softmax over words is in no file of ELMo: it is zero; left unread: stray")
    model = load(str(workdir))
    assert (model.config.d_model, model.config.d_ff, model.config.vocab_size) == (6, 10, len(WORDS))
    ids = model.tokenizer.encode(TEXT)
    assert [WORDS[i] for i in ids] == TEXT.split()
    ones = np.ones((1, len(ids)), np.int32)
    row = {"tokens": ids[None], "segment_ids": ones, "positions": np.cumsum(ones, axis=1, dtype=np.int32) - 1}
    ours = model(row, hidden=True).hidden["recurrent"]
    characters = character_table(model.tokenizer)[ids]
    theirs = as_allennlp(arrays, torch.from_numpy(characters.astype(np.int64)))
    assert max(float(x.abs().max()) for x in theirs) > 3  # includes sums and clipped values
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(mine)[0], other.numpy(), atol=2e-4)  # float32 sums in another order


def test_a_task_starts_from_an_import_without_its_softmax(tmp_path):
    (tmp_path / "release").mkdir()
    write_release(tmp_path / "release")
    import_directory(str(tmp_path / "release"), str(tmp_path / "imported"))
    model = load(str(tmp_path / "imported")).config
    head = Classify(num_labels=2, kind="single", pooling="mean", hidden="none")
    task = dataclasses.replace(without_heads(model), head=head)
    fit = fit_of(find_origin(str(tmp_path / "imported")), task, fresh_heads=True)
    assert fit.unused_paths == ["unembedding/bias", "unembedding/kernel"] and not fit.changed
    assert all(path.startswith(("classifier/", "scalar_mix/")) for path in fit.missing_head_paths)


def changed(part, **fields):
    options = copy.deepcopy(OPTIONS)
    options[part] |= fields
    return options


CELL = "RNN_1/RNN/MultiRNNCell/Cell1/LSTMCell"


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"options": changed("lstm", proj_clip=5)}, "options.json has lstm.proj_clip 5; only 3 is supported"),
        ({"options": changed("lstm", dim=-1)}, "options.json has lstm.dim -1, it must be a number from 1 to 1,048,576"),
        (
            {"options": changed("lstm", dim=11)},
            r"Cell0/LSTMCell/W_0 is float32\[12, 40\], .* asks for float32\[12, 44\]",
        ),
        (
            {"options": changed("char_cnn", activation="tanh")},
            "has char_cnn.activation 'tanh'; only 'relu' is",
        ),
        ({"options": changed("char_cnn", filters=[[2, 3]])}, r"has char_cnn.filters \[2\]; only \[1\] is supported"),
        ({"options": {"lstm": {}}}, "is no options.json of ELMo .KeyError: 'char_cnn'"),
        ({"without": (f"{CELL}/B",)}, f"has no dataset {CELL}/B, which options.json asks for"),
        ({"char_embed": np.zeros((261, 4), np.int32)}, r"char_embed is int32\[261, 4\], .* asks for float32"),
        ({"char_embed": np.full((261, 4), np.nan, np.float32)}, "char_embed holds numbers that are not finite"),
        ({"words": ["the"]}, "has no line </S>, <S>, <UNK>: it is not a word vocabulary"),
    ],
)
def test_what_is_no_release_is_one_line(changes, said, tmp_path):
    write_release(tmp_path, **changes)
    with pytest.raises(UserError, match=said):
        import_directory(str(tmp_path), str(tmp_path / "imported"))


def test_numbers_of_other_files_are_not_read(tmp_path):
    write_release(tmp_path, without=("char_embed", "CNN_proj/b_proj"))
    with h5py.File(tmp_path / "other", "w") as other:
        other["char_embed"] = np.zeros((261, 4), np.float32)
    with h5py.File(tmp_path / "elmo_weights.hdf5", "a") as file:
        file["char_embed"] = h5py.ExternalLink(str(tmp_path / "other"), "char_embed")
    with pytest.raises(UserError, match="has no dataset char_embed"):
        import_directory(str(tmp_path), str(tmp_path / "imported"))
    with h5py.File(tmp_path / "elmo_weights.hdf5", "a") as file:
        del file["char_embed"]
        secret = [(str(tmp_path / "other"), 0, 261 * 16)]
        file.create_dataset("char_embed", (261, 4), np.float32, external=secret)
    with pytest.raises(UserError, match="char_embed is no dataset of this file itself"):
        import_directory(str(tmp_path), str(tmp_path / "imported"))


def test_what_is_missing_beside_the_options_is_one_line(tmp_path):
    write_release(tmp_path)
    os.rename(tmp_path / "vocab-2016-09-10.txt", tmp_path / "words.txt")
    with pytest.raises(UserError, match="has 0 files vocab.*txt, and options.json of ELMo: there must be one"):
        import_directory(str(tmp_path), str(tmp_path / "imported"))
    os.rename(tmp_path / "words.txt", tmp_path / "vocab.txt")
    (tmp_path / "elmo_weights.hdf5").write_bytes(b"no such file")
    with pytest.raises(UserError, match="elmo_weights.hdf5 is no HDF5 file, or a damaged one"):
        import_directory(str(tmp_path), str(tmp_path / "imported"))
