"""Text-to-text training: a mixture of supervised tasks, as source-target pairs, and a denoising objective."""

import dataclasses
from typing import ClassVar

from pretrainax.data.batch import Lengths
from pretrainax.data.objectives.base import Objective, with_field_path
from pretrainax.data.objectives.sequence_to_sequence import SequenceToSequence
from pretrainax.data.objectives.spans import SpanCorruption


@dataclasses.dataclass
class TextToText(Objective):
    """T5's multi-task pretraining on supervised tasks and denoising (Raffel et al. 2020, sections 2.4, 3.5.2, 3.5.3).

    Data sources of pairs are trained with SequenceToSequence, and data sources of documents with `unsupervised`. A
    prefix of the source text identifies the task. How often each task occurs is set by SourceMixture: in this example,
    in proportion to its number of examples, up to a limit. Alternatively, set both `limit` and `temperature`, or only
    `weights`.

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

    With this config, the record {"en": "That is good.", "de": "Das ist gut."} becomes (figure 1 of the paper)

        encoder_tokens  translate English to German : That is good .  </s>
        targets         Das ist gut . </s>
        tokens          <pad> Das ist gut .

    and the document `Thank you for inviting me to your party last week` of the first source becomes

        encoder_tokens  Thank you <extra_id_0> me to your party <extra_id_1> week </s>
        targets         <extra_id_0> for inviting <extra_id_1> last <extra_id_2> </s>

    Rows have room for the longest targets of either objective. A row may contain several pairs.
    """

    unsupervised: Objective = dataclasses.field(default_factory=SpanCorruption)  # for data sources of documents
    target_length: int = 114  # maximum supervised target tokens per row; SpanCorruption has 114 for 512 inputs

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
        if pairs:
            return [(1.0, self.supervised)]
        components = self.unsupervised.components()
        total = sum(weight for weight, _ in components)  # not 1 for most mixtures, such as 7 for UL2's
        return [(weight / total, objective) for weight, objective in components]

    def lengths(self, sequence_length):
        lengths = (objective.lengths(sequence_length) for objective in (self.supervised, self.unsupervised))
        return Lengths(*map(max, *lengths))

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
        errors = list(super().problems(experiment))
        yield from errors or with_field_path("unsupervised", self.unsupervised.problems(experiment))

    def check_vocabulary(self, vocabulary, sequence_length):
        super().check_vocabulary(vocabulary, sequence_length)
        self.unsupervised.check_vocabulary(vocabulary, sequence_length)
