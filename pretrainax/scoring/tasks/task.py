"""Defines the base classes of task kinds: their fields, the parsing of examples, and the metrics."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Generic, NamedTuple, TypeVar

from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.results import Estimate, ratio
from pretrainax.scoring.tasks.examples import Example

Item = TypeVar("Item", bound=tuple)  # type of a parsed example


class TaskMetric(NamedTuple):
    """One metric of a model on a task."""

    measure: str  # name of the metric: "accuracy"
    estimate: Estimate  # value with its standard error over the examples
    examples: int  # number of examples
    part: str = ""  # subset of the examples; "": all examples
    other: Mapping[str, int] = {}  # counts of special cases: {"prompts cut": 3}


def mean(values: Sequence[float]) -> Estimate:
    """Computes the mean of `values` and its standard error, from the sample standard deviation (n - 1)."""
    return ratio(values, [1.0] * len(values))


@dataclasses.dataclass(kw_only=True)
class Task(Generic[Item]):
    """Base class of task kinds, such as multiple choice.

    The description file of a task sets the fields. A template is a string with names of an example's fields in braces,
    such as "{question}".
    """

    about: str = ""  # description for users
    examples: str = (
        ""  # path or glob of JSON Lines files, relative to the description file; "": the user must provide it
    )

    kind: ClassVar[str]  # name of the kind in description files

    def problems(self) -> Iterable[str]:
        """Yields an error message for each invalid field."""
        yield from ()

    def read(self, example: Example) -> Item:
        """Parses an example; raises UserError with file and line number if the example is invalid."""
        raise NotImplementedError

    def how(self, loaded: LoadedModel) -> str:
        """Returns a description, for users, of how the task is scored.

        Raises:
          UserError: the model does not support the task.
        """
        raise NotImplementedError

    def metrics(self, loaded: LoadedModel, asked: Sequence[Item], chosen: Sequence[int]) -> list[TaskMetric]:
        """Computes the metrics of a model on the task: first over all chosen examples, then over subsets.

        Args:
          asked: all examples, parsed by `read`.
          chosen: indices of the examples to score. All examples may serve as shots.
        """
        raise NotImplementedError


class Question(NamedTuple):
    """A question in two formats: as a prompt, and as a shot, which includes the answer."""

    prompt: str
    shot: str


@dataclasses.dataclass(kw_only=True)
class Prompted(Task[Item]):
    """Base class of few-shot tasks: `shots` other questions with their answers precede the prompt."""

    prompt: str = "{prompt}"
    delimiter: str = " "  # between a prompt and its answer
    shots: int = (
        0  # number of examples before each question: the first examples of the file, without the question itself
    )
    separator: str = "\n\n"  # between two examples

    def problems(self) -> Iterable[str]:
        if self.shots < 0:
            yield f"shots is {self.shots}, it must be at least 0"

    def with_shots(self, questions: Sequence[Question], index: int) -> list[str]:
        """Returns the shots and the prompt of a question; joined by `separator`, they are the model input.

        Args:
          index: index of the question in `questions`.
        """
        shots = [questions[i].shot for i in range(min(self.shots + 1, len(questions))) if i != index]
        return [*shots[: self.shots], questions[index].prompt]
