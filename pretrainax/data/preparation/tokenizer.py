"""Provides the tokenizer of a config: from the cache, from a file, or trained on a sample of the training text."""

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
from pretrainax.storage.places import complete
from pretrainax.tokenization.base import Tokenizer, load_tokenizer
from pretrainax.tokenization.choices import TokenizerConfig

_CHECKSUMS = "checksums.json"  # checksums of the other files in the folder of a tokenizer
_SAMPLED_SHARDS = 256  # maximum number of shards per component in a sample of text


def prepare_tokenizer(experiment: Experiment, report: Callable[[str], None] = print) -> Tokenizer:
    """Returns the tokenizer of a config, from the cache, loaded or newly trained. Does not prepare corpora."""
    source = experiment.data.source
    with open_cache(experiment.data) as (cache, workers):
        fingerprints = [component.fingerprint() for component in source.components()]
        return load_tokenizer(make_tokenizer(experiment.tokenizer, source, fingerprints, cache, workers, report))


def sample_split(experiment: Experiment, split: str, limit: int) -> list[str]:
    """Returns about `limit` bytes of the text of a split, as a list of strings.

    Components contribute in proportion to their weights, and the shards of a component contribute equal shares.
    """
    with open_cache(experiment.data) as (_, workers):
        return list(sample_texts(experiment.data.source, limit, workers, split))


def make_tokenizer(
    config: TokenizerConfig, source: Source, fingerprints: list[str], cache: str, workers: Workers, report: Callable
) -> str:
    """Returns the cache directory of a config's tokenizer, after loading or training it if the cache lacks it.

    A damaged tokenizer in the cache is rebuilt. Training on the same text gives the same tokenizer.

    Args:
      config: the config of the tokenizer.
      source: the source of the training text.
      fingerprints: the fingerprint of each component of the source.
      cache: the directory of the cache.
    """
    loaded = None if config.path is None else config.load()
    weights = component_weights(source).tolist()
    key = digest(fingerprints, weights, to_json(config), FORMAT) if loaded is None else loaded.fingerprint
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
                    train = _train if config.train_bytes is None else functools.partial(workers.apart, _train)
                    train(config, texts, directory)
                else:
                    _save(loaded, directory)
    return directory


def _train(config: TokenizerConfig, texts: Iterable[str], directory: str) -> None:
    _save(config.build(texts), directory)


def _save(tokenizer: Tokenizer, directory: str) -> None:
    """Writes a tokenizer and its checksums to a directory atomically.

    Another machine may already have written the same content.
    """
    with replacing_folder(directory) as folder:
        tokenizer.save(folder)
        sums = {name: checksums.file_checksum(os.path.join(folder, name)) for name in os.listdir(folder)}
        checksums.write_json(os.path.join(folder, _CHECKSUMS), sums)


def _is_intact(directory: str) -> bool:
    """Returns True if a directory contains a tokenizer whose checksums match.

    Older versions wrote no checksums. For a directory without checksums, returns True if the directory exists.
    """
    if not os.path.exists(os.path.join(directory, _CHECKSUMS)):
        return os.path.isdir(directory)
    try:
        sums = checksums.read_json(os.path.join(directory, _CHECKSUMS)) or {}
        actual = {name: checksums.file_checksum(path_below(directory, name)) for name in sums}
    except (OSError, UserError):
        return False
    return bool(sums) and actual == sums


def component_weights(source: Source) -> np.ndarray:
    """Returns the mean mixture weight of each component over the training, [components], normalized to a sum of 1.

    For weights that depend on the sizes of the components, all components count as equally large.
    """
    stages = source.weight_stages([1] * len(source.components()))
    lengths = np.diff([start for start, _ in stages], append=1.0)
    weights = lengths @ np.array([weights for _, weights in stages], float)  # [stages] @ [stages, components]
    return weights / weights.sum()


def sample_texts(source: Source, limit: Optional[int], workers: Workers, split: str = "train") -> Iterable[str]:
    """Returns about `limit` bytes of the text of a split (None: all text).

    Components contribute in proportion to their weights, and the shards of a component contribute equal shares. If the
    training split is empty and the source holds out validation data, returns text of the validation split. The
    preparation replaces this split later.

    Raises:
      UserError: there is no text, and `limit` is not None.
    """
    for candidate in (split, *["valid"] * (split == "train" and any(c.holds_out for c in source.components()))):
        texts, consumed = iter(_texts_of_split(source, limit, workers, candidate)), []
        for text in texts:
            consumed.append(text)
            if text.strip():
                return itertools.chain(consumed, texts)
    if limit is None:  # there is only white space, which is enough for some tokenizers
        return consumed
    what = "text to train a tokenizer on" if split == "train" else "validation text"
    raise UserError(f"config.data.source holds no {what}: {source}")


def _texts_of_split(source: Source, limit: Optional[int], workers: Workers, split: str) -> Iterable[str]:
    components = source.components()
    if limit is None:
        documents = (
            document
            for component in components
            for shard in component.shards(split)
            for document in component.read(shard, collections.Counter())
        )
        return (piece for document in documents for text in texts_of(document) for piece in shards.split_text(text))
    tasks = []
    for component, weight in zip(components, component_weights(source), strict=True):
        chosen = component.shards(split)
        chosen = chosen[:: -(-len(chosen) // _SAMPLED_SHARDS) or 1]
        share = int(np.ceil(limit * weight / max(len(chosen), 1)))
        tasks += [(len(tasks) + i, component, shard, share) for i, shard in enumerate(chosen) if share]
    samples = dict(workers.run(_sample_shard, tasks))
    return [text for i in range(len(tasks)) for text in samples[i]]


def _sample_shard(i: int, source: Source, shard: Shard, limit: int) -> tuple[int, list[str]]:
    """Returns `i` and about the first `limit` bytes of the text of a shard, as a list of strings."""
    sample = []
    for document in until_stopped(source.read(shard, collections.Counter())):
        for text in texts_of(document):
            text = text[:limit] if isinstance(text, bytearray) else text[:limit].encode()[:limit]
            sample.append(text.decode(errors="ignore"))
            limit -= len(text)
        if limit <= 0:
            break
    return i, sample
