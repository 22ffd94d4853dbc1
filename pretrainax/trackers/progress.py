"""Stores which run of a tracking service belongs to a workdir, and which steps have been written to it."""

import dataclasses
import json
import os

from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import read_object

_FOLDER_NAME = "trackers"


@dataclasses.dataclass
class Progress:
    """A record of what a tracker has written so far, stored in the workdir.

    A resumed run repeats some steps; `is_new` prevents duplicate entries for these steps.
    """

    path: str
    run: str = ""  # id of the current run in the service; "": no run yet
    first: str = ""  # id of the first run in the service; a rollback may begin another run
    rollbacks: int = 0  # number of rollbacks
    written: dict[str, int] = dataclasses.field(default_factory=dict)  # kind -> last written step, {"train": 1000}

    @classmethod
    def load(cls, workdir: str, tracker: str) -> "Progress":
        """Loads the progress that an earlier process stored in the workdir, or returns an empty one if there is none.

        Args:
          tracker: name of the tracker, such as "WandB".

        Raises:
          UserError: the file is not valid.
        """
        path = os.path.join(workdir, _FOLDER_NAME, f"{tracker}.json")
        if not os.path.exists(path):
            return cls(path)
        stored = read_object(path)
        return cls(path, **{name: stored[name] for name in ("run", "first", "rollbacks", "written") if name in stored})

    def begin(self, run: str) -> None:
        """Stores `run`, the id that the tracking service gave the current run; keeps the first such id in `first`."""
        self.run, self.first = run, self.first or run
        self._save()

    def is_new(self, step: int, what: str) -> bool:
        """Returns True if no entry of kind `what` has been written for `step` or any later step."""
        return step > self.written.get(what, -1)

    def record(self, step: int, what: str) -> None:
        """Records that an entry of kind `what` has been written for `step`."""
        self.written[what] = step
        self._save()

    def rewind(self, step: int) -> None:
        """Records a rollback to `step`, so that entries of later steps count as new again."""
        self.rollbacks += 1
        self.written = {what: min(last, step) for what, last in self.written.items()}
        self._save()

    def _save(self) -> None:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        stored = {name: value for name, value in vars(self).items() if name != "path"}
        write_atomically(self.path, json.dumps(stored, indent=2) + "\n")
