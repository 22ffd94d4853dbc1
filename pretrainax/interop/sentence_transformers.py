"""Writes the files with which the library sentence-transformers loads an exported embedding model."""

import json
import os

from pretrainax.config import Embed, ModelConfig
from pretrainax.files.atomic_files import write_atomically

_MODES = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "last": "lasttoken"}
_UNUSED = ("mean_sqrt_len_tokens", "weightedmean_tokens")


def write_modules(directory: str, model: ModelConfig) -> None:
    """Writes modules.json and the configs of its modules: transformer, pooling and, if the head has it, normalization.

    This function writes nothing for models without an embedding head. It also writes nothing for decoders, because
    their tokenizers add no end token in transformers.
    """
    head = model.head
    if not isinstance(head, Embed) or model.family != "encoder":
        return
    kinds = {"Transformer": "", "Pooling": "1_Pooling", **({"Normalize": "2_Normalize"} if head.normalize else {})}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds.items())
    ]
    modes = {f"pooling_mode_{theirs}": ours == head.pooling for ours, theirs in _MODES.items()}
    pooling = {
        "word_embedding_dimension": model.d_model,
        **modes,
        **{f"pooling_mode_{name}": False for name in _UNUSED},
    }
    files = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": model.position.max_length, "do_lower_case": False},
        os.path.join("1_Pooling", "config.json"): pooling,
    }
    os.makedirs(os.path.join(directory, "1_Pooling"), exist_ok=True)
    for name, content in files.items():
        write_atomically(os.path.join(directory, name), json.dumps(content, indent=2) + "\n")
