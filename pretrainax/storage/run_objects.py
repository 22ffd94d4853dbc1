"""Roles of a run's objects, by name: manifests and files they list, parts of growing files, unfinished files.

The growing file metrics.jsonl is stored as objects of PART bytes: `metrics.jsonl.00000` and so on. All parts but the
last never change.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping

PART = 1 << 20  # bytes per object of a growing file
LEASES = "run.lease"  # folder of the objects that `Lease` writes
GROWING_FILE = "metrics.jsonl"
PART_NAME = re.compile(rf"((?:.*/)?{re.escape(GROWING_FILE)})\.(\d{{5}})", re.DOTALL)
MANIFEST = "manifest.sha256"
_LAST = {"index.json": 1, MANIFEST: 1, "config.json": 2}  # uploaded after the files in and below their folder
ARRAYS = re.compile(r"(.*/)?checkpoints/\d+/[^/]+/.*", re.DOTALL)  # downloaded when a checkpoint is read
STEP = re.compile(r"((?:.*/)?checkpoints)/(\d+)/.*", re.DOTALL)
_REPORT = re.compile(r"(.*/)?checkpoints/\d+/hosts/[^/]+")  # a process's list of its own files
_UNFINISHED = re.compile(r".*\.(saving|replaced|deleted)\b.*|.*\.tmp-.*|run\.lock|\..*", re.DOTALL)


def is_unfinished(name: str) -> bool:
    """Returns True if a file or folder name, without its path, is temporary or hidden, and so never uploaded."""
    return _UNFINISHED.fullmatch(name) is not None


def step_of(name: str) -> str:
    """Returns the checkpoint folder that contains an object, such as "checkpoints/20"; "" for other objects."""
    match = STEP.fullmatch(name)
    return f"{match[1]}/{match[2]}" if match else ""


def newest_complete(names: Iterable[str]) -> dict[str, int]:
    """Returns the newest step with a manifest for each folder of checkpoints."""
    newest: dict[str, int] = {}
    for name in names:
        if (match := STEP.fullmatch(name)) and os.path.basename(name) == MANIFEST:
            newest[match[1]] = max(newest.get(match[1], -1), int(match[2]))
    return newest


def is_replaced(name: str, local: Collection[str], newest: Mapping[str, int]) -> bool:
    """Returns True if a run deleted a missing local file; a run always leaves a complete checkpoint.

    newest: newest whole local step of each folder of checkpoints.
    """
    if part := PART_NAME.fullmatch(name):
        return any(file_of(other) == part[1] for other in local)
    match = STEP.fullmatch(name)
    return match is not None and match[1] in newest


def count_text(names: Collection[str]) -> str:
    """Formats the number of objects and the first name, for messages."""
    return f"{len(names):,} object{'s' if len(names) > 1 else ''} ({min(names)}{', …' if len(names) > 1 else ''})"


def rank_of(name: str) -> int:
    """Returns the upload order of an object: manifests and other lists of files have a higher rank than the files."""
    return 1 if _REPORT.fullmatch(name) else _LAST.get(os.path.basename(name), 0)


def file_of(name: str) -> str:
    """Returns the local file of an object, which may be a part of that file."""
    match = PART_NAME.fullmatch(name)
    return match[1] if match else name
