"""Implements the command `pretrainax.evaluate`: checks its flags, evaluates checkpoints and writes the results."""

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Optional

import jax
from absl import flags

from pretrainax import cli
from pretrainax import config as config_lib
from pretrainax.checkpoints.params import EMA, TRAINED
from pretrainax.checkpoints.steps import list_steps
from pretrainax.config import Experiment, UserError
from pretrainax.evaluation.own_validation import validations
from pretrainax.evaluation.text_scores import score_texts
from pretrainax.files.json_files import JsonObject
from pretrainax.files.outputs import output_file
from pretrainax.files.paths import MODEL_NAMES, hub_name, is_url
from pretrainax.inference.load import experiment_of
from pretrainax.inference.predictions import task_in
from pretrainax.interop.origin import AS_TRAINED, Origin, find_origin, split_selector
from pretrainax.reporting.visible import visible
from pretrainax.scoring import plot
from pretrainax.scoring.results import Result, results_table, table_over_steps, with_verdicts, write_results
from pretrainax.scoring.tasks.run import load_tasks
from pretrainax.scoring.transcripts import write_transcripts
from pretrainax.storage.places import local_path, uploaded_output, with_urls
from pretrainax.tasks import Task

# Config fields and config sections that affect the run's own validation of a checkpoint.
VALIDATION_FIELDS = (
    *(f"data.{name}" for name in "source sequence_length packing quality cache_dir keep_bytes prepare_workers".split()),
    *("data.drop_duplicates", "data.near_duplicates", "objective", "mesh", "evaluate.batches", "evaluate.objective"),
    *(f"train.{name}" for name in "global_batch_size dtype attention scan_unroll loss_chunk".split()),
)
TEXT_SCORE_FIELDS = ("mesh", "train.dtype")  # config fields that affect scores on the text of --source
# Config fields that affect the metrics of a task on the records of --source.
RECORD_SCORE_FIELDS = (
    *TEXT_SCORE_FIELDS,
    "objective",
    "data.sequence_length",
)


