"""Labels records with a fine-tuned model: `python -m pretrainax.predict --from=DIR --input=FILE --output=FILE`.

DIR is a run of a task (--config=finetune:…), RUN@best, RUN@2000, or an export, a Hugging Face directory or hf:org/name
of a model with a task head (BertForSequenceClassification, …). --input is a file or a folder of files: JSON lines, or
.tsv or .csv with a header, optionally compressed (.gz, .xz, .zst). It may also be - for standard input, or a data
source as in a config:

    --input="Csv(path='my.txt', delimiter=';')"  --input="Tsv(path='-', columns=('id', 'text'))"

A record needs the fields that the task reads, but no label. The output contains all records in the order of the input:
their fields, "prediction" and "probabilities" (of all labels). A prediction is a label (classification), a list of the
labels above 0.5 (multi-label), a number (regression), a tag for each word (token classification), a letter (multiple
choice) or an answer (question answering). --format=csv, or a file name that ends in .csv, writes a table with a column
for each field. The output file appears only when it is complete; an existing file is replaced only with --overwrite;
--output=- prints to standard output.

Records use the field names of the training data (for a Hugging Face directory, "text"). Flags set different names:
--config.objective.text_field=review --config.objective.pair_field=title. Texts longer than
--config.data.sequence_length are truncated, and the command prints their number; --config.objective.chunks="Chunks()"
reads long texts in windows instead. If a record cannot be read, the command fails and prints its file and line. With
--skip_bad, it skips unreadable records, and prints and counts them.
"""

import collections
import os
import sys
import time
from typing import TYPE_CHECKING, Optional

from absl import flags

from pretrainax import cli
from pretrainax.config import Experiment, UserError
from pretrainax.files.errors import counted
from pretrainax.files.paths import MODEL_NAMES, define_path

if TYPE_CHECKING:  # the methods import the rest, because JAX takes seconds, for which --help must not wait
    from pretrainax.inference.loaded import LoadedModel
    from pretrainax.inference.prediction_files import Input, InputRecord
    from pretrainax.tasks import Task

COUNT = ("objective", "data.sequence_length", "mesh", "train.dtype")  # fields that affect a prediction


def main() -> None:
    """Defines the flags and runs the command.

    The flags are not defined on import, because other commands define flags with the same names.
    """
    command_flags = {
        "from": define_path("from", None, MODEL_NAMES, takes_hub=True),
        "input": define_path(
            "input", None, "Records to label: a file, a folder, - for standard input, or a data source"
        ),
        "output": define_path("output", None, "File for the records with their predictions; - for standard output"),
        "format": flags.DEFINE_enum(
            "format", None, ["jsonl", "csv"], "Format of the output; default: csv for a file that ends in .csv"
        ),
        "overwrite": flags.DEFINE_bool("overwrite", False, "Replace --output if it exists"),
        "batch": flags.DEFINE_integer("batch", 32, "Number of rows that the model reads at a time", lower_bound=1),
        "skip_bad": flags.DEFINE_bool(
            "skip_bad", False, "Skip records that cannot be read, and print their file and line"
        ),
    }
    command = Prediction(command_flags)
    cli.run(command.run, config=command.config, run_flags=())


class Prediction:
    """Implements the command `pretrainax predict`."""

    def __init__(self, asked: dict[str, flags.FlagHolder]):
        self._flags = asked

    def __getitem__(self, flag: str):
        return self._flags[flag].value

    def config(self) -> Optional[Experiment]:
        """Finds the model that --from names, and returns its config, whose fields flags can override."""
        from pretrainax.inference.load import experiment_of
        from pretrainax.interop.origin import find_origin

        if not self["from"]:
            raise UserError(f"--from is missing: set it to {MODEL_NAMES}")
        self.origin = find_origin(self["from"])
        return experiment_of(self.origin)

    def run(self) -> int:
        """Predicts a label for each record in --input and writes the results to --output. Returns the exit code."""
        from pretrainax.inference.load import load_origin
        from pretrainax.inference.prediction_files import STANDARD, Input, check_output, output_format
        from pretrainax.inference.predictions import task_in, task_of
        from pretrainax.runtime import host
        from pretrainax.sharding.mesh import make_mesh

        experiment = cli.CONFIG.value
        cli.check_overrides(COUNT, "in a prediction")
        for flag in ("input", "output"):
            if not self[flag]:
                raise UserError(f"--{flag} is missing: set --input=records.jsonl and --output=answers.jsonl")
        if self["output"] != STANDARD and os.path.exists(self["output"]) and os.path.exists(self["input"]):
            if os.path.samefile(self["input"], self["output"]):
                raise UserError(f"--output={self['output']} is the file of --input: set another file")
        check_output(self["output"], self["overwrite"])
        format = output_format(self["output"], self["format"])
        task_in(experiment, self.origin.description)  # raises an error before the model is loaded, which is slow
        records = Input(self["input"], experiment, self["skip_bad"])
        host.enable_compilation_cache(experiment.data.cache_dir)
        host.start_devices()
        overridden = cli.overrides()
        dtype = experiment.train.dtype if "train.dtype" in overridden and experiment.train.dtype != "auto" else None
        mesh = make_mesh(experiment.mesh) if any(path.startswith("mesh") for path in overridden) else None
        loaded = load_origin(self.origin, dtype, mesh)
        self._write(loaded, task_of(loaded, experiment), records, format)
        return 0

    def _write(self, loaded: "LoadedModel", task: "Task", records: "Input", format: str) -> None:
        """Writes the records with their predictions to --output, and prints a summary line to stderr."""
        from tqdm import tqdm

        from pretrainax.inference.prediction_files import writing
        from pretrainax.inference.predictions import task_outputs

        pending: collections.deque[InputRecord] = collections.deque()

        def task_records():
            for input_record in records.records(task, loaded.tokenizer):
                pending.append(input_record)
                yield input_record.record

        start_time, num_records, num_truncated = time.monotonic(), 0, 0
        with writing(self["output"], format) as output:
            results = task_outputs(loaded, task, task_records(), self["batch"])
            for result in tqdm(
                results, desc="predicting", unit=" records", leave=False, disable=not sys.stderr.isatty()
            ):
                output.add(pending.popleft(), task.prediction(result.predictions, result.notes))
                num_records, num_truncated = num_records + 1, num_truncated + result.is_cut
            if not num_records:
                reason = f": {counted(records.bad, 'bad record')}" if records.bad else ""
                raise UserError(f"--input={self['input']} holds no record{reason}")
        summary = [f"wrote {counted(num_records, 'record')} of {self['input']} to {self['output']}"]
        summary += [f"left out {counted(records.bad, 'bad record')}"] if records.bad else []
        if num_truncated:
            length, (verb, loses_end) = (
                cli.CONFIG.value.data.sequence_length,
                ("record is", "loses its") if num_truncated == 1 else ("records are", "lose their"),
            )
            has_windows = getattr(task, "chunks", None) is not None
            row = f"{length:,} tokens (config.data.sequence_length)"
            limit = "all windows of config.objective.chunks" if has_windows else row
            summary.append(f"{num_truncated:,} {verb} longer than {limit} and {loses_end} end")
        print("; ".join([*summary, f"{num_records / (time.monotonic() - start_time):,.0f} records/s"]), file=sys.stderr)


if __name__ == "__main__":
    main()
