"""Random tokens that replace a prepared corpus: benchmarks use the real objective and batches without text."""

from types import SimpleNamespace

import numpy as np

from pretrainax.config import Experiment, resolve_auto
from pretrainax.tokenization.base import TextTable, Vocabulary


class RandomCorpus:
    """A replacement for pretrainax.data.corpus.Corpus with documents of 512 tokens and sentences of 32."""

    num_tokens, num_documents, num_bytes = 1 << 24, 1 << 15, 1 << 26
    parts, skipped, fingerprint = None, {}, "random"
    document_ends = np.arange(512, num_tokens + 1, 512)
    part_ends = np.arange(32, num_tokens + 1, 32)

    is_in_store = False

    def __init__(self, directory: str, low: int, high: int):
        self.directory = directory  # for row plans
        self.low, self.high = low, high  # smallest token id, and largest token id + 1
        self.token_counts = np.zeros(high, np.int64)
        self.token_counts[low:] = self.num_tokens // (high - low)

    def check(self, name: str) -> None:
        """Accepts the corpus."""

    def tokens(self, start: int, length: int) -> np.ndarray:
        return np.random.default_rng(start).integers(self.low, self.high, length, dtype=np.int32)

    def window(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        return self.tokens(start, length), np.arange(length, dtype=np.int32) // 512 + 1


def random_data(directory: str, experiment: Experiment) -> SimpleNamespace:
    """Returns a replacement for `preparation.prepare.Prepared` with random tokens."""
    resolve_auto(experiment, getattr(experiment.tokenizer, "vocab_size", None))
    vocab_size = experiment.model.vocab_size
    sentinels = tuple(range(6, 106))
    vocabulary = Vocabulary(vocab_size, pad=0, eos=1, unk=2, cls=3, sep=4, mask=5, sentinels=sentinels)
    corpus = RandomCorpus(directory, len(sentinels) + 6, vocab_size)
    is_text = corpus.token_counts > 0
    tokenizer = SimpleNamespace(
        fingerprint="random",
        vocabulary=vocabulary,
        text_table=TextTable(is_text, np.where(is_text, 4, 0).astype(np.int32), adds_space=False),
        encode_batch=lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts],
    )
    own = (corpus,)
    return SimpleNamespace(tokenizer=tokenizer, train=own, valid=own, corpora=own, summary="random tokens")
