"""Sequence-to-sequence learning: predicts the target of a pair from its source."""

import dataclasses
from typing import ClassVar, Optional

import numpy as np

from pretrainax.data.batch import Lengths
from pretrainax.data.objectives.base import Objective, Statistic
from pretrainax.data.objectives.spans import encoder_decoder_example, encoder_decoder_prompt


@dataclasses.dataclass
class SequenceToSequence(Objective):
    """Predicts each target token of a pair from the source and the preceding target tokens.

    Sources: Sutskever et al. 2014, arXiv 1409.3215, section 2; Vaswani et al. 2017, section 3.1.

    Requires a data source of pairs. `That is good.` and `Das ist gut.` become

        encoder_tokens  That is  good .   </s>
        targets         Das  ist gut  .   </s>
        tokens          <pad> Das ist gut .

    `tokens`, the decoder inputs, are the targets shifted right by one, after the start token <pad>, as in T5 and
    Marian. Sources and targets that are too long are truncated at the end, keeping </s>. A row may contain several
    pairs, which do not attend to each other.
    """

    target_length: Optional[int] = None  # maximum number of target tokens per row; None: config.data.sequence_length

    families: ClassVar[tuple[str, ...]] = ("encoder_decoder",)
    special_tokens: ClassVar[tuple[str, ...]] = ("eos", "pad")
    tokenizers: ClassVar[str] = "Unigram, BPE with special_pieces t5, or ByteBPE with roberta"
    shortest: ClassVar[int] = 2  # a token and EOS
    unit: ClassVar[str] = "pairs"

    def field_problems(self):
        if self.target_length is not None and self.target_length < 2:
            yield f"config.objective.target_length is {self.target_length}, it must be at least 2"

    def problems(self, experiment):
        yield from super().problems(experiment)
        for source in getattr(experiment.data.source, "components", tuple)():  # another check reports invalid sources
            if not source.pairs:
                yield (
                    f"config.objective is {type(self).__name__}, which needs pairs, but {type(source).__name__} in "
                    "config.data.source has documents: set its target_field"
                )

    def lengths(self, sequence_length):
        targets = self.target_length or sequence_length
        return Lengths(sequence_length + targets, sequence_length, targets)

    def example(self, text, rng, vocabulary):
        source, target = np.split(text.tokens, text.parts[:1])
        return encoder_decoder_example(source, target, self.decoder_start(vocabulary))

    def prompt(self, tokens, vocabulary):
        return encoder_decoder_prompt(np.append(tokens, np.int32(vocabulary.eos)), self.decoder_start(vocabulary))

    def restore(self, example, vocabulary):
        return np.concatenate([example["encoder_tokens"], example["targets"]])

    def statistics(self, examples, vocabulary):
        for name, field in (("source", "encoder_tokens"), ("target", "targets")):
            yield Statistic(f"{name} tokens", float(np.mean([len(e[field]) for e in examples])))
            with_separator = np.mean([e[field][-1] == vocabulary.separator for e in examples])
            yield Statistic(f"{name}s with an end", float(with_separator), expected=1.0)
