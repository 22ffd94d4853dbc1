"""Checks the output paths of a command before its slow work."""

import errno
import os

from pretrainax.files.errors import UserError
from pretrainax.files.paths import is_url


def output_folder(flag: str, path: str) -> str:
    """Creates an output folder and returns its path. Call it before slow work, so that a bad path fails early.

    Args:
      flag: name of the flag that sets the path, for the error message.

    Raises:
      UserError: the folder cannot be created, or nothing can be created in it.
    """
    _make_writable(path, f"--{flag}={path}")
    return path


def output_file(flag: str, path: str) -> str:
    """Creates the folder of an output file and returns its path, which may be a URL. Raises as `output_folder`."""
    if not is_url(path):
        _make_writable(os.path.dirname(path) or ".", f"--{flag}={path}")
        if os.path.isdir(path):
            raise UserError(f"--{flag}={path} is a folder, it must be a file")
    return path


def _make_writable(path: str, given: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as e:
        raise UserError(f"{given} cannot be written: {e.strerror}") from e
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"{given} cannot be written: {os.strerror(errno.EACCES)}")
