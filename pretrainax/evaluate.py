"""Says how good a model is, on text: `python -m pretrainax.evaluate --from=DIR [--source="TextFiles(path='other')"]`.

DIR is a run (its newest checkpoint), DIR@2000, DIR@best, DIR@average (of all that are kept; DIR@average5: of the newest
5), an export, a Hugging Face directory or hf:org/name[@revision]; `--workdir=DIR` does as well. Of the parameters it
takes those that the run validates, as config.evaluate.parameters says; DIR@ema is their moving average, DIR@trained as
they were trained.

Without more, a run's own validation: the figures of what it asks there on its validation split, and samples. Flags may
set what is evaluated, and on what: the text (`--config.data.source=…`), how many batches of it
(`--config.evaluate.batches=0`: all), what is asked (`--config.evaluate.objective=…`; of a run without such an objective
`--config.objective.…` does too, as that is what it validates), the mesh. A field that would change nothing here is
refused.

`--source` scores any text with any model: perplexity, bits per token and per byte, each with its standard error over
documents. A decoder reads from left to right, through windows that overlap; an encoder is asked for each token from all
others (figures that begin with pseudo_), an encoder-decoder for the targets of its objective (target_).

Of a model with the head of a task, a Hugging Face directory too, `--source` gives the task's figures on the records
there: `--source="Tsv(path='dev.tsv')" --split=all`. Flags say how to read them: `--config.objective.text_field=review`;
`--config.objective.labels=bad,good`, names of labels in the order of the head's numbers;
`--config.objective.numbered=good,bad`, what the records mean by 0 and 1 where that is another order.

`--source=… --bytes-of-spans` asks for spans of the text instead, chosen by their bytes: the same ones of every model,
in bits per byte, by which encoders, encoder-decoders and decoders compare (docs/use.md says how). `--beside=OTHER`
gives the difference to another model on these spans.

`--tasks=grammar,blimp:my/folder,my_task.json` asks it tasks that it was not trained for; docs/use.md says which there
are, and how to write one. `--examples=N` asks for N of each.

The results are printed, and written as JSON to DIR/evaluations (of a model of the hub to evaluations/org--name), or to
--output=FILE. `--every-checkpoint` does it for all checkpoints that a run keeps, and draws them over the training.

Several processes are started by hand, as launch/README.md says under "Elsewhere"; they work on the mesh of the run, on
its own validation.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Optional

import jax
from absl import flags
from tqdm import tqdm

from pretrainax import cli
from pretrainax import config as config_lib
from pretrainax.checkpoints.params import EMA, TRAINED
from pretrainax.checkpoints.run_json import check_tokenizer
from pretrainax.checkpoints.steps import list_steps, step_of
from pretrainax.config import DataConfig, Experiment, UserError, trained_as
from pretrainax.config.paths import define_path, hub_name, is_url
from pretrainax.data.sources import NoSource
from pretrainax.inference.answers import task_in
from pretrainax.inference.load import experiment_of, load_origin
from pretrainax.inference.loaded import LoadedModel
from pretrainax.interop.origin import AS_TRAINED, NAMES, Origin, find_origin, parted
from pretrainax.interop.start import load_plain
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.visible import visible
from pretrainax.runtime import host
from pretrainax.runtime.cluster import is_one_of_many
from pretrainax.scoring import picture
from pretrainax.scoring.corpus_scores import SPLITS, read_source, score_source
from pretrainax.scoring.questions import Scoring
from pretrainax.scoring.record_scores import score_records
from pretrainax.scoring.results import Result, results_table, table_over_steps, write_results
from pretrainax.scoring.span_choice import SpanChoice
from pretrainax.scoring.spans import results_beside, score_spans, texts_of
from pretrainax.scoring.tasks.run import ready, run_tasks
from pretrainax.sharding.mesh import make_mesh
from pretrainax.storage.places import here, named, sent
from pretrainax.tasks import Task
from pretrainax.tokenization.base import load_tokenizer
from pretrainax.training.corpora import checked_texts
from pretrainax.training.metrics import meaning, parts_among
from pretrainax.training.restore import read_frozen
from pretrainax.training.samples import show_samples
from pretrainax.training.setup import Run, open_run

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
_GIVE_TEXT = "give a text, as --source=\"TextFiles(path='my/folder')\""


def main() -> None:
    """Defines the flags, and runs the command: here, as other commands have flags of the same names."""
    asked = {
        "from": define_path("from", None, NAMES, takes_hub=True),
        "source": flags.DEFINE_string("source", None, "Text to score, as TextFiles(path='other')"),
        "split": flags.DEFINE_enum("split", "valid", list(SPLITS), "--source: which part of it"),
        "documents": flags.DEFINE_integer("documents", None, "--source: at most so many, of each part", lower_bound=1),
        "context": flags.DEFINE_integer("context", None, "Tokens that the model reads at a time; else as in training"),
        "stride": flags.DEFINE_integer("stride", None, "Decoders: tokens between two windows; else half the context"),
        "by-word": flags.DEFINE_bool("by-word", False, "Encoders: the rest of a word is masked with each token of it"),
        "seed": flags.DEFINE_integer("seed", None, "Of the holes that models fill, and of the spans"),
        "bytes-of-spans": flags.DEFINE_bool("bytes-of-spans", False, "--source: spans of it, alike for every family"),
        "span-share": flags.DEFINE_float("span-share", SpanChoice.share, "How much of the text is in spans"),
        "span-bytes": flags.DEFINE_float("span-bytes", SpanChoice.mean_bytes, "Bytes of a span, on average"),
        "span-context": flags.DEFINE_integer("span-context", SpanChoice.context, "Bytes on each side that are read"),
        "beside": define_path("beside", None, "--bytes-of-spans: another model, to be compared with", takes_hub=True),
        "tasks": flags.DEFINE_list("tasks", None, "Tasks without training, as grammar,blimp:my/folder,my_task.json"),
        "examples": flags.DEFINE_integer("examples", None, "--tasks: at most so many of each, evenly spaced"),
        "every-checkpoint": flags.DEFINE_bool("every-checkpoint", False, "All that the run keeps, with a picture"),
        "output": define_path("output", None, "The JSON file of the results; else in DIR/evaluations"),
    }
    command = Evaluation(asked)
    cli.run(command.run, config=command.config)


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
        """Tells whether any text or task is scored, and not the run's own validation made again."""
        return self["source"] is not None or self["tasks"] is not None

    def run(self) -> int:
        self._check_flags()
        self._tasks = ready(self["tasks"] or ())  # before a model is loaded
        results = []
        for origin, of_origin in self._of_texts() if self.of_text else self._validations():
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

    # --- any text ---------------------------------------------------------------------------------------------------

    def _of_texts(self) -> Iterator[tuple[Origin, list[Result]]]:
        if is_one_of_many():
            raise UserError("--source and --tasks are for one process: start this command by itself")
        host.keep_compiled((DataConfig if cli.CONFIG.value is None else cli.CONFIG.value.data).cache_dir)
        host.start_devices()
        before = None
        for origin in self.origins:
            loaded = self._load(origin)
            if before is not None:
                loaded.compiled_as(before)
            yield origin, self._scores(loaded)
            before = dataclasses.replace(loaded, params=None).compiled_as(loaded)

    def _load(self, origin: Origin) -> LoadedModel:
        """Returns a model as flags want it: of ELECTRA the generator, which is the one that says tokens."""
        experiment, overridden = cli.CONFIG.value, cli.overrides()
        dtype = experiment.train.dtype if "train.dtype" in overridden and experiment.train.dtype != "auto" else None
        mesh = make_mesh(experiment.mesh) if any(path.startswith("mesh") for path in overridden) else None
        loaded = load_origin(origin, dtype, mesh)
        if loaded.generator is not None:
            return dataclasses.replace(loaded.generator, origin=f"{loaded.origin}, the generator")
        return loaded

    def _scores(self, loaded: LoadedModel) -> list[Result]:
        """Returns all that the flags ask of a model."""
        results = []
        if self.of_task:
            experiment = cli.CONFIG.value
            source = read_source(self["source"], experiment)
            return score_records(loaded, experiment, source, self["split"], self["documents"], _watched)
        if self["bytes-of-spans"]:
            results += self._of_spans(loaded)
        elif self["source"] is not None:
            source = read_source(self["source"], loaded.experiment)
            scoring = Scoring(self["context"], self["stride"], self["by-word"], self["seed"])
            results += score_source(loaded, source, self["split"], self["documents"], scoring, _watched)
        for of_task in run_tasks(loaded, self._tasks, self["examples"]):
            results += of_task
        return results

    def _of_spans(self, loaded: LoadedModel) -> list[Result]:
        """Returns what a model pays for spans, and by how much that is more than another one pays for the same."""
        choice = SpanChoice(self["span-share"], self["span-bytes"], self["span-context"], self["seed"] or 0)
        source, watch = read_source(self["source"], loaded.experiment), functools.partial(_watched, unit=" spans")
        texts = list(texts_of(source, self["split"], self["documents"]))
        name, scores = f"{source}, {SPLITS[self['split']]}", score_spans(loaded, texts, choice, watch)
        results = [result for of_form in scores for result in of_form.results(name)]
        if self["beside"]:
            other = self._load(find_origin(self["beside"]))
            results += results_beside(scores, score_spans(other, texts, choice, watch), name)
        return results

    # --- a run's own validation -------------------------------------------------------------------------------------

    def _validations(self) -> Iterator[tuple[Origin, list[Result]]]:
        """Yields the figures of each checkpoint; prints them, and samples, where there is one."""
        if not self.origins[0].steps:
            raise UserError(f"{self.directory} is a Hugging Face directory, without validation text: {_GIVE_TEXT}")
        if isinstance(cli.CONFIG.value.data.source, NoSource):
            raise UserError(f"{self.directory}: an imported model comes without text; {_GIVE_TEXT}")
        experiment = cli.experiment()
        experiment.distill = None  # what a student says is asked without its teacher
        ask_in_full(experiment, cli.overrides())
        tokenizer = experiment.tokenizer.path
        fingerprint = load_tokenizer(tokenizer).fingerprint
        for step in [step for origin in self.origins for step in origin.steps]:
            check_tokenizer(step, fingerprint, tokenizer)
        host.start_jax(experiment)
        with contextlib.ExitStack() as held:
            run = held.enter_context(open_run(experiment))
            note = functools.partial(_note, run)
            corpus_check = held.enter_context(checked_texts(experiment.data, run.prepared.valid, note))
            read_frozen(run, self.directory)
            for origin in self.origins:
                params = load_plain(origin.steps, run.abstract_state.params, origin.folder)
                steps = list(map(step_of, origin.steps))
                trained_as(experiment, steps)  # which refuses the average of what computes otherwise
                phase = run.at(max(steps) - 1)
                metrics = phase.validate(params)
                if len(self.origins) == 1:
                    _show(phase, origin, params, metrics)
                yield origin, _results(run, metrics)
            corpus_check.wait()

    # --- what is told -----------------------------------------------------------------------------------------------

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


