"""Scores models on any text, on labeled records of the model's task, and on zero-shot and few-shot tasks."""

import dataclasses
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tqdm import tqdm

from pretrainax import cli
from pretrainax.config import DataConfig, UserError
from pretrainax.inference.load import load_origin
from pretrainax.inference.loaded import LoadedModel
from pretrainax.interop.origin import Origin, find_origin
from pretrainax.runtime import host
from pretrainax.runtime.cluster import is_multi_process
from pretrainax.scoring.corpus_scores import read_source, score_source
from pretrainax.scoring.record_scores import score_records
from pretrainax.scoring.results import SPLITS, Result
from pretrainax.scoring.scoring_examples import Scoring
from pretrainax.scoring.span_choice import SpanChoice
from pretrainax.scoring.spans import difference_results, documents_of_source, score_spans
from pretrainax.scoring.tasks.run import LoadedTask, run_tasks
from pretrainax.sharding.mesh import make_mesh

FlagValues = Mapping[str, object]  # the values of flags, by name


def score_texts(
    asked: FlagValues, origins: Sequence[Origin], tasks: Sequence[LoadedTask], of_task: bool
) -> Iterator[tuple[Origin, list[Result]]]:
    """Scores each model on everything that the flags select, and yields the model with its results.

    The flags select text, byte spans, labelled records of the model's task, or the tasks of --tasks.

    Args:
      asked: the values of the flags of `pretrainax.evaluate`, by flag name.
      origins: the models or checkpoints.
      tasks: the tasks of --tasks.
      of_task: whether the models have a task head.
    """
    if is_multi_process():
        raise UserError("--source and --tasks run in one process: start this command without other processes")
    host.enable_compilation_cache((DataConfig if cli.CONFIG.value is None else cli.CONFIG.value.data).cache_dir)
    host.start_devices()
    previous = None
    for origin in origins:
        loaded = _load(origin)
        if previous is not None:
            loaded.share_compiled(previous)
        yield origin, _model_results(loaded, asked, tasks, of_task)
        previous = dataclasses.replace(loaded, params=None).share_compiled(loaded)


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
    loaded: LoadedModel, flag_values: FlagValues, tasks: Sequence[LoadedTask], of_task: bool
) -> list[Result]:
    """Scores a model on everything that the flags select."""
    results = []
    if of_task:
        experiment = cli.CONFIG.value
        source = read_source(flag_values["source"], experiment)
        return score_records(loaded, experiment, source, flag_values["split"], flag_values["documents"], _show_progress)
    if flag_values["bytes-of-spans"]:
        results += _span_results(loaded, flag_values)
    elif flag_values["source"] is not None:
        source = read_source(flag_values["source"], loaded.experiment)
        scoring = Scoring(flag_values["context"], flag_values["stride"], flag_values["by-word"], flag_values["seed"])
        results += score_source(loaded, source, flag_values["split"], flag_values["documents"], scoring, _show_progress)
    for task_results in run_tasks(loaded, tasks, flag_values["examples"]):
        results += task_results
    return results


def _span_results(loaded: LoadedModel, flag_values: FlagValues) -> list[Result]:
    """Scores a model on spans. With --compare-with, also computes the differences from another model's scores."""
    choice = SpanChoice(
        flag_values["span-share"], flag_values["span-bytes"], flag_values["span-context"], flag_values["seed"] or 0
    )
    source, show_progress = (
        read_source(flag_values["source"], loaded.experiment),
        functools.partial(_show_progress, unit=" spans"),
    )
    documents = list(documents_of_source(source, flag_values["split"], flag_values["documents"]))
    name, scores = f"{source}, {SPLITS[flag_values['split']]}", score_spans(loaded, documents, choice, show_progress)
    results = [result for score in scores for result in score.results(name)]
    if flag_values["compare-with"]:
        other_model = _load(find_origin(flag_values["compare-with"]))
        results += difference_results(scores, score_spans(other_model, documents, choice, show_progress), name)
    return results


def _show_progress(items: Iterable, unit: str = " documents") -> Iterable:
    """Yields the items, and shows a progress bar on a terminal."""
    return tqdm(items, desc="scoring", unit=unit, leave=False, disable=not sys.stderr.isatty())
