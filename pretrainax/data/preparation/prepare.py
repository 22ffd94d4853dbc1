"""Prepares the tokenizer and token shards of a config in the cache, for training and for the command `prepare`."""

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
from pretrainax.data.files import digest
from pretrainax.data.preparation import duplicates, shards
from pretrainax.data.preparation.cache import FORMAT, open_cache
from pretrainax.data.preparation.filters import NearDuplicates, QualityFilter
from pretrainax.data.preparation.held_out import SPLITS, hold_out
from pretrainax.data.preparation.tokenizer import make_tokenizer
from pretrainax.data.preparation.workers import Workers, locked, until_stopped
from pretrainax.data.sources import Source
from pretrainax.data.sources.base import Shard
from pretrainax.storage.places import with_urls
from pretrainax.tokenization.base import Tokenizer, load_tokenizer
from pretrainax.tokenization.choices import check_tokenizer

# Calls a function with the arguments of each task, possibly on other machines, and yields the results.
TaskRunner = Callable[[Callable, list[tuple]], Iterator]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The tokenizer and the corpora of a run."""

    tokenizer: Tokenizer
    train: tuple[Corpus, ...]  # the training corpora, one per component of the source
    valid: tuple[Corpus, ...]  # the validation corpora, one per component of the source
    summary: str  # one line with the sizes of the corpora and the time of the preparation
    phases: tuple[tuple[Corpus, ...], ...] = ()  # the training corpora of each phase; (): a run without phases

    @property
    def corpora(self) -> tuple[Corpus, ...]:
        """All corpora of the run without repetitions: `train`, `valid`, and the further corpora of the phases."""
        main = (*self.train, *self.valid)
        known = {corpus.directory for corpus in main}
        others = {c.directory: c for phase in self.phases for c in phase if c.directory not in known}
        return (*main, *others.values())

    @property
    def valid_first(self) -> tuple[Corpus, ...]:
        """The corpora of `corpora`, with the validation corpora first, because each validation reads all their rows."""
        return (*self.valid, *(corpus for corpus in self.corpora if corpus not in self.valid))


class Recipe(NamedTuple):
    """All inputs of the preparation that determine a corpus, except the split."""

    source: Source
    fingerprint: str  # fingerprint of the source
    tokenizer: str  # directory of the tokenizer
    parts: Optional[str]  # "sentences": marks sentence ends | "pairs" | "records" of a task | None: plain documents
    task: Optional[shards.Encoder]  # converts records to documents; None: no records
    quality: Optional[QualityFilter]
    drop_duplicates: bool
    near_duplicates: Optional[NearDuplicates]
    vocabulary_size: int
    key: str  # digest of all inputs and of the source's fingerprint
    cache: str  # directory of the cache

    @property
    def drops(self) -> bool:
        """True if duplicates or near-duplicates are dropped, which is possible only after all shards are tokenized."""
        return self.drop_duplicates or self.near_duplicates is not None

    def directory(self, split: str) -> str:
        """Returns the folder of the finished corpus of a split."""
        return os.path.join(self.cache, "corpora", self.key, split)

    def tokenized(self, split: str) -> str:
        """Returns the folder of the tokenized shards of a split; with `drops`, of the shards before the removal."""
        return os.path.join(self.directory(split), "whole") if self.drops else self.directory(split)


def prepare(
    experiment: Experiment, report: Callable[[str], None] = print, elsewhere: Optional[TaskRunner] = None
) -> Prepared:
    """Returns the tokenizer and the corpora of a config, from the cache or newly prepared.

    Replaces sizes of `experiment.model` that are `auto` with numbers.

    Args:
      report: prints a message for the user.
      elsewhere: runs the tokenization tasks, for example on other machines; None: processes of this machine run them.

    Raises:
      UserError: the preparation failed.
    """
    started = time.perf_counter()
    with open_cache(experiment.data) as (cache, workers):
        recipes, of_phases, tokenizer = _recipes(experiment, cache, workers, report)
        tokenizing, corpora_by_key = elsewhere or workers.run, {}
        for recipe in itertools.chain(recipes, *of_phases):
            if recipe.key not in corpora_by_key:
                corpora_by_key[recipe.key] = _corpora(recipe, workers, tokenizing, report)
    by_component = [corpora_by_key[recipe.key] for recipe in recipes]
    phases = tuple(tuple(corpora_by_key[recipe.key][0] for recipe in of_phase) for of_phase in of_phases)
    corpora = dict(zip(SPLITS, zip(*by_component, strict=True), strict=True))
    seconds = f"prepared in {time.perf_counter() - started:.1f} s" if workers.worked else f"from {with_urls(cache)}"
    return Prepared(tokenizer, **corpora, summary=f"{_describe(corpora)}; {seconds}", phases=phases)


def prepare_share(experiment: Experiment, index: int, count: int, report: Callable[[str], None] = print) -> str:
    """Tokenizes one of `count` shares of the shards; returns a message for the user.

    The share contains the shards whose number is `index` modulo `count`.
    """
    with open_cache(experiment.data) as (cache, workers):
        recipes, of_phases, _ = _recipes(experiment, cache, workers, report)
        for split in SPLITS:
            for recipe in itertools.chain(recipes, *of_phases):
                if not shards.is_complete(recipe.directory(split), f"{recipe.key}-{split}"):
                    _tokenize(split, recipe, workers.run, report, index, count)
    return f"share {index} of {count} is done; after all shares, run the same command once without --shard"


def _recipes(
    experiment: Experiment, cache: str, workers: Workers, report: Callable
) -> tuple[list[Recipe], list[list[Recipe]], Tokenizer]:
    """Returns the recipes of the source's components, the recipes of each phase, and the tokenizer.

    Trains the tokenizer if the cache lacks it, and replaces sizes of `experiment.model` that are `auto` with numbers.
    """
    source = experiment.data.source
    sources = [source, *(phase.experiment.data.source for phase in phases_of(experiment))]
    components = {str(component): component for each in sources for component in each.components()}
    fingerprints = {name: component.fingerprint() for name, component in components.items()}
    source_fingerprints = [fingerprints[str(component)] for component in source.components()]
    sampled = source.reading(experiment.objective) if experiment.objective.unit == "records" else source
    directory = make_tokenizer(experiment.tokenizer, sampled, source_fingerprints, cache, workers, report)
    tokenizer = load_tokenizer(directory)
    resolve_auto(experiment, tokenizer.vocabulary.size)
    check_tokenizer(tokenizer, experiment)
    of_phases = []
    for phase in phases_of(experiment) if experiment.phases else ():
        with phase_in_errors(phase):
            check_tokenizer(tokenizer, phase.experiment)
            of_phases.append(_components(phase.experiment, fingerprints, tokenizer, directory, cache))
    return _components(experiment, fingerprints, tokenizer, directory, cache), of_phases, tokenizer


def _components(
    experiment: Experiment, fingerprints: dict[str, str], tokenizer: Tokenizer, directory: str, cache: str
) -> list[Recipe]:
    """Returns the recipes of the components of `experiment.data.source`. Ignores `experiment.phases`.

    Args:
      fingerprints: fingerprint of each component, by str(component).
      directory: directory of the tokenizer.
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
        of_task = [] if task is None else [task.corpus_settings()]
        key = digest(fingerprint, tokenizer.fingerprint, parts, [to_json(f) for f in filters], FORMAT, *of_task)
        size = tokenizer.vocabulary.size
        recipes.append(Recipe(source, fingerprint, directory, parts, task, *filters, size, key, cache))
    return recipes


