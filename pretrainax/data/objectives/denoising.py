"""BART's denoising: the encoder reads a corrupted text, the decoder writes the text as it was."""

import dataclasses
import math
from typing import ClassVar, NamedTuple, Optional

import numpy as np

from pretrainax.data.batch import Lengths
from pretrainax.data.objectives.base import Objective, Statistic
from pretrainax.data.objectives.spans import encoder_decoder_example, encoder_decoder_prompt


class Counts(NamedTuple):
    """Numbers of the tokens of a text that go, by the way they go."""

    infilled: int
    masked: int
    deleted: int


def permute_sentences(tokens: np.ndarray, ends: np.ndarray, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Moves sentences, which end at `ends`: ceil(rate * count) of them change places among each other."""
    sentences = np.split(tokens, ends[:-1])
    count = math.ceil(rate * len(sentences) - 1e-6)  # 0.07 * 100 is 7.000000000000001
    places = rng.permutation(len(sentences))[:count]
    order = np.arange(len(sentences))
    order[places] = rng.permutation(places)
    return np.concatenate([sentences[i] for i in order])


def draw_spans(length: int, infilled: int, mean: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draws where spans start and how long they are, int64 [spans] both: `infilled` tokens in all.

    Lengths are drawn of a Poisson distribution until there are enough tokens; the last span is cut to what is left.
    All spans, also those of length 0, are shuffled among the tokens that stay, every order equally likely. There are
    no more spans than tokens in them, so that the text does not grow: where so many have too few, the last has more.
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
    """Returns `tokens` without those under `dropped` (bool), with a `mask` before each place in `masks` (sorted).

    So a token is masked that is dropped and has a mask at its place, a span that is dropped and has one at its start.
    """
    kept = ~dropped
    before = np.zeros(len(tokens) + 1, np.int64)  # tokens that stay before each place
    kept.cumsum(out=before[1:])
    noised = np.full(before[-1] + len(masks), mask, np.int32)
    is_text = np.ones(len(noised), bool)
    is_text[before[masks] + np.arange(len(masks))] = False
    noised[is_text] = tokens[kept]
    return noised


@dataclasses.dataclass
class Denoising(Objective):
    """BART's pretraining (Lewis et al. 2019, sections 2.2 and 5.1): text infilling and sentence permutation.

    What the paper's figure 2 makes of the text `A B C . D E .`:

        sentence permutation  D E . A B C .   a share of the sentences change places
        text infilling        A _ . D _ E .   each span one <mask>; their lengths, 0 too, are of a Poisson distribution
        token masking         A _ C . _ E .   each token one <mask>
        token deletion        A C . E .       without a trace
        document rotation     C . D E . A B   begins with any of its tokens

    Each has a rate, and those above 0 are done in this order; infilling, masking and deletion share no token. With the
    first two, the text may become

        encoder_tokens  <s> D _ E . A _ . </s>
        targets         <s> A B C . D E . </s>
        tokens          </s> <s> A B C . D E .

    `tokens`, what the decoder reads, are the targets shifted right, with </s> as BART's start. Both sides end with </s>
    also where a document is cut. NOTE Then it is not to be predicted, unlike in BART: its weight is 0.
    """

    infilling_rate: float = 0.3  # of the tokens are in spans
    mean_span_length: float = 3.0  # of the Poisson distribution
    permutation_rate: float = 1.0  # of the sentences change places
    masking_rate: float = 0.0  # of the tokens are masked
    deletion_rate: float = 0.0  # of the tokens are deleted
    rotation_rate: float = 0.0  # of the texts are rotated

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
        if self._lost > 1 + 1e-9:  # 0.9 + 0.1 may exceed 1 by a rounding error
            yield (
                f"config.objective.infilling_rate {self.infilling_rate} + masking_rate {self.masking_rate} + "
                f"deletion_rate {self.deletion_rate} is more than 1"
            )
        if not self.mean_span_length >= 1:
            yield f"config.objective.mean_span_length is {self.mean_span_length}, it must be at least 1"

    @property
    def _lost(self) -> float:
        """Returns the tokens that the encoder does not read."""
        return self.infilling_rate + self.masking_rate + self.deletion_rate

    def lengths(self, sequence_length):
        return self.measure(sequence_length - 2)

    def measure(self, raw):
        return Lengths(raw, raw + 2, raw + 2)

    def counts(self, length: int) -> Counts:
        """Returns the numbers for a text without its end."""
        infilled = min(round(self.infilling_rate * length), length)
        masked = min(round(self.masking_rate * length), length - infilled)
        return Counts(infilled, masked, min(round(self.deletion_rate * length), length - infilled - masked))

    def decoder_start(self, vocabulary):
        return vocabulary.eos

    def example(self, text, rng, vocabulary):
        tokens, bos, eos = text.tokens, vocabulary.bos, vocabulary.eos
        is_end = bool(tokens[-1] == eos)
        tokens = tokens[: len(tokens) - is_end]
        noised = self._noised(tokens, text.parts, rng, vocabulary.mask)
        inputs, targets = (np.concatenate([[bos], x, [eos]]).astype(np.int32) for x in (noised, tokens))
        example = encoder_decoder_example(inputs, targets, self.decoder_start(vocabulary))
        example["loss_weights"][-1] = is_end
        return example

    def prompt(self, tokens, vocabulary):
        inputs = np.concatenate([[vocabulary.bos], tokens, [vocabulary.eos]]).astype(np.int32)
        return encoder_decoder_prompt(inputs, self.decoder_start(vocabulary))

    def _noised(self, tokens: np.ndarray, ends: Optional[np.ndarray], rng, mask: int) -> np.ndarray:
        length = len(tokens)
        if self.permutation_rate and length:
            ends = np.unique(np.minimum(ends, length))  # the end of a document may be a part of its own
            tokens = permute_sentences(tokens, ends, self.permutation_rate, rng)
        infilled, masked, deleted = self.counts(length)
        dropped, starts = np.zeros(length, bool), np.zeros(0, np.int64)
        if infilled:
            starts, lengths = draw_spans(length, infilled, self.mean_span_length, rng)
            dropped[np.repeat(starts - lengths.cumsum() + lengths, lengths) + np.arange(infilled)] = True
        if masked or deleted:
            single = rng.permutation(np.flatnonzero(~dropped))[: masked + deleted]
            dropped[single] = True
            starts = np.sort(np.concatenate([starts, single[:masked]]))
        tokens = corrupt(tokens, dropped, starts, mask)
        if self.rotation_rate and rng.random() < self.rotation_rate and len(tokens):
            tokens = np.roll(tokens, -int(rng.integers(len(tokens))))
        return tokens

    def restore(self, example, vocabulary):
        is_end = example["loss_weights"][-1] > 0
        return example["targets"][1:] if is_end else example["targets"][1:-1]

    def statistics(self, examples, vocabulary):
        texts = [example["targets"][1:-1] for example in examples]
        read = [example["encoder_tokens"][1:-1] for example in examples]
        total = sum(map(len, texts))
        masks = sum(int((tokens == vocabulary.mask).sum()) for tokens in read)
        counts = np.sum([self.counts(len(text)) for text in texts], axis=0)
        lost = total - sum(map(len, read)) + masks
        rounding = abs(float(counts.sum()) / max(total, 1) - self._lost)
        yield Statistic("lost tokens", lost / max(total, 1), self._lost, tolerance=rounding + 1e-6)
        if self.infilling_rate:
            spans = max(masks - int(counts[1]), 1)
            # Sampling, and the last span of each text, which is cut.
            tolerance = 5 * math.sqrt(self.mean_span_length / spans) + self.mean_span_length * len(texts) / spans
            yield Statistic("mean span length", int(counts[0]) / spans, self.mean_span_length, tolerance)
        moved = [
            not _is_part(tokens[tokens != vocabulary.mask], text) for tokens, text in zip(read, texts, strict=True)
        ]
        yield Statistic("texts in another order", float(np.mean(moved)))


def _is_part(some: np.ndarray, tokens: np.ndarray) -> bool:
    """Tells if `some` are of `tokens`, in their order."""
    rest = iter(tokens.tolist())
    return all(token in rest for token in some.tolist())
