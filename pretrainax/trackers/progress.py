"""Stores which run of a tracking service belongs to a workdir, and the last steps that were written to this run."""

import dataclasses
import json
import os

from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import read_object

_FOLDER = "trackers"


@dataclasses.dataclass
class Progress:
    """The progress of a tracker, stored in the workdir.

    A resumed run repeats some steps; `is_new` prevents duplicate entries.
    """

    path: str
    run: str = ""  # id of the current run in the service; "": none yet
    first: str = ""  # id of the first run in the service; a rollback may begin another run
    rollbacks: int = 0
    last_steps: dict[str, int] = dataclasses.field(default_factory=dict)  # kind -> last written step, {"train": 1000}

    @classmethod
    def load(cls, workdir: str, tracker: str) -> "Progress":
        """Reads the progress that an earlier process has stored in the workdir; returns an empty progress without it.

        Raises:
          UserError: the file is not valid.
        """
        path = os.path.join(workdir, _FOLDER, f"{tracker}.json")
        if not os.path.exists(path):
            return cls(path)
        stored = read_object(path)
        return cls(path, **{name: stored[name] for name in ("run", "first", "rollbacks", "written") if name in stored})

    def begin(self, run: str) -> None:
        """Stores the id of the current run in the service."""
        self.run, self.first = run, self.first or run
        self._save()

    def is_new(self, step: int, what: str) -> bool:
        """Returns True if no entry of kind `what` has been written for this step or a later step."""
        return step > self.last_steps.get(what, -1)

    def wrote(self, step: int, what: str) -> None:
        """Stores that an entry of kind `what` was written for `step`."""
        self.last_steps[what] = step
        self._save()

    def rewind(self, step: int) -> None:
        """Stores a rollback to `step`: entries of later steps are new again."""
        self.rollbacks += 1
        self.last_steps = {what: min(last, step) for what, last in self.last_steps.items()}
        self._save()

    def _save(self) -> None:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        stored = {name: value for name, value in vars(self).items() if name != "path"}
        write_atomically(self.path, json.dumps(stored, indent=2) + "\n")
