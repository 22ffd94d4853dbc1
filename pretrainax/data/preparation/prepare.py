"""Prepares the tokenizer and the corpora of a config in the cache, for training and for the command `prepare`."""

import collections
import dataclasses
import functools
import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Optional

import numpy as np
from tqdm import tqdm

from pretrainax.config import Experiment, UserError, phase_in_errors, phases_of, resolve_auto, to_json
from pretrainax.data.corpus import Corpus
from pretrainax.data.epochs import resolve_steps
from pretrainax.data.files import digest
from pretrainax.data.preparation import duplicates, shards
from pretrainax.data.preparation.cache import FORMAT, open_cache
from pretrainax.data.preparation.filters import NearDuplicates, QualityFilter
from pretrainax.data.preparation.held_out import SPLITS, hold_out
from pretrainax.data.preparation.tokenizer import make_tokenizer
from pretrainax.data.preparation.workers import Workers, locked, until_stopped
from pretrainax.data.sources import Source
from pretrainax.data.sources.base import Note, Shard
from pretrainax.files.errors import counted
from pretrainax.reporting.streams import print_progress
from pretrainax.storage.places import with_urls
from pretrainax.tokenization.base import Tokenizer, load_tokenizer
from pretrainax.tokenization.choices import check_tokenizer

_MAX_NOTES = 20_000  # maximum number of records whose labels are counted
# Calls a function once per task, with the task as arguments, possibly on other machines. Yields the results.
TaskRunner = Callable[[Callable, list[tuple]], Iterator]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The tokenizer and the corpora of a run."""

    tokenizer: Tokenizer
    train: tuple[Corpus, ...]  # the training corpora, one per component of the source
    valid: tuple[Corpus, ...]  # the validation corpora, one per component of the source
    summary: str  # one line with the sizes of the corpora and the time of the preparation
    phases: tuple[tuple[Corpus, ...], ...] = ()  # the training corpora of each phase; (): the run has no phases

    @property
    def corpora(self) -> tuple[Corpus, ...]:
        """All distinct corpora of the run: `train`, `valid`, and the additional corpora of the phases."""
        main = (*self.train, *self.valid)
        main_directories = {corpus.directory for corpus in main}
        phase_corpora = {c.directory: c for phase in self.phases for c in phase if c.directory not in main_directories}
        return (*main, *phase_corpora.values())

    @property
    def training_notes(self) -> Iterator[Note]:
        """The metadata of at most 20,000 training records, evenly spaced; empty if the run has no records."""
        corpus = self.train[0]
        if corpus.parts == "records":
            yield from map(corpus.note, range(0, corpus.num_documents, -(-corpus.num_documents // _MAX_NOTES)))

    @property
    def valid_first(self) -> tuple[Corpus, ...]:
        """All distinct corpora of the run, validation corpora first, as every validation reads all of their rows."""
        return (*self.valid, *(corpus for corpus in self.corpora if corpus not in self.valid))


class Recipe(NamedTuple):
    """Everything that determines the corpora that data preparation produces from a source."""

    source: Source
    fingerprint: str  # fingerprint of the source
    tokenizer: str  # directory of the tokenizer
    parts: Optional[str]  # "sentences": with sentence ends | "pairs" | "records" of a task | None: plain documents
    task: Optional[shards.Encoder]  # converts records to tokenized documents; None: the source has no records
    quality: Optional[QualityFilter]
    drop_duplicates: bool
    near_duplicates: Optional[NearDuplicates]
    vocabulary_size: int
    key: str  # digest of the source's fingerprint and all other inputs
    cache: str  # directory of the cache

    @property
    def drops(self) -> bool:
        """True if duplicates or near-duplicates are dropped, in a separate step after all shards are tokenized."""
        return self.drop_duplicates or self.near_duplicates is not None

    def directory(self, split: str) -> str:
        """Returns the folder of a split's finished corpus."""
        return os.path.join(self.cache, "corpora", self.key, split)

    def tokenized(self, split: str) -> str:
        """Returns the folder of a split's tokenized shards; with `drops`, these shards still have their duplicates."""
        return os.path.join(self.directory(split), "whole") if self.drops else self.directory(split)


