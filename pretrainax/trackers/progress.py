"""Stores which run of a tracking service belongs to a workdir, and its last written steps."""

import dataclasses
import json
import os

from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import read_object

_FOLDER = "trackers"


@dataclasses.dataclass
class Progress:
    """Progress of a tracker, stored in the workdir.

    A resumed run repeats some steps; `is_new` prevents duplicate entries.
    """

    path: str
    run: str = ""  # id of the current run in the service; "": none yet
    first: str = ""  # id of the first run; a rollback may begin others
    rollbacks: int = 0
    written: dict[str, int] = dataclasses.field(default_factory=dict)  # {"train": last written step}

    @classmethod
    def of(cls, workdir: str, tracker: str) -> "Progress":
        """Reads the progress of an earlier start; UserError for an invalid file."""
        path = os.path.join(workdir, _FOLDER, f"{tracker}.json")
        if not os.path.exists(path):
            return cls(path)
        stored = read_object(path)
        return cls(path, **{name: stored[name] for name in ("run", "first", "rollbacks", "written") if name in stored})

    def begin(self, run: str) -> None:
        """Stores the id of the current run."""
        self.run, self.first = run, self.first or run
        self._save()

    def is_new(self, step: int, what: str) -> bool:
        """Returns True if an entry of this kind is new at a step."""
        return step > self.written.get(what, -1)

    def wrote(self, step: int, what: str) -> None:
        """Stores that an entry of this kind was written at a step."""
        self.written[what] = step
        self._save()

    def rewind(self, step: int) -> None:
        """Stores a rollback: entries after `step` are new again."""
        self.rollbacks += 1
        self.written = {what: min(last, step) for what, last in self.written.items()}
        self._save()

    def _save(self) -> None:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        stored = {name: value for name, value in vars(self).items() if name != "path"}
        write_atomically(self.path, json.dumps(stored, indent=2) + "\n")
