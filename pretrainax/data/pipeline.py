"""From a corpus to batches: which window each row is made of, the loader, and the check of what comes out.

Row i of a run is a pure function of (seed, i), so batch s is one of (seed, s): nothing has to be saved to resume, and
neither the number of processes nor of loader workers changes it.
"""

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from absl import flags

from pretrainax.config import ModelConfig, UserError
from pretrainax.data.objectives import Lengths, Objective, Text
from pretrainax.data.rows import fill_row

if TYPE_CHECKING:
    from pretrainax.data.corpus import Corpus
    from pretrainax.tokenizer import Vocabulary

_EXAMPLE, _EPOCH = 0, 1  # a seed's two streams of random numbers: by row, by epoch
_ROUNDS = 6


def _mix(x: int) -> int:
    """A 64-bit hash (the finaliser of SplitMix64: Steele, Lea and Flood 2014, figure 15)."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ x >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return x ^ x >> 31


def permute(index: int, size: int, keys: tuple[int, ...]) -> int:
    """Where `index` goes in a pseudo-random order of range(size), without a table of that order.

    A Feistel network permutes the numbers of as many bits; one that lands outside range(size) is permuted again until
    it is inside, which keeps the whole one-to-one (Black and Rogaway 2002, section 5). `keys` are an even number of
    64-bit integers.
    """
    bits = max(6, (size - 1).bit_length())  # with fewer, some orders come visibly more often than others
    while True:
        low, high = bits // 2, bits - bits // 2
        left, right = index >> high, index & (1 << high) - 1
        for key in keys:
            left, right = right, left ^ _mix(right + key & 0xFFFFFFFFFFFFFFFF) & (1 << low) - 1
            low, high = high, low
        index = left << high | right
        if index < size:
            return index


@functools.lru_cache(maxsize=8)
def _epoch_draws(seed: int, epoch: int, offsets: int) -> tuple[int, tuple[int, ...]]:
    """Where the first window of an epoch starts, in range(offsets), and the keys of its permutation."""
    rng = np.random.default_rng([seed, _EPOCH, epoch])
    return int(rng.integers(offsets)), tuple(rng.integers(2**64, size=_ROUNDS, dtype=np.uint64).tolist())


class Batches:
    """`batches[step]`: this process's rows of the global batch of a step, as a dict of arrays [b, ...].

    Process p of n holds rows [p * b, (p + 1) * b) with b = global_batch_size / n. Windows do not overlap and each is
    used once an epoch. With `shuffle` their order is new each epoch, and so is the token where the first one begins
    (what is left over at either end is less than a window); without, they come in order from the first token on.

    Raises UserError when the corpus is shorter than one window, when the processes do not divide the batch, and when
    the vocabulary lacks what the objective needs.
    """

    def __init__(
        self,
        corpus: "Corpus",
        objective: Objective,
        vocabulary: "Vocabulary",
        *,
        sequence_length: int,
        global_batch_size: int,
        seed: int,
        shuffle: bool = True,
        process_index: int = 0,
        process_count: int = 1,
    ):
        objective.check_vocabulary(vocabulary, sequence_length)
        if global_batch_size % process_count:
            raise UserError(
                f"config.train.global_batch_size {global_batch_size} is not a multiple of the {process_count} processes"
            )
        self.corpus, self.objective, self.vocabulary = corpus, objective, vocabulary
        self.global_batch_size, self.shuffle = global_batch_size, shuffle
        self.local_batch_size = global_batch_size // process_count
        self.first_row = process_index * self.local_batch_size
        self.seed = seed % 2**64  # NumPy takes no negative ones
        self.lengths = objective.lengths(sequence_length)
        self.raw = self.lengths.raw
        if corpus.num_tokens < self.raw:
            raise UserError(
                f"the corpus has {corpus.num_tokens} tokens, one row of config.data.sequence_length {sequence_length} "
                f"takes {self.raw}: set a smaller one, or give more text in config.data.source"
            )
        # Shuffled windows may start anywhere in the first window's length and must all fit nevertheless.
        spare = self.raw - 1 if shuffle else 0
        self.windows_per_epoch = max(1, (corpus.num_tokens - spare) // self.raw)
        self.offsets = min(spare, corpus.num_tokens - self.windows_per_epoch * self.raw) + 1

    def start(self, index: int) -> int:
        """The corpus position of the first token of row `index` of the run."""
        epoch, window = divmod(index, self.windows_per_epoch)
        if not self.shuffle:
            return window * self.raw
        offset, keys = _epoch_draws(self.seed, epoch, self.offsets)
        return offset + permute(window, self.windows_per_epoch, keys) * self.raw

    def example(self, index: int) -> dict[str, np.ndarray]:
        """Row `index` of the run."""
        tokens, segment_ids = self.corpus.window(self.start(index), self.raw)
        rng = np.random.default_rng([self.seed, _EXAMPLE, index])
        example = self.objective.example(Text(tokens, segment_ids), rng, self.vocabulary)
        return fill_row([example], self.lengths, self.vocabulary.pad or 0)

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        first = step * self.global_batch_size + self.first_row
        rows = [self.example(index) for index in range(first, first + self.local_batch_size)]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def iterate(batches: Batches, start: int, stop: int, workers: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """batches[start], ..., batches[stop - 1], made ahead of time: in a thread, or in `workers` processes.

    A Grain graph whose elements are whole batches, so that their order is that of the steps for any `workers`.
    Worker processes import the program's main module again and start in a few seconds.
    """
    import grain  # not at the top: it imports JAX, which making a batch does not need

    if not flags.FLAGS.is_parsed():  # Grain reads absl flags, which only programs run by absl.app have parsed
        flags.FLAGS.mark_as_parsed()
    dataset = grain.MapDataset.range(start, stop).map(batches.__getitem__)
    dataset = dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
    if workers:
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2))
    iterator = iter(dataset)
    try:
        yield from iterator
    finally:  # also where the loop that asks for batches is left early: ends the workers, frees what they made ahead
        iterator.close()


def check_batch(batch: dict[str, np.ndarray], model: ModelConfig, lengths: Lengths, batch_size: int) -> None:
    """Raises UserError, naming key, expected and got, unless `batch` is what `model` takes.

    Args:
      batch: arrays [B, ...]; keys, shapes and dtypes are spelled out in the code below.
      lengths: of the objective, for the run's sequence length.
      batch_size: B.
    """
    family, vocab_size = model.family, model.vocab_size
    text = lengths.targets if family == "encoder_decoder" else lengths.inputs  # T
    predicted = lengths.targets if "masked_positions" in batch else text  # K with the gathered head, else T
    ids = {"tokens": text, "targets": predicted}
    others = {"segment_ids": text, "positions": text}
    if family == "encoder":
        others["token_types"] = text
        if "masked_positions" in batch:
            others["masked_positions"] = predicted
    if family == "encoder_decoder":
        ids["encoder_tokens"] = lengths.inputs
        others |= {"encoder_segment_ids": lengths.inputs, "encoder_positions": lengths.inputs}

    for name, length in (ids | others | {"loss_weights": predicted}).items():
        dtype = np.dtype(np.float32 if name == "loss_weights" else np.int32)
        if name not in batch:
            raise UserError(f"batch has no {name!r}, the {family} needs {dtype} [{batch_size}, {length}]")
        got = batch[name]
        if got.shape != (batch_size, length) or got.dtype != dtype:
            raise UserError(f"batch[{name!r}] is {got.dtype} {list(got.shape)}, not {dtype} [{batch_size}, {length}]")
    for name in others:
        if batch[name].min() < 0:
            raise UserError(f"batch[{name!r}] has {batch[name].min()}, it must not be negative")
    for name in ids:
        low, high = batch[name].min(), batch[name].max()
        if low < 0 or high >= vocab_size:
            raise UserError(
                f"batch[{name!r}] has ids from {low} to {high}, config.model.vocab_size {vocab_size} takes 0 to "
                f"{vocab_size - 1}"
            )
    if "masked_positions" in others and batch["masked_positions"].max() >= text:
        raise UserError(f"batch['masked_positions'] has {batch['masked_positions'].max()}, rows have {text} tokens")
    weights = batch["loss_weights"]
    if not (np.isfinite(weights).all() and weights.min() >= 0 and weights.max() > 0):
        raise UserError("batch['loss_weights'] must be finite and not negative, and not all 0")
