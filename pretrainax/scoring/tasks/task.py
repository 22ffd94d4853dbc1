"""Base classes of the task kinds: fields, the reading of examples, and metrics."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Generic, NamedTuple, TypeVar

from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.results import Estimate, ratio
from pretrainax.scoring.tasks.examples import Example

Item = TypeVar("Item", bound=tuple)  # the parsed form of an example


class TaskMetric(NamedTuple):
    """One metric of a task."""

    measure: str  # "accuracy"
    estimate: Estimate  # with its standard error over the examples
    examples: int
    part: str = ""  # subset of the examples; "": all examples
    other: Mapping[str, int] = {}  # counts of exceptions: {"prompts cut": 3}


def mean(values: Sequence[float]) -> Estimate:
    """Returns the mean and its standard error from the sample standard deviation (n - 1)."""
    return ratio(values, [1.0] * len(values))


@dataclasses.dataclass(kw_only=True)
class Task(Generic[Item]):
    """Base of the task kinds. A description sets the fields; templates name fields of an example: "{question}"."""

    about: str = ""  # description for users
    examples: str = ""  # file, folder or glob of JSON lines, relative to the description; "": the user gives it

    kind: ClassVar[str]  # its name in a description

    def problems(self) -> Iterable[str]:
        """Yields an error line for each invalid field."""
        yield from ()

    def read(self, example: Example) -> Item:
        """Returns the parsed form of an example; raises UserError with its file and line if it is invalid."""
        raise NotImplementedError

    def how(self, loaded: LoadedModel) -> str:
        """Returns a description of the scoring for users; raises UserError if the model does not support the task."""
        raise NotImplementedError

    def metrics(self, loaded: LoadedModel, asked: Sequence[Item], chosen: Sequence[int]) -> list[TaskMetric]:
        """Returns the metrics of a model; the metrics of all examples come first.

        Args:
          asked: results of `read` for all examples.
          chosen: the indices of the examples to score; the others may serve as shots.
        """
        raise NotImplementedError


class Question(NamedTuple):
    """The text before an answer, and the example as a shot, with its answer."""

    prompt: str
    shot: str


@dataclasses.dataclass(kw_only=True)
class Prompted(Task[Item]):
    """Base of the tasks that ask a question after `shots` other questions with their answers."""

    prompt: str = "{prompt}"
    delimiter: str = " "  # between a prompt and its answer
    shots: int = 0  # examples before each question: the first examples of the file, without the question itself
    separator: str = "\n\n"  # between two examples

    def problems(self) -> Iterable[str]:
        if self.shots < 0:
            yield f"shots is {self.shots}, it must be at least 0"

    def shown(self, questions: Sequence[Question], index: int) -> list[str]:
        """Returns the shots before a question and its prompt; joined by the separator they are the model input."""
        shots = [questions[i].shot for i in range(min(self.shots + 1, len(questions))) if i != index]
        return [*shots[: self.shots], questions[index].prompt]