def _describe(corpora: dict[str, tuple[Corpus, ...]]) -> str:
    """Returns a line with the sizes of the corpora of each split and the counts of skipped items."""
    sizes, skipped = [], collections.Counter()
    for split, several in corpora.items():
        for i, corpus in enumerate(several):
            number = f" {i + 1}" if len(several) > 1 else ""
            kinds = f", {corpus.num_parts:,} sentences" if corpus.parts == "sentences" else ""
            if corpus.num_records < corpus.num_documents:
                kinds = f" in {corpus.num_documents:,} windows"
            documents = corpus.parts if corpus.parts in ("pairs", "records") else "documents"
            size = f"{corpus.num_bytes / 1e6:,.1f} MB, {corpus.num_tokens:,} tokens"
            sizes.append(f"{split}{number} {corpus.num_records:,} {documents}{kinds}, {size}")
            skipped.update(corpus.skipped)
    return "; ".join([*sizes, *(f"skipped {count:,} {reason}" for reason, count in sorted(skipped.items()))])


def _corpora(recipe: Recipe, workers: Workers, tokenizing: TaskRunner, report: Callable) -> list[Corpus]:
    """Opens the training and the validation corpus of a recipe, after preparing them if the cache lacks them.

    Holds out a document for validation if the split rule of the source leaves one of the splits empty.
    """
    corpora = [_corpus(split, recipe, workers, tokenizing, report) for split in SPLITS]
    if recipe.source.holds_out and not all(corpus.num_documents for corpus in corpora):
        choice_path = os.path.join(recipe.cache, "corpora", recipe.key, "held_out.json")
        where = recipe.source.config_path
        source = hold_out(recipe.source, recipe.quality, choice_path, workers, report)
        key = digest(recipe.key, source.chosen, source.is_only)
        recipe = recipe._replace(source=source, fingerprint=source.fingerprint(), key=key)
        corpora = [_corpus(split, recipe, workers, tokenizing, report) for split in SPLITS]
        what = "the end of the only document" if source.is_only else "the document with the smallest hash"
        report(f"the split of {where} leaves train or validation empty: {what} becomes the validation split")
    for split, corpus in zip(SPLITS, corpora, strict=True):
        if not corpus.num_documents:
            more = "" if split == "train" else "; set config.data.source.valid_path, or a larger valid_fraction"
            raise UserError(f"config.data.source holds no document for {split}{more}: {recipe.source}")
    return corpora


