"""Provides the tokenizer of a config: loads it from the cache or a file, or trains it on a sample of the data."""

import collections
import functools
import itertools
import os
import shutil
from collections.abc import Callable, Iterable
from typing import Optional

import numpy as np

from pretrainax.config import Experiment, UserError, to_json
from pretrainax.data import checksums
from pretrainax.data.files import digest
from pretrainax.data.preparation import shards
from pretrainax.data.preparation.cache import FORMAT, open_cache
from pretrainax.data.preparation.workers import Workers, locked, until_stopped
from pretrainax.data.sources import Source
from pretrainax.data.sources.base import Shard, texts_of
from pretrainax.files.atomic_files import replacing_folder
from pretrainax.files.object_names import path_below
from pretrainax.reporting.streams import print_progress
from pretrainax.storage.places import complete
from pretrainax.tokenization.base import DESCRIPTION, Tokenizer, load_tokenizer
from pretrainax.tokenization.choices import TokenizerConfig

_CHECKSUM_FILE = "checksums.json"  # file with the checksums of all other files in a tokenizer's folder
_MAX_SAMPLED_SHARDS = 256  # maximum number of shards per component from which text is sampled, unless they are short


def prepare_tokenizer(experiment: Experiment, report: Callable[[str], None] = print_progress) -> Tokenizer:
    """Loads a config's tokenizer, after training it if the cache lacks it, without preparing corpora."""
    with open_cache(experiment.data) as (cache, workers):
        fingerprints = [component.fingerprint() for component in experiment.data.source.components()]
        return load_tokenizer(make_tokenizer(experiment, fingerprints, cache, workers, report))


def sample_split(experiment: Experiment, split: str, limit: int) -> list[str]:
    """Samples about `limit` bytes of text from a split, as a list of strings.

    Components contribute in proportion to their mixture weights.
    """
    with open_cache(experiment.data) as (_, workers):
        return list(sample_texts(_sampled_source(experiment), limit, workers, split))


def _sampled_source(experiment: Experiment) -> Source:
    """Returns the source of the text that tokenizers read: the records of a task, or else the documents."""
    source, objective = experiment.data.source, experiment.objective
    return source.reading(objective) if objective.unit == "records" else source


def make_tokenizer(
    experiment: Experiment,
    fingerprints: list[str],
    cache: str,
    workers: Workers,
    report: Callable,
    saved: Optional[str] = None,
) -> str:
    """Returns the directory of a config's tokenizer in the cache, after adding the tokenizer if it is missing.

    If the config has a path, the tokenizer is loaded from this path; otherwise, it is trained. A damaged tokenizer in
    the cache is rebuilt. Training on the same text results in the same tokenizer.

    Args:
      experiment: the config; its tokenizer, its source and the fields that its task reads determine the tokenizer.
      fingerprints: the fingerprint of each component of the source.
      cache: the directory of the cache.
      workers: processes that sample the text and train the tokenizer.
      report: prints a message for the user.
      saved: tokenizer directory of an existing run, which continues with the special tokens around texts that are
        recorded there; ignored if the directory is missing or has a tokenizer with other ids.
    """
    config, source, objective = experiment.tokenizer, _sampled_source(experiment), experiment.objective
    loaded = None if config.path is None else config.load()
    if loaded is not None and saved is not None and os.path.exists(os.path.join(saved, DESCRIPTION)):
        of_run = load_tokenizer(saved)
        loaded = of_run if of_run.fingerprint == loaded.fingerprint else loaded
    weights = component_weights(source).tolist()
    if loaded is None:
        task_settings = [objective.corpus_settings()] if objective.unit == "records" else []
        key = digest(fingerprints, weights, to_json(config), FORMAT, *task_settings)
    else:  # the fingerprint does not include the special tokens around texts
        tokens = loaded.vocabulary.model_tokens
        key = digest(loaded.fingerprint, tokens) if tokens else loaded.fingerprint
    directory = os.path.join(cache, "tokenizers", key)
    complete(directory)
    if not _is_intact(directory):
        with locked(directory, report):
            if not _is_intact(directory):
                if os.path.isdir(directory):
                    report(f"the tokenizer in {directory} is damaged and will be rebuilt")
                    shutil.rmtree(directory)
                if loaded is None:
                    report("training the tokenizer")
                    texts = sample_texts(source, config.train_bytes, workers)
                    train = (
                        _train_tokenizer
                        if config.train_bytes is None
                        else functools.partial(workers.apart, _train_tokenizer)
                    )
                    train(config, texts, directory)
                else:
                    _save_tokenizer(loaded, directory)
    return directory


def _train_tokenizer(config: TokenizerConfig, texts: Iterable[str], directory: str) -> None:
    _save_tokenizer(config.build(texts), directory)


