"""Span corruption: the encoder reads a sequence without some spans, and the decoder predicts the missing spans."""

import copy
import dataclasses
import functools
from typing import ClassVar, NamedTuple, Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.data.batch import Example, Lengths
from pretrainax.data.objectives.base import Objective, Statistic
from pretrainax.data.objectives.tolerances import rounded_tolerance


class Noise(NamedTuple):
    """The numbers of tokens and spans to drop from a sequence."""

    tokens: int
    spans: int


@functools.lru_cache(maxsize=4096)
def noise_counts(raw: int, density: float, mean_span_length: float) -> Noise:
    """Computes how many tokens and spans to drop from a sequence (Raffel et al. 2020, section 3.1.4).

    For example, density 0.15 and mean span length 3.0 result in 85 dropped tokens in 28 spans, for a sequence of 568
    tokens. At least one token is dropped and at least one remains. Spans are separated by remaining tokens, so there
    are at most as many spans as remaining tokens. Nothing is dropped from a single-token sequence.

    Args:
      raw: the number of tokens in the sequence.
      density: the fraction of the tokens to drop.
      mean_span_length: the mean length of the spans, in tokens.
    """
    tokens = min(max(round(raw * density), 1), raw - 1)
    return Noise(tokens, min(max(round(tokens / mean_span_length), 1), tokens, raw - tokens))


def corrupted_lengths(raw: int, density: float, mean_span_length: float) -> Lengths:
    """Computes how many input and target tokens result from corrupting a sequence of `raw` tokens.

    The inputs contain the remaining tokens and the targets contain the dropped tokens. Inputs and targets have one
    sentinel per span and end with EOS. For a sequence of a single token, the targets are the first sentinel and EOS, as
    in T5's code.
    """
    noise = noise_counts(raw, density, mean_span_length)
    return Lengths(raw, raw - noise.tokens + noise.spans + 1, noise.tokens + max(noise.spans, 1) + 1)


@functools.lru_cache(maxsize=64)
def span_lengths(sequence_length: int, density: float, mean_span_length: float) -> Lengths:
    """Computes the lengths of the longest sequence whose corrupted inputs fit into `sequence_length` tokens.

    The inputs have `sequence_length` tokens, or one token less if a high density limits the number of spans. For
    example, (512, 0.15, 3.0) results in raw=568, inputs=512, targets=114.
    """

    raw = sequence_length - 1  # always fits, because a sentinel is never longer than its span
    while corrupted_lengths(raw + 1, density, mean_span_length).inputs <= sequence_length:
        raw += 1
    return corrupted_lengths(raw, density, mean_span_length)