def _corpus(split: str, recipe: Recipe, workers: Workers, tokenizing: TaskRunner, report: Callable) -> Corpus:
    """Opens the corpus of a split, after preparing the corpus if the cache lacks it."""
    directory, fingerprint = recipe.directory(split), f"{recipe.key}-{split}"
    if not shards.is_complete(directory, fingerprint):
        with locked(directory, report):
            if not shards.is_complete(directory, fingerprint):
                if os.path.exists(os.path.join(directory, shards.INDEX)):
                    report(f"the index of {directory} is damaged and will be rebuilt")
                workers.worked = True
                count = _tokenize(split, recipe, tokenizing, report)
                if recipe.drops:
                    _drop(split, recipe, count, workers, report)
                shards.write_index(directory, count, recipe.vocabulary_size, fingerprint, recipe.parts)
    if recipe.drops:
        shutil.rmtree(recipe.tokenized(split), ignore_errors=True)  # also if a process was killed just before this line
    return Corpus(directory)


def _tokenize(split: str, recipe: Recipe, run: TaskRunner, report: Callable, index: int = 0, count: int = 1) -> int:
    """Tokenizes the documents of a split into the missing shards whose number is `index` modulo `count`.

    Returns:
      The total number of shards of the split.
    """
    directory, descriptions = recipe.tokenized(split), recipe.source.shards(split)
    os.makedirs(directory, exist_ok=True)
    share = range(index, len(descriptions), count)
    missing = sorted({*share} & {*shards.missing_shards(directory, len(descriptions), recipe.vocabulary_size)})
    _remove_unfinished(recipe, split, None if count == 1 else missing)
    existing = f", {len(share) - len(missing)} exist" if len(missing) < len(share) else ""
    report(f"tokenizing {split}: {len(share)} shards{existing}")
    tasks = [(i, descriptions[i], recipe, directory) for i in missing]
    for _ in _progress(run(_write_shard, tasks), len(tasks), split, report):
        pass
    if tasks and recipe.source.fingerprint() != recipe.fingerprint:
        shutil.rmtree(directory)  # some shards may contain the old text and some the new text
        raise UserError("the text of config.data.source changed during tokenization: run the same command again")
    return len(descriptions)


def _remove_unfinished(recipe: Recipe, split: str, only: Optional[list[int]]) -> None:
    """Removes the temporary files of killed processes from the folders of a split.

    Args:
      only: numbers of the shards to clean, if other machines may be writing other shards; None: all shards.
    """
    names = None if only is None else {f"{i:05d}" for i in only}
    for directory in {recipe.tokenized(split), recipe.directory(split)}:
        for name in os.listdir(directory):
            if ".tmp-" in name and (names is None or name.split(".")[0] in names):
                os.remove(os.path.join(directory, name))


def _write_shard(i: int, shard: Shard, recipe: Recipe, directory: str) -> None:
    """Filters and tokenizes the documents of shard `i`, and writes hashes and signatures for the duplicate removal."""
    skipped = collections.Counter()
    documents = until_stopped(recipe.source.read(shard, skipped))
    if recipe.quality is not None:
        documents = recipe.quality.filter(documents, skipped)
    with shards.ShardWriter(directory, i, _load_once(recipe.tokenizer), recipe.parts, recipe.task) as writer:
        written = writer.write(documents, skipped)
        if recipe.drop_duplicates:
            written = duplicates.write_hashes(written, directory, i)
        if recipe.near_duplicates is not None:
            recipe.near_duplicates.sign(written, directory, i)
        collections.deque(written, maxlen=0)


_load_once = functools.lru_cache(maxsize=1)(load_tokenizer)


def _drop(split: str, recipe: Recipe, count: int, workers: Workers, report: Callable) -> None:
    """Copies the `count` tokenized shards of a split without duplicates and near-duplicates."""
    report(f"looking for duplicates in {split}")
    source, directory = recipe.tokenized(split), recipe.directory(split)
    dropped = [{} for _ in range(count)]
    if recipe.drop_duplicates:
        for reasons, numbers in zip(dropped, duplicates.find_duplicates(source, count), strict=True):
            reasons["duplicates"] = numbers
    if recipe.near_duplicates is not None:
        for reasons, numbers in zip(dropped, recipe.near_duplicates.find(source, count), strict=True):
            reasons["near-duplicates"] = np.setdiff1d(numbers, reasons.get("duplicates", ()))
    dtype = shards.token_dtype(recipe.vocabulary_size)
    tasks = [(source, directory, i, reasons, dtype) for i, reasons in enumerate(dropped)]
    collections.deque(workers.run(duplicates.copy_shard_without, tasks), maxlen=0)


def _progress(results: Iterator, total: int, split: str, report: Callable) -> Iterator:
    """Yields the results unchanged and reports progress: a bar on a terminal, otherwise a line every ten seconds."""
    if sys.stderr.isatty():
        yield from tqdm(results, desc=f"tokenizing {split}", total=total, unit="shard", leave=False)
        return
    last_report = time.monotonic()
    for done, result in enumerate(results, start=1):
        if time.monotonic() - last_report > 10:
            report(f"tokenizing {split}: {done} of {total} shards")
            last_report = time.monotonic()
        yield result
