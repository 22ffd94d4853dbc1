"""A process that performs jobs of a study or of a ladder, on requests from stdin, and replies on stdout, as JSON lines.

There are three requests:

- {"job": fields of `Job`, "log": path}
- {"rung": fields of `LadderJob`, "log": path}
- {"speed": name of an arm, "study": contents of the study file, "twin": speed of an arm with the same measures or
  null, "validations": number of validations of a run, "log": path}

There are three replies:

- {"code": exit code}
- {"speed": result of `perform.measure_speed`}
- {"error": message, "exit_code": 2 for an invalid config or input, 1 for a failed run}

All other output goes to the log file of the request.
"""

import json
import os
import sys
from typing import Optional

from absl import flags

from pretrainax.config import UserError
from pretrainax.files.json_files import JsonObject
from pretrainax.runtime import host
from pretrainax.runtime.signals import PREEMPTED, end_with_parent
from pretrainax.studies.arms import configured
from pretrainax.studies.jobs import Job
from pretrainax.studies.ladder.jobs import LadderJob, perform_rung
from pretrainax.studies.perform import Train, measure_speed, perform
from pretrainax.studies.plan import read_plan
from pretrainax.studies.study_file import study_from
from pretrainax.studies.trainer import Trainer


def main(train_run: Optional[Train] = None) -> None:
    """Performs jobs until stdin is closed or a signal pauses a job.

    Args:
      train_run: trains a run in a folder and returns the exit code; None: `Trainer.train`.
    """
    end_with_parent()
    flags.FLAGS.mark_as_parsed()  # Grain reads absl flags
    workdir, replies = sys.argv[1], os.fdopen(os.dup(1), "w")
    train_run = train_run or Trainer().train
    for line in sys.stdin:
        request = json.loads(line)
        os.makedirs(os.path.dirname(request["log"]), exist_ok=True)
        with open(request["log"], "ab") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        reply = _reply(request, workdir, train_run)
        print(json.dumps(reply), file=replies, flush=True)
        if reply.get("code") == PREEMPTED:
            return


def _reply(request: JsonObject, workdir: str, train_run: Train) -> JsonObject:
    """Performs a request; exceptions other than the errors of a config, input or run end the process."""
    try:
        if "speed" in request:
            study = study_from(request["study"], "the study")
            (arm,) = (arm for arm in study.arms if arm.name == request["speed"])
            host.start_jax(configured(arm))
            return {"speed": measure_speed(study, arm, train_run, request["twin"], request["validations"])}
        if "rung" in request:
            rung = LadderJob(**request["rung"])
            host.start_jax(configured(rung.arm))
            return {"code": perform_rung(rung, workdir, train_run)}
        plan, job = read_plan(workdir), Job(**request["job"])
        host.start_jax(configured(plan.arm(job.arm)))
        return {"code": perform(plan, workdir, job, train_run)}
    except UserError as e:
        return {"error": str(e), "exit_code": e.exit_code}
