"""Writes the files that sentence-transformers needs to load an exported embedding model."""

import json
import os

from pretrainax.config import Embed, ModelConfig
from pretrainax.files.atomic_files import write_atomically

MODULES = "modules.json"  # file that lists the modules of a sentence-transformers model
_MODES = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "last": "lasttoken"}
_UNUSED = ("mean_sqrt_len_tokens", "weightedmean_tokens")


def write_modules(directory: str, model: ModelConfig) -> None:
    """Writes modules.json and the configs of the listed modules.

    The modules are the transformer, pooling and, if the embedding head normalizes its output, normalization.
    Writes nothing for models without an embedding head, or for decoders and encoder-decoders. Decoders are excluded
    because their tokenizers add no end token in transformers.
    """
    head = model.head
    if not isinstance(head, Embed) or model.family != "encoder":
        return
    paths = {"Transformer": "", "Pooling": "1_Pooling", **({"Normalize": "2_Normalize"} if head.normalize else {})}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{module}"}
        for i, (module, path) in enumerate(paths.items())
    ]
    modes = {f"pooling_mode_{theirs}": ours == head.pooling for ours, theirs in _MODES.items()}
    pooling = {
        "word_embedding_dimension": model.d_model,
        **modes,
        **{f"pooling_mode_{name}": False for name in _UNUSED},
    }
    files = {
        MODULES: modules,
        "sentence_bert_config.json": {"max_seq_length": model.position.max_length, "do_lower_case": False},
        os.path.join("1_Pooling", "config.json"): pooling,
    }
    os.makedirs(os.path.join(directory, "1_Pooling"), exist_ok=True)
    for name, content in files.items():
        write_atomically(os.path.join(directory, name), json.dumps(content, indent=2) + "\n")
