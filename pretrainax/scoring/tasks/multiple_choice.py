"""Multiple-choice tasks: selects the most likely answer to a question."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from pretrainax.files.json_files import JsonObject
from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.results import share
from pretrainax.scoring.tasks.examples import Example
from pretrainax.scoring.tasks.likelihoods import continuation_check, continuations
from pretrainax.scoring.tasks.task import Prompted, Question, TaskMetric


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
    measures: ClassVar[tuple[str, ...]] = ("accuracy", "accuracy_per_byte", "accuracy_unconditional")

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

    def transcripts(self, loaded: LoadedModel, asked: Sequence[Choices], chosen: Sequence[int]) -> list[JsonObject]:
        questions, check = [item.question for item in asked], continuation_check(loaded)

        def fits(prompt: str, index: int) -> bool:
            return all(check(prompt, self.delimiter + choice) for choice in asked[index].choices)

        prompts: dict[int, tuple[str, JsonObject]] = {}
        for index in chosen:
            prompt = self.fitting_prompt(questions, index, functools.partial(fits, index=index))
            if prompt is not None and fits(self.unconditional, index):
                prompts[index] = prompt
        pairs = [
            (context, self.delimiter + choice)
            for index, (prompt, _) in prompts.items()
            for context in (prompt, self.unconditional)
            for choice in asked[index].choices
        ]
        scores = iter([score.log_likelihood for score in continuations(loaded, pairs)])
        transcripts = []
        for index in chosen:
            question, choices, answer = asked[index]
            transcript = {"prompt": question.prompt, "choices": choices, "answer": answer, "asked": index in prompts}
            if index in prompts:
                prompt, shots = prompts[index]
                given, alone = ([*itertools.islice(scores, len(choices))] for _ in range(2))
                correct = self._correct(choices, answer, np.array(given), np.array(alone))
                transcript |= {"prompt": prompt, **shots, "log_likelihoods": given, "unconditional": alone}
                transcript["correct"] = correct
            transcripts.append(transcript)
        return transcripts

    def _correct(self, choices: Sequence[str], answer: int, given: np.ndarray, alone: np.ndarray) -> dict[str, bool]:
        """Computes, for each metric, whether the correct answer has the highest score.

        Args:
          given, alone: log p(choice | prompt) and log p(choice | `unconditional`) of each choice.
        """
        num_bytes = np.array([len(choice.encode()) for choice in choices])
        scores = zip(self.measures, (given, given / num_bytes, given - alone), strict=True)
        return {measure: int(values.argmax()) == answer for measure, values in scores}

    def metrics(self, transcripts: Sequence[JsonObject]) -> list[TaskMetric]:
        return [
            TaskMetric(measure, share([transcript["correct"][measure] for transcript in transcripts]), len(transcripts))
            for measure in self.measures
        ]
