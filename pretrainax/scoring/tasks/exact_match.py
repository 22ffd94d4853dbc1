"""Exact-match tasks: compares a generated answer with the correct answer, optionally with few-shot examples."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple, Optional

from pretrainax.config import UserError
from pretrainax.files.json_files import JsonObject
from pretrainax.inference.decoding import generate
from pretrainax.inference.framing import max_input_length
from pretrainax.inference.inherited import ends_of_answers
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.prompts import generation_limit, read_prompt, tokens_of
from pretrainax.inference.request import Sampling
from pretrainax.scoring.results import share
from pretrainax.scoring.tasks.examples import Example
from pretrainax.scoring.tasks.task import Prompted, Question, TaskMetric

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
    measures: ClassVar[tuple[str, ...]] = ("exact_match", "answered")

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

    def transcripts(
        self, loaded: LoadedModel, asked: Sequence[NormalizedQuestion], chosen: Sequence[int]
    ) -> list[JsonObject]:
        questions, longest = [question for question, _ in asked], max_input_length(loaded)

        def fits(prompt: str) -> bool:
            example = read_prompt(prompt, loaded.experiment, loaded.tokenizer)
            if longest is None or tokens_of(example) > longest:
                return longest is None
            return (generation_limit(example, loaded) or 0) >= self.max_new_tokens

        found = {index: self.fitting_prompt(questions, index, fits) for index in chosen}
        prompts = {index: prompt for index, prompt in found.items() if prompt is not None}
        outputs = dict(zip(prompts, self._generate(loaded, [prompt for prompt, _ in prompts.values()]), strict=True))
        transcripts = []
        for index in chosen:
            question, target = asked[index]
            transcript = {"prompt": question.prompt, "target": target, "asked": index in prompts}
            if index in prompts:
                prompt, shots = prompts[index]
                answer = self.extract_answer(outputs[index])
                transcript |= {"prompt": prompt, **shots, "output": outputs[index], "answer": answer}
                transcript["correct"] = answer == target
            transcripts.append(transcript)
        return transcripts

    def metrics(self, transcripts: Sequence[JsonObject]) -> list[TaskMetric]:
        estimates = {
            "exact_match": share([transcript["correct"] for transcript in transcripts]),
            "answered": share([transcript["answer"] is not None for transcript in transcripts]),
        }
        return [TaskMetric(measure, estimate, len(transcripts)) for measure, estimate in estimates.items()]

    def _generate(self, loaded: LoadedModel, prompts: Sequence[str]) -> Iterator[str]:
        sampling = Sampling(max_new_tokens=self.max_new_tokens, stop=(*self.stop, *ends_of_answers(loaded)))
        for start in range(0, len(prompts), _BATCH_SIZE):
            yield from (text.text for text in generate(loaded, prompts[start : start + _BATCH_SIZE], sampling))
