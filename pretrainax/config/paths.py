"""Says what is wrong with a path that a user gives, as a flag or a field, before anything is read or made there."""

import os
import re
from typing import Optional

from absl import flags

_SCHEME = re.compile(r"([A-Za-z][\w+.-]*):/(?=/)")


def path_problem(path: str) -> str:
    """Returns why there can be no file or folder of this path; empty where there can be one."""
    if scheme := _SCHEME.match(path):
        return (
            f"{scheme[0]}/ paths are not supported yet: give a folder of this machine, or one that is mounted "
            "(NFS, gcsfuse, mount-s3)"
        )
    if "\0" in path:
        return "it holds a zero byte, which no path can"
    return "" if is_utf8(path) else "it is not UTF-8: give that file or folder another name"


def is_utf8(text: str) -> bool:
    """Tells whether a word is text: Python keeps the other bytes of a command line as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


flags.disclaim_key_flags()  # they are those of who calls `define_path`


class _PathParser(flags.ArgumentParser):
    def parse(self, argument: Optional[str]) -> Optional[str]:
        if problem := path_problem(argument or ""):
            raise ValueError(problem)
        return argument and os.path.expanduser(argument)


def define_path(name: str, default: Optional[str], help: str) -> flags.FlagHolder[Optional[str]]:
    """Defines a flag that names a file or a folder, of which ~ is the home; as `flags.DEFINE_string` does others."""
    return flags.DEFINE(_PathParser(), name, default, help)
