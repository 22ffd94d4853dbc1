"""UL2: a mixture of span corruption at several rates and prefix language modelling."""

import dataclasses
import math
from typing import ClassVar

import numpy as np

from pretrainax.data.batch import Lengths
from pretrainax.data.objectives.base import Objective, Statistic
from pretrainax.data.objectives.mixture import ObjectiveMixture
from pretrainax.data.objectives.spans import Denoiser, R, S, SpanCorruption, X, encoder_decoder_example


@dataclasses.dataclass
class SequentialDenoising(Denoiser):
    """UL2's S-denoiser: the encoder reads the start of a sequence, the decoder predicts the rest (Tay et al. 2022,
    section 3.1.2; the prefix language modelling of Raffel et al. 2020, section 3.2.3).

    The decoder predicts the last 1 to 2 * noise_density * n - 1 of n tokens, each number equally likely. The mean is
    noise_density * n. `Thank you for inviting me to your party last week` may become

        encoder_tokens  [S2S] Thank you for inviting me to your </s>
        targets         party last week </s>
        tokens          <pad> party last week

    [S2S] is `mode`, which may be several tokens. If the sequence is a single token, the encoder reads this token and
    the only target is </s>.
    """

    noise_density: float = 0.25  # mean fraction of the tokens that the decoder predicts
    mode: str = ""  # prepended to the encoder input: UL2's [S2S]

    families: ClassVar[tuple[str, ...]] = ("encoder_decoder",)

    def field_problems(self):
        if not 0 < self.noise_density <= 0.5:
            yield f"config.objective.noise_density is {self.noise_density}, it must be in (0, 0.5]"

    def lengths(self, sequence_length):
        return self.measure(sequence_length - self.mode_tokens)

    def measure(self, raw):
        most = self._max_predicted(raw)
        return Lengths(raw, raw - min(most, 1) + 1 + self.mode_tokens, most + 1)

    def _max_predicted(self, raw: int) -> int:
        """Returns the maximum number of tokens of a sequence of `raw` tokens that the decoder predicts, without EOS."""
        return min(max(round(2 * self.noise_density * raw) - 1, 1), raw - 1)

    def example(self, text, rng, vocabulary):
        tokens, end = text.tokens, np.array([vocabulary.eos], np.int32)
        most = self._max_predicted(len(tokens))
        start = len(tokens) - (int(rng.integers(1, most + 1)) if most else 0)
        inputs, targets = (np.concatenate([part, end]) for part in (tokens[:start], tokens[start:]))
        return encoder_decoder_example(self.read_first(inputs), targets, vocabulary.pad)

    def restore(self, example, vocabulary):
        return np.concatenate([self.without_mode(example["encoder_tokens"])[:-1], example["targets"][:-1]])

    def statistics(self, examples, vocabulary):
        raw = np.array([len(self.restore(example, vocabulary)) for example in examples])
        most = np.array([self._max_predicted(n) for n in raw.tolist()])
        expected = np.where(most > 0, (most + 1) / 2, 0).sum() / raw.sum()
        deviation = math.sqrt(((np.maximum(most, 1) ** 2 - 1) / 12).sum()) / raw.sum()  # of uniform distributions
        yield Statistic(
            "noise density",
            float(sum(len(example["targets"]) - 1 for example in examples) / raw.sum()),
            expected=self.noise_density,
            tolerance=5 * deviation + abs(float(expected) - self.noise_density) + 1e-6,
        )


def _ul2() -> tuple[Objective, ...]:
    """Returns the seven denoisers of UL2."""
    return (
        SpanCorruption(0.15, 3.0, mode=R),
        SpanCorruption(0.15, 8.0, mode=R),
        SpanCorruption(0.5, 3.0, mode=X),
        SpanCorruption(0.5, 8.0, mode=X),
        SpanCorruption(0.15, 64.0, mode=X),
        SpanCorruption(0.5, 64.0, mode=X),
        SequentialDenoising(0.25, mode=S),
    )


def _ul2r() -> tuple[Objective, ...]:
    """Returns the denoisers of UL2R, in the order of the weights of UL2R."""
    return (
        SequentialDenoising(0.5, mode=S),
        SpanCorruption(0.15, 3.0, mode=R),
        SpanCorruption(0.15, 32.0, mode=X),
        SpanCorruption(0.5, 3.0, mode=X),
    )


@dataclasses.dataclass
class MixtureOfDenoisers(ObjectiveMixture):
    """UL2's seven denoisers with equal weights (Tay et al. 2022, section 3.1.2 and table 1).

    Two are regular (R): spans of 3 or 8 tokens, 15 % of the text. Four are extreme (X): spans of 3, 8 or 64 tokens and
    50 % of the text, or spans of 64 tokens and 15 %. One is sequential (S): a prefix language model. With an
    X-denoiser, `Thank you for inviting me to your party last week` may become

        encoder_tokens  [NLG] Thank you <extra_id_0> to your <extra_id_1> </s>
        targets         <extra_id_0> for inviting me <extra_id_1> party last week </s>

    Spans of 3 tokens over half of the text need 126 sentinels for 512 inputs, more than T5 has.
    NOTE Span lengths are T5's random partitions, as in the paper's code (section 9.2). The paper's text (section 3.1.2)
    describes a normal distribution.
    """

    objectives: tuple[Objective, ...] = dataclasses.field(default_factory=_ul2)
    weights: tuple[float, ...] = (1.0,) * 7


@dataclasses.dataclass
class UL2R(ObjectiveMixture):
    """UL2R's mixture for continued pretraining (Tay et al. 2022b, arXiv 2210.11399, section 2.3): half of the rows S, a
    quarter R, a quarter X.

    A decoder uses this mixture inside DecoderOnly. The prefix of the S-denoiser ends at any position. The R-denoiser
    drops spans of 3 tokens, 15 % of the text. There are two X-denoisers with equal weights. One drops spans of 32
    tokens, 15 % of the text. The other drops spans of 3 tokens, 50 % of the text.
    """

    objectives: tuple[Objective, ...] = dataclasses.field(default_factory=_ul2r)
    weights: tuple[float, ...] = (0.5, 0.25, 0.125, 0.125)
