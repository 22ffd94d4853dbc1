"""UL2: span corruption of all kinds, and prefix language modelling, in one mixture."""

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
    """UL2's S-denoiser: the encoder reads the start of a text, the decoder writes the rest (Tay et al. 2022, section
    3.1.2; the prefix language modelling of Raffel et al. 2020, section 3.2.3).

    Of n tokens the last 1 to 2 * noise_density * n - 1 are to be written, each number equally likely, and so
    noise_density of them on average. `Thank you for inviting me to your party last week` may become

        encoder_tokens  [S2S] Thank you for inviting me to your </s>
        targets         party last week </s>
        tokens          <pad> party last week

    where [S2S] is `mode`, in as many tokens as the tokenizer makes of it. A single token is read, and the end of the
    text written.
    """

    noise_density: float = 0.25  # of the tokens are written, on average
    mode: str = ""  # read before the text: UL2's [S2S]

    families: ClassVar[tuple[str, ...]] = ("encoder_decoder",)

    def field_problems(self):
        if not 0 < self.noise_density <= 0.5:
            yield f"config.objective.noise_density is {self.noise_density}, it must be in (0, 0.5]"

    def lengths(self, sequence_length):
        return self.measure(sequence_length - self.room)

    def measure(self, raw):
        most = self._most(raw)
        return Lengths(raw, raw - min(most, 1) + 1 + self.room, most + 1)

    def _most(self, raw: int) -> int:
        """Counts the tokens of the longest rest."""
        return min(max(round(2 * self.noise_density * raw) - 1, 1), raw - 1)

    def example(self, text, rng, vocabulary):
        tokens, end = text.tokens, np.array([vocabulary.eos], np.int32)
        most = self._most(len(tokens))
        start = len(tokens) - (int(rng.integers(1, most + 1)) if most else 0)
        inputs, targets = (np.concatenate([part, end]) for part in (tokens[:start], tokens[start:]))
        return encoder_decoder_example(self.read_first(inputs), targets, vocabulary.pad)

    def restore(self, example, vocabulary):
        return np.concatenate([self.without_mode(example["encoder_tokens"])[:-1], example["targets"][:-1]])

    def statistics(self, examples, vocabulary):
        raw = np.array([len(self.restore(example, vocabulary)) for example in examples])
        most = np.array([self._most(n) for n in raw.tolist()])
        expected = np.where(most > 0, (most + 1) / 2, 0).sum() / raw.sum()
        deviation = math.sqrt(((np.maximum(most, 1) ** 2 - 1) / 12).sum()) / raw.sum()  # of uniform numbers
        yield Statistic(
            "noise density",
            float(sum(len(example["targets"]) - 1 for example in examples) / raw.sum()),
            asked=self.noise_density,
            tolerance=5 * deviation + abs(float(expected) - self.noise_density) + 1e-6,
        )


def _ul2() -> tuple[Objective, ...]:
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
    return (
        SequentialDenoising(0.5, mode=S),
        SpanCorruption(0.15, 3.0, mode=R),
        SpanCorruption(0.15, 32.0, mode=X),
        SpanCorruption(0.5, 3.0, mode=X),
    )


@dataclasses.dataclass
class MixtureOfDenoisers(ObjectiveMixture):
    """UL2's seven denoisers, equally often (Tay et al. 2022, section 3.1.2 and table 1).

    Two are regular (R), spans of 3 or 8 tokens and 15 % of the text; four extreme (X), spans of 3, 8 or 64 tokens and
    50 % of the text, or of 64 and 15 %; one is sequential (S), a prefix language model. `Thank you for inviting me to
    your party last week` may become, under an X-denoiser,

        encoder_tokens  [NLG] Thank you <extra_id_0> to your <extra_id_1> </s>
        targets         <extra_id_0> for inviting me <extra_id_1> party last week </s>

    Spans of 3 over half of the text need more sentinels than T5 has: of 512 inputs, 126.
    NOTE Span lengths are T5's random partitions, as in the paper's code (section 9.2); its text (section 3.1.2) says
    that they are normally distributed.
    """

    objectives: tuple[Objective, ...] = dataclasses.field(default_factory=_ul2)
    weights: tuple[float, ...] = (1.0,) * 7


@dataclasses.dataclass
class UL2R(ObjectiveMixture):
    """The mixture that goes on with the training of a model (Tay et al. 2022b, arXiv 2210.11399, section 2.3; for a
    decoder, in a DecoderOnly): half of the rows S, a quarter R, a quarter X.

    The prefix of S ends anywhere in the text. R has spans of 3 tokens and 15 % of the text; X, in equal parts, spans
    of 32 tokens, or 50 % of the text.
    """

    objectives: tuple[Objective, ...] = dataclasses.field(default_factory=_ul2r)
    weights: tuple[float, ...] = (0.5, 0.25, 0.125, 0.125)
