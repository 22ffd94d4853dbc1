"""Looks after the text of a run beside its steps: brings it where it is in a store, and compares its checksums."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import jax

from pretrainax.config import DataConfig
from pretrainax.data.corpus import Corpus
from pretrainax.data.corpus_check import CorpusCheck
from pretrainax.data.kept_shards import KeptShards
from pretrainax.files.paths import is_url


@contextlib.contextmanager
def checked_texts(data: DataConfig, corpora: Sequence[Corpus], note: Callable[[str], None]) -> Iterator[CorpusCheck]:
    """Yields the check of corpora that goes on beside what reads them; says which of them have no checksums, and how
    much was left when that was over; raises UserError where some of the text is damaged.

    Args:
      corpora: in the order in which they are brought, as far as there is room.
      note: takes a line for people.
    """
    share = (0, 1) if is_url(data.cache_dir) else (jax.process_index(), jax.process_count())  # of which each has a copy
    with CorpusCheck(corpora, *share, KeptShards(corpora, data.keep_bytes).bring) as corpus_check:
        for directory in corpus_check.unknown:
            note(f"{directory} has no checksums to compare with: it was prepared before there were any")
        yield corpus_check
        corpus_check.raise_if_damaged()
        if corpus_check.elsewhere:
            note(
                f"{corpus_check.elsewhere:,} files of tokens are beyond config.data.keep_bytes={data.keep_bytes:,}: "
                f"they stay in {data.cache_dir}, were read there by range, and not compared with their checksums"
            )
        if left := corpus_check.left:
            note(f"the checksums of {left:,} files of the corpus were not compared: the run was over")
