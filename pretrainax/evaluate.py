"""`python -m pretrainax.evaluate --workdir=DIR`: the validation split under the newest checkpoint of a run.

Several processes are started by hand, as launch/README.md says under "Elsewhere"; they work on the mesh of the run.
"""

import os

from pretrainax import cli, config
from pretrainax.checkpoints.params import load_params
from pretrainax.config import UserError
from pretrainax.data.corpus_check import CorpusCheck
from pretrainax.data.pipeline import batches_of
from pretrainax.reporting.visible import visible
from pretrainax.runtime import host
from pretrainax.training.samples import samples
from pretrainax.training.setup import open_run


def main() -> int:
    workdir = cli.WORKDIR.value
    if not workdir or not os.path.exists(os.path.join(workdir, "config.json")):
        raise UserError(f"--workdir={workdir} holds no config.json: give the run directory of pretrainax.main")
    experiment = config.load(os.path.join(workdir, "config.json"))
    host.start_jax(experiment)
    with open_run(experiment) as run, CorpusCheck(run.prepared.valid) as corpus_check:
        params = load_params(workdir, run.abstract_state.params)
        lines = [f"{name:16} {value:,.4f}" for name, value in run.validate(params).items()]
        first = batches_of(experiment, run.prepared, "valid")[0]
        lines += [f"  · {text}" for text in samples(run.model, params, first, run.prepared.tokenizer)]
        corpus_check.wait()
        if run.is_primary:
            print(visible("\n".join(lines)))
    return 0


if __name__ == "__main__":
    cli.run(main)
