"""From a source of text to token shards in the cache. Training does it first; so does the command `prepare`."""

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

from pretrainax.config import Experiment, UserError, naming, phases_of, resolve_auto, to_json
from pretrainax.data.corpus import Corpus
from pretrainax.data.files import digest
from pretrainax.data.preparation import duplicates, shards
from pretrainax.data.preparation.cache import FORMAT, open_cache
from pretrainax.data.preparation.filters import NearDuplicates, QualityFilter
from pretrainax.data.preparation.held_out import SPLITS, hold_out
from pretrainax.data.preparation.tokenizer import make_tokenizer
from pretrainax.data.preparation.workers import Workers, alone, until_stopped
from pretrainax.data.sources import Source
from pretrainax.data.sources.base import Shard
from pretrainax.storage.places import named
from pretrainax.tokenization.base import Tokenizer, load_tokenizer
from pretrainax.tokenization.choices import check_tokenizer

TaskRunner = Callable[[Callable, list[tuple]], Iterator]  # calls a function for each of some tasks, perhaps elsewhere


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The tokenizer and the corpora of a run."""

    tokenizer: Tokenizer
    train: tuple[Corpus, ...]  # one for each component of the source
    valid: tuple[Corpus, ...]
    summary: str  # a line about them
    phases: tuple[tuple[Corpus, ...], ...] = ()  # what each phase of a run that has phases trains on

    @property
    def corpora(self) -> tuple[Corpus, ...]:
        """Returns all that the run reads: train, valid, and what its phases have beside them."""
        own = (*self.train, *self.valid)
        known = {corpus.directory for corpus in own}
        others = {c.directory: c for phase in self.phases for c in phase if c.directory not in known}
        return (*own, *others.values())

    @property
    def valid_first(self) -> tuple[Corpus, ...]:
        """Returns the same; first what each validation reads as a whole."""
        return (*self.valid, *(corpus for corpus in self.corpora if corpus not in self.valid))


class Recipe(NamedTuple):
    """All that a corpus follows from, but for its split."""

    source: Source
    fingerprint: str  # of the source
    tokenizer: str  # directory
    parts: Optional[str]  # what documents are: divided into "sentences", "pairs", "records" of a task; None: texts
    task: Optional[shards.Encoder]  # of records
    quality: Optional[QualityFilter]
    drop_duplicates: bool
    near_duplicates: Optional[NearDuplicates]
    vocabulary_size: int
    key: str  # digest of all of it, and of the text
    cache: str  # directory

    @property
    def drops(self) -> bool:
        """Documents go only when all are there."""
        return self.drop_duplicates or self.near_duplicates is not None

    def directory(self, split: str) -> str:
        """Returns the folder of the finished corpus."""
        return os.path.join(self.cache, "corpora", self.key, split)

    def tokenized(self, split: str) -> str:
        """Returns the folder of the shards as they are tokenized."""
        return os.path.join(self.directory(split), "whole") if self.drops else self.directory(split)


def prepare(
    experiment: Experiment, report: Callable[[str], None] = print, elsewhere: Optional[TaskRunner] = None
) -> Prepared:
    """Finds or makes the tokenizer and the corpora of a config. Raises a UserError when they cannot be had.

    Sizes of `experiment.model` that are `auto` are numbers after it.

    elsewhere: where shards are tokenized, if not in processes of this machine.
    """
    started = time.perf_counter()
    with open_cache(experiment.data) as (cache, workers):
        recipes, of_phases, tokenizer = _recipes(experiment, cache, workers, report)
        tokenizing, made_by_key = elsewhere or workers.run, {}
        for recipe in itertools.chain(recipes, *of_phases):
            if recipe.key not in made_by_key:
                made_by_key[recipe.key] = _corpora(recipe, workers, tokenizing, report)
    made = [made_by_key[recipe.key] for recipe in recipes]
    phases = tuple(tuple(made_by_key[recipe.key][0] for recipe in of_phase) for of_phase in of_phases)
    corpora = dict(zip(SPLITS, zip(*made, strict=True), strict=True))
    seconds = f"prepared in {time.perf_counter() - started:.1f} s" if workers.worked else f"from {named(cache)}"
    return Prepared(tokenizer, **corpora, summary=f"{_describe(corpora)}; {seconds}", phases=phases)


def prepare_share(experiment: Experiment, index: int, count: int, report: Callable[[str], None] = print) -> str:
    """Tokenizes the shards whose number is `index` modulo `count`, and returns a line about them."""
    with open_cache(experiment.data) as (cache, workers):
        recipes, of_phases, _ = _recipes(experiment, cache, workers, report)
        for split in SPLITS:
            for recipe in itertools.chain(recipes, *of_phases):
                if not shards.is_complete(recipe.directory(split), f"{recipe.key}-{split}"):
                    _tokenize(split, recipe, workers.run, report, index, count)
    return f"share {index} of {count} is done; when all are, run the same command once without --shard"


def _recipes(
    experiment: Experiment, cache: str, workers: Workers, report: Callable
) -> tuple[list[Recipe], list[list[Recipe]], Tokenizer]:
    """Returns a recipe for each component of the source, those of each phase, and the tokenizer."""
    source = experiment.data.source
    sources = [source, *(phase.experiment.data.source for phase in phases_of(experiment))]
    components = {str(component): component for one in sources for component in one.components()}
    fingerprints = {name: component.fingerprint() for name, component in components.items()}
    own = [fingerprints[str(component)] for component in source.components()]
    read = source.reading(experiment.objective) if experiment.objective.unit == "records" else source
    directory = make_tokenizer(experiment.tokenizer, read, own, cache, workers, report)
    tokenizer = load_tokenizer(directory)
    resolve_auto(experiment, tokenizer.vocabulary.size)
    check_tokenizer(tokenizer, experiment)
    of_phases = []
    for phase in phases_of(experiment) if experiment.phases else ():
        with naming(phase):
            check_tokenizer(tokenizer, phase.experiment)
            of_phases.append(_components(phase.experiment, fingerprints, tokenizer, directory, cache))
    return _components(experiment, fingerprints, tokenizer, directory, cache), of_phases, tokenizer


def _components(
    experiment: Experiment, fingerprints: dict[str, str], tokenizer: Tokenizer, directory: str, cache: str
) -> list[Recipe]:
    """Returns a recipe for each component of the source of a config without its phases."""
    data, recipes = experiment.data, []
    filters = (data.quality, data.drop_duplicates, data.near_duplicates)
    by_sentence = any(objective.unit == "sentences" for _, objective in experiment.objective.components())
    task = experiment.objective.adapted(experiment) if experiment.objective.unit == "records" else None
    for source in data.source.components():
        fingerprint = fingerprints[str(source)]
        if task is not None:
            source = source.reading(task)
        parts = "records" if task else "pairs" if source.pairs else "sentences" if by_sentence else None
        of_task = [] if task is None else [task.prepared_by()]
        key = digest(fingerprint, tokenizer.fingerprint, parts, [to_json(f) for f in filters], FORMAT, *of_task)
        size = tokenizer.vocabulary.size
        recipes.append(Recipe(source, fingerprint, directory, parts, task, *filters, size, key, cache))
    return recipes


def _describe(corpora: dict[str, tuple[Corpus, ...]]) -> str:
    """Writes a line about the sizes of the corpora and what was left out."""
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
    """Opens the corpora of both splits. Where a source that holds documents out leaves one empty, one is chosen."""
    corpora = [_corpus(split, recipe, workers, tokenizing, report) for split in SPLITS]
    if recipe.source.holds_out and not all(corpus.num_documents for corpus in corpora):
        kept_in = os.path.join(recipe.cache, "corpora", recipe.key, "held_out.json")
        where = recipe.source.config_path
        source = hold_out(recipe.source, recipe.quality, kept_in, workers, report)
        key = digest(recipe.key, source.chosen, source.is_only)
        recipe = recipe._replace(source=source, fingerprint=source.fingerprint(), key=key)
        corpora = [_corpus(split, recipe, workers, tokenizing, report) for split in SPLITS]
        what = "the end of the only document" if source.is_only else "the document with the smallest hash"
        report(f"the split of {where} leaves one side empty: {what} is for validation")
    for split, corpus in zip(SPLITS, corpora, strict=True):
        if not corpus.num_documents:
            more = "" if split == "train" else "; set config.data.source.valid_path, or a larger valid_fraction"
            raise UserError(f"config.data.source holds no document for {split}{more}: {recipe.source}")
    return corpora


def _corpus(split: str, recipe: Recipe, workers: Workers, tokenizing: TaskRunner, report: Callable) -> Corpus:
    """Opens a corpus, which is made first where it is not in the cache."""
    directory, fingerprint = recipe.directory(split), f"{recipe.key}-{split}"
    if not shards.is_complete(directory, fingerprint):
        with alone(directory, report):
            if not shards.is_complete(directory, fingerprint):
                if os.path.exists(os.path.join(directory, shards.INDEX)):
                    report(f"the index of {directory} is damaged: it is made anew")
                workers.worked = True
                count = _tokenize(split, recipe, tokenizing, report)
                if recipe.drops:
                    _drop(split, recipe, count, workers, report)
                shards.write_index(directory, count, recipe.vocabulary_size, fingerprint, recipe.parts)
    if recipe.drops:
        shutil.rmtree(recipe.tokenized(split), ignore_errors=True)  # also what a run left that was killed right here
    return Corpus(directory)


def _tokenize(split: str, recipe: Recipe, run: TaskRunner, report: Callable, index: int = 0, count: int = 1) -> int:
    """Writes the shards that are missing among those whose number is `index` modulo `count`.

    Returns how many shards there are in all.
    """
    directory, descriptions = recipe.tokenized(split), recipe.source.shards(split)
    os.makedirs(directory, exist_ok=True)
    own = range(index, len(descriptions), count)
    missing = sorted({*own} & {*shards.missing_shards(directory, len(descriptions), recipe.vocabulary_size)})
    _remove_unfinished(recipe, split, None if count == 1 else missing)
    kept = f", {len(own) - len(missing)} are there" if len(missing) < len(own) else ""
    report(f"tokenizing {split}: {len(own)} shards{kept}")
    tasks = [(i, descriptions[i], recipe, directory) for i in missing]
    for _ in _progress(run(_write_shard, tasks), len(tasks), split, report):
        pass
    if tasks and recipe.source.fingerprint() != recipe.fingerprint:
        shutil.rmtree(directory)  # which shards are of which text is not known
        raise UserError("the text of config.data.source has changed while it was tokenized: run the same command again")
    return len(descriptions)


def _remove_unfinished(recipe: Recipe, split: str, only: Optional[list[int]]) -> None:
    """Removes what runs that were killed left: all of it, or, where others may be at work, of the shards `only`."""
    own = None if only is None else {f"{i:05d}" for i in only}
    for directory in {recipe.tokenized(split), recipe.directory(split)}:
        for name in os.listdir(directory):
            if ".tmp-" in name and (own is None or name.split(".")[0] in own):
                os.remove(os.path.join(directory, name))


def _write_shard(i: int, shard: Shard, recipe: Recipe, directory: str) -> None:
    """Tokenizes one shard, and writes beside it what finds its duplicates."""
    skipped = collections.Counter()
    documents = until_stopped(recipe.source.read(shard, skipped))
    if recipe.quality is not None:
        documents = recipe.quality.kept(documents, skipped)
    with shards.ShardWriter(directory, i, _load_once(recipe.tokenizer), recipe.parts, recipe.task) as writer:
        written = writer.write(documents, skipped)
        if recipe.drop_duplicates:
            written = duplicates.hashed(written, directory, i)
        if recipe.near_duplicates is not None:
            recipe.near_duplicates.sign(written, directory, i)
        collections.deque(written, maxlen=0)


_load_once = functools.lru_cache(maxsize=1)(load_tokenizer)


def _drop(split: str, recipe: Recipe, count: int, workers: Workers, report: Callable) -> None:
    """Copies the tokenized shards without the documents that repeat others."""
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
    collections.deque(workers.run(duplicates.copy_without, tasks), maxlen=0)


def _progress(results: Iterator, total: int, split: str, report: Callable) -> Iterator:
    """Yields the results, with a bar on a terminal, else a line every ten seconds."""
    if sys.stderr.isatty():
        yield from tqdm(results, desc=f"tokenizing {split}", total=total, unit="shard", leave=False)
        return
    said = time.monotonic()
    for done, result in enumerate(results, start=1):
        if time.monotonic() - said > 10:
            report(f"tokenizing {split}: {done} of {total} shards")
            said = time.monotonic()
        yield result
