"""Span corruption: the encoder reads a sequence without some spans, and the decoder predicts these spans."""

import copy
import dataclasses
import functools
from typing import ClassVar, NamedTuple, Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.data.batch import Example, Lengths
from pretrainax.data.objectives.base import Objective, Statistic


class Noise(NamedTuple):
    """The numbers of dropped tokens and of dropped spans in a sequence."""

    tokens: int
    spans: int


@functools.lru_cache(maxsize=4096)
def noise_counts(raw: int, density: float, mean_span_length: float) -> Noise:
    """Returns the published numbers of dropped tokens and spans (Raffel et al. 2020, section 3.1.4).

    568 tokens with density 0.15 and mean span length 3.0 give 85 dropped tokens in 28 spans. At least one token is
    dropped and at least one remains. Text separates the spans, so the number of spans is at most the number of
    remaining tokens. In a sequence of a single token, no token is dropped.
    """
    tokens = min(max(round(raw * density), 1), raw - 1)
    return Noise(tokens, min(max(round(tokens / mean_span_length), 1), tokens, raw - tokens))


def corrupted_lengths(raw: int, density: float, mean_span_length: float) -> Lengths:
    """Returns the lengths of a sequence of `raw` tokens after corruption.

    The inputs contain the remaining tokens and the targets contain the dropped tokens. Both have one sentinel per span
    and end with EOS. A sequence of one token also has targets, as in T5's code: the first sentinel, which marks that
    nothing follows, and EOS.
    """
    noise = noise_counts(raw, density, mean_span_length)
    return Lengths(raw, raw - noise.tokens + noise.spans + 1, noise.tokens + max(noise.spans, 1) + 1)


@functools.lru_cache(maxsize=64)
def span_lengths(sequence_length: int, density: float, mean_span_length: float) -> Lengths:
    """Returns the lengths of the longest sequence that fits after corruption: 512, 0.15, 3.0 -> (568, 512, 114).

    The inputs fill `sequence_length`, or are one token shorter if a high density limits the number of spans.
    """

    raw = sequence_length - 1  # always fits: a sentinel is at most as long as its span
    while corrupted_lengths(raw + 1, density, mean_span_length).inputs <= sequence_length:
        raw += 1
    return corrupted_lengths(raw, density, mean_span_length)


