"""Looks after the text of a run beside its steps: brings it where it is in a store, and compares its checksums."""

import contextlib
from collections.abc import Iterator

import jax

from pretrainax.config.paths import is_url
from pretrainax.data.corpus_check import CorpusCheck
from pretrainax.data.kept_shards import KeptShards
from pretrainax.training.metrics_writer import MetricsWriter
from pretrainax.training.setup import Run


@contextlib.contextmanager
def checked_texts(run: Run, writer: MetricsWriter) -> Iterator[CorpusCheck]:
    """Yields the check of the corpora that goes on beside the steps; says which of them have no checksums, and how much
    was left when the steps were over; raises UserError where some of the text is damaged."""
    data, valid = run.experiment.data, run.prepared.valid
    corpora = [*valid, *(corpus for corpus in run.prepared.corpora if corpus not in valid)]  # which is read whole
    share = (0, 1) if is_url(data.cache_dir) else (jax.process_index(), jax.process_count())  # of which each has a copy
    with CorpusCheck(corpora, *share, KeptShards(corpora, data.keep_bytes).bring) as corpus_check:
        for directory in corpus_check.unknown:
            writer.note(f"{directory} has no checksums to compare with: it was prepared before there were any")
        yield corpus_check
        corpus_check.raise_if_damaged()
        if corpus_check.elsewhere:
            writer.note(
                f"{corpus_check.elsewhere:,} files of tokens are beyond config.data.keep_bytes={data.keep_bytes:,}: "
                f"they stay in {data.cache_dir}, were read there by range, and not compared with their checksums"
            )
        if left := corpus_check.left:
            writer.note(f"the checksums of {left:,} files of the corpus were not compared: the run was over")
