"""The command `pretrainax.evaluate`: what its flags ask for, of which checkpoints, and where the results go."""

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
from pretrainax.evaluation.scored_texts import score_texts
from pretrainax.files.paths import hub_name, is_url
from pretrainax.inference.answers import task_in
from pretrainax.inference.load import experiment_of
from pretrainax.interop.origin import AS_TRAINED, NAMES, Origin, find_origin, parted
from pretrainax.reporting.visible import visible
from pretrainax.scoring import picture
from pretrainax.scoring.results import Result, results_table, table_over_steps, write_results
from pretrainax.scoring.tasks.run import ready
from pretrainax.storage.places import here, named, sent
from pretrainax.tasks import Task

# The fields of a config, or whole parts of it, that a run's own validation follows from beside the checkpoint.
COUNT = (
    *(f"data.{name}" for name in "source sequence_length packing quality cache_dir keep_bytes prepare_workers".split()),
    *("data.drop_duplicates", "data.near_duplicates", "objective", "mesh", "evaluate.batches", "evaluate.objective"),
    *(f"train.{name}" for name in "global_batch_size dtype attention scan_unroll loss_chunk".split()),
)
COUNT_BESIDE_TEXT = ("mesh", "train.dtype")  # and those that a score of other text follows from
COUNT_BESIDE_RECORDS = (
    *COUNT_BESIDE_TEXT,
    "objective",
    "data.sequence_length",
)  # and of other records, a task's figures


