"""Scores models on any text, on labeled records of the model's task, and on zero-shot and few-shot tasks."""

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Optional

from tqdm import tqdm

from pretrainax import cli
from pretrainax.config import DataConfig, UserError
from pretrainax.files.json_files import JsonObject
from pretrainax.inference.load import load_origin
from pretrainax.inference.loaded import LoadedModel
from pretrainax.interop.origin import Origin, find_origin
from pretrainax.reporting.visible import visible
from pretrainax.runtime import host
from pretrainax.runtime.cluster import is_multi_process
from pretrainax.scoring.comparisons import paired_differences
from pretrainax.scoring.corpus_scores import read_source, score_source
from pretrainax.scoring.record_scores import score_records
from pretrainax.scoring.results import SPLITS, Result
from pretrainax.scoring.scoring_examples import Scoring
from pretrainax.scoring.span_choice import SpanChoice
from pretrainax.scoring.spans import SpanScores, difference_results, documents_of_source, score_spans
from pretrainax.scoring.tasks.run import LoadedTask, run_tasks
from pretrainax.scoring.transcripts import Record
from pretrainax.sharding.mesh import make_mesh

FlagValues = Mapping[str, object]  # the values of flags, by name


def score_texts(
    asked: FlagValues, origins: Sequence[Origin], tasks: Sequence[LoadedTask], of_task: bool, record: Record
) -> Iterator[tuple[Origin, list[Result]]]:
    """Scores each model on everything that the flags select, and yields the model with its results.

    The flags select text, byte spans, labelled records of the model's task, or the tasks of --tasks.

    Args:
      asked: the values of the flags of `pretrainax.evaluate`, by flag name.
      origins: the models or checkpoints.
      tasks: the tasks of --tasks.
      of_task: whether the models have a task head.
      record: receives the transcripts, with the model of each.
    """
    if is_multi_process():
        raise UserError("--source and --tasks run in one process: start this command without other processes")
    host.enable_compilation_cache((DataConfig if cli.CONFIG.value is None else cli.CONFIG.value.data).cache_dir)
    host.start_devices()
    previous, reference = None, _Reference(asked, tasks, record)
    for origin in origins:
        loaded = _load(origin)
        if previous is not None:
            loaded.share_compiled(previous)
        results, transcripts = _scored(loaded, asked, tasks, of_task, reference)
        for transcript in transcripts:
            record({"model": origin.description, **transcript})  # spans name their model
        yield origin, results + reference.differences(transcripts, results)
        previous = dataclasses.replace(loaded, params=None).share_compiled(loaded)


class _Reference:
    """The model of --compare-with, which is scored once on texts, tasks and spans."""

    def __init__(self, asked: FlagValues, tasks: Sequence[LoadedTask], record: Record):
        self._span_model = asked["compare-with"]
        if asked["bytes-of-spans"]:
            asked = {**asked, "bytes-of-spans": False, "source": None}
        self._name = asked["compare-with"] if tasks or asked["source"] else None
        self._arguments, self._record, self._scored = (asked, tasks, False), record, None
        self._spans: Optional[list[SpanScores]] = None

    def span_scores(self, source: str, documents: Sequence[str], choice: SpanChoice) -> list[SpanScores]:
        """Returns the scores on the spans of a source, and records them once; [] without --compare-with."""
        if self._span_model is None:
            return []
        if self._spans is None:
            self._spans = score_spans(_load(find_origin(self._span_model)), documents, choice, _show_spans)
            _record_spans(self._record, self._spans, source)
        return self._spans

    def differences(self, transcripts: Sequence[JsonObject], results: Sequence[Result]) -> list[Result]:
        """Computes the paired differences of a model from this model."""
        if self._name is None:
            return []
        origin = find_origin(self._name)
        if self._scored is None:
            self._scored = _scored(_load(origin), *self._arguments, self)
            for transcript in self._scored[1]:
                self._record({"model": origin.description, **transcript})
        others = [result for result in results if not result.measure.startswith("span_")]
        return paired_differences(transcripts, self._scored[1], others, self._scored[0], origin.description)


