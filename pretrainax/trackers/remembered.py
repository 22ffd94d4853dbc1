"""Remembers for a run what a tracker that keeps its curves elsewhere has: which run there is this one, which steps."""

import dataclasses
import json
import os

from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import read_object

_FOLDER = "trackers"


@dataclasses.dataclass
class Remembered:
    """Keeps, in a file of the workdir, under which name a tracker knows the run and up to which step it has it.

    A resumed run makes some steps again, and a kill comes between two writes: what is there already is not written
    twice.
    """

    path: str
    run: str = ""  # that is written to; "": none was begun
    first: str = ""  # that was begun first; others came of rollbacks
    rollbacks: int = 0
    written: dict[str, int] = dataclasses.field(default_factory=dict)  # {"train": the last step that is there}

    @classmethod
    def of(cls, workdir: str, tracker: str) -> "Remembered":
        """Reads what an earlier start has left; UserError for a file that is none."""
        path = os.path.join(workdir, _FOLDER, f"{tracker}.json")
        if not os.path.exists(path):
            return cls(path)
        stored = read_object(path)
        return cls(path, **{name: stored[name] for name in ("run", "first", "rollbacks", "written") if name in stored})

    def begin(self, run: str) -> None:
        """Remembers the run that is written to from here on."""
        self.run, self.first = run, self.first or run
        self._save()

    def is_new(self, step: int, what: str) -> bool:
        """Tells whether what belongs to a step is not there yet."""
        return step > self.written.get(what, -1)

    def wrote(self, step: int, what: str) -> None:
        """Remembers that what belongs to a step is there."""
        self.written[what] = step
        self._save()

    def rewind(self, step: int) -> None:
        """Remembers a rollback: what comes after a step is written again."""
        self.rollbacks += 1
        self.written = {what: min(last, step) for what, last in self.written.items()}
        self._save()

    def _save(self) -> None:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        stored = {name: value for name, value in vars(self).items() if name != "path"}
        write_atomically(self.path, json.dumps(stored, indent=2) + "\n")
