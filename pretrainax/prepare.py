"""From a source of text to a tokenizer and token shards in the cache: `python -m pretrainax.prepare --config=...`.

Training does the same first. What is in the cache under the same fingerprint is used as it is; a run that was killed
goes on with the shards that are missing.
"""

import collections
import contextlib
import dataclasses
import errno
import fcntl
import functools
import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Optional

from tqdm import tqdm

from pretrainax.config import Experiment, UserError, to_json
from pretrainax.data import corpus
from pretrainax.data.corpus import Corpus
from pretrainax.data.files import digest
from pretrainax.data.sources import Source
from pretrainax.tokenizer import Tokenizer, TokenizerConfig, check_tokenizer, load_tokenizer

_FORMAT = 1  # of the files in the cache; another number, another cache
_SAMPLED_SHARDS = 256  # at most, to learn a vocabulary from


@dataclasses.dataclass(frozen=True)
class Prepared:
    tokenizer: Tokenizer
    train: tuple[Corpus, ...]  # one for each component of the source
    valid: tuple[Corpus, ...]
    summary: str  # a line about the two


def prepare(experiment: Experiment, report: Callable[[str], None] = print) -> Prepared:
    """Finds or makes the tokenizer and the corpus of a config. Raises a UserError when they cannot be had."""
    data, started = experiment.data, time.perf_counter()
    cache = os.path.abspath(os.path.expanduser(data.cache_dir))
    with _explained_errors(cache), Workers(data.prepare_workers) as workers:
        fingerprint = data.source.fingerprint()
        directory = _tokenizer(experiment.tokenizer, data.source, fingerprint, cache, workers, report)
        tokenizer = load_tokenizer(directory)
        check_tokenizer(tokenizer, experiment)
        key = digest(fingerprint, tokenizer.fingerprint, _FORMAT)
        splits = [
            _corpus(split, data.source, directory, os.path.join(cache, "corpora", key, split), key, workers, report)
            for split in ("train", "valid")
        ]
    seconds = f"prepared in {time.perf_counter() - started:.1f} s" if workers.worked else f"from {cache}"
    return Prepared(tokenizer, *((split,) for split in splits), summary=f"{_describe(*splits)}; {seconds}")


def _describe(train: Corpus, valid: Corpus) -> str:
    figures = [
        f"{split} {c.num_documents:,} documents, {c.num_bytes / 1e6:,.1f} MB, {c.num_tokens:,} tokens"
        for split, c in (("train", train), ("valid", valid))
    ]
    skipped = collections.Counter(train.skipped) + collections.Counter(valid.skipped)
    return "; ".join([*figures, *(f"skipped {count:,} {reason}" for reason, count in sorted(skipped.items()))])


# --- tokenizer -----------------------------------------------------------------------------------------------------


def _tokenizer(
    config: TokenizerConfig, source: Source, fingerprint: str, cache: str, workers: "Workers", report: Callable
) -> str:
    """The directory in the cache of the tokenizer that `config` names or, trained on `source`, makes."""
    loaded = None if config.path is None else config.load()
    key = digest(fingerprint, to_json(config), _FORMAT) if loaded is None else loaded.fingerprint
    directory = os.path.join(cache, "tokenizers", key)
    if not os.path.isdir(directory):
        with _alone(directory, report):
            if not os.path.isdir(directory):
                if loaded is None:
                    report("training the tokenizer")
                tokenizer = loaded or config.build(_sample(source, config.train_bytes, workers))
                temporary = f"{directory}.tmp"
                shutil.rmtree(temporary, ignore_errors=True)
                tokenizer.save(temporary)
                os.rename(temporary, directory)
    return directory


