"""Downloads a run's corpora from an object store and verifies their checksums, in the background during training."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import jax

from pretrainax.config import DataConfig
from pretrainax.data.corpus import Corpus
from pretrainax.data.corpus_check import CorpusCheck
from pretrainax.data.shard_cache import ShardCache
from pretrainax.files.paths import is_url


@contextlib.contextmanager
def checked_corpora(data: DataConfig, corpora: Sequence[Corpus], note: Callable[[str], None]) -> Iterator[CorpusCheck]:
    """Verifies the corpora's checksums in the background while the context is open; logs which files were not verified.

    Args:
      corpora: the corpora in download order; files beyond `config.data.keep_bytes` are not downloaded or verified.
      note: logs a line.

    Raises:
      UserError: a file is damaged.
    """
    # With an object store, each process has its own local copy and checks all of its files.
    process = (0, 1) if is_url(data.cache_dir) else (jax.process_index(), jax.process_count())
    with CorpusCheck(corpora, *process, ShardCache(corpora, data.keep_bytes).fetch) as corpus_check:
        for directory in corpus_check.unknown:
            note(f"{directory} has no checksums: an older version prepared it")
        yield corpus_check
        corpus_check.raise_if_damaged()
        if corpus_check.elsewhere:
            note(
                f"{corpus_check.elsewhere:,} token files are beyond config.data.keep_bytes={data.keep_bytes:,}: they "
                f"stay in {data.cache_dir}, where the run read them by range without verifying their checksums"
            )
        if unverified := corpus_check.left:
            note(f"the run ended before the checksums of {unverified:,} corpus files were verified")
