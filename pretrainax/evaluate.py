"""The validation figures of a run's newest checkpoint, and samples: `python -m pretrainax.evaluate --workdir=DIR`.

The config is the run's own, the tokenizer that of its tokenizer/ folder. Flags may set what is evaluated, and on what:
the text (`--config.data.source="TextFiles(path='my/folder')"`), how many batches of it (`--config.evaluate.batches=0`:
all), the objective, the mesh; a field that would change nothing here is refused. An imported model has no text of its
own and needs one.

Several processes are started by hand, as launch/README.md says under "Elsewhere"; they work on the mesh of the run.
"""

import os

from pretrainax import cli
from pretrainax.checkpoints.params import load_parts
from pretrainax.checkpoints.run_json import check_tokenizer
from pretrainax.checkpoints.steps import find_checkpoint
from pretrainax.config import Experiment, UserError
from pretrainax.data.corpus_check import CorpusCheck
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.visible import visible
from pretrainax.runtime import host
from pretrainax.tokenization.base import load_tokenizer
from pretrainax.training.metrics import MEANINGS
from pretrainax.training.samples import show_samples
from pretrainax.training.setup import open_run

# The fields of a config, or whole parts of it, that an evaluation follows from beside the checkpoint.
COUNT = (
    *(f"data.{name}" for name in "source sequence_length packing quality cache_dir prepare_workers".split()),
    *("data.drop_duplicates", "data.near_duplicates", "objective", "mesh", "evaluate.batches"),
    *(f"train.{name}" for name in "global_batch_size dtype attention scan_unroll loss_chunk".split()),
)


def main() -> int:
    workdir, experiment = cli.WORKDIR.value, _experiment()
    step_directory = find_checkpoint(workdir)
    tokenizer = experiment.tokenizer.path
    check_tokenizer(step_directory, load_tokenizer(tokenizer).fingerprint, tokenizer)
    host.start_jax(experiment)
    with open_run(experiment) as run, CorpusCheck(run.prepared.valid) as corpus_check:
        params = load_parts(step_directory, {"params": run.abstract_state.params})["params"]
        metrics = run.validate(params)
        say = (lambda line: print(visible(line))) if run.is_primary else lambda line: None
        batches, whole = run.validation_sizes
        rows = [
            ("step", os.path.basename(step_directory)),
            ("source", f"{experiment.data.source}, validation split"),
            ("batches", f"{batches:,} of {whole:,}, of {experiment.train.global_batch_size:,} rows"),
            *((name, f"{value:,.4f}", MEANINGS.get(name, "")) for name, value in metrics.items()),
        ]
        say(f"{text_table(rows[:3])}\n\n{text_table(rows[3:], '<><')}\n")
        show_samples(run, params, say)
        corpus_check.wait()
    return 0


def _experiment() -> Experiment:
    """Returns the config of the run, with its own tokenizer wherever its folder is now, and what flags set."""
    ignored = [path for path in cli.overrides() if not any(f"{path}.".startswith(f"{part}.") for part in COUNT)]
    if ignored:
        raise UserError(
            f"--config.{ignored[0]} changes nothing in an evaluation: leave it out. "
            f"These do: config.{', config.'.join(COUNT)}"
        )
    cli.CONFIG.value.tokenizer.path = os.path.join(os.path.abspath(cli.WORKDIR.value), "tokenizer")
    return cli.experiment()


if __name__ == "__main__":
    cli.run(main, of_workdir=True)