def _save_tokenizer(tokenizer: Tokenizer, directory: str) -> None:
    """Atomically writes a tokenizer and the checksums of its files to a directory.

    Another machine may have written the same tokenizer in the meantime.
    """
    with replacing_folder(directory) as folder:
        tokenizer.save(folder)
        file_checksums = {name: checksums.file_checksum(os.path.join(folder, name)) for name in os.listdir(folder)}
        checksums.write_json(os.path.join(folder, _CHECKSUM_FILE), file_checksums)


def _is_intact(directory: str) -> bool:
    """Returns True if a directory contains a tokenizer whose files match their checksums.

    Older versions wrote no checksums. Any existing directory without a checksum file counts as intact.
    """
    if not os.path.exists(os.path.join(directory, _CHECKSUM_FILE)):
        return os.path.isdir(directory)
    try:
        expected = checksums.read_json(os.path.join(directory, _CHECKSUM_FILE)) or {}
        actual = {name: checksums.file_checksum(path_below(directory, name)) for name in expected}
    except (OSError, UserError):
        return False
    return bool(expected) and actual == expected


def component_weights(source: Source) -> np.ndarray:
    """Computes each component's mixture weight, averaged over the training run, [components]; they sum to 1.

    If the weights depend on the components' sizes, all components are assumed to have the same size.
    """
    stages = source.weight_stages([1] * len(source.components()))
    lengths = np.diff([start for start, _ in stages], append=1.0)
    weights = lengths @ np.array([weights for _, weights in stages], float)  # [stages] @ [stages, components]
    return weights / weights.sum()


def sample_texts(source: Source, limit: Optional[int], workers: Workers, split: str = "train") -> Iterable[str]:
    """Samples about `limit` bytes of text from a split, or returns all of its text if `limit` is None.

    Components contribute in proportion to their mixture weights. If the training split is empty and the source can hold
    out a document, the text comes from the validation split, which data preparation later replaces with a held-out
    document.

    Raises:
      UserError: there is no text, and `limit` is not None.
    """
    for candidate in (split, *["valid"] * (split == "train" and any(c.holds_out for c in source.components()))):
        texts, consumed = iter(_read_texts(source, limit, workers, candidate)), []
        for text in texts:
            consumed.append(text)
            if text.strip():
                return itertools.chain(consumed, texts)
    if limit is None:  # blank text suffices for some tokenizers
        return consumed
    description = "text to train a tokenizer on" if split == "train" else "validation text"
    raise UserError(f"config.data.source holds no {description}: {source}")


def _read_texts(source: Source, limit: Optional[int], workers: Workers, split: str) -> Iterable[str]:
    """Implements `sample_texts` for one split; the result may be empty or blank."""
    components = source.components()
    if limit is None:
        documents = (
            document
            for component in components
            for shard in component.shards(split)
            for document in component.read(shard, collections.Counter())
        )
        return (piece for document in documents for text in texts_of(document) for piece in shards.split_text(text))
    samples = zip(components, component_weights(source), strict=True)
    return [text for component, weight in samples for text in _sample(component, limit * weight, workers, split)]


def _sample(source: Source, limit: float, workers: Workers, split: str) -> list[str]:
    """Samples about `limit` bytes of text from a split of a single source.

    Each sampled shard contributes the same number of bytes. If many shards are so short that they contribute less than
    half of `limit` together, more shards are sampled, or more bytes of the long ones.
    """
    shards, factor = source.shards(split) if limit else [], 1
    while True:
        stride = -(-len(shards) // (factor * _MAX_SAMPLED_SHARDS)) or 1
        sampled_shards = shards[::stride]
        bytes_per_shard = int(np.ceil(factor * limit / max(len(sampled_shards), 1)))
        tasks = [(i, source, shard, bytes_per_shard) for i, shard in enumerate(sampled_shards)]
        samples = {i: (texts, size) for i, texts, size in workers.run(_sample_shard, tasks)}
        sizes = [size for _, size in samples.values()]
        if sum(sizes) >= limit / 2 or (stride == 1 and max(sizes, default=0) < bytes_per_shard):
            return [text for i in range(len(tasks)) for text in samples[i][0]]
        factor *= 2


def _sample_shard(i: int, source: Source, shard: Shard, limit: int) -> tuple[int, list[str], int]:
    """Reads roughly the first `limit` bytes of text from a shard; returns `i`, the text as strings, and its size."""
    sample, remaining = [], limit
    for document in until_stopped(source.read(shard, collections.Counter())):
        for text in texts_of(document):
            text = text[:remaining] if isinstance(text, bytearray) else text[:remaining].encode()[:remaining]
            sample.append(text.decode(errors="ignore"))
            remaining -= len(text)
        if remaining <= 0:
            break
    return i, sample, limit - remaining
