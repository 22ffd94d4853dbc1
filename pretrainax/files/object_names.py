"""Converts untrusted file names to paths below a folder; all other modules use this module for the conversion.

Names are untrusted if they come from a list that another person has written: objects in a bucket, files in a manifest,
shards in an index. Without validation, the name `../../.bashrc` would lead to a file outside the folder.
"""

import os

from pretrainax.files.errors import UserError, shortened

_MAX_NAME_BYTES = 255  # maximum bytes of a file name on common file systems
_MAX_PATH_BYTES = 4095  # maximum bytes of a path: PATH_MAX of Linux without the terminating zero byte


def name_problem(name: str) -> str:
    """Checks a relative, slash-separated file name; returns a description of the problem, or "" if it is valid."""
    if "\0" in name:
        return "it contains a zero byte, which paths cannot"
    try:
        components = name.encode().split(b"/")
    except UnicodeEncodeError:
        return "it is not UTF-8"
    if name.startswith("/"):
        return "it starts with a slash, but names are relative to their folder"
    if b"" in components:
        return "it has an empty part between slashes"
    if b".." in components or b"." in components:
        return "it has '.' or '..' as a part, which leads to another folder"
    if len(longest := max(components, key=len)) > _MAX_NAME_BYTES:
        return f"a part of it has {len(longest):,} bytes; a file's name has at most {_MAX_NAME_BYTES}"
    return ""


def path_below(root: str, name: str) -> str:
    """Joins a folder path and an untrusted file name; returns the path of the file.

    Args:
      root: path of the folder.
      name: untrusted file name, relative to the folder; its components are separated by slashes.

    Raises:
      UserError: the name is invalid (see `name_problem`), or the path is too long.
    """
    problem = name_problem(name)
    path = os.path.join(root, name)
    if not problem and len(path.encode()) > _MAX_PATH_BYTES:
        problem = f"its path has {len(path.encode()):,} bytes; a path has at most {_MAX_PATH_BYTES:,}"
    if problem:
        raise UserError(f"invalid file name {shortened(name)!r}: {problem}")
    return path
