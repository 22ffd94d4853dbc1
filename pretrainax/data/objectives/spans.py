"""Span corruption: the encoder reads the text with holes, the decoder writes what was in them."""

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import numpy as np

from pretrainax.config import UserError
from pretrainax.data.objectives.base import Lengths, Objective


class Noise(NamedTuple):
    """How many of a window's tokens are dropped, and in how many spans."""

    tokens: int
    spans: int


def noise_of(raw: int, density: float, mean_span_length: float) -> Noise:
    """The published counts (Raffel et al. 2020, section 3.1.4): 568 raw tokens, 0.15, 3.0 -> 85 tokens in 28 spans.

    At least one token goes and one stays; spans are parted by text, so there are no more spans than tokens that stay.
    """
    tokens = min(max(round(raw * density), 1), raw - 1)
    return Noise(tokens, min(max(round(tokens / mean_span_length), 1), tokens, raw - tokens))


def corrupted_lengths(raw: int, density: float, mean_span_length: float) -> Lengths:
    """Inputs are the tokens that stay, a sentinel a span and the end; targets those that go, and as many more."""
    noise = noise_of(raw, density, mean_span_length)
    return Lengths(raw, raw - noise.tokens + noise.spans + 1, noise.tokens + noise.spans + 1)


@functools.lru_cache(maxsize=64)
def span_lengths(sequence_length: int, density: float, mean_span_length: float) -> Lengths:
    """The most raw tokens whose corrupted form, with its end of sequence, fits: 512, 0.15, 3.0 -> (568, 512, 114).

    Inputs fill the sequence length, or are one shorter where so much is dropped that it bounds the spans.
    """

    raw = sequence_length - 1  # each dropped span leaves at most its length: this many always fit
    while corrupted_lengths(raw + 1, density, mean_span_length).inputs <= sequence_length:
        raw += 1
    return corrupted_lengths(raw, density, mean_span_length)


def random_partition(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """[parts] positive integers that add up to `total`, every such sequence equally likely."""
    cuts = np.sort(rng.choice(total - 1, parts - 1, replace=False, shuffle=False)) + 1
    return np.diff(cuts, prepend=0, append=total)


def noise_mask(raw: int, density: float, mean_span_length: float, rng: np.random.Generator) -> np.ndarray:
    """Which tokens are dropped, [raw] bool: text and noise in turn, text first, both of randomly parted lengths."""
    noise = noise_of(raw, density, mean_span_length)
    runs = np.empty(2 * noise.spans, np.int64)
    runs[0::2] = random_partition(raw - noise.tokens, noise.spans, rng)
    runs[1::2] = random_partition(noise.tokens, noise.spans, rng)
    return np.repeat(np.arange(2 * noise.spans) % 2 == 1, runs)


def _fold(tokens: np.ndarray, folded: np.ndarray, sentinels: np.ndarray, end: int) -> np.ndarray:
    """`tokens` with each run of `folded` as one sentinel, the first as sentinels[0] and so on, and `end` appended."""
    starts = folded.copy()
    starts[1:] &= ~folded[:-1]
    marked = tokens.copy()
    marked[starts] = sentinels[: np.count_nonzero(starts)]
    return np.append(marked[starts | ~folded], np.int32(end))


def corrupt(tokens: np.ndarray, mask: np.ndarray, vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a window whose tokens under `mask` are dropped; see SpanCorruption for an example.

    `mask` must leave the first token: the n-th run of text then comes before the n-th span, so that both sides name
    span n by sentinel n.
    """
    assert not mask[0], "a span at the very start would shift the sentinels of the targets"
    sentinels = np.asarray(vocabulary.sentinels, np.int32)
    return _fold(tokens, mask, sentinels, vocabulary.eos), _fold(tokens, ~mask, sentinels, vocabulary.eos)


@dataclasses.dataclass
class SpanCorruption(Objective):
    """T5's denoising task (Raffel et al. 2020, section 3.1.4 and figure 2).

    `Thank you for inviting me to your party last week`, with `for inviting` and `last` dropped, becomes

        encoder_tokens  Thank you <extra_id_0> me to your party <extra_id_1> week </s>
        targets         <extra_id_0> for inviting <extra_id_1> last <extra_id_2> </s>
        tokens          <pad> <extra_id_0> for inviting <extra_id_1> last <extra_id_2>

    `tokens`, what the decoder reads, are the targets shifted right, with <pad> as T5's start. A sampled window ends
    with a span, as in T5's code, so its targets have no last sentinel (<extra_id_2> above). Every row has the same
    lengths and needs no padding.
    """

    noise_density: float = 0.15  # of the tokens are dropped
    mean_span_length: float = 3.0  # tokens

    families: ClassVar[tuple[str, ...]] = ("encoder_decoder",)
    special_tokens: ClassVar[tuple[str, ...]] = ("eos", "pad")
    tokenizers: ClassVar[str] = "Unigram"
    shortest: ClassVar[int] = 3  # a token, a sentinel, the end

    def field_problems(self):
        if not 0 < self.noise_density < 1:
            yield f"config.objective.noise_density is {self.noise_density}, it must be in (0, 1)"
        if not self.mean_span_length >= 1:
            yield f"config.objective.mean_span_length is {self.mean_span_length}, it must be at least 1"

    def lengths(self, sequence_length):
        return span_lengths(sequence_length, self.noise_density, self.mean_span_length)

    def check_vocabulary(self, vocabulary, sequence_length):
        super().check_vocabulary(vocabulary, sequence_length)
        spans = noise_of(self.lengths(sequence_length).raw, self.noise_density, self.mean_span_length).spans
        if spans > len(vocabulary.sentinels):
            raise UserError(
                f"the tokenizer has {len(vocabulary.sentinels)} sentinels, rows of config.data.sequence_length "
                f"{sequence_length} have {spans} spans: set config.tokenizer to Unigram with num_sentinels >= {spans}, "
                "or raise config.objective.mean_span_length"
            )

    def measure(self, raw):
        return corrupted_lengths(raw, self.noise_density, self.mean_span_length)

    def example(self, text, rng, vocabulary):
        tokens = text.tokens
        mask = noise_mask(len(tokens), self.noise_density, self.mean_span_length, rng)
        inputs, targets = corrupt(tokens, mask, vocabulary)
        decoder_tokens = np.empty_like(targets)
        decoder_tokens[0], decoder_tokens[1:] = vocabulary.pad, targets[:-1]
        return {
            "encoder_tokens": inputs,
            "encoder_segment_ids": np.ones(len(inputs), np.int32),
            "encoder_positions": np.arange(len(inputs), dtype=np.int32),
            "tokens": decoder_tokens,
            "segment_ids": np.ones(len(targets), np.int32),
            "positions": np.arange(len(targets), dtype=np.int32),
            "targets": targets,
            "loss_weights": np.ones(len(targets), np.float32),
        }

    def restore(self, example, vocabulary):
        inputs, targets = example["encoder_tokens"][:-1], example["targets"][:-1]  # without the ends of sequence
        starts = np.flatnonzero(np.isin(targets, vocabulary.sentinels))
        spans = {int(span[0]): span[1:] for span in np.split(targets, starts)[1:]}
        return np.concatenate([spans[t] if t in spans else [t] for t in inputs.tolist()]).astype(np.int32)