def prepare(
    experiment: Experiment,
    report: Callable[[str], None] = print_progress,
    elsewhere: Optional[TaskRunner] = None,
    saved_tokenizer: Optional[str] = None,
) -> Prepared:
    """Loads a config's tokenizer and corpora from the cache, after preparing those that are missing.

    Replaces the "auto" sizes in `experiment.model` with numbers, and the steps that follow from epochs. Sets the metric
    that selects checkpoints if the labels of a task are too uneven for its default.

    Args:
      experiment: the config; modified as described above.
      report: prints a message for the user.
      elsewhere: runs the tokenization tasks, for example on other machines. If None, this machine's worker processes
        run them.
      saved_tokenizer: tokenizer directory of an existing run, as in `make_tokenizer`.

    Raises:
      UserError: data preparation failed.
    """
    started = time.perf_counter()
    with open_cache(experiment.data) as (cache, workers):
        recipes, phase_recipes, tokenizer = _build_recipes(experiment, cache, workers, report, saved_tokenizer)
        task_runner, corpora_by_key = elsewhere or workers.run, {}
        for recipe in itertools.chain(recipes, *phase_recipes):
            if recipe.key not in corpora_by_key:
                corpora_by_key[recipe.key] = _open_corpora(recipe, workers, task_runner, report)
    by_component = [corpora_by_key[recipe.key] for recipe in recipes]
    phases = tuple(
        tuple(corpora_by_key[recipe.key][0] for recipe in recipes_of_phase) for recipes_of_phase in phase_recipes
    )
    corpora = dict(zip(SPLITS, zip(*by_component, strict=True), strict=True))
    seconds = f"prepared in {time.perf_counter() - started:.1f} s" if workers.worked else f"from {with_urls(cache)}"
    prepared = Prepared(tokenizer, **corpora, summary=f"{_describe(corpora)}; {seconds}", phases=phases)
    resolve_steps(experiment, prepared)
    metric, _ = experiment.objective.selection(prepared.training_notes)
    if metric != experiment.objective.select_by and not experiment.evaluate.select_by:
        experiment.evaluate.select_by = metric
    return prepared


def prepare_share(
    experiment: Experiment, index: int, count: int, report: Callable[[str], None] = print_progress
) -> str:
    """Tokenizes every `count`-th shard of each split, starting at shard `index`; returns a message for the user.

    Several machines can prepare a corpus in parallel, each with a different `index` from 0 to `count` - 1.
    """
    with open_cache(experiment.data) as (cache, workers):
        recipes, phase_recipes, _ = _build_recipes(experiment, cache, workers, report)
        for split in SPLITS:
            for recipe in itertools.chain(recipes, *phase_recipes):
                if not shards.is_complete(recipe.directory(split), f"{recipe.key}-{split}"):
                    _tokenize_split(split, recipe, workers.run, report, index, count)
    return f"share {index} of {count} is done; after all shares, run the same command once without --shard"


def _build_recipes(
    experiment: Experiment, cache: str, workers: Workers, report: Callable, saved: Optional[str] = None
) -> tuple[list[Recipe], list[list[Recipe]], Tokenizer]:
    """Builds the recipes for the source's components and for each phase; also returns the tokenizer.

    Trains the tokenizer if the cache lacks it, and replaces the "auto" sizes in `experiment.model` with numbers.
    """
    source = experiment.data.source
    sources = [source, *(phase.experiment.data.source for phase in phases_of(experiment))]
    components = {str(component): component for each_source in sources for component in each_source.components()}
    fingerprints = {name: component.fingerprint() for name, component in components.items()}
    source_fingerprints = [fingerprints[str(component)] for component in source.components()]
    directory = make_tokenizer(experiment, source_fingerprints, cache, workers, report, saved)
    tokenizer = load_tokenizer(directory)
    resolve_auto(experiment, tokenizer.vocabulary.size)
    check_tokenizer(tokenizer, experiment)
    phase_recipes = []
    for phase in phases_of(experiment) if experiment.phases else ():
        with phase_in_errors(phase):
            check_tokenizer(tokenizer, phase.experiment)
            phase_recipes.append(_component_recipes(phase.experiment, fingerprints, tokenizer, directory, cache))
    return _component_recipes(experiment, fingerprints, tokenizer, directory, cache), phase_recipes, tokenizer


