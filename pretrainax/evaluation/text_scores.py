"""Scores models on any text, on labelled records of the model's task, and on tasks that need no training."""

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
from pretrainax.scoring.corpus_scores import SPLITS, read_source, score_source
from pretrainax.scoring.record_scores import score_records
from pretrainax.scoring.results import Result
from pretrainax.scoring.scoring_examples import Scoring
from pretrainax.scoring.span_choice import SpanChoice
from pretrainax.scoring.spans import difference_results, documents_of_source, score_spans
from pretrainax.scoring.tasks.run import LoadedTask, run_tasks
from pretrainax.sharding.mesh import make_mesh

FlagValues = Mapping[str, object]  # the values of flags, by name


def score_texts(
    asked: FlagValues, origins: Sequence[Origin], tasks: Sequence[LoadedTask], of_task: bool
) -> Iterator[tuple[Origin, list[Result]]]:
    """Yields each model with its results on text, spans, records of its task, or tasks that need no training.

    Args:
      asked: the values of the flags of `pretrainax.evaluate`.
      origins: the models or checkpoints.
      tasks: the tasks of --tasks.
      of_task: True if the models have a task head.
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
        yield origin, _scores(loaded, asked, tasks, of_task)
        previous = dataclasses.replace(loaded, params=None).share_compiled(loaded)


def _load(origin: Origin) -> LoadedModel:
    """Loads a model with the dtype and mesh of the flags; for ELECTRA, its generator, which predicts tokens."""
    experiment, overridden = cli.CONFIG.value, cli.overrides()
    dtype = experiment.train.dtype if "train.dtype" in overridden and experiment.train.dtype != "auto" else None
    mesh = make_mesh(experiment.mesh) if any(path.startswith("mesh") for path in overridden) else None
    loaded = load_origin(origin, dtype, mesh)
    if loaded.generator is not None:
        return dataclasses.replace(loaded.generator, origin=f"{loaded.origin}, the generator")
    return loaded


def _scores(loaded: LoadedModel, asked: FlagValues, tasks: Sequence[LoadedTask], of_task: bool) -> list[Result]:
    """Computes all results that the flags select for a model."""
    results = []
    if of_task:
        experiment = cli.CONFIG.value
        source = read_source(asked["source"], experiment)
        return score_records(loaded, experiment, source, asked["split"], asked["documents"], _watched)
    if asked["bytes-of-spans"]:
        results += _span_results(loaded, asked)
    elif asked["source"] is not None:
        source = read_source(asked["source"], loaded.experiment)
        scoring = Scoring(asked["context"], asked["stride"], asked["by-word"], asked["seed"])
        results += score_source(loaded, source, asked["split"], asked["documents"], scoring, _watched)
    for task_results in run_tasks(loaded, tasks, asked["examples"]):
        results += task_results
    return results


def _span_results(loaded: LoadedModel, asked: FlagValues) -> list[Result]:
    """Returns the scores of a model on spans, and their differences from the scores of the model of --beside."""
    choice = SpanChoice(asked["span-share"], asked["span-bytes"], asked["span-context"], asked["seed"] or 0)
    source, watch = read_source(asked["source"], loaded.experiment), functools.partial(_watched, unit=" spans")
    texts = list(documents_of_source(source, asked["split"], asked["documents"]))
    name, scores = f"{source}, {SPLITS[asked['split']]}", score_spans(loaded, texts, choice, watch)
    results = [result for score in scores for result in score.results(name)]
    if asked["beside"]:
        other = _load(find_origin(asked["beside"]))
        results += difference_results(scores, score_spans(other, texts, choice, watch), name)
    return results


def _watched(items: Iterable, unit: str = " documents") -> Iterable:
    """Yields the items, and shows their number on a terminal."""
    return tqdm(items, desc="scoring", unit=unit, leave=False, disable=not sys.stderr.isatty())
