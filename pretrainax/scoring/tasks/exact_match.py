"""Exact match: compares a generated answer with the correct answer, after other questions with their answers."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple, Optional

from pretrainax.config import UserError
from pretrainax.inference.decoding import generate
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.request import Sampling
from pretrainax.scoring.tasks.examples import Example
from pretrainax.scoring.tasks.task import Prompted, Question, TaskMetric, mean

_ROWS = 16  # prompts per generation batch


class NormalizedQuestion(NamedTuple):
    """A question, and its correct answer in the normalized form for the comparison."""

    question: Question
    answer: str


@dataclasses.dataclass(kw_only=True)
class ExactMatch(Prompted[NormalizedQuestion]):
    """Generates greedily up to a `stop` string or `max_new_tokens`, and compares the answer with the target's answer.

    `exact_match` is the share of correct answers. `answered` is the share of generated texts that match the pattern
    `answer`.
    """

    target: str = "{answer}"  # template of the correct answer, also in shots
    answer: str = ""  # regular expression whose first group is the answer within a text; "": the whole text
    ignore: tuple[str, ...] = ()  # regular expressions whose matches are removed from both answers
    stop: tuple[str, ...] = ("\n",)
    max_new_tokens: int = 64

    kind: ClassVar[str] = "exact_match"

    def problems(self) -> Iterable[str]:
        yield from super().problems()
        if self.max_new_tokens < 1:
            yield f"max_new_tokens is {self.max_new_tokens}, it must be at least 1"
        for field, pattern in [("answer", self.answer), *(("ignore", pattern) for pattern in self.ignore)]:
            try:
                re.compile(pattern)
            except re.error as e:
                yield f"{field} is {pattern!r}, which is no regular expression ({e})"

    def read(self, example: Example) -> NormalizedQuestion:
        prompt, target = example.fill(self.prompt), example.fill(self.target)
        answer = self.extract_answer(target)
        if answer is None:
            raise example.error(f"the target {target[-80:]!r} has no answer as {self.answer!r} describes it")
        return NormalizedQuestion(Question(prompt, prompt + self.delimiter + target), answer)

    def extract_answer(self, text: str) -> Optional[str]:
        """Returns the normalized answer in a text; None if the pattern `answer` does not match."""
        match = re.search(self.answer, text) if self.answer else None
        if self.answer and match is None:
            return None
        answer = text if match is None else match[1 if match.re.groups else 0] or ""
        for pattern in self.ignore:
            answer = re.sub(pattern, "", answer)
        return answer.strip()

    def how(self, loaded: LoadedModel) -> str:
        if loaded.experiment.model.family == "encoder":
            raise UserError(
                f"{loaded.origin} is an encoder, which cannot generate text: leave out tasks of the kind {self.kind}"
            )
        return f"{self.kind}, {self.shots} shots: the likeliest tokens, at most {self.max_new_tokens}"

    def metrics(
        self, loaded: LoadedModel, asked: Sequence[NormalizedQuestion], chosen: Sequence[int]
    ) -> list[TaskMetric]:
        questions, prompts, other = [question for question, _ in asked], {}, collections.Counter()
        for index in chosen:
            shown = self.with_shots(questions, index)
            fitting = self._fitting(loaded, shown)
            if fitting:
                prompts[index] = self.separator.join(fitting)
            other["prompts with fewer shots, for want of room"] += 0 < len(fitting) < len(shown)
            other["prompts too long, counted as wrong"] += not fitting
        found = dict(
            zip(prompts, map(self.extract_answer, self._generated(loaded, list(prompts.values()))), strict=True)
        )
        right = [index in found and found[index] == asked[index].answer for index in chosen]
        answered = [found.get(index) is not None for index in chosen]
        metrics = {"exact_match": mean(right), "answered": mean(answered)}
        return [TaskMetric(measure, estimate, len(chosen), other=+other) for measure, estimate in metrics.items()]

    def _fitting(self, loaded: LoadedModel, shown: list[str]) -> list[str]:
        """Returns as many of the last shots as leave room for an answer, followed by the prompt.

        The result is [] if the prompt alone is too long.

        Args:
          shown: all shots and the prompt.
        """
        longest = loaded.experiment.model.position.max_length
        for first in range(len(shown)):
            tokens = len(loaded.tokenizer.encode(self.separator.join(shown[first:]))) + 1  # the token before a text
            if longest is None or tokens + self.max_new_tokens <= longest:
                return shown[first:]
        return []

    def _generated(self, loaded: LoadedModel, prompts: Sequence[str]) -> Iterator[str]:
        sampling = Sampling(max_new_tokens=self.max_new_tokens, stop=self.stop)
        for start in range(0, len(prompts), _ROWS):
            yield from (text.text for text in generate(loaded, prompts[start : start + _ROWS], sampling))
