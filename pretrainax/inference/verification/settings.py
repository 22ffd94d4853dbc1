"""Compares the interpretations of the config files of a Hugging Face directory by PretrainAX and transformers."""

import copy
import os
from collections.abc import Iterator, Mapping

import numpy as np

from pretrainax.config import Classify, ModelConfig, Tag, UserError
from pretrainax.files.json_files import JsonObject
from pretrainax.inference.verification.comparison import Comparison, exact, not_compared
from pretrainax.inference.verification.subject import Subject
from pretrainax.interop.architectures import described_model, read_config_json
from pretrainax.interop.export_dtypes import EXPORT_DTYPES
from pretrainax.interop.generation import GENERATION, SETTINGS, GenerationFile, read_generation_file
from pretrainax.interop.safetensors_files import Reader
from pretrainax.zoo.differences import differences
from pretrainax.zoo.family import ConfigJson


def their_config(config_json: ConfigJson) -> ConfigJson:
    """Returns a config.json as the config class of transformers reads it, with the defaults of this class.

    Raises:
      Exception: the class does not accept the file, or transformers has no class for its model_type.
    """
    from transformers import AutoConfig

    rest = copy.deepcopy(config_json)
    return AutoConfig.for_model(rest.pop("model_type"), **rest).to_dict()


def comparable(config: ModelConfig) -> Mapping[str, object]:
    """Returns the fields of a model config, with explicit values for fields whose None depends on other fields."""
    return vars(config) | {"num_kv_heads": config.kv_heads, "head_dim": config.dim_per_head}


def field_differences(raw: Mapping[str, object], theirs: ConfigJson) -> list[str]:
    """Lists the fields in which a model differs from the model that transformers' config class describes.

    A difference means that this package and the class have different defaults, or interpret a key differently.

    Args:
      raw: the model's fields (`comparable`), as this package reads config.json.
      theirs: the same config.json as the class reads it (`their_config`).
    """
    try:
        read = comparable(described_model(theirs)[1])
    except UserError as e:
        return [f"PretrainAX does not accept the values of transformers' config class: {e}"]
    return [
        f"config.model.{name} is {value!r}, and {read[name]!r} in transformers' config class"
        for name, value in raw.items()
        if value != read[name]
    ]


def compare_config(subject: Subject) -> Iterator[Comparison]:
    """Compares config.json with the view of transformers' config class, and with the config of an imported run."""
    what, config_json = "config.json", read_config_json(subject.directory)
    try:
        theirs = their_config(config_json)
    except Exception as e:  # for example because of an unknown model_type, or a value that the class rejects
        yield not_compared(what, f"transformers does not read it: {type(e).__name__}: {e}")
        return
    model = described_model(copy.deepcopy(config_json))[1]
    found = field_differences(comparable(model), theirs)
    if subject.origin.steps and not subject.adapter:  # an import, which has the heads and fields of the directory
        ours = subject.experiment.model
        found += [
            f"config.model.{name} is {getattr(ours, name)!r} in {subject.origin.directory}, and "
            f"{getattr(model, name)!r} in {subject.directory}"
            for name in differences(ours, model)
        ]
    yield exact(what, len(comparable(model)), "fields", found)
    if isinstance(model.head, (Classify, Tag)):
        names = [*getattr(subject.experiment.objective, "labels", ())]
        their_names = [str(theirs["id2label"][i]) for i in sorted(theirs["id2label"])]
        found = [] if names == their_names else [f"the labels are {names}, in transformers {their_names}"]
        if names:  # regression and multiple choice have no label names
            yield exact("labels", len(their_names), "names", found)


def compare_dtype(subject: Subject) -> Iterator[Comparison]:
    """Compares the dtype in which transformers loads the tensors with the dtypes of the files."""
    config_json, what = read_config_json(subject.directory), "dtype of config.json"
    name = config_json.get("dtype") or config_json.get("torch_dtype")
    if name not in EXPORT_DTYPES:
        yield not_compared(what, "config.json has no dtype" if name is None else f"config.json has dtype {name!r}")
        return
    dtypes = Reader(subject.directory).dtypes
    rounded = [f"{tensor} is {dtype}" for tensor, dtype in dtypes.items() if not _holds(name, dtype)]
    note = f"transformers loads all tensors as {name} by default, which rounds them"
    yield exact(what, len(dtypes), "tensors", [f"{line}: {note}" for line in rounded])


def _holds(dtype: str, stored: np.dtype) -> bool:
    """Returns True if `dtype` represents all values of a stored dtype; integers are not converted."""
    return dtype == "float32" or stored.name == dtype or stored.name not in (*EXPORT_DTYPES, "float64")


# --- generation ------------------------------------------------------------------------------------------------------


def compare_generation(subject: Subject) -> Iterator[Comparison]:
    """Compares the start and end tokens of generated text, and the other fields of generation_config.json."""
    if not subject.generates:
        return
    from transformers import AutoConfig, GenerationConfig

    if os.path.exists(os.path.join(subject.directory, GENERATION)):
        theirs = GenerationConfig.from_pretrained(subject.directory, local_files_only=True)
    else:
        try:
            config = AutoConfig.from_pretrained(subject.directory, local_files_only=True, trust_remote_code=False)
        except Exception as e:  # an unknown model_type
            yield not_compared("ends and generation settings", f"transformers does not read config.json: {e}")
            return
        theirs = GenerationConfig.from_model_config(config)
    yield _compare_ends(subject, theirs.eos_token_id)
    if subject.model.family == "encoder_decoder":
        start = theirs.decoder_start_token_id
        start = theirs.bos_token_id if start is None else start
        yield _compare_start(subject, start)
    ours = read_generation_file(subject.origin.directory) or GenerationFile("", {})
    yield _compare_fields(theirs.to_dict(), ours.fields)


def _compare_ends(subject: Subject, theirs: int | list[int] | None) -> Comparison:
    """Compares the ids that end a text; `theirs` is the eos_token_id of transformers' generate()."""
    ours, their_ids = subject.end_tokens, theirs if isinstance(theirs, list) else [theirs]
    ids = {i for i in their_ids if i is not None and i < subject.model.vocab_size}
    if not ids:
        reason = f"the files name no end token: transformers never ends a text, and PretrainAX ends it at {list(ours)}"
        return not_compared("end tokens", reason)
    found = [] if ids == {*ours} else [f"PretrainAX ends a text at ids {sorted(ours)}, transformers at {sorted(ids)}"]
    return exact("end tokens", len(ids), "ids", found)


def _compare_start(subject: Subject, theirs: int | None) -> Comparison:
    if theirs is None:
        return not_compared("decoder start", "the files name neither decoder_start_token_id nor bos_token_id")
    ours = subject.decoder_start
    found = [] if ours == theirs else [f"the decoder starts from id {ours}, in transformers from id {theirs}"]
    return exact("decoder start", 1, "id", found)


def _compare_fields(theirs: JsonObject, ours: JsonObject) -> Comparison:
    """Compares the fields of generation_config.json; a null has the same meaning as a missing field."""
    pairs = {name: (ours.get(name), theirs.get(name)) for name in SETTINGS}
    pairs = {name: pair for name, pair in pairs.items() if pair != (None, None)}
    found = [f"{name} is {a!r}, in transformers {b!r}" for name, (a, b) in pairs.items() if (a or None) != (b or None)]
    return exact("generation settings", len(pairs), "fields", found)