def ask_in_full(experiment: Experiment, overridden: Collection[str]) -> None:
    """Asks a task of all records, also what takes too long in training, unless flags set how it is asked."""
    task = experiment.objective
    if isinstance(task, Task) and not any(path.partition(".")[0] == "objective" for path in overridden):
        experiment.objective = task.evaluated()


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


def _watched(things: Iterable, unit: str = " documents") -> Iterable:
    """Shows on a terminal how many documents were read."""
    return tqdm(things, desc="scoring", unit=unit, leave=False, disable=not sys.stderr.isatty())


def _show(run: Run, origin: Origin, params, metrics: dict[str, float]) -> None:
    """Prints the figures of one checkpoint, and samples; called in each process of the run, of which one prints."""
    say = (lambda line: print(visible(line))) if run.is_primary else lambda line: None
    batches, whole = run.validation_sizes
    rows = [
        ("step", " and ".join(os.path.basename(step) for step in origin.steps)),
        *([("parameters", _which_parameters(origin))] if run.experiment.train.ema_decay is not None else []),
        ("source", f"{run.experiment.data.source}, validation split"),
        ("batches", f"{batches:,} of {whole:,}, of {run.experiment.train.global_batch_size:,} rows"),
    ]
    named = [(name, f"{value:,.4f}", meaning(name, metrics)) for name, value in metrics.items()]
    say(f"{text_table(rows)}\n\n{text_table(named, '<><')}\n")
    show_samples(run, params, say)


