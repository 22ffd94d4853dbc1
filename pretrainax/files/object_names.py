"""Maps untrusted file names to paths below a folder; no other code does this.

The author of a list chooses its names: objects in a bucket, files in a manifest, shards in an index. Joined to a folder
without checks, `../../.bashrc` is a file outside the folder.
"""

import os

from pretrainax.files.errors import UserError, shortened

_LONGEST_PART = 255  # bytes of a file's name, on every file system in use
_LONGEST_PATH = 4095  # bytes, PATH_MAX of Linux without its zero


def name_problem(name: str) -> str:
    """Returns why a slash-separated name is invalid for a file below a folder; "" if it is valid."""
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
    """Returns the path of a file below a folder.

    Args:
      root: the folder.
      name: the file's name relative to it, as another machine or program lists it.

    Raises:
      UserError: the name leads out of the folder, or no file can have it.
    """
    problem = name_problem(name)
    path = os.path.join(root, name)
    if not problem and len(path.encode()) > _LONGEST_PATH:
        problem = f"its path has {len(path.encode()):,} bytes; a path has at most {_LONGEST_PATH:,}"
    if problem:
        raise UserError(f"invalid file name {shortened(name)!r}: {problem}")
    return path
