"""Classifies a run's objects by name: manifests, checkpoint files, and parts of metrics.jsonl.

An object is a file in a store. The append-only file metrics.jsonl is stored as several objects, called parts:
`metrics.jsonl.00000` and so on. Each part has PART bytes, except the last. Only the last part changes.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping

from pretrainax.files.errors import counted

PART = 1 << 20  # bytes per part of metrics.jsonl; the last part may be shorter
LEASES = "run.lease"  # folder of the objects that `Lease` writes
GROWING_FILE = "metrics.jsonl"
PART_NAME = re.compile(rf"((?:.*/)?{re.escape(GROWING_FILE)})\.(\d{{5}})", re.DOTALL)
MANIFEST = "manifest.sha256"
_RANKS = {"index.json": 1, MANIFEST: 1, "config.json": 2}  # file name -> rank in the upload order (`rank_of`)
ARRAYS = re.compile(r"(.*/)?checkpoints/\d+/[^/]+/.*", re.DOTALL)  # downloaded only when their checkpoint is read
STEP = re.compile(r"((?:.*/)?checkpoints)/(\d+)/.*", re.DOTALL)
_HOST_FILE_LIST = re.compile(r"(.*/)?checkpoints/\d+/hosts/[^/]+")  # lists the files that one process has written
_UNFINISHED = re.compile(r".*\.(saving|replaced|deleted)\b.*|.*\.tmp-.*|run\.lock|\..*", re.DOTALL)


def is_unfinished(name: str) -> bool:
    """Returns True if a file or folder is temporary or hidden, and therefore never uploaded.

    name: the last component of a path.
    """
    return _UNFINISHED.fullmatch(name) is not None


def step_of(name: str) -> str:
    """Returns the checkpoint folder that contains an object, such as "checkpoints/20", or "" if there is none."""
    match = STEP.fullmatch(name)
    return f"{match[1]}/{match[2]}" if match else ""


def newest_complete(names: Iterable[str]) -> dict[str, int]:
    """Returns {path of a `checkpoints` folder: step of its newest complete checkpoint}.

    A checkpoint is complete if `names` contains its manifest. Folders without a complete checkpoint are omitted.

    names: object names, relative to the URL.
    """
    newest: dict[str, int] = {}
    for name in names:
        if (match := STEP.fullmatch(name)) and os.path.basename(name) == MANIFEST:
            newest[match[1]] = max(newest.get(match[1], -1), int(match[2]))
    return newest


def is_replaced(name: str, local: Collection[str], newest: Mapping[str, int]) -> bool:
    """Returns True if an object's missing local file was deleted by a run, or False if it was lost.

    A run that deletes a checkpoint always keeps another, complete one. A missing checkpoint file therefore counts as
    deleted by the run if the same `checkpoints` folder has a complete checkpoint. A missing part of metrics.jsonl
    counts as deleted if other parts of the file are local.

    Args:
      name: name of the object whose local file is missing.
      local: names of the objects whose files are local.
      newest: step of the newest complete local checkpoint, by path of the `checkpoints` folder.
    """
    if part := PART_NAME.fullmatch(name):
        return any(file_of(other) == part[1] for other in local)
    match = STEP.fullmatch(name)
    return match is not None and match[1] in newest


def count_text(names: Collection[str]) -> str:
    """Formats the number of objects and the first name in sorted order, as "2 objects (config.json, …)"."""
    return f"{counted(len(names), 'object')} ({min(names)}{', …' if len(names) > 1 else ''})"


def rank_of(name: str) -> int:
    """Returns an object's rank in the upload order, from 0 to 2; lower ranks are uploaded first.

    Manifests and other lists of files have a higher rank than the files they list.
    """
    return 1 if _HOST_FILE_LIST.fullmatch(name) else _RANKS.get(os.path.basename(name), 0)


def file_of(name: str) -> str:
    """Returns the name of an object's local file, which for a part of metrics.jsonl lacks the part number."""
    match = PART_NAME.fullmatch(name)
    return match[1] if match else name