def _note(run: Run, line: str) -> None:
    """Prints a line beside the results; called in each process of the run, of which one prints."""
    if run.is_primary:
        print(visible(line), file=sys.stderr)


def _which_parameters(origin: Origin) -> str:
    if origin.folder == EMA:
        return f"their moving average; as they were trained: --from={origin.directory}@{AS_TRAINED}"
    return f"as they were trained; their moving average: --from={origin.directory}@{EMA}"


def _results(run: Run, metrics: dict[str, float]) -> list[Result]:
    batches, whole = run.validation_sizes
    rows = batches * run.experiment.train.global_batch_size
    asked = {"labels": "labels"} if "labels" in metrics else {"tokens": "loss_tokens"}
    counts = {"batches": batches, "batches in all": whole, "rows": rows}
    counts |= {what: int(metrics[name]) for what, name in asked.items()}
    tokens = {part: {"tokens": int(metrics[f"loss_tokens/{part}"])} for part in parts_among(metrics)}
    source = f"{run.experiment.data.source}, validation split"
    objective = type(run.experiment.validation_objective).__name__
    how = f"{objective}, teacher-forced, as in the run's own validation"
    return [
        Result(source, measure, value, None, tokens.get(part, counts), how, part)
        for (measure, _, part), value in ((name.partition("/"), value) for name, value in metrics.items())
        if measure not in asked.values()
    ]


if __name__ == "__main__":
    main()
