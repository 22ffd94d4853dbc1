"""BART's denoising: the encoder reads a corrupted sequence and the decoder predicts the original sequence."""

import dataclasses
import math
from typing import ClassVar, NamedTuple, Optional

import numpy as np

from pretrainax.data.batch import Lengths
from pretrainax.data.objectives.base import Objective, Statistic
from pretrainax.data.objectives.spans import encoder_decoder_example, encoder_decoder_prompt
from pretrainax.data.objectives.tolerances import one_sided_tolerance, rounded_tolerance


class Counts(NamedTuple):
    """The numbers of tokens to infill, mask and delete in a sequence."""

    infilled: int
    masked: int
    deleted: int


def permute_sentences(tokens: np.ndarray, ends: np.ndarray, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Permutes a random subset of ceil(rate * s) of the s sentences; the remaining sentences keep their positions.

    Args:
      tokens: [n] int32.
      ends: [s] end offset of each sentence in `tokens`.
      rate: the fraction of the sentences to permute.
    """
    sentences = np.split(tokens, ends[:-1])
    count = math.ceil(rate * len(sentences) - 1e-6)  # 0.07 * 100 is 7.000000000000001
    permuted = rng.permutation(len(sentences))[:count]
    order = np.arange(len(sentences))
    order[permuted] = rng.permutation(permuted)
    return np.concatenate([sentences[i] for i in order])


def draw_spans(length: int, infilled: int, mean: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draws the start positions and lengths of spans with `infilled` tokens in total, both [spans] int64.

    Lengths are drawn from a Poisson distribution with mean `mean` until they add up to `infilled`. The last span is
    truncated. The spans, including spans of length 0, are shuffled among the remaining tokens, with all orders equally
    likely. There are at most `infilled` spans, so that infilling never lengthens the sequence; if they are too short in
    total, the last one is extended.
    """
    lengths = rng.poisson(mean, infilled)
    total = lengths.cumsum()
    count = min(int(total.searchsorted(infilled)) + 1, infilled)
    lengths = lengths[:count]
    if count:
        lengths[-1] += infilled - total[count - 1]
        rng.shuffle(lengths)
    slots = rng.choice(length - infilled + count, count, replace=False, shuffle=False)
    slots.sort()
    return slots - np.arange(count) + lengths.cumsum() - lengths, lengths


def corrupt(tokens: np.ndarray, dropped: np.ndarray, masks: np.ndarray, mask: int) -> np.ndarray:
    """Removes the `dropped` tokens of a sequence and inserts the token id `mask` at the positions `masks`.

    To mask a token, drop it and put a mask at its position. To infill a span, drop it and put a single mask at its
    start.

    Args:
      tokens: [n] int32.
      dropped: [n] bool.
      masks: [m] sorted positions in `tokens`; each mask is inserted before the token at its position.
      mask: the id of the mask token.
    """
    remaining = ~dropped
    before = np.zeros(len(tokens) + 1, np.int64)  # number of remaining tokens before each position
    remaining.cumsum(out=before[1:])
    noised = np.full(before[-1] + len(masks), mask, np.int32)
    is_text = np.ones(len(noised), bool)
    is_text[before[masks] + np.arange(len(masks))] = False
    noised[is_text] = tokens[remaining]
    return noised


@dataclasses.dataclass
class Denoising(Objective):
    """BART's pretraining (Lewis et al. 2019, sections 2.2 and 5.1): text infilling and sentence permutation.

    Corruptions of the text `A B C . D E .` (figure 2 of the paper):

        sentence permutation  D E . A B C .   permutes a fraction of the sentences
        text infilling        A _ . D _ E .   replaces each span with one <mask>; Poisson lengths, which may be 0
        token masking         A _ C . _ E .   replaces each token with one <mask>
        token deletion        A C . E .       removes tokens
        document rotation     C . D E . A B   starts at a random token

    Each corruption has a rate. The corruptions with a rate above 0 are applied in this order. Infilling, masking and
    deletion affect disjoint sets of tokens. With the first two corruptions, the text may become

        encoder_tokens  <s> D _ E . A _ . </s>
        targets         <s> A B C . D E . </s>
        tokens          </s> <s> A B C . D E .

    `tokens`, the decoder inputs, are the targets shifted right by one, after the start token </s>, as in BART. Inputs
    and targets always end with </s>.
    NOTE If the sequence ends inside a document, the target </s> has loss weight 0. In BART, its weight is 1.
    """

    infilling_rate: float = 0.3  # fraction of the tokens that are replaced in spans
    mean_span_length: float = 3.0  # in tokens, the mean of the Poisson distribution
    permutation_rate: float = 1.0  # fraction of the sentences that are permuted
    masking_rate: float = 0.0  # fraction of the tokens that are masked
    deletion_rate: float = 0.0  # fraction of the tokens that are deleted
    rotation_rate: float = 0.0  # fraction of the sequences that are rotated

    families: ClassVar[tuple[str, ...]] = ("encoder_decoder",)
    special_tokens: ClassVar[tuple[str, ...]] = ("bos", "eos", "mask")
    tokenizers: ClassVar[str] = "ByteBPE with special_pieces roberta"
    shortest: ClassVar[int] = 3  # <s>, a token, </s>

    @property
    def unit(self) -> str:
        return "sentences" if self.permutation_rate else "tokens"

    def field_problems(self):
        rates = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name.endswith("_rate")}
        for name, rate in rates.items():
            if not 0 <= rate <= 1:
                yield f"config.objective.{name} is {rate}, it must be in [0, 1]"
        if not any(rates.values()):
            yield f"config.objective has no noise: set one of {', '.join(rates)} above 0"
        if self._removed_rate > 1 + 1e-9:  # 0.9 + 0.1 may exceed 1 by a rounding error
            yield (
                f"config.objective.infilling_rate {self.infilling_rate} + masking_rate {self.masking_rate} + "
                f"deletion_rate {self.deletion_rate} is more than 1"
            )
        if not self.mean_span_length >= 1:
            yield f"config.objective.mean_span_length is {self.mean_span_length}, it must be at least 1"

    @property
    def _removed_rate(self) -> float:
        """Returns the fraction of the tokens that are missing from the encoder input: infilled, masked or deleted."""
        return self.infilling_rate + self.masking_rate + self.deletion_rate

    def lengths(self, sequence_length):
        return self.measure(sequence_length - 2)

    def measure(self, raw):
        return Lengths(raw, raw + 2, raw + 2)

    def counts(self, length: int) -> Counts:
        """Returns how many tokens to infill, mask and delete in a sequence of `length` tokens, not counting EOS."""
        infilled = min(round(self.infilling_rate * length), length)
        masked = min(round(self.masking_rate * length), length - infilled)
        return Counts(infilled, masked, min(round(self.deletion_rate * length), length - infilled - masked))

    def decoder_start(self, vocabulary):
        return vocabulary.eos if vocabulary.decoder_start is None else vocabulary.decoder_start

    def example(self, text, rng, vocabulary):
        tokens, bos, eos = text.tokens, vocabulary.bos, vocabulary.eos
        is_end = bool(tokens[-1] == eos)
        tokens = tokens[: len(tokens) - is_end]
        noised = self._corrupted_tokens(tokens, text.parts, rng, vocabulary.mask)
        inputs, targets = (np.concatenate([[bos], x, [eos]]).astype(np.int32) for x in (noised, tokens))
        example = encoder_decoder_example(inputs, targets, self.decoder_start(vocabulary))
        example["loss_weights"][-1] = is_end
        return example

    def prompt(self, tokens, vocabulary):
        inputs = np.concatenate([[vocabulary.bos], tokens, [vocabulary.eos]]).astype(np.int32)
        return encoder_decoder_prompt(inputs, self.decoder_start(vocabulary))

    def _corrupted_tokens(self, tokens: np.ndarray, ends: Optional[np.ndarray], rng, mask: int) -> np.ndarray:
        """Applies all corruptions to a sequence; `ends`, its sentences' end offsets, is used only to permute them."""
        length = len(tokens)
        if self.permutation_rate and length:
            ends = np.unique(np.minimum(ends, length))  # drops a last sentence that was only the EOS token
            tokens = permute_sentences(tokens, ends, self.permutation_rate, rng)
        infilled, masked, deleted = self.counts(length)
        dropped, starts = np.zeros(length, bool), np.zeros(0, np.int64)
        if infilled:
            starts, lengths = draw_spans(length, infilled, self.mean_span_length, rng)
            dropped[np.repeat(starts - lengths.cumsum() + lengths, lengths) + np.arange(infilled)] = True
        if masked or deleted:
            single_positions = rng.permutation(np.flatnonzero(~dropped))[: masked + deleted]
            dropped[single_positions] = True
            starts = np.sort(np.concatenate([starts, single_positions[:masked]]))
        tokens = corrupt(tokens, dropped, starts, mask)
        if self.rotation_rate and rng.random() < self.rotation_rate and len(tokens):
            tokens = np.roll(tokens, -int(rng.integers(len(tokens))))
        return tokens

    def restore(self, example, vocabulary):
        is_end = example["loss_weights"][-1] > 0
        return example["targets"][1:] if is_end else example["targets"][1:-1]

    def token_offsets(self, example, vocabulary):
        return np.arange(len(example["targets"])) - 1  # the first target is <s>

    def statistics(self, examples, vocabulary):
        originals = [example["targets"][1:-1] for example in examples]
        inputs = [example["encoder_tokens"][1:-1] for example in examples]
        total = sum(map(len, originals))
        num_masks = sum(int((tokens == vocabulary.mask).sum()) for tokens in inputs)
        counts = np.sum([self.counts(len(original)) for original in originals], axis=0)
        num_removed = total - sum(map(len, inputs)) + num_masks
        measured, rounded = num_removed / max(total, 1), float(counts.sum()) / max(total, 1)
        tolerance = rounded_tolerance(measured, self._removed_rate, rounded)
        yield Statistic("lost tokens", measured, self._removed_rate, tolerance)
        if self.infilling_rate:
            infilled, spans = int(counts[0]), max(num_masks - int(counts[1]), 1)
            lengths, sequences = np.unique([self.counts(len(o)).infilled for o in originals], return_counts=True)
            moments = [_moments_of_spans(int(n), self.mean_span_length) for n in lengths]
            mean, variance = sequences @ np.array(moments)
            deviation, measured = 5 * math.sqrt(variance), infilled / spans
            below = self.mean_span_length - infilled / max(mean + deviation, 1)
            above = infilled / max(mean - deviation, 1) - self.mean_span_length
            tolerance = one_sided_tolerance(measured, self.mean_span_length, below, above)
            yield Statistic("mean span length", measured, self.mean_span_length, tolerance)
        is_reordered = [
            not _is_subsequence(tokens[tokens != vocabulary.mask], original)
            for tokens, original in zip(inputs, originals, strict=True)
        ]
        yield Statistic("texts in another order", float(np.mean(is_reordered)))


def _moments_of_spans(infilled: int, mean: float) -> tuple[float, float]:
    """Computes the mean and variance of the number of spans that `draw_spans` draws to cover `infilled` tokens.

    More than k spans are necessary if k Poisson lengths add up to less than `infilled`; there are at most `infilled`.
    """
    from scipy.stats import poisson  # slow to import

    counts = np.arange(infilled)
    exceeds = poisson.cdf(infilled - 1, counts * mean)  # P(N > k)
    first_moment, second_moment = exceeds.sum(), ((2 * counts + 1) * exceeds).sum()
    return float(first_moment), float(second_moment - first_moment**2)


def _is_subsequence(candidate: np.ndarray, tokens: np.ndarray) -> bool:
    """Returns True if the tokens of `candidate` occur in `tokens` in the same order, not necessarily adjacent."""
    remaining = iter(tokens.tolist())
    return all(token in remaining for token in candidate.tolist())
