"""Registers the prediction of a held-out run before the run starts, and scores it afterwards.

`prediction.json` has the law with its runs and intervals, the config of the held-out run, and the predicted loss with
its interval. `prediction.sha256` has the SHA-256 of this file, in the format of `sha256sum -c`. Publish the hash before
the run ends. It proves the date of the prediction, which the modification times of the files do not prove.
"""

import glob
import hashlib
import json
import os
from typing import NamedTuple

from pretrainax.config import UserError, to_json
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import JsonObject
from pretrainax.files.regular_files import read_bytes
from pretrainax.scaling.fit import Fit, law_json, read_runs
from pretrainax.scaling.prediction import Prediction, predict
from pretrainax.studies.jobs import RUN
from pretrainax.studies.ladder.rungs import Rung, experiment_of

PREDICTION, HASH, SCORE = "prediction.json", "prediction.sha256", "score.json"


class Registered(NamedTuple):
    """A registered prediction."""

    content: JsonObject  # content of prediction.json
    sha256: str

    @property
    def interval(self) -> tuple[float, float]:
        """Returns the interval of the predicted loss."""
        low, high = self.content["prediction"]["interval"]
        return low, high


def prediction_of(law_fit: Fit, held_out: Rung) -> Prediction:
    """Predicts the loss of the held-out run."""
    return predict(law_fit.law, experiment_of(held_out), max(held_out.length.epochs, 1.0))


def is_registered(workdir: str) -> bool:
    """Returns True if a prediction is registered."""
    return os.path.exists(os.path.join(workdir, HASH))


def check_not_started(workdir: str, held_out: Rung) -> None:
    """Raises UserError if the folder of the held-out run exists; call it while no prediction is registered."""
    folder = os.path.join(workdir, held_out.folder)
    if os.path.exists(folder):
        raise UserError(
            f"the held-out run {folder} exists, and no prediction was registered before it: delete this folder, or set "
            "another --workdir"
        )


def register(workdir: str, law_fit: Fit, held_out: Rung) -> Registered:
    """Writes the prediction of the held-out run and its hash, or reads them if they are registered already.

    Raises:
      UserError: the folder of the held-out run exists, but no prediction, or prediction.json does not have its hash.
    """
    path, hash_path = (os.path.join(workdir, name) for name in (PREDICTION, HASH))
    if not is_registered(workdir):
        check_not_started(workdir, held_out)
        content = {
            "law": law_json(law_fit),
            "prediction": prediction_of(law_fit, held_out).values(),
            "held_out": {"folder": held_out.folder, "flops": held_out.length.flops, "steps": held_out.length.steps},
            "config": to_json(experiment_of(held_out)),
        }
        data = json.dumps(content, indent=1) + "\n"
        write_atomically(path, data)
        write_atomically(hash_path, f"{hashlib.sha256(data.encode()).hexdigest()}  {PREDICTION}\n")
    data, expected = read_bytes(path), read_bytes(hash_path).decode().split()[0]
    if (actual := hashlib.sha256(data).hexdigest()) != expected:
        raise UserError(
            f"{path} was changed after its registration: its SHA-256 is {actual}, and {hash_path} has {expected}"
        )
    return Registered(json.loads(data), actual)


def score(workdir: str, registered: Registered, held_out: Rung) -> JsonObject:
    """Compares the loss of the finished held-out run with its prediction, and writes score.json.

    Raises:
      UserError: the run has no final validation loss.
    """
    folder = os.path.join(workdir, held_out.folder, RUN)
    runs, _, left_out = read_runs(glob.escape(folder))
    if not runs:
        raise UserError(f"the held-out run has no loss to score: {'; '.join(left_out)}")
    predicted, (low, high) = registered.content["prediction"]["loss"], registered.interval
    content: JsonObject = {
        "prediction_sha256": registered.sha256,
        "metric": registered.content["law"]["metric"],
        "predicted": predicted,
        "interval": [low, high],
        "measured": runs[0].loss,
        "error": runs[0].loss / predicted - 1,  # as a share of the predicted loss
        "is_in_interval": low <= runs[0].loss <= high,
    }
    write_atomically(os.path.join(workdir, SCORE), json.dumps(content, indent=1) + "\n")
    return content
