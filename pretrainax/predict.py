"""Says what a fine-tuned model makes of records: `python -m pretrainax.predict --from=DIR --input=FILE --output=FILE`.

DIR is a run of a task (--config=finetune:…), RUN@best, RUN@2000, or an export, a Hugging Face directory or hf:org/name
of a model with such a head (BertForSequenceClassification, …). --input has a record a line, with the fields that the
task reads, and needs no label: JSON lines, .tsv or .csv with a line of names (.gz, .xz, .zst too), a folder of them,
- for those of the standard input, or a source as in a config:

    --input="Csv(path='my.txt', delimiter=';')"  --input="Tsv(path='-', columns=('id', 'text'))"

Each record comes back in its place, with its own fields and beside them "prediction", the label, and "probabilities"
of all labels; of a regression the number; of several labels a list of those above 0.5; of words a tag each; of a choice
its letter; of a question its answer. --format=csv gives a table, with a column for each. The output is there when it
is whole; --output=- prints it.

Fields have the names that the run was trained with (of a Hugging Face directory "text"); another one is set by
--config.objective.text_field=review --config.objective.pair_field=title. Texts that are longer than a row lose their
end, and are counted: --config.data.sequence_length is the longest row, --config.objective.chunks="Chunks()" reads them
whole, in windows. A record that cannot be read ends the command with its file and line; --skip_bad leaves it out, and
names and counts it.
"""

import collections
import os
import sys
import time
from typing import Optional

from absl import flags
from tqdm import tqdm

from pretrainax import cli
from pretrainax.config import Experiment, UserError
from pretrainax.files.paths import define_path
from pretrainax.inference.answers import answer, task_in, task_of
from pretrainax.inference.load import experiment_of, load_origin
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.prediction_files import STANDARD, Asked, Input, writing
from pretrainax.interop.origin import NAMES, find_origin
from pretrainax.runtime import host
from pretrainax.sharding.mesh import make_mesh
from pretrainax.tasks import Task

COUNT = ("objective", "data.sequence_length", "mesh", "train.dtype")  # fields that a prediction follows from


def main() -> None:
    """Defines the flags, and runs the command: here, as other commands have flags of the same names."""
    asked = {
        "from": define_path("from", None, NAMES, takes_hub=True),
        "input": define_path("input", None, "Records: a file, a folder, - for standard input, or a source"),
        "output": define_path("output", None, "The file of what is said of them; -: the standard output"),
        "format": flags.DEFINE_enum("format", "jsonl", ["jsonl", "csv"], "Of the output"),
        "batch": flags.DEFINE_integer("batch", 32, "Rows that the model reads at a time", lower_bound=1),
        "skip_bad": flags.DEFINE_bool("skip_bad", False, "Leaves out records that cannot be read, and names them"),
    }
    command = Prediction(asked)
    cli.run(command.run, config=command.config)


class Prediction:
    """Does what the flags ask for."""

    def __init__(self, asked: dict[str, flags.FlagHolder]):
        self._asked = asked

    def __getitem__(self, flag: str):
        return self._asked[flag].value

    def config(self) -> Optional[Experiment]:
        """Finds the model; returns its config."""
        if flags.FLAGS["workdir"].present:
            raise UserError("--workdir is not for this command: give the run, or the directory, as --from=DIR")
        if not self["from"]:
            raise UserError(f"--from is missing: {NAMES}")
        self.origin = find_origin(self["from"])
        return experiment_of(self.origin)

    def run(self) -> int:
        experiment = cli.CONFIG.value
        cli.check_overrides(COUNT, "in a prediction")
        for flag in ("input", "output"):
            if not self[flag]:
                raise UserError(f"--{flag} is missing: give --input=records.jsonl and --output=answers.jsonl")
        if self["output"] != STANDARD and os.path.exists(self["output"]) and os.path.exists(self["input"]):
            if os.path.samefile(self["input"], self["output"]):
                raise UserError(f"--output={self['output']} is --input: take another file")
        task_in(experiment, self.origin.description)  # before a model is loaded
        records = Input(self["input"], experiment, self["skip_bad"])
        host.keep_compiled(experiment.data.cache_dir)
        host.start_devices()
        overridden = cli.overrides()
        dtype = experiment.train.dtype if "train.dtype" in overridden and experiment.train.dtype != "auto" else None
        mesh = make_mesh(experiment.mesh) if any(path.startswith("mesh") for path in overridden) else None
        loaded = load_origin(self.origin, dtype, mesh)
        self._write(loaded, task_of(loaded, experiment), records)
        return 0

    def _write(self, loaded: LoadedModel, task: Task, records: Input) -> None:
        waiting: collections.deque[Asked] = collections.deque()

        def asked():
            for each in records.records(task):
                waiting.append(each)
                yield each.record

        started, count, cut = time.monotonic(), 0, 0
        with writing(self["output"], self["format"]) as output:
            answers = answer(loaded, task, asked(), self["batch"])
            for answered in tqdm(
                answers, desc="predicting", unit=" records", leave=False, disable=not sys.stderr.isatty()
            ):
                output.add(waiting.popleft(), task.prediction(answered.answers, answered.notes))
                count, cut = count + 1, cut + answered.is_cut
            if not count:
                bad = f": all {records.bad:,} are bad" if records.bad else ""
                raise UserError(f"--input={self['input']} holds no record{bad}")
        said = [f"{count:,} records of {self['input']} in {self['output']}"]
        said += [f"{records.bad:,} bad left out"] if records.bad else []
        if cut:
            length, (are, lose) = (
                cli.CONFIG.value.data.sequence_length,
                ("is", "loses") if cut == 1 else ("are", "lose"),
            )
            rows = f"rows of {length:,} tokens, config.data.sequence_length"
            said.append(f"{cut:,} {are} longer than is read ({rows}) and {lose} the end")
        print("; ".join([*said, f"{count / (time.monotonic() - started):,.0f} records/s"]), file=sys.stderr)


if __name__ == "__main__":
    main()
