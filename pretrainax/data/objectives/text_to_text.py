"""Text to text: every supervised task is a source and a target, mixed with an unsupervised objective."""

import dataclasses
from typing import ClassVar

from pretrainax.data.batch import Lengths
from pretrainax.data.objectives.base import Objective, with_field_path
from pretrainax.data.objectives.sequence_to_sequence import SequenceToSequence
from pretrainax.data.objectives.spans import SpanCorruption


@dataclasses.dataclass
class TextToText(Objective):
    """T5's multi-task pretraining (Raffel et al. 2020, sections 2.4, 3.5.2, 3.5.3): supervised tasks and denoising.

    Data sources of pairs use SequenceToSequence, data sources of documents use `unsupervised`. A prefix of the source
    text identifies the task. SourceMixture sets the frequency of each task, here in proportion to its examples with a
    limit. Alternatively, set `limit` and `temperature`, or only `weights`:

        source=SourceMixture(
            sources=(
                JsonLines(path="c4/*.json.gz"),
                JsonLines(path="wmt14_en_de.jsonl", text_field="en", target_field="de",
                          prefix="translate English to German: "),
                JsonLines(path="cnn_daily_mail.jsonl", text_field="article", target_field="highlights",
                          prefix="summarize: "),
                JsonLines(path="cola.jsonl", text_field="sentence", target_field="label", prefix="cola sentence: "),
            ),
            limit=2**19,
        )
        objective=TextToText(unsupervised=SpanCorruption())

    The record {"en": "That is good.", "de": "Das ist gut."} then becomes (figure 1 of the paper)

        encoder_tokens  translate English to German : That is good .  </s>
        targets         Das ist gut . </s>
        tokens          <pad> Das ist gut .

    and `Thank you for inviting me to your party last week` of the first source becomes

        encoder_tokens  Thank you <extra_id_0> me to your party <extra_id_1> week </s>
        targets         <extra_id_0> for inviting <extra_id_1> last <extra_id_2> </s>

    A row has room for the targets of both objectives. Several pairs share a row.
    """

    unsupervised: Objective = dataclasses.field(default_factory=SpanCorruption)  # for data sources of documents
    target_length: int = 114  # maximum supervised target tokens of a row; SpanCorruption has 114 for 512 inputs

    families: ClassVar[tuple[str, ...]] = SequenceToSequence.families
    special_tokens: ClassVar[tuple[str, ...]] = SpanCorruption.special_tokens
    tokenizers: ClassVar[str] = SpanCorruption.tokenizers

    @property
    def shortest(self) -> int:
        return self.unsupervised.shortest

    @property
    def supervised(self) -> SequenceToSequence:
        return SequenceToSequence(self.target_length)

    def components(self, pairs=False):
        return [(1.0, self.supervised)] if pairs else self.unsupervised.components()

    def lengths(self, sequence_length):
        either = (kind.lengths(sequence_length) for kind in (self.supervised, self.unsupervised))
        return Lengths(*map(max, *either))

    def bind(self, tokenizer):
        return dataclasses.replace(self, unsupervised=self.unsupervised.bind(tokenizer))

    def field_problems(self):
        yield from self.supervised.field_problems()
        if self.unsupervised.unit == "pairs" or not set(self.unsupervised.families) & set(self.families):
            kind = type(self.unsupervised).__name__
            yield f"config.objective.unsupervised is {kind}, it must read documents and support encoder_decoder"
            return
        yield from with_field_path("unsupervised", self.unsupervised.field_problems())

    def problems(self, experiment):
        wrong = list(super().problems(experiment))
        yield from wrong or with_field_path("unsupervised", self.unsupervised.problems(experiment))

    def check_vocabulary(self, vocabulary, sequence_length):
        super().check_vocabulary(vocabulary, sequence_length)
        self.unsupervised.check_vocabulary(vocabulary, sequence_length)