def _component_recipes(
    experiment: Experiment, fingerprints: dict[str, str], tokenizer: Tokenizer, directory: str, cache: str
) -> list[Recipe]:
    """Builds one recipe per component of `experiment.data.source`, ignoring `experiment.phases`.

    Args:
      fingerprints: the fingerprint of each component, keyed by str(component).
      directory: the directory of the tokenizer.
      cache: the directory of the cache.
    """
    data, recipes = experiment.data, []
    filters = (data.quality, data.drop_duplicates, data.near_duplicates)
    by_sentence = any(objective.unit == "sentences" for _, objective in experiment.objective.components())
    task = experiment.objective.adapted(experiment) if experiment.objective.unit == "records" else None
    for source in data.source.components():
        fingerprint = fingerprints[str(source)]
        if task is not None:
            source = source.reading(task)
        parts = "records" if task else "pairs" if source.pairs else "sentences" if by_sentence else None
        task_settings = [] if task is None else [task.corpus_settings()]
        if task is not None and tokenizer.vocabulary.frame is not None:  # windows leave room for these tokens
            task_settings.append(tokenizer.vocabulary.frame)
        key = digest(fingerprint, tokenizer.fingerprint, parts, [to_json(f) for f in filters], FORMAT, *task_settings)
        size = tokenizer.vocabulary.size
        recipes.append(Recipe(source, fingerprint, directory, parts, task, *filters, size, key, cache))
    return recipes


def _describe(corpora: dict[str, tuple[Corpus, ...]]) -> str:
    """Formats the size of each split's corpora, and how many items were skipped for which reason, as one line."""
    sizes, skipped = [], collections.Counter()
    for split, split_corpora in corpora.items():
        for i, corpus in enumerate(split_corpora):
            number = f" {i + 1}" if len(split_corpora) > 1 else ""
            details = f", {counted(corpus.num_parts, 'sentence')}" if corpus.parts == "sentences" else ""
            if corpus.num_records < corpus.num_documents:
                details = f" in {counted(corpus.num_documents, 'window')}"
            noun = {"pairs": "pair", "records": "record"}.get(corpus.parts, "document")
            size = f"{corpus.num_bytes / 1e6:,.1f} MB, {counted(corpus.num_tokens, 'token')}"
            sizes.append(f"{split}{number} {counted(corpus.num_records, noun)}{details}, {size}")
            skipped.update(corpus.skipped)
    return "; ".join([*sizes, *(f"skipped {count:,} {reason}" for reason, count in sorted(skipped.items()))])


def _open_corpora(recipe: Recipe, workers: Workers, task_runner: TaskRunner, report: Callable) -> list[Corpus]:
    """Opens the training and the validation corpus of a recipe, after preparing those that the cache lacks.

    Holds out a document for validation if the split rule of the source leaves one of the splits empty. Raises UserError
    if a split is empty even then.
    """
    corpora = [_open_corpus(split, recipe, workers, task_runner, report) for split in SPLITS]
    if recipe.source.holds_out and not all(corpus.num_documents for corpus in corpora):
        choice_path = os.path.join(recipe.cache, "corpora", recipe.key, "held_out.json")
        config_path = recipe.source.config_path
        source = hold_out(recipe.source, recipe.quality, choice_path, workers, report)
        key = digest(recipe.key, source.chosen, source.is_only)
        recipe = recipe._replace(source=source, fingerprint=source.fingerprint(), key=key)
        corpora = [_open_corpus(split, recipe, workers, task_runner, report) for split in SPLITS]
        description = "the end of the only document" if source.is_only else "the document with the smallest hash"
        report(
            f"the split of {config_path} leaves train or validation empty: {description} becomes the validation split"
        )
    for split, corpus in zip(SPLITS, corpora, strict=True):
        if not corpus.num_documents:
            advice = "" if split == "train" else "; set config.data.source.valid_path, or a larger valid_fraction"
            raise UserError(f"config.data.source holds no document for {split}{advice}: {recipe.source}")
    return corpora


def _open_corpus(split: str, recipe: Recipe, workers: Workers, task_runner: TaskRunner, report: Callable) -> Corpus:
    """Opens the corpus of a split, after preparing it if the cache lacks it."""
    directory, fingerprint = recipe.directory(split), f"{recipe.key}-{split}"
    if not shards.is_complete(directory, fingerprint):
        with locked(directory, report):
            if not shards.is_complete(directory, fingerprint):
                if os.path.exists(os.path.join(directory, shards.INDEX)):
                    report(f"the index of {directory} is damaged and will be rebuilt")
                workers.worked = True
                count = _tokenize_split(split, recipe, task_runner, report)
                if recipe.drops and count:
                    _drop_duplicates(split, recipe, count, workers, report)
                shards.write_index(directory, count, recipe.vocabulary_size, fingerprint, recipe.parts)
    if recipe.drops:
        # Every run deletes this folder, because an earlier process may have been killed before this line.
        shutil.rmtree(recipe.tokenized(split), ignore_errors=True)
    return Corpus(directory)


