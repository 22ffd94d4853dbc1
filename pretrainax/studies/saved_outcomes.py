"""Saves the outcomes of measures in the folder of a run, so that a repeated call reads them."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import JsonObject
from pretrainax.studies.outcomes import Outcome
from pretrainax.studies.study import Measure

_PERIOD = 5  # every _PERIOD-th record is for the tuning
Settings = Mapping[str, object]


def saved(
    folder: str, measure: Measure, what: str, settings: Settings, compute: Callable[[str], JsonObject]
) -> JsonObject:
    """Reads the result of `compute` from the folder of a measure, or computes and writes it.

    Args:
      folder: the folder of the run.
      what: name of the result, for example "outcomes".
      settings: values that determine the result, in addition to the fields of the measure.
      compute: computes the result; receives the path of a folder that it may create for its own files.
    """
    scratch = _scratch(folder, measure, what, settings)
    path = f"{scratch}.json"
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_atomically(path, json.dumps(compute(scratch)) + "\n")
    with open(path) as file:  # also after `compute`, so that all calls return equal results
        return json.load(file)


def is_saved(folder: str, measure: Measure, what: str, settings: Settings) -> bool:
    """Returns True if `saved` would read the result; arguments as in `saved`."""
    return os.path.exists(f"{_scratch(folder, measure, what, settings)}.json")


def _scratch(folder: str, measure: Measure, what: str, settings: Settings) -> str:
    key = hashlib.blake2b(repr((str(measure), sorted(settings.items()))).encode(), digest_size=6).hexdigest()
    return os.path.join(folder, "measures", re.sub(r"[^\w.-]+", "_", measure.name), f"{what}-{key}")


def saved_outcomes(
    folder: str, measure: Measure, what: str, settings: Settings, compute: Callable[[str], Mapping[str, Outcome]]
) -> dict[str, Outcome]:
    """Reads named outcomes, or computes and writes them; arguments as in `saved`."""

    def as_json(scratch: str) -> JsonObject:
        return {
            name: {"value": outcome.value, "changes": None if outcome.changes is None else outcome.changes.tolist()}
            for name, outcome in compute(scratch).items()
        }

    read = saved(folder, measure, what, settings, as_json)
    return {
        name: Outcome(x["value"], None if x["changes"] is None else np.array(x["changes"], np.float64))
        for name, x in read.items()
    }


def is_chosen(records: np.ndarray | Sequence[int], is_tuning: bool) -> np.ndarray:
    """Returns True for each record number [n] that is for the tuning or, without `is_tuning`, for the final runs."""
    return (np.asarray(records) % _PERIOD == 0) == is_tuning