def _scored(
    loaded: LoadedModel,
    asked: FlagValues,
    tasks: Sequence[LoadedTask],
    of_task: bool,
    reference: _Reference,
) -> tuple[list[Result], list[JsonObject]]:
    """Scores a model on everything that the flags select; returns the results and the transcripts."""
    transcripts: list[JsonObject] = []
    return _model_results(loaded, asked, tasks, of_task, transcripts.append, reference), transcripts


def _load(origin: Origin) -> LoadedModel:
    """Loads a model with the dtype and mesh that flags set.

    For ELECTRA, returns only the generator, because the discriminator does not predict tokens.
    """
    experiment, overridden = cli.CONFIG.value, cli.overrides()
    dtype = experiment.train.dtype if "train.dtype" in overridden and experiment.train.dtype != "auto" else None
    mesh = make_mesh(experiment.mesh) if any(path.startswith("mesh") for path in overridden) else None
    loaded = load_origin(origin, dtype, mesh)
    if loaded.generator is not None:
        return dataclasses.replace(loaded.generator, origin=f"{loaded.origin}, the generator")
    return loaded


def _model_results(
    loaded: LoadedModel,
    flag_values: FlagValues,
    tasks: Sequence[LoadedTask],
    of_task: bool,
    record: Record,
    reference: _Reference,
) -> list[Result]:
    """Scores a model on everything that the flags select."""
    results = []
    if of_task:
        experiment = cli.CONFIG.value
        source = read_source(flag_values["source"], experiment)
        split, documents = flag_values["split"], flag_values["documents"]
        return score_records(loaded, experiment, source, split, documents, _show_progress, record)
    if flag_values["bytes-of-spans"]:
        results += _span_results(loaded, flag_values, record, reference)
    elif flag_values["source"] is not None:
        source = read_source(flag_values["source"], loaded.experiment)
        scoring = Scoring(flag_values["context"], flag_values["stride"], flag_values["by-word"], flag_values["seed"])
        split, documents = flag_values["split"], flag_values["documents"]
        results += score_source(loaded, source, split, documents, scoring, _show_progress, record)
    for task_results in run_tasks(loaded, tasks, flag_values["examples"], record):
        results += task_results
    return results


def _span_results(loaded: LoadedModel, flag_values: FlagValues, record: Record, reference: _Reference) -> list[Result]:
    """Scores a model on spans. With --compare-with, also computes the differences from another model's scores."""
    choice = SpanChoice(
        flag_values["span-share"], flag_values["span-bytes"], flag_values["span-context"], flag_values["seed"] or 0
    )
    source = read_source(flag_values["source"], loaded.experiment)
    documents = list(documents_of_source(source, flag_values["split"], flag_values["documents"]))
    name, scores = f"{source}, {SPLITS[flag_values['split']]}", score_spans(loaded, documents, choice, _show_spans)
    _record_spans(record, scores, name)
    if others := reference.span_scores(name, documents, choice):
        for caveat in filter(None, dict.fromkeys(score.caveat for score in (*scores, *others))):
            print(visible(f"WARNING: {caveat}. Compare models whose tokenizers keep the text."), file=sys.stderr)
    return [result for score in scores for result in score.results(name)] + difference_results(scores, others, name)


def _record_spans(record: Record, scores: Sequence[SpanScores], source: str) -> None:
    for score in scores:
        for transcript in score.transcripts(source):
            record({"model": score.origin, **transcript})


def _show_spans(items: Iterable) -> Iterable:
    return _show_progress(items, " spans")


def _show_progress(items: Iterable, unit: str = " documents") -> Iterable:
    """Yields the items, and shows a progress bar on a terminal."""
    return tqdm(items, desc="scoring", unit=unit, leave=False, disable=not sys.stderr.isatty())