class Evaluation:
    """Holds what the flags ask for, and of which checkpoints."""

    def __init__(self, asked: dict[str, flags.FlagHolder]):
        self._asked = asked
        self.directory, self.origins, self.of_task = "", [], False
        self.kept = ""  # where results lie: as the directory, of an object store its URL

    def __getitem__(self, flag: str):
        return self._asked[flag].value

    def config(self) -> Optional[Experiment]:
        """Finds the checkpoints; returns the config of their run, None for a Hugging Face directory."""
        if self["from"] and cli.WORKDIR.value:
            raise UserError("--from and --workdir say the same here: leave one of them out")
        name = self["from"] or cli.WORKDIR.value
        if not name:
            raise UserError(f"--from is missing: {NAMES}")
        found = here(name) if is_url(name) else name
        self.directory, which = parted(found)
        self.kept = name.rstrip("/").removesuffix(f"@{which}") if is_url(name) else self.directory
        if self["every-checkpoint"]:
            if which not in ("", EMA, AS_TRAINED):
                raise UserError(f"--every-checkpoint is of a run: give --from={self.directory}, without @{which}")
            self.origins = _every_origin(self.directory, which)
        else:
            self.origins = [find_origin(found)]
        experiment = experiment_of(self.origins[0])
        self.of_task = isinstance(experiment.objective, Task) and experiment.objective.has_head
        return experiment if self.origins[0].steps or self.of_task else None

    @property
    def of_text(self) -> bool:
        """Returns True if any text or task is scored, and not the run's own validation made again."""
        return self["source"] is not None or self["tasks"] is not None

    def run(self) -> int:
        self._check_flags()
        results = []
        for origin, of_origin in self._results():
            step = int(os.path.basename(origin.steps[0])) if len(origin.steps) == 1 else None
            results += [dataclasses.replace(r, origin=origin.description, step=step) for r in of_origin]
        if jax.process_index() == 0:
            self._tell(results)
        return 0

    def _check_flags(self) -> None:
        """Raises UserError for what would change nothing."""
        experiment, in_validation = cli.CONFIG.value, COUNT
        if experiment is not None and experiment.evaluate.objective is not None:
            in_validation = tuple(path for path in COUNT if path != "objective")  # another one is asked here
        count, what = in_validation, "in a validation"
        if self.of_text:
            count = COUNT_BESIDE_RECORDS if self.of_task else COUNT_BESIDE_TEXT
            what = "beside --source and --tasks"
        cli.check_overrides(count, what)
        of_spans, of_tokens = ("span-share", "span-bytes", "span-context", "beside"), ("context", "stride", "by-word")
        for name in of_tokens if self["bytes-of-spans"] else of_spans:
            if self._asked[name].present:
                changes = "changes nothing beside" if self["bytes-of-spans"] else "changes nothing without"
                raise UserError(f"--{name} {changes} --bytes-of-spans: leave it out")
        if self.of_task:
            of_texts = ("seed", "bytes-of-spans", "tasks", *of_tokens, *of_spans)
            if of_texts := [name for name in of_texts if self._asked[name].present]:
                raise UserError(
                    f"--{of_texts[0]} is of texts, and {self.directory} has the head of a task: leave it out"
                )
            if self.of_text:
                task_in(cli.CONFIG.value, self.directory)
        of_source = ("split", "documents", "seed", "bytes-of-spans", *of_tokens, *of_spans)
        given = [name for name in of_source if self._asked[name].present]
        if given and not self.of_text:
            raise UserError(
                f"--{given[0]} is for --source, and without that a run's own validation is made: its fields are "
                f"config.{', config.'.join(in_validation)}"
            )
        for flag, names in (("source", given), ("tasks", ["examples"] if self["examples"] is not None else [])):
            if names and self[flag] is None:
                raise UserError(f"--{names[0]} is for --{flag}: give that too, or leave it out")

    def _results(self) -> Iterator[tuple[Origin, list[Result]]]:
        """Yields the results of each checkpoint."""
        if not self.of_text:
            return validations(self.directory, self.origins)
        tasks = ready(self["tasks"] or ())  # before a model is loaded
        asked = {name: flag.value for name, flag in self._asked.items()}
        return score_texts(asked, self.origins, tasks, self.of_task)

    def _tell(self, results: Sequence[Result]) -> None:
        if self["every-checkpoint"]:
            average = ", moving average of the parameters" if self.origins[0].folder != TRAINED else ""
            print(visible(f"run  {named(self.directory)}{average}\n\n{table_over_steps(results)}\n"))
        elif self.of_text:
            print(visible(f"model  {results[0].origin}\n\n{results_table(results)}\n"))
        with sent(self["output"] or os.path.join(self._folder(), f"{self._name()}.json")) as path:
            print(visible(named(write_results(path, results))))
            if self["every-checkpoint"]:
                drawn = f"{os.path.splitext(path)[0]}.png"
                picture.draw(drawn, results, os.path.basename(os.path.abspath(self.directory)))
                print(visible(f"drawn in {named(drawn)}"))

    def _folder(self) -> str:
        """Returns where results are kept: with the model, and of one of the hub in a folder of its name."""
        if name := hub_name(self.directory):
            return os.path.join("evaluations", name.repository.replace("/", "--"))
        return os.path.join(self.kept, "evaluations")

    def _name(self) -> str:
        """Returns a file name for the results: another one for other flags, the same for the same."""
        given = {name: flag.value for name, flag in self._asked.items() if name not in ("from", "output")}
        given["config"] = {path: str(config_lib.validation.get(cli.CONFIG.value, path)) for path in cli.overrides()}
        digest = hashlib.blake2b(json.dumps(given, sort_keys=True).encode(), digest_size=4).hexdigest()
        steps = self.origins[0].steps
        which = "every" if self["every-checkpoint"] else f"average_{len(steps)}" if len(steps) > 1 else "model"
        if which == "model" and steps:
            which = f"step_{os.path.basename(steps[0])}"
        if self.origins[0].folder != TRAINED:
            which = f"{self.origins[0].folder}_{which}"
        return f"{'text' if self.of_text else 'validation'}-{which}-{digest}"


def _every_origin(directory: str, which: str) -> list[Origin]:
    """Returns the checkpoints that a run keeps, in their order; names those that cannot be used.

    which: of their parameters, as `find_origin` takes it.
    """
    newest = find_origin(directory)
    if not newest.steps:
        raise UserError(f"--every-checkpoint is of a run, and {directory} is a Hugging Face directory: leave it out")
    origins = []
    for step in list_steps(os.path.join(directory, "checkpoints")):
        try:
            origins.append(find_origin(f"{directory}@{which}{step}"))
        except UserError as e:
            print(f"left out: {cli.one_line(e)}", file=sys.stderr)
    return origins
