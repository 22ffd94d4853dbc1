"""Implements ELMo in torch, from its paper and its released options, because transformers has no class for it."""

import dataclasses

import numpy as np

from pretrainax.layers.recurrent import recurrent_of
from pretrainax.zoo.elmo import elmo
from tests.golden.case import VOCABULARY

DIRECTIONS = ("forward", "backward")
SIZES = dict(vocab_size=VOCABULARY, num_layers=3, d_model=8, d_ff=12)
RECURRENT = dataclasses.replace(recurrent_of(elmo("original")), character_dim=5, filters=(3, 4, 6))
CONFIG = dataclasses.replace(elmo("original"), **SIZES, parts=(RECURRENT,))
CONFIGS = {
    "elmo": CONFIG,
    "elmo_clipped": dataclasses.replace(CONFIG, parts=(dataclasses.replace(RECURRENT, clip=0.1),)),  # clips most values
    "elmo_not_clipped": dataclasses.replace(CONFIG, parts=(dataclasses.replace(RECURRENT, clip=None),)),
}


def words_of(p, characters, config):
    """Maps characters [T, C] to word vectors [T, D] (bilm-tf: _build_word_char_embeddings)."""
    import torch

    x = p["character_embedding/embedding"][characters].transpose(1, 2)  # [T, E, C]
    found = []
    for size, _ in enumerate(recurrent_of(config).filters, start=1):
        name = f"character_embedding/convolution_{size}"
        kernel = p[f"{name}/kernel"].permute(2, 1, 0)  # [size, E, n] -> [n, E, size]
        found.append(torch.conv1d(x, kernel, p[f"{name}/bias"]).amax(dim=2))
    x = torch.relu(torch.cat(found, dim=1))
    for i in range(recurrent_of(config).highways):
        name = f"character_embedding/highway_{i}"
        carry = torch.sigmoid(x @ p[f"{name}/carry/kernel"] + p[f"{name}/carry/bias"])
        x = carry * torch.relu(x @ p[f"{name}/transform/kernel"] + p[f"{name}/transform/bias"]) + (1 - carry) * x
    return x @ p["character_embedding/projection/kernel"] + p["character_embedding/projection/bias"]


def lstm(p, name, layer, xs, config):
    """Runs one LSTMCell of TensorFlow with a projection over xs [T, D]; one matrix has the gates i, j, f, o."""
    import torch

    def of(path):
        return p[f"recurrent/blocks/{name}/{path}"][layer]

    width, limit = config.d_ff, recurrent_of(config).clip or float("inf")
    kernel = torch.cat([of("input/kernel"), of("cell/hidden/kernel")]).reshape(-1, 4 * width)
    memory, said, out = torch.zeros(width), torch.zeros(config.d_model), []
    for x in xs:
        i, j, f, o = (torch.cat([x, said]) @ kernel + of("input/bias").reshape(-1)).split(width)
        memory = torch.sigmoid(f + 1.0) * memory + torch.sigmoid(i) * torch.tanh(j)
        memory = memory.clamp(-limit, limit)
        said = (torch.sigmoid(o) * torch.tanh(memory)) @ of("cell/projection/kernel")
        said = said.clamp(-limit, limit)
        out.append(said)
    return torch.stack(out)


def reference(p, characters, config):
    """Maps one text [T, C] to logits of both directions [T, V], and the stream after each layer, [L, T, 2 D]."""
    import torch

    words = words_of(p, characters, config)
    streams = {name: [words] for name in DIRECTIONS}
    for name, layers in streams.items():
        for layer in range(config.num_layers):
            x = layers[-1]
            y = lstm(p, name, layer, x if name == "forward" else x.flip(0), config)
            y = y if name == "forward" else y.flip(0)
            layers.append(y + x if layer else y)  # skip connections, except from the characters to the first layer
    logits = [streams[name][-1] @ p["unembedding/kernel"] + p["unembedding/bias"] for name in DIRECTIONS]
    hidden = [torch.cat(pair, dim=1) for pair in zip(*streams.values(), strict=True)]
    return logits, hidden[1:]


def forward(config, p, arrays):
    """Returns "logits" and "backward_logits" [B, T, V], "hidden recurrent" [L, B, T, 2 D] and the "loss" of a batch.

    Hidden states are 0 at padding. The loss is the sum of the means of both directions.
    """
    import torch

    rows, sums, counted = [], [torch.zeros(()), torch.zeros(())], [0, 0]
    length = arrays["tokens"].shape[1]
    for row, count in enumerate(arrays["segment_ids"].sum(1)):
        logits, hidden = reference(p, torch.from_numpy(arrays["characters"][row, :count].astype(np.int64)), config)
        tokens = torch.from_numpy(arrays["tokens"][row, :count].astype(np.int64))
        told = (logits[0][:-1], tokens[1:]), (logits[1][1:], tokens[:-1])
        for side, (said, targets) in enumerate(told):
            sums[side] = sums[side] + torch.nn.functional.cross_entropy(said, targets, reduction="sum")
            counted[side] += len(targets)
        rows.append([torch.nn.functional.pad(x, (0, 0, 0, length - count)) for x in (*logits, torch.stack(hidden))])
    said, backward, hidden = map(torch.stack, zip(*rows, strict=True))
    loss = sums[0] / counted[0] + sums[1] / counted[1]
    # [B, L, T, 2 D] -> [L, B, T, 2 D]
    return {"logits": said, "backward_logits": backward, "hidden recurrent": hidden.swapaxes(0, 1), "loss": loss}
