"""Exact-match tasks: compares a generated answer with the correct answer, optionally with few-shot examples."""

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

_BATCH_SIZE = 16  # prompts per generation batch


class NormalizedQuestion(NamedTuple):
    """A question, and its correct answer in the normalized form that is compared."""

    question: Question
    answer: str


@dataclasses.dataclass(kw_only=True)
class ExactMatch(Prompted[NormalizedQuestion]):
    """Compares answers, generated greedily up to a `stop` string or `max_new_tokens`, with the answers in `target`.

    `exact_match` is the fraction of correct answers. `answered` is the fraction of questions whose generated text
    matches the pattern `answer`.
    """

    target: str = "{answer}"  # template of the text with the correct answer, also used in shots
    answer: str = ""  # regular expression whose first group is the answer in a text; "": the full text is the answer
    ignore: tuple[str, ...] = ()  # regular expressions whose matches are removed from generated and correct answers
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
        """Extracts the normalized answer from a text; returns None if the pattern `answer` does not match."""
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
        questions, prompts, counts = [question for question, _ in asked], {}, collections.Counter()
        for index in chosen:
            shots_and_prompt = self.with_shots(questions, index)
            remaining = self._drop_shots(loaded, shots_and_prompt)
            if remaining:
                prompts[index] = self.separator.join(remaining)
            counts["prompts with fewer shots, for want of room"] += 0 < len(remaining) < len(shots_and_prompt)
            counts["prompts too long, counted as wrong"] += not remaining
        answers = dict(
            zip(prompts, map(self.extract_answer, self._generate(loaded, list(prompts.values()))), strict=True)
        )
        is_correct = [index in answers and answers[index] == asked[index].answer for index in chosen]
        is_answered = [answers.get(index) is not None for index in chosen]
        metrics = {"exact_match": mean(is_correct), "answered": mean(is_answered)}
        return [TaskMetric(measure, estimate, len(chosen), other=+counts) for measure, estimate in metrics.items()]

    def _drop_shots(self, loaded: LoadedModel, shots_and_prompt: list[str]) -> list[str]:
        """Drops shots from the start until the remaining shots, the prompt and an answer fit into the model's input.

        Returns the remaining shots and the prompt, or [] if the prompt alone is too long.

        Args:
          shots_and_prompt: all shots, followed by the prompt.
        """
        longest = loaded.experiment.model.position.max_length
        for first in range(len(shots_and_prompt)):
            num_tokens = (
                len(loaded.tokenizer.encode(self.separator.join(shots_and_prompt[first:]))) + 1
            )  # one more for the token before a text
            if longest is None or num_tokens + self.max_new_tokens <= longest:
                return shots_and_prompt[first:]
        return []

    def _generate(self, loaded: LoadedModel, prompts: Sequence[str]) -> Iterator[str]:
        sampling = Sampling(max_new_tokens=self.max_new_tokens, stop=self.stop)
        for start in range(0, len(prompts), _BATCH_SIZE):
            yield from (text.text for text in generate(loaded, prompts[start : start + _BATCH_SIZE], sampling))