def random_partition(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Draws `parts` positive integers that add up to `total`, [parts], with all partitions equally likely."""
    last = np.empty(parts, np.int64)  # the last position of each part
    last[:-1] = rng.choice(total - 1, parts - 1, replace=False, shuffle=False)
    last[-1] = total - 1
    last.sort()
    last[1:] -= last[:-1].copy()
    last[0] += 1
    return last


def noise_mask(raw: int, density: float, mean_span_length: float, rng: np.random.Generator) -> np.ndarray:
    """Draws the mask of the dropped tokens, [raw] bool.

    Remaining and dropped tokens alternate in runs of random lengths. The first run remains.
    """
    noise = noise_counts(raw, density, mean_span_length)
    if not noise.spans:
        return np.zeros(raw, bool)
    runs = np.empty((noise.spans, 2), np.int64)
    runs[:, 0] = random_partition(raw - noise.tokens, noise.spans, rng)
    runs[:, 1] = random_partition(noise.tokens, noise.spans, rng)
    is_noise = np.zeros((noise.spans, 2), bool)
    is_noise[:, 1] = True
    return is_noise.ravel().repeat(runs.ravel())


def _fold(tokens: np.ndarray, mask: np.ndarray, places: np.ndarray, sentinels: np.ndarray, end: int) -> np.ndarray:
    """Returns the tokens under `mask`, with a sentinel at each of `places` outside of `mask`, and then the id `end`."""
    marked, selected = tokens.copy(), mask.copy()
    marked[places], selected[places] = sentinels[: len(places)], True
    marked = marked[selected]
    folded = np.empty(len(marked) + 1, np.int32)
    folded[:-1], folded[-1] = marked, end
    return folded


def corrupt(tokens: np.ndarray, mask: np.ndarray, vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Splits a sequence into inputs (tokens outside `mask`) and targets (tokens under `mask`), with sentinels.

    SpanCorruption has an example. `mask` must not drop the first token. The n-th run of text then precedes the n-th
    span, so that inputs and targets mark span n with sentinel n.
    """
    assert not mask[0], "a span at the start would shift the sentinels of the targets"
    before = np.flatnonzero(mask[1:] > mask[:-1])  # the last token of text before each span
    sentinels = np.array(vocabulary.sentinels[: len(before) + 1], np.int32)
    inputs = _fold(tokens, ~mask, before + 1, sentinels, vocabulary.eos)
    if not mask[-1]:
        before = np.append(before, len(mask) - 1)
    return inputs, _fold(tokens, mask, before, sentinels, vocabulary.eos)


def encoder_decoder_example(inputs: np.ndarray, targets: np.ndarray, start: int) -> Example:
    """Returns an example whose encoder reads `inputs` and whose decoder reads `start` and all but the last target."""
    decoder_tokens = np.empty_like(targets)
    decoder_tokens[0], decoder_tokens[1:] = start, targets[:-1]
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


def encoder_decoder_prompt(inputs: np.ndarray, start: int) -> Example:
    """Returns an example without targets, whose encoder reads `inputs` and whose decoder reads only `start`."""
    example = encoder_decoder_example(inputs, np.array([start], np.int32), start)
    return {name: x for name, x in example.items() if name not in ("targets", "loss_weights")}


R, S, X = "[NLU]", "[S2S]", "[NLG]"  # UL2's modes, as the released checkpoints write them
_LETTERS = {R: "R", S: "S", X: "X"}


class Denoiser(Objective):
    """Base class of objectives whose decoder predicts the tokens that the encoder input lacks.

    Encoder inputs and targets end with </s>. `mode` is a word before the encoder input that identifies a denoiser in a
    mixture (Tay et al. 2022, section 3.1.3). A denoiser with a mode can make and restore examples only after `bind`,
    which finds the token ids of the mode. Lengths do not depend on `bind`. They reserve one token per byte of the mode,
    the maximum of any tokenizer, and one token for the space that some tokenizers put before a text.
    """

    special_tokens: ClassVar[tuple[str, ...]] = ("eos", "pad")
    tokenizers: ClassVar[str] = "Unigram"
    shortest: ClassVar[int] = 3  # a token, a sentinel and EOS
    rates: ClassVar[tuple[str, ...]] = ("noise_density",)  # fields that identify the denoiser in metrics
    mode: str = ""
    _mode_ids: Optional[np.ndarray] = None

    @property
    def mode_tokens(self) -> int:
        """Returns the maximum number of tokens of the mode; 0 without a mode."""
        return len(self.mode.encode()) + 1 if self.mode else 0

    @property
    def part(self) -> str:
        rates = [getattr(self, name) for name in self.rates]
        return "-".join([f"denoiser={_LETTERS.get(self.mode, type(self).__name__)}", *(f"{x:g}" for x in rates)])

    def bind(self, tokenizer):
        if not self.mode:
            return self
        bound = copy.copy(self)
        bound._mode_ids = tokenizer.encode(self.mode)
        if len(bound._mode_ids) > self.mode_tokens:
            raise UserError(
                f"config.objective.mode {self.mode!r} has {len(bound._mode_ids)} tokens, it must have at most "
                f"{self.mode_tokens}: set a word that the tokenizer splits into fewer tokens"
            )
        return bound

    def problems(self, experiment):
        length, needed = experiment.data.sequence_length, self.shortest + self.mode_tokens
        if length < needed:
            yield f"config.data.sequence_length is {length}, {type(self).__name__} needs at least {needed}"
            return
        yield from super().problems(experiment)

    def read_first(self, inputs: np.ndarray) -> np.ndarray:
        """Returns encoder inputs with the token ids of the mode before them."""
        if not self.mode:
            return inputs
        assert self._mode_ids is not None, "a denoiser with a mode must be bound to a tokenizer to make examples"
        return np.concatenate([self._mode_ids, inputs])

    def prompt(self, tokens, vocabulary):
        inputs = np.append(tokens, np.int32(vocabulary.eos))
        if self._mode_ids is not None:  # an unbound denoiser is part of a mixture: the prompt contains a mode
            inputs = self.read_first(inputs)
        return encoder_decoder_prompt(inputs, self.decoder_start(vocabulary))

    def without_mode(self, inputs: np.ndarray) -> np.ndarray:
        """Returns encoder inputs without the token ids of the mode."""
        return inputs if self._mode_ids is None else inputs[len(self._mode_ids) :]


@dataclasses.dataclass
class SpanCorruption(Denoiser):
    """T5's denoising task (Raffel et al. 2020, section 3.1.4 and figure 2).

    `Thank you for inviting me to your party last week`, with `for inviting` and `last` dropped, becomes

        encoder_tokens  Thank you <extra_id_0> me to your party <extra_id_1> week </s>
        targets         <extra_id_0> for inviting <extra_id_1> last <extra_id_2> </s>
        tokens          <pad> <extra_id_0> for inviting <extra_id_1> last <extra_id_2>

    `tokens`, the decoder input, are the targets shifted right, with <pad> as start, as in T5. A sampled sequence ends
    with a span, as in T5's code, so its targets have no last sentinel (<extra_id_2> above). All windows have the same
    lengths and need no padding.
    """

    noise_density: float = 0.15  # fraction of the tokens that are dropped
    mean_span_length: float = 3.0  # in tokens
    mode: str = ""  # prepended to the encoder input: UL2's [NLU] or [NLG]

    families: ClassVar[tuple[str, ...]] = ("encoder_decoder",)
    rates: ClassVar[tuple[str, ...]] = ("noise_density", "mean_span_length")

    def field_problems(self):
        if not 0 < self.noise_density < 1:
            yield f"config.objective.noise_density is {self.noise_density}, it must be in (0, 1)"
        if not self.mean_span_length >= 1:
            yield f"config.objective.mean_span_length is {self.mean_span_length}, it must be at least 1"

    def lengths(self, sequence_length):
        return self._with_mode(
            span_lengths(sequence_length - self.mode_tokens, self.noise_density, self.mean_span_length)
        )

    def measure(self, raw):
        return self._with_mode(corrupted_lengths(raw, self.noise_density, self.mean_span_length))

    def _with_mode(self, lengths: Lengths) -> Lengths:
        return lengths._replace(inputs=lengths.inputs + self.mode_tokens)

    def check_vocabulary(self, vocabulary, sequence_length):
        super().check_vocabulary(vocabulary, sequence_length)
        spans = noise_counts(self.lengths(sequence_length).raw, self.noise_density, self.mean_span_length).spans
        if spans > len(vocabulary.sentinels):
            raise UserError(
                f"the tokenizer has {len(vocabulary.sentinels)} sentinels, rows of config.data.sequence_length "
                f"{sequence_length} have {spans} spans: set config.tokenizer to Unigram with num_sentinels >= {spans}, "
                "or raise config.objective.mean_span_length"
            )

    def example(self, text, rng, vocabulary):
        mask = noise_mask(len(text.tokens), self.noise_density, self.mean_span_length, rng)
        inputs, targets = corrupt(text.tokens, mask, vocabulary)
        return encoder_decoder_example(self.read_first(inputs), targets, vocabulary.pad)

    def restore(self, example, vocabulary):
        inputs = self.without_mode(example["encoder_tokens"])[:-1]  # without EOS
        targets = example["targets"][:-1]
        starts = np.flatnonzero(np.isin(targets, vocabulary.sentinels))
        spans = {int(span[0]): span[1:] for span in np.split(targets, starts)[1:]}
        return np.concatenate([spans[t] if t in spans else [t] for t in inputs.tolist()]).astype(np.int32)

    def statistics(self, examples, vocabulary):
        raw = np.array([len(self.restore(example, vocabulary)) for example in examples])
        spans = sum(int(np.isin(example["encoder_tokens"], vocabulary.sentinels).sum()) for example in examples)
        dropped = sum(len(example["targets"]) - 1 for example in examples)
        dropped -= sum(int(np.isin(example["targets"], vocabulary.sentinels).sum()) for example in examples)
        # The length of a sequence determines both counts, so the rates differ from the fields only by rounding.
        rounded = np.sum([noise_counts(n, self.noise_density, self.mean_span_length) for n in raw.tolist()], axis=0)
        for name, measured, published, asked in (
            ("noise density", dropped / raw.sum(), rounded[0] / raw.sum(), self.noise_density),
            ("mean span length", dropped / max(spans, 1), rounded[0] / max(rounded[1], 1), self.mean_span_length),
        ):
            yield Statistic(name, float(measured), asked, tolerance=abs(float(published) - asked) + 1e-6)
