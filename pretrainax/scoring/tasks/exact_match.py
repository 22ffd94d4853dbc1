"""Exact match: a model writes an answer to a question, after others with theirs, and it is the right one or it is not."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple, Optional

from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.tasks.examples import Example
from pretrainax.scoring.tasks.task import Figure, Prompted, Question, mean


class Asked(NamedTuple):
    """A question and its answer, as it is compared."""

    question: Question
    answer: str


@dataclasses.dataclass(kw_only=True)
class ExactMatch(Prompted):
    """Lets the model write, greedily, until one of `stop` or `max_new_tokens`, and compares the answer found in it.

    `exact_match`: how often it is the right one; `answered`: how often `answer` was found at all.
    """

    target: str = "{answer}"
    answer: str = ""  # regular expression whose first group is the answer within a target; "": all of it
    ignore: tuple[str, ...] = ()  # regular expressions; what they match is left out of both answers
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

    def read(self, example: Example) -> Asked:
        prompt, target = example.fill(self.prompt), example.fill(self.target)
        answer = self.found(target)
        if answer is None:
            raise example.error(f"the target {target[-80:]!r} has no answer as {self.answer!r} describes it")
        return Asked(Question(prompt, prompt + self.delimiter + target), answer)

    def found(self, text: str) -> Optional[str]:
        """Returns the answer in a text as it is compared; None where there is none."""
        match = re.search(self.answer, text) if self.answer else None
        if self.answer and match is None:
            return None
        answer = text if match is None else match[1 if match.re.groups else 0] or ""
        for pattern in self.ignore:
            answer = re.sub(pattern, "", answer)
        return answer.strip()

    def score(self, loaded: LoadedModel, asked: Sequence[Asked], chosen: Sequence[int]) -> Mapping[str, Figure]:
        prompts = self.prompts([question for question, _ in asked], chosen)
        answers = [self.found(text) for text in written(loaded, prompts, self.stop, self.max_new_tokens)]
        right = [answer == asked[i].answer for answer, i in zip(answers, chosen, strict=True)]
        return {"exact_match": mean(right), "answered": mean(answer is not None for answer in answers)}