def _tokenize_split(
    split: str, recipe: Recipe, task_runner: TaskRunner, report: Callable, index: int = 0, count: int = 1
) -> int:
    """Tokenizes those missing shards of a split whose number is `index` modulo `count`.

    Returns:
      The total number of shards in the split.
    """
    directory, descriptions = recipe.tokenized(split), recipe.source.shards(split)
    os.makedirs(directory, exist_ok=True)
    shard_numbers = range(index, len(descriptions), count)
    missing = sorted({*shard_numbers} & {*shards.missing_shards(directory, len(descriptions), recipe.vocabulary_size)})
    _remove_unfinished(recipe, split, None if count == 1 else missing)
    existing = f", {len(shard_numbers) - len(missing)} exist" if len(missing) < len(shard_numbers) else ""
    report(f"tokenizing {split}: {counted(len(shard_numbers), 'shard')}{existing}")
    tasks = [(i, descriptions[i], recipe, directory) for i in missing]
    for _ in _with_progress(task_runner(_write_shard, tasks), len(tasks), split, report):
        pass
    if tasks and recipe.source.fingerprint() != recipe.fingerprint:
        shutil.rmtree(directory)  # some shards may contain the old text, other shards the new text
        raise UserError("the text of config.data.source changed during tokenization: run the same command again")
    return len(descriptions)


def _remove_unfinished(recipe: Recipe, split: str, only: Optional[list[int]]) -> None:
    """Removes temporary files that killed processes left in the folders of a split.

    Args:
      only: numbers of the shards to clean up, if other machines may be writing the remaining shards. If None, all
        shards.
    """
    names = None if only is None else {f"{i:05d}" for i in only}
    for directory in {recipe.tokenized(split), recipe.directory(split)}:
        for name in os.listdir(directory):
            if ".tmp-" in name and (names is None or name.split(".")[0] in names):
                os.remove(os.path.join(directory, name))


def _write_shard(i: int, shard: Shard, recipe: Recipe, directory: str) -> None:
    """Filters and tokenizes the documents of shard `i`, and writes their tokens to `directory`.

    If the recipe drops duplicates or near-duplicates, also writes the documents' hashes or MinHash signatures.
    """
    skipped = collections.Counter()
    documents = until_stopped(recipe.source.read(shard, skipped))
    if recipe.quality is not None:
        documents = recipe.quality.filter(documents, skipped)
    with shards.ShardWriter(directory, i, _load_tokenizer_once(recipe.tokenizer), recipe.parts, recipe.task) as writer:
        written_documents = writer.write(documents, skipped)
        if recipe.drop_duplicates:
            written_documents = duplicates.write_hashes(written_documents, directory, i)
        if recipe.near_duplicates is not None:
            recipe.near_duplicates.sign(written_documents, directory, i)
        collections.deque(written_documents, maxlen=0)


_load_tokenizer_once = functools.lru_cache(maxsize=1)(load_tokenizer)


def _drop_duplicates(split: str, recipe: Recipe, count: int, workers: Workers, report: Callable) -> None:
    """Copies a split's `count` tokenized shards without duplicates and near-duplicates."""
    report(f"looking for duplicates in {split}")
    source, directory = recipe.tokenized(split), recipe.directory(split)
    dropped_by_shard = [{} for _ in range(count)]
    if recipe.drop_duplicates:
        for dropped, numbers in zip(dropped_by_shard, duplicates.find_duplicates(source, count), strict=True):
            dropped["duplicates"] = numbers
    if recipe.near_duplicates is not None:
        for dropped, numbers in zip(dropped_by_shard, recipe.near_duplicates.find(source, count), strict=True):
            dropped["near-duplicates"] = np.setdiff1d(numbers, dropped.get("duplicates", ()))
    dtype = shards.token_dtype(recipe.vocabulary_size)
    tasks = [(source, directory, i, dropped, dtype) for i, dropped in enumerate(dropped_by_shard)]
    collections.deque(workers.run(duplicates.copy_shard_without, tasks), maxlen=0)


def _with_progress(results: Iterator, total: int, split: str, report: Callable) -> Iterator:
    """Yields the results unchanged while showing a progress bar on a terminal, or else a line every ten seconds."""
    if sys.stderr.isatty():
        yield from tqdm(results, desc=f"tokenizing {split}", total=total, unit="shard", leave=False)
        return
    last_report = time.monotonic()
    for num_done, result in enumerate(results, start=1):
        if time.monotonic() - last_report > 10:
            report(f"tokenizing {split}: {num_done} of {counted(total, 'shard')}")
            last_report = time.monotonic()
        yield result
