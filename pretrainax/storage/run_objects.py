"""Determines the roles of a run's objects from their names: manifests, files of checkpoints, parts of metrics.jsonl.

An object is a file in a store. The append-only file metrics.jsonl is stored as several objects of PART bytes, its
parts: `metrics.jsonl.00000` and so on. Only the last part changes.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping

PART = 1 << 20  # bytes per part of metrics.jsonl; the last part may be shorter
LEASES = "run.lease"  # folder of the objects that `Lease` writes
GROWING_FILE = "metrics.jsonl"
PART_NAME = re.compile(rf"((?:.*/)?{re.escape(GROWING_FILE)})\.(\d{{5}})", re.DOTALL)
MANIFEST = "manifest.sha256"
_LAST = {"index.json": 1, MANIFEST: 1, "config.json": 2}  # name -> rank; uploaded after files of a lower rank
ARRAYS = re.compile(r"(.*/)?checkpoints/\d+/[^/]+/.*", re.DOTALL)  # downloaded only if their checkpoint is read
STEP = re.compile(r"((?:.*/)?checkpoints)/(\d+)/.*", re.DOTALL)
_REPORT = re.compile(r"(.*/)?checkpoints/\d+/hosts/[^/]+")  # the list of the files that one process has written
_UNFINISHED = re.compile(r".*\.(saving|replaced|deleted)\b.*|.*\.tmp-.*|run\.lock|\..*", re.DOTALL)


def is_unfinished(name: str) -> bool:
    """Returns True for the name of a temporary or hidden file or folder, which is never uploaded.

    name: the last part of a path.
    """
    return _UNFINISHED.fullmatch(name) is not None


def step_of(name: str) -> str:
    """Returns the checkpoint folder that contains an object, such as "checkpoints/20"; "" for other objects."""
    match = STEP.fullmatch(name)
    return f"{match[1]}/{match[2]}" if match else ""


def newest_complete(names: Iterable[str]) -> dict[str, int]:
    """Returns the step of the newest complete checkpoint (with a manifest) of each folder `checkpoints`, by path.

    names: names of objects, relative to the URL.
    """
    newest: dict[str, int] = {}
    for name in names:
        if (match := STEP.fullmatch(name)) and os.path.basename(name) == MANIFEST:
            newest[match[1]] = max(newest.get(match[1], -1), int(match[2]))
    return newest


def is_replaced(name: str, local: Collection[str], newest: Mapping[str, int]) -> bool:
    """Returns True if a run, and not a loss, is the reason that the local file of an object is missing.

    A run that deletes a checkpoint always keeps a complete one. A missing file of a checkpoint therefore counts as
    deleted by the run if the same folder of checkpoints has a complete checkpoint. A missing part of metrics.jsonl
    counts as deleted if the file still has other parts.

    Args:
      name: name of the object.
      local: names of the objects whose files are local.
      newest: step of the newest complete local checkpoint, by folder of checkpoints.
    """
    if part := PART_NAME.fullmatch(name):
        return any(file_of(other) == part[1] for other in local)
    match = STEP.fullmatch(name)
    return match is not None and match[1] in newest


def count_text(names: Collection[str]) -> str:
    """Formats the number of objects and the first name in sorted order: "2 objects (config.json, …)"."""
    return f"{len(names):,} object{'s' if len(names) > 1 else ''} ({min(names)}{', …' if len(names) > 1 else ''})"


def rank_of(name: str) -> int:
    """Returns the rank of an object in the upload order, from 0 to 2; lower ranks are uploaded first.

    Manifests and other lists of files have a higher rank than the listed files.
    """
    return 1 if _REPORT.fullmatch(name) else _LAST.get(os.path.basename(name), 0)


def file_of(name: str) -> str:
    """Returns the name of the local file of an object; for a part of metrics.jsonl, without the part number."""
    match = PART_NAME.fullmatch(name)
    return match[1] if match else name