def _sample(source: Source, limit: Optional[int], workers: "Workers") -> Iterable[str]:
    """`limit` bytes of training text, as much from each of the shards (None: all of it)."""
    shards = source.shards("train")
    if limit is None:
        return itertools.chain.from_iterable(source.read(shard, collections.Counter()) for shard in shards)
    shards = shards[:: -(-len(shards) // _SAMPLED_SHARDS) or 1]
    tasks = [(i, source, shard, -(-limit // len(shards))) for i, shard in enumerate(shards)]
    samples = dict(workers.run(_sample_shard, tasks))
    texts = [text for i in range(len(tasks)) for text in samples[i]]
    if not any(map(str.strip, texts)):
        raise UserError(f"config.data.source holds no text to train a tokenizer on: {source}")
    return texts


def _sample_shard(i: int, source: Source, shard: Any, limit: int) -> tuple[int, list[str]]:
    texts = []
    for text in _until_stopped(source.read(shard, collections.Counter())):
        texts.append(text.encode()[:limit].decode(errors="ignore"))
        limit -= len(text.encode())
        if limit <= 0:
            break
    return i, texts


# --- corpus --------------------------------------------------------------------------------------------------------


def _corpus(
    split: str, source: Source, tokenizer: str, directory: str, key: str, workers: "Workers", report: Callable
) -> Corpus:
    if not corpus.is_complete(directory):
        with _alone(directory, report):
            if not corpus.is_complete(directory):
                _fill(split, source, tokenizer, directory, key, workers, report)
    opened = Corpus(directory)
    if not opened.num_documents:
        more = "" if split == "train" else "; set config.data.source.valid_path, or a larger valid_fraction"
        raise UserError(f"config.data.source holds no document for {split}{more}: {source}")
    return opened


def _fill(
    split: str, source: Source, tokenizer: str, directory: str, key: str, workers: "Workers", report: Callable
) -> None:
    os.makedirs(directory, exist_ok=True)
    for name in os.listdir(directory):
        if ".tmp" in name:  # of a run that was killed
            os.remove(os.path.join(directory, name))
    size = load_tokenizer(tokenizer).vocabulary.size
    shards = source.shards(split)
    missing = corpus.missing_shards(directory, len(shards), size)
    kept = f", {len(shards) - len(missing)} are there" if len(missing) < len(shards) else ""
    report(f"tokenizing {split}: {len(shards)} shards{kept}")
    tasks = [(i, source, shards[i], tokenizer, directory) for i in missing]
    for _ in _progress(workers.run(_write_shard, tasks), len(tasks), split, report):
        pass
    corpus.write_index(directory, len(shards), size, f"{key}-{split}")


def _write_shard(i: int, source: Source, shard: Any, tokenizer: str, directory: str) -> None:
    skipped = collections.Counter()
    documents = _until_stopped(source.read(shard, skipped))
    corpus.write_shard(directory, i, documents, skipped, _load_once(tokenizer))


_load_once = functools.lru_cache(maxsize=1)(load_tokenizer)


def _progress(results: Iterator, total: int, split: str, report: Callable) -> Iterator:
    """A bar on a terminal, else a line every ten seconds."""
    if sys.stderr.isatty():
        yield from tqdm(results, desc=f"tokenizing {split}", total=total, unit="shard", leave=False)
        return
    said = time.monotonic()
    for done, result in enumerate(results, start=1):
        if time.monotonic() - said > 10:
            report(f"tokenizing {split}: {done} of {total} shards")
            said = time.monotonic()
        yield result


# --- processes -----------------------------------------------------------------------------------------------------


class Workers:
    """Processes that are started when there is work for more than one. They end with this one, however it ends."""

    def __init__(self, count: int):
        """count: 0 is one a core, 1 is this process alone."""
        self._count = count or len(
            os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
        )
        self._context = multiprocessing.get_context("spawn")  # JAX and tokenizers have threads: no fork
        self._stop: Any = None  # tells workers that their results are no longer wanted
        self._pool: Optional[ProcessPoolExecutor] = None
        self.worked = False

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_) -> None:
        if self._pool is not None:
            self._stop.set()
            self._pool.shutdown(cancel_futures=True)

    def run(self, function: Callable, tasks: list[tuple]) -> Iterator:
        """function(*task) for each task, in the order in which they end."""
        self.worked = True
        if self._count == 1 or len(tasks) <= 1:
            yield from itertools.starmap(function, tasks)
            return
        if self._pool is None:
            self._stop = self._context.Event()
            self._pool = ProcessPoolExecutor(self._count, self._context, _start_worker, (self._stop,))
        try:
            for future in as_completed([self._pool.submit(function, *task) for task in tasks]):
                yield future.result()
        except BrokenProcessPool as e:
            raise UserError(
                "a process that tokenizes was killed, perhaps for want of memory: "
                f"config.data.prepare_workers is {self._count}, set it lower"
            ) from e


_stop: Any = None  # in a worker: the event of its Workers


def _start_worker(stop: Any) -> None:
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process

    def end_with_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _until_stopped(documents: Iterator[str]) -> Iterator[str]:
    for text in documents:
        if _stop is not None and _stop.is_set():
            raise InterruptedError("stopped by the process that prepares")
        yield text


# --- files ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone(directory: str, report: Callable) -> Iterator[None]:
    """Holds a lock beside `directory`, which the system takes back when a process dies."""
    os.makedirs(os.path.dirname(directory), exist_ok=True)
    with open(f"{directory}.lock", "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another process that prepares {directory}")
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _explained_errors(cache: str) -> Iterator[None]:
    """Turns a full disk, a cache that cannot be written and a file that cannot be read into one line."""
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"no space left in {cache}; what is done is kept: make room and run again, "
                "or set config.data.cache_dir to another disk"
            ) from e
        if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST):
            if str(e.filename).startswith(cache) or cache.startswith(str(e.filename)):
                raise UserError(
                    f"cannot write to {cache} ({e.strerror}); set config.data.cache_dir to a folder that can be written"
                ) from e
            raise UserError(f"cannot read {e.filename} ({e.strerror}); see config.data.source") from e
        raise


def main() -> None:
    from pretrainax import cli  # defines flags: not in the workers, which import this module too

    cli.run(lambda: print(prepare(cli.experiment()).summary) or 0)


if __name__ == "__main__":
    main()
