"""Names the objects of a run: what vouches for what, which belong together, which are not finished.

metrics.jsonl, which grows, is objects of PART bytes: `metrics.jsonl.00000` and so on. All but the last stay as they
are.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping

PART = 1 << 20  # bytes of an object of a file that grows
LEASES = "run.lease"  # folder of what `Lease` writes
GROWS = "metrics.jsonl"
PART_NAME = re.compile(rf"((?:.*/)?{re.escape(GROWS)})\.(\d{{5}})", re.DOTALL)
MANIFEST = "manifest.sha256"
_LAST = {"index.json": 1, MANIFEST: 1, "config.json": 2}  # what vouches for the files beside it and below
ARRAYS = re.compile(r"(.*/)?checkpoints/\d+/[^/]+/.*", re.DOTALL)  # fetched when a checkpoint is read
STEP = re.compile(r"((?:.*/)?checkpoints)/(\d+)/.*", re.DOTALL)
_REPORT = re.compile(r"(.*/)?checkpoints/\d+/hosts/[^/]+")  # of one process of several, which vouches for its own files
_UNFINISHED = re.compile(r".*\.(saving|replaced|deleted)\b.*|.*\.tmp-.*|run\.lock|\..*", re.DOTALL)


def is_unfinished(name: str) -> bool:
    """Tells of the name of a file or folder, one part of a path, whether it is none of a finished run: never sent."""
    return _UNFINISHED.fullmatch(name) is not None


def step_of(name: str) -> str:
    """Returns the folder of the checkpoint that an object is of, "checkpoints/20"; "" of any other object."""
    match = STEP.fullmatch(name)
    return f"{match[1]}/{match[2]}" if match else ""


def newest_whole(names: Iterable[str]) -> dict[str, int]:
    """Returns the newest step that has its manifest, of each folder of checkpoints."""
    newest: dict[str, int] = {}
    for name in names:
        if (match := STEP.fullmatch(name)) and os.path.basename(name) == MANIFEST:
            newest[match[1]] = max(newest.get(match[1], -1), int(match[2]))
    return newest


def is_replaced(name: str, local: Collection[str], newest: Mapping[str, int]) -> bool:
    """Returns True if a run deleted a missing local file; a run always leaves a complete checkpoint.

    newest: of each folder of checkpoints the newest whole step that is here.
    """
    if part := PART_NAME.fullmatch(name):
        return any(file_of(other) == part[1] for other in local)
    match = STEP.fullmatch(name)
    return match is not None and match[1] in newest


def counted(names: Collection[str]) -> str:
    """Says how many objects these are, and names the first."""
    return f"{len(names):,} object{'s' if len(names) > 1 else ''} ({min(names)}{', …' if len(names) > 1 else ''})"


def rank_of(name: str) -> int:
    """Returns the place of an object among those that are sent: what vouches for others has a higher one."""
    return 1 if _REPORT.fullmatch(name) else _LAST.get(os.path.basename(name), 0)


def file_of(name: str) -> str:
    """Returns the file of the twin that an object is, or is a part of."""
    match = PART_NAME.fullmatch(name)
    return match[1] if match else name
