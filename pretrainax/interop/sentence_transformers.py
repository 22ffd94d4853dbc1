"""Reads and writes the files in which sentence-transformers stores the inputs and the pooling of an embedding model."""

import glob
import json
import os
from typing import NamedTuple, Optional

from pretrainax.config import Embed, ModelConfig, UserError
from pretrainax.config.heads import Pooling
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import read_object
from pretrainax.files.regular_files import read_bytes

MODULES = "modules.json"  # file that lists the modules of a sentence-transformers model
_PROMPTS = "config_sentence_transformers.json"  # file with the prompts that may precede each input
_INPUTS = "sentence_bert_config.json"  # file with the length and the case of the inputs
_INPUT_FILES = "sentence_*_config.json"  # names of this file: old files have the model type instead of "bert"
_NO_LIMIT = 10**9  # transformers stores 1e30 as model_max_length of a tokenizer without a limit
_MODES: dict[Pooling, str] = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "last": "lasttoken"}
_UNUSED = ("mean_sqrt_len_tokens", "weightedmean_tokens")
# Names of the modes in both formats of the pooling config: {"pooling_mode_cls_token": true}, {"pooling_mode": "cls"}.
_OWN_MODES: dict[str, Pooling] = {theirs: ours for ours, theirs in _MODES.items()}
_OWN_MODES |= {"cls": "cls", "mean": "mean", "max": "max"}


class Modules(NamedTuple):
    """The settings of an embedding model before and after its transformer."""

    head: Embed  # pooling and normalization
    max_length: Optional[int] = None  # tokens of an input, including special tokens; None: only the model's limit
    lowercase: bool = False  # whether inputs are converted to lower case


def read_modules(directory: str) -> Optional[Modules]:
    """Reads the modules of an embedding model; returns None if there is no modules.json.

    Raises:
      UserError: a file is damaged, or the model has an unsupported module (a dense layer, another pooling) or a default
        prompt.
    """
    path = os.path.join(directory, MODULES)
    if not os.path.isfile(path):
        return None
    try:
        modules = [(module["type"].rpartition(".")[2], str(module["path"])) for module in json.loads(read_bytes(path))]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise UserError(f"{path} is damaged ({type(e).__name__}: {e})") from e
    names = [name for name, _ in modules]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(
            f"{path} has the modules {', '.join(names)}, of which only Transformer, Pooling and Normalize are "
            "supported: set pooling to get the vectors of the transformer"
        )
    config = read_object(os.path.join(directory, modules[1][1], "config.json"))
    prefix = "pooling_mode_"
    legacy_modes = [key.removeprefix(prefix) for key, value in config.items() if key.startswith(prefix) and value]
    named = config.get("pooling_mode") or legacy_modes or "mean"
    modes = list(map(str, named)) if isinstance(named, list) else [str(named)]
    if len(modes) != 1 or modes[0] not in _OWN_MODES:
        raise UserError(f"{directory} has the pooling {' and '.join(modes)}: set pooling to {', '.join(_MODES)}")
    prompts = os.path.join(directory, _PROMPTS)
    if os.path.isfile(prompts) and (name := read_object(prompts).get("default_prompt_name")):
        raise UserError(
            f"{prompts} has default_prompt_name {name!r}, which is not supported: write the prompt before each text, "
            "and set pooling"
        )
    head = Embed(pooling=_OWN_MODES[modes[0]], normalize="Normalize" in names)
    return Modules(head, *_read_inputs(os.path.join(directory, modules[0][1]), directory))


def _read_inputs(folder: str, directory: str) -> tuple[Optional[int], bool]:
    """Reads the fields `max_length` and `lowercase` of `Modules` from the folder of a Transformer module."""
    found = sorted(glob.glob(os.path.join(glob.escape(folder), _INPUT_FILES)))
    config = read_object(found[0]) if found else {}
    length, lowercase = config.get("max_seq_length"), config.get("do_lower_case") or False
    tokenizer = os.path.join(directory, "tokenizer_config.json")
    if length is None and os.path.isfile(tokenizer):  # sentence-transformers 6 stores the length there
        limit = read_object(tokenizer).get("model_max_length")
        length = limit if isinstance(limit, int) and limit < _NO_LIMIT else None
    if length is not None and (type(length) is not int or length < 1) or not isinstance(lowercase, bool):
        raise UserError(
            f"{found[0] if found else tokenizer} has max_seq_length {length!r} and do_lower_case {lowercase!r}: "
            "they must be a positive integer and true or false"
        )
    return length, lowercase


def copy_modules(directory: str, to: str) -> None:
    """Copies the files that `read_modules` reads, if `directory` is a sentence-transformers model."""
    if not os.path.isfile(os.path.join(directory, MODULES)):
        return
    patterns = MODULES, _PROMPTS, "*/config.json"
    for name in (name for pattern in patterns for name in glob.glob(pattern, root_dir=directory)):
        os.makedirs(os.path.dirname(os.path.join(to, name)), exist_ok=True)
        write_atomically(os.path.join(to, name), read_bytes(os.path.join(directory, name)))
    length, lowercase = _read_inputs(directory, directory)
    _write_inputs(to, length, lowercase)


def _write_inputs(directory: str, length: Optional[int], lowercase: bool) -> None:
    content = {"max_seq_length": length, "do_lower_case": lowercase}
    write_atomically(os.path.join(directory, _INPUTS), json.dumps(content, indent=2) + "\n")


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
        os.path.join("1_Pooling", "config.json"): pooling,
    }
    os.makedirs(os.path.join(directory, "1_Pooling"), exist_ok=True)
    for name, content in files.items():
        write_atomically(os.path.join(directory, name), json.dumps(content, indent=2) + "\n")
    _write_inputs(directory, model.position.max_length, lowercase=False)
