"""UL2: mixtures of prefix language modelling and of span corruption at several noise densities and span lengths."""

import dataclasses
import math
from typing import ClassVar

import numpy as np

from pretrainax.data.batch import Lengths
from pretrainax.data.objectives.base import Objective, Statistic
from pretrainax.data.objectives.mixture import ObjectiveMixture
from pretrainax.data.objectives.spans import Denoiser, R, S, SpanCorruption, X, encoder_decoder_example
from pretrainax.data.objectives.tolerances import rounded_tolerance


@dataclasses.dataclass
class SequentialDenoising(Denoiser):
    """UL2's S-denoiser: the encoder reads a prefix of a sequence, and the decoder predicts the remaining tokens.

    Sources: Tay et al. 2022, section 3.1.2; the prefix language modelling of Raffel et al. 2020, section 3.2.3.

    The decoder predicts the last k of n tokens. k is uniform between 1 and 2 * noise_density * n - 1, so its mean is
    noise_density * n. `Thank you for inviting me to your party last week` may become

        encoder_tokens  [S2S] Thank you for inviting me to your </s>
        targets         party last week </s>
        tokens          <pad> party last week

    [S2S] is the objective's `mode`, which the tokenizer may split into several tokens. If the sequence is a single
    token, the encoder reads it and the only target is </s>.
    """

    noise_density: float = 0.25  # mean fraction of the tokens of a sequence that the decoder predicts
    mode: str = ""  # prefix of the encoder input: UL2's [S2S]

    families: ClassVar[tuple[str, ...]] = ("encoder_decoder",)

    def field_problems(self):
        if not 0 < self.noise_density <= 0.5:
            yield f"config.objective.noise_density is {self.noise_density}, it must be in (0, 0.5]"

    def lengths(self, sequence_length):
        return self.measure(sequence_length - self.mode_tokens)

    def measure(self, raw):
        max_predicted = self._max_predicted(raw)
        return Lengths(raw, raw - min(max_predicted, 1) + 1 + self.mode_tokens, max_predicted + 1)

    def _max_predicted(self, raw: int) -> int:
        """Returns the maximum number of predicted tokens, not counting EOS, for a sequence of `raw` tokens."""
        return min(max(round(2 * self.noise_density * raw) - 1, 1), raw - 1)

    def example(self, text, rng, vocabulary):
        tokens, end = text.tokens, np.array([vocabulary.eos], np.int32)
        max_predicted = self._max_predicted(len(tokens))
        start = len(tokens) - (int(rng.integers(1, max_predicted + 1)) if max_predicted else 0)
        inputs, targets = (np.concatenate([part, end]) for part in (tokens[:start], tokens[start:]))
        return encoder_decoder_example(self.prepend_mode(inputs), targets, self.decoder_start(vocabulary))

    def restore(self, example, vocabulary):
        return np.concatenate([self.without_mode(example["encoder_tokens"])[:-1], example["targets"][:-1]])

    def token_offsets(self, example, vocabulary):
        start = len(self.without_mode(example["encoder_tokens"])) - 1  # without EOS
        return start + np.arange(len(example["targets"]))

    def statistics(self, examples, vocabulary):
        raw = np.array([len(self.restore(example, vocabulary)) for example in examples])
        max_predicted = np.array([self._max_predicted(n) for n in raw.tolist()])
        expected = np.where(max_predicted > 0, (max_predicted + 1) / 2, 0).sum() / raw.sum()
        deviation = math.sqrt(((np.maximum(max_predicted, 1) ** 2 - 1) / 12).sum()) / raw.sum()  # of uniform draws
        measured = float(sum(len(example["targets"]) - 1 for example in examples) / raw.sum())
        tolerance = rounded_tolerance(measured, self.noise_density, float(expected), sampling=5 * deviation)
        yield Statistic("noise density", measured, self.noise_density, tolerance)


def _ul2_denoisers() -> tuple[Objective, ...]:
    """Returns the seven denoisers of UL2: two R-denoisers, four X-denoisers and the S-denoiser."""
    return (
        SpanCorruption(0.15, 3.0, mode=R),
        SpanCorruption(0.15, 8.0, mode=R),
        SpanCorruption(0.5, 3.0, mode=X),
        SpanCorruption(0.5, 8.0, mode=X),
        SpanCorruption(0.15, 64.0, mode=X),
        SpanCorruption(0.5, 64.0, mode=X),
        SequentialDenoising(0.25, mode=S),
    )


def _ul2r_denoisers() -> tuple[Objective, ...]:
    """Returns the four denoisers of UL2R, in the order of `UL2R.weights`."""
    return (
        SequentialDenoising(0.5, mode=S),
        SpanCorruption(0.15, 3.0, mode=R),
        SpanCorruption(0.15, 32.0, mode=X),
        SpanCorruption(0.5, 3.0, mode=X),
    )


@dataclasses.dataclass
class MixtureOfDenoisers(ObjectiveMixture):
    """UL2's seven denoisers with equal weights (Tay et al. 2022, section 3.1.2 and table 1).

    - Two regular denoisers (R) drop 15 % of the tokens, in spans of 3 or 8 tokens.
    - Three extreme denoisers (X) drop 50 % of the tokens, in spans of 3, 8 or 64 tokens.
    - One extreme denoiser (X) drops 15 % of the tokens, in spans of 64 tokens.
    - The sequential denoiser (S) is a prefix language model.

    Span lengths are means. With an X-denoiser, `Thank you for inviting me to your party last week` may become

        encoder_tokens  [NLG] Thank you <extra_id_0> to your <extra_id_1> </s>
        targets         <extra_id_0> for inviting me <extra_id_1> party last week </s>

    Dropping half of the tokens in spans of 3 requires 126 sentinels for 512 inputs, more than T5 has.
    NOTE Span lengths are drawn by T5's random partition, as in the paper's code (section 9.2). The paper's text
    (section 3.1.2) describes a normal distribution.
    """

    objectives: tuple[Objective, ...] = dataclasses.field(default_factory=_ul2_denoisers)
    weights: tuple[float, ...] = (1.0,) * 7


@dataclasses.dataclass
class UL2R(ObjectiveMixture):
    """UL2R's mixture of denoisers for continued pretraining (Tay et al. 2022b, arXiv 2210.11399, section 2.3).

    - The S-denoiser makes half of the rows; its prefix ends at a uniformly drawn position.
    - The R-denoiser makes a quarter of the rows. It drops 15 % of the tokens, in spans of 3 tokens.
    - Two X-denoisers each make an eighth of the rows. The first drops 15 % of the tokens, in spans of 32 tokens. The
      second drops 50 % of the tokens, in spans of 3 tokens.

    To train a decoder, wrap this mixture in DecoderOnly.
    """

    objectives: tuple[Objective, ...] = dataclasses.field(default_factory=_ul2r_denoisers)
    weights: tuple[float, ...] = (0.5, 0.25, 0.125, 0.125)
