"""Converts untrusted file names to paths below a folder; no other code does this.

Names are untrusted if they come from a list that someone else has written: objects in a bucket, files in a manifest,
shards in an index. Without checks, the name `../../.bashrc` would be a file outside the folder.
"""

import os

from pretrainax.files.errors import UserError, shortened

_LONGEST_PART = 255  # maximum bytes of a file name on common file systems
_LONGEST_PATH = 4095  # maximum bytes of a path: PATH_MAX of Linux without the terminating zero byte


def name_problem(name: str) -> str:
    """Returns the reason why a slash-separated name is invalid for a file below a folder; "" if the name is valid."""
    if "\0" in name:
        return "it contains a zero byte, which paths cannot"
    try:
        parts = name.encode().split(b"/")
    except UnicodeEncodeError:
        return "it is not UTF-8"
    if name.startswith("/"):
        return "it starts with a slash, but names are relative to their folder"
    if b"" in parts:
        return "it has an empty part between slashes"
    if b".." in parts or b"." in parts:
        return "it has '.' or '..' as a part, which leads to another folder"
    if len(longest := max(parts, key=len)) > _LONGEST_PART:
        return f"a part of it has {len(longest):,} bytes; a file's name has at most {_LONGEST_PART}"
    return ""


def path_below(root: str, name: str) -> str:
    """Returns the path of the file `name` below the folder `root`.

    Args:
      root: path of the folder.
      name: untrusted name of the file, relative to the folder.

    Raises:
      UserError: the path would be outside the folder, or no file can have the name.
    """
    problem = name_problem(name)
    path = os.path.join(root, name)
    if not problem and len(path.encode()) > _LONGEST_PATH:
        problem = f"its path has {len(path.encode()):,} bytes; a path has at most {_LONGEST_PATH:,}"
    if problem:
        raise UserError(f"invalid file name {shortened(name)!r}: {problem}")
    return path
