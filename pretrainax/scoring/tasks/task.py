"""Base classes of the kinds of tasks: their fields, the parsing of examples, and metrics."""

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
    estimate: Estimate  # with its standard error over the examples
    examples: int  # number of examples
    part: str = ""  # subset of the examples; "": all examples
    other: Mapping[str, int] = {}  # counts of exceptions: {"prompts cut": 3}


def mean(values: Sequence[float]) -> Estimate:
    """Returns the mean of `values` and its standard error, from the sample standard deviation (n - 1)."""
    return ratio(values, [1.0] * len(values))


@dataclasses.dataclass(kw_only=True)
class Task(Generic[Item]):
    """Base class of the kinds of tasks.

    A description file of a task sets the fields. A template is a string that contains names of fields of an example,
    such as "{question}".
    """

    about: str = ""  # description for users
    examples: str = ""  # path or glob of JSON lines, relative to the description file; "": the user must give it

    kind: ClassVar[str]  # name of the kind in description files

    def problems(self) -> Iterable[str]:
        """Yields an error message for each invalid field."""
        yield from ()

    def read(self, example: Example) -> Item:
        """Returns the parsed form of an example; raises UserError with file and line if the example is invalid."""
        raise NotImplementedError

    def how(self, loaded: LoadedModel) -> str:
        """Returns a description of the scoring for users; raises UserError if the model does not support the task."""
        raise NotImplementedError

    def metrics(self, loaded: LoadedModel, asked: Sequence[Item], chosen: Sequence[int]) -> list[TaskMetric]:
        """Returns the metrics of a model on the task; metrics over all chosen examples precede metrics of subsets.

        Args:
          asked: all examples, parsed by `read`.
          chosen: indices of the examples to score. All examples may be used as shots.
        """
        raise NotImplementedError


class Question(NamedTuple):
    """The prompt of a question, and the question together with its answer, for use as a shot."""

    prompt: str
    shot: str


@dataclasses.dataclass(kw_only=True)
class Prompted(Task[Item]):
    """Base class of tasks that ask a question after `shots` other questions with their answers."""

    prompt: str = "{prompt}"
    delimiter: str = " "  # between a prompt and its answer
    shots: int = 0  # number of examples before each question: the first ones of the file, except the question
    separator: str = "\n\n"  # between two examples

    def problems(self) -> Iterable[str]:
        if self.shots < 0:
            yield f"shots is {self.shots}, it must be at least 0"

    def with_shots(self, questions: Sequence[Question], index: int) -> list[str]:
        """Returns the shots for a question, followed by its prompt; joined by `separator`, they are the model input.

        Args:
          index: index of the question in `questions`.
        """
        shots = [questions[i].shot for i in range(min(self.shots + 1, len(questions))) if i != index]
        return [*shots[: self.shots], questions[index].prompt]
