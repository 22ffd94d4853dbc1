"""Multiple-choice tasks: selects the most likely answer to a question."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.tasks.examples import Example
from pretrainax.scoring.tasks.likelihoods import continuations
from pretrainax.scoring.tasks.task import Prompted, Question, TaskMetric, mean


class Choices(NamedTuple):
    """A question, its possible answers, and the index of the correct answer."""

    question: Question
    choices: tuple[str, ...]
    answer: int


@dataclasses.dataclass(kw_only=True)
class MultipleChoice(Prompted[Choices]):
    """Selects the answer with the highest score: the log-likelihood, or one of two normalized log-likelihoods.

    Each metric is the fraction of questions for which the correct answer has the highest score. The score of `accuracy`
    is log p(answer | prompt), which favors short answers. `accuracy_per_byte` divides this score by the UTF-8 bytes of
    the answer. `accuracy_unconditional` subtracts log p(answer | `unconditional`), the log-likelihood of the answer
    without the question (Brown et al. 2020, arXiv 2005.14165, section 2.4).
    """

    choices: str = "choices"  # name of the field with the list of answers
    answer: str = "answer"  # name of the field with the correct answer: its 0-based index, or its text
    unconditional: str = "Answer:"  # prompt without a question, for accuracy_unconditional

    kind: ClassVar[str] = "multiple_choice"

    def read(self, example: Example) -> Choices:
        choices, answer = example.get(self.choices), example.get(self.answer)
        if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
            raise example.error(f"field {self.choices!r} is {choices!r}, it must be a list of two or more texts")
        if isinstance(answer, str) and answer in choices:
            answer = choices.index(answer)
        if type(answer) is not int or not 0 <= answer < len(choices):
            raise example.error(
                f"field {self.answer!r} is {answer!r}, it must be the index of a choice, 0 to {len(choices) - 1}, or "
                "its text"
            )
        prompt = example.fill(self.prompt)
        return Choices(Question(prompt, prompt + self.delimiter + choices[answer]), tuple(choices), answer)

    def how(self, loaded: LoadedModel) -> str:
        return (
            f"{self.kind}, {self.shots} shots: the answer with the highest log-likelihood; per byte; and minus the "
            f"log-likelihood after {self.unconditional!r}"
        )

    def metrics(self, loaded: LoadedModel, asked: Sequence[Choices], chosen: Sequence[int]) -> list[TaskMetric]:
        questions = [item.question for item in asked]
        pairs = [
            (context, self.delimiter + choice)
            for index in chosen
            for context in (self.separator.join(self.with_shots(questions, index)), self.unconditional)
            for choice in asked[index].choices
        ]
        scores = continuations(loaded, pairs)
        remaining_scores, is_correct_by_measure = (
            iter(scores),
            {"accuracy": [], "accuracy_per_byte": [], "accuracy_unconditional": []},
        )
        for _, choices, answer in (asked[i] for i in chosen):
            conditional, unconditional = (
                np.array([score.log_likelihood for score in itertools.islice(remaining_scores, len(choices))])
                for _ in range(2)
            )
            num_bytes = np.array([len(choice.encode()) for choice in choices])
            for is_correct, values in zip(
                is_correct_by_measure.values(),
                (conditional, conditional / num_bytes, conditional - unconditional),
                strict=True,
            ):
                is_correct.append(int(values.argmax()) == answer)
        counts = {"answers to prompts that were cut": count} if (count := sum(score.is_cut for score in scores)) else {}
        return [
            TaskMetric(measure, mean(is_correct), len(chosen), other=counts)
            for measure, is_correct in is_correct_by_measure.items()
        ]