class Evaluation:
    """One invocation of the command: its flags, and the checkpoints to evaluate."""

    def __init__(self, asked: dict[str, flags.FlagHolder]):
        self._flags = asked
        self.directory, self.origins, self.has_task_head = "", [], False
        self.transcripts: list[JsonObject] = []
        self.kept = ""  # path or URL of the model's folder, which receives the results

    def __getitem__(self, flag: str):
        return self._flags[flag].value

    def config(self) -> Optional[Experiment]:
        """Finds the checkpoints to evaluate, and returns their config.

        Returns:
          The config, or None for a Hugging Face directory whose model has no task head.

        Raises:
          UserError: the flags contradict each other, or a model does not exist.
        """
        if self["from"] and cli.WORKDIR.value:
            raise UserError("--from and --workdir mean the same here: leave one of them out")
        name = self["from"] or cli.WORKDIR.value
        if not name:
            raise UserError(f"--from is missing: set it to {MODEL_NAMES}")
        path = local_path(name) if is_url(name) else name
        self.directory, selector = split_selector(path)
        self.kept = name.rstrip("/").removesuffix(f"@{selector}") if is_url(name) else self.directory
        if self["every-checkpoint"]:
            if selector not in ("", EMA, AS_TRAINED):
                raise UserError(
                    f"--every-checkpoint needs a whole run: set --from={self.directory}, without @{selector}"
                )
            self.origins = _saved_origins(self.directory, selector)
        else:
            self.origins = [find_origin(path)]
        experiment = experiment_of(self.origins[0])
        self.has_task_head = isinstance(experiment.objective, Task) and experiment.objective.has_head
        return experiment if self.origins[0].steps or self.has_task_head else None

    @property
    def scores_text(self) -> bool:
        """Returns True if --source or --tasks is set; otherwise the command repeats the run's own validation."""
        return self["source"] is not None or self["tasks"] is not None

    def run(self) -> int:
        self._check_flags()
        for flag, path in (("output", self._output()), ("transcripts", self["transcripts"])):
            if path:
                output_file(flag, path)
        results = []
        for origin, origin_results in self._results():
            step = int(os.path.basename(origin.steps[0])) if len(origin.steps) == 1 else None
            results += [dataclasses.replace(r, origin=origin.description, step=step) for r in origin_results]
        if jax.process_index() == 0:
            self._report(results)
        return 0

    def _check_flags(self) -> None:
        """Raises UserError for flags that have no effect on the selected evaluation."""
        experiment, validation_fields = cli.CONFIG.value, VALIDATION_FIELDS
        if experiment is not None and experiment.evaluate.objective is not None:
            # config.evaluate.objective replaces config.objective.
            validation_fields = tuple(path for path in VALIDATION_FIELDS if path != "objective")
        allowed_fields, condition = validation_fields, "in a validation"
        if self.scores_text:
            allowed_fields = RECORD_SCORE_FIELDS if self.has_task_head else TEXT_SCORE_FIELDS
            condition = "with --source and --tasks"
        cli.check_overrides(allowed_fields, condition)
        span_flags, token_flags = (
            ("span-share", "span-bytes", "span-context"),
            ("context", "stride", "by-word"),
        )
        for name in token_flags if self["bytes-of-spans"] else span_flags:
            if self._flags[name].present:
                changes = "changes nothing with" if self["bytes-of-spans"] else "changes nothing without"
                raise UserError(f"--{name} {changes} --bytes-of-spans: leave it out")
        if self.has_task_head:
            text_flags = ("seed", "bytes-of-spans", "tasks", *token_flags, *span_flags)
            if text_flags := [name for name in text_flags if self._flags[name].present]:
                raise UserError(
                    f"--{text_flags[0]} is for language models, and {self.directory} has the head of a task: leave it "
                    "out"
                )
            if self.scores_text:
                if self["compare-with"]:
                    raise UserError(
                        "--compare-with compares task heads on the validation records of two runs: leave --source out"
                    )
                task_in(cli.CONFIG.value, self.directory)
        source_flags = ("split", "documents", "seed", "bytes-of-spans", *token_flags, *span_flags)
        set_flags = [name for name in source_flags if self._flags[name].present]
        if set_flags and not self.scores_text:
            raise UserError(
                f"--{set_flags[0]} is for --source. Without it, the command repeats the run's own validation, with the "
                f"fields config.{', config.'.join(validation_fields)}"
            )
        for name in ("transcripts", "compare-with"):
            if self[name] and not self.scores_text and not (self.has_task_head and name == "compare-with"):
                raise UserError(f"--{name} is for --source and --tasks: set one of them too, or leave it out")
        for flag, names in (("source", set_flags), ("tasks", ["examples"] if self["examples"] is not None else [])):
            if names and self[flag] is None:
                raise UserError(f"--{names[0]} is for --{flag}: set --{flag} too, or leave it out")

    def _results(self) -> Iterator[tuple[Origin, list[Result]]]:
        """Evaluates the checkpoints; yields each checkpoint with its results."""
        if not self.scores_text:
            return validations(self.directory, self.origins, self["compare-with"])
        tasks = load_tasks(self["tasks"] or ())  # before the slow loading of the model
        values = {name: flag.value for name, flag in self._flags.items()}
        return score_texts(values, self.origins, tasks, self.has_task_head, self.transcripts.append)

    def _report(self, results: Sequence[Result]) -> None:
        results = with_verdicts(results)
        if self["every-checkpoint"]:
            parameters = ", moving average of the parameters" if self.origins[0].folder != TRAINED else ""
            print(visible(f"run  {with_urls(self.directory)}{parameters}\n\n{table_over_steps(results)}\n"))
        elif self.scores_text:
            print(visible(f"model  {results[0].origin}\n\n{results_table(results)}\n"))
        elif differences := [r for r in results if r.measure.endswith("_difference")]:
            print(visible(f"{results_table(differences)}\n"))
        with uploaded_output(self._output()) as path:
            print(visible(with_urls(write_results(path, results))))
            if self["every-checkpoint"]:
                plot_path = f"{os.path.splitext(path)[0]}.png"
                plot.draw(plot_path, results, os.path.basename(os.path.abspath(self.directory)))
                print(visible(f"wrote {with_urls(plot_path)}"))
        if self["transcripts"]:
            with uploaded_output(self["transcripts"]) as path:
                print(visible(with_urls(write_transcripts(path, self.transcripts))))

    def _output(self) -> str:
        return self["output"] or os.path.join(self._folder(), f"{self._file_stem()}.json")

    def _folder(self) -> str:
        """Returns the path of the folder for results.

        This folder is in the model's folder or, for a model on the Hub, in the current folder.
        """
        if name := hub_name(self.directory):
            return os.path.join("evaluations", name.repository.replace("/", "--"))
        return os.path.join(self.kept, "evaluations")

    def _file_stem(self) -> str:
        """Builds the file name for the results, without extension, from the checkpoints and a digest of the flags."""
        flag_values = {
            name: flag.value for name, flag in self._flags.items() if name not in ("from", "output", "transcripts")
        }
        flag_values["config"] = {
            path: str(config_lib.validation.get(cli.CONFIG.value, path)) for path in cli.overrides()
        }
        digest = hashlib.blake2b(json.dumps(flag_values, sort_keys=True).encode(), digest_size=4).hexdigest()
        steps = self.origins[0].steps
        label = "every" if self["every-checkpoint"] else f"average_{len(steps)}" if len(steps) > 1 else "model"
        if label == "model" and steps:
            label = f"step_{os.path.basename(steps[0])}"
        if self.origins[0].folder != TRAINED:
            label = f"{self.origins[0].folder}_{label}"
        return f"{'text' if self.scores_text else 'validation'}-{label}-{digest}"


def _saved_origins(directory: str, parameters: str) -> list[Origin]:
    """Finds all saved checkpoints of a run, ordered by step; prints a line for each invalid checkpoint and skips it.

    Args:
      directory: folder of the run.
      parameters: which parameters to load: EMA (their moving average), AS_TRAINED, or "" for those that the run
        validates.

    Raises:
      UserError: `directory` is a Hugging Face directory, or no checkpoint has these parameters.
    """
    newest = find_origin(directory)
    if not newest.steps:
        raise UserError(f"--every-checkpoint needs a run, and {directory} is a Hugging Face directory: leave it out")
    origins, problems = [], []
    for step in list_steps(os.path.join(directory, "checkpoints")):
        try:
            origins.append(find_origin(f"{directory}@{parameters}{step}"))
        except UserError as e:
            problems.append(e)
    if not origins:
        raise problems[-1]
    for problem in problems:
        print(f"left out: {cli.describe_error(problem)}", file=sys.stderr)
    return origins