def random_partition(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Draws `parts` positive integers that add up to `total`, [parts] int64; all compositions are equally likely."""
    boundaries = np.empty(parts, np.int64)  # the last position of each interval
    boundaries[:-1] = rng.choice(total - 1, parts - 1, replace=False, shuffle=False)
    boundaries[-1] = total - 1
    boundaries.sort()
    boundaries[1:] -= boundaries[:-1].copy()
    boundaries[0] += 1
    return boundaries


def noise_mask(raw: int, density: float, mean_span_length: float, rng: np.random.Generator) -> np.ndarray:
    """Draws which tokens of a sequence to drop, as a mask [raw] bool that is True for dropped tokens.

    Runs of remaining and of dropped tokens alternate, with random lengths. The first run consists of remaining tokens.
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


def _collapse_spans(
    tokens: np.ndarray, mask: np.ndarray, sentinel_positions: np.ndarray, sentinels: np.ndarray, end: int
) -> np.ndarray:
    """Selects the tokens where `mask` is True, inserts sentinels at the given positions, and appends `end`."""
    with_sentinels, selected = tokens.copy(), mask.copy()
    with_sentinels[sentinel_positions], selected[sentinel_positions] = sentinels[: len(sentinel_positions)], True
    with_sentinels = with_sentinels[selected]
    collapsed = np.empty(len(with_sentinels) + 1, np.int32)
    collapsed[:-1], collapsed[-1] = with_sentinels, end
    return collapsed


def corrupt(tokens: np.ndarray, mask: np.ndarray, vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Splits a sequence into inputs (where `mask` is False) and targets (where it is True), with sentinels.

    See SpanCorruption for an example. The first token must not be dropped: the n-th run of remaining tokens then
    precedes the n-th span, so that sentinel n stands for span n in both inputs and targets.
    """
    assert not mask[0], "a span at the start would shift the sentinels of the targets"
    sentinel_positions = np.flatnonzero(mask[1:] > mask[:-1])  # the last remaining token before each span
    sentinels = np.array(vocabulary.sentinels[: len(sentinel_positions) + 1], np.int32)
    inputs = _collapse_spans(tokens, ~mask, sentinel_positions + 1, sentinels, vocabulary.eos)
    if not mask[-1]:
        sentinel_positions = np.append(sentinel_positions, len(mask) - 1)
    return inputs, _collapse_spans(tokens, mask, sentinel_positions, sentinels, vocabulary.eos)


def encoder_decoder_example(inputs: np.ndarray, targets: np.ndarray, start: int) -> Example:
    """Builds an example: the encoder reads `inputs`, the decoder reads `start` and all targets except the last."""
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
    """Builds an example without targets: the encoder reads `inputs`, and the decoder reads only `start`."""
    example = encoder_decoder_example(inputs, np.array([start], np.int32), start)
    return {name: x for name, x in example.items() if name not in ("targets", "loss_weights")}


R, S, X = "[NLU]", "[S2S]", "[NLG]"  # UL2's mode tokens, as the released checkpoints spell them
_MODE_LETTERS = {R: "R", S: "S", X: "X"}


class Denoiser(Objective):
    """Base class of objectives whose decoder predicts the tokens that are missing from the encoder input.

    Encoder inputs and targets end with </s>. `mode` is a word at the start of the encoder input that identifies a
    denoiser in a mixture (Tay et al. 2022, section 3.1.3). A denoiser with a mode can build and restore examples only
    after `bind`, which tokenizes the mode. Lengths are the same before and after `bind`: they reserve one token per
    byte of the mode, which is the maximum for any tokenizer, and one for the space that some tokenizers insert before a
    text.
    """

    special_tokens: ClassVar[tuple[str, ...]] = ("eos", "pad")
    tokenizers: ClassVar[str] = "Unigram"
    shortest: ClassVar[int] = 3  # a token, a sentinel and EOS
    rates: ClassVar[tuple[str, ...]] = ("noise_density",)  # names of the fields that identify the denoiser in metrics
    mode: str = ""
    _mode_token_ids: Optional[np.ndarray] = None

    @property
    def mode_tokens(self) -> int:
        """Returns the maximum number of tokens in `mode` for any tokenizer, or 0 without a mode."""
        return len(self.mode.encode()) + 1 if self.mode else 0

    @property
    def part(self) -> str:
        rates = [getattr(self, name) for name in self.rates]
        return "-".join([f"denoiser={_MODE_LETTERS.get(self.mode, type(self).__name__)}", *(f"{x:g}" for x in rates)])

    def bind(self, tokenizer):
        if not self.mode:
            return self
        bound = copy.copy(self)
        bound._mode_token_ids = tokenizer.encode(self.mode)
        if len(bound._mode_token_ids) > self.mode_tokens:
            raise UserError(
                f"config.objective.mode {self.mode!r} has {len(bound._mode_token_ids)} tokens, it must have at most "
                f"{self.mode_tokens}: set a word that the tokenizer splits into fewer tokens"
            )
        return bound

    def problems(self, experiment):
        length, min_length = experiment.data.sequence_length, self.shortest + self.mode_tokens
        if length < min_length:
            yield f"config.data.sequence_length is {length}, {type(self).__name__} needs at least {min_length}"
            return
        yield from super().problems(experiment)

    def prepend_mode(self, inputs: np.ndarray) -> np.ndarray:
        """Prepends the mode's token ids to the encoder inputs [n]; without a mode, returns the inputs unchanged."""
        if not self.mode:
            return inputs
        assert self._mode_token_ids is not None, "a denoiser with a mode must be bound to a tokenizer to make examples"
        return np.concatenate([self._mode_token_ids, inputs])

    def prompt(self, tokens, vocabulary):
        inputs = np.append(tokens, np.int32(vocabulary.eos))
        if self._mode_token_ids is not None:  # None: an unbound denoiser in a mixture; the prompt contains its mode
            inputs = self.prepend_mode(inputs)
        return encoder_decoder_prompt(inputs, self.decoder_start(vocabulary))

    def without_mode(self, inputs: np.ndarray) -> np.ndarray:
        """Removes the mode's token ids from the encoder inputs [n]."""
        return inputs if self._mode_token_ids is None else inputs[len(self._mode_token_ids) :]


@dataclasses.dataclass
class SpanCorruption(Denoiser):
    """T5's denoising objective, which drops random spans of tokens (Raffel et al. 2020, section 3.1.4 and figure 2).

    `Thank you for inviting me to your party last week`, with `for inviting` and `last` dropped, becomes

        encoder_tokens  Thank you <extra_id_0> me to your party <extra_id_1> week </s>
        targets         <extra_id_0> for inviting <extra_id_1> last <extra_id_2> </s>
        tokens          <pad> <extra_id_0> for inviting <extra_id_1> last <extra_id_2>

    `tokens`, the decoder inputs, are the targets shifted right by one, after the start token <pad>, as in T5. With
    randomly drawn spans, the sequence always ends with a span, as in T5's code. The targets then lack the last sentinel
    (<extra_id_2> above). All windows have the same lengths and need no padding.
    """

    noise_density: float = 0.15  # fraction of the tokens that are dropped
    mean_span_length: float = 3.0  # in tokens
    mode: str = ""  # prefix of the encoder input: UL2's [NLU] or [NLG]

    families: ClassVar[tuple[str, ...]] = ("encoder_decoder",)
    rates: ClassVar[tuple[str, ...]] = ("noise_density", "mean_span_length")

    def field_problems(self):
        if not 0 < self.noise_density < 1:
            yield f"config.objective.noise_density is {self.noise_density}, it must be in (0, 1)"
        if not self.mean_span_length >= 1:
            yield f"config.objective.mean_span_length is {self.mean_span_length}, it must be at least 1"

    def lengths(self, sequence_length):
        return self._add_mode_tokens(
            span_lengths(sequence_length - self.mode_tokens, self.noise_density, self.mean_span_length)
        )

    def measure(self, raw):
        return self._add_mode_tokens(corrupted_lengths(raw, self.noise_density, self.mean_span_length))

    def _add_mode_tokens(self, lengths: Lengths) -> Lengths:
        return lengths._replace(inputs=lengths.inputs + self.mode_tokens)

    def noise(self, sequence_length: int) -> Noise:
        """Computes how many tokens and spans are dropped from each row of `sequence_length` inputs."""
        return noise_counts(self.lengths(sequence_length).raw, self.noise_density, self.mean_span_length)

    def check_vocabulary(self, vocabulary, sequence_length):
        super().check_vocabulary(vocabulary, sequence_length)
        spans = self.noise(sequence_length).spans
        if spans > len(vocabulary.sentinels):
            raise UserError(
                f"the tokenizer has {len(vocabulary.sentinels)} sentinels, rows of config.data.sequence_length "
                f"{sequence_length} have {spans} spans: set config.tokenizer.num_sentinels >= {spans} (of Unigram, BPE "
                "or ByteBPE), or raise config.objective.mean_span_length"
            )

    def example(self, text, rng, vocabulary):
        mask = noise_mask(len(text.tokens), self.noise_density, self.mean_span_length, rng)
        inputs, targets = corrupt(text.tokens, mask, vocabulary)
        return encoder_decoder_example(self.prepend_mode(inputs), targets, self.decoder_start(vocabulary))

    def restore(self, example, vocabulary):
        inputs = self.without_mode(example["encoder_tokens"])[:-1]  # without EOS
        targets = example["targets"][:-1]
        starts = np.flatnonzero(np.isin(targets, vocabulary.sentinels))
        spans = {int(span[0]): span[1:] for span in np.split(targets, starts)[1:]}
        return np.concatenate([spans[t] if t in spans else [t] for t in inputs.tolist()]).astype(np.int32)

    def token_offsets(self, example, vocabulary):
        inputs, targets = self.without_mode(example["encoder_tokens"]), example["targets"]
        is_sentinel = np.isin(targets, vocabulary.sentinels)
        num_dropped = np.cumsum(~is_sentinel) - 1  # dropped tokens before each target
        positions = np.flatnonzero(np.isin(inputs, vocabulary.sentinels))
        num_kept = np.append(positions - np.arange(len(positions)), len(inputs))  # inputs before each span
        return num_dropped + num_kept[np.minimum(np.cumsum(is_sentinel) - 1, len(positions))]

    def statistics(self, examples, vocabulary):
        raw = np.array([len(self.restore(example, vocabulary)) for example in examples])
        num_spans = sum(int(np.isin(example["encoder_tokens"], vocabulary.sentinels).sum()) for example in examples)
        num_dropped = sum(len(example["targets"]) - 1 for example in examples)
        num_dropped -= sum(int(np.isin(example["targets"], vocabulary.sentinels).sum()) for example in examples)
        # The sequence length determines the numbers of dropped tokens and spans, so the rates differ from the config
        # only by rounding.
        published_counts = np.sum(
            [noise_counts(n, self.noise_density, self.mean_span_length) for n in raw.tolist()], axis=0
        )
        for name, measured, published, configured in (
            ("noise density", num_dropped / raw.sum(), published_counts[0] / raw.sum(), self.noise_density),
            (
                "mean span length",
                num_dropped / max(num_spans, 1),
                published_counts[0] / max(published_counts[1], 1),
                self.mean_span_length,
            ),
        ):
            tolerance = rounded_tolerance(float(measured), configured, float(published))
            yield Statistic(name, float(measured), configured, tolerance)
