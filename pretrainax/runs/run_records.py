"""Reads the properties on which a run's metrics depend: objective, tokenizer and validation text."""

import json
import os

from pretrainax import config as config_lib
from pretrainax.checkpoints.run_json import read_run_json
from pretrainax.checkpoints.steps import list_steps
from pretrainax.config import Experiment, UserError
from pretrainax.files.json_files import JsonObject, read_object
from pretrainax.reporting.run_groups import Part, Record
from pretrainax.tokenization.base import DESCRIPTION, load_tokenizer


def read_record(workdir: str) -> Record:
    """Reads the config, the tokenizer and the newest checkpoint's run.json of a run; never raises UserError."""
    path = os.path.join(workdir, "config.json")
    if not os.path.isfile(path):
        return Record(None, {}, missing="no config.json")
    try:
        experiment = config_lib.load(path)
    except UserError as e:
        return Record(None, {}, missing=str(e))
    checkpoint = _read_extra(os.path.join(workdir, "checkpoints"))
    try:
        tokenizer = _read_tokenizer(os.path.join(workdir, "tokenizer"), checkpoint)
    except UserError as e:
        return Record(experiment, {}, missing=str(e))
    source, objective = experiment.data.source, experiment.validation_objective
    filters = (experiment.data.quality, experiment.data.drop_duplicates, experiment.data.near_duplicates)
    generator = experiment.model.generator
    parts = {
        # A validation has the settings of the end of training.
        "objective": Part(_key(objective.with_settings_between(1.0, 1.0)), str(objective)),
        "tokenizer": tokenizer,
        "validation text": Part(json.dumps(_validation(config_lib.to_json(source))), str(source)),
        "filters": Part(_key(filters), f"filters {', '.join(map(str, filter(None, filters))) or 'none'}"),
        "rows": _rows(experiment),
        "size": Part(None, ""),  # from the metrics
        "generator": Part(_key(generator), f"generator of width {generator.d_model}" if generator else ""),
    }
    has_own_text = any(getattr(component, "valid_path", None) for component in source.components())
    corpora = tuple(name for name in checkpoint.get("corpora", ()) if "-valid" in name)
    return Record(experiment, parts, corpora=None if has_own_text else corpora or None)


def _read_extra(directory: str) -> JsonObject:
    """Returns the loop state in the newest readable run.json, or {} if there is none."""
    for step in reversed(list_steps(directory) if os.path.isdir(directory) else []):
        try:
            return read_run_json(os.path.join(directory, str(step)))["extra"]
        except UserError:  # another process writes or deletes this checkpoint
            continue
    return {}


def _read_tokenizer(directory: str, checkpoint: JsonObject) -> Part:
    """Returns the tokenizer's fingerprint and number of ids; the fingerprint comes from the checkpoint (fast)."""
    fingerprint = checkpoint.get("tokenizer") or load_tokenizer(directory).fingerprint
    size = read_object(os.path.join(directory, DESCRIPTION)).get("vocabulary", {}).get("size")
    return Part(fingerprint, f"{size:,} ids" if isinstance(size, int) else f"tokenizer {fingerprint[:6]}")


def _rows(experiment: Experiment) -> Part:
    """Returns the length and packing of the rows. For tasks, each record is one row, and its length does not matter."""
    if experiment.validation_objective.unit == "records":
        return Part("records", "records")
    data = experiment.data
    packing = "" if data.packing is None else f" by {data.packing}"
    return Part(_key((data.sequence_length, data.packing)), f"rows of {data.sequence_length:,} tokens{packing}")


def _validation(source: object) -> object:
    """Removes the training data from a source's JSON if `valid_path` names other data for validation."""
    if isinstance(source, list):
        return [_validation(item) for item in source]
    if not isinstance(source, dict):
        return source
    training = ("path", "valid_fraction") if source.get("valid_path") else ()
    return {name: _validation(value) for name, value in source.items() if name not in training}


def _key(value: object) -> str:
    return json.dumps(config_lib.to_json(value))
