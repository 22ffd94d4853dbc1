"""Defines the base classes of task kinds: their fields, the parsing of examples, and the metrics."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Generic, NamedTuple, Optional, TypeVar

from pretrainax.files.json_files import JsonObject
from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.results import Estimate, ratio
from pretrainax.scoring.tasks.examples import Example

Item = TypeVar("Item", bound=tuple)  # type of a parsed example


class TaskMetric(NamedTuple):
    """One metric of a model on a task."""

    measure: str  # name of the metric: "accuracy"
    estimate: Estimate  # value with its error over the examples
    examples: int  # number of examples
    part: str = ""  # subset of the examples; "": all examples


def mean(values: Sequence[float]) -> Estimate:
    """Computes the mean of one value per example, with its standard error and t interval."""
    return ratio(values, [1.0] * len(values), unit="examples")


@dataclasses.dataclass(kw_only=True)
class Task(Generic[Item]):
    """Base class of task kinds, for example multiple choice.

    The description file of a task sets the fields. A template is a string with names of an example's fields in braces:
    "{question}".
    """

    about: str = ""  # description for users
    examples: str = (
        ""  # path or glob of JSON Lines files, relative to the description file; "": the user must provide it
    )

    kind: ClassVar[str]  # name of the kind in description files
    measures: ClassVar[tuple[str, ...]]  # names of the metrics

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

    def transcripts(self, loaded: LoadedModel, asked: Sequence[Item], chosen: Sequence[int]) -> list[JsonObject]:
        """Runs a model on the chosen examples; returns a JSON object for each example, in order.

        An object contains the prompt, the target, the output of the model and whether it is correct. If the prompt has
        shots, "shots" is their number, and "dropped_shots" is the number of shots that do not fit. For an example that
        does not fit into the context, the object has none of these fields, and "asked" is False.

        Args:
          asked: all examples, parsed by `read`.
          chosen: indices of the examples to score. All examples may serve as shots.
        """
        raise NotImplementedError

    def metrics(self, transcripts: Sequence[JsonObject]) -> list[TaskMetric]:
        """Computes the metrics from one or more transcripts: first over all examples, then over subsets."""
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

    def fitting_prompt(
        self, questions: Sequence[Question], index: int, fits: Callable[[str], bool]
    ) -> Optional[tuple[str, JsonObject]]:
        """Builds the prompt of a question; drops the first shots if the prompt otherwise exceeds the context.

        Returns:
          The prompt, and the fields "shots" and "dropped_shots" of the transcript; None if the question alone does not
          fit.

        Args:
          index: index of the question in `questions`.
          fits: returns True if a prompt fits into the context.
        """
        parts = self.with_shots(questions, index)
        for dropped in range(len(parts)):
            if fits(prompt := self.separator.join(parts[dropped:])):
                return prompt, {"shots": len(parts) - 1 - dropped, "dropped_shots": dropped}
        return None
